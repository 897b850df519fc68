//! Waking: create → map → copy → verify → commit.
//!
//! Everything is mapped, filled and verified, or everything sleeps again with its backups. Backups are
//! released after the commit, unless the pool keeps them. The tags are locked exclusively meanwhile.
//!
//! A wake with a deadline may find the device full: it undoes what it did, holds nothing, and retries when
//! enough is free. A device that has enough and refuses it twice has it in fragments: large mappings become
//! chunks then.

mod copy_paths;
mod fill;
mod filling;
mod map;
mod plan;
mod read_ahead;
mod scratch;
mod verify;
mod windows;
mod woken;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use self::fill::{Filler, Means};
use self::filling::Filling;
use self::map::Mapper;
use self::plan::WakePlan;
use self::verify::Verified;
use self::woken::Woken;
use super::stage::ReadyStep;
use crate::pool::means::pressure::{Next, Retry};
use crate::pool::shared::Shared;
use crate::pool::tools::cancel;
use crate::pool::tools::deadline::Deadline;
use crate::pool::tools::error::{Corruption, PoolError, Result};
use crate::pool::tools::keys::TagKey;
use crate::pool::tools::loss_ranges::LostRange;
use crate::pool::tools::mapping::Backing;
use crate::pool::tools::report::{WakeReport, WakeRequest, add};
use crate::tag::{Tag, TagState};

const WAKE: &str = "wake";

/// Pauses between two polls of a full device.
const PAUSE_MIN: Duration = Duration::from_micros(200);
const PAUSE_MAX: Duration = Duration::from_millis(5);

/// Between two asks for what others lend.
const ASK_PAUSE: Duration = Duration::from_millis(100);

impl Shared {
    pub(in crate::pool) fn wake(
        &self,
        request: &WakeRequest,
        when_ready: ReadyStep<'_>,
    ) -> Result<WakeReport> {
        let started = Instant::now();
        // Awake tags go on working, and their free memory may serve those that wake.
        let deadline = Deadline::begin(self.driver(), request.wait_max);
        let (visited, exclusive) =
            self.exclusive(WAKE, request.tags.as_deref(), TagState::is_asleep, false, deadline)?;
        let resident_bytes = self.bring_back(exclusive.tags())?;
        {
            // With this lock no other thread holds mappings of these tags, to be restored later.
            let _vm = self.lock_memory()?;
            self.open_state()?.heap_mut().lay_out(exclusive.tags(), self.shape().span_bytes);
        }
        let woken = self.wake_in_attempts(&visited, exclusive.tags(), request, deadline, when_ready);
        let (plan, woken, verified) = woken.inspect_err(|_| self.lend_again(exclusive.tags()))?;
        let (undefined_tags, lost) = self.commit_wake(&plan, &verified);
        // The next sleep must find the backups unshared.
        drop(plan.fillings);
        let report = WakeReport {
            tags: plan.names,
            already_awake_tags: plan.already_awake,
            seconds: started.elapsed().as_secs_f64(),
            mapped_bytes: woken.mapped_bytes,
            returned_bytes: woken.returned_bytes + resident_bytes,
            copied_bytes: woken.copied_bytes,
            read_bytes: woken.read_bytes,
            disk_read_bytes: woken.disk_read_bytes,
            linked_bytes: woken.linked_bytes,
            peer_bytes: woken.peer_bytes,
            zeroed_bytes: woken.zeroed_bytes,
            verified_bytes: verified.equal_bytes,
            undefined_tags,
            lost,
            phases: woken.phases,
        };
        drop(exclusive);
        // A broker that does not hear of it asks in vain.
        let _ = self.announce_resident();
        self.leave_free();
        self.make_host_memory_ahead();
        if !self.shape().keep_backups && report.copied_bytes > 0 {
            // The wake has succeeded, even where trimming fails.
            let _ = self.backups().trim();
        }
        Ok(report)
    }

    fn wake_in_attempts(
        &self,
        visited: &[TagKey],
        held: &[TagKey],
        request: &WakeRequest,
        deadline: Deadline,
        when_ready: ReadyStep<'_>,
    ) -> Result<(WakePlan, Woken, Verified)> {
        let (mut waited, mut retry) = (Duration::ZERO, Retry::default());
        loop {
            let mut plan = self.open_state()?.plan_wake(visited, held, request.tags.is_some());
            let (woken, next) = self.try_wake(&mut plan, request, deadline, &mut retry, when_ready);
            match woken {
                Ok((mut woken, verified)) => {
                    add(&mut woken.phases.wait_s, waited);
                    return Ok((plan, woken, verified));
                }
                Err(error) => waited += self.before_another(error, next, &plan.tags, deadline)?,
            }
        }
    }

