//! Carrying a sleep out: copy → unmap → *point of no return* → release.
//!
//! Until everything is unmapped no handle has been given up, so going back only maps again. Behind that
//! point nothing fails any more: a release that the driver refuses is owed, reported and tried again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::Result;
use super::error::{Phase, PoolError};
use super::plan::{Save, SleepPlan};
use super::report::{Release, SleepPhases, SleepReport, add};
use super::segment::{Backing, Backup, Content, UndoLog, by_segment, runs, undo};
use super::state::State;
use crate::digest::Digest;
use crate::driver::{CopyPart, DeviceRange, DriverError, DriverErrorKind, HostBuffer, MemoryInfo, Pending};
use crate::tag::{SleepAction, Tag, TagState};

/// Copies in flight per stream: one that runs, one that waits.
const COPIES_PER_STREAM: usize = 2;

/// What the first half of a sleep did.
#[derive(Debug, Default)]
struct Saved {
    copied_bytes: u64,
    unchanged_bytes: u64,
    phases: SleepPhases,
}

/// A copy on its way into a backup.
struct Saving<'a> {
    save: &'a Save,
    digests: Vec<Option<Digest>>,
    /// Granules that the copy brings.
    fresh: Vec<usize>,
    copy: Pending<HostBuffer>,
}

impl State {
    pub(super) fn apply_sleep(&mut self, plan: &SleepPlan) -> Result<SleepReport> {
        let started = Instant::now();
        let at = |phase| move |source| PoolError::SleepFailed { phase, source };
        self.driver.synchronize().map_err(at(Phase::Quiesce))?;
        let before = self.driver.memory_info().map_err(at(Phase::Measure))?;
        let mut saved = Saved::default();
        let saving = self.save(plan, &mut saved).map_err(|(phase, source)| at(phase)(source));
        if let Err(error) = saving.and_then(|()| self.unmap(plan, &mut saved.phases)) {
            self.let_backups_go(plan, &error);
            return Err(error);
        }
        self.commit_sleep(plan);
        let (released_bytes, refused) = self.release(plan, &mut saved.phases);
        let report = self.report(plan, &saved, before, released_bytes, refused.is_some(), started);
        match refused {
            Some(source) => Err(PoolError::Shortfall { report: Box::new(report), source }),
            None => Ok(report),
        }
    }

    /// After a sleep that failed: what it had backed up already is of no use where backups are not kept, and
    /// stands in the way of the next try where the host has too little memory.
    fn let_backups_go(&mut self, plan: &SleepPlan, error: &PoolError) {
        let starved = matches!(error, PoolError::SleepFailed { source, .. }
            if matches!(source.kind, DriverErrorKind::OutOfHostMemory { .. }));
        if self.config.keep_backups && !starved {
            return;
        }
        for save in &plan.saves {
            let slot = self.segments.get_mut(save.segment).map(|segment| &mut segment.slots[save.index]);
            if let Some(slot) = slot.filter(|slot| slot.content == Content::Device) {
                slot.backup = None;
            }
        }
    }

    /// Brings every backup of the plan up to date.
    fn save(&mut self, plan: &SleepPlan, saved: &mut Saved) -> Result<(), (Phase, DriverError)> {
        let started = Instant::now();
        let unchanged = self.unchanged(&plan.saves).map_err(|source| (Phase::Compare, source))?;
        add(&mut saved.phases.digest_s, started.elapsed());
        let (started, before_s) = (Instant::now(), saved.phases.digest_s);
        let mut flying: VecDeque<Saving<'_>> = VecDeque::new();
        let copied = self.copy_changed(plan, unchanged, &mut flying, saved);
        // After a failure nothing stays in flight: it would hold host memory that the next try may need.
        let left: Vec<DriverError> =
            flying.into_iter().filter_map(|saving| saving.copy.wait().err()).collect();
        // Starting a copy and waiting for one alternate with digests of what has arrived.
        saved.phases.copy_s = started.elapsed().as_secs_f64() - (saved.phases.digest_s - before_s);
        copied.and(left.into_iter().next().map_or(Ok(()), |source| Err((Phase::Copy, source))))
    }

