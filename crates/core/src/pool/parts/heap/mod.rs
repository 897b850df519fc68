//! The heap: the tag and stream of each address, and the memory under it. Pure: no driver call, no wait.
//!
//! ```text
//! segment (one reservation, one tag)
//! chunks: [                   80 MiB                  ][2][2][2]  -  -  -
//! blocks: [ live                                        ][small][   unmapped   ]
//! ```
//!
//! A free block ([`HeapBlockKind`]) of one stream serves another once it is complete ([`crate::pool::tools::clocks`]).
//!
//! Invariants, which the property tests check from outside:
//! - every byte of a live, small or large block lies in a chunk, mapped with access while the tag is awake;
//! - no chunk lies in an unmapped block;
//! - a chunk larger than a granule lies wholly in one allocated block (or what is left of it), or in large
//!   blocks;
//! - free neighbours of one kind and list are one block.

mod bins;
mod blocks;
mod counts;
mod deferred;
mod layout;
mod lists;
mod parts;
mod placement;
mod reclaimable;
mod segments;
mod stream_lists;
mod sweep;
mod uses;

pub(in crate::pool) use self::blocks::{HeapBlock, HeapBlockKind};
pub(in crate::pool) use self::placement::{Candidate, Placement};
pub(in crate::pool) use self::reclaimable::Reclaimable;
pub(in crate::pool) use self::segments::Segment;
pub(in crate::pool) use self::uses::{Landmark, Use};

use std::collections::BTreeSet;

use self::blocks::Blocks;
use self::counts::{Counts, TagCounts};
use self::deferred::Deferred;
use self::lists::FreeLists;
use self::segments::Segments;
use crate::driver::{DeviceRange, StreamId};
use crate::pool::tools::clocks::Clocks;
use crate::pool::tools::error::{PoolError, Result};
use crate::pool::tools::handle::BlockId;
use crate::pool::tools::keys::{BlockKey, ListKey, SegmentKey, TagKey};
use crate::pool::tools::mapping::{Backing, Mapping};
use crate::pool::tools::shape::Shape;

#[derive(Debug)]
pub(in crate::pool) struct Heap {
    shape: Shape,
    /// The pool's number, for handles.
    pool: u32,
    clocks: Clocks,
    segments: Segments,
    blocks: Blocks,
    lists: FreeLists,
    deferred: Deferred,
    counts: Counts,
    /// Not unmapped meanwhile.
    copying: Vec<DeviceRange>,
    next_serial: u64,
}

impl Heap {
    pub(in crate::pool) fn new(shape: Shape, pool: u32) -> Self {
        Self {
            shape,
            pool,
            clocks: Clocks::default(),
            segments: Segments::default(),
            blocks: Blocks::default(),
            lists: FreeLists::default(),
            deferred: Deferred::default(),
            counts: Counts::default(),
            copying: Vec::new(),
            next_serial: 1,
        }
    }

    pub(in crate::pool) fn shape(&self) -> Shape {
        self.shape
    }

    pub(in crate::pool) fn clocks(&self) -> &Clocks {
        &self.clocks
    }

    pub(in crate::pool) fn clocks_mut(&mut self) -> &mut Clocks {
        &mut self.clocks
    }

    pub(in crate::pool) fn segments(&self) -> &Segments {
        &self.segments
    }

    pub(in crate::pool) fn segments_mut(&mut self) -> &mut Segments {
        &mut self.segments
    }

    /// In address order.
    pub(in crate::pool) fn walk(
        &self,
        segment: &Segment,
    ) -> impl Iterator<Item = (HeapBlockKind, &HeapBlock)> {
        self.blocks.walk(segment.first())
    }

    pub(in crate::pool) fn live_of(&self, tag: TagKey) -> TagCounts {
        self.counts.tag(tag)
    }

    pub(in crate::pool) fn live_bytes(&self) -> u64 {
        self.counts.live_bytes()
    }

    /// Of tags that [hold their memory](Self::set_held).
    pub(in crate::pool) fn held_live_bytes(&self) -> u64 {
        self.counts.held_live_bytes()
    }

