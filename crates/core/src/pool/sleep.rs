//! Carrying a sleep out: copy → unmap → *point of no return* → release.
//!
//! Until everything is unmapped no handle has been given up, so going back only maps again. Behind that
//! point nothing fails any more: a release that the driver refuses is owed, reported and tried again.
//! Copies ([`super::save`]) run with no lock held; the tags' gates are closed meanwhile.

use std::collections::BTreeSet;
use std::time::Instant;

use super::capture::refused_by_capture;
use super::error::{Phase, PoolError};
use super::plan::SleepPlan;
use super::report::{Release, SleepPhases, SleepReport, SleepRequest, add};
use super::save::{Saved, is_lacking};
use super::segment::Place;
use super::state::{State, TagKey};
use super::vm::{Backing, Piece, Vm};
use super::{Result, Shared, VmGuard};
use crate::driver::{DriverError, MemoryInfo};
use crate::tag::{SleepAction, Tag, TagState};

const SLEEP: &str = "sleep";
const DISCARD: &str = "discard";

/// Tags that nobody else may work on, until this is dropped.
#[derive(Debug)]
pub(super) struct Alone<'a> {
    shared: &'a Shared,
    tags: Vec<TagKey>,
}

impl Alone<'_> {
    pub(super) fn tags(&self) -> &[TagKey] {
        &self.tags
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.shared.settle_after_panic();
        let mut state = self.shared.state.lock_anyway();
        for tag in &self.tags {
            let entry = state.tag_mut(*tag);
            entry.gate.open();
            entry.falling_asleep = false;
            state.tidy_absent(*tag);
        }
        self.shared.had_again(state);
    }
}

impl Shared {
    pub(super) fn sleep(&self, request: &SleepRequest) -> Result<SleepReport> {
        drop(self.open_state()?);
        self.check_no_capture(SLEEP)?;
        let (visited, alone) = self.alone(SLEEP, request.tags.as_deref(), |_| true, true)?;
        let slept =
            self.fall_asleep(SLEEP, &|state| state.plan_sleep(request.level, &visited, &self.counters));
        drop(alone);
        let undone =
            |error: &PoolError| matches!(error, PoolError::SleepFailed { .. } | PoolError::Stranded { .. });
        if slept.as_ref().is_err_and(|error| undone(error) && self.lets_backups_go(error)) {
            // Already failing; what the driver keeps of their memory serves the next try.
            let _ = self.backups.trim();
        }
        slept
    }

    pub(super) fn discard(&self, tags: &[Tag]) -> Result<SleepReport> {
        drop(self.open_state()?);
        self.check_no_capture(DISCARD)?;
        let (visited, _alone) = self.alone(DISCARD, Some(tags), |_| true, true)?;
        self.fall_asleep(DISCARD, &|state| Ok(state.plan_discard(&visited, &self.counters)))
    }

    /// Closes the gates of those of `tags`, or of all, that satisfy `wanted`, when nobody else is inside. Returns
    /// all that are meant, and holds those.
    pub(super) fn alone(
        &self,
        op: &'static str,
        tags: Option<&[Tag]>,
        wanted: impl Fn(TagState) -> bool,
        falling_asleep: bool,
    ) -> Result<(Vec<TagKey>, Alone<'_>)> {
        let mut state = self.open_state()?;
        loop {
            let visited = state.selected(op, tags)?;
            let held: Vec<TagKey> =
                visited.iter().copied().filter(|tag| wanted(state.tag(*tag).state)).collect();
            let busy = visited.iter().any(|tag| state.tag(*tag).gate.is_closed());
            if !busy && held.iter().all(|tag| state.tag(*tag).gate.is_empty()) {
                for tag in &held {
                    let entry = state.tag_mut(*tag);
                    entry.gate.close();
                    entry.falling_asleep = falling_asleep;
                }
                return Ok((visited, Alone { shared: self, tags: held }));
            }
            // Who prepares a sleep in the background makes way.
            held.iter().for_each(|tag| state.tag_mut(*tag).wanted += 1);
            let waited = self.state.wait(state).ok_or(PoolError::Poisoned);
            state = waited?;
            held.iter().for_each(|tag| state.tag_mut(*tag).wanted -= 1);
            if state.closed {
                return Err(PoolError::Closed);
            }
        }
    }

