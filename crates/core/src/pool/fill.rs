//! Filling what a wake maps: copies of backups, zeros, and the check of what has arrived.
//!
//! A [`Filler`] queues work for pieces as they are mapped, so that copies run while the next pieces are brought
//! in. Behind each copy, in the same stream, digests of what has arrived are asked for: of every granule, or of a
//! sixty-fourth, a different one each time.
//!
//! Promise: when [`Filler::finish`] returns, with whatever outcome, nothing that was queued is in flight.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::error::{Corruption, Phase, PoolError};
use super::report::{Verify, WakeProgress, WakeRequest, add};
use super::sample::Sample;
use super::segment::{Stored, runs};
use super::wake::Woken;
use super::{Result, Shared};
use crate::backup::Room;
use crate::digest::Digest;
use crate::driver::{CopyPart, DeviceRange, DriverError, Pending};
use crate::tag::Tag;

/// What a chunk gets back.
#[derive(Debug)]
pub(super) struct Filling {
    /// The number of its piece in the plan.
    pub(super) piece: usize,
    pub(super) tag: Tag,
    pub(super) range: DeviceRange,
    pub(super) with: With,
}

#[derive(Debug)]
pub(super) enum With {
    Zeros,
    Backup { room: Arc<Room>, granules: Vec<Option<Stored>> },
}

/// Work that is on its way, in the order of the plan.
pub(super) struct Filler<'a> {
    shared: &'a Shared,
    fillings: &'a [Filling],
    request: &'a WakeRequest,
    /// Of each tag, what is compared, and how many stored granules were seen so far. A tag may wake with others or
    /// alone, so each has turns of its own.
    samples: BTreeMap<Tag, (Sample, u64)>,
    /// The first filling that is not queued yet.
    next: usize,
    total_bytes: u64,
    started: Option<Instant>,
    queued: Vec<(Phase, u64, Pending<()>)>,
    checks: Vec<Check<'a>>,
}

/// Granules whose digests were asked for.
struct Check<'a> {
    filling: &'a Filling,
    room: &'a Room,
    granules: Vec<(usize, Digest)>,
    digests: Pending<Vec<Digest>>,
}

impl<'a> Filler<'a> {
    pub(super) fn new(
        shared: &'a Shared,
        fillings: &'a [Filling],
        request: &'a WakeRequest,
        turns: &BTreeMap<Tag, u64>,
    ) -> Self {
        let granule_bytes = shared.shape.granule_bytes;
        let stored = |filling: &Filling| match &filling.with {
            With::Zeros => 0,
            With::Backup { granules, .. } => granules.iter().flatten().count() as u64,
        };
        let stored_granules: u64 = fillings.iter().map(stored).sum();
        let sample = |(tag, turn): (&Tag, &u64)| {
            let of_tag = fillings.iter().filter(|filling| filling.tag == *tag);
            (tag.clone(), (Sample::of(*turn, of_tag.map(stored).sum()), 0))
        };
        let zeros = fillings.iter().filter(|filling| matches!(filling.with, With::Zeros));
        let zeroed_bytes: u64 = zeros.map(|filling| filling.range.bytes).sum();
        Self {
            shared,
            fillings,
            request,
            samples: turns.iter().map(sample).collect(),
            next: 0,
            total_bytes: stored_granules * granule_bytes + zeroed_bytes,
            started: None,
            queued: Vec::with_capacity(fillings.len()),
            checks: Vec::new(),
        }
    }

    /// Queues what belongs into the first `pieces` pieces, which are mapped.
    pub(super) fn fill_up_to(&mut self, pieces: usize, woken: &mut Woken) -> Result<()> {
        while let Some(filling) = self.fillings.get(self.next).filter(|filling| filling.piece < pieces) {
            self.started.get_or_insert_with(Instant::now);
            let turn = self.next;
            self.next += 1;
            self.fill(filling, turn, woken)
                .map_err(|(phase, source)| PoolError::WakeFailed { phase, source })?;
        }
        Ok(())
    }