    /// A tag holds no memory while it sleeps.
    pub(in crate::pool) fn set_held(&mut self, tag: TagKey, is_held: bool) {
        self.counts.set_held(tag, is_held);
    }

    pub(in crate::pool) fn peak_live_bytes(&self) -> u64 {
        self.counts.peak_live_bytes()
    }

    pub(in crate::pool) fn small_demand_bytes(&self) -> u64 {
        self.counts.small_demand_bytes()
    }

    pub(in crate::pool) fn unmap_failed(&self) -> Vec<Mapping> {
        self.unmap_failed_mappings().collect()
    }

    /// Of tags that are not pinned.
    pub(in crate::pool) fn unmap_failed_to_leave(&self) -> Vec<Mapping> {
        let tag = |mapping: &Mapping| self.segments.tag_of(mapping.segment);
        let leaves = |mapping: &Mapping| !tag(mapping).is_some_and(|tag| self.is_pinned(tag));
        self.unmap_failed_mappings().filter(leaves).collect()
    }

    fn unmap_failed_mappings(&self) -> impl Iterator<Item = Mapping> {
        let addrs = self.lists.unmap_failed().iter().map(|key| self.blocks[*key].addr);
        addrs.filter_map(|addr| self.segments.mapping((self.segments.of_addr(addr), addr)))
    }

    /// Streams that use blocks, or did.
    pub(in crate::pool) fn streams(&self) -> BTreeSet<StreamId> {
        self.clocks.streams().chain(self.deferred.streams()).collect()
    }

    pub(in crate::pool) fn is_waiting(&self) -> bool {
        !self.deferred.is_empty()
    }

    pub(in crate::pool) fn has_capacity(&self, more: u32) -> bool {
        self.blocks.has_capacity(more)
    }

    pub(in crate::pool) fn add_tag(&mut self, tag: TagKey) {
        self.lists.add_tag(tag);
        self.counts.add_tag(tag);
    }

    /// For a tag without segments.
    pub(in crate::pool) fn forget_tag(&mut self, tag: TagKey) {
        self.lists.forget_tag(tag, &mut self.clocks);
        self.counts.forget_tag(tag);
    }

    #[inline]
    pub(in crate::pool) fn find_list(&mut self, tag: TagKey, stream: StreamId) -> Option<ListKey> {
        self.lists.stream_lists_mut().find(tag, Some(stream))
    }

    /// `None` when all numbers are in use.
    pub(in crate::pool) fn make_list(&mut self, tag: TagKey, stream: StreamId) -> Option<ListKey> {
        self.lists.add_list(tag, stream, &mut self.clocks)
    }

    pub(in crate::pool) fn list_count(&self) -> usize {
        self.lists.stream_lists().count()
    }

    /// Whether a sweep pays.
    pub(in crate::pool) fn has_many_lists(&self) -> bool {
        self.lists.stream_lists().is_crowded()
    }

    /// See [`Deferred::uses`].
    pub(in crate::pool) fn uses(&self) -> usize {
        self.deferred.uses()
    }

    pub(in crate::pool) fn tag_of_list(&self, list: ListKey) -> TagKey {
        self.lists.list(list).tag()
    }

    /// While pinned, an awake tag's memory is not reclaimable.
    pub(in crate::pool) fn set_pinned(&mut self, tag: TagKey, is_pinned: bool) {
        self.lists.set_pinned(tag, is_pinned);
    }

    fn is_pinned(&self, tag: TagKey) -> bool {
        self.lists.tag(tag).is_pinned()
    }

    /// Whether no work queued before the free, and no background copy, may still touch the block.
    pub(in crate::pool) fn is_complete(&self, block: &HeapBlock) -> bool {
        let copied = || self.copying.iter().any(|range| range.addr < block.end() && block.addr < range.end());
        self.has_passed(block) && !copied()
    }

    /// As [`Heap::is_complete`], background copies aside.
    fn has_passed(&self, block: &HeapBlock) -> bool {
        self.clocks.is_complete(self.lists.list(block.list).clock(), block.freed_epoch)
    }