    fn fall_asleep(
        &self,
        op: &'static str,
        plan: &dyn Fn(&State) -> Result<SleepPlan>,
    ) -> Result<SleepReport> {
        let started = Instant::now();
        plan(&*self.open_state()?)?; // What cannot be is refused before anything happens.
        self.check_no_capture(op)?; // Again: others may have been waited for.
        let at = |phase| move |source| PoolError::SleepFailed { phase, source };
        self.quiesce()
            .map_err(|source| refused_by_capture(op, &source).unwrap_or(at(Phase::Quiesce)(source)))?;
        let before = self.driver.memory_info().map_err(at(Phase::Measure))?;
        let plan = plan(&*self.open_state()?)?;
        let mut saved = Saved::default();
        let unmapped = self.save(&plan, &mut saved).and_then(|()| self.unmap(&plan, &mut saved.phases));
        let (mut vm, mut pieces) = match unmapped {
            Ok(unmapped) => unmapped,
            Err(error) => {
                self.let_backups_go(&plan, &error);
                return Err(error);
            }
        };
        self.state.lock_anyway().commit_sleep(&plan);
        let (released_bytes, refused) = self.release(&mut vm, &mut pieces, &mut saved.phases);
        drop(vm);
        let report = self.report(&plan, &saved, before, released_bytes, refused.is_some(), started);
        match refused {
            Some(source) => Err(PoolError::Shortfall { report: Box::new(report), source }),
            None => Ok(report),
        }
    }

    /// After a sleep that failed: what it had backed up already is of no use where backups are not kept, and
    /// stands in the way of the next try where the host has too little memory.
    fn let_backups_go(&self, plan: &SleepPlan, error: &PoolError) {
        if !self.lets_backups_go(error) {
            return;
        }
        let tags: Vec<TagKey> = plan.tags.iter().map(|(tag, _)| *tag).collect();
        if self.lose_spoiled(&tags).is_err() {
            return; // What cannot be looked at stays.
        }
        let mut state = self.state.lock_anyway();
        for save in &plan.saves {
            let tag = state.segments.get(save.place.0).map(|segment| segment.tag);
            let held = tag.is_some_and(|tag| state.tag(tag).state.is_held());
            if held {
                state.forget_backup(save.place);
            }
        }
    }

    fn lets_backups_go(&self, error: &PoolError) -> bool {
        let starved = matches!(error, PoolError::SleepFailed { source, .. } if is_lacking(source));
        starved || !self.shape.keep_backups
    }

    /// Unmaps all that leaves, or nothing. Returns what is in hand then.
    fn unmap(&self, plan: &SleepPlan, phases: &mut SleepPhases) -> Result<(VmGuard<'_>, Vec<Piece>)> {
        let started = Instant::now();
        let mut vm = self.lock_vm()?;
        let mut pieces: Vec<Piece> = {
            let state = self.state.lock_anyway();
            plan.leaving.iter().filter_map(|place| state.piece(*place)).collect()
        };
        let before: Vec<Backing> = pieces.iter().map(|piece| piece.backing).collect();
        let unmapped = vm.take_out(&mut pieces);
        if let Err(source) = unmapped {
            let undone = vm.restore(&mut pieces, &before);
            let mut state = self.state.lock_anyway();
            state.store(&pieces);
            let error = state.sleep_failed(plan, source, undone);
            let unfit = state.tidy_held(&plan.leaving);
            drop(state);
            // What is idle and could not be mapped again must not be found by who allocates.
            let _ = self.dispose(&mut vm, unfit);
            return Err(error);
        }
        self.state.lock_anyway().store(&pieces);
        add(&mut phases.unmap_s, started.elapsed());
        Ok((vm, pieces))
    }

