//! Backups that have spoiled: told from changes of the device before they are overwritten or let go.
//!
//! A wake that compares only a sample leaves granules on the device of which nobody knows whether they are what was
//! stored: they were *loaded unseen*. Should such a granule differ from its digest later, either its owner has
//! written it or its backup was not what was stored. So before a backup is written over, believed to be old, or let go,
//! whoever does it looks at what is stored of the granules that were loaded unseen. Stored bytes that differ from
//! their own digest are never taken for a change: what they were loaded to is lost ([`super::lost`]), unless the device
//! has the right bytes all the same.
//!
//! A granule is loaded unseen until its digest was found on the device, or in its backup, or it is stored anew.

use std::collections::BTreeSet;
use std::num::NonZero;
use std::sync::Arc;
use std::thread;

use super::Shared;
use super::access::Guest;
use super::lost::LostRange;
use super::plan::Save;
use super::segment::{Backup, Stored};
use super::state::{State, TagKey};
use crate::backup::Room;
use crate::digest::Digest;
use crate::driver::{DeviceRange, DriverError, Pending};

/// Threads that read what is stored, at most.
const READERS_MAX: usize = 4;

/// Granules that are worth a thread of their own.
const WORTH_A_THREAD: usize = 64;

/// A granule that was loaded unseen.
#[derive(Debug, Clone)]
pub(super) struct Suspect {
    /// Where it is on the device.
    pub(super) granule: DeviceRange,
    /// What it was loaded from.
    room: Arc<Room>,
    offset: u64,
    expected: Digest,
}

impl Suspect {
    fn is_spoiled(&self) -> Result<bool, DriverError> {
        Ok(self.room.digest(self.offset, self.granule.bytes)? != self.expected)
    }
}

impl Shared {
    /// Those of `suspects` whose backups are not what was stored.
    pub(super) fn spoiled(&self, suspects: Vec<Suspect>) -> Result<Vec<Suspect>, DriverError> {
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

    /// Looks at all that was loaded unseen of `tags`, which nobody puts to sleep or wakes meanwhile, and forgets what is
    /// stored of the granules whose backups have spoiled. Returns those of which the device has not the right bytes
    /// either: they are lost from now on.
    pub(super) fn lose_spoiled(&self, tags: &[TagKey]) -> Result<Vec<LostRange>, DriverError> {
        let suspects = self.state.lock_anyway().loaded_unseen(tags);
        let seen: Vec<DeviceRange> = suspects.iter().map(|suspect| suspect.granule).collect();
        let spoiled = self.spoiled(suspects)?;
        let granules: Vec<DeviceRange> = spoiled.iter().map(|suspect| suspect.granule).collect();
        // A device that does not answer has nothing to show.
        let found = if granules.is_empty() {
            Vec::new()
        } else {
            let asked = self.driver.digest(self.save_stream(0), &granules);
            asked.and_then(Pending::wait).unwrap_or_default()
        };
        let is_right = |nth: usize| found.get(nth).is_some_and(|found| *found == spoiled[nth].expected);
        let (right, lost): (Vec<usize>, Vec<usize>) = (0..spoiled.len()).partition(|nth| is_right(*nth));
        let mut state = self.state.lock_anyway();
        right.into_iter().for_each(|nth| state.forget_stored(granules[nth].addr));
        let lost: Vec<DeviceRange> = lost.into_iter().map(|nth| granules[nth]).collect();
        let lost = state.lose(&lost);
        state.note_seen(seen.iter().map(|granule| granule.addr));
        Ok(lost)
    }

    /// The same of those of `tags` that are awake and that nobody puts to sleep.
    pub(super) fn lose_spoiled_of_awake(&self, tags: &[TagKey]) -> Result<Vec<LostRange>, DriverError> {
        let guests = self.guests(tags);
        let tags: Vec<TagKey> = guests.iter().map(|guest| guest.tag).collect();
        self.lose_spoiled(&tags)
    }

    /// Keeps those of `tags` that are awake, and that nobody puts to sleep, from falling asleep.
    pub(super) fn guests(&self, tags: &[TagKey]) -> Vec<Guest<'_>> {
        let mut state = self.state.lock_anyway();
        let awake = tags.iter().copied().filter(|tag| {
            let entry = state.tag_mut(*tag);
            entry.state.is_held() && entry.gate.enter()
        });
        awake.map(|tag| Guest { shared: self, tag }).collect()
    }

