//! Carrying a sleep out: copy → unmap → *point of no return* → release.
//!
//! What has been copied is unmapped while the rest is copied. Until everything is unmapped, every handle is kept, so
//! that an undo only maps again ([`super::leaving`]). After that point nothing fails: a release that the driver refuses is
//! deferred, reported and retried. Copies ([`super::save`]) run with no lock held; the tags are locked exclusively
//! meanwhile.

mod plan;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Instant;

use self::plan::{NamedBytes, SleepPlan};
use super::leaving::Leaving;
use super::lend::Lending;
use super::peer_copies::PeerCopied;
use super::save::{Saved, Saver};
use super::stage::ReadyStep;
use crate::driver::{DeviceRange, DriverError, MemoryInfo};
use crate::pool::means::capture::refused_by_capture;
use crate::pool::means::host_reclaim::is_lacking;
use crate::pool::parts::backups::Save;
use crate::pool::parts::physical::Counters;
use crate::pool::parts::tags::Chosen;
use crate::pool::shared::{MemoryGuard, Shared};
use crate::pool::state::PoolState;
use crate::pool::tools::cancel;
use crate::pool::tools::deadline::{Deadline, Wait};
use crate::pool::tools::error::{Awaited, Phase, PoolError, Result};
use crate::pool::tools::keys::{Location, TagKey};
use crate::pool::tools::mapping::Mapping;
use crate::pool::tools::report::{Release, SleepPhases, SleepReport, SleepRequest, add};
use crate::tag::{SleepAction, Tag};

const SLEEP: &str = "sleep";
const DISCARD: &str = "discard";

/// What was to be released, what the device gave back, and what the new backups took of the same memory.
#[derive(Debug)]
struct Released {
    planned_bytes: u64,
    bytes: u64,
    shared_bytes: u64,
    is_short: bool,
    lending: Lending,
    peer_copied: PeerCopied,
}

impl Shared {
    pub(in crate::pool) fn sleep(
        &self,
        request: &SleepRequest,
        when_ready: ReadyStep<'_>,
    ) -> Result<SleepReport> {
        drop(self.open_state()?);
        self.check_no_capture(SLEEP)?;
        let named = NamedBytes::of(request)?;
        let deadline = Deadline::begin(self.driver(), request.wait_max);
        let (visited, exclusive) = self.exclusive(SLEEP, Chosen::by(request), |_| true, true, deadline)?;
        // Conflicts are found before anything happens.
        self.open_state()?.check_sleep(request.level, &visited)?;
        let mut resident = BTreeSet::new();
        let (mut refused, mut withdrawn_bytes) = (None, 0);
        if request.lends {
            match self.may_stay(request.level, &visited) {
                Ok(tags) => resident = tags,
                Err(error) => refused = Some(error),
            }
        } else {
            // What slept before, where this request wants it released.
            withdrawn_bytes = self.evict(&visited, u64::MAX)? + self.withdraw(&visited)?;
        }
        let plan = |state: &PoolState| state.plan_sleep(request.level, &visited, &named, &resident);
        let slept = self.fall_asleep(SLEEP, &plan, deadline, (request.lends, withdrawn_bytes), when_ready);
        let slept = match slept {
            Ok(report) => {
                if report.copied_bytes + report.unchanged_bytes >= self.shape().links_from_bytes {
                    self.links().open_all(self.driver().info().links, self.shared_driver());
                }
                Ok(self.after_lending(report, refused, &visited))
            }
            Err(error) => {
                // What was announced may not have come about.
                let _ = self.announce_resident();
                Err(error)
            }
        };
        drop(exclusive);
        self.give_up_left_copies();
        let undone = |error: &PoolError| {
            use PoolError::{Cancelled, SleepFailed, Stranded, Undone};
            matches!(error, SleepFailed { .. } | Stranded { .. } | Undone { .. } | Cancelled { .. })
        };
        if slept.as_ref().is_err_and(|error| undone(error) && self.may_release_backups(error)) {
            // A failure here changes nothing: the driver's cache serves the next try.
            let _ = self.backups().trim();
        }
        slept
    }

