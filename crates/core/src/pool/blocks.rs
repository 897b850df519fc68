//! Blocks: how a segment's addresses are cut up, and which free piece serves a request.
//!
//! Blocks of a segment form a list in address order. Freeing joins a block with free neighbours, so two free
//! blocks never touch. [`FreeIndex`] finds the smallest free block that fits (best fit, lowest address first),
//! which keeps large blocks whole for large requests. Keys are generational: the key of a block that was
//! freed finds nothing, however often its place is used again.

use std::collections::BTreeMap;

use slotmap::SlotMap;

use super::segment::SegmentKey;

slotmap::new_key_type! {
    /// A block of a pool, live or free.
    pub(super) struct BlockKey;
}

/// A piece of a segment.
#[derive(Debug, Clone)]
pub(super) struct BlockEntry {
    pub(super) segment: SegmentKey,
    /// Bytes from the segment's first address.
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// Bytes asked for; `None` when the block is free.
    pub(super) requested_bytes: Option<u64>,
    /// Of a live block: which allocation of the pool it is.
    pub(super) serial: u64,
    prev: Option<BlockKey>,
    pub(super) next: Option<BlockKey>,
}

/// All blocks of a pool.
#[derive(Debug, Default)]
pub(super) struct Blocks(SlotMap<BlockKey, BlockEntry>);

/// Free blocks of one tag, by size and then address.
#[derive(Debug, Default)]
pub(super) struct FreeIndex(BTreeMap<(u64, u64), BlockKey>);

impl FreeIndex {
    pub(super) fn insert(&mut self, bytes: u64, addr: u64, key: BlockKey) {
        self.0.insert((bytes, addr), key);
    }

    pub(super) fn remove(&mut self, bytes: u64, addr: u64) {
        self.0.remove(&(bytes, addr));
    }

    /// Free blocks that hold `bytes` aligned to `align`, smallest first, with the address of the fit.
    pub(super) fn fitting(&self, bytes: u64, align: u64) -> impl Iterator<Item = (BlockKey, u64)> {
        self.0.range((bytes, 0)..).filter_map(move |(&(len, addr), &key)| {
            let at = addr.next_multiple_of(align);
            (at - addr + bytes <= len).then_some((key, at))
        })
    }
}

impl Blocks {
    pub(super) fn get(&self, key: BlockKey) -> Option<&BlockEntry> {
        self.0.get(key)
    }

    /// A free block over a whole new segment, whose key is not known yet.
    pub(super) fn insert_whole(&mut self, bytes: u64) -> BlockKey {
        let segment = SegmentKey::default();
        self.0.insert(BlockEntry {
            segment,
            offset: 0,
            bytes,
            requested_bytes: None,
            serial: 0,
            prev: None,
            next: None,
        })
    }

    pub(super) fn set_segment(&mut self, key: BlockKey, segment: SegmentKey) {
        if let Some(block) = self.0.get_mut(key) {
            block.segment = segment;
        }
    }

    pub(super) fn remove(&mut self, key: BlockKey) {
        self.0.remove(key);
    }

    /// The blocks of a segment in address order, from its first one on.
    pub(super) fn walk(&self, first: BlockKey) -> impl Iterator<Item = &BlockEntry> {
        std::iter::successors(self.0.get(first), |block| block.next.and_then(|next| self.0.get(next)))
    }

    /// Cuts `bytes` at `offset` out of the free block `key` and makes them live. What is left before and
    /// behind stays free; returns their keys. The live block keeps `key`.
    pub(super) fn carve(
        &mut self,
        key: BlockKey,
        offset: u64,
        bytes: u64,
        requested_bytes: u64,
        serial: u64,
    ) -> (Option<BlockKey>, Option<BlockKey>) {
        let Some(whole) = self.0.get(key).cloned() else { return (None, None) };
        let before = (offset > whole.offset).then(|| {
            let bytes = offset - whole.offset;
            self.0.insert(BlockEntry { bytes, next: Some(key), ..whole.clone() })
        });
        let end = offset + bytes;
        let behind = (end < whole.offset + whole.bytes).then(|| {
            let bytes = whole.offset + whole.bytes - end;
            self.0.insert(BlockEntry { offset: end, bytes, prev: Some(key), ..whole.clone() })
        });
        self.link(whole.prev, before.or(Some(key)));
        self.link(behind.or(Some(key)), whole.next);
        if let Some(block) = self.0.get_mut(key) {
            *block = BlockEntry {
                offset,
                bytes,
                requested_bytes: Some(requested_bytes),
                serial,
                prev: before.or(whole.prev),
                next: behind.or(whole.next),
                ..whole
            };
        }
        (before, behind)
    }

