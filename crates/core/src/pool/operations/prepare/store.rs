//! The work on one chunk: its backup is compared, and brought up to date.

use std::sync::Arc;

use super::chunk::Prepared;
use super::plan::Planned;
use crate::backup::{BackupBuffer, Footprint};
use crate::driver::{DeviceRange, DriverError, StreamId};
use crate::pool::parts::backups::{Backup, Save, Stored, Suspect, runs, tags_of};
use crate::pool::shared::Shared;
use crate::pool::tools::error::{PoolError, Result};
use crate::tag::Changes;

/// What came of a chunk that was held.
pub(super) enum Visit {
    Done,
    /// It needs a new buffer.
    Lacks(Planned),
}

#[derive(Default)]
pub(super) struct Totals {
    pub(super) copied_bytes: u64,
    pub(super) stored_bytes: u64,
    pub(super) unchanged_bytes: u64,
}

impl Shared {
    /// `saves` are all that is prepared.
    pub(super) fn bring_up_to_date(
        &self,
        found: Prepared<'_>,
        ready: Option<(Planned, BackupBuffer)>,
        saves: &[Save],
        done: &mut Totals,
    ) -> Result<Visit> {
        let Prepared { held, save, snapshot, mut stored, changes } = found;
        if !self.replaces_nothing_spoiled(&save, stored.as_ref(), saves)? {
            return Ok(Visit::Done);
        }
        // The sleep copies these anyway.
        let only_buffer = changes == Changes::Volatile || !self.driver().info().fast_digests;
        let same = match stored.as_mut() {
            _ if only_buffer => save.granules.clone(),
            None => Vec::new(),
            Some(stored) => self.unchanged_in(stored, &save, changes)?,
        };
        let fresh = save.without(&same);
        let unchanged_bytes = if only_buffer { 0 } else { same.len() as u64 * self.shape().granule_bytes };
        if stored.is_some() && fresh.is_empty() {
            done.unchanged_bytes += unchanged_bytes;
            return Ok(Visit::Done);
        }
        let (footprint, buffer, granules, fresh) =
            match (ready.filter(|(planned, _)| planned.is_for(&save)), stored) {
                (Some((planned, buffer)), stored) => {
                    if let Some(stored) = stored
                        && self.take_to_write(&save, stored, saves)?.is_none()
                    {
                        return Ok(Visit::Done);
                    }
                    // A new buffer keeps none of the unchanged granules.
                    let fresh = if only_buffer { Vec::new() } else { save.granules.clone() };
                    (planned.footprint, buffer, vec![None; self.shape().granules(save.bytes)], fresh)
                }
                (None, stored) => {
                    let footprint = self.plan_footprint(&save).map_err(failed)?;
                    let Some(stored) = stored.filter(|stored| stored.buffer.fits(&footprint, &fresh)) else {
                        return Ok(Visit::Lacks(Planned { granules: save.granules, footprint }));
                    };
                    let Some(Backup { buffer, granules }) = self.take_to_write(&save, stored, saves)? else {
                        return Ok(Visit::Done);
                    };
                    let Some(buffer) = Arc::into_inner(buffer) else { return Ok(Visit::Done) };
                    done.unchanged_bytes += unchanged_bytes;
                    (footprint, buffer, granules, fresh)
                }
            };
        if fresh.is_empty() {
            self.put_back(&held, &save, &snapshot, Backup { buffer: Arc::new(buffer), granules });
            return Ok(Visit::Done);
        }
        let backup = self.copy_beside(&save, &footprint, buffer, (granules, fresh), done)?;
        self.put_back(&held, &save, &snapshot, backup);
        Ok(Visit::Done)
    }

    /// Others may write meanwhile, so what arrives is digested.
    fn copy_beside(
        &self,
        save: &Save,
        footprint: &Footprint,
        buffer: BackupBuffer,
        (granules, fresh): (Vec<Option<Stored>>, Vec<usize>),
        done: &mut Totals,
    ) -> Result<Backup> {
        let stream = self.streams().background();
        let saving =
            self.start_copy(save, footprint, buffer, (granules, fresh, None), stream).map_err(failed)?;
        // What no longer fits is left to the sleep.
        let copied = saving.complete(self, false).map_err(failed)?;
        done.copied_bytes += copied.copied_bytes;
        done.stored_bytes += copied.stored_bytes;
        Ok(copied.backup)
    }