    fn release(
        &self,
        vm: &mut Vm,
        pieces: &mut [Piece],
        phases: &mut SleepPhases,
    ) -> (u64, Option<DriverError>) {
        let started = Instant::now();
        let (mut released_bytes, mut refused) = vm.settle();
        let (loose_bytes, loose) = vm.let_go_of_loose(u64::MAX, &[]);
        released_bytes += loose_bytes;
        refused = refused.or(loose);
        for piece in pieces {
            match vm.let_go(piece) {
                Ok(bytes) => released_bytes += bytes,
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        // Addresses that could not be given back wait for the next time.
        let _ = self.drop_emptied(vm);
        add(&mut phases.release_s, started.elapsed());
        (released_bytes, refused)
    }

    fn report(
        &self,
        plan: &SleepPlan,
        saved: &Saved,
        before: MemoryInfo,
        released_bytes: u64,
        short: bool,
        started: Instant,
    ) -> SleepReport {
        // Behind the point of no return a device that does not answer is no reason to fail.
        let after = self.driver.memory_info().ok();
        let process = |info: MemoryInfo| info.process;
        let fell = before
            .process
            .zip(after.and_then(process))
            .map(|(b, a)| b.used_bytes.saturating_sub(a.used_bytes));
        let confirmed = fell.is_some_and(|fell_bytes| fell_bytes >= released_bytes);
        let held_bytes = self.counters.held_bytes();
        let uncovered_bytes = after.and_then(process).map_or(0, |process| {
            process.used_bytes.saturating_sub(process.context_bytes).saturating_sub(held_bytes)
        });
        let state = self.state.lock_anyway();
        let tags: Vec<TagKey> = plan.tags.iter().map(|(tag, _)| *tag).collect();
        SleepReport {
            level: plan.level,
            tags: state.names(&tags),
            already_asleep_tags: state.names(&plan.already_asleep),
            seconds: started.elapsed().as_secs_f64(),
            planned_release_bytes: plan.release_bytes,
            released_bytes,
            release: match (short, confirmed) {
                (true, _) => Release::Shortfall,
                (false, true) => Release::Confirmed,
                (false, false) => Release::Ledger,
            },
            copied_bytes: saved.copied_bytes,
            unchanged_bytes: saved.unchanged_bytes,
            trusted_bytes: saved.trusted_bytes,
            fast_digests: self.driver.info().fast_digests,
            discarded_bytes: plan.discarded_bytes,
            uncovered_bytes,
            device_free_before_bytes: before.free_bytes,
            device_free_after_bytes: after.map(|info| info.free_bytes),
            phases: saved.phases,
        }
    }
}

impl State {
    fn sleep_failed(
        &mut self,
        plan: &SleepPlan,
        source: DriverError,
        undone: Option<DriverError>,
    ) -> PoolError {
        let phase = Phase::Unmap;
        let Some(undo) = undone else { return PoolError::SleepFailed { phase, source } };
        // A discard may concern tags that slept before: those go on sleeping, whatever of them is mapped.
        let tags = plan.tags.iter().map(|(tag, _)| *tag);
        let stranded: Vec<TagKey> =
            tags.filter(|tag| self.tag(*tag).state.is_held() && !self.is_whole(*tag)).collect();
        if stranded.is_empty() {
            return PoolError::SleepFailed { phase, source };
        }
        for tag in &stranded {
            let entry = self.tag_mut(*tag);
            entry.undefined |= entry.state == TagState::Undefined;
            entry.state = TagState::Stranded;
        }
        let names = self.names(&stranded);
        let names: Vec<&str> = names.iter().map(Tag::as_str).collect();
        PoolError::Stranded { phase, tags: names.join(", "), source: source.into(), undo: undo.into() }
    }

    /// Whether every chunk of a tag that somebody may be using is mapped and open.
    fn is_whole(&self, tag: TagKey) -> bool {
        let open = |backing| matches!(backing, Backing::Mapped { open: true, .. });
        self.segments.values().filter(|segment| segment.tag == tag).all(|segment| {
            let touched = self.touched_chunks(segment);
            segment.chunks.iter().all(|(at, chunk)| open(chunk.backing) || !touched.contains(at))
        })
    }

    /// The point of no return: from here on the tags sleep, and the memory of what leaves is in hand.
    fn commit_sleep(&mut self, plan: &SleepPlan) {
        for place in &plan.leaving {
            if let Some(chunk) = self.chunk_mut(*place) {
                chunk.backing = Backing::Absent;
            }
        }
        for (tag, action) in &plan.tags {
            let entry = self.tag_mut(*tag);
            entry.state = match action {
                SleepAction::Backup => TagState::AsleepBackedUp,
                SleepAction::Drop => TagState::AsleepDropped,
            };
            entry.undefined = false;
            entry.has_leftovers = false;
            if *action == SleepAction::Drop {
                self.undefined.clear_tag(*tag);
                self.forget_backups(*tag);
            }
        }
        let mut visited: Vec<TagKey> = plan
            .leaving
            .iter()
            .filter_map(|(segment, _)| self.segments.get(*segment))
            .map(|segment| segment.tag)
            .chain(plan.tags.iter().map(|(tag, _)| *tag))
            .collect();
        visited.sort_unstable();
        visited.dedup();
        for tag in visited {
            // What has left is not here any more, and what has not is mapped.
            let _ = self.tidy(tag);
        }
    }

    /// Tidies the tags of `places` that are awake, where an undo may have left idle memory unmapped.
    fn tidy_held(&mut self, places: &[Place]) -> Vec<Piece> {
        let segments = places.iter().filter_map(|(segment, _)| self.segments.get(*segment));
        let tags: BTreeSet<TagKey> = segments.map(|segment| segment.tag).collect();
        let awake: Vec<TagKey> = tags.into_iter().filter(|tag| !self.tag(*tag).state.is_asleep()).collect();
        awake.into_iter().flat_map(|tag| self.tidy(tag)).collect()
    }
}