    /// Frees the live block `key`, joined with free neighbours. Returns the keys and entries that are gone,
    /// neighbours only, and the key of the free block that is there now.
    pub(super) fn release(&mut self, key: BlockKey) -> Option<(Vec<BlockEntry>, BlockKey)> {
        let freed = self.0.remove(key)?;
        let mut joined = BlockEntry { requested_bytes: None, ..freed };
        let mut gone = Vec::new();
        if let Some(prev) = self.take_free(joined.prev) {
            joined.offset = prev.offset;
            joined.bytes += prev.bytes;
            joined.prev = prev.prev;
            gone.push(prev);
        }
        if let Some(next) = self.take_free(joined.next) {
            joined.bytes += next.bytes;
            joined.next = next.next;
            gone.push(next);
        }
        let (prev, next) = (joined.prev, joined.next);
        let key = self.0.insert(joined);
        self.link(prev, Some(key));
        self.link(Some(key), next);
        Some((gone, key))
    }

    fn take_free(&mut self, key: Option<BlockKey>) -> Option<BlockEntry> {
        let key = key.filter(|key| self.0.get(*key).is_some_and(|block| block.requested_bytes.is_none()))?;
        self.0.remove(key)
    }

    fn link(&mut self, prev: Option<BlockKey>, next: Option<BlockKey>) {
        if let Some(block) = prev.and_then(|key| self.0.get_mut(key)) {
            block.next = next;
        }
        if let Some(block) = next.and_then(|key| self.0.get_mut(key)) {
            block.prev = prev;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(blocks: &Blocks, first: BlockKey) -> Vec<(u64, u64, bool)> {
        blocks.walk(first).map(|b| (b.offset, b.bytes, b.requested_bytes.is_some())).collect()
    }

    #[test]
    fn carving_and_releasing_leave_the_list_whole() {
        let mut blocks = Blocks::default();
        let whole = blocks.insert_whole(100);
        let (before, behind) = blocks.carve(whole, 10, 20, 19, 1);
        let (before, behind) = (before.unwrap(), behind.unwrap());
        assert_eq!(shape(&blocks, before), [(0, 10, false), (10, 20, true), (30, 70, false)]);
        let (none, tail) = blocks.carve(behind, 30, 30, 30, 2);
        assert!(none.is_none());
        assert_eq!(shape(&blocks, before), [(0, 10, false), (10, 20, true), (30, 30, true), (60, 40, false)]);
        let (gone, front) = blocks.release(whole).unwrap();
        assert_eq!(gone.len(), 1);
        assert!(blocks.get(whole).is_none(), "the key of a freed block is stale");
        assert_eq!(shape(&blocks, front), [(0, 30, false), (30, 30, true), (60, 40, false)]);
        let (gone, all) = blocks.release(behind).unwrap();
        assert_eq!(gone.len(), 2);
        assert_eq!(shape(&blocks, all), [(0, 100, false)]);
        assert!(blocks.get(tail.unwrap()).is_none());
        assert!(blocks.release(behind).is_none(), "a second free finds nothing");
    }

    #[test]
    fn best_fit_is_the_smallest_that_holds_the_alignment() {
        let mut free = FreeIndex::default();
        for (bytes, addr) in [(64, 1000), (32, 512), (32, 100), (16, 0)] {
            free.insert(bytes, addr, BlockKey::default());
        }
        assert_eq!(free.fitting(20, 1).map(|(_, at)| at).collect::<Vec<_>>(), [100, 512, 1000]);
        assert_eq!(free.fitting(20, 512).map(|(_, at)| at).next(), Some(512));
        assert_eq!(free.fitting(65, 1).next(), None);
    }
}
