//! Waking: create → map → copy → verify → commit.
//!
//! What sleeps is laid out in pieces as large as fit ([`super::layout`]), once. Then everything is mapped, filled
//! and verified, or everything sleeps again with its backups. A backup is let go only behind the commit, and kept
//! even then when the pool keeps backups. Memory is brought in a few pieces at a time, and copies into what is
//! mapped ([`super::fill`]) run while the next pieces are. The tags' gates are closed meanwhile.
//!
//! A wake that finds the device full may be given a deadline: it then undoes what it did, holding nothing that
//! somebody else waits for, and tries again when enough is free. A device that has enough and refuses it twice has it
//! in pieces: spans become chunks then.

mod fill;
mod plan;
mod verify;
mod ways;
mod woken;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use self::fill::Filler;
use self::plan::WakePlan;
use self::verify::Verified;
use self::woken::Woken;
use super::deadline::{Deadline, Wait};
use super::error::{Corruption, Phase, PoolError, Result};
use super::keys::TagKey;
use super::lost::LostRange;
use super::physical::{MapTimes, PhysicalMemory};
use super::piece::{Backing, Group, Piece};
use super::pressure::Pressure;
use super::report::{WakeReport, WakeRequest, add};
use super::shared::{MemoryGuard, Shared};
use crate::bytes::ByteSize;
use crate::driver::DriverError;
use crate::tag::{Changes, Tag, TagState};

/// How much is mapped at a time, of pieces no larger than a chunk: little enough that copying begins at once.
const GROUP_PIECES: usize = 8;

/// Between two looks at a device that is full, at most.
const PAUSE_MIN: Duration = Duration::from_micros(200);
const PAUSE_MAX: Duration = Duration::from_millis(5);

impl Shared {
    pub(super) fn wake(&self, request: &WakeRequest) -> Result<WakeReport> {
        let started = Instant::now();
        // Tags that are awake go on working: what they do not use may serve those that wake.
        let deadline = Deadline::begin(self.driver(), request.wait_max);
        let (visited, alone) =
            self.alone("wake", request.tags.as_deref(), TagState::is_asleep, false, deadline)?;
        {
            // Nobody has memory of theirs in hand, to be put back where it was.
            let _vm = self.lock_memory()?;
            self.open_state()?.heap_mut().lay_out(alone.tags(), self.shape().span_bytes);
        }
        let (mut waited, mut had_enough) = (Duration::ZERO, false);
        let (plan, mut woken, verified) = loop {
            let mut plan = self.open_state()?.plan_wake(&visited, alone.tags(), request.tags.is_some());
            let before: Vec<Backing> = plan.pieces.iter().map(|piece| piece.backing).collect();
            let mut woken = Woken::default();
            // A panic of the caller's, who is told how far it is, undoes the wake, too.
            let apply = AssertUnwindSafe(|| self.apply_wake(&mut plan, request, deadline, &mut woken));
            let applied = catch_unwind(apply).unwrap_or_else(|panic| {
                self.undo_wake(&mut plan, &before);
                resume_unwind(panic)
            });
            let error = match applied {
                Ok(verified) => break (plan, woken, verified),
                Err(error) => error,
            };
            self.undo_wake(&mut plan, &before);
            // Once more, now that everything is undone.
            let PoolError::DeviceFull { op, shortage, source, .. } = error else { return Err(error) };
            let has_enough =
                plan.lacks_spans(self.shape().chunk_bytes) && self.could_have(shortage.needed_bytes);
            if has_enough && had_enough {
                // It was there before this attempt, too, but not in pieces as large as a span.
                let mut state = self.lock_state();
                state.heap_mut().lay_out(&plan.tags, self.shape().chunk_bytes);
                plan.tags.iter().for_each(|tag| state.tidy_absent(*tag));
            }
            had_enough = has_enough;
            if has_enough {
                continue;
            }
            let full = self.device_full(op, shortage.needed_bytes, *source);
            let began = Instant::now();
            if !self.wait_for_memory(shortage.needed_bytes, deadline)? {
                return Err(full);
            }
            waited += began.elapsed();
        };
        add(&mut woken.phases.wait_s, waited);
        let (undefined_tags, lost) = self.commit_wake(&plan, &verified);
        // Who sleeps next finds the backups in nobody's hands.
        drop(plan.fillings);
        let report = WakeReport {
            tags: plan.names,
            already_awake_tags: plan.already_awake,
            seconds: started.elapsed().as_secs_f64(),
            mapped_bytes: woken.mapped_bytes,
            copied_bytes: woken.copied_bytes,
            zeroed_bytes: woken.zeroed_bytes,
            verified_bytes: verified.equal_bytes,
            undefined_tags,
            lost,
            phases: woken.phases,
        };
        drop(alone);
        if !self.shape().keep_backups && report.copied_bytes > 0 {
            // The wake is done, whether or not some of the memory is kept for later.
            let _ = self.backups().trim();
        }
        Ok(report)
    }