    fn fill(
        &mut self,
        filling: &'a Filling,
        turn: usize,
        woken: &mut Woken,
    ) -> Result<(), (Phase, DriverError)> {
        let driver = &self.shared.driver;
        let stream = self.shared.copy_stream(turn);
        let With::Backup { room, granules } = &filling.with else {
            let zeros = driver.zero(stream, filling.range).map_err(|source| (Phase::Zero, source))?;
            woken.zeroed_bytes += filling.range.bytes;
            self.queued.push((Phase::Zero, filling.range.bytes, zeros));
            return Ok(());
        };
        let stored: Vec<usize> = (0..granules.len()).filter(|granule| granules[*granule].is_some()).collect();
        let granule_bytes = self.shared.shape.granule_bytes;
        let part = |run: Range<usize>| {
            let host_offset = run.start as u64 * granule_bytes;
            let device = DeviceRange::new(filling.range.addr + host_offset, run.len() as u64 * granule_bytes);
            CopyPart { device, host_offset }
        };
        let parts: Vec<CopyPart> = runs(&stored).into_iter().map(part).collect();
        let bytes = stored.len() as u64 * granule_bytes;
        let copy = room.load(stream, &parts).map_err(|source| (Phase::Copy, source))?;
        woken.copied_bytes += bytes;
        self.queued.push((Phase::Copy, bytes, copy));
        let chosen: Vec<usize> = stored.into_iter().filter(|_| self.is_chosen(&filling.tag)).collect();
        if chosen.is_empty() {
            return Ok(());
        }
        let ranges: Vec<DeviceRange> = runs(&chosen).into_iter().map(|run| part(run).device).collect();
        let digests = driver.digest(stream, &ranges).map_err(|source| (Phase::Verify, source))?;
        let expected = |granule: usize| Some((granule, granules[granule]?.digest));
        let granules = chosen.into_iter().filter_map(expected).collect();
        self.checks.push(Check { filling, room, granules, digests });
        Ok(())
    }

    /// Whether the next stored granule of the tag is to be checked.
    fn is_chosen(&mut self, tag: &Tag) -> bool {
        let takes = self.samples.get_mut(tag).is_none_or(|(sample, seen)| {
            *seen += 1;
            sample.takes(*seen - 1)
        });
        takes || self.request.verify == Verify::All
    }

    /// Waits for everything, and says what failed first, `failed` before all.
    pub(super) fn finish(self, mut failed: Option<PoolError>, woken: &mut Woken) -> Result<()> {
        let mut filled_bytes = 0;
        for (phase, bytes, work) in self.queued {
            match work.wait() {
                Ok(()) => filled_bytes += bytes,
                Err(source) => failed = failed.or(Some(PoolError::WakeFailed { phase, source })),
            }
            if failed.is_none() {
                let progress = WakeProgress { filled_bytes, total_bytes: self.total_bytes };
                self.request.progress.iter().for_each(|tell| tell.call(progress));
            }
        }
        if let Some(started) = self.started {
            add(&mut woken.phases.copy_s, started.elapsed());
        }
        let started = Instant::now();
        for check in self.checks {
            match check.outcome(self.shared.shape.granule_bytes) {
                Ok(bytes) => woken.verified_bytes += bytes,
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        add(&mut woken.phases.verify_s, started.elapsed());
        failed.map_or(Ok(()), Err)
    }
}

impl Check<'_> {
    /// Compares what has arrived with what was stored. Returns the bytes that were compared.
    fn outcome(self, granule_bytes: u64) -> Result<u64> {
        let at = |source| PoolError::WakeFailed { phase: Phase::Verify, source };
        let found = self.digests.wait().map_err(at)?;
        if found.len() != self.granules.len() {
            let reason = format!("{} digests were asked for, and {} came", self.granules.len(), found.len());
            return Err(at(DriverError::invalid(crate::driver::Op::Digest, reason)));
        }
        for ((granule, expected), found) in self.granules.iter().copied().zip(&found) {
            if *found == expected {
                continue;
            }
            let offset = granule as u64 * granule_bytes;
            let intact = self.room.digest(offset, granule_bytes).map_err(at)? == expected;
            return Err(PoolError::Corrupt {
                tag: self.filling.tag.clone(),
                range: DeviceRange::new(self.filling.range.addr + offset, granule_bytes),
                expected,
                found: *found,
                place: if intact { Corruption::Transfer } else { Corruption::Backup },
            });
        }
        Ok(found.len() as u64 * granule_bytes)
    }
}