    /// What a sleep would back up.
    pub(in crate::pool) fn plan_preparation(&self, request: &SleepRequest) -> Result<(Vec<Save>, Vec<Tag>)> {
        let state = self.open_state()?;
        let visited = state.tags().selected("prepare the sleep of", Chosen::by(request))?;
        let named = NamedBytes::of(request)?;
        let plan = state.plan_sleep(request.level, &visited, &named, &BTreeSet::new())?;
        let has_saves: BTreeSet<TagKey> = plan.saves.iter().map(|save| save.tag).collect();
        let is_saved = |(tag, action): &&(TagKey, SleepAction)| {
            *action == SleepAction::Backup || has_saves.contains(tag)
        };
        let tags: Vec<TagKey> = plan.tags.iter().filter(is_saved).map(|(tag, _)| *tag).collect();
        Ok((plan.saves, state.tags().names(&tags)))
    }

    pub(in crate::pool) fn discard(&self, tags: &[Tag]) -> Result<SleepReport> {
        drop(self.open_state()?);
        self.check_no_capture(DISCARD)?;
        let forever = Deadline::begin(self.driver(), None);
        let (visited, _exclusive) = self.exclusive(DISCARD, Some(tags), |_| true, true, forever)?;
        let plan = |state: &PoolState| Ok(state.plan_discard(&visited));
        let withdrawn_bytes = self.withdraw(&visited)?;
        let none = || cancel::check(&DISCARD);
        let discarded = self.fall_asleep(DISCARD, &plan, forever, (false, withdrawn_bytes), &none);
        // A broker that does not hear of it asks in vain.
        let _ = self.announce_resident();
        self.give_up_left_copies();
        discarded
    }

    fn fall_asleep(
        &self,
        op: &'static str,
        plan: &dyn Fn(&PoolState) -> Result<SleepPlan>,
        deadline: Deadline,
        (lends, withdrawn_bytes): (bool, u64),
        when_ready: ReadyStep<'_>,
    ) -> Result<SleepReport> {
        let started = Instant::now();
        self.check_no_capture(op)?; // Again, after waiting for the tags.
        let at = |phase| move |source| PoolError::SleepFailed { phase, source };
        let late = self.wait_for_streams(deadline).map_err(at(Phase::Quiesce))?;
        if !late.is_empty() {
            let wait = Wait { deadline, op: &op, needed_bytes: 0 };
            return Err(self.timed_out(wait, Awaited::Work(late)));
        }
        self.quiesce()
            .map_err(|source| refused_by_capture(op, &source).unwrap_or(at(Phase::Quiesce)(source)))?;
        let before = self.driver().memory_info().map_err(at(Phase::Measure))?;
        let shared_before_bytes = self.shared_backup_bytes();
        let plan = self.open_state()?.begin_sleep(plan)?;
        let mut saved = Saved::default();
        let falling: Vec<TagKey> = plan.tags.iter().map(|(tag, _)| *tag).collect();
        let saver = Saver { shared: self, saves: &plan.saves, falling: &falling };
        let mut leaving = Leaving::new(self, &plan.leaving, &falling).staying(!self.peers().is_empty());
        let mut peer_copied = PeerCopied::default();
        let unmapped = match saver.save(&mut leaving, &mut saved) {
            Ok(()) => {
                peer_copied = self.copy_to_peers(&plan.backed_up(), &plan.leaving);
                leaving.finish(when_ready, &mut saved.phases)
            }
            Err(error) => Err(leaving.undo(error)),
        };
        let (mut memory, mut mappings) = match unmapped {
            Ok(unmapped) => unmapped,
            Err(error) => {
                self.release_backups(&plan, &error);
                return Err(error);
            }
        };
        self.lock_state().commit_sleep(&plan);
        let mut lending = Lending::default();
        if lends {
            (memory, lending) = self.lend(memory, &mut mappings, &plan.resident);
        }
        // A refusal leaves addresses for the next time.
        let _ = self.drop_emptied(&memory);
        self.cache_left(&mut memory);
        let planned_bytes = to_release(memory.counters(), &mappings) + withdrawn_bytes;
        let (bytes, refused) = self.release(memory, &mut mappings, &mut saved.phases);
        let bytes = bytes + withdrawn_bytes;
        let shared_bytes = self.shared_backup_bytes().saturating_sub(shared_before_bytes);
        let is_short = refused.is_some();
        let released = Released { planned_bytes, bytes, shared_bytes, is_short, lending, peer_copied };
        let report = self.report(&plan, &saved, before, released, started);
        match refused {
            Some(source) => Err(PoolError::Shortfall { report: Box::new(report), source }),
            None => Ok(report),
        }
    }

