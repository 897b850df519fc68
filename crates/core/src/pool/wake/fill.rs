//! Filling what a wake maps: copies of backups, zeros, and the check of what has arrived.
//!
//! A [`Filler`] queues work for pieces as they are mapped, on a thread beside the one that maps: copies run while
//! the next pieces are brought in, and a driver or a store that takes its time to queue them holds up nobody who
//! needs memory. When all have arrived, digests of what is there are asked for, all at once: of every granule, or of a
//! sixty-fourth, a different one each time.
//!
//! Promise: when [`Filler::finish`] returns, with whatever outcome, nothing that was queued is in flight; when it
//! succeeds, everything in the plan has arrived.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::super::backups::sample::Sample;
use super::super::backups::{Stored, runs};
use super::super::error::{Corruption, Phase, PoolError, Result};
use super::super::report::{Verify, WakeProgress, WakeRequest, add};
use super::super::shared::Shared;
use super::Woken;
use super::ways::{Way, Ways};
use crate::backup::Room;
use crate::digest::Digest;
use crate::driver::{CopyPart, DeviceRange, DriverError, Op, Pending};
use crate::tag::Tag;

/// Between two looks at copies in flight: short beside what the ways have room for.
const ROOM_PAUSE: Duration = Duration::from_micros(100);

