//! Placement: which free addresses serve a request, and which memory they lack.
//!
//! Of the candidates looked at, the one that needs the least memory mapped is taken; among equals, the one in the
//! smallest block. New addresses compete, too, and cost the whole block. A large block gets as few chunks as possible,
//! of exactly its length: driver calls cost by the chunk, not by the byte. What its last granule has to spare serves
//! small blocks. Small blocks, and those that are freed in parts, get granules.

use std::cmp::Reverse;

use super::Heap;
use super::blocks::{HeapBlock, HeapBlockKind};
use crate::driver::DeviceRange;
use crate::pool::tools::handle::BlockId;
use crate::pool::tools::keys::{BlockKey, ListKey, SegmentKey, TagKey};
use crate::pool::tools::mapping::Mapping;
use crate::pool::tools::shape::Shape;
use crate::pool::tools::units::UNIT_BYTES;

/// Blocks looked at for a small request, and for a large one without driver calls.
const LOOKS: usize = 64;

/// The same for large requests, which cost driver calls anyway.
const MANY_LOOKS: usize = 512;

#[derive(Debug, Clone, Copy)]
pub(in crate::pool) struct Candidate {
    /// The free block at `start`.
    first: BlockKey,
    start: u64,
    /// Memory to be mapped.
    pub(in crate::pool) absent_bytes: u64,
    /// A free chunk that the end would cut, by address and size. It has to be unmapped first.
    cut: Option<(u64, u64)>,
    block_bytes: u64,
}

#[derive(Debug)]
pub(in crate::pool) struct Placement {
    key: BlockKey,
    /// The rest of the last granule becomes free once mapped.
    end: u64,
    /// The epoch of the free blocks it is made of.
    freed_epoch: u64,
    /// To be mapped.
    pub(in crate::pool) lacking: Vec<Mapping>,
    /// To be unmapped.
    pub(in crate::pool) leaving: Vec<Mapping>,
}

/// What freed parts may keep of chunks that still have a live part, of what is live, or one chunk. More than that, and
/// new blocks get smaller chunks.
const PINNED_PART: u64 = 128;

impl Heap {
    /// The largest chunk to create for a block.
    pub(in crate::pool) fn largest_chunk(
        &self,
        is_discardable: bool,
        bytes: u64,
        is_freed_in_parts: bool,
    ) -> u64 {
        let Shape { granule_bytes, chunk_bytes, .. } = self.shape;
        let pins_much = self.lists.pinned_bytes() > chunk_bytes.max(self.counts.live_bytes() / PINNED_PART);
        match (is_freed_in_parts, pins_much && !is_discardable) {
            (true, _) => granule_bytes,
            (false, true) if bytes < chunk_bytes => granule_bytes,
            (false, true) => chunk_bytes,
            (false, false) => self.shape.largest_chunk(is_discardable),
        }
    }

    /// A candidate that needs no memory, if one is found fast. A block of granules lies as a small one, whatever its
    /// length.
    pub(in crate::pool) fn ready_candidate(
        &self,
        tag: TagKey,
        list: ListKey,
        (bytes, align): (u64, u64),
        largest_bytes: u64,
    ) -> Option<Candidate> {
        if self.is_large(bytes, largest_bytes) {
            return self.ready_large_candidate(tag, list, bytes);
        }
        if bytes >= self.shape.granule_bytes {
            return self.tightest_candidate(tag, list, bytes, align);
        }
        // Holds the request at any alignment of its start.
        let wanted = bytes + align.saturating_sub(UNIT_BYTES);
        let own = self.lists.list(list).small().find(&self.blocks, wanted);
        let found = own.or_else(|| self.stream_safe_block(tag, list, wanted));
        found.map(|first| self.ready_at(first, self.blocks[first].addr.next_multiple_of(align)))
    }

    fn ready_at(&self, first: BlockKey, start: u64) -> Candidate {
        Candidate { first, start, absent_bytes: 0, cut: None, block_bytes: self.blocks[first].bytes() }
    }

    /// Of a large request, without the end that shares a granule.
    fn chunks_bytes(&self, bytes: u64) -> u64 {
        bytes / self.shape.granule_bytes * self.shape.granule_bytes
    }

    fn is_large(&self, bytes: u64, largest_bytes: u64) -> bool {
        largest_bytes > self.shape.granule_bytes && self.shape.is_large(bytes)
    }

