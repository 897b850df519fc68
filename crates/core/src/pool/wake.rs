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

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use super::alloc::Pressure;
use super::error::{Corruption, Phase, PoolError};
use super::fill::{Filler, Filling, With};
use super::lost::LostRange;
use super::plan::Use;
use super::report::{WakePhases, WakeReport, WakeRequest, add};
use super::segment::SegmentKey;
use super::state::{State, TagKey};
use super::verify::Verified;
use super::vm::{Backing, MapTimes, Piece, Vm};
use super::{Result, Shared};
use crate::bytes::ByteSize;
use crate::driver::{DeviceRange, DriverError};
use crate::tag::{Changes, Dropped, Tag, TagState};

/// What a wake will do. Pure, like the plan of a sleep.
#[derive(Debug)]
struct WakePlan {
    tags: Vec<TagKey>,
    names: Vec<Tag>,
    already_awake: Vec<Tag>,
    /// Every chunk with a block that may be used, those with backups first, in order of segment and address: what is
    /// copied into is there first, and copying hides the rest.
    pieces: Vec<Piece>,
    /// What has to be written into them.
    fillings: Vec<Filling>,
    /// Of each tag, how many wakes have compared what has arrived.
    turns: BTreeMap<Tag, u64>,
}

/// How much is mapped at a time, of pieces no larger than a chunk: little enough that copying begins at once.
const GROUP_PIECES: usize = 8;

/// Between two looks at a device that is full, at most.
const PAUSE_MIN: Duration = Duration::from_micros(200);
const PAUSE_MAX: Duration = Duration::from_millis(5);

/// Figures of a wake under way.
#[derive(Debug, Default)]
pub(super) struct Woken {
    pub(super) mapped_bytes: u64,
    pub(super) copied_bytes: u64,
    pub(super) zeroed_bytes: u64,
    pub(super) verified: Verified,
    pub(super) phases: WakePhases,
}

impl Shared {
    pub(super) fn wake(&self, request: &WakeRequest) -> Result<WakeReport> {
        let started = Instant::now();
        // Tags that are awake go on working: what they do not use may serve those that wake.
        let (visited, alone) = self.alone("wake", request.tags.as_deref(), TagState::is_asleep, false)?;
        {
            // Nobody has memory of theirs in hand, to be put back where it was.
            let _vm = self.lock_vm()?;
            self.open_state()?.lay_out(alone.tags());
        }
        let (mut waited, mut had_enough) = (Duration::ZERO, false);
        let (plan, mut woken) = loop {
            let mut plan = self.open_state()?.plan_wake(&visited, alone.tags(), request.tags.is_some());
            let before: Vec<Backing> = plan.pieces.iter().map(|piece| piece.backing).collect();
            let mut woken = Woken::default();
            // A panic of the caller's, who is told how far it is, undoes the wake, too.
            let apply = AssertUnwindSafe(|| self.apply_wake(&mut plan, request, &mut woken));
            let applied = catch_unwind(apply).unwrap_or_else(|panic| {
                self.undo_wake(&mut plan, &before);
                resume_unwind(panic)
            });
            let Err(error) = applied else { break (plan, woken) };
            self.undo_wake(&mut plan, &before);
            // Once more, now that everything is undone.
            let PoolError::DeviceFull { op, shortage, source, .. } = error else { return Err(error) };
            let has_enough =
                plan.lacks_spans(self.shape.chunk_bytes) && self.could_have(shortage.needed_bytes);
            if has_enough && had_enough {
                // It was there before this attempt, too, but not in pieces as large as a span.
                self.state.lock_anyway().split_spans(&plan.tags);
            }
            had_enough = has_enough;
            if has_enough {
                continue;
            }
            let full = self.device_full(op, shortage.needed_bytes, *source);
            let began = Instant::now();
            if !self.wait_for_memory(shortage.needed_bytes, request.deadline)? {
                return Err(full);
            }
            waited += began.elapsed();
        };
        add(&mut woken.phases.wait_s, waited);
        let (undefined_tags, lost) = self.commit_wake(&plan, &woken.verified);
        // Who sleeps next finds the backups in nobody's hands.
        drop(plan.fillings);
        let report = WakeReport {
            tags: plan.names,
            already_awake_tags: plan.already_awake,
            seconds: started.elapsed().as_secs_f64(),
            mapped_bytes: woken.mapped_bytes,
            copied_bytes: woken.copied_bytes,
            zeroed_bytes: woken.zeroed_bytes,
            verified_bytes: woken.verified.equal_bytes,
            undefined_tags,
            lost,
            phases: woken.phases,
        };
        drop(alone);
        if !self.shape.keep_backups && report.copied_bytes > 0 {
            // The wake is done, whether or not some of the memory is kept for later.
            let _ = self.backups.trim();
        }
        Ok(report)
    }

