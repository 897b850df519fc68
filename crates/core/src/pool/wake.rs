//! Waking: create → map → copy → verify → commit.
//!
//! Everything is mapped, filled and verified, or everything sleeps again with its backups. A backup is let
//! go only behind the commit, and kept even then when the pool keeps backups. Copies run with no lock held;
//! the tags' gates are closed meanwhile.

use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use super::alloc::Pressure;
use super::error::{Corruption, Phase, PoolError};
use super::plan::Use;
use super::report::{WakePhases, WakeReport, WakeRequest, add};
use super::segment::runs;
use super::state::{State, TagKey};
use super::vm::{Backing, MapTimes, Piece, Vm};
use super::{Result, Shared};
use crate::bytes::ByteSize;
use crate::digest::Digest;
use crate::driver::{CopyPart, DeviceRange, DriverError, HostBuffer, Pending, StreamId};
use crate::tag::{Dropped, Tag, TagState};

/// What a wake will do. Pure, like the plan of a sleep.
#[derive(Debug)]
struct WakePlan {
    tags: Vec<TagKey>,
    names: Vec<Tag>,
    already_awake: Vec<Tag>,
    undefined: Vec<TagKey>,
    /// Every chunk with a block that may be used, in order of segment and address.
    pieces: Vec<Piece>,
    /// What has to be written into them.
    fillings: Vec<Filling>,
}

/// What a chunk gets back.
#[derive(Debug)]
struct Filling {
    tag: Tag,
    range: DeviceRange,
    with: With,
}

#[derive(Debug)]
enum With {
    Zeros,
    Backup { buffer: Arc<HostBuffer>, digests: Vec<Option<Digest>> },
}

/// Work that fills a chunk, and what its failure is called.
type Queued = (Phase, Pending<()>);

/// Figures of a wake under way.
#[derive(Debug, Default)]
struct Woken {
    mapped_bytes: u64,
    copied_bytes: u64,
    zeroed_bytes: u64,
    verified_bytes: u64,
    phases: WakePhases,
}

impl Shared {
    pub(super) fn wake(&self, request: &WakeRequest) -> Result<WakeReport> {
        let started = Instant::now();
        // Tags that are awake go on working: what they do not use may serve those that wake.
        let (visited, alone) = self.alone("wake", request.tags.as_deref(), TagState::is_asleep, false)?;
        let mut plan = self.open_state()?.plan_wake(&visited, request.tags.is_some());
        let before: Vec<Backing> = plan.pieces.iter().map(|piece| piece.backing).collect();
        let mut woken = Woken::default();
        if let Err(error) = self.apply_wake(&mut plan, &mut woken) {
            self.undo_wake(&mut plan, &before);
            return Err(match error {
                // Once more, now that everything is undone.
                PoolError::DeviceFull { op, shortage, source, .. } => {
                    self.device_full(op, shortage.needed_bytes, *source)
                }
                error => error,
            });
        }
        let undefined_tags = self.commit_wake(&plan);
        let report = WakeReport {
            tags: plan.names,
            already_awake_tags: plan.already_awake,
            seconds: started.elapsed().as_secs_f64(),
            mapped_bytes: woken.mapped_bytes,
            copied_bytes: woken.copied_bytes,
            zeroed_bytes: woken.zeroed_bytes,
            verified_bytes: woken.verified_bytes,
            undefined_tags,
            phases: woken.phases,
        };
        drop(alone);
        if !self.shape.keep_backups && report.copied_bytes > 0 {
            drop(plan.fillings);
            // The wake is done, whether or not the driver keeps some of the memory for later.
            let _ = self.driver.host_trim();
        }
        Ok(report)
    }

    /// Nothing may be in flight on what is unmapped now. If the device refuses even to wait, or an undo is
    /// refused, memory stays mapped: the next wake uses it, or whoever needs room reclaims it.
    fn undo_wake(&self, plan: &mut WakePlan, before: &[Backing]) {
        if self.driver.synchronize().is_ok()
            && let Ok(mut vm) = self.lock_vm()
        {
            vm.restore(&mut plan.pieces, before);
        }
        let left = plan.pieces.iter().zip(before).any(|(piece, before)| piece.backing != *before);
        let mut state = self.state.lock_anyway();
        state.store(&plan.pieces);
        plan.tags.iter().for_each(|tag| state.tag_mut(*tag).has_leftovers |= left);
    }

