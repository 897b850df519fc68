//! The heap: which addresses are whose, and what memory lies under them. Pure: no driver call, no wait.
//!
//! ```text
//! segment (one reservation, one tag)
//! chunks: [       32 MiB       ][       32 MiB       ][2][2][2]  -  -  -
//! blocks: [ live                                        ][fine][   bare   ]
//! ```
//!
//! Free pieces come in kinds, which never mix in one piece: *fine* ones lie in chunks of one granule and are cut at
//! will; *coarse* ones are whole larger chunks, cut only between chunks; *bound* ones are parts of a larger chunk that is
//! not free as a whole ([`parts`]), and serve nobody; *bare* ones are addresses without memory. A piece of one stream's
//! lane serves another once it is quiet ([`super::clocks`]).
//!
//! - [`placement`]: where a request goes; [`idle`]: what may leave; [`layout`]: what a wake brings in; [`uses`]: what each
//!   granule is used for.
//! - [`blocks`], [`bins`], [`lanes`], [`lists`], [`segments`], [`deferred`], [`counts`] own what their names say;
//!   [`sweep`]: which lanes are forgotten.
//!
//! Invariants, which the property tests check from outside:
//! - every byte of a live block and of a fine or coarse piece lies in a chunk, which is mapped and open while
//!   the tag is awake; no chunk lies in a bare piece;
//! - a chunk larger than a granule lies wholly in one block that was allocated, or what is left of it, or wholly in
//!   coarse pieces;
//! - free neighbours of one kind and lane are one piece.

mod bins;
mod blocks;
mod counts;
mod deferred;
mod idle;
mod lanes;
mod layout;
mod lists;
mod parts;
mod placement;
mod segments;
mod sweep;
mod uses;

pub(super) use self::blocks::{Block, Kind};
pub(super) use self::idle::Idle;
pub(super) use self::placement::{Site, Spot};
pub(super) use self::segments::Segment;
pub(super) use self::uses::{Landmark, Use};

use std::collections::BTreeSet;

use self::blocks::Blocks;
use self::counts::{Counts, OfTag};
use self::deferred::Deferred;
use self::lists::FreeLists;
use self::segments::Segments;
use super::clocks::Clocks;
use super::error::{PoolError, Result};
use super::handle::BlockId;
use super::keys::{BlockKey, LaneKey, SegmentKey, TagKey};
use super::piece::{Backing, Piece};
use super::shape::Shape;
use crate::driver::{DeviceRange, StreamId};

