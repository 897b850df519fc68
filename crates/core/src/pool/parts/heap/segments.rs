//! Segments: reservations, and the chunks of memory mapped into them.

use std::collections::{BTreeMap, BTreeSet};

use slotmap::SlotMap;

use crate::driver::DeviceRange;
use crate::pool::tools::keys::{BlockKey, Location, SegmentKey, TagKey};
use crate::pool::tools::mapping::{Backing, Mapping};
use crate::pool::tools::visits;

#[derive(Debug, Default)]
pub(in crate::pool) struct Segments {
    table: SlotMap<SegmentKey, Segment>,
    /// By first address.
    bases: BTreeMap<u64, SegmentKey>,
    /// Of tags that have some.
    tags: BTreeMap<TagKey, BTreeSet<SegmentKey>>,
}

/// One reservation of one tag.
#[derive(Debug)]
pub(in crate::pool) struct Segment {
    tag: TagKey,
    range: DeviceRange,
    /// The block at the first address.
    first: BlockKey,
    /// By address. Addresses without a chunk are unmapped.
    chunks: BTreeMap<u64, Chunk>,
}

/// A part of a segment that is mapped as a whole: one granule, or a multiple of it.
#[derive(Debug, Clone, Copy)]
pub(in crate::pool) struct Chunk {
    pub(in crate::pool) bytes: u64,
    pub(in crate::pool) backing: Backing,
}

impl Segments {
    pub(super) fn insert(&mut self, tag: TagKey, range: DeviceRange, first: BlockKey) {
        let key = self.table.insert(Segment { tag, range, first, chunks: BTreeMap::new() });
        self.bases.insert(range.addr, key);
        self.tags.entry(tag).or_default().insert(key);
    }

    pub(super) fn remove(&mut self, key: SegmentKey) {
        let Some(Segment { tag, range, .. }) = self.table.remove(key) else { return };
        self.bases.remove(&range.addr);
        if let Some(of_tag) = self.tags.get_mut(&tag) {
            of_tag.remove(&key);
            if of_tag.is_empty() {
                self.tags.remove(&tag);
            }
        }
    }

    pub(in crate::pool) fn get(&self, key: SegmentKey) -> Option<&Segment> {
        self.table.get(key)
    }

    /// The segment that holds an address of a block.
    pub(in crate::pool) fn of_addr(&self, addr: u64) -> SegmentKey {
        self.bases.range(..=addr).next_back().map_or_else(SegmentKey::default, |(_, key)| *key)
    }

    pub(in crate::pool) fn len(&self) -> usize {
        self.table.len()
    }

    pub(in crate::pool) fn iter(&self) -> impl Iterator<Item = (SegmentKey, &Segment)> {
        self.table.iter().inspect(|_| visits::count())
    }

    pub(in crate::pool) fn of_tag(&self, tag: TagKey) -> impl Iterator<Item = (SegmentKey, &Segment)> {
        let keys = self.tags.get(&tag).into_iter().flatten();
        keys.filter_map(|key| Some((*key, self.table.get(*key).inspect(|_| visits::count())?)))
    }

    pub(in crate::pool) fn has_some_of(&self, tag: TagKey) -> bool {
        self.tags.contains_key(&tag)
    }

    pub(in crate::pool) fn keys_of(&self, tag: TagKey) -> Vec<SegmentKey> {
        self.of_tag(tag).map(|(key, _)| key).collect()
    }

    pub(in crate::pool) fn tag_of(&self, key: SegmentKey) -> Option<TagKey> {
        self.table.get(key).map(|segment| segment.tag)
    }

    /// A copy of a chunk, to be mapped or unmapped.
    pub(in crate::pool) fn mapping(&self, (segment, addr): Location) -> Option<Mapping> {
        let chunk = self.table.get(segment)?.chunks.get(&addr)?;
        Some(Mapping { segment, range: DeviceRange::new(addr, chunk.bytes), backing: chunk.backing })
    }

    /// Writes back the backings of chunks, and adds new chunks.
    pub(in crate::pool) fn store(&mut self, mappings: &[Mapping]) {
        for mapping in mappings {
            let Some(segment) = self.table.get_mut(mapping.segment) else { continue };
            let new = Chunk { bytes: mapping.range.bytes, backing: mapping.backing };
            segment.chunks.entry(mapping.range.addr).or_insert(new).backing = mapping.backing;
        }
    }

