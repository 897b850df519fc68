//! What is stored of a pool's bytes, by location.
//!
//! A backup holds an *extent*: consecutive granules, whatever their chunks. So a wake with chunks of other
//! sizes never moves or splits what is stored. Extents never overlap.
//!
//! A stored granule is *verified* when a sleep has seen, with nothing in flight, that the device holds the
//! same bytes. Where the owner has promised not to change them, sleeps skip verified granules. New blocks and
//! declarations invalidate them. What a new block shares with others is not read as its backup. To cover a backup that is out of the index to be written, the tag's
//! invalidations are compared before it is put back.
//!
//! A stored granule is *unseen* when a wake has copied it to the device, and its digest has not matched
//! since, here or there. It must be checked before its backup is dropped or overwritten
//! ([`crate::pool::operations::spoiled_backups`]).

use std::collections::{BTreeMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;

use slotmap::SecondaryMap;

use super::Save;
use crate::backup::BackupBuffer;
use crate::digest::Digest;
use crate::driver::DeviceRange;
use crate::pool::tools::keys::{Location, SegmentKey, TagKey};

#[derive(Debug)]
pub(in crate::pool) struct BackupIndex {
    granule_bytes: u64,
    tags: SecondaryMap<TagKey, TagBackups>,
}

#[derive(Debug, Default)]
struct TagBackups {
    extents: BTreeMap<Location, Backup>,
    invalidations: u64,
    forgets: u64,
}

#[derive(Debug)]
pub(in crate::pool) struct Backup {
    /// Only stored granules have been written.
    pub(in crate::pool) buffer: Arc<BackupBuffer>,
    /// By granule of the extent.
    pub(in crate::pool) granules: Vec<Option<Stored>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pool) struct Stored {
    pub(in crate::pool) digest: Digest,
    /// Never set by a background copy, which a write may have overtaken.
    pub(in crate::pool) verified: bool,
    pub(in crate::pool) loaded_unseen: bool,
    /// A block was allocated here since. Its bytes are not what is stored.
    pub(in crate::pool) has_new_block: bool,
}

/// An unseen granule, copied from the byte `offset` of `buffer`.
#[derive(Debug, Clone)]
pub(in crate::pool) struct Suspect {
    pub(in crate::pool) granule: DeviceRange,
    pub(in crate::pool) buffer: Arc<BackupBuffer>,
    pub(in crate::pool) offset: u64,
    pub(in crate::pool) expected: Digest,
}

impl Backup {
    /// Another reader. Neither can write while both exist.
    pub(in crate::pool) fn share(&self) -> Self {
        Self { buffer: Arc::clone(&self.buffer), granules: self.granules.clone() }
    }

    /// Whether it can be written, without other readers.
    pub(in crate::pool) fn is_ours(&self) -> bool {
        Arc::strong_count(&self.buffer) == 1 && self.buffer.is_free()
    }

    pub(in crate::pool) fn has_unseen(&self) -> bool {
        self.granules.iter().flatten().any(|stored| stored.loaded_unseen)
    }

    fn unseen(&self, at: u64, granule_bytes: u64) -> impl Iterator<Item = Suspect> {
        let offsets = (0..).map(move |nth| nth * granule_bytes);
        offsets.zip(&self.granules).filter_map(move |(offset, stored)| {
            let stored = stored.filter(|stored| stored.loaded_unseen)?;
            let granule = DeviceRange::new(at + offset, granule_bytes);
            Some(Suspect { granule, buffer: Arc::clone(&self.buffer), offset, expected: stored.digest })
        })
    }

    fn bytes(&self, granule_bytes: u64) -> u64 {
        self.granules.len() as u64 * granule_bytes
    }

    fn is_of(&self, save: &Save, granule_bytes: u64) -> bool {
        self.bytes(granule_bytes) == save.bytes
    }
}

impl BackupIndex {
    pub(in crate::pool) fn new(granule_bytes: u64) -> Self {
        Self { granule_bytes, tags: SecondaryMap::new() }
    }

    pub(in crate::pool) fn add_tag(&mut self, tag: TagKey) {
        self.tags.insert(tag, TagBackups::default());
    }

    pub(in crate::pool) fn forget_tag(&mut self, tag: TagKey) {
        self.tags.remove(tag);
    }

    pub(in crate::pool) fn has(&self, tag: TagKey) -> bool {
        !self.tags[tag].extents.is_empty()
    }

    /// In host memory.
    pub(in crate::pool) fn bytes(&self, tag: TagKey) -> u64 {
        let buffers = self.tags[tag].extents.values().map(|backup| &backup.buffer);
        buffers.map(|buffer| buffer.bytes() - buffer.disk_bytes()).sum()
    }

    pub(in crate::pool) fn disk_bytes(&self, tag: TagKey) -> u64 {
        self.tags[tag].extents.values().map(|backup| backup.buffer.disk_bytes()).sum()
    }

    /// The first buffer behind `last` that is not on disk. `None` for a tag that was forgotten.
    pub(in crate::pool) fn next_buffer(
        &self,
        tag: TagKey,
        last: Option<Location>,
    ) -> Option<(Location, Arc<BackupBuffer>)> {
        let extents = &self.tags.get(tag)?.extents;
        let start = last.map_or(Bound::Unbounded, Bound::Excluded);
        let mut extents = extents.range((start, Bound::Unbounded));
        let (location, backup) = extents.find(|(_, backup)| backup.buffer.disk_bytes() == 0)?;
        Some((*location, Arc::clone(&backup.buffer)))
    }

    /// Puts the same bytes in another buffer. Returns the one that is to be dropped, without locks: the old, or the new
    /// where the old is gone.
    pub(in crate::pool) fn replace_buffer(
        &mut self,
        (tag, location): (TagKey, Location),
        old: &Arc<BackupBuffer>,
        new: BackupBuffer,
    ) -> Result<Arc<BackupBuffer>, BackupBuffer> {
        let backup = self.tags.get_mut(tag).and_then(|of_tag| of_tag.extents.get_mut(&location));
        match backup.filter(|backup| Arc::ptr_eq(&backup.buffer, old)) {
            Some(backup) => Ok(std::mem::replace(&mut backup.buffer, Arc::new(new))),
            None => Err(new),
        }
    }

    /// In stored granules.
    pub(in crate::pool) fn raw_bytes(&self, tag: TagKey) -> u64 {
        let granules = self.tags[tag].extents.values().flat_map(|backup| &backup.granules);
        granules.flatten().count() as u64 * self.granule_bytes
    }

    pub(in crate::pool) fn get(&self, save: &Save) -> Option<&Backup> {
        let backup = self.tags.get(save.tag)?.extents.get(&save.location);
        backup.filter(|backup| backup.is_of(save, self.granule_bytes))
    }

    /// In address order.
    pub(in crate::pool) fn of_segment(
        &self,
        tag: TagKey,
        segment: SegmentKey,
    ) -> impl Iterator<Item = (DeviceRange, &Backup)> {
        let extents = self.tags[tag].extents.range((segment, 0)..=(segment, u64::MAX));
        extents.map(|((_, at), backup)| (DeviceRange::new(*at, backup.bytes(self.granule_bytes)), backup))
    }

    /// Removes the backup, to update it.
    pub(in crate::pool) fn take(&mut self, save: &Save) -> Option<Backup> {
        let extents = &mut self.tags[save.tag].extents;
        let is_of = extents.get(&save.location).is_some_and(|backup| backup.is_of(save, self.granule_bytes));
        if is_of { extents.remove(&save.location) } else { None }
    }

    /// The same, if the backup still is what was `shared`, without other readers and unseen granules.
    pub(in crate::pool) fn take_back(&mut self, save: &Save, shared: Backup) -> Option<Backup> {
        let is_same = self.get(save).is_some_and(|backup| Arc::ptr_eq(&backup.buffer, &shared.buffer));
        drop(shared);
        let is_ready =
            is_same && self.get(save).is_some_and(|backup| backup.is_ours() && !backup.has_unseen());
        if is_ready { self.take(save) } else { None }
    }

    /// Replaces all backups of the same granules, none of which may be unseen.
    pub(in crate::pool) fn insert(&mut self, save: &Save, backup: Backup) {
        let (segment, start) = save.location;
        let overlapping = self.overlapping(save.tag, segment, start, start + save.bytes);
        let extents = &mut self.tags[save.tag].extents;
        for location in overlapping {
            let gone = extents.remove(&location);
            assert!(!gone.is_some_and(|backup| backup.has_unseen()), "an unseen granule was dropped");
        }
        extents.insert(save.location, backup);
    }

    /// Those that `range` touches, by address.
    pub(in crate::pool) fn touching(
        &self,
        tag: TagKey,
        segment: SegmentKey,
        range: DeviceRange,
    ) -> impl Iterator<Item = (u64, &Backup)> {
        let extents = &self.tags[tag].extents;
        let locations = self.overlapping(tag, segment, range.addr, range.end()).into_iter();
        locations.filter_map(move |location| Some((location.1, extents.get(&location)?)))
    }

    pub(in crate::pool) fn overlapping(
        &self,
        tag: TagKey,
        segment: SegmentKey,
        start: u64,
        end: u64,
    ) -> Vec<Location> {
        let extents = &self.tags[tag].extents;
        let end_of = |(location, backup): (&Location, &Backup)| location.1 + backup.bytes(self.granule_bytes);
        let before = extents.range((segment, 0)..(segment, start)).next_back();
        let before = before.filter(|extent| end_of(*extent) > start).map(|(location, _)| *location);
        before
            .into_iter()
            .chain(extents.range((segment, start)..(segment, end)).map(|(location, _)| *location))
            .collect()
    }

    pub(in crate::pool) fn extent_bytes(&self, tag: TagKey, location: Location) -> u64 {
        self.tags[tag].extents.get(&location).map_or(0, |backup| backup.bytes(self.granule_bytes))
    }

    pub(in crate::pool) fn forget_extent(&mut self, tag: TagKey, location: Location) {
        self.tags[tag].extents.remove(&location);
    }

    pub(in crate::pool) fn forget_segment(&mut self, tag: TagKey, segment: SegmentKey) {
        self.tags[tag].extents.extract_if((segment, 0)..=(segment, u64::MAX), |_, _| true).for_each(drop);
    }

    pub(in crate::pool) fn retain(&mut self, tag: TagKey, is_used: impl Fn(SegmentKey, DeviceRange) -> bool) {
        let granule_bytes = self.granule_bytes;
        self.tags[tag].extents.retain(|(segment, at), backup| {
            is_used(*segment, DeviceRange::new(*at, backup.bytes(granule_bytes)))
        });
    }

    /// Returns the bytes of the dropped buffers.
    pub(in crate::pool) fn forget(&mut self, tag: TagKey) -> u64 {
        let bytes = self.bytes(tag);
        self.forget_but(tag, &HashSet::new());
        bytes
    }

    /// Forgets all extents but those.
    pub(in crate::pool) fn forget_but(&mut self, tag: TagKey, kept: &HashSet<Location>) {
        let of_tag = &mut self.tags[tag];
        of_tag.extents.retain(|location, _| kept.contains(location));
        of_tag.forgets += 1;
    }

    pub(in crate::pool) fn forgets(&self, tag: TagKey) -> u64 {
        // A forgotten tag had none.
        self.tags.get(tag).map_or(0, |of_tag| of_tag.forgets)
    }

    /// The device holds these granules, with nothing in flight.
    pub(in crate::pool) fn mark_verified(&mut self, save: &Save, granules: &[usize]) {
        let Some(backup) = self.tags[save.tag].extents.get_mut(&save.location) else { return };
        for granule in granules {
            let stored = backup.granules.get_mut(*granule).and_then(Option::as_mut);
            stored.into_iter().for_each(|stored| (stored.verified, stored.has_new_block) = (true, false));
        }
    }

    pub(in crate::pool) fn invalidations(&self, tag: TagKey) -> u64 {
        self.tags[tag].invalidations
    }

    /// For a new block in `range`.
    pub(in crate::pool) fn invalidate(
        &mut self,
        tag: TagKey,
        segment: impl FnOnce() -> SegmentKey,
        range: DeviceRange,
    ) {
        // Counts for backups that were taken to be updated, too.
        self.tags[tag].invalidations += 1;
        if !self.has(tag) {
            return;
        }
        let (segment, granule_bytes) = (segment(), self.granule_bytes);
        for location in self.overlapping(tag, segment, range.addr, range.end()) {
            let Some(backup) = self.tags[tag].extents.get_mut(&location) else { continue };
            let starts = (0..).map(|nth| location.1 + nth * granule_bytes);
            for (start, stored) in starts.zip(&mut backup.granules) {
                if start < range.end() && range.addr < start + granule_bytes {
                    let new = |stored: &mut Stored| (stored.verified, stored.has_new_block) = (false, true);
                    stored.iter_mut().for_each(new);
                }
            }
        }
    }

    pub(in crate::pool) fn invalidate_all(&mut self, tag: TagKey) {
        let of_tag = &mut self.tags[tag];
        of_tag.invalidations += 1;
        let granules = of_tag.extents.values_mut().flat_map(|backup| backup.granules.iter_mut().flatten());
        granules.for_each(|stored| stored.verified = false);
    }

    pub(in crate::pool) fn unseen(&self, tag: TagKey) -> impl Iterator<Item = Suspect> {
        let extents = self.tags[tag].extents.iter();
        extents.flat_map(|((_, at), backup)| backup.unseen(*at, self.granule_bytes))
    }

    /// Of the extents that `range` touches.
    pub(in crate::pool) fn unseen_in(
        &self,
        tag: TagKey,
        segment: SegmentKey,
        range: DeviceRange,
    ) -> impl Iterator<Item = Suspect> {
        let locations = self.overlapping(tag, segment, range.addr, range.end()).into_iter();
        let extents =
            locations.filter_map(move |location| Some((location.1, self.tags[tag].extents.get(&location)?)));
        extents.flat_map(|(at, backup)| backup.unseen(at, self.granule_bytes))
    }

    pub(in crate::pool) fn has_unseen(&self, tag: TagKey) -> bool {
        self.tags[tag].extents.values().any(Backup::has_unseen)
    }

    /// Those of the extent that `range` touches.
    pub(in crate::pool) fn stored_granules(
        &self,
        tag: TagKey,
        location: Location,
        range: DeviceRange,
    ) -> Vec<DeviceRange> {
        let granules = self.tags[tag].extents.get(&location).into_iter().flat_map(|backup| &backup.granules);
        let ranges =
            (0..).map(|nth| DeviceRange::new(location.1 + nth * self.granule_bytes, self.granule_bytes));
        let stored = ranges.zip(granules).filter(|(_, stored)| stored.is_some()).map(|(range, _)| range);
        stored.filter(|granule| granule.addr < range.end() && range.addr < granule.end()).collect()
    }

    /// The parts of `range` of which nothing is stored, in whole granules, by address.
    pub(in crate::pool) fn gaps(
        &self,
        tag: TagKey,
        segment: SegmentKey,
        range: DeviceRange,
    ) -> Vec<DeviceRange> {
        let locations = self.overlapping(tag, segment, range.addr, range.end()).into_iter();
        let stored = locations.flat_map(|location| self.stored_granules(tag, location, range));
        let (mut gaps, mut from) = (Vec::new(), range.addr);
        for granule in stored.chain([DeviceRange::new(range.end(), 0)]) {
            if from < granule.addr {
                gaps.push(DeviceRange::new(from, granule.addr - from));
            }
            from = granule.end();
        }
        gaps
    }

    pub(in crate::pool) fn is_suspect(&self, tag: TagKey, location: Location, expected: Digest) -> bool {
        self.stored(tag, location).is_some_and(|stored| stored.loaded_unseen && stored.digest == expected)
    }

    /// For granules that begin in `range`.
    pub(in crate::pool) fn note_loaded(
        &mut self,
        tag: TagKey,
        segment: SegmentKey,
        range: DeviceRange,
        loaded_unseen: bool,
    ) {
        for stored in self.stored_in(tag, segment, range) {
            stored.iter_mut().for_each(|stored| stored.loaded_unseen = loaded_unseen);
        }
    }

    /// What the reader of `shared` has checked is no longer unseen.
    pub(in crate::pool) fn note_looked_at(&mut self, save: &Save, shared: &Backup) {
        let granule_bytes = self.granule_bytes;
        let Some(backup) =
            self.tags.get_mut(save.tag).and_then(|of_tag| of_tag.extents.get_mut(&save.location))
        else {
            return;
        };
        if !Arc::ptr_eq(&backup.buffer, &shared.buffer) || !backup.is_of(save, granule_bytes) {
            return;
        }
        // Granules forgotten meanwhile stay so.
        for (stored, seen) in backup.granules.iter_mut().zip(&shared.granules) {
            if seen.is_some_and(|seen| !seen.loaded_unseen) {
                stored.iter_mut().for_each(|stored| stored.loaded_unseen = false);
            }
        }
    }

    /// Those that begin in `range`.
    fn stored_in(
        &mut self,
        tag: TagKey,
        segment: SegmentKey,
        range: DeviceRange,
    ) -> impl Iterator<Item = &mut Option<Stored>> {
        let granule_bytes = self.granule_bytes;
        let extents = &mut self.tags[tag].extents;
        let before = extents.range((segment, 0)..(segment, range.addr)).next_back();
        let first = before.map_or((segment, range.addr), |(location, _)| *location);
        extents.range_mut(first..(segment, range.end())).flat_map(move |((_, at), backup)| {
            let starts = (0..).map(move |nth| at + nth * granule_bytes);
            let granules = starts.zip(&mut backup.granules);
            let of_range = granules.filter(move |(start, _)| range.addr <= *start && *start < range.end());
            of_range.map(|(_, stored)| stored)
        })
    }

    pub(in crate::pool) fn forget_granule(&mut self, tag: TagKey, location: Location) {
        self.stored_mut(tag, location).into_iter().for_each(|stored| *stored = None);
    }

    /// Forgets these granules, and extents of which nothing is stored then.
    pub(in crate::pool) fn forget_granules(&mut self, tag: TagKey, segment: SegmentKey, range: DeviceRange) {
        for location in self.overlapping(tag, segment, range.addr, range.end()) {
            for granule in self.stored_granules(tag, location, range) {
                self.forget_granule(tag, (segment, granule.addr));
            }
            let extents = &mut self.tags[tag].extents;
            if extents.get(&location).is_some_and(|backup| backup.granules.iter().all(Option::is_none)) {
                extents.remove(&location);
            }
        }
    }

    fn stored(&self, tag: TagKey, (segment, addr): Location) -> Option<Stored> {
        let mut extents = self.tags[tag].extents.range((segment, 0)..=(segment, addr));
        let ((_, at), backup) = extents.next_back()?;
        *backup.granules.get(usize::try_from((addr - at) / self.granule_bytes).ok()?)?
    }

    fn stored_mut(&mut self, tag: TagKey, (segment, addr): Location) -> Option<&mut Option<Stored>> {
        let granule_bytes = self.granule_bytes;
        let mut extents = self.tags[tag].extents.range_mut((segment, 0)..=(segment, addr));
        let ((_, at), backup) = extents.next_back()?;
        backup.granules.get_mut(usize::try_from((addr - at) / granule_bytes).ok()?)
    }
}