    /// Held for backups in the device's own memory.
    fn shared_backup_bytes(&self) -> u64 {
        if self.driver().info().shares_host_memory { self.backups().held_bytes() } else { 0 }
    }

    /// After a failed sleep: its new backups are useless where backups are not kept. Where host memory is short they
    /// would stop the next try, too.
    fn release_backups(&self, plan: &SleepPlan, error: &PoolError) {
        if !self.may_release_backups(error) {
            return;
        }
        let tags: Vec<TagKey> = plan.tags.iter().map(|(tag, _)| *tag).collect();
        if self.lose_spoiled(&tags).is_err() {
            return; // Backups that cannot be compared stay.
        }
        let mut state = self.lock_state();
        for save in &plan.saves {
            if state.tags().get(save.tag).state().is_held() {
                state.backups_mut().forget_extent(save.tag, save.location);
            }
        }
    }

    fn may_release_backups(&self, error: &PoolError) -> bool {
        let starved = matches!(error, PoolError::SleepFailed { source, .. } if is_lacking(source));
        starved || !self.shape().keep_backups
    }

    /// Releases the unmapped handles and all spare ones, and hands the lock over between batches.
    fn release<'a>(
        &'a self,
        mut memory: MemoryGuard<'a>,
        mappings: &mut [Mapping],
        phases: &mut SleepPhases,
    ) -> (u64, Option<DriverError>) {
        let started = Instant::now();
        let (mut released_bytes, mut refused) = memory.settle();
        let (spare_bytes, spare) = memory.release_spare(u64::MAX, &[]);
        released_bytes += spare_bytes;
        refused = refused.or(spare);
        let mut done = 0;
        while done < mappings.len() {
            let end = self.leaving_batch().end(mappings, done);
            for mapping in &mut mappings[done..end] {
                match memory.release(mapping) {
                    Ok(bytes) => released_bytes += bytes,
                    Err(error) => refused = refused.or(Some(error)),
                }
            }
            done = end;
            memory = self.hand_over_memory(memory);
        }
        // Addresses that the driver keeps are released the next time.
        let _ = self.drop_emptied(&memory);
        add(&mut phases.release_s, started.elapsed());
        (released_bytes, refused)
    }

    fn report(
        &self,
        plan: &SleepPlan,
        saved: &Saved,
        before: MemoryInfo,
        released: Released,
        started: Instant,
    ) -> SleepReport {
        // After the point of no return a failed query is no reason to fail.
        let after = self.driver().memory_info().ok();
        let process = |info: MemoryInfo| info.process;
        let fell = before
            .process
            .zip(after.and_then(process))
            .map(|(b, a)| b.used_bytes.saturating_sub(a.used_bytes));
        let confirmed = fell.is_some_and(|fell_bytes| fell_bytes >= released.bytes);
        let held_bytes = self.counters().held_bytes();
        let unaccounted_bytes = after.and_then(process).map_or(0, |process| {
            process.used_bytes.saturating_sub(process.context_bytes).saturating_sub(held_bytes)
        });
        let state = self.lock_state();
        let tags: Vec<TagKey> = plan.tags.iter().map(|(tag, _)| *tag).collect();
        SleepReport {
            level: plan.level,
            tags: state.tags().names(&tags),
            already_asleep_tags: state.tags().names(&plan.already_asleep),
            seconds: started.elapsed().as_secs_f64(),
            planned_release_bytes: released.planned_bytes,
            released_bytes: released.bytes.saturating_sub(released.shared_bytes),
            shared_backup_bytes: released.shared_bytes,
            release: match (released.is_short, confirmed) {
                (true, _) => Release::Shortfall,
                (false, true) => Release::Confirmed,
                (false, false) => Release::Ledger,
            },
            lent_bytes: released.lending.lent_bytes,
            resident_bytes: released.lending.resident_bytes,
            lend_refused: released.lending.refused.map(|error| error.to_string()),
            copied_bytes: saved.copied_bytes,
            stored_bytes: saved.stored_bytes,
            unchanged_bytes: saved.unchanged_bytes,
            unchecked_bytes: saved.unchecked_bytes,
            peer_bytes: released.peer_copied.bytes(),
            peer_refused: released.peer_copied.refused().map(str::to_owned),
            unused_bytes: plan.unused_bytes,
            fast_digests: self.driver().info().fast_digests,
            discarded_bytes: plan.discarded_bytes,
            kept_bytes: plan.kept_bytes,
            unaccounted_bytes,
            device_free_before_bytes: before.free_bytes,
            device_free_after_bytes: after.map(|info| info.free_bytes),
            phases: saved.phases,
        }
    }
}