    /// In one of the first large blocks that fit, from one of its chunks on, if it lacks nothing. Else what an earlier
    /// block of this size has left in granules.
    fn ready_large_candidate(&self, tag: TagKey, list: ListKey, bytes: u64) -> Option<Candidate> {
        let chunks_bytes = self.chunks_bytes(bytes);
        let large = self.lists.tag(tag).large().range((chunks_bytes, BlockKey::FIRST)..).take(LOOKS);
        let starts = large.flat_map(|(_, key)| {
            let block = &self.blocks[*key];
            let segment = self.segments.get(self.segments.of_addr(block.addr));
            let chunks =
                segment.into_iter().flat_map(|s| s.chunks_in(block.addr, block.end() - chunks_bytes + 1));
            chunks.map(|(at, _)| (*key, at))
        });
        let ready = starts
            .take(LOOKS)
            .filter_map(|(key, start)| self.candidate(key, start, bytes, list, true))
            .find(|candidate| candidate.absent_bytes == 0);
        ready.or_else(|| {
            self.granules_for_large(list, bytes).filter(|candidate| candidate.block_bytes == bytes)
        })
    }

    /// A small block of the own list for a large request. Its stream can use it at once, but granules serve small
    /// requests better.
    pub(in crate::pool) fn granules_for_large(&self, list: ListKey, bytes: u64) -> Option<Candidate> {
        let large = self.shape.is_large(bytes);
        let small = self.lists.list(list).small();
        let slack = self.shape.granule_bytes - UNIT_BYTES; // Wherever its first whole granule begins.
        let find = || small.find(&self.blocks, bytes + slack).or_else(|| small.find(&self.blocks, bytes));
        let found = large.then(find).flatten();
        found.and_then(|first| {
            let block = &self.blocks[first];
            let start = block.addr.next_multiple_of(self.shape.granule_bytes);
            let start = if start + bytes <= block.end() { start } else { return None };
            Some(self.ready_at(first, start))
        })
    }

    /// A complete small block of another list.
    fn stream_safe_block(&self, tag: TagKey, list: ListKey, bytes: u64) -> Option<BlockKey> {
        let others = self.lists.tag(tag).stream_lists().iter().filter(|other| **other != list);
        others
            .filter_map(|other| self.lists.list(*other).small().find(&self.blocks, bytes))
            .find(|key| self.is_complete(&self.blocks[*key]))
    }

    /// For at least a granule: takes the fewest wholly free granules, by sharing some with live neighbours. Among
    /// equals the largest block: the next request can share the last granule, and smaller blocks are unmapped whole.
    fn tightest_candidate(&self, tag: TagKey, list: ListKey, bytes: u64, align: u64) -> Option<Candidate> {
        let granule = self.shape.granule_bytes;
        let blocks = self.lists.tag(tag).stream_lists().iter().flat_map(|other| {
            let blocks = self.lists.list(*other).small().largest_first(&self.blocks, bytes);
            blocks.take(LOOKS).filter(|key| self.is_usable(&self.blocks[*key], list))
        });
        let candidates = blocks.flat_map(|first| {
            let block = &self.blocks[first];
            let early = block.addr.next_multiple_of(align);
            let late = (block.end() - bytes) / align * align;
            [early, late].map(|start| (first, block, start))
        });
        let candidates =
            candidates.filter(|(_, block, start)| *start >= block.addr && start + bytes <= block.end());
        let tightest = candidates.min_by_key(|(_, block, start)| {
            let from = (start / granule * granule).max(block.addr.next_multiple_of(granule));
            let to = (start + bytes).next_multiple_of(granule).min(block.end() / granule * granule);
            (to.saturating_sub(from), Reverse(block.bytes()), *start)
        });
        tightest.map(|(first, _, start)| self.ready_at(first, start))
    }