    /// The granules of a backup that the device still has.
    fn unchanged_in(&self, stored: &mut Backup, save: &Save, changes: Changes) -> Result<Vec<usize>> {
        let skips_verified = changes == Changes::Immutable;
        let stream = self.streams().background();
        let same =
            self.unchanged_granules(save, &mut stored.granules, skips_verified, stream).map_err(failed)?;
        self.lock_state().backups_mut().note_looked_at(save, stored);
        Ok(same)
    }

    /// Compares a backup's unseen granules, then takes it out of the index. `None` if it is gone or some had
    /// spoiled; what the device lacks too is lost.
    fn take_to_write(&self, save: &Save, mut stored: Backup, saves: &[Save]) -> Result<Option<Backup>> {
        let spoiled = stored.spoiled(save, self.shape().granule_bytes);
        let mut state = self.lock_state();
        state.backups_mut().note_looked_at(save, &stored);
        match spoiled {
            Ok(false) => Ok(state.backups_mut().take_back(save, stored)),
            Ok(true) => {
                drop(state);
                drop(stored);
                self.lose_prepared(saves).map(|()| None)
            }
            Err(source) => Err(PoolError::PrepareFailed { source }),
        }
    }

    /// Whether the other extents that this one would replace are unspoiled.
    fn replaces_nothing_spoiled(&self, save: &Save, stored: Option<&Backup>, saves: &[Save]) -> Result<bool> {
        let extent = DeviceRange::new(save.location.1, save.bytes);
        let is_other =
            |suspect: &Suspect| stored.is_none_or(|stored| !Arc::ptr_eq(&stored.buffer, &suspect.buffer));
        let suspects: Vec<Suspect> = {
            let state = self.lock_state();
            state.backups().unseen_in(save.tag, save.location.0, extent).filter(is_other).collect()
        };
        let granules: Vec<DeviceRange> = suspects.iter().map(|suspect| suspect.granule).collect();
        let spoiled = self.spoiled_of(suspects).map_err(|source| PoolError::PrepareFailed { source })?;
        if spoiled.is_empty() {
            self.lock_state().note_seen(granules);
            return Ok(true);
        }
        self.lose_prepared(saves)?;
        Ok(false)
    }

    /// Drops spoiled backups. Fails where the device lacks the bytes too.
    fn lose_prepared(&self, saves: &[Save]) -> Result<()> {
        let lost = self.lose_spoiled_of_awake(&tags_of(saves));
        let lost = lost.map_err(|source| PoolError::PrepareFailed { source })?;
        if lost.is_empty() { Ok(()) } else { Err(PoolError::Lost { op: "prepare a sleep", lost }) }
    }

    /// The live granules whose backup matches, or is skipped on the owner's promise, which the sleep checks.
    fn unchanged_granules(
        &self,
        save: &Save,
        stored: &mut [Option<Stored>],
        skips_verified: bool,
        stream: StreamId,
    ) -> Result<Vec<usize>, DriverError> {
        let is_there = |granule: &usize| stored.get(*granule).is_some_and(Option::is_some);
        let there = save.granules.iter().copied().filter(is_there);
        let is_verified =
            |granule: &usize| skips_verified && stored[*granule].is_some_and(|stored| stored.verified);
        let (mut same, queried): (Vec<usize>, Vec<usize>) = there.partition(is_verified);
        if queried.is_empty() {
            return Ok(same);
        }
        let range = |run: std::ops::Range<usize>| self.granule_range(save, run.start, run.len());
        let ranges: Vec<DeviceRange> = runs(&queried).into_iter().map(range).collect();
        let found = self.driver().digest(stream, &ranges)?.wait()?;
        for (granule, found) in queried.into_iter().zip(found) {
            if let Some(stored) = stored[granule].as_mut().filter(|stored| stored.digest == found) {
                stored.loaded_unseen = false;
                same.push(granule);
            }
        }
        same.sort_unstable();
        Ok(same)
    }
}

fn failed(source: DriverError) -> PoolError {
    PoolError::PrepareFailed { source }
}