    /// Waits until the device has `needed_bytes` free. Returns false when it has not by the deadline, or when there
    /// is none: then nobody wants to wait.
    fn wait_for_memory(&self, needed_bytes: u64, deadline: Option<Instant>) -> Result<bool> {
        let Some(deadline) = deadline else { return Ok(false) };
        // Two that wait for the same memory look at different moments.
        let mut pause = PAUSE_MIN + Duration::from_micros(u64::from(std::process::id()) % 97);
        loop {
            let now = self.driver.now();
            if now >= deadline {
                return Ok(false);
            }
            thread::sleep(pause.min(deadline - now));
            pause = (pause * 3 / 2).min(PAUSE_MAX);
            // Nobody waits for a pool that is closed.
            let ours = self.open_state()?.idle().quiet_bytes + self.counters.loose_bytes();
            let at = |source| PoolError::Driver { op: "wait for memory of the device", source };
            let free_bytes = self.driver.memory_info().map_err(at)?.free_bytes;
            if free_bytes.saturating_add(ours) >= needed_bytes {
                return Ok(true);
            }
        }
    }

    /// None of its copies may be in flight on what is unmapped now. If the device refuses even to wait, or an undo is
    /// refused, memory stays mapped: the next wake uses it, or whoever needs room reclaims it.
    fn undo_wake(&self, plan: &mut WakePlan, before: &[Backing]) {
        if self.settle_copies().is_ok()
            && let Ok(mut vm) = self.lock_vm()
        {
            vm.restore(&mut plan.pieces, before);
        }
        let left = plan.pieces.iter().zip(before).any(|(piece, before)| piece.backing != *before);
        let mut state = self.state.lock_anyway();
        state.store(&plan.pieces);
        plan.tags.iter().for_each(|tag| state.tag_mut(*tag).has_leftovers |= left);
    }

    fn apply_wake(&self, plan: &mut WakePlan, request: &WakeRequest, woken: &mut Woken) -> Result<()> {
        let WakePlan { names, pieces, fillings, turns, .. } = plan;
        let mut filler = Filler::new(self, fillings, request, turns);
        let beside = if self.group_end(pieces, 0) < pieces.len() && !fillings.is_empty() {
            self.map_and_fill(names, pieces, &mut filler, woken)
        } else {
            None
        };
        // Never while memory is being moved: whoever needs some would wait for a store that takes its time.
        let mapped = beside.unwrap_or_else(|| {
            self.map_all(names, pieces, woken, &mut |_| true)?;
            filler.fill_up_to(pieces.len())
        });
        woken.verified = filler.finish(mapped.err(), woken)?;
        let lost = self.state.lock_anyway().lost_in(&woken.verified.spoiled);
        if lost.is_empty() || request.accepts_losses {
            return Ok(());
        }
        Err(PoolError::Corrupt { place: Corruption::Backup, lost })
    }