    fn is_usable(&self, block: &HeapBlock, list: ListKey) -> bool {
        block.list == list || self.is_complete(block)
    }

    fn link(&mut self, key: BlockKey) {
        let whole_bytes = self.whole_bytes(&self.blocks[key]);
        self.lists.insert(&mut self.blocks, key, whole_bytes);
    }

    fn unlink(&mut self, key: BlockKey) {
        let whole_bytes = self.whole_bytes(&self.blocks[key]);
        self.lists.remove(&mut self.blocks, key, whole_bytes);
    }

    /// Frees an unlinked block, joined with its neighbours. Returns the joined block.
    fn insert_free(&mut self, key: BlockKey, kind: HeapBlockKind, freed_epoch: u64) -> BlockKey {
        self.blocks[key].freed_epoch = freed_epoch;
        self.blocks.set_kind(key, kind);
        let HeapBlock { prev, next, .. } = self.blocks[key];
        if self.blocks.kind(next) == kind && self.can_join(key, next) {
            self.unlink(next);
            self.blocks.join_next(key);
        }
        let mut joined = key;
        if self.blocks.kind(prev) == kind && self.can_join(prev, key) {
            self.unlink(prev);
            self.blocks.join_next(prev);
            joined = prev;
        }
        self.link(joined);
        joined
    }

    fn can_join(&self, a: BlockKey, b: BlockKey) -> bool {
        match self.blocks.kind(a) {
            HeapBlockKind::Unmapped => true,
            HeapBlockKind::Small | HeapBlockKind::Large => self.blocks[a].list == self.blocks[b].list,
            HeapBlockKind::Pinned => self.blocks[a].list == self.blocks[b].list && self.share_chunk(a, b),
            _ => false,
        }
    }

    /// Cuts `start..end` out of consecutive free blocks from `first` on. Returns it as one unlinked block.
    fn claim(&mut self, first: BlockKey, start: u64, end: u64) -> BlockKey {
        self.unlink(first);
        let mut key = first;
        if self.blocks[first].addr < start {
            key = self.blocks.split(first, start);
            self.link(first);
        }
        while self.blocks[key].end() < end {
            let next = self.blocks[key].next;
            self.unlink(next);
            if self.blocks[next].end() > end {
                let rest = self.blocks.split(next, end);
                self.link(rest);
            }
            self.blocks.join_next(key);
        }
        if self.blocks[key].end() > end {
            let rest = self.blocks.split(key, end);
            self.link(rest);
        }
        key
    }

    /// Frees an unlinked, wholly mapped block, each part by the kind of its chunks. Returns a block near it.
    fn free_split(&mut self, key: BlockKey, freed_epoch: u64) -> BlockKey {
        let block = self.blocks[key];
        let tag = self.tag_of_list(block.list);
        if !self.shape.is_large(block.bytes()) && !self.lists.tag(tag).has_cut_chunks() {
            // Too small to have anything but granules.
            return self.insert_free(key, HeapBlockKind::Small, freed_epoch);
        }
        self.free_by_chunk(key, freed_epoch)
    }

    /// As [`Heap::free_split`], but the block may lack memory. Returns the last free block.
    fn free_by_chunk(&mut self, key: BlockKey, freed_epoch: u64) -> BlockKey {
        let block = self.blocks[key];
        let (mut key, mut last) = (key, key);
        for (kind, end) in self.kinds_of(&block) {
            let rest = (end < block.end()).then(|| self.blocks.split(key, end));
            let freed_epoch = if kind == HeapBlockKind::Unmapped { 0 } else { freed_epoch };
            last = self.insert_free(key, kind, freed_epoch);
            if kind == HeapBlockKind::Pinned {
                last = self.unpin_chunk(last);
            }
            key = rest.unwrap_or(last);
        }
        last
    }