    /// Maps and fills the plan, or undoes it and returns what to do about a full device.
    fn try_wake(
        &self,
        plan: &mut WakePlan,
        request: &WakeRequest,
        deadline: Deadline,
        retry: &mut Retry,
        when_ready: ReadyStep<'_>,
    ) -> (Result<(Woken, Verified)>, Next) {
        let before: Vec<Backing> = plan.mappings.iter().map(|mapping| mapping.backing).collect();
        let (mut woken, mut next) = (Woken::default(), Next::Refuse);
        let copies = self.open_copies(&plan.tags);
        let is_copied = |filling: &Filling| filling.is_at_peers(&copies, self.shape().granule_bytes);
        let is_needed = !plan.fillings.iter().all(is_copied);
        let scratch = if is_needed { self.borrow_scratch(plan) } else { None };
        let links = if is_needed { self.links_for(plan, scratch.is_some()) } else { Vec::new() };
        // A panic in the caller's progress callback undoes the wake, too.
        let apply = AssertUnwindSafe(|| {
            let names: Vec<&str> = plan.names.iter().map(Tag::as_str).collect();
            let mut mapper = Mapper::new(self, &names, &mut plan.mappings, deadline, retry);
            let means = Means { scratch: scratch.as_ref(), links, peers: &copies };
            let filler = Filler::new(self, &plan.fillings, request, &plan.turns, means);
            let applied = self.apply_wake(&mut mapper, filler, request, &mut woken);
            next = mapper.next();
            if applied.is_ok() {
                // A decision may take long.
                self.close_copies(copies.clone());
            }
            applied.and_then(|verified| when_ready().map(|()| verified))
        });
        let applied = catch_unwind(apply);
        // After a success nothing is in flight.
        let is_settled = matches!(applied, Ok(Ok(_))) || self.undo_wake(plan, &before);
        self.return_scratch(scratch, is_settled);
        self.close_copies(copies);
        let applied = applied.unwrap_or_else(|panic| resume_unwind(panic));
        (applied.map(|verified| (woken, verified)), next)
    }

    /// Numbers of the links of other devices that the plan can use. None where codes would not pass through scratch memory, or
    /// where a disk is what takes the time.
    fn links_for(&self, plan: &WakePlan, has_scratch: bool) -> Vec<usize> {
        let is_without =
            |filling: &Filling| filling.is_on_disk() || (filling.code_bytes().is_some() && !has_scratch);
        let mut usable = self.links().usable();
        if plan.fillings.iter().any(is_without) {
            usable.clear();
        }
        if has_scratch {
            // Each path has scratch memory of its own: the own one half of it.
            usable.truncate(self.scratch_parts() / 2);
        }
        usable
    }

    /// After a wake that a full device refused and that is undone: lays it out in chunks, or waits until
    /// enough is free. Returns the time waited, or the refusal when no other attempt can succeed.
    fn before_another(
        &self,
        error: PoolError,
        next: Next,
        tags: &[TagKey],
        deadline: Deadline,
    ) -> Result<Duration> {
        let PoolError::DeviceFull { op, shortage, source, .. } = error else { return Err(error) };
        if next == Next::InChunks {
            let mut state = self.lock_state();
            state.heap_mut().lay_out(tags, self.shape().chunk_bytes);
            tags.iter().for_each(|tag| state.tidy_absent(*tag));
            return Ok(Duration::ZERO);
        }
        let full = self.device_full(op, shortage.needed_bytes, *source);
        let began = Instant::now();
        // Held by this wake, it could not serve another that waits.
        self.lend_again(tags);
        let is_there = self.wait_for_memory(shortage.needed_bytes, deadline);
        self.bring_back(tags)?;
        let is_there = is_there?;
        is_there.then(|| began.elapsed()).ok_or(full)
    }

    /// Whether the device has `needed_bytes` free by the deadline; false at once where there is none.
    fn wait_for_memory(&self, needed_bytes: u64, deadline: Deadline) -> Result<bool> {
        if deadline.is_never() {
            return Ok(false);
        }
        let mut asked = Instant::now();
        // Two processes that wait for the same memory poll at different times.
        let mut pause = PAUSE_MIN + Duration::from_micros(u64::from(std::process::id()) % 97);
        loop {
            let Some(rest) = deadline.left(self.driver(), pause) else {
                return cancel::check(&WAKE).map(|()| false);
            };
            thread::sleep(rest);
            pause = (pause * 3 / 2).min(PAUSE_MAX);
            // A closed pool ends the wait.
            drop(self.open_state()?);
            let at = |source| PoolError::Driver { op: "wait for memory of the device", source };
            let obtainable_bytes = self.obtainable_bytes().map_err(at)?;
            if obtainable_bytes >= needed_bytes {
                return Ok(true);
            }
            if asked.elapsed() > ASK_PAUSE {
                // What has been lent meanwhile counts as used.
                self.ask(needed_bytes - obtainable_bytes, deadline);
                asked = Instant::now();
            }
        }
    }

