//! Blocks: how the addresses of segments are divided.
//!
//! Every byte of a segment belongs to one block, of a list in address order. Only splitting a block and joining
//! neighbours change it. Blocks are small: with a hundred thousand of them, reading memory is what costs time.

use std::ops::{Index, IndexMut};

use crate::pool::tools::keys::BlockKey;
use crate::pool::tools::units::UNIT_BYTES;
use crate::pool::tools::visits;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::pool) enum HeapBlockKind {
    #[default]
    Vacant,
    Live,
    /// Freed, but other streams may still use it.
    Waiting,
    /// Free, in chunks of one granule; cut anywhere.
    Small,
    /// Free, in whole chunks larger than a granule; cut only between chunks.
    Large,
    /// Free, part of one chunk larger than a granule, whose other parts are in use. Serves no request
    /// ([`super::parts`]).
    Pinned,
    /// Free addresses without memory, whole granules.
    Unmapped,
    /// One chunk that no block uses and the driver has refused to unmap.
    UnmapFailed,
}

#[derive(Debug, Clone, Copy)]
pub(in crate::pool) struct HeapBlock {
    pub(in crate::pool) addr: u64,
    pub(super) units: u32,
    /// Of a live block: its serial number in the pool. Of a free one: the epoch of its stream's clock that it waits
    /// for.
    pub(super) freed_epoch: u64,
    pub(super) prev: BlockKey,
    pub(super) next: BlockKey,
    /// Neighbours in a free list; of a vacant entry, the next vacant one.
    pub(super) bin_prev: BlockKey,
    pub(super) bin_next: BlockKey,
    /// The list of the tag and stream that allocated or freed it.
    pub(in crate::pool) list: u16,
    /// Rounding at the end, in bytes.
    pub(super) slack: u16,
}

#[derive(Debug)]
pub(super) struct Blocks {
    table: Vec<HeapBlock>,
    /// Apart, so that they fit the cache, and neighbours in use need not be read.
    kinds: Vec<HeapBlockKind>,
    vacant: BlockKey,
}

impl HeapBlockKind {
    /// Whether the caller or queued work may be using it.
    pub(in crate::pool) fn is_used(self) -> bool {
        matches!(self, Self::Live | Self::Waiting)
    }
}

/// No block is larger than [`BYTES_MAX`](crate::pool::tools::units::BYTES_MAX).
fn to_units(bytes: u64) -> u32 {
    u32::try_from(bytes / UNIT_BYTES).unwrap_or(u32::MAX)
}

impl Default for HeapBlock {
    fn default() -> Self {
        Self {
            addr: 0,
            units: 0,
            freed_epoch: 0,
            prev: BlockKey::NONE,
            next: BlockKey::NONE,
            bin_prev: BlockKey::NONE,
            bin_next: BlockKey::NONE,
            list: 0,
            slack: 0,
        }
    }
}

impl HeapBlock {
    /// Without neighbours.
    pub(super) fn new(addr: u64, bytes: u64) -> Self {
        Self { addr, units: to_units(bytes), ..Self::default() }
    }

    pub(in crate::pool) fn bytes(&self) -> u64 {
        u64::from(self.units) * UNIT_BYTES
    }

    /// Of a live block.
    pub(in crate::pool) fn requested_bytes(&self) -> u64 {
        self.bytes() - u64::from(self.slack)
    }

    pub(in crate::pool) fn end(&self) -> u64 {
        self.addr + self.bytes()
    }
}

impl Default for Blocks {
    fn default() -> Self {
        Self { table: Vec::new(), kinds: Vec::new(), vacant: BlockKey::NONE }
    }
}

impl Index<BlockKey> for Blocks {
    type Output = HeapBlock;
    fn index(&self, key: BlockKey) -> &HeapBlock {
        visits::count();
        &self.table[key.0 as usize]
    }
}

impl IndexMut<BlockKey> for Blocks {
    fn index_mut(&mut self, key: BlockKey) -> &mut HeapBlock {
        visits::count();
        &mut self.table[key.0 as usize]
    }
}

impl Blocks {
    pub(super) fn live(&self, key: BlockKey, serial: u64) -> Option<&HeapBlock> {
        let block = self.table.get(key.0 as usize).filter(|block| block.freed_epoch == serial)?;
        (self.kind(key) == HeapBlockKind::Live).then_some(block)
    }

    /// Whether `more` further blocks can be numbered.
    pub(super) fn has_capacity(&self, more: u32) -> bool {
        u32::try_from(self.table.len()).is_ok_and(|len| len < u32::MAX - more)
    }

    pub(super) fn insert(&mut self, block: HeapBlock, kind: HeapBlockKind) -> BlockKey {
        if let Some(key) = self.vacant.some() {
            self.vacant = self[key].bin_next;
            self.kinds[key.0 as usize] = kind;
            self[key] = block;
            return key;
        }
        // Callers check `has_capacity` before they allocate.
        let key = BlockKey(u32::try_from(self.table.len()).unwrap_or(u32::MAX));
        self.table.push(block);
        self.kinds.push(kind);
        key
    }