    fn copy_changed<'a>(
        &mut self,
        plan: &'a SleepPlan,
        unchanged: Vec<Vec<usize>>,
        flying: &mut VecDeque<Saving<'a>>,
        saved: &mut Saved,
    ) -> Result<(), (Phase, DriverError)> {
        for (turn, (save, unchanged)) in plan.saves.iter().zip(unchanged).enumerate() {
            if flying.len() >= COPIES_PER_STREAM * self.streams.len() {
                self.store_next(flying, saved)?;
            }
            let mut kept = save.granules.len();
            if unchanged.len() < kept {
                let copy = self.start_copy(save, &unchanged, turn);
                let copy = copy.map_err(|source| (Phase::Copy, source))?;
                kept -= copy.fresh.len();
                flying.push_back(copy);
            }
            saved.unchanged_bytes += kept as u64 * self.granule_bytes;
        }
        while !flying.is_empty() {
            self.store_next(flying, saved)?;
        }
        Ok(())
    }

    /// For each save, the granules whose backup is the same as the device.
    fn unchanged(&self, saves: &[Save]) -> Result<Vec<Vec<usize>>, DriverError> {
        let mut asked = Vec::new();
        for (turn, save) in saves.iter().enumerate() {
            let kept: Vec<usize> =
                save.granules.iter().copied().filter(|g| self.stored(save, *g).is_some()).collect();
            for run in runs(&kept) {
                let range = self.granule_range(save, run.start, run.len());
                asked.push((turn, run, self.driver.digest(self.stream(turn), range)?));
            }
        }
        let mut unchanged = vec![Vec::new(); saves.len()];
        for (turn, run, digests) in asked {
            let same =
                run.zip(digests.wait()?).filter(|(g, found)| self.stored(&saves[turn], *g) == Some(*found));
            unchanged[turn].extend(same.map(|(granule, _)| granule));
        }
        Ok(unchanged)
    }

    /// The digest of what is stored of a granule.
    fn stored(&self, save: &Save, granule: usize) -> Option<Digest> {
        self.segments.get(save.segment)?.slots[save.index].backup.as_ref()?.digests[granule]
    }

    /// Starts the copy of what has changed. The backup is in the copy's hands until [`State::store_next`].
    fn start_copy<'a>(
        &mut self,
        save: &'a Save,
        unchanged: &[usize],
        turn: usize,
    ) -> Result<Saving<'a>, DriverError> {
        let slot_bytes = self.segments.get(save.segment).map_or(0, |segment| segment.slots[save.index].bytes);
        let kept =
            self.segments.get_mut(save.segment).and_then(|segment| segment.slots[save.index].backup.take());
        let kept = kept.and_then(|backup| Some((Arc::try_unwrap(backup.buffer).ok()?, backup.digests)));
        let (buffer, digests) = match kept {
            Some(kept) => kept,
            None => (self.driver.host_alloc(slot_bytes)?, Vec::new()),
        };
        // A buffer that could not be reused keeps nothing of what was unchanged.
        let keeps = |granule: &usize| !digests.is_empty() && unchanged.contains(granule);
        let fresh: Vec<usize> = save.granules.iter().copied().filter(|g| !keeps(g)).collect();
        let mut kept_digests = vec![None; self.granules(slot_bytes)];
        save.granules.iter().filter(|g| keeps(g)).for_each(|g| kept_digests[*g] = digests[*g]);
        let parts: Vec<CopyPart> = runs(&fresh)
            .into_iter()
            .map(|run| CopyPart {
                device: self.granule_range(save, run.start, run.len()),
                host_offset: run.start as u64 * self.granule_bytes,
            })
            .collect();
        let copy = self.driver.copy_to_host(self.stream(turn), buffer, &parts)?;
        Ok(Saving { save, digests: kept_digests, fresh, copy })
    }

    /// Waits for the oldest copy and stores it, with digests of the stored bytes.
    fn store_next(
        &mut self,
        flying: &mut VecDeque<Saving<'_>>,
        saved: &mut Saved,
    ) -> Result<(), (Phase, DriverError)> {
        let Some(Saving { save, mut digests, fresh, copy }) = flying.pop_front() else { return Ok(()) };
        let buffer = copy.wait().map_err(|source| (Phase::Copy, source))?;
        let copied = Instant::now();
        let granule_bytes = buffer.len() / digests.len().max(1);
        for granule in &fresh {
            let start = granule * granule_bytes;
            digests[*granule] = Some(Digest::of(&buffer[start..start + granule_bytes]));
        }
        add(&mut saved.phases.digest_s, copied.elapsed());
        saved.copied_bytes += fresh.len() as u64 * self.granule_bytes;
        if let Some(segment) = self.segments.get_mut(save.segment) {
            segment.slots[save.index].backup = Some(Backup { buffer: Arc::new(buffer), digests });
        }
        Ok(())
    }

    /// Unmaps all that leaves, or nothing.
    fn unmap(&mut self, plan: &SleepPlan, phases: &mut SleepPhases) -> Result<()> {
        let started = Instant::now();
        let mut log = UndoLog::new();
        for (key, slots) in by_segment(&plan.leaving) {
            let Some(segment) = self.segments.get_mut(key) else { continue };
            if let Err(source) = segment.take_out(key, &slots, &*self.driver, &mut log) {
                let undone = undo(&mut self.segments, log, &*self.driver, &mut self.ledger);
                return Err(self.sleep_failed(plan, source, undone));
            }
        }
        add(&mut phases.unmap_s, started.elapsed());
        Ok(())
    }

    fn sleep_failed(
        &mut self,
        plan: &SleepPlan,
        source: DriverError,
        undone: Option<DriverError>,
    ) -> PoolError {
        let phase = Phase::Unmap;
        let Some(undo) = undone else { return PoolError::SleepFailed { phase, source } };
        // A discard may concern tags that slept before: those go on sleeping, whatever of them is mapped.
        let held = |tag: &&Tag| self.tags.get(tag).is_some_and(|entry| entry.state.is_held());
        let stranded: Vec<Tag> = plan
            .tags
            .iter()
            .map(|(tag, _)| tag)
            .filter(held)
            .filter(|tag| !self.is_whole(tag))
            .cloned()
            .collect();
        if stranded.is_empty() {
            return PoolError::SleepFailed { phase, source };
        }
        for tag in &stranded {
            let entry = self.tag_entry(tag);
            entry.undefined |= entry.state == TagState::Undefined;
            entry.state = TagState::Stranded;
        }
        let tags: Vec<&str> = stranded.iter().map(Tag::as_str).collect();
        PoolError::Stranded { phase, tags: tags.join(", "), source: source.into(), undo: undo.into() }
    }

    /// Whether every slot of a tag that a live block touches is mapped and open.
    fn is_whole(&self, tag: &Tag) -> bool {
        let open = |backing| matches!(backing, Backing::Mapped { open: true, .. });
        let mut slots = self.segments.values().filter(|segment| segment.tag == *tag).flat_map(|s| &s.slots);
        slots.all(|slot| slot.live_blocks == 0 || open(slot.backing))
    }

    /// The point of no return: from here on the tags sleep.
    fn commit_sleep(&mut self, plan: &SleepPlan) {
        for (tag, action) in &plan.tags {
            let (state, content) = match action {
                SleepAction::Backup => (TagState::AsleepBackedUp, Content::Backup),
                SleepAction::Drop => (TagState::AsleepDropped, Content::Dropped),
            };
            let entry = self.tag_entry(tag);
            entry.state = state;
            entry.undefined = false;
            let slots =
                self.segments.values_mut().filter(|segment| segment.tag == *tag).flat_map(|s| &mut s.slots);
            for slot in slots.filter(|slot| slot.live_blocks > 0) {
                slot.content = content;
                if content == Content::Dropped {
                    slot.backup = None;
                }
            }
        }
    }

    fn release(&mut self, plan: &SleepPlan, phases: &mut SleepPhases) -> (u64, Option<DriverError>) {
        let started = Instant::now();
        let (mut released_bytes, mut refused) = self.ledger.settle();
        for (key, index) in &plan.leaving {
            let Some(segment) = self.segments.get_mut(*key) else { continue };
            match segment.let_go(*index, &mut self.ledger) {
                Ok(bytes) => released_bytes += bytes,
                Err(error) => refused = refused.or(Some(error)),
            }
        }
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
        let uncovered_bytes = after.and_then(process).map_or(0, |process| {
            process.used_bytes.saturating_sub(process.context_bytes).saturating_sub(self.ledger.held_bytes())
        });
        SleepReport {
            level: plan.level,
            tags: plan.tags.iter().map(|(tag, _)| tag.clone()).collect(),
            already_asleep_tags: plan.already_asleep.clone(),
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
            discarded_bytes: plan.discarded_bytes,
            uncovered_bytes,
            device_free_before_bytes: before.free_bytes,
            device_free_after_bytes: after.map(|info| info.free_bytes),
            phases: saved.phases,
        }
    }

    fn granule_range(&self, save: &Save, first: usize, count: usize) -> DeviceRange {
        let base = self.segments.get(save.segment).map_or(0, |segment| segment.slot_range(save.index).addr);
        DeviceRange::new(base + first as u64 * self.granule_bytes, count as u64 * self.granule_bytes)
    }
}