/// What a chunk or an extent gets back.
#[derive(Debug)]
pub(super) struct Filling {
    /// The number of the last piece in the plan that is written to.
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

impl Filling {
    /// Where what is written ends.
    pub(super) fn end(&self, granule_bytes: u64) -> u64 {
        match &self.with {
            With::Zeros => self.range.end(),
            With::Backup { granules, .. } => {
                let last = granules.iter().rposition(Option::is_some).unwrap_or(0);
                self.range.addr + (last as u64 + 1) * granule_bytes
            }
        }
    }
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
    copied_bytes: u64,
    zeroed_bytes: u64,
    started: Option<Instant>,
    /// Whether it is still of use to fill.
    goes_on: Arc<AtomicBool>,
    queued: Vec<Work>,
    ways: Ways,
    /// Of what was queued, what has arrived, and what failed first.
    filled_bytes: u64,
    failed: Option<PoolError>,
    checks: Vec<Check<'a>>,
}

/// Something that was queued.
struct Work {
    phase: Phase,
    bytes: u64,
    /// Until its outcome is known.
    pending: Option<Pending<()>>,
}

/// A granule whose digest is to be asked for.
struct Check<'a> {
    filling: &'a Filling,
    room: &'a Room,
    granule: usize,
    expected: Digest,
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
        let stored_bytes = stored_granules * granule_bytes;
        let ways = Ways::new(shared.streams.kernel().is_some(), granule_bytes);
        Self {
            shared,
            fillings,
            request,
            samples: turns.iter().map(sample).collect(),
            next: 0,
            total_bytes: stored_bytes + zeroed_bytes,
            copied_bytes: 0,
            zeroed_bytes: 0,
            started: None,
            goes_on: Arc::new(AtomicBool::new(true)),
            queued: Vec::with_capacity(fillings.len()),
            ways,
            filled_bytes: 0,
            failed: None,
            checks: Vec::new(),
        }
    }

    /// What ends filling when it is cleared: what is not queued by then is left out.
    pub(super) fn switch(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.goes_on)
    }

    /// Queues what belongs into the first `pieces` pieces, which are mapped. Fails with what failed of it so far, so that
    /// no more is mapped in vain.
    pub(super) fn fill_up_to(&mut self, pieces: usize) -> Result<()> {
        while self.is_of_use()
            && let Some(filling) = self.fillings.get(self.next).filter(|filling| filling.piece < pieces)
        {
            self.started.get_or_insert_with(Instant::now);
            let turn = self.next;
            self.next += 1;
            self.fill(filling, turn).map_err(|(phase, source)| PoolError::WakeFailed { phase, source })?;
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    fn fill(&mut self, filling: &'a Filling, turn: usize) -> Result<(), (Phase, DriverError)> {
        let driver = &self.shared.driver;
        let engine_stream = self.shared.streams.copy(turn);
        let With::Backup { room, granules } = &filling.with else {
            let zeros = driver.zero(engine_stream, filling.range).map_err(|source| (Phase::Zero, source))?;
            self.zeroed_bytes += filling.range.bytes;
            self.queue(Phase::Zero, filling.range.bytes, zeros);
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
        let Some(way) = self.way_with_room() else { return Ok(()) };
        let stream = match way {
            Way::Engine => engine_stream,
            Way::Kernel => self.shared.streams.kernel().unwrap_or(engine_stream),
        };
        let copy = room.load(stream, &parts).map_err(|source| (Phase::Copy, source))?;
        self.ways.queued(driver.now(), self.queued.len(), bytes);
        self.copied_bytes += bytes;
        self.queue(Phase::Copy, bytes, copy);
        for (granule, stored) in granules.iter().enumerate() {
            if let Some(Stored { digest: expected, .. }) = *stored
                && self.is_chosen(&filling.tag)
            {
                self.checks.push(Check { filling, room, granule, expected });
            }
        }
        Ok(())
    }

    fn is_of_use(&self) -> bool {
        self.failed.is_none() && self.goes_on.load(Ordering::Relaxed)
    }

    fn queue(&mut self, phase: Phase, bytes: u64, pending: Pending<()>) {
        self.queued.push(Work { phase, bytes, pending: Some(pending) });
    }

    /// The way that the next copy takes. Waits until one has room; `None` when filling is of no use any more.
    fn way_with_room(&mut self) -> Option<Way> {
        while self.is_of_use() {
            let (queued, mut ended) = (&self.queued, Vec::new());
            let way = self.ways.with_room(self.shared.driver.now(), |copy| {
                let has_ended = queued[copy].pending.as_ref().and_then(Pending::has_ended);
                ended.extend(has_ended.filter(|has_ended| *has_ended).map(|_| copy));
                has_ended
            });
            ended.into_iter().for_each(|copy| self.land(copy));
            if way.is_some() {
                return way.filter(|_| self.is_of_use());
            }
            thread::sleep(ROOM_PAUSE);
        }
        None
    }

    /// Waits for what was queued as the `nth`, if nobody has, and tells how far it is.
    fn land(&mut self, nth: usize) {
        let Work { phase, bytes, pending } = &mut self.queued[nth];
        let Some(pending) = pending.take() else { return };
        match pending.wait() {
            Ok(()) => self.filled_bytes += *bytes,
            Err(source) => {
                let failed = PoolError::WakeFailed { phase: *phase, source };
                self.failed.get_or_insert(failed);
            }
        }
        if self.failed.is_none() {
            let progress = WakeProgress { filled_bytes: self.filled_bytes, total_bytes: self.total_bytes };
            self.request.progress.iter().for_each(|tell| tell.call(progress));
        }
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
    pub(super) fn finish(mut self, failed: Option<PoolError>, woken: &mut Woken) -> Result<()> {
        (woken.copied_bytes, woken.zeroed_bytes) = (self.copied_bytes, self.zeroed_bytes);
        self.failed = failed.or(self.failed);
        (0..self.queued.len()).for_each(|nth| self.land(nth));
        if self.failed.is_none() && self.queued.len() < self.fillings.len() {
            // What was left out holds anything but the caller's bytes: that is no wake.
            let reason = format!("only {} of {} chunks were filled", self.queued.len(), self.fillings.len());
            let source = DriverError::invalid(Op::CopyToDevice, reason);
            self.failed = Some(PoolError::WakeFailed { phase: Phase::Copy, source });
        }
        if let Some(started) = self.started {
            add(&mut woken.phases.copy_s, started.elapsed());
        }
        if let Some(failed) = self.failed {
            return Err(failed);
        }
        let started = Instant::now();
        let verified = self.shared.verify(&self.checks);
        add(&mut woken.phases.verify_s, started.elapsed());
        woken.verified_bytes += verified?;
        Ok(())
    }
}

impl Shared {
    /// Compares what has arrived with what was stored: asked all at once, spread over the streams. Returns the bytes
    /// that were compared.
    fn verify(&self, checks: &[Check<'_>]) -> Result<u64> {
        let at = |source| PoolError::WakeFailed { phase: Phase::Verify, source };
        let granule_bytes = self.shape.granule_bytes;
        let share = checks.len().div_ceil(self.streams.saves()).max(1);
        let (mut asked, mut failed) = (Vec::new(), None);
        for (turn, checks) in checks.chunks(share).enumerate() {
            let next = |a: &Check<'_>, b: &Check<'_>| {
                a.range(granule_bytes).end() == b.range(granule_bytes).addr
                    && std::ptr::eq(a.filling, b.filling)
            };
            let range = |run: &[Check<'_>]| {
                DeviceRange::new(run[0].range(granule_bytes).addr, run.len() as u64 * granule_bytes)
            };
            let ranges: Vec<DeviceRange> = checks.chunk_by(next).map(range).collect();
            match self.driver.digest(self.streams.save(turn), &ranges) {
                Ok(digests) => asked.push((checks, digests)),
                Err(error) => {
                    failed = Some(at(error));
                    break;
                }
            }
        }
        // Whatever was asked is waited for: nothing may be in flight when the undo unmaps.
        for (checks, digests) in asked {
            let compared =
                digests.wait().map_err(at).and_then(|found| compare(checks, &found, granule_bytes));
            failed = failed.or(compared.err());
        }
        failed.map_or(Ok(checks.len() as u64 * granule_bytes), Err)
    }
}

/// Compares granules with the digests that were found.
fn compare(checks: &[Check<'_>], found: &[Digest], granule_bytes: u64) -> Result<()> {
    let at = |source| PoolError::WakeFailed { phase: Phase::Verify, source };
    if found.len() != checks.len() {
        let reason = format!("{} digests were asked for, and {} came", checks.len(), found.len());
        return Err(at(DriverError::invalid(Op::Digest, reason)));
    }
    let Some((check, found)) = checks.iter().zip(found).find(|(check, found)| check.expected != **found)
    else {
        return Ok(());
    };
    let offset = check.granule as u64 * granule_bytes;
    let intact = check.room.digest(offset, granule_bytes).map_err(at)? == check.expected;
    Err(PoolError::Corrupt {
        tag: check.filling.tag.clone(),
        range: check.range(granule_bytes),
        expected: check.expected,
        found: *found,
        place: if intact { Corruption::Transfer } else { Corruption::Backup },
    })
}

impl Check<'_> {
    fn range(&self, granule_bytes: u64) -> DeviceRange {
        DeviceRange::new(self.filling.range.addr + self.granule as u64 * granule_bytes, granule_bytes)
    }
}
