//! Spoiled backups, distinguished from changes on the device before they are overwritten or dropped.
//!
//! A wake that verifies a sample leaves other granules *loaded unseen*, until device bytes or backup match
//! the digest, or they are stored anew. If such a granule differs later, either its owner wrote it or its
//! backup changed. So its backup is checked before it is overwritten, reused or dropped. A spoiled one means
//! a lost granule ([`crate::pool::means::loss_owners`]), unless the device has the right bytes.

use std::collections::HashSet;
use std::num::NonZero;
use std::thread;

use crate::driver::{DeviceRange, DriverError, Pending};
use crate::pool::parts::backups::Suspect;
use crate::pool::parts::backups::{Backup, Save};
use crate::pool::shared::{Shared, SharedAccess};
use crate::pool::tools::keys::TagKey;
use crate::pool::tools::loss_ranges::LostRange;

const READERS_MAX: usize = 4;

/// Granules that justify a thread.
const WORTH_A_THREAD: usize = 64;

impl Suspect {
    fn is_spoiled(&self) -> Result<bool, DriverError> {
        Ok(self.buffer.digest(self.offset, self.granule.bytes)? != self.expected)
    }
}

impl Shared {
    /// Those whose backups have changed.
    pub(super) fn spoiled_of(&self, suspects: Vec<Suspect>) -> Result<Vec<Suspect>, DriverError> {
        if suspects.is_empty() {
            return Ok(suspects); // The system reads files to count the cores.
        }
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let readers = cores.min(READERS_MAX).min(suspects.len() / WORTH_A_THREAD).max(1);
        let share = suspects.len().div_ceil(readers).max(1);
        let read = |share: &[Suspect]| {
            share.iter().map(Suspect::is_spoiled).collect::<Result<Vec<bool>, DriverError>>()
        };
        let found: Vec<Result<Vec<bool>, DriverError>> = thread::scope(|scope| {
            let (mine, others) = suspects.split_at(share.min(suspects.len()));
            let reading: Vec<_> = others
                .chunks(share)
                .map(|share| {
                    let reader = thread::Builder::new().name("poorwill-check".into());
                    (share, reader.spawn_scoped(scope, move || read(share)))
                })
                .collect();
            let first = read(mine);
            let rest = reading.into_iter().map(|(share, reader)| match reader {
                Ok(reader) => reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(_) => read(share), // No thread is to be had: this one reads.
            });
            std::iter::once(first).chain(rest).collect()
        });
        let found: Vec<Vec<bool>> = found.into_iter().collect::<Result<_, _>>()?;
        let spoiled = suspects.into_iter().zip(found.into_iter().flatten());
        Ok(spoiled.filter(|(_, is_spoiled)| *is_spoiled).map(|(suspect, _)| suspect).collect())
    }

    /// Checks granules of `tags` that were loaded unseen, and forgets spoiled backups. Returns what the
    /// device lacks too, lost from now on. No sleep or wake of the tags may run.
    pub(super) fn lose_spoiled(&self, tags: &[TagKey]) -> Result<Vec<LostRange>, DriverError> {
        let suspects: Vec<Suspect> = {
            let state = self.lock_state();
            tags.iter().flat_map(|tag| state.backups().unseen(*tag)).collect()
        };
        let seen: Vec<DeviceRange> = suspects.iter().map(|suspect| suspect.granule).collect();
        let spoiled = self.spoiled_of(suspects)?;
        let granules: Vec<DeviceRange> = spoiled.iter().map(|suspect| suspect.granule).collect();
        let found = if granules.is_empty() {
            Vec::new()
        } else {
            let digests = self.driver().digest(self.streams().save(0), &granules);
            digests.and_then(Pending::wait)?
        };
        let is_right = |nth: &usize| found.get(*nth).is_some_and(|found| *found == spoiled[*nth].expected);
        let (right, lost): (Vec<usize>, Vec<usize>) = (0..spoiled.len()).partition(is_right);
        let mut state = self.lock_state();
        // Skips what was freed or stored anew meanwhile.
        let is_still_suspect = |nth: &usize| state.is_suspect(granules[*nth].addr, spoiled[*nth].expected);
        let [right, lost] = [right, lost].map(|of| {
            let of = of.into_iter().filter(is_still_suspect);
            of.map(|nth| granules[nth]).collect::<Vec<_>>()
        });
        state.forget_stored(&right);
        let lost = state.lose(&lost);
        state.note_seen(seen);
        Ok(lost)
    }

    /// The same for those of `tags` that are awake and have no sleep running.
    pub(super) fn lose_spoiled_of_awake(&self, tags: &[TagKey]) -> Result<Vec<LostRange>, DriverError> {
        let tags: HashSet<TagKey> = tags.iter().copied().collect();
        let shared_accesses = self.shared_accesses(|_, tag| tags.contains(&tag));
        self.lose_spoiled(&shared_accesses.iter().map(SharedAccess::tag).collect::<Vec<_>>())
    }

    /// Drops the backups of awake `tags`, without a sleep or wake running. Returns their bytes and lost
    /// ranges. If a check fails, all stay.
    pub(in crate::pool) fn release_backups_of_awake(
        &self,
        tags: &[TagKey],
    ) -> Result<(u64, Vec<LostRange>), DriverError> {
        let lost = self.lose_spoiled(tags)?;
        let mut state = self.lock_state();
        Ok((tags.iter().map(|tag| state.backups_mut().forget(*tag)).sum(), lost))
    }
}

impl Backup {
    /// Whether a granule of `save` that was loaded unseen has spoiled; others become seen. The caller owns
    /// the backup.
    pub(in crate::pool) fn spoiled(&mut self, save: &Save, granule_bytes: u64) -> Result<bool, DriverError> {
        let mut any = false;
        for granule in &save.granules {
            let stored = self.granules.get_mut(*granule).and_then(Option::as_mut);
            let Some(stored) = stored.filter(|stored| stored.loaded_unseen) else { continue };
            let is_spoiled =
                self.buffer.digest(*granule as u64 * granule_bytes, granule_bytes)? != stored.digest;
            stored.loaded_unseen = is_spoiled;
            any |= is_spoiled;
        }
        Ok(any)
    }
}