/// Blocks, free pieces and the chunks under them, in stream order.
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

    /// When what was freed is quiet.
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
    pub(super) fn walk(&self, segment: &Segment) -> impl Iterator<Item = (Kind, &Block)> {
        self.blocks.walk(segment.first())
    }

    pub(super) fn live_of(&self, tag: TagKey) -> OfTag {
        self.counts.tag(tag)
    }

    pub(super) fn live_bytes(&self) -> u64 {
        self.counts.live_bytes()
    }

    pub(super) fn peak_live_bytes(&self) -> u64 {
        self.counts.peak_live_bytes()
    }

    pub(super) fn fine_demand_bytes(&self) -> u64 {
        self.counts.fine_demand_bytes()
    }

    /// Memory that nothing lives in and that the driver has refused to unmap so far.
    pub(super) fn stuck(&self) -> Vec<Piece> {
        self.pieces_of_stuck().collect()
    }

    /// What of it may leave now.
    pub(super) fn stuck_to_leave(&self) -> Vec<Piece> {
        let tag = |piece: &Piece| self.segments.tag_of(piece.segment);
        let leaves = |piece: &Piece| !tag(piece).is_some_and(|tag| self.is_pinned(tag));
        self.pieces_of_stuck().filter(leaves).collect()
    }

    fn pieces_of_stuck(&self) -> impl Iterator<Item = Piece> {
        let addrs = self.lists.stuck().iter().map(|key| self.blocks[*key].addr);
        addrs.filter_map(|addr| self.segments.piece((self.segments.of_addr(addr), addr)))
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
    pub(super) fn has_room(&self, more: u32) -> bool {
        self.blocks.has_room(more)
    }

    // ---- tags and lanes ----

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

    /// The lane of a stream in a tag, if there is one.
    #[inline]
    pub(super) fn find_lane(&mut self, tag: TagKey, stream: StreamId) -> Option<LaneKey> {
        self.lists.lanes_mut().find(tag, Some(stream))
    }

    /// A lane that there is not yet; `None` when no more can be counted.
    pub(super) fn make_lane(&mut self, tag: TagKey, stream: StreamId) -> Option<LaneKey> {
        self.lists.add_lane(tag, stream, &mut self.clocks)
    }

    /// How many lanes there are.
    pub(super) fn lane_count(&self) -> usize {
        self.lists.lanes().count()
    }

    /// Whether there are so many lanes that a look at what can be forgotten pays.
    pub(super) fn has_many_lanes(&self) -> bool {
        self.lists.lanes().is_crowded()
    }

    /// How many streams use live blocks of others, by block.
    pub(super) fn uses(&self) -> usize {
        self.deferred.uses()
    }

    pub(super) fn tag_of_lane(&self, lane: LaneKey) -> TagKey {
        self.lists.lane(lane).tag()
    }

    /// Keeps the memory of a tag that is awake where it is, until it is unpinned: nothing of it is idle for others.
    pub(super) fn set_pinned(&mut self, tag: TagKey, is_pinned: bool) {
        self.lists.set_pinned(tag, is_pinned);
    }

    fn is_pinned(&self, tag: TagKey) -> bool {
        self.lists.tag(tag).is_pinned()
    }

    // ---- free pieces ----

    /// Whether no work that was queued before it was freed, and no copy in the background, may still touch a piece.
    pub(super) fn is_quiet(&self, block: &Block) -> bool {
        let copied = || self.copying.iter().any(|range| range.addr < block.end() && block.addr < range.end());
        self.has_passed(block) && !copied()
    }

    /// Whether no work that was queued before it was freed may still touch a piece.
    fn has_passed(&self, block: &Block) -> bool {
        self.clocks.is_quiet(self.lists.lane(block.lane).clock(), block.stamp)
    }

    /// Whether `lane` may take a free piece now.
    fn is_usable(&self, block: &Block, lane: LaneKey) -> bool {
        block.lane == lane || self.is_quiet(block)
    }

    fn list(&mut self, key: BlockKey) {
        self.lists.list(&mut self.blocks, key);
    }

    fn unlist(&mut self, key: BlockKey) {
        self.lists.unlist(&mut self.blocks, key);
    }

    /// Makes a block that is on no list a free piece, joined with its neighbours. Returns the piece's key.
    fn put(&mut self, key: BlockKey, kind: Kind, stamp: u64) -> BlockKey {
        self.blocks[key].stamp = stamp;
        self.blocks.set_kind(key, kind);
        let Block { prev, next, .. } = self.blocks[key];
        if self.blocks.kind(next) == kind && self.belong_together(key, next) {
            self.unlist(next);
            self.blocks.join_next(key);
        }
        let mut piece = key;
        if self.blocks.kind(prev) == kind && self.belong_together(prev, key) {
            self.unlist(prev);
            self.blocks.join_next(prev);
            piece = prev;
        }
        self.list(piece);
        piece
    }

    /// Whether neighbours of one kind are one piece.
    fn belong_together(&self, a: BlockKey, b: BlockKey) -> bool {
        match self.blocks.kind(a) {
            Kind::Bare => true,
            Kind::Fine | Kind::Coarse => self.blocks[a].lane == self.blocks[b].lane,
            Kind::Bound => self.blocks[a].lane == self.blocks[b].lane && self.share_chunk(a, b),
            _ => false,
        }
    }

    /// Takes `start..end` out of the free pieces that hold it, of which `first` is the first, and makes it one
    /// block that is on no list. What is left of the pieces stays what it was.
    fn claim(&mut self, first: BlockKey, start: u64, end: u64) -> BlockKey {
        self.unlist(first);
        let mut key = first;
        if self.blocks[first].addr < start {
            key = self.blocks.split(first, start);
            self.list(first);
        }
        while self.blocks[key].end() < end {
            let next = self.blocks[key].next;
            self.unlist(next);
            if self.blocks[next].end() > end {
                let rest = self.blocks.split(next, end);
                self.list(rest);
            }
            self.blocks.join_next(key);
        }
        if self.blocks[key].end() > end {
            let rest = self.blocks.split(key, end);
            self.list(rest);
        }
        key
    }

    /// Makes a block that is on no list, and whose memory is there, free, each part as the kind that its chunks make it.
    /// Returns a piece near it.
    fn scatter(&mut self, key: BlockKey, stamp: u64) -> BlockKey {
        let block = self.blocks[key];
        let tag = self.tag_of_lane(block.lane);
        if block.bytes() < self.shape.chunk_bytes && !self.lists.tag(tag).has_cut_chunks() {
            // Too small to have been given anything but granules.
            return self.put(key, Kind::Fine, stamp);
        }
        self.scatter_by_chunks(key, stamp)
    }

    /// The same for a block that may lack memory. Returns the last of the pieces.
    fn scatter_by_chunks(&mut self, key: BlockKey, stamp: u64) -> BlockKey {
        let block = self.blocks[key];
        let (mut key, mut last) = (key, key);
        for (kind, end) in self.kinds_of(&block) {
            let rest = (end < block.end()).then(|| self.blocks.split(key, end));
            let stamp = if kind == Kind::Bare { 0 } else { stamp };
            last = self.put(key, kind, stamp);
            if kind == Kind::Bound {
                last = self.unbind(last);
            }
            key = rest.unwrap_or(last);
        }
        last
    }

    /// The kinds of memory in a block, in address order, with the addresses where they end.
    fn kinds_of(&self, block: &Block) -> Vec<(Kind, u64)> {
        let mut kinds: Vec<(Kind, u64)> = Vec::new();
        let mut add = |kind: Kind, end: u64| match kinds.last_mut() {
            // Each chunk of which parts are bound is for itself.
            Some(last) if last.0 == kind && kind != Kind::Bound => last.1 = end,
            _ => kinds.push((kind, end)),
        };
        let mut at = block.addr;
        if let Some(segment) = self.segments.get(self.segments.of_addr(block.addr)) {
            for (addr, chunk) in segment.touching(block.addr, block.end()) {
                if addr > at {
                    add(Kind::Bare, addr);
                }
                let whole = addr >= block.addr && addr + chunk.bytes <= block.end();
                at = (addr + chunk.bytes).min(block.end());
                let kind = match chunk.bytes > self.shape.granule_bytes {
                    true if whole => Kind::Coarse,
                    true => Kind::Bound,
                    false => Kind::Fine,
                };
                add(kind, at);
            }
        }
        if at < block.end() {
            add(Kind::Bare, block.end());
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

    /// Forgets the chunks in `start..end`, whose memory is gone or in the caller's hands; the addresses are bare
    /// from now on. `near` is any block of the segment.
    fn strip_from(&mut self, segment: SegmentKey, near: BlockKey, start: u64, end: u64) -> BlockKey {
        self.segments.forget_chunks(segment, start, end);
        let key = self.claim(self.block_at(near, start), start, end);
        self.put(key, Kind::Bare, 0)
    }

    /// Makes the addresses of those chunks in `range` bare that have no memory and that nobody uses. `near` is a block of
    /// the segment.
    pub(super) fn strip_absent(&mut self, segment: SegmentKey, mut near: BlockKey, range: DeviceRange) {
        let touched =
            self.segments.get(segment).into_iter().flat_map(|s| s.touching(range.addr, range.end()));
        let absent = touched.filter(|(_, chunk)| chunk.backing == Backing::Absent);
        let absent: Vec<DeviceRange> = absent.map(|(at, chunk)| DeviceRange::new(at, chunk.bytes)).collect();
        for chunk in absent {
            if !self.is_touched(near, chunk.addr, chunk.end()) {
                near = self.strip_from(segment, near, chunk.addr, chunk.end());
            }
        }
    }

    /// Makes the addresses of a tag's chunks bare that nobody uses and whose memory is `unfit`. Returns those that have
    /// memory: it is the caller's from now on.
    pub(super) fn strip_unused(&mut self, tag: TagKey, unfit: impl Fn(Backing) -> bool) -> Vec<Piece> {
        let mut stripped = Vec::new();
        for key in self.segments.keys_of(tag) {
            let Some(segment) = self.segments.get(key) else { continue };
            let touched = self.touched_chunks(segment);
            let idle = segment.chunks().filter(|(at, chunk)| !touched.contains(at) && unfit(chunk.backing));
            let idle: Vec<Piece> = idle.filter_map(|(at, _)| self.segments.piece((key, at))).collect();
            let mut near = segment.first();
            for piece in idle {
                near = self.block_at(near, piece.range.addr);
                if self.blocks.kind(near) == Kind::Stuck && !piece.is_absent() {
                    continue; // Reclaiming tries again.
                }
                near = self.strip_from(key, near, piece.range.addr, piece.range.end());
                if !piece.is_absent() {
                    stripped.push(piece);
                }
            }
        }
        stripped
    }

    /// The same, for who knows no block.
    pub(super) fn strip(&mut self, piece: &Piece) {
        if let Some(first) = self.segments.get(piece.segment).map(Segment::first) {
            self.strip_from(piece.segment, first, piece.range.addr, piece.range.end());
        }
    }

    /// Memory in bare addresses that the driver refuses to unmap.
    pub(super) fn make_stuck(&mut self, piece: &Piece) {
        let Some(first) = self.segments.get(piece.segment).map(Segment::first) else { return };
        self.segments.store(&[*piece]);
        let key = self.block_at(first, piece.range.addr);
        let key = self.claim(key, piece.range.addr, piece.range.end());
        self.put(key, Kind::Stuck, 0);
    }

    /// Joins free neighbours of different lanes as far as both are quiet, and chunks of which nothing is in use.
    pub(super) fn join_lanes(&mut self) {
        let firsts: Vec<BlockKey> = self.segments.iter().map(|(_, segment)| segment.first()).collect();
        for first in firsts {
            let mut key = first;
            if self.blocks.kind(key) == Kind::Bound {
                key = self.unbind(key);
            }
            while let Some(next) = self.blocks[key].next.some() {
                let next = if self.blocks.kind(next) == Kind::Bound { self.unbind(next) } else { next };
                if self.blocks[key].next != next {
                    // Joined with what was before it.
                    key = next;
                    continue;
                }
                let (a, b) = (self.blocks[key], self.blocks[next]);
                let kind = self.blocks.kind(key);
                let free = matches!(kind, Kind::Fine | Kind::Coarse) && kind == self.blocks.kind(next);
                let quiet = self.is_quiet(&a) && self.is_quiet(&b);
                if free && (quiet || a.lane == b.lane) {
                    self.unlist(key);
                    self.unlist(next);
                    self.blocks.join_next(key);
                    if quiet {
                        self.blocks[key].stamp = 0; // On whichever lane.
                    }
                    self.list(key);
                } else {
                    key = next;
                }
            }
        }
    }

    // ---- segments ----

    /// New addresses, bare.
    pub(super) fn add_segment(&mut self, tag: TagKey, lane: LaneKey, range: DeviceRange) {
        let first = self.blocks.insert(Block { lane, ..Block::new(range.addr, range.bytes) }, Kind::Bare);
        self.segments.insert(tag, range, first);
        self.list(first);
    }

    /// Segments that are bare from end to end, and may be given back. Nobody finds them any more:
    /// [`Heap::remove_emptied`] or [`Heap::return_emptied`] follows for each.
    pub(super) fn take_emptied(&mut self) -> Vec<(SegmentKey, DeviceRange)> {
        let mut taken = Vec::new();
        for addr in self.lists.take_emptied() {
            let key = self.segments.of_addr(addr);
            let Some(segment) = self.segments.get(key).filter(|segment| segment.range().addr == addr) else {
                continue;
            };
            let (first, range) = (segment.first(), segment.range());
            let is_bare = self.blocks.kind(first) == Kind::Bare && self.blocks[first].bytes() == range.bytes;
            if is_bare {
                self.unlist(first);
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
            self.list(first);
        }
    }

    // ---- live blocks ----

    /// The live block behind a handle.
    pub(super) fn live_block(&self, op: &'static str, id: BlockId) -> Result<Block> {
        let live = self.blocks.live(id.key, id.serial).filter(|_| id.pool == self.pool);
        live.copied().ok_or(PoolError::StaleBlock { op, block: id })
    }

    /// Makes a block that is on no list live, for a request of so many bytes.
    fn enliven(&mut self, key: BlockKey, lane: LaneKey, requested_bytes: u64) -> BlockId {
        let serial = self.next_serial;
        self.next_serial += 1;
        let block = &mut self.blocks[key];
        let bytes = block.bytes();
        block.lane = lane;
        block.stamp = serial;
        // Rounding adds less than a unit.
        block.slack = u16::try_from(bytes - requested_bytes).unwrap_or(u16::MAX);
        self.blocks.set_kind(key, Kind::Live);
        self.counts.add(&self.shape, self.tag_of_lane(lane), bytes);
        BlockId { pool: self.pool, key, serial }
    }

    /// Notes that work on `stream` uses a live block of `lane`. Of many streams, those that do not exist any more are
    /// forgotten.
    pub(super) fn record_use(
        &mut self,
        block: BlockId,
        lane: LaneKey,
        stream: StreamId,
        exists: impl Fn(StreamId) -> bool,
    ) {
        if self.lists.lane(lane).stream() != Some(stream) {
            self.deferred.record_use(block.key, stream, exists);
        }
    }

    /// Gives a live block back. Returns a piece near it, or nothing while other streams have to be waited for.
    pub(super) fn free(&mut self, op: &'static str, id: BlockId) -> Result<(Block, Option<BlockKey>)> {
        let block = self.live_block(op, id)?;
        let lane = self.lists.lane(block.lane);
        let (tag, clock) = (lane.tag(), lane.clock());
        self.counts.remove(&self.shape, tag, block.bytes());
        let stamp = self.clocks.stamp(clock);
        let Some(others) = self.deferred.take_uses(id.key) else {
            return Ok((block, Some(self.scatter(id.key, stamp))));
        };
        let stamped = |stream| {
            let clock = self.clocks.acquire(stream);
            (clock, self.clocks.stamp(clock))
        };
        let until = others.into_iter().map(stamped).collect();
        self.blocks.set_kind(id.key, Kind::Waiting);
        self.deferred.defer(id.key, stamp, until);
        Ok((block, None))
    }

    /// Freed blocks that have waited for other streams long enough, with their stamps. [`Heap::release`] follows for each.
    pub(super) fn take_passed(&mut self) -> Vec<(BlockKey, u64)> {
        if self.deferred.is_empty() { Vec::new() } else { self.deferred.take_passed(&mut self.clocks) }
    }

    /// Frees a block that has waited. Returns it, and a piece near it.
    pub(super) fn release(&mut self, key: BlockKey, stamp: u64) -> (Block, BlockKey) {
        (self.blocks[key], self.scatter(key, stamp))
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
            let pieces = || self.blocks.walk(first).take_while(|(_, piece)| piece.addr < range.end());
            let is_free = |kind| matches!(kind, Kind::Fine | Kind::Coarse);
            // Whoever freed it last: pieces of several streams lie side by side until they are quiet. A piece that
            // only begins or ends there has chunks beside it that wait as well.
            let holds_up = pieces().all(|(kind, _)| is_free(kind))
                || pieces().any(|(kind, piece)| is_free(kind) && self.holds_chunk(piece));
            holds_up.then(|| segment.tag())
        })
    }
}
