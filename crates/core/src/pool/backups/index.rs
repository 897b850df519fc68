//! What is stored of a pool's bytes, by place.
//!
//! A backup is of an *extent*: a few granules in a row, wherever chunks begin and end there. So nothing that is stored
//! has to be moved or cut when a wake brings memory in chunks of other sizes, and no granule can fall between two.
//! Extents never overlap.
//!
//! A stored granule is *proven* when a sleep has seen, with nothing in flight, that the device holds the same bytes.
//! Only of what is proven a sleep believes that it has not changed, where the owner has promised that. A block that is new in
//! a granule ends that, and so does every declaration. A backup may be out of the index just then, to be brought up to
//! date: whoever puts it back looks at the tag's count of doubts.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::keys::{Place, SegmentKey, TagKey};
use super::Save;
use crate::backup::Room;
use crate::digest::Digest;
use crate::driver::DeviceRange;

/// All that is stored of a pool.
#[derive(Debug)]
pub(in crate::pool) struct BackupIndex {
    granule_bytes: u64,
    tags: Vec<OfTag>,
}

#[derive(Debug, Default)]
struct OfTag {
    /// By segment and first address.
    extents: BTreeMap<Place, Backup>,
    /// How often something that is stored was no longer to be taken on trust.
    doubts: u64,
    /// How often all that is stored was let go.
    forgets: u64,
}

/// Copy of an extent's granules.
#[derive(Debug)]
pub(in crate::pool) struct Backup {
    /// As long as the extent; only stored granules have been written.
    pub(in crate::pool) room: Arc<Room>,
    /// Per granule of the extent, what is stored, if anything.
    pub(in crate::pool) granules: Vec<Option<Stored>>,
}

/// A stored granule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pool) struct Stored {
    /// Computed from the stored bytes.
    pub(in crate::pool) digest: Digest,
    /// Whether these were the granule's bytes when a sleep last looked, with nothing in flight. A copy made in the
    /// background may have been overtaken by a writer.
    pub(in crate::pool) proven: bool,
}

impl Backup {
    fn bytes(&self, granule_bytes: u64) -> u64 {
        self.granules.len() as u64 * granule_bytes
    }

    fn is_of(&self, save: &Save, granule_bytes: u64) -> bool {
        self.bytes(granule_bytes) == save.bytes
    }
}

impl BackupIndex {
    pub(in crate::pool) fn new(granule_bytes: u64) -> Self {
        Self { granule_bytes, tags: Vec::new() }
    }

    /// One more tag, by the next number.
    pub(in crate::pool) fn add_tag(&mut self) {
        self.tags.push(OfTag::default());
    }

    /// Whether anything is stored of a tag.
    pub(in crate::pool) fn has(&self, tag: TagKey) -> bool {
        !self.tags[tag.0].extents.is_empty()
    }

    /// Host memory that a tag's backups take.
    pub(in crate::pool) fn bytes(&self, tag: TagKey) -> u64 {
        self.tags[tag.0].extents.values().map(|backup| backup.room.bytes()).sum()
    }

    /// What is stored of a save's extent.
    pub(in crate::pool) fn get(&self, save: &Save) -> Option<&Backup> {
        let backup = self.tags[save.tag.0].extents.get(&save.place);
        backup.filter(|backup| backup.is_of(save, self.granule_bytes))
    }

    /// The extents of a segment with what is stored of them, in address order.
    pub(in crate::pool) fn of_segment(
        &self,
        tag: TagKey,
        segment: SegmentKey,
    ) -> impl Iterator<Item = (DeviceRange, &Backup)> {
        let extents = self.tags[tag.0].extents.range((segment, 0)..=(segment, u64::MAX));
        extents.map(|((_, at), backup)| (DeviceRange::new(*at, backup.bytes(self.granule_bytes)), backup))
    }

    /// Takes what is stored of a save's extent, to bring it up to date.
    pub(in crate::pool) fn take(&mut self, save: &Save) -> Option<Backup> {
        let extents = &mut self.tags[save.tag.0].extents;
        let is_of = extents.get(&save.place).is_some_and(|backup| backup.is_of(save, self.granule_bytes));
        if is_of { extents.remove(&save.place) } else { None }
    }

