//! Blocks: how the addresses of segments are cut up.
//!
//! Every byte of a segment belongs to one block, and the blocks of a segment form a list in address order.
//! Cutting one in two and joining two neighbours is all that ever happens to them. A block is 64 bytes, so
//! that looking at one costs one cache line.

use std::ops::{Index, IndexMut};

use super::segment::SegmentKey;

/// A block of a pool. The key of a block that is gone may come back as that of another; whoever keeps keys
/// outside compares the block's serial too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct BlockKey(u32);

/// What a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Kind {
    /// Not a block: a place in the table that is free.
    #[default]
    Vacant,
    /// In use.
    Live,
    /// Freed, but other streams may still use it.
    Waiting,
    /// Free, in chunks of one granule.
    Fine,
    /// Free, whole chunks larger than a granule.
    Coarse,
    /// Free addresses without memory, whole granules.
    Bare,
    /// Memory that nothing lives in and that the driver has refused to unmap so far. One chunk.
    Stuck,
}

/// A piece of a segment.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(super) struct Block {
    pub(super) addr: u64,
    pub(super) bytes: u64,
    /// Of a live block: which allocation of the pool it is. Of a free one: up to which tick of its stream's
    /// clock it may be in use.
    pub(super) stamp: u64,
    pub(super) segment: SegmentKey,
    pub(super) prev: BlockKey,
    pub(super) next: BlockKey,
    /// Neighbours in a list of free pieces; of a vacant place, the next vacant one.
    pub(super) bin_prev: BlockKey,
    pub(super) bin_next: BlockKey,
    /// The tag and stream it was allocated for or freed by.
    pub(super) lane: u32,
    /// Bytes at the end that were not asked for.
    pub(super) slack: u16,
    pub(super) kind: Kind,
    /// What the neighbours are, so that a neighbour in use need not be looked at.
    pub(super) prev_kind: Kind,
    pub(super) next_kind: Kind,
}

/// All blocks of a pool.
#[derive(Debug)]
pub(super) struct Blocks {
    table: Vec<Block>,
    vacant: BlockKey,
}

impl BlockKey {
    pub(super) const NONE: Self = Self(u32::MAX);
    /// The smallest of all keys.
    pub(super) const FIRST: Self = Self(0);

    pub(super) const fn is_none(self) -> bool {
        self.0 == Self::NONE.0
    }

    pub(super) const fn is_some(self) -> bool {
        !self.is_none()
    }

    pub(super) fn some(self) -> Option<Self> {
        self.is_some().then_some(self)
    }
}

impl Default for Block {
    fn default() -> Self {
        Self {
            addr: 0,
            bytes: 0,
            stamp: 0,
            segment: SegmentKey::default(),
            prev: BlockKey::NONE,
            next: BlockKey::NONE,
            bin_prev: BlockKey::NONE,
            bin_next: BlockKey::NONE,
            lane: 0,
            slack: 0,
            kind: Kind::Vacant,
            prev_kind: Kind::Vacant,
            next_kind: Kind::Vacant,
        }
    }
}

impl Block {
    pub(super) fn end(&self) -> u64 {
        self.addr + self.bytes
    }

    /// Whether somebody may be using it.
    pub(super) fn is_used(&self) -> bool {
        matches!(self.kind, Kind::Live | Kind::Waiting)
    }
}

impl Default for Blocks {
    fn default() -> Self {
        Self { table: Vec::new(), vacant: BlockKey::NONE }
    }
}

impl Index<BlockKey> for Blocks {
    type Output = Block;
    fn index(&self, key: BlockKey) -> &Block {
        &self.table[key.0 as usize]
    }
}

impl IndexMut<BlockKey> for Blocks {
    fn index_mut(&mut self, key: BlockKey) -> &mut Block {
        &mut self.table[key.0 as usize]
    }
}

impl Blocks {
    /// The live block that has this key and serial.
    pub(super) fn live(&self, key: BlockKey, serial: u64) -> Option<&Block> {
        self.table.get(key.0 as usize).filter(|block| block.kind == Kind::Live && block.stamp == serial)
    }

    /// Whether there is room for `more` further blocks.
    pub(super) fn has_room(&self, more: u32) -> bool {
        u32::try_from(self.table.len()).is_ok_and(|len| len < u32::MAX - more)
    }

    pub(super) fn insert(&mut self, block: Block) -> BlockKey {
        if let Some(key) = self.vacant.some() {
            self.vacant = self[key].bin_next;
            self[key] = block;
            return key;
        }
        // `has_room` is asked before anything is allocated.
        let key = BlockKey(u32::try_from(self.table.len()).unwrap_or(u32::MAX));
        self.table.push(block);
        key
    }