    fn apply_wake(&self, plan: &mut WakePlan, woken: &mut Woken) -> Result<()> {
        self.map_all(plan, woken)?;
        let started = Instant::now();
        self.fill(plan, woken)?;
        add(&mut woken.phases.copy_s, started.elapsed());
        let started = Instant::now();
        self.verify(plan, woken)?;
        add(&mut woken.phases.verify_s, started.elapsed());
        Ok(())
    }

    fn map_all(&self, plan: &mut WakePlan, woken: &mut Woken) -> Result<()> {
        let sum = |wanted: &dyn Fn(&Piece) -> bool| -> u64 {
            plan.pieces.iter().filter(|piece| wanted(piece)).map(|piece| piece.range.bytes).sum()
        };
        let absent_bytes = sum(&|piece| piece.backing == Backing::Absent);
        woken.mapped_bytes = sum(&|piece| !piece.is_mapped());
        let names: Vec<&str> = plan.names.iter().map(Tag::as_str).collect();
        let op = format!("wake {} ({} to map)", names.join(", "), ByteSize(woken.mapped_bytes));
        let mut times = MapTimes::default();
        let mut pressure = Pressure::default();
        let result = loop {
            let mut vm = self.lock_vm()?;
            pressure.look(self);
            let refused = self.poll(&vm).or(self.recover(&mut vm));
            if let Some(short) = self.make_room(&mut vm, &plan.pieces) {
                drop(vm);
                if pressure.relieve(self)? {
                    continue;
                }
                if let Some(source) = refused.or(short) {
                    return Err(PoolError::Driver { op: "make room by giving idle memory back", source });
                }
                let hint =
                    "free or put to sleep what is live, or raise the limit, or the budget that it comes from";
                let usage = self.usage();
                return Err(PoolError::OverLimit { op, needed_bytes: absent_bytes, usage, hint });
            }
            // Going on where it stopped: what was brought in is in the pieces.
            let result = vm.bring_in(&mut plan.pieces, &mut times);
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
            state.supply(vm, &mut needs, &[], limit_bytes, false)
        };
        let mut refused = self.dispose(vm, supply.leaving);
        if supply.release_bytes > 0 {
            refused = refused.or(vm.let_go_of_loose(supply.release_bytes, &supply.reserved).1);
        }
        let missing: u64 = needed_bytes.saturating_sub(vm.usable_loose_bytes(&needs));
        (vm.counters().held_bytes().saturating_add(missing) > limit_bytes).then_some(refused)
    }

