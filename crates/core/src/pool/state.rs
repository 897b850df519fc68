//! The bookkeeping of a pool: tags, lanes, blocks and where free pieces are listed.
//!
//! Nothing here calls the driver or waits. Free pieces come in four kinds, which never mix in one piece:
//! *fine* ones lie in chunks of one granule and are cut at will; *coarse* ones are whole larger chunks, cut
//! only between chunks; *bound* ones are parts of a larger chunk that is not free as a whole ([`super::part`]), and
//! serve nobody; *bare* ones are addresses without memory. A fine or coarse piece belongs to a *lane*, the pieces of
//! one stream in one tag; another lane may take it once it is quiet ([`super::clocks`]).
//!
//! Invariants, which the property tests check from outside:
//! - every byte of a live block and of a fine or coarse piece lies in a chunk, which is mapped and open while
//!   the tag is awake; no chunk lies in a bare piece;
//! - a chunk larger than a granule lies wholly in one block that was allocated, or what is left of it, or wholly in
//!   coarse pieces;
//! - free neighbours of one kind and lane are one piece.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::bins::{Bins, UNIT_BYTES};
use super::blocks::{BYTES_MAX, Block, BlockKey, Blocks, Kind};
use super::clocks::{ClockKey, Clocks};
use super::error::PoolError;
use super::gate::Gate;
use super::segment::{Chunk, Place, Segment, SegmentKey, Segments};
use super::undefined::Undefined;
use super::vm::{Backing, Piece};
use super::{AllocRequest, BlockId, Result, Shape};
use crate::driver::{DeviceRange, StreamId};
use crate::tag::{Changes, Tag, TagPolicy, TagState};

/// A tag of a pool, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct TagKey(pub(super) usize);

/// A lane of a pool, by number.
pub(super) type LaneKey = u16;

#[derive(Debug)]
pub(super) struct State {
    pub(super) pool: u32,
    pub(super) shape: Shape,
    pub(super) tags: Vec<TagEntry>,
    pub(super) lanes: Vec<Lane>,
    pub(super) clocks: Clocks,
    pub(super) segments: Segments,
    /// Segments by their first address.
    pub(super) bases: BTreeMap<u64, SegmentKey>,
    pub(super) blocks: Blocks,
    /// Streams other than its own that a live block is used on.
    pub(super) uses: HashMap<BlockKey, Vec<StreamId>>,
    pub(super) waiting: Vec<Waiting>,
    /// Blocks of that kind.
    pub(super) stuck: Vec<BlockKey>,
    /// What the background copies just now: nothing may be unmapped there.
    pub(super) copying: Vec<DeviceRange>,
    /// What of awake tags was lost with its backup.
    pub(super) undefined: Undefined,
    /// Segments that may be bare from end to end.
    pub(super) emptied: Vec<SegmentKey>,
    pub(super) live_bytes: u64,
    pub(super) peak_live_bytes: u64,
    /// Most memory that was in use at once, by whole chunks.
    pub(super) peak_used_bytes: u64,
    /// Granules that live blocks would need if no two shared one, in bytes; those below a granule do share.
    pub(super) fine_demand_bytes: u64,
    pub(super) next_serial: u64,
    /// See [`super::PoolConfig::cached_max_bytes`].
    pub(super) cached_max_bytes: Option<u64>,
    pub(super) closed: bool,
}

#[derive(Debug)]
pub(super) struct TagEntry {
    pub(super) tag: Tag,
    pub(super) policy: TagPolicy,
    /// Whether the policy was chosen by the user.
    pub(super) declared: bool,
    pub(super) state: TagState,
    /// Whether a stranded tag was undefined, and will be again.
    pub(super) undefined: bool,
    pub(super) gate: Gate,
    /// Whether a sleep is under way that will give memory back.
    pub(super) falling_asleep: bool,
    /// What is known about changes to its bytes.
    pub(super) changes: Changes,
    /// How many sleeps have checked what was promised not to change.
    pub(super) checks: u64,
    /// How many wakes have compared what has arrived.
    pub(super) wakes: u64,
    /// How often something that is stored was no longer to be taken on trust.
    pub(super) doubts: u64,
    /// How many wait to have it alone.
    pub(super) wanted: u32,
    /// Whether any chunk larger than a granule may lie in several blocks.
    pub(super) is_cut: bool,
    /// Whether any chunk may have a backup.
    pub(super) has_backups: bool,
    /// Whether, while the tag sleeps, a failed undo may have left memory mapped.
    pub(super) has_leftovers: bool,
    pub(super) lanes: Vec<LaneKey>,
    /// Coarse pieces, smallest first.
    pub(super) coarse: BTreeSet<(u64, BlockKey)>,
    /// Bare pieces, smallest first.
    pub(super) bare: BTreeSet<(u64, BlockKey)>,
    pub(super) live_bytes: u64,
    pub(super) live_blocks: usize,
}

