//! Frees a part of a live block.
//!
//! The block is split, and the part is freed like any block. A part of a chunk larger than a granule is freed as a
//! *pinned* block. It can neither be unmapped nor serve a request until the whole chunk is free. Then the pinned
//! blocks of the chunk become one large block, as if freed together.

use super::Heap;
use super::blocks::{HeapBlock, HeapBlockKind};
use crate::driver::DeviceRange;
use crate::pool::tools::error::{PoolError, Result};
use crate::pool::tools::handle::{Block as Handle, BlockId};
use crate::pool::tools::keys::{BlockKey, ListKey, Location, TagKey};
use crate::pool::tools::units::UNIT_BYTES;

impl Heap {
    /// Returns `part` as a live block, and the live blocks that are left.
    pub(in crate::pool) fn cut(
        &mut self,
        op: &'static str,
        id: BlockId,
        part: DeviceRange,
    ) -> Result<(BlockId, Vec<Handle>)> {
        let whole = self.live_block(op, id)?;
        let range = DeviceRange::new(whole.addr, whole.bytes());
        self.check_part(id, part, range)?;
        if part == range {
            return Ok((id, Vec::new()));
        }
        let tag = self.tag_of_list(whole.list);
        if self.shape.is_large(whole.bytes()) {
            self.lists.note_cut_chunks(tag);
        }
        let uses = self.deferred.take_uses(id.key);
        self.counts.remove(&self.shape, tag, whole.bytes());
        let (mut cut, mut rest) = (id.key, Vec::new());
        if range.addr < part.addr {
            cut = self.blocks.split(id.key, part.addr);
            self.blocks[id.key].slack = 0;
            rest.push(self.renumber(id.key, tag));
        }
        if part.end() < range.end() {
            let behind = self.blocks.split(cut, part.end());
            self.blocks[cut].slack = 0;
            rest.push(self.renumber(behind, tag));
        }
        let cut = self.renumber(cut, tag).id;
        if let Some(streams) = uses {
            for key in rest.iter().map(|block| block.id.key).chain([cut.key]) {
                self.deferred.set_uses(key, streams.clone());
            }
        }
        Ok((cut, rest))
    }

    fn check_part(&self, id: BlockId, part: DeviceRange, range: DeviceRange) -> Result<()> {
        let invalid = |reason| Err(PoolError::InvalidPart { block: id, part, range, reason });
        if part.bytes == 0 {
            return invalid("it has no bytes");
        }
        if !range.contains(&part) {
            return invalid("it does not lie inside; take it from the block's range");
        }
        if !part.addr.is_multiple_of(UNIT_BYTES) || !part.bytes.is_multiple_of(UNIT_BYTES) {
            return invalid("it must begin and end on multiples of 512 bytes");
        }
        if !self.blocks.has_capacity(4) {
            return invalid("the pool has as many blocks as it can count; free some as a whole");
        }
        Ok(())
    }

    /// Gives a split part its own serial.
    fn renumber(&mut self, key: BlockKey, tag: TagKey) -> Handle {
        let serial = self.next_serial;
        self.next_serial += 1;
        self.blocks[key].freed_epoch = serial;
        let block = self.blocks[key];
        self.counts.add(&self.shape, tag, block.bytes());
        let range = DeviceRange::new(block.addr, block.bytes());
        Handle {
            id: BlockId { pool: self.pool, key, serial },
            range,
            requested_bytes: block.requested_bytes(),
        }
    }

    /// The location and end of the chunk at `addr`.
    fn chunk_at(&self, addr: u64) -> Option<(Location, u64)> {
        let key = self.segments.of_addr(addr);
        let (at, chunk) = self.segments.get(key)?.touching(addr, addr + 1).next()?;
        Some(((key, at), at + chunk.bytes))
    }

    pub(super) fn share_chunk(&self, a: BlockKey, b: BlockKey) -> bool {
        let chunk_of = |key: BlockKey| self.chunk_at(self.blocks[key].addr);
        chunk_of(a).is_some_and(|chunk| chunk_of(b) == Some(chunk))
    }

    /// Makes the chunk of a pinned block one large block if all of it is free, and returns that. Pinned blocks of
    /// several lists with pending work stay pinned: [`Heap::join_lists`] tries again.
    pub(super) fn unpin_chunk(&mut self, key: BlockKey) -> BlockKey {
        let Some((location, end)) = self.chunk_at(self.blocks[key].addr) else { return key };
        let first = self.block_at(key, location.1);
        let Some((list, freed_epoch)) = self.freed_at(first, end) else { return key };
        self.unlink(first);
        while self.blocks[first].end() < end {
            self.unlink(self.blocks[first].next);
            self.blocks.join_next(first);
        }
        self.blocks[first].list = list;
        self.insert_free(first, HeapBlockKind::Large, freed_epoch)
    }

    /// If the chunk, whose first block is `first`, is free as a whole: the list and epoch that it waits for.
    fn freed_at(&self, first: BlockKey, end: u64) -> Option<(ListKey, u64)> {
        let in_chunk = || self.blocks.walk(first).take_while(|(_, block)| block.addr < end);
        if in_chunk().any(|(kind, _)| kind != HeapBlockKind::Pinned) {
            return None;
        }
        let mut pending = in_chunk().map(|(_, block)| block).filter(|block| !self.has_passed(block));
        let (list, freed_epoch) =
            pending.next().map_or((self.blocks[first].list, 0), |block| (block.list, block.freed_epoch));
        let of_list =
            |last: u64, block: &HeapBlock| (block.list == list).then_some(last.max(block.freed_epoch));
        pending.try_fold(freed_epoch, of_list).map(|freed_epoch| (list, freed_epoch))
    }
}
