//! Updating backups in a sleep: compare, then copy what differs.
//!
//! All work on the device is complete by now. Copies run with no lock held, several at a time. The storage
//! plans the footprints of all extents that have changed. What no longer fits is dropped, before all new buffers
//! are requested at once. So copying begins with the first. Where host memory cannot hold all, and there is a disk,
//! each is requested in its turn.
//!
//! Promise: on success, every live granule of the plan is stored, and was copied or [compared](super::compare) now. A
//! difference counts as a change only if the backup still is what was stored ([`super::spoiled_backups`]). Copies
//! carry the digests that the device had: a copy that goes wrong is noticed by the wake.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::compare::{Compared, Comparison, changed};
use super::leaving::Leaving;
use crate::backup::{BackupBuffer, Extent, Footprint};
use crate::digest::Digest;
use crate::driver::{CopyPart, DeviceRange, DriverError, DriverErrorKind, Op, Pending, StreamId};
use crate::pool::means::host_reclaim::is_lacking;
use crate::pool::parts::backups::{Backup, Save, Stored, runs};
use crate::pool::shared::Shared;
use crate::pool::state::PoolState;
use crate::pool::tools::cancel;
use crate::pool::tools::error::{Phase, PoolError, Result};
use crate::pool::tools::keys::TagKey;
use crate::pool::tools::report::{SleepPhases, add};

/// One that runs, one that waits.
const COPIES_PER_STREAM: usize = 2;

#[derive(Debug, Default)]
pub(in crate::pool) struct Saved {
    pub(in crate::pool) copied_bytes: u64,
    pub(in crate::pool) stored_bytes: u64,
    pub(in crate::pool) unchanged_bytes: u64,
    pub(in crate::pool) unchecked_bytes: u64,
    pub(in crate::pool) phases: SleepPhases,
}

pub(in crate::pool) struct Saving<'a> {
    save: &'a Save,
    /// `None` for granules to copy.
    granules: Vec<Option<Stored>>,
    /// To copy.
    fresh: Vec<usize>,
    copy: Pending<(BackupBuffer, Vec<Option<Digest>>)>,
}

/// What a copy has stored.
pub(in crate::pool) struct Copied {
    pub(in crate::pool) backup: Backup,
    pub(in crate::pool) copied_bytes: u64,
    pub(in crate::pool) stored_bytes: u64,
    /// Granules that changed meanwhile and no longer fit.
    pub(super) outgrown: Vec<DeviceRange>,
}

/// A save some of whose granules have changed.
struct Change<'a, 'k> {
    save: &'a Save,
    compared: &'k Compared,
    footprint: Footprint,
    /// Where no buffer of before fits.
    buffer: Option<Pending<BackupBuffer>>,
}

#[derive(Debug, Clone, Copy)]
pub(in crate::pool) struct Saver<'a> {
    pub(in crate::pool) shared: &'a Shared,
    /// In the order of their addresses.
    pub(in crate::pool) saves: &'a [Save],
    pub(in crate::pool) falling: &'a [TagKey],
}

fn at(phase: Phase) -> impl Fn(DriverError) -> PoolError {
    move |source| PoolError::SleepFailed { phase, source }
}

impl<'a> Saver<'a> {
    /// What has been copied leaves, except at the end.
    pub(in crate::pool) fn save(&self, leaving: &mut Leaving<'_>, saved: &mut Saved) -> Result<()> {
        let started = Instant::now();
        let compared = Comparison { shared: self.shared, saves: self.saves }.compared(leaving)?;
        add(&mut saved.phases.digest_s, started.elapsed());
        let started = Instant::now();
        let mut in_flight: VecDeque<Saving<'_>> = VecDeque::new();
        let copied = self.copy_changed(&compared, &mut in_flight, leaving, saved);
        // After a failure nothing stays in flight: it would hold host memory that the next attempt may need.
        let left: Vec<DriverError> =
            in_flight.into_iter().filter_map(|saving| saving.copy.wait().err()).collect();
        add(&mut saved.phases.copy_s, started.elapsed());
        copied.and(left.into_iter().next().map_or(Ok(()), |source| Err(at(Phase::Copy)(source))))
    }

