//! The heap: which addresses are whose, and what memory lies under them. Pure: no driver call, no wait.
//!
//! ```text
//! segment (one reservation, one tag)
//! chunks: [       32 MiB       ][       32 MiB       ][2][2][2]  -  -  -
//! blocks: [ live                                        ][small][   unmapped   ]
//! ```
//!
//! Free mappings come in kinds, which never mix in one mapping: *small* ones lie in chunks of one granule and are cut at
//! will; *large* ones are whole larger chunks, cut only between chunks; *bound* ones are parts of a larger chunk that is
//! not free as a whole ([`parts`]), and serve nobody; *unmapped* ones are addresses without memory. A mapping of one stream's
//! list serves another once it is complete ([`super::clocks`]).
//!
//! - [`placement`]: where a request goes; [`idle`]: what may leave; [`layout`]: what a wake brings in; [`uses`]: what each
//!   granule is used for.
//! - [`blocks`], [`bins`], [`stream_lists`], [`lists`], [`segments`], [`deferred`], [`counts`] own what their names say;
//!   [`sweep`]: which stream_lists are forgotten.
//!
//! Invariants, which the property tests check from outside:
//! - every byte of a live block and of a small or large mapping lies in a chunk, which is mapped and open while
//!   the tag is awake; no chunk lies in a unmapped mapping;
//! - a chunk larger than a granule lies wholly in one block that was allocated, or what is left of it, or wholly in
//!   large mappings;
//! - free neighbours of one kind and list are one mapping.

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

pub(super) use self::blocks::{HeapBlock, Kind};
pub(super) use self::placement::{Candidate, Placement};
pub(super) use self::reclaimable::Reclaimable;
pub(super) use self::segments::Segment;
pub(super) use self::uses::{Landmark, Use};

use std::collections::BTreeSet;

use self::blocks::Blocks;
use self::counts::{Counts, TagCounts};
use self::deferred::Deferred;
use self::lists::FreeLists;
use self::segments::Segments;
use super::clocks::Clocks;
use super::error::{PoolError, Result};
use super::handle::BlockId;
use super::keys::{BlockKey, ListKey, SegmentKey, TagKey};
use super::mapping::{Backing, Mapping};
use super::shape::Shape;
use crate::driver::{DeviceRange, StreamId};

/// Blocks, free mappings and the chunks under them, in stream order.
#[derive(Debug)]
pub(super) struct Heap {
    shape: Shape,
    /// Of the pool, for its handles.
    pool: u32,
    clocks: Clocks,
    segments: Segments,
    blocks: Blocks,
    lists: FreeLists,
    deferred: Deferred,
    counts: Counts,
    /// What the background copies just now: nothing may be unmapped there.
    copying: Vec<DeviceRange>,
    next_serial: u64,
}

