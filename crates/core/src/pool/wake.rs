//! Waking: create → map → copy → verify → commit.
//!
//! Everything is mapped, filled and verified, or everything sleeps again with its backups. A backup is let
//! go only behind the commit, and kept even then when the pool keeps backups.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use super::Result;
use super::error::{Corruption, Phase, PoolError};
use super::report::{WakePhases, WakeReport, WakeRequest, add};
use super::segment::{Backing, Content, MapTimes, SegmentKey, UndoLog, by_segment, runs, undo};
use super::state::State;
use crate::bytes::ByteSize;
use crate::digest::Digest;
use crate::driver::{CopyPart, DeviceRange, DriverError, Pending, StreamId};
use crate::tag::{Dropped, Tag, TagState};

/// What a wake will do. Pure, like the plan of a sleep.
#[derive(Debug)]
struct WakePlan {
    tags: Vec<Tag>,
    already_awake: Vec<Tag>,
    undefined: Vec<Tag>,
    /// Every slot with a live block, in order of segment and index.
    slots: Vec<(SegmentKey, usize)>,
    /// What has to be created first.
    absent_bytes: u64,
    /// What has to be mapped.
    unmapped_bytes: u64,
}

/// Work that fills a slot, and what its failure is called.
type Filling = (Phase, Pending<()>);

/// Figures of a wake under way.
#[derive(Debug, Default)]
struct Woken {
    mapped_bytes: u64,
    copied_bytes: u64,
    zeroed_bytes: u64,
    verified_bytes: u64,
    phases: WakePhases,
}

impl State {
    pub(super) fn wake(&mut self, request: &WakeRequest) -> Result<WakeReport> {
        let started = Instant::now();
        let plan = self.plan_wake(request)?;
        let mut woken = Woken::default();
        let mut log = UndoLog::new();
        if let Err(error) = self.apply_wake(&plan, &mut log, &mut woken) {
            // Nothing may be in flight on what is unmapped now. If the device refuses even to wait, or an undo
            // is refused, memory stays mapped: the next wake uses it, or whoever needs room reclaims it.
            if self.driver.synchronize().is_ok() {
                let _ = undo(&mut self.segments, log, &*self.driver, &mut self.ledger);
            }
            return Err(match error {
                // Once more, now that everything is undone.
                PoolError::DeviceFull { op, shortage, source, .. } => {
                    self.device_full(op, shortage.needed_bytes, *source)
                }
                error => error,
            });
        }
        self.commit_wake(&plan);
        Ok(WakeReport {
            tags: plan.tags,
            already_awake_tags: plan.already_awake,
            seconds: started.elapsed().as_secs_f64(),
            mapped_bytes: woken.mapped_bytes,
            copied_bytes: woken.copied_bytes,
            zeroed_bytes: woken.zeroed_bytes,
            verified_bytes: woken.verified_bytes,
            undefined_tags: plan.undefined,
            phases: woken.phases,
        })
    }

    fn plan_wake(&self, request: &WakeRequest) -> Result<WakePlan> {
        let (mut tags, mut already_awake, mut undefined) = (Vec::new(), Vec::new(), Vec::new());
        for tag in self.selected("wake", request.tags.as_deref())? {
            let Some(entry) = self.tags.get(&tag) else { continue };
            if !entry.state.is_asleep() {
                // Without blocks there is nothing that could be awake, unless the caller named it.
                if entry.live_blocks > 0 || request.tags.is_some() {
                    already_awake.push(tag);
                }
                continue;
            }
            if self.becomes_undefined(&tag) {
                undefined.push(tag.clone());
            }
            tags.push(tag);
        }
        let mut slots = Vec::new();
        for (key, segment) in self.segments.iter().filter(|(_, segment)| tags.contains(&segment.tag)) {
            let live = segment.slots.iter().enumerate().filter(|(_, slot)| slot.live_blocks > 0);
            slots.extend(live.map(|(index, _)| (key, index)));
        }
        slots.sort_unstable();
        let absent = |(key, index): &(SegmentKey, usize)| {
            self.segments.get(*key).map_or(0, |segment| segment.absent_bytes(*index..*index + 1))
        };
        let absent_bytes = slots.iter().map(absent).sum();
        let unmapped = |(key, index): &(SegmentKey, usize)| {
            let slot = self.segments.get(*key).map(|segment| &segment.slots[*index]);
            slot.filter(|slot| !matches!(slot.backing, Backing::Mapped { .. })).map_or(0, |slot| slot.bytes)
        };
        let unmapped_bytes = slots.iter().map(unmapped).sum();
        Ok(WakePlan { tags, already_awake, undefined, slots, absent_bytes, unmapped_bytes })
    }