    fn copy_changed(
        &self,
        compared: &[Compared],
        in_flight: &mut VecDeque<Saving<'a>>,
        leaving: &mut Leaving<'_>,
        saved: &mut Saved,
    ) -> Result<()> {
        let changes = self.changes(compared).map_err(at(Phase::Copy))?;
        let granule_bytes = self.shared.shape().granule_bytes;
        for Compared { kept, unchecked, .. } in compared {
            saved.unchecked_bytes += *unchecked as u64 * granule_bytes;
            saved.unchanged_bytes += kept.len() as u64 * granule_bytes;
        }
        for (turn, change) in changes.into_iter().enumerate() {
            if in_flight.len() >= COPIES_PER_STREAM * self.shared.streams().saves() {
                self.store_next(in_flight, leaving, saved)?;
            }
            let Change { save, compared, footprint, buffer: new } = change;
            let fresh = save.without(&compared.kept);
            let old = self.shared.lock_state().backups_mut().take(save);
            let old = old.and_then(|Backup { buffer, granules }| {
                // Owned first: from then on no call can begin to read it.
                let fits = |buffer: &BackupBuffer| buffer.is_free() && buffer.fits(&footprint, &fresh);
                Some((Arc::into_inner(buffer).filter(fits)?, granules))
            });
            let (buffer, granules, fresh) = match old {
                Some((buffer, granules)) => (buffer, granules, fresh),
                None => {
                    // A new buffer keeps none of the unchanged granules.
                    saved.unchanged_bytes -= compared.kept.len() as u64 * granule_bytes;
                    saved.unchecked_bytes -= compared.unchecked as u64 * granule_bytes;
                    let new = new.unwrap_or_else(|| self.shared.new_buffer(&footprint));
                    let buffer = match new.wait() {
                        Err(error) if is_lacking(&error) => {
                            // What is stored can be moved to disk.
                            while !in_flight.is_empty() {
                                self.store_next(in_flight, leaving, saved)?;
                            }
                            let again = || self.shared.new_buffer(&footprint).wait();
                            self.shared.with_host_memory(self.falling, footprint.bytes(), again)
                        }
                        buffer => buffer,
                    };
                    (buffer.map_err(at(Phase::Copy))?, Vec::new(), save.granules.clone())
                }
            };
            let stream = self.shared.streams().save(turn);
            // Nothing writes meanwhile, so the bytes that are copied are those that were digested.
            let digests = compared.digests(&fresh);
            let granules = (granules, fresh, digests.as_deref());
            let copy = self.shared.start_copy(save, &footprint, buffer, granules, stream);
            in_flight.push_back(copy.map_err(at(Phase::Copy))?);
        }
        while !in_flight.is_empty() {
            self.store_next(in_flight, leaving, saved)?;
        }
        Ok(())
    }

    /// The saves to be copied, with their footprints, and buffers for those that need new ones.
    fn changes<'k>(&self, compared: &'k [Compared]) -> Result<Vec<Change<'a, 'k>>, DriverError> {
        let changed: Vec<(&'a Save, &'k Compared)> = changed(self.saves, compared).collect();
        let footprints = self
            .shared
            .plan_footprints(self.shared.streams().save(0), changed.iter().map(|(save, _)| *save))?;
        let changes = changed.into_iter().zip(footprints);
        let mut changes: Vec<Change<'_, '_>> = changes
            .map(|((save, compared), footprint)| Change { save, compared, footprint, buffer: None })
            .collect();
        let unfit = self.take_unfit(&changes);
        let footprints: Vec<Footprint> = unfit.iter().map(|nth| changes[*nth].footprint.clone()).collect();
        let kept = unfit.iter().map(|nth| &changes[*nth]).filter(|change| change.save.is_kept);
        self.shared.newly_taken().note(kept.map(|change| change.footprint.bytes()));
        for (nth, buffer) in unfit.into_iter().zip(self.new_buffers(&footprints)?) {
            changes[nth].buffer = Some(buffer);
        }
        Ok(changes)
    }

    /// Drops the buffers that do not fit. The device has all that they hold. Returns the changes without a buffer.
    fn take_unfit(&self, changes: &[Change<'_, '_>]) -> Vec<usize> {
        let mut state = self.shared.lock_state();
        let fits = |state: &PoolState, change: &Change<'_, '_>| {
            let backup = state.backups().get(change.save).filter(|backup| backup.is_ours());
            backup.is_some_and(|backup| {
                backup.buffer.fits(&change.footprint, &change.save.without(&change.compared.kept))
            })
        };
        let unfit: Vec<usize> = (0..changes.len()).filter(|nth| !fits(&state, &changes[*nth])).collect();
        let gone: Vec<Option<Backup>> =
            unfit.iter().map(|nth| state.backups_mut().take(changes[*nth].save)).collect();
        drop(state);
        drop(gone);
        unfit
    }

    /// None of them where host memory cannot hold all, and a disk can.
    fn new_buffers(&self, footprints: &[Footprint]) -> Result<Vec<Pending<BackupBuffer>>, DriverError> {
        if footprints.is_empty() {
            return Ok(Vec::new());
        }
        let buffers = || self.shared.backups().buffers(footprints);
        let made = match buffers() {
            Err(error) if is_lacking(&error) => {
                let bytes = footprints.iter().map(Footprint::bytes).sum();
                match self.shared.with_host_memory(self.falling, bytes, buffers) {
                    // Each is requested in its turn, when those before are on disk.
                    Err(error) if is_lacking(&error) && self.shared.backups().disk().is_some() => {
                        return Ok(Vec::new());
                    }
                    made => made,
                }
            }
            made => made,
        }?;
        as_many(footprints.len(), "footprints were announced", made)
    }

    fn store_next(
        &self,
        in_flight: &mut VecDeque<Saving<'_>>,
        leaving: &mut Leaving<'_>,
        saved: &mut Saved,
    ) -> Result<()> {
        cancel::check(&"sleep")?;
        let Some(saving) = in_flight.pop_front() else { return Ok(()) };
        let save = saving.save;
        let Copied { backup, copied_bytes, stored_bytes, outgrown } =
            saving.complete(self.shared, true).map_err(at(Phase::Copy))?;
        saved.copied_bytes += copied_bytes;
        saved.stored_bytes += stored_bytes;
        self.shared.lock_state().backups_mut().insert(save, backup);
        // No known stream has work left, so another has written to it.
        let busy =
            |range: &DeviceRange| DriverError::new(Op::Encode, DriverErrorKind::Busy { range: *range });
        outgrown.first().map_or(Ok(()), |range| Err(at(Phase::Copy)(busy(range))))?;
        in_flight.front().map_or(Ok(()), |next| leaving.unmap_before(next.save.location))
    }
}