    pub(super) fn remove(&mut self, key: BlockKey) {
        let vacant = std::mem::replace(&mut self.vacant, key);
        self[key] = Block { bin_next: vacant, ..Block::default() };
    }

    /// Makes a block another kind, and lets its neighbours know.
    pub(super) fn set_kind(&mut self, key: BlockKey, kind: Kind) {
        let block = &mut self[key];
        block.kind = kind;
        let (prev, next) = (block.prev, block.next);
        if prev.is_some() {
            self[prev].next_kind = kind;
        }
        if next.is_some() {
            self[next].prev_kind = kind;
        }
    }

    /// Cuts a block at an address inside it; the part behind gets a new key and is otherwise the same.
    pub(super) fn split(&mut self, key: BlockKey, at: u64) -> BlockKey {
        let whole = self[key];
        let bytes = whole.end() - at;
        let behind = self.insert(Block { addr: at, bytes, prev: key, prev_kind: whole.kind, ..whole });
        let front = &mut self[key];
        front.bytes = at - whole.addr;
        front.next = behind;
        front.next_kind = whole.kind;
        if whole.next.is_some() {
            self[whole.next].prev = behind;
        }
        behind
    }

    /// Joins a block with the next one, which is gone.
    pub(super) fn join_next(&mut self, key: BlockKey) {
        let next = self[key].next;
        let Block { bytes, stamp, next: behind, next_kind, .. } = self[next];
        let front = &mut self[key];
        let kind = front.kind;
        front.bytes += bytes;
        front.stamp = front.stamp.max(stamp);
        front.next = behind;
        front.next_kind = next_kind;
        if behind.is_some() {
            let behind = &mut self[behind];
            (behind.prev, behind.prev_kind) = (key, kind);
        }
        self.remove(next);
    }

    /// The blocks of a segment in address order, from its first one on.
    pub(super) fn walk(&self, first: BlockKey) -> impl Iterator<Item = (BlockKey, &Block)> {
        std::iter::successors(first.some(), |key| self[*key].next.some()).map(|key| (key, &self[key]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(blocks: &Blocks, first: BlockKey) -> Vec<(u64, u64)> {
        blocks.walk(first).map(|(_, block)| (block.addr, block.bytes)).collect()
    }

    #[test]
    fn a_block_is_one_cache_line() {
        assert_eq!(size_of::<Block>(), 64);
    }

    #[test]
    fn splitting_and_joining_leave_the_list_whole() {
        let mut blocks = Blocks::default();
        let first = blocks.insert(Block { addr: 100, bytes: 100, kind: Kind::Fine, ..Block::default() });
        let last = blocks.split(first, 160);
        let middle = blocks.split(first, 130);
        assert_eq!(shape(&blocks, first), [(100, 30), (130, 30), (160, 40)]);
        assert_eq!((blocks[last].prev, blocks[middle].prev, blocks[middle].next), (middle, first, last));
        blocks[middle].stamp = 7;
        blocks.join_next(first);
        assert_eq!(shape(&blocks, first), [(100, 60), (160, 40)]);
        assert_eq!((blocks[first].stamp, blocks[last].prev), (7, first));
        assert_eq!(blocks[middle].kind, Kind::Vacant);
        blocks.set_kind(first, Kind::Live);
        blocks.set_kind(last, Kind::Bare);
        assert_eq!((blocks[first].next_kind, blocks[last].prev_kind), (Kind::Bare, Kind::Live));
        blocks.set_kind(last, Kind::Live);
        let again = blocks.split(first, 101);
        assert_eq!(again, middle, "places are used again");
        blocks.join_next(again);
        blocks.join_next(first);
        assert_eq!(shape(&blocks, first), [(100, 100)]);
    }

    #[test]
    fn only_the_right_serial_finds_a_live_block() {
        let mut blocks = Blocks::default();
        let key = blocks.insert(Block { bytes: 512, stamp: 5, kind: Kind::Live, ..Block::default() });
        assert!(blocks.live(key, 5).is_some());
        assert!(blocks.live(key, 4).is_none());
        blocks[key].kind = Kind::Fine;
        assert!(blocks.live(key, 5).is_none());
        blocks.remove(key);
        assert!(blocks.live(key, 5).is_none());
        assert!(blocks.live(BlockKey::NONE, 0).is_none());
    }
}