    /// In address order, with the end addresses.
    fn kinds_of(&self, block: &HeapBlock) -> Vec<(HeapBlockKind, u64)> {
        let mut kinds: Vec<(HeapBlockKind, u64)> = Vec::new();
        let mut add = |kind: HeapBlockKind, end: u64| match kinds.last_mut() {
            // Pinned parts of different chunks stay apart.
            Some(last) if last.0 == kind && kind != HeapBlockKind::Pinned => last.1 = end,
            _ => kinds.push((kind, end)),
        };
        let mut at = block.addr;
        if let Some(segment) = self.segments.get(self.segments.of_addr(block.addr)) {
            for (addr, chunk) in segment.touching(block.addr, block.end()) {
                if addr > at {
                    add(HeapBlockKind::Unmapped, addr);
                }
                let whole = addr >= block.addr && addr + chunk.bytes <= block.end();
                at = (addr + chunk.bytes).min(block.end());
                let kind = match chunk.bytes > self.shape.granule_bytes {
                    true if whole => HeapBlockKind::Large,
                    true => HeapBlockKind::Pinned,
                    false => HeapBlockKind::Small,
                };
                add(kind, at);
            }
        }
        if at < block.end() {
            add(HeapBlockKind::Unmapped, block.end());
        }
        kinds
    }

    /// Searches a segment from its block `near`.
    fn block_at(&self, near: BlockKey, addr: u64) -> BlockKey {
        let mut key = near;
        while self.blocks[key].addr > addr {
            key = self.blocks[key].prev;
        }
        while self.blocks[key].end() <= addr {
            key = self.blocks[key].next;
        }
        key
    }

    /// Forgets the chunks in `start..end`, whose memory is gone or owned by the caller. `near` is any block of the
    /// segment.
    fn remove_chunks_from(&mut self, segment: SegmentKey, near: BlockKey, start: u64, end: u64) -> BlockKey {
        self.segments.forget_chunks(segment, start, end);
        let key = self.claim(self.block_at(near, start), start, end);
        self.insert_free(key, HeapBlockKind::Unmapped, 0)
    }

    /// Removes those in `range` that no block uses. `near` is a block of the segment.
    pub(in crate::pool) fn remove_absent_chunks(
        &mut self,
        segment: SegmentKey,
        mut near: BlockKey,
        range: DeviceRange,
    ) {
        let touched =
            self.segments.get(segment).into_iter().flat_map(|s| s.touching(range.addr, range.end()));
        let absent = touched.filter(|(_, chunk)| chunk.backing == Backing::Absent);
        let absent: Vec<DeviceRange> = absent.map(|(at, chunk)| DeviceRange::new(at, chunk.bytes)).collect();
        for chunk in absent {
            if !self.is_touched(near, chunk.addr, chunk.end()) {
                near = self.remove_chunks_from(segment, near, chunk.addr, chunk.end());
            }
        }
    }

    /// Returns those with memory, owned by the caller.
    pub(in crate::pool) fn remove_unused_chunks(
        &mut self,
        tag: TagKey,
        unfit: impl Fn(Backing) -> bool,
    ) -> Vec<Mapping> {
        let mut removed = Vec::new();
        for key in self.segments.keys_of(tag) {
            let Some(segment) = self.segments.get(key) else { continue };
            let touched = self.touched_chunks(segment);
            let unused = segment.chunks().filter(|(at, chunk)| !touched.contains(at) && unfit(chunk.backing));
            let unused: Vec<Mapping> =
                unused.filter_map(|(at, _)| self.segments.mapping((key, at))).collect();
            let mut near = segment.first();
            for mapping in unused {
                near = self.block_at(near, mapping.range.addr);
                if self.blocks.kind(near) == HeapBlockKind::UnmapFailed && !mapping.is_absent() {
                    continue; // Reclaiming tries again.
                }
                near = self.remove_chunks_from(key, near, mapping.range.addr, mapping.range.end());
                if !mapping.is_absent() {
                    removed.push(mapping);
                }
            }
        }
        removed
    }

    /// As [`Heap::remove_chunks_from`], without a block at hand.
    pub(in crate::pool) fn remove_chunks(&mut self, mapping: &Mapping) {
        if let Some(first) = self.segments.get(mapping.segment).map(Segment::first) {
            self.remove_chunks_from(mapping.segment, first, mapping.range.addr, mapping.range.end());
        }
    }