impl Shared {
    /// The footprints that the live granules of `saves` would take now. Where the storage measures, they are mapped. Of
    /// raw ones it measures nothing.
    pub(super) fn plan_footprints<'s>(
        &self,
        stream: StreamId,
        saves: impl Iterator<Item = &'s Save>,
    ) -> Result<Vec<Footprint>, DriverError> {
        let saves: Vec<&'s Save> = saves.collect();
        let extents: Vec<Extent<'s>> =
            saves.iter().filter(|save| !save.is_raw).map(|save| save.extent()).collect();
        let planned = if extents.is_empty() { Vec::new() } else { self.backups().plan(stream, &extents)? };
        let mut planned = as_many(extents.len(), "extents were to be planned", planned)?.into_iter();
        let footprint = |save: &&Save| {
            let raw = || Footprint::raw(save.bytes);
            if save.is_raw { raw() } else { planned.next().unwrap_or_else(raw) }
        };
        Ok(saves.iter().map(footprint).collect())
    }

    pub(super) fn new_buffer(&self, footprint: &Footprint) -> Pending<BackupBuffer> {
        let buffer = self.backups().buffers(std::slice::from_ref(footprint)).map(|mut buffers| buffers.pop());
        Pending::new(move || match buffer {
            Ok(Some(buffer)) => buffer.wait(),
            Ok(None) => Err(DriverError::invalid(Op::HostAlloc, "a store gave no buffer")),
            Err(error) => Err(error),
        })
    }

    /// The copy owns the buffer until it is stored. `granules` are those that the buffer has, those to copy, and the
    /// digests of these on the device if nothing writes to them meanwhile.
    pub(super) fn start_copy<'a>(
        &self,
        save: &'a Save,
        footprint: &Footprint,
        buffer: BackupBuffer,
        granules: (Vec<Option<Stored>>, Vec<usize>, Option<&[Digest]>),
        stream: StreamId,
    ) -> Result<Saving<'a>, DriverError> {
        let (mut granules, fresh, digests) = granules;
        let granule_bytes = self.shape().granule_bytes;
        granules.resize(usize::try_from(save.bytes / granule_bytes).unwrap_or(usize::MAX), None);
        // Drop digests of granules that are no longer live, or not copied yet.
        for (granule, stored) in granules.iter_mut().enumerate() {
            if save.granules.binary_search(&granule).is_err() || fresh.binary_search(&granule).is_ok() {
                *stored = None;
            }
        }
        let copy = buffer.save(stream, footprint, &self.parts(save, &fresh), digests)?;
        Ok(Saving { save, granules, fresh, copy })
    }

    fn parts(&self, save: &Save, granules: &[usize]) -> Vec<CopyPart> {
        let part = |run: Range<usize>| CopyPart {
            device: self.granule_range(save, run.start, run.len()),
            host_offset: run.start as u64 * self.shape().granule_bytes,
        };
        runs(granules).into_iter().map(part).collect()
    }

    pub(in crate::pool) fn granule_range(&self, save: &Save, first: usize, count: usize) -> DeviceRange {
        self.shape().granule_range(save.location.1, first, count)
    }
}

impl Saving<'_> {
    pub(in crate::pool) fn complete(self, shared: &Shared, verified: bool) -> Result<Copied, DriverError> {
        let Self { save, mut granules, fresh, copy } = self;
        let (buffer, digests) = copy.wait()?;
        let digests = as_many(fresh.len(), "granules were saved", digests)?;
        let (mut stored, mut outgrown) = (Vec::new(), Vec::new());
        for (granule, digest) in fresh.into_iter().zip(digests) {
            granules[granule] =
                digest.map(|digest| Stored { digest, verified, loaded_unseen: false, has_new_block: false });
            match digest {
                Some(_) => stored.push(granule),
                None => outgrown.push(shared.granule_range(save, granule, 1)),
            }
        }
        Ok(Copied {
            copied_bytes: stored.len() as u64 * shared.shape().granule_bytes,
            stored_bytes: buffer.read_bytes(&shared.parts(save, &stored)),
            backup: Backup { buffer: Arc::new(buffer), granules },
            outgrown,
        })
    }
}

/// What a storage returned, if it is as many as it should be.
fn as_many<T>(count: usize, asked: &str, found: Vec<T>) -> Result<Vec<T>, DriverError> {
    if found.len() == count {
        return Ok(found);
    }
    let reason = format!("{count} {asked}, and {} answers came back", found.len());
    Err(DriverError::invalid(Op::Save, reason))
}
