//! Updating backups in a sleep: compare, then copy what differs.
//!
//! All work on the device is complete by now. Copies run with no lock held, several at a time. All backup
//! buffers are requested at once, so copying begins with the first.
//!
//! Promise: on success, every live granule of the plan is stored, and was copied or compared now. Of granules
//! promised not to change, a sixty-fourth was compared. A difference counts as a change only if the backup
//! still is what was stored ([`super::spoiled`]).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::backups::Suspect;
use super::backups::sample::Sample;
use super::backups::{BACK_UP, Backup, Save, Stored, runs, tags_of};
use super::error::{Phase, PoolError, Result};
use super::host_reclaim::is_lacking;
use super::keys::TagKey;
use super::report::{SleepPhases, add};
use super::shared::Shared;
use super::state::State;
use crate::backup::{BackupBuffer, Room};
use crate::digest::Digest;
use crate::driver::{CopyPart, DeviceRange, DriverError, Op, Pending, StreamId};
use crate::tag::Changes;

/// One that runs, one that waits.
const COPIES_PER_STREAM: usize = 2;

#[derive(Debug, Default)]
pub(super) struct Saved {
    pub(super) copied_bytes: u64,
    pub(super) unchanged_bytes: u64,
    pub(super) unchecked_bytes: u64,
    pub(super) phases: SleepPhases,
}

pub(super) struct Saving<'a> {
    save: &'a Save,
    /// `None` for granules to copy.
    granules: Vec<Option<Stored>>,
    /// To copy.
    fresh: Vec<usize>,
    copy: Pending<(BackupBuffer, Vec<Option<Digest>>)>,
}

/// Granules of a save that need not be copied.
#[derive(Debug, Clone, Default)]
struct Kept {
    /// Ascending.
    granules: Vec<usize>,
    /// How many of them were not compared.
    unchecked: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Saver<'a> {
    pub(super) shared: &'a Shared,
    pub(super) saves: &'a [Save],
    pub(super) falling: &'a [TagKey],
}

struct DigestQuery {
    turn: usize,
    granule: usize,
    expected: Digest,
    /// Promised not to change.
    is_promised: bool,
}

fn at(phase: Phase) -> impl Fn(DriverError) -> PoolError {
    move |source| PoolError::SleepFailed { phase, source }
}

impl<'a> Saver<'a> {
    pub(super) fn save(&self, saved: &mut Saved) -> Result<()> {
        let started = Instant::now();
        let kept = self.unchanged()?;
        add(&mut saved.phases.digest_s, started.elapsed());
        let started = Instant::now();
        let mut in_flight: VecDeque<Saving<'_>> = VecDeque::new();
        let copied = self.copy_changed(&kept, &mut in_flight, saved);
        // After a failure nothing stays in flight: it would hold host memory that the next attempt may need.
        let left: Vec<DriverError> =
            in_flight.into_iter().filter_map(|saving| saving.copy.wait().err()).collect();
        add(&mut saved.phases.copy_s, started.elapsed());
        copied.and(left.into_iter().next().map_or(Ok(()), |source| Err(at(Phase::Copy)(source))))
    }