impl Heap {
    pub(super) fn new(shape: Shape, pool: u32) -> Self {
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

    // ---- what its parts say ----

    pub(super) fn shape(&self) -> Shape {
        self.shape
    }

    /// When what was freed is complete.
    pub(super) fn clocks(&self) -> &Clocks {
        &self.clocks
    }

    pub(super) fn clocks_mut(&mut self) -> &mut Clocks {
        &mut self.clocks
    }

    /// The reservations, and what is mapped there.
    pub(super) fn segments(&self) -> &Segments {
        &self.segments
    }

    pub(super) fn segments_mut(&mut self) -> &mut Segments {
        &mut self.segments
    }

    /// Blocks of a segment in address order.
    pub(super) fn walk(&self, segment: &Segment) -> impl Iterator<Item = (Kind, &HeapBlock)> {
        self.blocks.walk(segment.first())
    }

    pub(super) fn live_of(&self, tag: TagKey) -> TagCounts {
        self.counts.tag(tag)
    }

    pub(super) fn live_bytes(&self) -> u64 {
        self.counts.live_bytes()
    }

    pub(super) fn peak_live_bytes(&self) -> u64 {
        self.counts.peak_live_bytes()
    }

    pub(super) fn small_demand_bytes(&self) -> u64 {
        self.counts.small_demand_bytes()
    }

    /// Memory that nothing lives in and that the driver has refused to unmap so far.
    pub(super) fn unmap_failed(&self) -> Vec<Mapping> {
        self.unmap_failed_mappings().collect()
    }

    /// What of it may leave now.
    pub(super) fn unmap_failed_to_leave(&self) -> Vec<Mapping> {
        let tag = |mapping: &Mapping| self.segments.tag_of(mapping.segment);
        let leaves = |mapping: &Mapping| !tag(mapping).is_some_and(|tag| self.is_pinned(tag));
        self.unmap_failed_mappings().filter(leaves).collect()
    }

    fn unmap_failed_mappings(&self) -> impl Iterator<Item = Mapping> {
        let addrs = self.lists.unmap_failed().iter().map(|key| self.blocks[*key].addr);
        addrs.filter_map(|addr| self.segments.mapping((self.segments.of_addr(addr), addr)))
    }

    /// Streams on which blocks are in use, or have been.
    pub(super) fn streams(&self) -> BTreeSet<StreamId> {
        self.clocks.streams().chain(self.deferred.streams()).collect()
    }

    /// Whether blocks wait for other streams.
    pub(super) fn is_waiting(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Whether so many more blocks can be counted.
    pub(super) fn has_capacity(&self, more: u32) -> bool {
        self.blocks.has_capacity(more)
    }

    // ---- tags and stream_lists ----

    /// One more tag.
    pub(super) fn add_tag(&mut self, tag: TagKey) {
        self.lists.add_tag(tag);
        self.counts.add_tag(tag);
    }

    /// A tag that has no segments is gone.
    pub(super) fn forget_tag(&mut self, tag: TagKey) {
        self.lists.forget_tag(tag, &mut self.clocks);
        self.counts.forget_tag(tag);
    }

    /// The list of a stream in a tag, if there is one.
    #[inline]
    pub(super) fn find_list(&mut self, tag: TagKey, stream: StreamId) -> Option<ListKey> {
        self.lists.stream_lists_mut().find(tag, Some(stream))
    }

    /// A list that there is not yet; `None` when no more can be counted.
    pub(super) fn make_list(&mut self, tag: TagKey, stream: StreamId) -> Option<ListKey> {
        self.lists.add_list(tag, stream, &mut self.clocks)
    }

    /// How many stream_lists there are.
    pub(super) fn list_count(&self) -> usize {
        self.lists.stream_lists().count()
    }

    /// Whether there are so many stream_lists that a look at what can be forgotten pays.
    pub(super) fn has_many_lists(&self) -> bool {
        self.lists.stream_lists().is_crowded()
    }

    /// How many streams use live blocks of others, by block.
    pub(super) fn uses(&self) -> usize {
        self.deferred.uses()
    }

    pub(super) fn tag_of_list(&self, list: ListKey) -> TagKey {
        self.lists.list(list).tag()
    }

    /// Keeps the memory of a tag that is awake where it is, until it is unpinned: nothing of it is idle for others.
    pub(super) fn set_pinned(&mut self, tag: TagKey, is_pinned: bool) {
        self.lists.set_pinned(tag, is_pinned);
    }

    fn is_pinned(&self, tag: TagKey) -> bool {
        self.lists.tag(tag).is_pinned()
    }

    // ---- free mappings ----

    /// Whether no work that was queued before it was freed, and no copy in the background, may still touch a mapping.
    pub(super) fn is_complete(&self, block: &HeapBlock) -> bool {
        let copied = || self.copying.iter().any(|range| range.addr < block.end() && block.addr < range.end());
        self.has_passed(block) && !copied()
    }

    /// Whether no work that was queued before it was freed may still touch a mapping.
    fn has_passed(&self, block: &HeapBlock) -> bool {
        self.clocks.is_complete(self.lists.list(block.list).clock(), block.freed_epoch)
    }

    /// Whether `list` may take a free mapping now.
    fn is_usable(&self, block: &HeapBlock, list: ListKey) -> bool {
        block.list == list || self.is_complete(block)
    }

    fn link(&mut self, key: BlockKey) {
        self.lists.insert(&mut self.blocks, key);
    }

    fn unlink(&mut self, key: BlockKey) {
        self.lists.remove(&mut self.blocks, key);
    }

    /// Makes a block that is on no list a free mapping, joined with its neighbours. Returns the mapping's key.
    fn put(&mut self, key: BlockKey, kind: Kind, freed_epoch: u64) -> BlockKey {
        self.blocks[key].freed_epoch = freed_epoch;
        self.blocks.set_kind(key, kind);
        let HeapBlock { prev, next, .. } = self.blocks[key];
        if self.blocks.kind(next) == kind && self.belong_together(key, next) {
            self.unlink(next);
            self.blocks.join_next(key);
        }
        let mut joined = key;
        if self.blocks.kind(prev) == kind && self.belong_together(prev, key) {
            self.unlink(prev);
            self.blocks.join_next(prev);
            joined = prev;
        }
        self.link(joined);
        joined
    }

    /// Whether neighbours of one kind are one mapping.
    fn belong_together(&self, a: BlockKey, b: BlockKey) -> bool {
        match self.blocks.kind(a) {
            Kind::Unmapped => true,
            Kind::Small | Kind::Large => self.blocks[a].list == self.blocks[b].list,
            Kind::Pinned => self.blocks[a].list == self.blocks[b].list && self.share_chunk(a, b),
            _ => false,
        }
    }

    /// Takes `start..end` out of the free mappings that hold it, of which `first` is the first, and makes it one
    /// block that is on no list. What is left of the mappings stays what it was.
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

    /// Makes a block that is on no list, and whose memory is there, free, each part as the kind that its chunks make it.
    /// Returns a mapping near it.
    fn free_split(&mut self, key: BlockKey, freed_epoch: u64) -> BlockKey {
        let block = self.blocks[key];
        let tag = self.tag_of_list(block.list);
        if block.bytes() < self.shape.chunk_bytes && !self.lists.tag(tag).has_cut_chunks() {
            // Too small to have been given anything but granules.
            return self.put(key, Kind::Small, freed_epoch);
        }
        self.free_by_chunk(key, freed_epoch)
    }

    /// The same for a block that may lack memory. Returns the last of the mappings.
    fn free_by_chunk(&mut self, key: BlockKey, freed_epoch: u64) -> BlockKey {
        let block = self.blocks[key];
        let (mut key, mut last) = (key, key);
        for (kind, end) in self.kinds_of(&block) {
            let rest = (end < block.end()).then(|| self.blocks.split(key, end));
            let freed_epoch = if kind == Kind::Unmapped { 0 } else { freed_epoch };
            last = self.put(key, kind, freed_epoch);
            if kind == Kind::Pinned {
                last = self.unbind(last);
            }
            key = rest.unwrap_or(last);
        }
        last
    }

    /// The kinds of memory in a block, in address order, with the addresses where they end.
    fn kinds_of(&self, block: &HeapBlock) -> Vec<(Kind, u64)> {
        let mut kinds: Vec<(Kind, u64)> = Vec::new();
        let mut add = |kind: Kind, end: u64| match kinds.last_mut() {
            // Each chunk of which parts are bound is for itself.
            Some(last) if last.0 == kind && kind != Kind::Pinned => last.1 = end,
            _ => kinds.push((kind, end)),
        };
        let mut at = block.addr;
        if let Some(segment) = self.segments.get(self.segments.of_addr(block.addr)) {
            for (addr, chunk) in segment.touching(block.addr, block.end()) {
                if addr > at {
                    add(Kind::Unmapped, addr);
                }
                let whole = addr >= block.addr && addr + chunk.bytes <= block.end();
                at = (addr + chunk.bytes).min(block.end());
                let kind = match chunk.bytes > self.shape.granule_bytes {
                    true if whole => Kind::Large,
                    true => Kind::Pinned,
                    false => Kind::Small,
                };
                add(kind, at);
            }
        }
        if at < block.end() {
            add(Kind::Unmapped, block.end());
        }
        kinds
    }

    /// The block of a segment that holds `addr`, sought from the block `near` on.
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

    /// Forgets the chunks in `start..end`, whose memory is gone or in the caller's hands; the addresses are unmapped
    /// from now on. `near` is any block of the segment.
    fn remove_chunks_from(&mut self, segment: SegmentKey, near: BlockKey, start: u64, end: u64) -> BlockKey {
        self.segments.forget_chunks(segment, start, end);
        let key = self.claim(self.block_at(near, start), start, end);
        self.put(key, Kind::Unmapped, 0)
    }

    /// Makes the addresses of those chunks in `range` unmapped that have no memory and that nobody uses. `near` is a block of
    /// the segment.
    pub(super) fn remove_absent_chunks(
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

    /// Makes the addresses of a tag's chunks unmapped that nobody uses and whose memory is `unfit`. Returns those that have
    /// memory: it is the caller's from now on.
    pub(super) fn remove_unused_chunks(
        &mut self,
        tag: TagKey,
        unfit: impl Fn(Backing) -> bool,
    ) -> Vec<Mapping> {
        let mut removed = Vec::new();
        for key in self.segments.keys_of(tag) {
            let Some(segment) = self.segments.get(key) else { continue };
            let touched = self.touched_chunks(segment);
            let idle = segment.chunks().filter(|(at, chunk)| !touched.contains(at) && unfit(chunk.backing));
            let idle: Vec<Mapping> = idle.filter_map(|(at, _)| self.segments.mapping((key, at))).collect();
            let mut near = segment.first();
            for mapping in idle {
                near = self.block_at(near, mapping.range.addr);
                if self.blocks.kind(near) == Kind::UnmapFailed && !mapping.is_absent() {
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

    /// The same, for who knows no block.
    pub(super) fn remove_chunks(&mut self, mapping: &Mapping) {
        if let Some(first) = self.segments.get(mapping.segment).map(Segment::first) {
            self.remove_chunks_from(mapping.segment, first, mapping.range.addr, mapping.range.end());
        }
    }

    /// Memory in unmapped addresses that the driver refuses to unmap.
    pub(super) fn mark_unmap_failed(&mut self, mapping: &Mapping) {
        let Some(first) = self.segments.get(mapping.segment).map(Segment::first) else { return };
        self.segments.store(&[*mapping]);
        let key = self.block_at(first, mapping.range.addr);
        let key = self.claim(key, mapping.range.addr, mapping.range.end());
        self.put(key, Kind::UnmapFailed, 0);
    }

    /// Joins free neighbours of different stream_lists as far as both are complete, and chunks of which nothing is in use.
    pub(super) fn join_lists(&mut self) {
        let firsts: Vec<BlockKey> = self.segments.iter().map(|(_, segment)| segment.first()).collect();
        for first in firsts {
            let mut key = first;
            if self.blocks.kind(key) == Kind::Pinned {
                key = self.unbind(key);
            }
            while let Some(next) = self.blocks[key].next.some() {
                let next = if self.blocks.kind(next) == Kind::Pinned { self.unbind(next) } else { next };
                if self.blocks[key].next != next {
                    // Joined with what was before it.
                    key = next;
                    continue;
                }
                let (a, b) = (self.blocks[key], self.blocks[next]);
                let kind = self.blocks.kind(key);
                let free = matches!(kind, Kind::Small | Kind::Large) && kind == self.blocks.kind(next);
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

    // ---- segments ----

    /// New addresses, unmapped.
    pub(super) fn add_segment(&mut self, tag: TagKey, list: ListKey, range: DeviceRange) {
        let first =
            self.blocks.insert(HeapBlock { list, ..HeapBlock::new(range.addr, range.bytes) }, Kind::Unmapped);
        self.segments.insert(tag, range, first);
        self.link(first);
    }

    /// Segments that are unmapped from end to end, and may be given back. Nobody finds them any more:
    /// [`Heap::remove_emptied`] or [`Heap::return_emptied`] follows for each.
    pub(super) fn take_emptied(&mut self) -> Vec<(SegmentKey, DeviceRange)> {
        let mut taken = Vec::new();
        for addr in self.lists.take_emptied() {
            let key = self.segments.of_addr(addr);
            let Some(segment) = self.segments.get(key).filter(|segment| segment.range().addr == addr) else {
                continue;
            };
            let (first, range) = (segment.first(), segment.range());
            let is_unmapped =
                self.blocks.kind(first) == Kind::Unmapped && self.blocks[first].bytes() == range.bytes;
            if is_unmapped {
                self.unlink(first);
                taken.push((key, range));
            }
        }
        taken
    }

    /// A segment's addresses are gone. Nothing lives there.
    pub(super) fn remove_emptied(&mut self, key: SegmentKey) {
        if let Some(first) = self.segments.get(key).map(Segment::first) {
            self.blocks.remove(first);
            self.segments.remove(key);
        }
    }

    /// A segment's addresses are gone with whatever lived there. The heap serves nobody any more.
    pub(super) fn remove_swept(&mut self, key: SegmentKey) {
        self.segments.remove(key);
    }

    /// A segment that was taken stays after all.
    pub(super) fn return_emptied(&mut self, key: SegmentKey) {
        if let Some(first) = self.segments.get(key).map(Segment::first) {
            self.link(first);
        }
    }

    // ---- live blocks ----

    /// The live block behind a handle.
    pub(super) fn live_block(&self, op: &'static str, id: BlockId) -> Result<HeapBlock> {
        let live = self.blocks.live(id.key, id.serial).filter(|_| id.pool == self.pool);
        live.copied().ok_or(PoolError::StaleBlock { op, block: id })
    }

    /// Makes a block that is on no list live, for a request of so many bytes.
    fn mark_live(&mut self, key: BlockKey, list: ListKey, requested_bytes: u64) -> BlockId {
        let serial = self.next_serial;
        self.next_serial += 1;
        let block = &mut self.blocks[key];
        let bytes = block.bytes();
        block.list = list;
        block.freed_epoch = serial;
        // Rounding adds less than a unit.
        block.slack = u16::try_from(bytes - requested_bytes).unwrap_or(u16::MAX);
        self.blocks.set_kind(key, Kind::Live);
        self.counts.add(&self.shape, self.tag_of_list(list), bytes);
        BlockId { pool: self.pool, key, serial }
    }

    /// Notes that work on `stream` uses a live block of `list`. Of many streams, those that do not exist any more are
    /// forgotten.
    pub(super) fn record_use(
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

    /// Gives a live block back. Returns a mapping near it, or nothing while other streams have to be waited for.
    pub(super) fn free(&mut self, op: &'static str, id: BlockId) -> Result<(HeapBlock, Option<BlockKey>)> {
        let block = self.live_block(op, id)?;
        let list = self.lists.list(block.list);
        let (tag, clock) = (list.tag(), list.clock());
        self.counts.remove(&self.shape, tag, block.bytes());
        let freed_epoch = self.clocks.freed_epoch(clock);
        let Some(others) = self.deferred.take_uses(id.key) else {
            return Ok((block, Some(self.free_split(id.key, freed_epoch))));
        };
        let stamped = |stream| {
            let clock = self.clocks.acquire(stream);
            (clock, self.clocks.freed_epoch(clock))
        };
        let until = others.into_iter().map(stamped).collect();
        self.blocks.set_kind(id.key, Kind::Waiting);
        self.deferred.defer(id.key, freed_epoch, until);
        Ok((block, None))
    }

    /// Freed blocks that have waited for other streams long enough, with their stamps. [`Heap::release`] follows for each.
    pub(super) fn take_passed(&mut self) -> Vec<(BlockKey, u64)> {
        if self.deferred.is_empty() { Vec::new() } else { self.deferred.take_passed(&mut self.clocks) }
    }

    /// Frees a block that has waited. Returns it, and a mapping near it.
    pub(super) fn release(&mut self, key: BlockKey, freed_epoch: u64) -> (HeapBlock, BlockKey) {
        (self.blocks[key], self.free_split(key, freed_epoch))
    }

    // ---- copies in the background ----

    /// The background copies from there: nothing is unmapped before [`Heap::copied`].
    pub(super) fn copying(&mut self, range: DeviceRange) {
        self.copying.push(range);
    }

    pub(super) fn copied(&mut self, range: DeviceRange) {
        self.copying.retain(|other| *other != range);
    }

    /// Whether memory was freed that a copy in the background keeps where it is.
    pub(super) fn is_copying_freed(&self) -> bool {
        self.copying_freed().next().is_some()
    }

    /// The tags of memory that was freed and that a copy in the background keeps where it is.
    pub(super) fn copying_freed(&self) -> impl Iterator<Item = TagKey> + '_ {
        self.copying.iter().filter_map(|range| {
            let segment = self.segments.get(self.segments.of_addr(range.addr))?;
            let first = self.block_at(segment.first(), range.addr);
            let blocks = || self.blocks.walk(first).take_while(|(_, block)| block.addr < range.end());
            let is_free = |kind| matches!(kind, Kind::Small | Kind::Large);
            // Whoever freed it last: blocks of several streams lie side by side until they are complete. A block that
            // only begins or ends there has chunks beside it that wait as well.
            let holds_up = blocks().all(|(kind, _)| is_free(kind))
                || blocks().any(|(kind, block)| is_free(kind) && self.holds_chunk(block));
            holds_up.then(|| segment.tag())
        })
    }
}