    pub(super) fn remove(&mut self, key: BlockKey) {
        let vacant = std::mem::replace(&mut self.vacant, key);
        self.set_kind(key, HeapBlockKind::Vacant);
        self[key] = HeapBlock { bin_next: vacant, ..HeapBlock::default() };
    }

    /// [`HeapBlockKind::Vacant`] for keys of no block.
    pub(super) fn kind(&self, key: BlockKey) -> HeapBlockKind {
        self.kinds.get(key.0 as usize).copied().unwrap_or_default()
    }

    pub(super) fn set_kind(&mut self, key: BlockKey, kind: HeapBlockKind) {
        self.kinds[key.0 as usize] = kind;
    }

    /// The second part gets a new key.
    pub(super) fn split(&mut self, key: BlockKey, at: u64) -> BlockKey {
        let whole = self[key];
        let units = to_units(whole.end() - at);
        let behind = self.insert(HeapBlock { addr: at, units, prev: key, ..whole }, self.kind(key));
        let front = &mut self[key];
        front.units -= units;
        front.next = behind;
        if whole.next.is_some() {
            self[whole.next].prev = behind;
        }
        behind
    }

    pub(super) fn join_next(&mut self, key: BlockKey) {
        let next = self[key].next;
        let HeapBlock { units, freed_epoch, next: behind, .. } = self[next];
        let front = &mut self[key];
        front.units += units;
        front.freed_epoch = front.freed_epoch.max(freed_epoch);
        front.next = behind;
        if behind.is_some() {
            self[behind].prev = key;
        }
        self.remove(next);
    }

    /// In no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (HeapBlockKind, &HeapBlock)> {
        self.kinds
            .iter()
            .copied()
            .zip(&self.table)
            .filter(|(kind, _)| *kind != HeapBlockKind::Vacant)
            .inspect(|_| visits::count())
    }

    /// Entries of the table, vacant ones included.
    pub(super) fn count(&self) -> usize {
        self.table.len()
    }

    /// In address order.
    pub(super) fn walk(&self, first: BlockKey) -> impl Iterator<Item = (HeapBlockKind, &HeapBlock)> {
        std::iter::successors(first.some(), |key| self[*key].next.some())
            .map(|key| (self.kind(key), &self[key]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(blocks: &Blocks, first: BlockKey) -> Vec<(u64, u64)> {
        let units = |(_, block): (_, &HeapBlock)| (block.addr / UNIT_BYTES, block.bytes() / UNIT_BYTES);
        blocks.walk(first).map(units).collect()
    }

    #[test]
    fn a_block_is_small() {
        assert!(size_of::<HeapBlock>() <= 40);
    }

    #[test]
    fn splitting_and_joining_leave_the_list_whole() {
        let mut blocks = Blocks::default();
        let first = blocks.insert(HeapBlock::new(10 * UNIT_BYTES, 10 * UNIT_BYTES), HeapBlockKind::Small);
        let last = blocks.split(first, 16 * UNIT_BYTES);
        let middle = blocks.split(first, 13 * UNIT_BYTES);
        assert_eq!(shape(&blocks, first), [(10, 3), (13, 3), (16, 4)]);
        assert_eq!((blocks[last].prev, blocks[middle].prev, blocks[middle].next), (middle, first, last));
        blocks[middle].freed_epoch = 7;
        blocks.join_next(first);
        assert_eq!(shape(&blocks, first), [(10, 6), (16, 4)]);
        assert_eq!((blocks[first].freed_epoch, blocks[last].prev), (7, first));
        assert_eq!(blocks.kind(middle), HeapBlockKind::Vacant);
        blocks.set_kind(first, HeapBlockKind::Live);
        blocks.set_kind(last, HeapBlockKind::Unmapped);
        assert_eq!((blocks.kind(first), blocks.kind(last)), (HeapBlockKind::Live, HeapBlockKind::Unmapped));
        assert_eq!(blocks.kind(BlockKey::NONE), HeapBlockKind::Vacant);
        blocks.set_kind(last, HeapBlockKind::Live);
        let again = blocks.split(first, 11 * UNIT_BYTES);
        assert_eq!(again, middle, "addresses are used again");
        blocks.join_next(again);
        blocks.join_next(first);
        assert_eq!(shape(&blocks, first), [(10, 10)]);
    }

    #[test]
    fn only_the_right_serial_finds_a_live_block() {
        let mut blocks = Blocks::default();
        let key = blocks.insert(HeapBlock { freed_epoch: 5, ..HeapBlock::new(0, 512) }, HeapBlockKind::Live);
        assert!(blocks.live(key, 5).is_some());
        assert!(blocks.live(key, 4).is_none());
        blocks.set_kind(key, HeapBlockKind::Small);
        assert!(blocks.live(key, 5).is_none());
        blocks.remove(key);
        assert!(blocks.live(key, 5).is_none());
        assert!(blocks.live(BlockKey::NONE, 0).is_none());
    }
}