    fn copy_changed(
        &self,
        kept: &[Kept],
        in_flight: &mut VecDeque<Saving<'a>>,
        saved: &mut Saved,
    ) -> Result<()> {
        let granule_bytes = self.shared.shape().granule_bytes;
        let changed: Vec<(&Save, &Kept)> = self
            .saves
            .iter()
            .zip(kept)
            .filter(|(save, kept)| kept.granules.len() < save.granules.len())
            .collect();
        let mut buffers = self.new_buffers(&changed).map_err(at(Phase::Copy))?;
        for kept in kept {
            saved.unchecked_bytes += kept.unchecked as u64 * granule_bytes;
            saved.unchanged_bytes += kept.granules.len() as u64 * granule_bytes;
        }
        for (turn, (save, kept)) in changed.into_iter().enumerate() {
            if in_flight.len() >= COPIES_PER_STREAM * self.shared.streams().saves() {
                self.store_next(in_flight, saved)?;
            }
            let old = self.shared.lock_state().backups_mut().take(save);
            let (buffer, granules) = match old {
                Some(Backup { buffer, granules }) if buffer.is_free() => (Arc::into_inner(buffer), granules),
                _ => (None, Vec::new()),
            };
            let (buffer, granules) = match buffer {
                Some(buffer) => (buffer, granules),
                None => {
                    let buffer = buffers.remove(&turn).unwrap_or_else(|| self.shared.new_buffer(save.bytes));
                    (self.wait_for_buffer(save, buffer).map_err(at(Phase::Copy))?, Vec::new())
                }
            };
            // A new buffer keeps none of the unchanged granules.
            if granules.is_empty() {
                saved.unchanged_bytes -= kept.granules.len() as u64 * granule_bytes;
                saved.unchecked_bytes -= kept.unchecked as u64 * granule_bytes;
            }
            let keep: &[usize] = if granules.is_empty() { &[] } else { &kept.granules };
            let fresh: Vec<usize> = save
                .granules
                .iter()
                .copied()
                .filter(|granule| keep.binary_search(granule).is_err())
                .collect();
            let stream = self.shared.streams().save(turn);
            let copy =
                self.shared.start_copy(save, buffer, granules, fresh, stream).map_err(at(Phase::Copy))?;
            in_flight.push_back(copy);
        }
        while !in_flight.is_empty() {
            self.store_next(in_flight, saved)?;
        }
        Ok(())
    }

    /// Buffers for those of `changed` that have none, by index: frees may drop others meanwhile.
    fn new_buffers(
        &self,
        changed: &[(&Save, &Kept)],
    ) -> Result<BTreeMap<usize, Pending<BackupBuffer>>, DriverError> {
        let (turns, sizes): (Vec<usize>, Vec<u64>) = {
            let state = self.shared.lock_state();
            let without = changed.iter().enumerate().filter(|(_, (save, _))| !state.has_buffer(save));
            without.map(|(turn, (save, _))| (turn, save.bytes)).unzip()
        };
        if sizes.is_empty() {
            return Ok(BTreeMap::new());
        }
        let rooms: Vec<Room> = sizes.iter().copied().map(Room::raw).collect();
        let buffers = match self.shared.backups().buffers(&rooms) {
            Err(error) if is_lacking(&error) => {
                let bytes = sizes.iter().sum();
                self.shared.with_host_memory(self.falling, bytes, || self.shared.backups().buffers(&rooms))?
            }
            buffers => buffers?,
        };
        Ok(turns.into_iter().zip(buffers).collect())
    }

    fn wait_for_buffer(
        &self,
        save: &Save,
        buffer: Pending<BackupBuffer>,
    ) -> Result<BackupBuffer, DriverError> {
        match buffer.wait() {
            Err(error) if is_lacking(&error) => {
                let again = || self.shared.new_buffer(save.bytes).wait();
                self.shared.with_host_memory(self.falling, save.bytes, again)
            }
            buffer => buffer,
        }
    }

    /// Per save, the granules whose backup matches the device.
    fn unchanged(&self) -> Result<Vec<Kept>> {
        loop {
            // Spoiled backups are made anew where the device still has the bytes.
            if let Some(kept) = self.compare()? {
                return Ok(kept);
            }
        }
    }

    /// One attempt; `None` when spoiled backups had to be dropped.
    fn compare(&self) -> Result<Option<Vec<Kept>>> {
        let (shared, saves) = (self.shared, self.saves);
        let mut kept = vec![Kept::default(); saves.len()];
        let fast_digests = shared.driver().info().fast_digests;
        let (queries, sampled) = shared.lock_state().queries(saves, fast_digests, &mut kept);
        let digests = self.digests(&queries).map_err(at(Phase::Compare))?;
        let (mut equal, mut broken) = (Vec::new(), None);
        for (query, found) in queries.iter().zip(digests) {
            if found == query.expected {
                kept[query.turn].granules.push(query.granule);
                equal.push(shared.granule_range(&saves[query.turn], query.granule, 1));
            } else if query.is_promised {
                broken.get_or_insert((query, found));
            }
        }
        shared.lock_state().note_seen(equal);
        if !self.are_changes(&kept)? {
            return Ok(None);
        }
        if let Some((DigestQuery { turn, granule, expected, .. }, found)) = broken {
            return Err(shared.immutable_changed(&saves[*turn], *granule, [*expected, found]));
        }
        let mut state = shared.lock_state();
        sampled.into_iter().for_each(|tag| state.tags_mut().get_mut(tag).note_check());
        for (save, kept) in saves.iter().zip(&mut kept) {
            kept.granules.sort_unstable();
            state.backups_mut().mark_verified(save, &kept.granules);
        }
        Ok(Some(kept))
    }