    /// Waits until the device has `needed_bytes` free. Returns false when it has not by the deadline, or when there
    /// is none: then nobody wants to wait.
    fn wait_for_memory(&self, needed_bytes: u64, deadline: Deadline) -> Result<bool> {
        if deadline.is_never() {
            return Ok(false);
        }
        // Two that wait for the same memory look at different moments.
        let mut pause = PAUSE_MIN + Duration::from_micros(u64::from(std::process::id()) % 97);
        loop {
            let Some(rest) = deadline.left(self.driver(), pause) else { return Ok(false) };
            thread::sleep(rest);
            pause = (pause * 3 / 2).min(PAUSE_MAX);
            // Nobody waits for a pool that is closed.
            let ours = self.open_state()?.idle().quiet_bytes + self.counters().loose_bytes();
            let at = |source| PoolError::Driver { op: "wait for memory of the device", source };
            let free_bytes = self.driver().memory_info().map_err(at)?.free_bytes;
            if free_bytes.saturating_add(ours) >= needed_bytes {
                return Ok(true);
            }
        }
    }

    /// None of its copies may be in flight on what is unmapped now. If the device refuses even to wait, or an undo is
    /// refused, memory stays mapped: the next wake uses it, or whoever needs room reclaims it.
    fn undo_wake(&self, plan: &mut WakePlan, before: &[Backing]) {
        if self.settle_own_streams().is_ok()
            && let Ok(mut memory) = self.lock_memory()
        {
            memory.restore(&mut plan.pieces, before);
        }
        let left = plan.pieces.iter().zip(before).any(|(piece, before)| piece.backing != *before);
        let mut state = self.lock_state();
        state.heap_mut().segments_mut().store(&plan.pieces);
        if left {
            plan.tags.iter().for_each(|tag| state.tags_mut().get_mut(*tag).note_leftovers());
        }
    }

    fn apply_wake(
        &self,
        plan: &mut WakePlan,
        request: &WakeRequest,
        deadline: Deadline,
        woken: &mut Woken,
    ) -> Result<Verified> {
        let WakePlan { names, pieces, fillings, turns, .. } = plan;
        let mut filler = Filler::new(self, fillings, request, turns);
        let beside = if self.group_end(pieces, 0) < pieces.len() && !fillings.is_empty() {
            self.map_and_fill(names, pieces, &mut filler, deadline, woken)
        } else {
            None
        };
        // Never while memory is being moved: whoever needs some would wait for a store that takes its time.
        let mapped = beside.unwrap_or_else(|| {
            self.map_all(names, pieces, deadline, woken, &mut |_| true)?;
            filler.fill_up_to(pieces.len())
        });
        let verified = filler.finish(mapped.err(), woken)?;
        let lost = self.lock_state().lost_in(verified.spoiled.iter().copied());
        if lost.is_empty() || request.accepts_losses {
            return Ok(verified);
        }
        Err(PoolError::Corrupt { place: Corruption::Backup, lost })
    }