/// Free pieces of one stream in one tag.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) tag: TagKey,
    pub(super) stream: StreamId,
    pub(super) clock: ClockKey,
    pub(super) fine: Bins,
}

/// A freed block that other streams may still use, and up to which tick of their clocks.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) block: BlockKey,
    /// Its own stream's stamp.
    pub(super) stamp: u64,
    pub(super) until: Vec<(ClockKey, u64)>,
}

impl TagEntry {
    pub(super) fn new(tag: Tag) -> Self {
        Self {
            policy: TagPolicy::built_in(&tag),
            tag,
            declared: false,
            state: TagState::Awake,
            undefined: false,
            gate: Gate::default(),
            falling_asleep: false,
            changes: Changes::default(),
            checks: 0,
            wakes: 0,
            doubts: 0,
            wanted: 0,
            is_cut: false,
            has_backups: false,
            has_leftovers: false,
            lanes: Vec::new(),
            coarse: BTreeSet::new(),
            bare: BTreeSet::new(),
            live_bytes: 0,
            live_blocks: 0,
        }
    }

    /// Whether its free pieces are free for use: it is awake, and nobody is putting it to sleep.
    pub(super) fn is_settled(&self) -> bool {
        !self.gate.is_closed() && !self.state.is_asleep()
    }
}

impl State {
    // ---- tags and lanes ----

    pub(super) fn find_tag(&self, tag: &Tag) -> Option<TagKey> {
        self.tags.iter().position(|entry| entry.tag == *tag).map(TagKey)
    }

    pub(super) fn tag_key(&mut self, tag: &Tag) -> TagKey {
        self.find_tag(tag).unwrap_or_else(|| {
            self.tags.push(TagEntry::new(tag.clone()));
            TagKey(self.tags.len() - 1)
        })
    }

    pub(super) fn tag(&self, key: TagKey) -> &TagEntry {
        &self.tags[key.0]
    }

    pub(super) fn tag_mut(&mut self, key: TagKey) -> &mut TagEntry {
        &mut self.tags[key.0]
    }

    /// The lane of a request, made if need be.
    pub(super) fn lane_key(&mut self, tag: TagKey, request: &AllocRequest) -> Result<LaneKey> {
        let stream = request.stream;
        let known = self.tag(tag).lanes.iter().find(|lane| self.lane(**lane).stream == stream);
        if let Some(lane) = known {
            return Ok(*lane);
        }
        let Ok(key) = LaneKey::try_from(self.lanes.len()) else {
            let reason =
                format!("the pool has seen {} streams, by tag, and can count no more", self.lanes.len());
            let AllocRequest { bytes, align, ref tag, .. } = *request;
            return Err(PoolError::InvalidRequest { bytes, align, tag: tag.clone(), reason });
        };
        let clock = self.clocks.of(stream);
        self.lanes.push(Lane { tag, stream, clock, fine: Bins::default() });
        self.tag_mut(tag).lanes.push(key);
        Ok(key)
    }

    pub(super) fn lane(&self, key: LaneKey) -> &Lane {
        &self.lanes[usize::from(key)]
    }

    // ---- handles ----

    /// The live block behind a handle.
    pub(super) fn live_block(&self, op: &'static str, id: BlockId) -> Result<Block> {
        let live = self.blocks.live(id.key, id.serial).filter(|_| id.pool == self.pool);
        live.copied().ok_or(PoolError::StaleBlock { op, block: id })
    }

    // ---- free pieces ----