    /// Whether the backups to be overwritten are what was stored, so that differences are changes on the
    /// device. If not, drops the spoiled ones; what the device lacks too is lost.
    fn are_changes(&self, kept: &[Kept]) -> Result<bool> {
        let shared = self.shared;
        let suspects: Vec<Suspect> = {
            let state = shared.lock_state();
            let written = self.saves.iter().zip(kept);
            let written = written.filter(|(save, kept)| kept.granules.len() < save.granules.len());
            // A new extent replaces all that it overlaps.
            let unseen = |save: &Save| {
                let extent = DeviceRange::new(save.location.1, save.bytes);
                state.backups().unseen_in(save.tag, save.location.0, extent).collect::<Vec<_>>()
            };
            written.flat_map(|(save, _)| unseen(save)).collect()
        };
        let granules: Vec<DeviceRange> = suspects.iter().map(|suspect| suspect.granule).collect();
        if shared.spoiled_of(suspects).map_err(at(Phase::Compare))?.is_empty() {
            shared.lock_state().note_seen(granules);
            return Ok(true);
        }
        let lost = shared.lose_spoiled(&tags_of(self.saves)).map_err(at(Phase::Compare))?;
        if lost.is_empty() { Ok(false) } else { Err(PoolError::Lost { op: BACK_UP, lost }) }
    }

    /// In the order of the queries, spread over the streams.
    fn digests(&self, queries: &[DigestQuery]) -> Result<Vec<Digest>, DriverError> {
        let share = queries.len().div_ceil(self.shared.streams().saves()).max(1);
        let (mut pending, mut failed) = (Vec::new(), None);
        for (turn, queries) in queries.chunks(share).enumerate() {
            let next = |a: &DigestQuery, b: &DigestQuery| a.turn == b.turn && a.granule + 1 == b.granule;
            let range = |run: &[DigestQuery]| {
                self.shared.granule_range(&self.saves[run[0].turn], run[0].granule, run.len())
            };
            let ranges: Vec<DeviceRange> = queries.chunk_by(next).map(range).collect();
            match self.shared.driver().digest(self.shared.streams().save(turn), &ranges) {
                Ok(digests) => pending.push(digests),
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        // All queries are awaited: nothing may be in flight when the sleep goes on, or ends.
        let mut digests = Vec::with_capacity(queries.len());
        for pending in pending {
            match pending.wait() {
                Ok(found) => digests.extend(found),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(digests), Err)
    }

    fn store_next(&self, in_flight: &mut VecDeque<Saving<'_>>, saved: &mut Saved) -> Result<()> {
        let Some(saving) = in_flight.pop_front() else { return Ok(()) };
        let save = saving.save;
        let (backup, copied) = saving.complete(true).map_err(at(Phase::Copy))?;
        saved.copied_bytes += copied as u64 * self.shared.shape().granule_bytes;
        self.shared.lock_state().backups_mut().insert(save, backup);
        Ok(())
    }
}

impl Shared {
    pub(super) fn new_buffer(&self, bytes: u64) -> Pending<BackupBuffer> {
        let buffer = self.backups().buffers(&[Room::raw(bytes)]).map(|mut buffers| buffers.pop());
        Pending::new(move || match buffer {
            Ok(Some(buffer)) => buffer.wait(),
            Ok(None) => Err(DriverError::invalid(Op::HostAlloc, "a store gave no buffer")),
            Err(error) => Err(error),
        })
    }

    /// The copy owns the buffer until it is stored.
    pub(super) fn start_copy<'a>(
        &self,
        save: &'a Save,
        buffer: BackupBuffer,
        mut granules: Vec<Option<Stored>>,
        fresh: Vec<usize>,
        stream: StreamId,
    ) -> Result<Saving<'a>, DriverError> {
        let granule_bytes = self.shape().granule_bytes;
        granules.resize(usize::try_from(save.bytes / granule_bytes).unwrap_or(usize::MAX), None);
        // Drop digests of granules that are no longer live, or not copied yet.
        for (granule, stored) in granules.iter_mut().enumerate() {
            if save.granules.binary_search(&granule).is_err() || fresh.binary_search(&granule).is_ok() {
                *stored = None;
            }
        }
        let part = |run: std::ops::Range<usize>| CopyPart {
            device: self.granule_range(save, run.start, run.len()),
            host_offset: run.start as u64 * granule_bytes,
        };
        let parts: Vec<CopyPart> = runs(&fresh).into_iter().map(part).collect();
        let copy = buffer.save(stream, &Room::raw(save.bytes), &parts)?;
        Ok(Saving { save, granules, fresh, copy })
    }

    pub(super) fn granule_range(&self, save: &Save, first: usize, count: usize) -> DeviceRange {
        self.shape().granule_range(save.location.1, first, count)
    }

    /// The tag's granules are compared from now on.
    fn immutable_changed(&self, save: &Save, granule: usize, digests: [Digest; 2]) -> PoolError {
        let [expected, found] = digests;
        let mut state = self.lock_state();
        let entry = state.tags_mut().get_mut(save.tag);
        entry.set_changes(Changes::Compared);
        let (tag, range) = (entry.name().clone(), self.granule_range(save, granule, 1));
        PoolError::ImmutableChanged { tag, range, expected, found }
    }
}

impl Saving<'_> {
    /// Returns the backup, and how many granules were copied.
    pub(super) fn complete(self, verified: bool) -> Result<(Backup, usize), DriverError> {
        let Self { mut granules, fresh, copy, .. } = self;
        let (buffer, digests) = copy.wait()?;
        if digests.len() != fresh.len() {
            let reason =
                format!("{} granules were saved, and {} digests came back", fresh.len(), digests.len());
            return Err(DriverError::invalid(Op::Save, reason));
        }
        for (granule, digest) in fresh.iter().zip(digests) {
            granules[*granule] = digest.map(|digest| Stored { digest, verified, loaded_unseen: false });
        }
        Ok((Backup { buffer: Arc::new(buffer), granules }, fresh.len()))
    }
}