    /// Maps here, and fills what is mapped on a thread beside. `None` where no thread is to be had.
    fn map_and_fill(
        &self,
        names: &[Tag],
        pieces: &mut [Piece],
        filler: &mut Filler<'_>,
        deadline: Deadline,
        woken: &mut Woken,
    ) -> Option<Result<()>> {
        thread::scope(|scope| {
            let (tell, told) = mpsc::channel();
            let switch = filler.switch();
            let fill = move || told.into_iter().try_for_each(|done| filler.fill_up_to(done));
            let filling =
                thread::Builder::new().name("poorwill-fill".into()).spawn_scoped(scope, fill).ok()?;
            // Not before: where there is no thread, filling is as needed as ever.
            let mut needless = Needless { filling: switch, is_needed: false };
            // When filling has failed, nobody is told any more.
            let mapped = self.map_all(names, pieces, deadline, woken, &mut |done| tell.send(done).is_ok());
            needless.is_needed = mapped.is_ok();
            drop(needless);
            drop(tell);
            Some(filling.join().unwrap_or_else(|panic| resume_unwind(panic)).and(mapped))
        })
    }

    /// How many pieces are mapped after the next few: no more bytes than in so many chunks, or a single span.
    fn group_end(&self, pieces: &[Piece], done: usize) -> usize {
        Group { pieces: GROUP_PIECES, bytes: GROUP_PIECES as u64 * self.shape().chunk_bytes }
            .end(pieces, done)
    }

    /// Maps all pieces, a few at a time, and tells how many are. Ends early, with no error, when whoever is told says
    /// no.
    fn map_all(
        &self,
        names: &[Tag],
        pieces: &mut [Piece],
        deadline: Deadline,
        woken: &mut Woken,
        mapped: &mut dyn FnMut(usize) -> bool,
    ) -> Result<()> {
        let sum = |wanted: &dyn Fn(&Piece) -> bool| -> u64 {
            pieces.iter().filter(|piece| wanted(piece)).map(|piece| piece.range.bytes).sum()
        };
        let absent_bytes = sum(&|piece| piece.is_absent());
        woken.mapped_bytes = sum(&|piece| !piece.is_mapped());
        let names: Vec<&str> = names.iter().map(Tag::as_str).collect();
        let op = format!("wake {} ({} to map)", names.join(", "), ByteSize(woken.mapped_bytes));
        let wait = Wait { deadline, op: &op, needed_bytes: absent_bytes };
        let mut times = MapTimes::default();
        let mut pressure = Pressure::default();
        let mut done = 0;
        let result = loop {
            let mut memory = self.lock_memory()?;
            pressure.look(self);
            let refused = self.poll(&memory).or(self.recover(&mut memory));
            if let Some(short) = self.make_room(&mut memory, pieces) {
                drop(memory);
                if pressure.relieve(self, wait)? {
                    continue;
                }
                if let Some(source) = refused.or(short) {
                    return Err(PoolError::Driver { op: "make room by giving idle memory back", source });
                }
                if let Some(held) = self.held_by_capture(&op, absent_bytes) {
                    return Err(held);
                }
                let (usage, hint) = (self.usage(), self.what_helps());
                return Err(PoolError::OverLimit { op, needed_bytes: absent_bytes, usage, hint });
            }
            // Going on where it stopped: what was brought in is in the pieces.
            let result = loop {
                if !mapped(done) || done == pieces.len() {
                    break Ok(());
                }
                let end = self.group_end(pieces, done);
                if let Err(error) = memory.bring_in(&mut pieces[done..end], &mut times) {
                    break Err(error);
                }
                done = end;
                memory = self.let_others(memory, &mut pieces[done..]);
            };
            let full = result.as_ref().is_err_and(DriverError::is_out_of_memory);
            if full && pressure.reclaim(self, &mut memory) {
                continue;
            }
            drop(memory);
            if full && pressure.relieve(self, wait)? {
                continue;
            }
            break result;
        };
        add(&mut woken.phases.create_s, times.create);
        add(&mut woken.phases.map_s, times.map);
        result.map_err(|source| {
            if source.is_out_of_memory() {
                if let Some(held) = self.held_by_capture(&op, absent_bytes) {
                    return held;
                }
                self.device_full(op, absent_bytes, source)
            } else {
                PoolError::WakeFailed { phase: Phase::Map, source }
            }
        })
    }