    /// Stores a backup of a save's extent. Whatever else is stored of the same granules goes.
    pub(in crate::pool) fn keep(&mut self, save: &Save, backup: Backup) {
        let (segment, start) = save.place;
        let overlapping = self.overlapping(save.tag, segment, start, start + save.bytes);
        let extents = &mut self.tags[save.tag.0].extents;
        for place in overlapping {
            extents.remove(&place);
        }
        extents.insert(save.place, backup);
    }

    /// The extents that `start..end` of a segment touches.
    pub(in crate::pool) fn overlapping(
        &self,
        tag: TagKey,
        segment: SegmentKey,
        start: u64,
        end: u64,
    ) -> Vec<Place> {
        let extents = &self.tags[tag.0].extents;
        let end_of = |(place, backup): (&Place, &Backup)| place.1 + backup.bytes(self.granule_bytes);
        let before = extents.range((segment, 0)..(segment, start)).next_back();
        let before = before.filter(|extent| end_of(*extent) > start).map(|(place, _)| *place);
        before
            .into_iter()
            .chain(extents.range((segment, start)..(segment, end)).map(|(place, _)| *place))
            .collect()
    }

    pub(in crate::pool) fn extent_bytes(&self, tag: TagKey, place: Place) -> u64 {
        self.tags[tag.0].extents.get(&place).map_or(0, |backup| backup.bytes(self.granule_bytes))
    }

    /// Lets go of what is stored of an extent.
    pub(in crate::pool) fn forget_extent(&mut self, tag: TagKey, place: Place) {
        self.tags[tag.0].extents.remove(&place);
    }

    /// Lets go of the extents of which `is_used` says no.
    pub(in crate::pool) fn retain(&mut self, tag: TagKey, is_used: impl Fn(SegmentKey, DeviceRange) -> bool) {
        let granule_bytes = self.granule_bytes;
        self.tags[tag.0].extents.retain(|(segment, at), backup| {
            is_used(*segment, DeviceRange::new(*at, backup.bytes(granule_bytes)))
        });
    }

    /// Lets go of all that is stored of a tag. Returns how much room it had, in bytes.
    pub(in crate::pool) fn forget(&mut self, tag: TagKey) -> u64 {
        let bytes = self.bytes(tag);
        let of_tag = &mut self.tags[tag.0];
        of_tag.extents.clear();
        of_tag.forgets += 1;
        bytes
    }

    /// How often all that is stored of a tag was let go.
    pub(in crate::pool) fn forgets(&self, tag: TagKey) -> u64 {
        self.tags[tag.0].forgets
    }

    // ---- trust ----

    /// These granules of an extent are what the device holds, with nothing in flight.
    pub(in crate::pool) fn prove(&mut self, save: &Save, granules: &[usize]) {
        let Some(backup) = self.tags[save.tag.0].extents.get_mut(&save.place) else { return };
        for granule in granules {
            let stored = backup.granules.get_mut(*granule).and_then(Option::as_mut);
            stored.into_iter().for_each(|stored| stored.proven = true);
        }
    }

    /// How often something that is stored of a tag was no longer to be taken on trust.
    pub(in crate::pool) fn doubts(&self, tag: TagKey) -> u64 {
        self.tags[tag.0].doubts
    }

    /// What is stored of these granules is of what was there before.
    pub(in crate::pool) fn doubt(&mut self, tag: TagKey, segment: SegmentKey, range: DeviceRange) {
        // Also of what somebody has taken out to bring it up to date.
        self.tags[tag.0].doubts += 1;
        let granule_bytes = self.granule_bytes;
        for place in self.overlapping(tag, segment, range.addr, range.end()) {
            let Some(backup) = self.tags[tag.0].extents.get_mut(&place) else { continue };
            let starts = (0..).map(|nth| place.1 + nth * granule_bytes);
            for (start, stored) in starts.zip(&mut backup.granules) {
                if start < range.end() && range.addr < start + granule_bytes {
                    stored.iter_mut().for_each(|stored| stored.proven = false);
                }
            }
        }
    }

    /// Nothing of what is stored of a tag is taken on trust any more.
    pub(in crate::pool) fn doubt_all(&mut self, tag: TagKey) {
        let of_tag = &mut self.tags[tag.0];
        of_tag.doubts += 1;
        let granules = of_tag.extents.values_mut().flat_map(|backup| backup.granules.iter_mut().flatten());
        granules.for_each(|stored| stored.proven = false);
    }
}