    /// What it cuts has to be created again sooner or later.
    pub(in crate::pool) fn cheapest_candidate(
        &self,
        tag: TagKey,
        list: ListKey,
        (bytes, align): (u64, u64),
        largest_bytes: u64,
    ) -> Option<Candidate> {
        let candidates: Box<dyn Iterator<Item = Candidate> + '_> = if self.is_large(bytes, largest_bytes) {
            Box::new(self.candidates_for_large(tag, list, bytes))
        } else {
            Box::new(self.candidates_for_small(tag, list, bytes, align))
        };
        candidates.min_by_key(|candidate| {
            let cut_bytes = candidate.cut.map_or(0, |(_, bytes)| bytes);
            (candidate.absent_bytes + cut_bytes, candidate.block_bytes, candidate.start)
        })
    }

    fn candidates_for_large(
        &self,
        tag: TagKey,
        list: ListKey,
        bytes: u64,
    ) -> impl Iterator<Item = Candidate> {
        let lists = self.lists.tag(tag);
        let large = lists.large().iter().rev().take(MANY_LOOKS).flat_map(move |(block_bytes, key)| {
            let addr = self.blocks[*key].addr;
            // At the start, or so that its chunks end with the block.
            let chunks_bytes = self.chunks_bytes(bytes).min(*block_bytes);
            let late = addr + block_bytes - chunks_bytes;
            [Some(addr), (late > addr).then_some(late)].into_iter().flatten().map(|start| (*key, start))
        });
        // Includes the tightest fit, and new addresses.
        let holding = lists.unmapped().range((bytes, BlockKey::FIRST)..).take(1);
        let unmapped = lists.unmapped().iter().rev().take(MANY_LOOKS).chain(holding);
        let unmapped = unmapped.map(|(_, key)| (*key, self.blocks[*key].addr));
        large.chain(unmapped).filter_map(move |(key, start)| self.candidate(key, start, bytes, list, true))
    }

    /// At the start of unmapped blocks, or in the free end of a granule before one.
    fn candidates_for_small(
        &self,
        tag: TagKey,
        list: ListKey,
        bytes: u64,
        align: u64,
    ) -> impl Iterator<Item = Candidate> {
        let unmapped = self.lists.tag(tag).unmapped();
        let holding = unmapped.range((bytes, BlockKey::FIRST)..).take(LOOKS);
        // With the latter, the unmapped block may be smaller, by less than a granule.
        let least = bytes.saturating_sub(self.shape.granule_bytes);
        let smaller = unmapped.range((least, BlockKey::FIRST)..(bytes, BlockKey::FIRST)).take(LOOKS);
        let starts = holding.chain(smaller).flat_map(move |(_, key)| {
            let block = &self.blocks[*key];
            let before = (self.blocks.kind(block.prev) == HeapBlockKind::Small).then_some(block.prev);
            let before = before.map(|prev| (prev, self.blocks[prev].addr.next_multiple_of(align)));
            let before = before.filter(|(_, start)| *start < block.addr);
            [Some((*key, block.addr)), before].into_iter().flatten()
        });
        starts.filter_map(move |(key, start)| self.candidate(key, start, bytes, list, false))
    }

    /// `None` unless all of it is free and usable, and of a large request no more than the end lies in granules.
    fn candidate(
        &self,
        first: BlockKey,
        start: u64,
        bytes: u64,
        list: ListKey,
        is_large: bool,
    ) -> Option<Candidate> {
        let granule = self.shape.granule_bytes;
        let end = start.checked_add(bytes)?;
        let (mut absent_bytes, mut cut, mut granule_bytes) = (0, None, 0);
        for (kind, block) in self.blocks.walk(first) {
            let (from, to) = (block.addr.max(start), block.end().min(end));
            match kind {
                HeapBlockKind::Unmapped => {
                    absent_bytes += to.next_multiple_of(granule) - from;
                }
                HeapBlockKind::Small if self.is_usable(block, list) => granule_bytes += to - from,
                HeapBlockKind::Large if is_large && self.is_usable(block, list) => {
                    if let Some((at, chunk_bytes)) = self.cut_off(block, from, to)? {
                        // The chunk is unmapped, and a smaller one takes its place.
                        if !self.is_complete(block) || self.is_pinned(self.tag_of_list(block.list)) {
                            return None;
                        }
                        cut = Some((at, chunk_bytes));
                        absent_bytes += (to - at).next_multiple_of(granule);
                    }
                }
                _ => return None,
            }
            if to == end {
                if is_large && granule_bytes >= granule {
                    return None; // Small blocks would miss them.
                }
                let block_bytes = self.blocks[first].bytes();
                return Some(Candidate { first, start, absent_bytes, cut, block_bytes });
            }
        }
        None
    }

    /// The chunk of a large block that `to` cuts, by address and size, if any. `None` where `from` cuts one.
    fn cut_off(&self, block: &HeapBlock, from: u64, to: u64) -> Option<Option<(u64, u64)>> {
        if from == block.addr && to == block.end() {
            return Some(None);
        }
        let segment = self.segments.get(self.segments.of_addr(block.addr))?;
        let is_cut = segment.across(from).is_some();
        (!is_cut).then(|| segment.across(to).map(|(at, chunk)| (at, chunk.bytes)))
    }

    /// Makes a candidate and the rest of its last granule a block in use, without a handle yet. New chunks have at
    /// most `largest_bytes`.
    pub(in crate::pool) fn occupy(
        &mut self,
        candidate: &Candidate,
        list: ListKey,
        bytes: u64,
        largest_bytes: u64,
    ) -> Placement {
        let segment = self.segments.of_addr(candidate.start);
        let end = candidate.start + bytes;
        let mut leaving = Vec::new();
        let mut first = candidate.first;
        if let Some((cut, cut_bytes)) = candidate.cut {
            leaving.extend(self.segments.mapping((segment, cut)));
            let key = self.block_at(first, cut);
            let unmapped = self.remove_chunks_from(segment, key, cut, cut + cut_bytes);
            first = self.block_at(unmapped, candidate.start);
        }
        let lacking = self.lacking(first, segment, (candidate.start, end), largest_bytes);
        // Other lists give only complete blocks.
        let own = self.blocks.walk(first).take_while(|(_, block)| block.addr < end);
        let own = own.filter(|(kind, block)| {
            block.list == list && *kind != HeapBlockKind::Unmapped && !self.is_complete(block)
        });
        let freed_epoch = own.map(|(_, block)| block.freed_epoch).max().unwrap_or(0);
        let reach = lacking.last().map_or(end, |mapping| mapping.range.end().max(end));
        let key = self.claim(first, candidate.start, reach);
        let block = &mut self.blocks[key];
        (block.list, block.freed_epoch, block.slack) = (list, 0, 0);
        self.blocks.set_kind(key, HeapBlockKind::Live);
        Placement { key, end, freed_epoch, lacking, leaving }
    }

    fn lacking(
        &self,
        first: BlockKey,
        segment: SegmentKey,
        (start, end): (u64, u64),
        largest_bytes: u64,
    ) -> Vec<Mapping> {
        let (mut lacking, granule) = (Vec::new(), self.shape.granule_bytes);
        for (kind, block) in self.blocks.walk(first).take_while(|(_, block)| block.addr < end) {
            if kind != HeapBlockKind::Unmapped {
                continue;
            }
            let (at, to) = (block.addr.max(start), block.end().min(end));
            // The last granule is separate: its rest serves small blocks.
            let whole_bytes =
                if self.shape.is_large(end - start) { (to - at) / granule * granule } else { 0 };
            let exact = self.shape.exact_chunks(DeviceRange::new(at, whole_bytes), largest_bytes);
            let rest = DeviceRange::new(at + whole_bytes, to - at - whole_bytes);
            let chunks = exact.chain(self.shape.exact_chunks(rest, granule));
            lacking.extend(chunks.map(|range| Mapping::absent(segment, range.addr, range.bytes)));
        }
        lacking
    }

    /// Makes a candidate that lacks nothing a live block.
    pub(in crate::pool) fn take(
        &mut self,
        candidate: &Candidate,
        list: ListKey,
        bytes: u64,
        requested_bytes: u64,
    ) -> (BlockId, DeviceRange) {
        let key = self.claim(candidate.first, candidate.start, candidate.start + bytes);
        (self.mark_live(key, list, requested_bytes), DeviceRange::new(candidate.start, bytes))
    }

    /// Makes a mapped placement a live block, and frees the rest of its last granule.
    pub(in crate::pool) fn finish(
        &mut self,
        placement: &Placement,
        list: ListKey,
        requested_bytes: u64,
    ) -> (BlockId, DeviceRange) {
        self.segments.store(&placement.lacking);
        if self.blocks[placement.key].end() > placement.end {
            let rest = self.blocks.split(placement.key, placement.end);
            self.insert_free(rest, HeapBlockKind::Small, 0);
        }
        let id = self.mark_live(placement.key, list, requested_bytes);
        let block = &self.blocks[placement.key];
        (id, DeviceRange::new(block.addr, block.bytes()))
    }

    /// As [`Heap::release`], for an unmapped placement.
    pub(in crate::pool) fn abandon(&mut self, placement: &Placement) -> (HeapBlock, BlockKey) {
        let block = self.blocks[placement.key];
        (block, self.free_by_chunk(placement.key, placement.freed_epoch))
    }
}