    /// For memory at unmapped addresses that the driver refuses to unmap.
    pub(in crate::pool) fn mark_unmap_failed(&mut self, mapping: &Mapping) {
        let Some(first) = self.segments.get(mapping.segment).map(Segment::first) else { return };
        self.segments.store(&[*mapping]);
        let key = self.block_at(first, mapping.range.addr);
        let key = self.claim(key, mapping.range.addr, mapping.range.end());
        self.insert_free(key, HeapBlockKind::UnmapFailed, 0);
    }

    /// Joins complete free neighbours of different lists, and pinned parts of free chunks.
    pub(in crate::pool) fn join_lists(&mut self) {
        let firsts: Vec<BlockKey> = self.segments.iter().map(|(_, segment)| segment.first()).collect();
        for first in firsts {
            let mut key = first;
            if self.blocks.kind(key) == HeapBlockKind::Pinned {
                key = self.unpin_chunk(key);
            }
            while let Some(next) = self.blocks[key].next.some() {
                let next = if self.blocks.kind(next) == HeapBlockKind::Pinned {
                    self.unpin_chunk(next)
                } else {
                    next
                };
                if self.blocks[key].next != next {
                    key = next;
                    continue;
                }
                let (a, b) = (self.blocks[key], self.blocks[next]);
                let kind = self.blocks.kind(key);
                let free = matches!(kind, HeapBlockKind::Small | HeapBlockKind::Large)
                    && kind == self.blocks.kind(next);
                let complete = self.is_complete(&a) && self.is_complete(&b);
                if free && (complete || a.list == b.list) {
                    self.unlink(key);
                    self.unlink(next);
                    self.blocks.join_next(key);
                    if complete {
                        self.blocks[key].freed_epoch = 0; // On whichever list.
                    }
                    self.link(key);
                } else {
                    key = next;
                }
            }
        }
    }

    pub(in crate::pool) fn add_segment(&mut self, tag: TagKey, list: ListKey, range: DeviceRange) {
        let first = self
            .blocks
            .insert(HeapBlock { list, ..HeapBlock::new(range.addr, range.bytes) }, HeapBlockKind::Unmapped);
        self.segments.insert(tag, range, first);
        self.link(first);
    }

    /// Takes the wholly unmapped segments, to be unreserved. [`Heap::remove_emptied`] or [`Heap::return_emptied`]
    /// must follow for each; no request finds them before.
    pub(in crate::pool) fn take_emptied(&mut self) -> Vec<(SegmentKey, DeviceRange)> {
        let mut taken = Vec::new();
        for addr in self.lists.take_emptied() {
            let key = self.segments.of_addr(addr);
            let Some(segment) = self.segments.get(key).filter(|segment| segment.range().addr == addr) else {
                continue;
            };
            let (first, range) = (segment.first(), segment.range());
            let is_unmapped = self.blocks.kind(first) == HeapBlockKind::Unmapped
                && self.blocks[first].bytes() == range.bytes;
            if is_unmapped {
                self.unlink(first);
                taken.push((key, range));
            }
        }
        taken
    }

    /// For an unreserved segment without live blocks.
    pub(in crate::pool) fn remove_emptied(&mut self, key: SegmentKey) {
        if let Some(first) = self.segments.get(key).map(Segment::first) {
            self.blocks.remove(first);
            self.segments.remove(key);
        }
    }

    /// For an unreserved segment and its blocks. The heap serves no request any more.
    pub(in crate::pool) fn remove_swept(&mut self, key: SegmentKey) {
        self.segments.remove(key);
    }

    /// For a taken segment that stays reserved.
    pub(in crate::pool) fn return_emptied(&mut self, key: SegmentKey) {
        if let Some(first) = self.segments.get(key).map(Segment::first) {
            self.link(first);
        }
    }

    pub(in crate::pool) fn live_block(&self, op: &'static str, id: BlockId) -> Result<HeapBlock> {
        let live = self.blocks.live(id.key, id.serial).filter(|_| id.pool == self.pool);
        live.copied().ok_or(PoolError::StaleBlock { op, block: id })
    }