impl State {
    /// The digests that a sleep needs, and the tags that are sampled. Skipped granules go to `kept` at once.
    fn queries(
        &self,
        saves: &[Save],
        fast_digests: bool,
        kept: &mut [Kept],
    ) -> (Vec<DigestQuery>, BTreeSet<TagKey>) {
        let mut queries = Vec::new();
        let mut promised: BTreeMap<TagKey, Vec<DigestQuery>> = BTreeMap::new();
        for (turn, save) in saves.iter().enumerate() {
            let changes = self.tags().get(save.tag).changes();
            let Some(backup) = self.backups().get(save) else { continue };
            for granule in save.granules.iter().copied() {
                let Some(stored) = backup.granules.get(granule).copied().flatten() else { continue };
                let query = |is_promised| DigestQuery { turn, granule, expected: stored.digest, is_promised };
                match changes {
                    Changes::Volatile => {}
                    Changes::Immutable if stored.verified => {
                        promised.entry(save.tag).or_default().push(query(true));
                    }
                    // Where comparing costs as much as copying, copy.
                    _ if fast_digests => queries.push(query(false)),
                    _ => {}
                }
            }
        }
        let tags = promised.keys().copied().collect();
        // Each tag has its own sample: it may sleep alone or with others.
        for (tag, of_tag) in promised {
            let sample = Sample::of(self.tags().get(tag).checks(), of_tag.len() as u64);
            for (nth, query) in (0..).zip(of_tag) {
                if sample.takes(nth) {
                    queries.push(query);
                } else {
                    kept[query.turn].granules.push(query.granule);
                    kept[query.turn].unchecked += 1;
                }
            }
        }
        (queries, tags)
    }

    fn has_buffer(&self, save: &Save) -> bool {
        let backup = self.backups().get(save);
        backup.is_some_and(Backup::is_ours)
    }
}