/// What a release that begins now gives back: others may have taken or released what was spare until now.
fn to_release(counters: &Counters, mappings: &[Mapping]) -> u64 {
    let unmapped = mappings.iter().filter(|mapping| !mapping.is_absent());
    let unmapped_bytes: u64 = unmapped.map(|mapping| mapping.range.bytes).sum();
    unmapped_bytes + counters.spare_bytes() + counters.deferred_release_bytes()
}

impl PoolState {
    fn begin_sleep(&mut self, plan: &dyn Fn(&Self) -> Result<SleepPlan>) -> Result<SleepPlan> {
        let plan = plan(self)?;
        // The device has these bytes, so nothing is lost if the sleep fails.
        for (tag, segment, range) in &plan.unsaved {
            self.backups_mut().forget_granules(*tag, *segment, *range);
        }
        Ok(plan)
    }

    /// The point of no return: from here on the tags sleep.
    pub(in crate::pool) fn commit_sleep(&mut self, plan: &SleepPlan) {
        for location in &plan.leaving {
            self.heap_mut().segments_mut().set_absent(*location);
        }
        let mut kept: BTreeMap<TagKey, Vec<DeviceRange>> = BTreeMap::new();
        plan.kept.iter().for_each(|(tag, range)| kept.entry(*tag).or_default().push(*range));
        for (tag, action) in &plan.tags {
            let mut kept = kept.remove(tag).unwrap_or_default();
            kept.sort_unstable();
            self.fall_asleep(*tag, *action, kept);
            if *action == SleepAction::Drop {
                self.leave_all(*tag);
                self.leave_copies(*tag);
                let of_tag = plan.saves.iter().filter(|save| save.tag == *tag);
                let saved: HashSet<Location> = of_tag.map(|save| save.location).collect();
                self.backups_mut().forget_but(*tag, &saved);
            }
        }
        let falling = plan.tags.iter().map(|(tag, _)| *tag);
        let visited: BTreeSet<TagKey> = self.tags_of(&plan.leaving).into_iter().chain(falling).collect();
        for tag in visited {
            // Nothing is left to unmap: what stays is mapped.
            let _ = self.tidy(tag);
        }
    }
}