    fn mark_live(&mut self, key: BlockKey, list: ListKey, requested_bytes: u64) -> BlockId {
        let serial = self.next_serial;
        self.next_serial += 1;
        let block = &mut self.blocks[key];
        let bytes = block.bytes();
        block.list = list;
        block.freed_epoch = serial;
        // Rounding adds less than a unit.
        block.slack = u16::try_from(bytes - requested_bytes).unwrap_or(u16::MAX);
        self.blocks.set_kind(key, HeapBlockKind::Live);
        self.counts.add(&self.shape, self.tag_of_list(list), bytes);
        BlockId { pool: self.pool, key, serial }
    }

    pub(in crate::pool) fn record_use(
        &mut self,
        block: BlockId,
        list: ListKey,
        stream: StreamId,
        exists: impl Fn(StreamId) -> bool,
    ) {
        if self.lists.list(list).stream() != Some(stream) {
            self.deferred.record_use(block.key, stream, exists);
        }
    }

    /// Returns a block near it, or nothing while it waits for other streams.
    pub(in crate::pool) fn free(
        &mut self,
        op: &'static str,
        id: BlockId,
    ) -> Result<(HeapBlock, Option<BlockKey>)> {
        let block = self.live_block(op, id)?;
        let list = self.lists.list(block.list);
        let (tag, clock) = (list.tag(), list.clock());
        self.counts.remove(&self.shape, tag, block.bytes());
        let freed_epoch = self.clocks.freed_epoch(clock);
        let Some(others) = self.deferred.take_uses(id.key) else {
            return Ok((block, Some(self.free_split(id.key, freed_epoch))));
        };
        let epoch_of = |stream| {
            let clock = self.clocks.acquire(stream);
            (clock, self.clocks.freed_epoch(clock))
        };
        let until = others.into_iter().map(epoch_of).collect();
        self.blocks.set_kind(id.key, HeapBlockKind::Waiting);
        self.deferred.defer(id.key, freed_epoch, until);
        Ok((block, None))
    }

    /// As [`Deferred::take_passed`]. [`Heap::release`] must follow.
    pub(in crate::pool) fn take_passed(&mut self) -> Vec<(BlockKey, u64)> {
        if self.deferred.is_empty() { Vec::new() } else { self.deferred.take_passed(&mut self.clocks) }
    }

    /// Returns the block that it was, and a block near it.
    pub(in crate::pool) fn release(&mut self, key: BlockKey, freed_epoch: u64) -> (HeapBlock, BlockKey) {
        (self.blocks[key], self.free_split(key, freed_epoch))
    }

    /// Nothing there is unmapped before [`Heap::copied`].
    pub(in crate::pool) fn copying(&mut self, range: DeviceRange) {
        self.copying.push(range);
    }

    pub(in crate::pool) fn copied(&mut self, range: DeviceRange) {
        self.copying.retain(|other| *other != range);
    }

    /// Whether a background copy keeps freed memory from being unmapped.
    pub(in crate::pool) fn is_copying_freed(&self) -> bool {
        self.copying_freed().next().is_some()
    }

    /// The tags of such memory.
    pub(in crate::pool) fn copying_freed(&self) -> impl Iterator<Item = TagKey> + '_ {
        self.copying.iter().filter_map(|range| {
            let segment = self.segments.get(self.segments.of_addr(range.addr))?;
            let first = self.block_at(segment.first(), range.addr);
            let blocks = || self.blocks.walk(first).take_while(|(_, block)| block.addr < range.end());
            let is_free = |kind| matches!(kind, HeapBlockKind::Small | HeapBlockKind::Large);
            // Whichever stream freed it: incomplete blocks of several streams stay apart. Chunks beside a block that
            // only begins or ends here wait as well.
            let holds_up = blocks().all(|(kind, _)| is_free(kind))
                || blocks().any(|(kind, block)| is_free(kind) && self.whole_bytes(block) > 0);
            holds_up.then(|| segment.tag())
        })
    }
}