    fn becomes_undefined(&self, tag: &Tag) -> bool {
        self.tags.get(tag).is_some_and(|entry| {
            let lost = match entry.state {
                TagState::AsleepDropped => entry.policy.dropped == Dropped::Undefined,
                TagState::Stranded => entry.undefined,
                _ => false,
            };
            lost && entry.live_blocks > 0
        })
    }

    fn apply_wake(&mut self, plan: &WakePlan, log: &mut UndoLog, woken: &mut Woken) -> Result<()> {
        self.map_all(plan, log, woken)?;
        let started = Instant::now();
        self.fill(plan, woken)?;
        add(&mut woken.phases.copy_s, started.elapsed());
        let started = Instant::now();
        self.verify(plan, woken)?;
        add(&mut woken.phases.verify_s, started.elapsed());
        Ok(())
    }

    fn map_all(&mut self, plan: &WakePlan, log: &mut UndoLog, woken: &mut Woken) -> Result<()> {
        let op = || {
            let tags: Vec<&str> = plan.tags.iter().map(Tag::as_str).collect();
            format!("wake {} ({} to map)", tags.join(", "), ByteSize(plan.unmapped_bytes))
        };
        let wanted: HashSet<(SegmentKey, usize)> = plan.slots.iter().copied().collect();
        let keep = |key, index| wanted.contains(&(key, index));
        self.make_room(op, plan.absent_bytes, &keep)?;
        let mut times = MapTimes::default();
        let mut result = self.bring_in_all(plan, log, &mut times);
        if result.as_ref().is_err_and(DriverError::is_out_of_memory) && self.reclaim(u64::MAX, &keep).0 > 0 {
            // Going on where it stopped: what is mapped already is in the log.
            result = self.bring_in_all(plan, log, &mut times);
        }
        add(&mut woken.phases.create_s, times.create);
        add(&mut woken.phases.map_s, times.map);
        woken.mapped_bytes = plan.unmapped_bytes;
        result.map_err(|source| {
            if source.is_out_of_memory() {
                self.device_full(op(), plan.absent_bytes, source)
            } else {
                PoolError::WakeFailed { phase: Phase::Map, source }
            }
        })
    }

    fn bring_in_all(
        &mut self,
        plan: &WakePlan,
        log: &mut UndoLog,
        times: &mut MapTimes,
    ) -> Result<(), DriverError> {
        for (key, slots) in by_segment(&plan.slots) {
            let Some(segment) = self.segments.get_mut(key) else { continue };
            segment.bring_in(key, &slots, &*self.driver, &mut self.ledger, log, times)?;
        }
        Ok(())
    }