    /// Whether no work that was queued before it was freed, and no copy in the background, may still touch a piece.
    pub(super) fn is_quiet(&self, block: &Block) -> bool {
        let copied = || self.copying.iter().any(|range| range.addr < block.end() && block.addr < range.end());
        self.clocks.is_quiet(self.lane(block.lane).clock, block.stamp) && !copied()
    }

    /// Whether `lane` may take a free piece now.
    pub(super) fn is_usable(&self, block: &Block, lane: LaneKey) -> bool {
        block.lane == lane || self.is_quiet(block)
    }

    /// Puts a free piece on the list of its kind.
    pub(super) fn list(&mut self, key: BlockKey) {
        let block = self.blocks[key];
        let (kind, lane, bytes) = (self.blocks.kind(key), block.lane, block.bytes());
        match kind {
            Kind::Fine => self.lanes[usize::from(lane)].fine.insert(&mut self.blocks, key),
            Kind::Coarse => {
                let tag = self.lane(lane).tag;
                self.tag_mut(tag).coarse.insert((bytes, key));
            }
            Kind::Bare => {
                let tag = self.lane(lane).tag;
                self.tag_mut(tag).bare.insert((bytes, key));
                if block.prev.is_none() && block.next.is_none() {
                    self.emptied.push(self.segment_of(block.addr));
                }
            }
            Kind::Stuck => self.stuck.push(key),
            Kind::Bound | Kind::Live | Kind::Waiting | Kind::Vacant => {}
        }
    }

    /// Takes a free piece off its list.
    pub(super) fn unlist(&mut self, key: BlockKey) {
        let block = self.blocks[key];
        let (kind, lane, bytes) = (self.blocks.kind(key), block.lane, block.bytes());
        match kind {
            Kind::Fine => self.lanes[usize::from(lane)].fine.remove(&mut self.blocks, key),
            Kind::Coarse => {
                let tag = self.lane(lane).tag;
                self.tag_mut(tag).coarse.remove(&(bytes, key));
            }
            Kind::Bare => {
                let tag = self.lane(lane).tag;
                self.tag_mut(tag).bare.remove(&(bytes, key));
            }
            Kind::Stuck => self.stuck.retain(|stuck| *stuck != key),
            Kind::Bound | Kind::Live | Kind::Waiting | Kind::Vacant => {}
        }
    }