    /// Waits for the copies in flight, then unmaps. If the device refuses either, memory stays mapped: the next wake uses
    /// it, or an allocation reclaims it. Returns whether nothing is in flight.
    fn undo_wake(&self, plan: &mut WakePlan, before: &[Backing]) -> bool {
        let is_settled = self.settle_own_streams().is_ok();
        if is_settled && let Ok(mut memory) = self.lock_memory() {
            memory.restore(&mut plan.mappings, before);
        }
        let left = plan.mappings.iter().zip(before).any(|(mapping, before)| mapping.backing != *before);
        let mut state = self.lock_state();
        state.heap_mut().segments_mut().store(&plan.mappings);
        if left {
            state.tags_mut().note_leftovers(&plan.tags);
        }
        is_settled
    }

    fn apply_wake(
        &self,
        mapper: &mut Mapper<'_>,
        mut filler: Filler<'_>,
        request: &WakeRequest,
        woken: &mut Woken,
    ) -> Result<Verified> {
        let beside = if mapper.takes_a_while() && !filler.is_empty() {
            map_and_fill(mapper, &mut filler)
        } else {
            None
        };
        // After mapping, with no lock held: a slow storage must not delay allocations.
        let mapped = beside.unwrap_or_else(|| {
            mapper.map(&mut |_| true)?;
            filler.fill_up_to(mapper.mappings())
        });
        mapper.report(woken);
        let mapped = mapped.and_then(|()| cancel::check(&WAKE));
        let verified = filler.finish(mapped.err(), woken)?;
        let lost = self.lock_state().lost_in(verified.spoiled.iter().copied());
        if lost.is_empty() || request.accepts_losses {
            return Ok(verified);
        }
        Err(PoolError::Corrupt { location: Corruption::Backup, lost })
    }

    /// From here on the tags are awake. Returns the undefined ones.
    fn commit_wake(&self, plan: &WakePlan, verified: &Verified) -> (Vec<Tag>, Vec<LostRange>) {
        // Also after a panic elsewhere, since the state must know what is mapped.
        let mut memory = self.lock_memory_anyway();
        let mut state = self.lock_state();
        state.heap_mut().segments_mut().store(&plan.mappings);
        let kept: HashSet<TagKey> = plan.tags.iter().copied().filter(|tag| state.serves_on(*tag)).collect();
        state.forget_lent(&plan.tags);
        plan.tags.iter().for_each(|tag| state.wake(*tag));
        state.note_seen(plan.fillings.iter().flat_map(|filling| filling.stored(self.shape().granule_bytes)));
        state.note_unseen(verified.unseen.iter().copied());
        let lost = state.lose(&verified.spoiled);
        let mut unfit = Vec::new();
        for tag in plan.tags.iter().copied() {
            // The device's bytes of a stranded tag may never have been compared.
            if !kept.contains(&tag) && !state.backups().has_unseen(tag) {
                state.backups_mut().forget(tag);
            }
            unfit.extend(state.tidy(tag));
        }
        let is_undefined = |tag: &TagKey| state.tags().get(*tag).state() == TagState::Undefined;
        let undefined: Vec<TagKey> = plan.tags.iter().copied().filter(is_undefined).collect();
        let undefined = state.tags().names(&undefined);
        drop(state);
        // What cannot be unmapped now is retried when memory is needed.
        let _ = self.dispose(&mut memory, unfit);
        (undefined, lost)
    }
}

/// Maps on this thread, and fills on another. `None` where no thread can be started.
fn map_and_fill(mapper: &mut Mapper<'_>, filler: &mut Filler<'_>) -> Option<Result<()>> {
    thread::scope(|scope| {
        let (mapped_count, counts) = mpsc::channel();
        let switch = filler.switch();
        let fill = move || counts.into_iter().try_for_each(|done| filler.fill_up_to(done));
        let filling = thread::Builder::new().name("poorwill-fill".into()).spawn_scoped(scope, fill).ok()?;
        // Only now: without a thread, filling is still needed.
        let mut needless = Needless { filling: switch, is_needed: false };
        // The channel is closed when filling has failed.
        let mapped = mapper.map(&mut |done| mapped_count.send(done).is_ok());
        needless.is_needed = mapped.is_ok();
        drop(needless);
        drop(mapped_count);
        Some(filling.join().unwrap_or_else(|panic| resume_unwind(panic)).and(mapped))
    })
}

/// Ends filling when mapping fails or panics, since all of it would be undone.
struct Needless {
    filling: Arc<AtomicBool>,
    is_needed: bool,
}

impl Drop for Needless {
    fn drop(&mut self) {
        if !self.is_needed {
            self.filling.store(false, Ordering::Relaxed);
        }
    }
}