    /// Lets those have the lock who wait for it. The memory that `pieces` will take stays theirs meanwhile.
    fn let_others<'a>(&'a self, mut memory: MemoryGuard<'a>, pieces: &mut [Piece]) -> MemoryGuard<'a> {
        if self.waiting_for_memory() == 0 {
            return memory;
        }
        let reservation = memory.set_aside(pieces);
        let memory = self.hand_memory_over(memory);
        drop(reservation);
        memory
    }

    /// Makes sure that what the pieces lack may be created, from idle memory and under the limit. Otherwise says
    /// so, with what the driver refused if it did.
    fn make_room(&self, memory: &mut PhysicalMemory, pieces: &[Piece]) -> Option<Option<DriverError>> {
        let mut needs: Vec<Piece> = pieces.iter().filter(|piece| piece.is_absent()).copied().collect();
        let needed_bytes: u64 = needs.iter().map(|piece| piece.range.bytes).sum();
        let limit_bytes = self.shape().limit_bytes.unwrap_or(u64::MAX);
        let supply = {
            let mut state = self.lock_state();
            let free_bytes = state.idle().quiet_bytes + memory.counters().loose_bytes();
            let room_bytes = limit_bytes.saturating_sub(memory.counters().committed_bytes());
            if needed_bytes > free_bytes.saturating_add(room_bytes) {
                return Some(None);
            }
            // Pieces of other sizes than were idle are no reason to hold more than was ever in use.
            let used_bytes = memory.counters().committed_bytes().saturating_sub(free_bytes) + needed_bytes;
            let allowed_bytes = state.allowed_bytes(used_bytes);
            state.supply(memory, &mut needs, &[], allowed_bytes, false)
        };
        let mut refused = self.dispose(memory, supply.leaving);
        if supply.release_bytes > 0 {
            refused = refused.or(memory.let_go_of_loose(supply.release_bytes, &supply.reserved).1);
        }
        let missing: u64 = needed_bytes.saturating_sub(memory.usable_loose_bytes(&needs));
        (memory.counters().committed_bytes().saturating_add(missing) > limit_bytes).then_some(refused)
    }

    /// From here on the tags are awake. Returns those that are undefined, and what was lost.
    fn commit_wake(&self, plan: &WakePlan, verified: &Verified) -> (Vec<Tag>, Vec<LostRange>) {
        // Also after a panic elsewhere: what is mapped must be known.
        let mut memory = self.lock_memory_anyway();
        let mut state = self.lock_state();
        state.heap_mut().segments_mut().store(&plan.pieces);
        for tag in plan.tags.iter().copied() {
            let has_blocks = state.heap().live_of(tag).live_blocks > 0;
            state.tags_mut().get_mut(tag).wake(has_blocks);
        }
        state.note_seen(plan.fillings.iter().flat_map(|filling| filling.stored(self.shape().granule_bytes)));
        state.note_unseen(verified.unseen.iter().copied());
        let lost = state.lose(&verified.spoiled);
        let mut unfit = Vec::new();
        for tag in plan.tags.iter().copied() {
            let is_kept = self.shape().keep_backups && state.tags().get(tag).changes() != Changes::Volatile;
            // Of a tag that was stranded, what is on the device may never have been looked at.
            if !is_kept && !state.backups().has_unseen(tag) {
                state.backups_mut().forget(tag);
            }
            unfit.extend(state.tidy(tag));
        }
        let is_undefined = |tag: &TagKey| state.tags().get(*tag).state() == TagState::Undefined;
        let undefined: Vec<TagKey> = plan.tags.iter().copied().filter(is_undefined).collect();
        let undefined = state.tags().names(&undefined);
        drop(state);
        // What cannot be taken out of the way is tried again when memory is needed.
        let _ = self.dispose(&mut memory, unfit);
        (undefined, lost)
    }
}

/// Ends filling when mapping has failed, or panics: all of it would be undone.
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