    /// Copies backups to the device and writes zeros where the policy asks for them.
    fn fill(&self, plan: &WakePlan, woken: &mut Woken) -> Result<()> {
        let mut queued: Vec<Queued> = Vec::new();
        let mut failed = None;
        for (turn, filling) in plan.fillings.iter().enumerate() {
            match self.fill_chunk(filling, self.copy_stream(turn), woken) {
                Ok(work) => queued.push(work),
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        // All of it is waited for, also after a failure: nothing may be in flight when the undo unmaps.
        for (phase, pending) in queued {
            if let Err(source) = pending.wait() {
                failed = failed.or(Some((phase, source)));
            }
        }
        failed.map_or(Ok(()), |(phase, source)| Err(PoolError::WakeFailed { phase, source }))
    }

    fn fill_chunk(
        &self,
        filling: &Filling,
        stream: StreamId,
        woken: &mut Woken,
    ) -> Result<Queued, (Phase, DriverError)> {
        match &filling.with {
            With::Backup { buffer, digests } => {
                let parts = self.stored_parts(digests, filling.range);
                woken.copied_bytes += parts.iter().map(|part| part.device.bytes).sum::<u64>();
                let copy = self.driver.copy_to_device(stream, Arc::clone(buffer), &parts);
                copy.map(|copy| (Phase::Copy, copy)).map_err(|source| (Phase::Copy, source))
            }
            With::Zeros => {
                woken.zeroed_bytes += filling.range.bytes;
                let zeros = self.driver.zero(stream, filling.range);
                zeros.map(|zeros| (Phase::Zero, zeros)).map_err(|source| (Phase::Zero, source))
            }
        }
    }

    /// The stored granules of a chunk, neighbours joined.
    fn stored_parts(&self, digests: &[Option<Digest>], range: DeviceRange) -> Vec<CopyPart> {
        let granule_bytes = self.shape.granule_bytes;
        let stored: Vec<usize> = (0..digests.len()).filter(|granule| digests[*granule].is_some()).collect();
        let part = |run: Range<usize>| {
            let host_offset = run.start as u64 * granule_bytes;
            let bytes = run.len() as u64 * granule_bytes;
            CopyPart { device: DeviceRange::new(range.addr + host_offset, bytes), host_offset }
        };
        runs(&stored).into_iter().map(part).collect()
    }

    /// Compares the device with the digests of the backups.
    fn verify(&self, plan: &WakePlan, woken: &mut Woken) -> Result<()> {
        let at = |source| PoolError::WakeFailed { phase: Phase::Verify, source };
        let granule_bytes = self.shape.granule_bytes;
        let mut asked = Vec::new();
        for (turn, filling) in plan.fillings.iter().enumerate() {
            let With::Backup { buffer, digests: stored } = &filling.with else { continue };
            for part in self.stored_parts(stored, filling.range) {
                let digests = self.driver.digest(self.copy_stream(turn), &[part.device]).map_err(at)?;
                asked.push((&filling.tag, buffer, stored, part, digests));
            }
        }
        for (tag, buffer, stored, part, digests) in asked {
            let first = usize::try_from(part.host_offset / granule_bytes).unwrap_or(usize::MAX);
            let bytes = buffer.len() / stored.len().max(1);
            for (nth, found) in digests.wait().map_err(at)?.into_iter().enumerate() {
                if let Some(expected) = stored[first + nth].filter(|expected| *expected != found) {
                    let range =
                        DeviceRange::new(part.device.addr + nth as u64 * granule_bytes, granule_bytes);
                    let start = (first + nth) * bytes;
                    let intact = Digest::of(&buffer[start..start + bytes]) == expected;
                    let place = if intact { Corruption::Transfer } else { Corruption::Backup };
                    return Err(PoolError::Corrupt { tag: tag.clone(), range, expected, found, place });
                }
            }
            woken.verified_bytes += part.device.bytes;
        }
        Ok(())
    }

    /// From here on the tags are awake. Returns those that are undefined.
    fn commit_wake(&self, plan: &WakePlan) -> Vec<Tag> {
        // Also after a panic elsewhere: what is mapped must be known.
        let mut vm = self.vm.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.state.lock_anyway();
        state.store(&plan.pieces);
        let mut unfit = Vec::new();
        let mut undefined = Vec::new();
        for tag in plan.tags.iter().copied() {
            let is_undefined = plan.undefined.contains(&tag) && state.tag(tag).live_blocks > 0;
            let entry = state.tag_mut(tag);
            entry.state = if is_undefined { TagState::Undefined } else { TagState::Awake };
            (entry.undefined, entry.has_leftovers) = (false, false);
            if is_undefined {
                undefined.push(tag);
            }
            if !self.shape.keep_backups {
                state.forget_backups(tag);
            }
            unfit.extend(state.tidy(tag));
        }
        let undefined = state.names(&undefined);
        drop(state);
        // What cannot be taken out of the way is tried again when memory is needed.
        let _ = self.dispose(&mut vm, unfit);
        undefined
    }
}

impl State {
    fn plan_wake(&self, visited: &[TagKey], named: bool) -> WakePlan {
        let (mut tags, mut already_awake, mut undefined) = (Vec::new(), Vec::new(), Vec::new());
        for tag in visited.iter().copied() {
            let entry = self.tag(tag);
            if !entry.state.is_asleep() {
                // Without blocks there is nothing that could be awake, unless the caller named it.
                if entry.live_blocks > 0 || named {
                    already_awake.push(entry.tag.clone());
                }
                continue;
            }
            if self.becomes_undefined(tag) {
                undefined.push(tag);
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
                let with = match (entry.state, &chunk.backup) {
                    (TagState::AsleepBackedUp, Some(backup)) => {
                        let (buffer, digests) = (Arc::clone(&backup.buffer), backup.digests.clone());
                        With::Backup { buffer, digests }
                    }
                    (TagState::AsleepDropped, _) if entry.policy.dropped == Dropped::Zeros => With::Zeros,
                    _ => continue,
                };
                fillings.push(Filling { tag: entry.tag.clone(), range, with });
            }
        }
        pieces.sort_unstable_by_key(|piece| (piece.segment, piece.range.addr));
        let names = self.names(&tags);
        WakePlan { tags, names, already_awake, undefined, pieces, fillings }
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