    /// Copies backups to the device and writes zeros where the policy asks for them.
    fn fill(&self, plan: &WakePlan, woken: &mut Woken) -> Result<()> {
        let mut queued: Vec<Filling> = Vec::new();
        let mut failed = None;
        for (turn, place) in plan.slots.iter().enumerate() {
            match self.fill_slot(*place, self.stream(turn), woken) {
                Ok(Some(work)) => queued.push(work),
                Ok(None) => {}
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

    fn fill_slot(
        &self,
        (key, index): (SegmentKey, usize),
        stream: StreamId,
        woken: &mut Woken,
    ) -> Result<Option<Filling>, (Phase, DriverError)> {
        let Some(segment) = self.segments.get(key) else { return Ok(None) };
        let (slot, range) = (&segment.slots[index], segment.slot_range(index));
        match (slot.content, &slot.backup) {
            (Content::Backup, Some(backup)) => {
                let parts = self.stored_parts(&backup.digests, range);
                woken.copied_bytes += parts.iter().map(|part| part.device.bytes).sum::<u64>();
                let copy = self.driver.copy_to_device(stream, Arc::clone(&backup.buffer), &parts);
                copy.map(|copy| Some((Phase::Copy, copy))).map_err(|source| (Phase::Copy, source))
            }
            (Content::Dropped, _) if self.zeroes(&segment.tag) => {
                woken.zeroed_bytes += range.bytes;
                let zeros = self.driver.zero(stream, range);
                zeros.map(|zeros| Some((Phase::Zero, zeros))).map_err(|source| (Phase::Zero, source))
            }
            _ => Ok(None),
        }
    }

    fn zeroes(&self, tag: &Tag) -> bool {
        self.tags.get(tag).is_some_and(|entry| entry.policy.dropped == Dropped::Zeros)
    }

    /// The stored granules of a slot, neighbours joined.
    fn stored_parts(&self, digests: &[Option<Digest>], range: DeviceRange) -> Vec<CopyPart> {
        let stored: Vec<usize> = (0..digests.len()).filter(|granule| digests[*granule].is_some()).collect();
        let part = |run: std::ops::Range<usize>| {
            let host_offset = run.start as u64 * self.granule_bytes;
            let bytes = run.len() as u64 * self.granule_bytes;
            CopyPart { device: DeviceRange::new(range.addr + host_offset, bytes), host_offset }
        };
        runs(&stored).into_iter().map(part).collect()
    }

    /// Compares the device with the digests of the backups.
    fn verify(&self, plan: &WakePlan, woken: &mut Woken) -> Result<()> {
        let at = |source| PoolError::WakeFailed { phase: Phase::Verify, source };
        let mut asked = Vec::new();
        for (turn, (key, index)) in plan.slots.iter().enumerate() {
            let Some(segment) = self.segments.get(*key) else { continue };
            let (slot, range) = (&segment.slots[*index], segment.slot_range(*index));
            let Some(backup) = slot.backup.as_ref().filter(|_| slot.content == Content::Backup) else {
                continue;
            };
            for part in self.stored_parts(&backup.digests, range) {
                let digests = self.driver.digest(self.stream(turn), part.device).map_err(at)?;
                asked.push((&segment.tag, backup, part, digests));
            }
        }
        for (tag, backup, part, digests) in asked {
            let first = self.granules(part.host_offset);
            for (nth, found) in digests.wait().map_err(at)?.into_iter().enumerate() {
                if let Some(expected) = backup.digests[first + nth].filter(|expected| *expected != found) {
                    let offset = nth as u64 * self.granule_bytes;
                    let range = DeviceRange::new(part.device.addr + offset, self.granule_bytes);
                    let start = (first + nth) * (backup.buffer.len() / backup.digests.len());
                    let stored = &backup.buffer[start..start + backup.buffer.len() / backup.digests.len()];
                    let intact = Digest::of(stored) == expected;
                    let place = if intact { Corruption::Transfer } else { Corruption::Backup };
                    return Err(PoolError::Corrupt { tag: tag.clone(), range, expected, found, place });
                }
            }
            woken.verified_bytes += part.device.bytes;
        }
        Ok(())
    }

    fn commit_wake(&mut self, plan: &WakePlan) {
        for tag in &plan.tags {
            let state = if plan.undefined.contains(tag) { TagState::Undefined } else { TagState::Awake };
            let entry = self.tag_entry(tag);
            entry.state = state;
            entry.undefined = false;
        }
        for (key, index) in &plan.slots {
            let Some(segment) = self.segments.get_mut(*key) else { continue };
            let slot = &mut segment.slots[*index];
            slot.content = Content::Device;
            if !self.config.keep_backups {
                slot.backup = None;
            }
        }
    }
}