    /// For a chunk whose memory is gone, or owned by the caller.
    pub(in crate::pool) fn set_absent(&mut self, (segment, addr): Location) {
        let chunk = self.table.get_mut(segment).and_then(|segment| segment.chunks.get_mut(&addr));
        chunk.into_iter().for_each(|chunk| chunk.backing = Backing::Absent);
    }

    pub(super) fn forget_chunks(&mut self, key: SegmentKey, start: u64, end: u64) {
        if let Some(segment) = self.table.get_mut(key) {
            segment.chunks.extract_if(start..end, |_, _| true).for_each(drop);
        }
    }

    /// Replaces the chunks that begin in `range` by chunks without memory.
    pub(super) fn replace_absent(
        &mut self,
        key: SegmentKey,
        range: DeviceRange,
        mappings: impl Iterator<Item = DeviceRange>,
    ) {
        self.forget_chunks(key, range.addr, range.end());
        if let Some(segment) = self.table.get_mut(key) {
            let absent = |bytes| Chunk { bytes, backing: Backing::Absent };
            segment.chunks.extend(mappings.map(|mapping| (mapping.addr, absent(mapping.bytes))));
        }
    }
}

impl Segment {
    pub(in crate::pool) fn tag(&self) -> TagKey {
        self.tag
    }

    pub(in crate::pool) fn range(&self) -> DeviceRange {
        self.range
    }

    pub(super) fn first(&self) -> BlockKey {
        self.first
    }

    /// In address order.
    pub(in crate::pool) fn chunks(&self) -> impl DoubleEndedIterator<Item = (u64, &Chunk)> {
        self.chunks.iter().map(|(at, chunk)| (*at, chunk))
    }

    /// Those that begin in `start..end`.
    pub(in crate::pool) fn chunks_in(
        &self,
        start: u64,
        end: u64,
    ) -> impl DoubleEndedIterator<Item = (u64, &Chunk)> {
        self.chunks.range(start..end).map(|(at, chunk)| (*at, chunk))
    }

    /// Those that `start..end` touches.
    pub(in crate::pool) fn touching(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Chunk)> {
        let first = self.chunks.range(..=start).next_back().filter(|(at, chunk)| *at + chunk.bytes > start);
        let from = first.map_or(start, |(at, _)| *at);
        self.chunks.range(from..end).map(|(at, chunk)| (*at, chunk))
    }

    /// The chunk that `addr` would cut.
    pub(super) fn across(&self, addr: u64) -> Option<(u64, &Chunk)> {
        let before = self.chunks.range(..addr).next_back().map(|(at, chunk)| (*at, chunk));
        before.filter(|(at, chunk)| at + chunk.bytes > addr)
    }

    /// Bytes of its chunks that have memory.
    pub(in crate::pool) fn held_bytes(&self) -> u64 {
        let held = self.chunks.values().filter(|chunk| chunk.backing != Backing::Absent);
        held.map(|chunk| chunk.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment() -> Segment {
        let chunk = |bytes| Chunk { bytes, backing: Backing::Absent };
        let chunks = BTreeMap::from([(100, chunk(10)), (110, chunk(40)), (170, chunk(10))]);
        Segment { tag: TagKey::default(), range: DeviceRange::new(100, 100), first: BlockKey::NONE, chunks }
    }

    #[test]
    fn chunks_that_a_range_touches() {
        let segment = segment();
        let touched = |start, end| segment.touching(start, end).map(|(at, _)| at).collect::<Vec<_>>();
        assert_eq!(touched(100, 101), [100]);
        assert_eq!(touched(109, 111), [100, 110]);
        assert_eq!(touched(149, 150), [110]);
        assert_eq!(touched(150, 170), [] as [u64; 0]);
        assert_eq!(touched(120, 200), [110, 170]);
        assert_eq!(touched(180, 200), [] as [u64; 0]);
        let across =
            [100, 109, 110, 149, 150, 160, 171, 180].map(|addr| segment.across(addr).map(|(at, _)| at));
        assert_eq!(across, [None, Some(100), None, Some(110), None, None, Some(170), None]);
    }
}