    /// Makes a block that is on no list a free piece, joined with its neighbours. Returns the piece's key.
    pub(super) fn put(&mut self, key: BlockKey, kind: Kind, stamp: u64) -> BlockKey {
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
    pub(super) fn claim(&mut self, first: BlockKey, start: u64, end: u64) -> BlockKey {
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

    /// Makes a block that is on no list free, each part as the kind that its chunks (or none) make it.
    pub(super) fn scatter(&mut self, key: BlockKey, stamp: u64) {
        let block = self.blocks[key];
        let tag = self.lane(block.lane).tag;
        let entry = self.tag(tag);
        let plain = entry.is_settled() && !entry.has_backups && !entry.is_cut;
        if block.bytes() < self.shape.chunk_bytes && plain {
            // Too small to have been given anything but granules, all of which are there.
            self.put(key, Kind::Fine, stamp);
            return;
        }
        let last = self.scatter_by_chunks(key, stamp);
        self.forget_idle(&block, last);
    }

    /// The same for a block that may lack memory. Returns the last of the pieces.
    pub(super) fn scatter_by_chunks(&mut self, key: BlockKey, stamp: u64) -> BlockKey {
        let block = self.blocks[key];
        let (mut key, mut last) = (key, key);
        for (kind, end) in self.parts(&block) {
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
    fn parts(&self, block: &Block) -> Vec<(Kind, u64)> {
        let mut parts: Vec<(Kind, u64)> = Vec::new();
        let mut add = |kind: Kind, end: u64| match parts.last_mut() {
            // Each chunk of which parts are bound is for itself.
            Some(last) if last.0 == kind && kind != Kind::Bound => last.1 = end,
            _ => parts.push((kind, end)),
        };
        let mut at = block.addr;
        if let Some(segment) = self.segments.get(self.segment_of(block.addr)) {
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
        parts
    }

    /// After a block was freed: its chunks that nothing lives in any more lose their backups, and while the tag
    /// sleeps without memory, their addresses are bare.
    pub(super) fn forget_idle(&mut self, freed: &Block, near: BlockKey) {
        let tag = self.lane(freed.lane).tag;
        let sleeps = self.tag(tag).state.is_asleep() && !self.tag(tag).gate.is_closed();
        if !self.tag(tag).has_backups && !sleeps {
            return;
        }
        let key = self.segment_of(freed.addr);
        let Some(segment) = self.segments.get(key) else { return };
        let stretches = segment.stretches(freed.addr, freed.end(), self.shape.chunk_bytes);
        let stored: Vec<DeviceRange> =
            stretches.filter(|stretch| segment.backups.contains_key(&stretch.addr)).collect();
        let touched = segment.touching(freed.addr, freed.end());
        let absent = touched.filter(|(_, chunk)| sleeps && chunk.backing == Backing::Absent);
        let absent: Vec<DeviceRange> = absent.map(|(at, chunk)| DeviceRange::new(at, chunk.bytes)).collect();
        let mut cursor = near;
        for stretch in stored {
            cursor = self.block_at(cursor, stretch.addr.max(freed.addr));
            if !self.is_touched(cursor, stretch.addr, stretch.end()) {
                self.forget_backup((key, stretch.addr));
            }
        }
        for chunk in absent {
            cursor = self.block_at(cursor, chunk.addr.max(freed.addr));
            if !self.is_touched(cursor, chunk.addr, chunk.end()) {
                cursor = self.strip(key, self.block_at(cursor, chunk.addr), chunk.addr, chunk.end());
            }
        }
    }

    /// The block of a segment that holds `addr`, sought from the block `near` on.
    pub(super) fn block_at(&self, near: BlockKey, addr: u64) -> BlockKey {
        let mut key = near;
        while self.blocks[key].addr > addr {
            key = self.blocks[key].prev;
        }
        while self.blocks[key].end() <= addr {
            key = self.blocks[key].next;
        }
        key
    }

    /// Whether any block in `start..end` may be in use. `free` is a free one there, of which usually a neighbour
    /// says so at once.
    fn is_touched(&self, free: BlockKey, start: u64, end: u64) -> bool {
        let mut key = free;
        while self.blocks[key].addr > start {
            key = self.blocks[key].prev;
            if self.blocks.kind(key).is_used() {
                return true;
            }
        }
        key = free;
        while self.blocks[key].end() < end {
            key = self.blocks[key].next;
            if self.blocks.kind(key).is_used() {
                return true;
            }
        }
        false
    }

    /// Forgets the chunks in `start..end`, whose memory is gone or in the caller's hands; the addresses are bare
    /// from now on. `first` is the free piece that holds `start`.
    pub(super) fn strip(&mut self, segment: SegmentKey, first: BlockKey, start: u64, end: u64) -> BlockKey {
        if let Some(segment) = self.segments.get_mut(segment) {
            segment.chunks.extract_if(start..end, |_, _| true).for_each(drop);
            segment.backups.extract_if(start..end, |_, _| true).for_each(drop);
        }
        let key = self.claim(first, start, end);
        self.put(key, Kind::Bare, 0)
    }

    // ---- chunks ----

    pub(super) fn chunk(&self, (segment, addr): Place) -> Option<&Chunk> {
        self.segments.get(segment)?.chunks.get(&addr)
    }

    pub(super) fn chunk_mut(&mut self, (segment, addr): Place) -> Option<&mut Chunk> {
        self.segments.get_mut(segment)?.chunks.get_mut(&addr)
    }

    /// The segment that holds an address of a block.
    pub(super) fn segment_of(&self, addr: u64) -> SegmentKey {
        self.bases.range(..=addr).next_back().map_or_else(SegmentKey::default, |(_, key)| *key)
    }

    pub(super) fn remove_segment(&mut self, key: SegmentKey) {
        if let Some(segment) = self.segments.remove(key) {
            self.bases.remove(&segment.range.addr);
        }
    }

    /// A copy of a chunk for the hands of the [`super::vm::Vm`].
    pub(super) fn piece(&self, place: Place) -> Option<Piece> {
        let chunk = self.chunk(place)?;
        let range = DeviceRange::new(place.1, chunk.bytes);
        Some(Piece { segment: place.0, range, backing: chunk.backing })
    }

    /// Writes back what became of chunks; new ones are added.
    pub(super) fn store(&mut self, pieces: &[Piece]) {
        for piece in pieces {
            let Some(segment) = self.segments.get_mut(piece.segment) else { continue };
            let new = Chunk { bytes: piece.range.bytes, backing: piece.backing };
            segment.chunks.entry(piece.range.addr).or_insert(new).backing = piece.backing;
        }
    }

    /// Chunks of a segment that somebody may be using.
    pub(super) fn touched_chunks(&self, segment: &Segment) -> BTreeSet<u64> {
        let used = self.blocks.walk(segment.first).filter(|(kind, _)| kind.is_used());
        used.flat_map(|(_, block)| segment.touching(block.addr, block.end()).map(|(at, _)| at)).collect()
    }

    /// After a sleep or wake of a tag: chunks that nothing lives in have no backup, and where they are not open
    /// for use either, the addresses are bare. Memory of those is returned: the caller's from now on.
    #[must_use]
    pub(super) fn tidy(&mut self, tag: TagKey) -> Vec<Piece> {
        self.tidy_where(tag, |_| true)
    }

    /// At the end of any work on a tag that sleeps: blocks that were freed meanwhile have left chunks without
    /// memory.
    pub(super) fn tidy_absent(&mut self, tag: TagKey) {
        if self.tag(tag).state.is_asleep() {
            let none = self.tidy_where(tag, |backing| backing == Backing::Absent);
            debug_assert!(none.is_empty(), "what is absent is nobody's");
        }
    }

    fn tidy_where(&mut self, tag: TagKey, wanted: impl Fn(Backing) -> bool) -> Vec<Piece> {
        let mut unfit = Vec::new();
        let keys: Vec<SegmentKey> =
            self.segments.iter().filter(|(_, segment)| segment.tag == tag).map(|(key, _)| key).collect();
        for key in keys {
            self.forget_idle_backups(key);
            let Some(segment) = self.segments.get(key) else { continue };
            let touched = self.touched_chunks(segment);
            let idle = segment.chunks.iter().filter(|(at, _)| !touched.contains(at));
            let idle: Vec<u64> = idle.map(|(at, _)| *at).collect();
            let mut cursor = segment.first;
            for start in idle {
                let Some(piece) = self.piece((key, start)) else { continue };
                if !wanted(piece.backing) || matches!(piece.backing, Backing::Mapped { open: true, .. }) {
                    continue;
                }
                cursor = self.block_at(cursor, start);
                if self.blocks.kind(cursor) == Kind::Stuck && piece.backing != Backing::Absent {
                    continue; // Reclaiming tries again.
                }
                cursor = self.strip(key, cursor, start, piece.range.end());
                if piece.backing != Backing::Absent {
                    unfit.push(piece);
                }
            }
        }
        unfit
    }

    /// Memory in bare addresses that the driver refuses to unmap.
    pub(super) fn make_stuck(&mut self, piece: &Piece) {
        let Some(first) = self.segments.get(piece.segment).map(|segment| segment.first) else { return };
        self.store(&[*piece]);
        let key = self.block_at(first, piece.range.addr);
        let key = self.claim(key, piece.range.addr, piece.range.end());
        self.put(key, Kind::Stuck, 0);
    }

    // ---- live blocks ----

    /// Makes a block that is on no list live.
    pub(super) fn enliven(&mut self, key: BlockKey, lane: LaneKey, request: &AllocRequest) -> BlockId {
        let serial = self.next_serial;
        self.next_serial += 1;
        let block = &mut self.blocks[key];
        let bytes = block.bytes();
        block.lane = lane;
        block.stamp = serial;
        // Rounding adds less than a unit.
        block.slack = u16::try_from(bytes - request.bytes).unwrap_or(u16::MAX);
        self.blocks.set_kind(key, Kind::Live);
        self.live_bytes += bytes;
        self.peak_live_bytes = self.peak_live_bytes.max(self.live_bytes);
        self.fine_demand_bytes += self.fine_demand(bytes);
        let tag = self.lane(lane).tag;
        let entry = self.tag_mut(tag);
        entry.live_bytes += bytes;
        entry.live_blocks += 1;
        if entry.changes == Changes::Immutable {
            self.doubt(tag, &self.blocks[key].clone());
        }
        BlockId { pool: self.pool, key, serial }
    }

    /// Notes that work on `stream` uses a live block of `lane`.
    pub(super) fn record_use(&mut self, block: BlockId, lane: LaneKey, stream: StreamId) {
        if self.lane(lane).stream == stream {
            return;
        }
        let others = self.uses.entry(block.key).or_default();
        if !others.contains(&stream) {
            others.push(stream);
        }
    }

    /// Gives a live block back. Returns whether other streams have to be waited for.
    pub(super) fn free(&mut self, op: &'static str, id: BlockId) -> Result<bool> {
        let block = self.live_block(op, id)?;
        let Lane { tag, clock, .. } = *self.lane(block.lane);
        self.define(tag, DeviceRange::new(block.addr, block.bytes()));
        self.live_bytes -= block.bytes();
        self.fine_demand_bytes -= self.fine_demand(block.bytes());
        let entry = self.tag_mut(tag);
        entry.live_bytes -= block.bytes();
        entry.live_blocks -= 1;
        if entry.live_blocks == 0 && entry.state == TagState::Undefined {
            entry.state = TagState::Awake; // Nothing is left that could be undefined.
        }
        let stamp = self.clocks.stamp(clock);
        let others = if self.uses.is_empty() { None } else { self.uses.remove(&id.key) };
        let Some(others) = others else {
            self.scatter(id.key, stamp);
            return Ok(false);
        };
        let until = others
            .into_iter()
            .map(|stream| {
                let clock = self.clocks.of(stream);
                (clock, self.clocks.stamp(clock))
            })
            .collect();
        self.blocks.set_kind(id.key, Kind::Waiting);
        self.waiting.push(Waiting { block: id.key, stamp, until });
        Ok(true)
    }

    /// Frees what has waited for other streams long enough.
    pub(super) fn settle_waiting(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let clocks = &self.clocks;
        let passed =
            |waiting: &mut Waiting| waiting.until.iter().all(|(clock, tick)| clocks.is_quiet(*clock, *tick));
        let done: Vec<Waiting> = self.waiting.extract_if(.., passed).collect();
        done.iter().for_each(|waiting| self.scatter(waiting.block, waiting.stamp));
    }

    /// Joins free neighbours of different lanes as far as both are quiet.
    pub(super) fn join_lanes(&mut self) {
        let firsts: Vec<BlockKey> = self.segments.values().map(|segment| segment.first).collect();
        for first in firsts {
            let mut key = first;
            while let Some(next) = self.blocks[key].next.some() {
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

    // ---- sizes ----

    /// Size of the block that a request gets.
    pub(super) fn checked_size(&self, request: &AllocRequest) -> Result<u64> {
        let AllocRequest { bytes, align, ref tag, .. } = *request;
        let invalid = |reason: String| PoolError::InvalidRequest { bytes, align, tag: tag.clone(), reason };
        if bytes == 0 {
            return Err(invalid("a block has at least one byte".into()));
        }
        if !align.is_power_of_two() || align > self.shape.granule_bytes {
            let granule = self.shape.granule_bytes;
            return Err(invalid(format!(
                "the alignment must be a power of two up to the granule of {granule}"
            )));
        }
        let rounded = bytes.checked_next_multiple_of(UNIT_BYTES);
        rounded
            .filter(|size| *size <= BYTES_MAX)
            .ok_or_else(|| invalid(format!("a block has at most {BYTES_MAX} bytes")))
    }

    /// What a block of this size needs in granules, in bytes.
    pub(super) fn fine_demand(&self, bytes: u64) -> u64 {
        let Shape { granule_bytes, chunk_bytes, .. } = self.shape;
        if bytes < granule_bytes { bytes } else { (bytes % chunk_bytes).next_multiple_of(granule_bytes) }
    }

    /// Whole granules in `bytes`. A segment's granules are counted in memory, so their number fits.
    pub(super) fn granules(&self, bytes: u64) -> usize {
        usize::try_from(bytes / self.shape.granule_bytes).unwrap_or(usize::MAX)
    }
}
