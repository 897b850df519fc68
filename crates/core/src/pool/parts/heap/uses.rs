//! Which blocks use each granule of a segment.

use std::collections::BTreeSet;

use super::blocks::HeapBlockKind;
use super::{Heap, Segment};
use crate::driver::{BackingId, DeviceRange};
use crate::pool::tools::handle::BlockId;
use crate::pool::tools::keys::{BlockKey, SegmentKey};
use crate::pool::tools::mapping::Backing;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pool) enum Use {
    Free,
    /// Work on freed memory may be in flight.
    Pending,
    /// By one live block alone.
    Live(BlockKey),
    /// By a live block, and by others or pending work.
    Shared,
}

impl Use {
    pub(in crate::pool) fn is_live(self) -> bool {
        matches!(self, Self::Live(_) | Self::Shared)
    }

    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Free, is) | (is, Self::Free) => is,
            (a, b) if a == b => a,
            _ => Self::Shared,
        }
    }
}

/// A live block that searches start from, to avoid walking the whole segment.
#[derive(Debug, Clone, Copy)]
pub(in crate::pool) struct Landmark {
    key: BlockKey,
    serial: u64,
}

impl Heap {
    /// For an `extent` of a segment: its live granules, ascending, the backings of its chunks, and a live block in
    /// it. `None` if no block lives there, or a chunk is not mapped. The search starts at `near`, if that is live.
    pub(in crate::pool) fn live_granules(
        &self,
        segment: SegmentKey,
        extent: DeviceRange,
        near: Option<Landmark>,
    ) -> Option<(Vec<usize>, Vec<BackingId>, Landmark)> {
        let (segment, shape) = (self.segments.get(segment)?, self.shape);
        let (start, end) = (extent.addr, extent.end());
        let mut memory = Vec::new();
        let mut is_there = vec![false; shape.granules(extent.bytes)];
        for (at, chunk) in segment.touching(start, end) {
            let Backing::Mapped { id, open: true } = chunk.backing else { return None };
            memory.push(id);
            let to = shape.granules((at + chunk.bytes).min(end) - start);
            is_there[shape.granules(at.max(start) - start)..to].fill(true);
        }
        let near = near.filter(|near| {
            let block = self.blocks.live(near.key, near.serial);
            block.is_some_and(|block| segment.range().contains(&DeviceRange::new(block.addr, block.bytes())))
        });
        let mut live = vec![false; is_there.len()];
        let mut landmark = None;
        let mut next = Some(self.block_at(near.map_or(segment.first(), |near| near.key), start));
        while let Some(key) = next.filter(|key| self.blocks[*key].addr < end) {
            let block = &self.blocks[key];
            next = block.next.some();
            if self.blocks.kind(key) == HeapBlockKind::Live {
                landmark = Some(Landmark { key, serial: block.freed_epoch });
                let last = shape.granules(block.end().min(end) - 1 - start);
                live[shape.granules(block.addr.max(start) - start)..=last].fill(true);
            }
        }
        // A block that is being made has no memory yet, and no bytes.
        let granules = (0..live.len()).filter(|granule| live[*granule] && is_there[*granule]).collect();
        Some((granules, memory, landmark?))
    }

    /// In address order, each with its block and its offset there.
    pub(in crate::pool) fn live_parts(&self, range: DeviceRange) -> Vec<(BlockId, u64, DeviceRange)> {
        let segment = self.segments.get(self.segments.of_addr(range.addr));
        let Some(segment) = segment.filter(|segment| segment.range().contains(&range)) else {
            return Vec::new();
        };
        let mut parts = Vec::new();
        let mut next = Some(self.block_at(segment.first(), range.addr));
        while let Some(key) = next.filter(|key| self.blocks[*key].addr < range.end()) {
            let block = &self.blocks[key];
            next = block.next.some();
            let start = block.addr.max(range.addr);
            let end = (block.addr + block.requested_bytes()).min(range.end());
            if self.blocks.kind(key) == HeapBlockKind::Live && start < end {
                let id = BlockId { pool: self.pool, key, serial: block.freed_epoch };
                parts.push((id, start - block.addr, DeviceRange::new(start, end - start)));
            }
        }
        parts
    }

    pub(in crate::pool) fn uses_of_granules(&self, segment: &Segment) -> Vec<Use> {
        let (base, shape) = (segment.range().addr, self.shape);
        let mut uses = vec![Use::Free; shape.granules(segment.range().bytes)];
        let mut key = segment.first();
        while key.is_some() {
            let block = &self.blocks[key];
            let is = match self.blocks.kind(key) {
                HeapBlockKind::Live => Use::Live(key),
                HeapBlockKind::Waiting => Use::Pending,
                HeapBlockKind::Small | HeapBlockKind::Large | HeapBlockKind::Pinned
                    if !self.is_complete(block) =>
                {
                    Use::Pending
                }
                _ => Use::Free,
            };
            if is != Use::Free {
                let touched = shape.granules(block.addr - base)..shape.granules(block.end() - 1 - base) + 1;
                uses[touched].iter_mut().for_each(|granule| *granule = granule.and(is));
            }
            key = block.next;
        }
        uses
    }

    /// By granule: whether a block in use lies in it and in the one before.
    pub(in crate::pool) fn borders_in_blocks(&self, segment: &Segment) -> Vec<bool> {
        let (base, shape) = (segment.range().addr, self.shape);
        let mut borders = vec![false; shape.granules(segment.range().bytes)];
        for range in self.used_ranges(segment) {
            let first = shape.granules(range.addr - base);
            borders[first + 1..=shape.granules(range.end() - 1 - base)].fill(true);
        }
        borders
    }

    /// Whether a block in use touches `start..end`. Searches from `near` on: usually a neighbour of a freed
    /// block answers at once.
    pub(in crate::pool) fn is_touched(&self, near: BlockKey, start: u64, end: u64) -> bool {
        let near = self.block_at(near, start.max(self.blocks[near].addr).min(end - 1));
        let mut key = near;
        while key.is_some() && self.blocks[key].end() > start {
            if self.blocks.kind(key).is_used() && self.blocks[key].addr < end {
                return true;
            }
            key = self.blocks[key].prev;
        }
        key = self.blocks[near].next;
        while key.is_some() && self.blocks[key].addr < end {
            if self.blocks.kind(key).is_used() {
                return true;
            }
            key = self.blocks[key].next;
        }
        false
    }

    /// In address order.
    pub(in crate::pool) fn used_ranges(&self, segment: &Segment) -> Vec<DeviceRange> {
        let used = self.walk(segment).filter(|(kind, _)| kind.is_used());
        used.map(|(_, block)| DeviceRange::new(block.addr, block.bytes())).collect()
    }

    /// By address.
    pub(in crate::pool) fn touched_chunks(&self, segment: &Segment) -> BTreeSet<u64> {
        let used = self.walk(segment).filter(|(kind, _)| kind.is_used());
        used.flat_map(|(_, block)| segment.touching(block.addr, block.end()).map(|(at, _)| at)).collect()
    }
}