    /// Lets go of what is stored of `tags`, which nobody puts to sleep or wakes meanwhile. What cannot be looked at
    /// stays.
    pub(super) fn let_backups_of(&self, tags: &[TagKey]) {
        if self.lose_spoiled(tags).is_ok() {
            let mut state = self.state.lock_anyway();
            tags.iter().for_each(|tag| state.forget_backups(*tag));
        }
    }
}

impl Backup {
    /// Of a backup that is in the caller's hands, whether any granule of `save` that was loaded unseen has spoiled. The
    /// others are known now.
    pub(super) fn spoiled(&mut self, save: &Save, granule_bytes: u64) -> Result<bool, DriverError> {
        let mut any = false;
        for granule in &save.granules {
            let stored = self.granules.get_mut(*granule).and_then(Option::as_mut);
            let Some(stored) = stored.filter(|stored| stored.loaded_unseen) else { continue };
            let is_spoiled =
                self.room.digest(*granule as u64 * granule_bytes, granule_bytes)? != stored.digest;
            stored.loaded_unseen = is_spoiled;
            any |= is_spoiled;
        }
        Ok(any)
    }

    pub(super) fn has_unseen(&self) -> bool {
        self.granules.iter().flatten().any(|stored| stored.loaded_unseen)
    }

    /// Whether nobody reads it, so that it can be written.
    pub(super) fn is_ours(&self) -> bool {
        Arc::strong_count(&self.room) == 1 && self.room.is_free()
    }
}

impl State {
    /// What was loaded unseen of `tags`.
    fn loaded_unseen(&self, tags: &[TagKey]) -> Vec<Suspect> {
        let segments = self.segments.values().filter(|segment| tags.contains(&segment.tag));
        let backups = segments.flat_map(|segment| &segment.backups);
        backups.flat_map(|(at, backup)| self.suspects(*at, backup)).collect()
    }

    /// What was loaded unseen of the granules of a save.
    pub(super) fn loaded_unseen_of(&self, save: &Save) -> Vec<Suspect> {
        let Some(backup) = self.backup(save.place) else { return Vec::new() };
        let live = save.granules.iter().map(|nth| save.place.1 + *nth as u64 * self.shape.granule_bytes);
        let live: BTreeSet<u64> = live.collect();
        let suspects = self.suspects(save.place.1, backup);
        suspects.filter(|suspect| live.contains(&suspect.granule.addr)).collect()
    }

    fn suspects(&self, at: u64, backup: &Backup) -> impl Iterator<Item = Suspect> {
        let granule_bytes = self.shape.granule_bytes;
        let offsets = (0..).map(move |nth| nth * granule_bytes);
        offsets.zip(&backup.granules).filter_map(move |(offset, stored)| {
            let stored = stored.filter(|stored| stored.loaded_unseen)?;
            let granule = DeviceRange::new(at + offset, granule_bytes);
            Some(Suspect { granule, room: Arc::clone(&backup.room), offset, expected: stored.digest })
        })
    }

    /// What is stored of the granule at `addr`.
    fn stored_mut(&mut self, addr: u64) -> Option<&mut Option<Stored>> {
        let (key, granule_bytes) = (self.segment_of(addr), self.shape.granule_bytes);
        let (at, backup) = self.segments.get_mut(key)?.backups.range_mut(..=addr).next_back()?;
        backup.granules.get_mut(usize::try_from((addr - at) / granule_bytes).ok()?)
    }

    /// What is stored of the granule at `addr` is of no use any more.
    pub(super) fn forget_stored(&mut self, addr: u64) {
        self.stored_mut(addr).into_iter().for_each(|stored| *stored = None);
    }

    /// The granules at these addresses are what their digests say, on the device or in their backups.
    pub(super) fn note_seen(&mut self, addrs: impl IntoIterator<Item = u64>) {
        self.note(addrs, false);
    }

    /// The granules at these addresses were loaded, and nobody has looked at them.
    pub(super) fn note_unseen(&mut self, addrs: impl IntoIterator<Item = u64>) {
        self.note(addrs, true);
    }

    fn note(&mut self, addrs: impl IntoIterator<Item = u64>, loaded_unseen: bool) {
        for addr in addrs {
            let stored = self.stored_mut(addr).and_then(Option::as_mut);
            stored.into_iter().for_each(|stored| stored.loaded_unseen = loaded_unseen);
        }
    }
}
