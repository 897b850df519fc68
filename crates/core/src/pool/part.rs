//! Giving a part of a live block back, and what becomes of it.
//!
//! The block is cut, and the part goes the way of every freed block. Where it takes a chunk larger than a granule
//! only in part, that piece is *bound*: the chunk cannot leave, and nothing else is put there, before everything in
//! it is free. Then the bound pieces of the chunk are one coarse piece, as if they had been freed together.

use super::bins::UNIT_BYTES;
use super::blocks::{BlockKey, Kind};
use super::error::PoolError;
use super::handle::{Block, BlockId};
use super::segment::Place;
use super::state::State;
use super::tags::TagKey;
use super::{Pool, Result};
use crate::driver::DeviceRange;

impl Pool {
    /// Gives `part` of a block back, asleep or awake, in every way like a block of that extent: in the order of the
    /// block's stream, and after what is queued by now on streams that [`Pool::record_use`] named. `part` lies inside
    /// the block and begins and ends on multiples of 512 bytes. Returns what stays live, in address order: none, one
    /// or two blocks, where they were, with the bytes and recorded uses that they had. Their handles are new, and the
    /// old one is stale. Never waits.
    ///
    /// Memory leaves by whole chunks ([`PoolConfig::chunk_granules`](super::PoolConfig::chunk_granules)) and spans
    /// ([`PoolConfig::span_granules`](super::PoolConfig::span_granules)): one of which something is still live stays
    /// where it is as a whole, a span until its tag sleeps. Where parts of large blocks are to be given back, chunks of
    /// one granule serve best.
    ///
    /// # Errors
    /// `StaleBlock`; `InvalidPart`.
    pub fn free_part(&self, block: BlockId, part: DeviceRange) -> Result<Vec<Block>> {
        let mut state = self.shared.open_state()?;
        let (waits, rest) = state.free_part(block, part)?;
        self.freed(state, waits);
        Ok(rest)
    }
}

impl State {
    /// Cuts `part` out of a live block and frees it. Returns whether other streams have to be waited for, and the
    /// live blocks that are left.
    fn free_part(&mut self, id: BlockId, part: DeviceRange) -> Result<(bool, Vec<Block>)> {
        const OP: &str = "free a part of";
        let whole = self.live_block(OP, id)?;
        let range = DeviceRange::new(whole.addr, whole.bytes());
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
        if !self.blocks.has_room(4) {
            return invalid("the pool has as many blocks as it can count; free some as a whole");
        }
        if part == range {
            return Ok((self.free(OP, id)?, Vec::new()));
        }
        let tag = self.lane(whole.lane).tag();
        if whole.bytes() >= self.shape.chunk_bytes && self.shape.chunk_bytes > self.shape.granule_bytes {
            self.tag_mut(tag).is_cut = true;
        }
        let uses = self.uses.remove(&id.key);
        self.fine_demand_bytes -= self.fine_demand(whole.bytes());
        self.tag_mut(tag).live_blocks -= 1;
        let (mut freed, mut rest) = (id.key, Vec::new());
        if range.addr < part.addr {
            freed = self.blocks.split(id.key, part.addr);
            self.blocks[id.key].slack = 0;
            rest.push(self.rename(id.key, tag));
        }
        if part.end() < range.end() {
            let behind = self.blocks.split(freed, part.end());
            self.blocks[freed].slack = 0;
            rest.push(self.rename(behind, tag));
        }
        let freed = self.rename(freed, tag);
        for key in rest.iter().map(|block| block.id.key).chain([freed.id.key]) {
            uses.iter().for_each(|streams| drop(self.uses.insert(key, streams.clone())));
        }
        Ok((self.free(OP, freed.id)?, rest))
    }

    /// Makes a piece of what was one live block a live block of its own.
    fn rename(&mut self, key: BlockKey, tag: TagKey) -> Block {
        let serial = self.next_serial;
        self.next_serial += 1;
        self.blocks[key].stamp = serial;
        let block = self.blocks[key];
        self.fine_demand_bytes += self.fine_demand(block.bytes());
        self.tag_mut(tag).live_blocks += 1;
        let range = DeviceRange::new(block.addr, block.bytes());
        let id = BlockId { pool: self.pool, key, serial };
        Block { id, range, requested_bytes: block.requested_bytes() }
    }

    // ---- bound pieces ----

    /// The chunk that a bound piece lies in.
    fn chunk_of(&self, addr: u64) -> Option<(Place, u64)> {
        let key = self.segment_of(addr);
        let (at, chunk) = self.segments.get(key)?.touching(addr, addr + 1).next()?;
        Some(((key, at), at + chunk.bytes))
    }

    /// Whether neighbours that are bound lie in one chunk.
    pub(super) fn share_chunk(&self, a: BlockKey, b: BlockKey) -> bool {
        let chunk_of = |key: BlockKey| self.chunk_of(self.blocks[key].addr);
        chunk_of(a).is_some_and(|chunk| chunk_of(b) == Some(chunk))
    }

    /// After a span, which is in a segment whose first block is `first`, has been made chunks: what was bound is free as
    /// far as the chunks are.
    pub(super) fn rebind(&mut self, first: BlockKey, span: DeviceRange) {
        let mut next = self.block_at(first, span.addr);
        let mut bound = Vec::new();
        while next.is_some() && self.blocks[next].addr < span.end() {
            bound.extend((self.blocks.kind(next) == Kind::Bound).then_some(next));
            next = self.blocks[next].next;
        }
        for key in bound {
            self.scatter_by_chunks(key, self.blocks[key].stamp);
        }
    }

    /// After a piece has become bound: if it was the last of its chunk in use, the chunk is free as a whole. Returns
    /// the piece that holds it then. All pieces are of one lane: that of the block that the chunk was allocated for.
    pub(super) fn unbind(&mut self, key: BlockKey) -> BlockKey {
        let Some((place, end)) = self.chunk_of(self.blocks[key].addr) else { return key };
        let first = self.block_at(key, place.1);
        let mut pieces = self.blocks.walk(first).take_while(|(_, piece)| piece.addr < end);
        let is_free = pieces.all(|(kind, _)| kind == Kind::Bound);
        drop(pieces);
        if !is_free {
            return key;
        }
        while self.blocks[first].end() < end {
            self.blocks.join_next(first);
        }
        let stamp = self.blocks[first].stamp;
        self.put(first, Kind::Coarse, stamp)
    }
}