    /// Maps here, and fills what is mapped on a thread beside. `None` where no thread is to be had.
    fn map_and_fill(
        &self,
        names: &[Tag],
        pieces: &mut [Piece],
        filler: &mut Filler<'_>,
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
            let mapped = self.map_all(names, pieces, woken, &mut |done| tell.send(done).is_ok());
            needless.is_needed = mapped.is_ok();
            drop(needless);
            drop(tell);
            Some(filling.join().unwrap_or_else(|panic| resume_unwind(panic)).and(mapped))
        })
    }

    /// How many pieces are mapped after the next few: no more bytes than in so many chunks, or a single span.
    fn group_end(&self, pieces: &[Piece], done: usize) -> usize {
        let mut room_bytes = GROUP_PIECES as u64 * self.shape.chunk_bytes;
        let fits = |piece: &&Piece| {
            let rest = room_bytes.checked_sub(piece.range.bytes);
            room_bytes = rest.unwrap_or(room_bytes);
            rest.is_some()
        };
        let next = pieces[done..].iter().take(GROUP_PIECES);
        pieces.len().min(done + next.take_while(fits).count().max(1))
    }

    /// Maps all pieces, a few at a time, and tells how many are. Ends early, with no error, when whoever is told says
    /// no.
    fn map_all(
        &self,
        names: &[Tag],
        pieces: &mut [Piece],
        woken: &mut Woken,
        mapped: &mut dyn FnMut(usize) -> bool,
    ) -> Result<()> {
        let sum = |wanted: &dyn Fn(&Piece) -> bool| -> u64 {
            pieces.iter().filter(|piece| wanted(piece)).map(|piece| piece.range.bytes).sum()
        };
        let absent_bytes = sum(&|piece| piece.backing == Backing::Absent);
        woken.mapped_bytes = sum(&|piece| !piece.is_mapped());
        let names: Vec<&str> = names.iter().map(Tag::as_str).collect();
        let op = format!("wake {} ({} to map)", names.join(", "), ByteSize(woken.mapped_bytes));
        let mut times = MapTimes::default();
        let mut pressure = Pressure::default();
        let mut done = 0;
        let result = loop {
            let mut vm = self.lock_vm()?;
            pressure.look(self);
            let refused = self.poll(&vm).or(self.recover(&mut vm));
            if let Some(short) = self.make_room(&mut vm, pieces) {
                drop(vm);
                if pressure.relieve(self)? {
                    continue;
                }
                if let Some(source) = refused.or(short) {
                    return Err(PoolError::Driver { op: "make room by giving idle memory back", source });
                }
                if let Some(held) = self.held_by_capture(&op, absent_bytes) {
                    return Err(held);
                }
                let hint =
                    "free or put to sleep what is live, or raise the limit, or the budget that it comes from";
                let usage = self.usage();
                return Err(PoolError::OverLimit { op, needed_bytes: absent_bytes, usage, hint });
            }
            // Going on where it stopped: what was brought in is in the pieces.
            let result = loop {
                if !mapped(done) || done == pieces.len() {
                    break Ok(());
                }
                let end = self.group_end(pieces, done);
                if let Err(error) = vm.bring_in(&mut pieces[done..end], &mut times) {
                    break Err(error);
                }
                done = end;
            };
            let full = result.as_ref().is_err_and(DriverError::is_out_of_memory);
            if full && pressure.reclaim(self, &mut vm) {
                continue;
            }
            drop(vm);
            if full && pressure.relieve(self)? {
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

    /// Makes sure that what the pieces lack may be created, from idle memory and under the limit. Otherwise says
    /// so, with what the driver refused if it did.
    fn make_room(&self, vm: &mut Vm, pieces: &[Piece]) -> Option<Option<DriverError>> {
        let mut needs: Vec<Piece> =
            pieces.iter().filter(|piece| piece.backing == Backing::Absent).copied().collect();
        let needed_bytes: u64 = needs.iter().map(|piece| piece.range.bytes).sum();
        let limit_bytes = self.shape.limit_bytes.unwrap_or(u64::MAX);
        let supply = {
            let mut state = self.state.lock_anyway();
            let free_bytes = state.idle().quiet_bytes + vm.counters().loose_bytes();
            let room_bytes = limit_bytes.saturating_sub(vm.counters().held_bytes());
            if needed_bytes > free_bytes.saturating_add(room_bytes) {
                return Some(None);
            }
            // Pieces of other sizes than were idle are no reason to hold more than was ever in use.
            let used_bytes = vm.counters().held_bytes().saturating_sub(free_bytes) + needed_bytes;
            let allowed_bytes = state.allowed_bytes(used_bytes);
            state.supply(vm, &mut needs, &[], allowed_bytes, false)
        };
        let mut refused = self.dispose(vm, supply.leaving);
        if supply.release_bytes > 0 {
            refused = refused.or(vm.let_go_of_loose(supply.release_bytes, &supply.reserved).1);
        }
        let missing: u64 = needed_bytes.saturating_sub(vm.usable_loose_bytes(&needs));
        (vm.counters().held_bytes().saturating_add(missing) > limit_bytes).then_some(refused)
    }

    /// From here on the tags are awake. Returns those that are undefined, and what was lost.
    fn commit_wake(&self, plan: &WakePlan, verified: &Verified) -> (Vec<Tag>, Vec<LostRange>) {
        // Also after a panic elsewhere: what is mapped must be known.
        let mut vm = self.vm.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.state.lock_anyway();
        state.store(&plan.pieces);
        let mut unfit = Vec::new();
        for tag in plan.tags.iter().copied() {
            let is_undefined = state.becomes_undefined(tag);
            let entry = state.tag_mut(tag);
            entry.state = if is_undefined { TagState::Undefined } else { TagState::Awake };
            (entry.undefined, entry.has_leftovers) = (false, false);
            entry.wakes += 1;
        }
        let stored = plan.fillings.iter().flat_map(|filling| filling.stored(self.shape.granule_bytes));
        state.note_seen(stored);
        state.note_unseen(verified.unseen.iter().map(|granule| granule.addr));
        let lost = state.lose(&verified.spoiled);
        for tag in plan.tags.iter().copied() {
            if !self.shape.keep_backups || state.tag(tag).changes == Changes::Volatile {
                state.forget_backups(tag);
            }
            unfit.extend(state.tidy(tag));
        }
        let is_undefined = |tag: &TagKey| state.tag(*tag).state == TagState::Undefined;
        let undefined: Vec<TagKey> = plan.tags.iter().copied().filter(is_undefined).collect();
        let undefined = state.names(&undefined);
        drop(state);
        // What cannot be taken out of the way is tried again when memory is needed.
        let _ = self.dispose(&mut vm, unfit);
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

impl WakePlan {
    fn lacks_spans(&self, chunk_bytes: u64) -> bool {
        self.pieces.iter().any(|piece| piece.backing == Backing::Absent && piece.range.bytes > chunk_bytes)
    }
}

impl State {
    /// Of the tags that are meant, those are woken that the wake has to itself. Others were awake when it began, and are
    /// left alone, though they may have fallen asleep while it waited.
    fn plan_wake(&self, visited: &[TagKey], held: &[TagKey], named: bool) -> WakePlan {
        let (mut tags, mut already_awake) = (Vec::new(), Vec::new());
        for tag in visited.iter().copied() {
            let entry = self.tag(tag);
            if entry.state.is_asleep() && !held.contains(&tag) {
                continue;
            }
            if !entry.state.is_asleep() {
                // Without blocks there is nothing that could be awake, unless the caller named it.
                if entry.live_blocks > 0 || named {
                    already_awake.push(entry.tag.clone());
                }
                continue;
            }
            tags.push(tag);
        }
        let (mut pieces, mut fillings) = (Vec::new(), Vec::new());
        for (key, segment) in self.segments.iter().filter(|(_, segment)| tags.contains(&segment.tag)) {
            let uses = self.uses_of_granules(segment);
            let entry = self.tag(segment.tag);
            for (at, chunk) in &segment.chunks {
                let first = self.granules(at - segment.range.addr);
                let of_chunk = &uses[first..first + self.granules(chunk.bytes)];
                if of_chunk.iter().all(|granule| *granule == Use::Idle) {
                    continue;
                }
                let range = DeviceRange::new(*at, chunk.bytes);
                pieces.push(Piece { segment: key, range, backing: chunk.backing });
                let mut fill = |range, with| {
                    fillings.push((key, Filling { piece: 0, tag: entry.tag.clone(), range, with }));
                };
                match entry.state {
                    TagState::AsleepBackedUp => {
                        for (at, backup) in segment.backups.range(range.addr..range.end()) {
                            let (room, granules) = (Arc::clone(&backup.room), backup.granules.clone());
                            let is_last = !self.shape.keep_backups || entry.changes == Changes::Volatile;
                            let stretch = DeviceRange::new(*at, chunk.bytes.min(self.shape.chunk_bytes));
                            fill(stretch, With::Backup { room, granules, is_last });
                        }
                    }
                    TagState::AsleepDropped if entry.policy.dropped == Dropped::Zeros => {
                        fill(range, With::Zeros);
                    }
                    _ => {}
                }
            }
        }
        let is_dropped = |key: SegmentKey| {
            let segment = self.segments.get(key);
            segment.is_none_or(|segment| self.tag(segment.tag).state != TagState::AsleepBackedUp)
        };
        pieces.sort_by_cached_key(|piece| (is_dropped(piece.segment), piece.segment, piece.range.addr));
        // In the order of the pieces, each with the number of its own.
        fillings.sort_by_cached_key(|(key, filling)| (is_dropped(*key), *key, filling.range.addr));
        let mut piece = 0;
        let mut fillings: Vec<Filling> = fillings.into_iter().map(|(_, filling)| filling).collect();
        for filling in &mut fillings {
            while pieces.get(piece).is_some_and(|piece| !piece.range.contains(&filling.range)) {
                piece += 1;
            }
            filling.piece = piece;
        }
        let names = self.names(&tags);
        let turns = tags.iter().map(|tag| (self.tag(*tag).tag.clone(), self.tag(*tag).wakes)).collect();
        WakePlan { tags, names, already_awake, pieces, fillings, turns }
    }

    fn becomes_undefined(&self, tag: TagKey) -> bool {
        let entry = self.tag(tag);
        let lost = match entry.state {
            TagState::AsleepDropped => entry.policy.dropped == Dropped::Undefined,
            TagState::Stranded => entry.undefined,
            _ => false,
        };
        lost && entry.live_blocks > 0
    }
}
