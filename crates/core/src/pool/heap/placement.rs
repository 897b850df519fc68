//! Where a block goes: which free pieces serve a request, and what memory they lack.
//!
//! One rule, whatever the model: of the free places looked at, the one that needs the least memory brought in;
//! among equals, the one that leaves the least behind. New addresses compete with those at hand, and cost all
//! of the block. Blocks of at least a chunk are laid out as chunks first and granules last, so that their
//! chunks leave whole when they are freed, and their tails share granules with small blocks. Where a sleep drops
//! the tag anyway, or a block is freed as a whole, it gets as few chunks as hold it, of just its length. A free piece may
//! hold chunks of all sizes: where one begins is looked up. One that is longer than a chunk of the pool's serves as a
//! whole or not at all, whatever the tag.

use std::cmp::Reverse;

use super::super::handle::BlockId;
use super::super::keys::{BlockKey, LaneKey, SegmentKey, TagKey};
use super::super::piece::Piece;
use super::super::units::UNIT_BYTES;
use super::Heap;
use super::blocks::{Block, Kind};
use crate::driver::DeviceRange;

/// How many pieces are looked at for a block smaller than a chunk.
const LOOKS: usize = 64;

/// How many for a large one, which costs calls of the driver anyway.
const MANY_LOOKS: usize = 512;

/// A free range of addresses for a block.
#[derive(Debug, Clone, Copy)]
pub(in crate::pool) struct Spot {
    /// The free piece that holds the first byte.
    first: BlockKey,
    start: u64,
    /// Memory that it lacks.
    pub(in crate::pool) absent_bytes: u64,
    /// A free chunk that the end would cut, by address and size: its memory has to leave first.
    cut: Option<(u64, u64)>,
    /// Size of the piece that it begins in.
    piece_bytes: u64,
}

/// Where a block is being made.
#[derive(Debug)]
pub(in crate::pool) struct Site {
    key: BlockKey,
    /// Where the block ends. What it has of its last granule behind that is free once there is memory.
    end: u64,
    /// The stamp of what it is made of.
    stamp: u64,
    /// To bring in.
    pub(in crate::pool) lacking: Vec<Piece>,
    /// To take out.
    pub(in crate::pool) leaving: Vec<Piece>,
}

impl Heap {
    /// A place that needs no memory, if one is found at once.
    pub(in crate::pool) fn ready_spot(
        &self,
        tag: TagKey,
        lane: LaneKey,
        bytes: u64,
        align: u64,
    ) -> Option<Spot> {
        if self.shape.is_large(bytes) {
            return self.ready_large_spot(tag, lane, bytes);
        }
        if bytes >= self.shape.granule_bytes {
            return self.tightest_piece(tag, lane, bytes, align);
        }
        // Every piece of this size holds the block, wherever its first aligned byte is.
        let wanted = bytes + align.saturating_sub(UNIT_BYTES);
        let own = self.lists.lane(lane).fine().find(&self.blocks, wanted);
        let found = own.or_else(|| self.quiet_piece(tag, lane, wanted));
        found.map(|first| self.ready_at(first, self.blocks[first].addr.next_multiple_of(align)))
    }

    fn ready_at(&self, first: BlockKey, start: u64) -> Spot {
        Spot { first, start, absent_bytes: 0, cut: None, piece_bytes: self.blocks[first].bytes() }
    }

    /// Of the first few coarse pieces that are large enough, one that lacks nothing; else what a block of this size
    /// that was made of granules has left.
    fn ready_large_spot(&self, tag: TagKey, lane: LaneKey, bytes: u64) -> Option<Spot> {
        let chunks_bytes = bytes / self.shape.chunk_bytes * self.shape.chunk_bytes;
        let coarse = self.lists.tag(tag).coarse().range((chunks_bytes, BlockKey::FIRST)..).take(LOOKS);
        let starts = coarse.flat_map(|(_, key)| {
            let piece = &self.blocks[*key];
            [(*key, piece.end() - chunks_bytes), (*key, piece.addr)]
        });
        let ready = starts
            .filter_map(|(key, start)| self.spot(key, start, bytes, lane))
            .find(|spot| spot.absent_bytes == 0);
        ready.or_else(|| self.granules_for_large(lane, bytes).filter(|spot| spot.piece_bytes == bytes))
    }

    /// A fine piece of the lane's own that holds a large block: its stream can use it at once, though granules
    /// are better left to small blocks.
    pub(in crate::pool) fn granules_for_large(&self, lane: LaneKey, bytes: u64) -> Option<Spot> {
        let large = self.shape.is_large(bytes);
        let fine = self.lists.lane(lane).fine();
        let slack = self.shape.granule_bytes - UNIT_BYTES; // Wherever its first whole granule begins.
        let find = || fine.find(&self.blocks, bytes + slack).or_else(|| fine.find(&self.blocks, bytes));
        let found = large.then(find).flatten();
        found.and_then(|first| {
            let piece = &self.blocks[first];
            let start = piece.addr.next_multiple_of(self.shape.granule_bytes);
            let start = if start + bytes <= piece.end() { start } else { return None };
            Some(self.ready_at(first, start))
        })
    }

    /// A fine piece of another lane that is quiet.
    fn quiet_piece(&self, tag: TagKey, lane: LaneKey, bytes: u64) -> Option<BlockKey> {
        let others = self.lists.tag(tag).lanes().iter().filter(|other| **other != lane);
        others
            .filter_map(|other| self.lists.lane(*other).fine().find(&self.blocks, bytes))
            .find(|key| self.is_quiet(&self.blocks[*key]))
    }

    /// For a block of some granules: of the fine pieces that hold it, the one in which it takes the fewest idle
    /// granules, because it shares those at an end with what lives there. Among equals the largest: there the next
    /// block can go on in this one's last granule, and the smaller pieces leave whole.
    fn tightest_piece(&self, tag: TagKey, lane: LaneKey, bytes: u64, align: u64) -> Option<Spot> {
        let granule = self.shape.granule_bytes;
        let pieces = self.lists.tag(tag).lanes().iter().flat_map(|other| {
            let pieces = self.lists.lane(*other).fine().largest_first(&self.blocks, bytes);
            pieces.take(LOOKS).filter(|key| self.is_usable(&self.blocks[*key], lane))
        });
        let spots = pieces.flat_map(|first| {
            let piece = &self.blocks[first];
            let early = piece.addr.next_multiple_of(align);
            let late = (piece.end() - bytes) / align * align;
            [early, late].map(|start| (first, piece, start))
        });
        let spots = spots.filter(|(_, piece, start)| *start >= piece.addr && start + bytes <= piece.end());
        let tightest = spots.min_by_key(|(_, piece, start)| {
            let from = (start / granule * granule).max(piece.addr.next_multiple_of(granule));
            let to = (start + bytes).next_multiple_of(granule).min(piece.end() / granule * granule);
            (to.saturating_sub(from), Reverse(piece.bytes()), *start)
        });
        tightest.map(|(first, _, start)| self.ready_at(first, start))
    }

    /// Of all places in the tag's segments, the one that lacks the least memory.
    pub(in crate::pool) fn cheapest_spot(
        &self,
        tag: TagKey,
        lane: LaneKey,
        bytes: u64,
        align: u64,
    ) -> Option<Spot> {
        let spots: Box<dyn Iterator<Item = Spot> + '_> = if self.shape.is_large(bytes) {
            Box::new(self.large_spots(tag, lane, bytes))
        } else {
            Box::new(self.small_spots(tag, lane, bytes, align))
        };
        spots.min_by_key(|spot| (spot.absent_bytes, spot.piece_bytes, spot.start))
    }

    fn large_spots(&self, tag: TagKey, lane: LaneKey, bytes: u64) -> impl Iterator<Item = Spot> {
        let chunk_bytes = self.shape.chunk_bytes;
        let lists = self.lists.tag(tag);
        let coarse = lists.coarse().iter().rev().take(MANY_LOOKS).flat_map(move |(piece_bytes, key)| {
            let addr = self.blocks[*key].addr;
            // From its beginning, or so that its end is where the block's chunks end and its granules begin.
            let chunks_bytes = (bytes / chunk_bytes * chunk_bytes).min(*piece_bytes);
            let late = addr + piece_bytes - chunks_bytes;
            [Some(addr), (late > addr).then_some(late)].into_iter().flatten().map(|start| (*key, start))
        });
        // The tightest that holds all of it is among them, and so are new addresses.
        let holding = lists.bare().range((bytes, BlockKey::FIRST)..).take(1);
        let bare = lists.bare().iter().rev().take(MANY_LOOKS).chain(holding);
        let bare = bare.map(|(_, key)| (*key, self.blocks[*key].addr));
        coarse.chain(bare).filter_map(move |(key, start)| self.spot(key, start, bytes, lane))
    }

    /// Places at the beginning of bare pieces, and those that begin in the free end of a granule before one.
    fn small_spots(&self, tag: TagKey, lane: LaneKey, bytes: u64, align: u64) -> impl Iterator<Item = Spot> {
        let bare = self.lists.tag(tag).bare();
        let holding = bare.range((bytes, BlockKey::FIRST)..).take(LOOKS);
        // One whose neighbour helps out may be smaller, by less than a granule.
        let least = bytes.saturating_sub(self.shape.granule_bytes);
        let smaller = bare.range((least, BlockKey::FIRST)..(bytes, BlockKey::FIRST)).take(LOOKS);
        let starts = holding.chain(smaller).flat_map(move |(_, key)| {
            let piece = &self.blocks[*key];
            let before = (self.blocks.kind(piece.prev) == Kind::Fine).then_some(piece.prev);
            let before = before.map(|prev| (prev, self.blocks[prev].addr.next_multiple_of(align)));
            let before = before.filter(|(_, start)| *start < piece.addr);
            [Some((*key, piece.addr)), before].into_iter().flatten()
        });
        starts.filter_map(move |(key, start)| self.spot(key, start, bytes, lane))
    }

    /// The place of `bytes` at `start` in the free piece `first`, if it is all free and usable, and of a large
    /// block no more than the end would lie in granules.
    fn spot(&self, first: BlockKey, start: u64, bytes: u64, lane: LaneKey) -> Option<Spot> {
        let (granule, chunk_bytes) = (self.shape.granule_bytes, self.shape.chunk_bytes);
        let end = start.checked_add(bytes)?;
        let (mut absent_bytes, mut cut, mut granule_bytes) = (0, None, 0);
        for (kind, block) in self.blocks.walk(first) {
            let (from, to) = (block.addr.max(start), block.end().min(end));
            match kind {
                Kind::Bare => {
                    absent_bytes += to.next_multiple_of(granule) - from;
                    granule_bytes += (to - from) % chunk_bytes;
                }
                Kind::Fine if self.is_usable(block, lane) => granule_bytes += to - from,
                Kind::Coarse if self.shape.is_large(bytes) && self.is_usable(block, lane) => {
                    if let Some((at, chunk_bytes)) = self.cut_off(block, from, to)? {
                        // The chunk leaves, and granules come in its place.
                        if !self.is_quiet(block) || self.is_pinned(self.tag_of_lane(block.lane)) {
                            return None;
                        }
                        cut = Some((at, chunk_bytes));
                        absent_bytes += (to - at).next_multiple_of(granule);
                        granule_bytes += to - at;
                    }
                }
                _ => return None,
            }
            if to == end {
                if self.shape.is_large(bytes) && granule_bytes > bytes % chunk_bytes {
                    return None; // Granules in place of chunks would be missed where only granules will do.
                }
                let piece_bytes = self.blocks[first].bytes();
                return Some(Spot { first, start, absent_bytes, cut, piece_bytes });
            }
        }
        None
    }

    /// The chunk of a coarse piece that `to` cuts, by address and size, if any. `None` where a block cannot lie at
    /// `from..to`: a span is never cut.
    fn cut_off(&self, piece: &Block, from: u64, to: u64) -> Option<Option<(u64, u64)>> {
        if from == piece.addr && to == piece.end() {
            return Some(None);
        }
        let segment = self.segments.get(self.segments.of_addr(piece.addr))?;
        match (segment.across(from), segment.across(to)) {
            (Some(_), _) => None,
            (None, Some((_, chunk))) if chunk.bytes > self.shape.chunk_bytes => None,
            (None, across) => Some(across.map(|(at, chunk)| (at, chunk.bytes))),
        }
    }

    /// Makes the spot a block in use, which no handle finds yet. With it come the rest of its last granule, the
    /// memory that it lacks, in chunks of at most `largest_bytes`, and the memory that has to leave.
    pub(in crate::pool) fn occupy(
        &mut self,
        spot: &Spot,
        lane: LaneKey,
        bytes: u64,
        largest_bytes: u64,
    ) -> Site {
        let segment = self.segments.of_addr(spot.start);
        let end = spot.start + bytes;
        let mut leaving = Vec::new();
        let mut first = spot.first;
        if let Some((cut, cut_bytes)) = spot.cut {
            leaving.extend(self.segments.piece((segment, cut)));
            let key = self.block_at(first, cut);
            let bare = self.strip_from(segment, key, cut, cut + cut_bytes);
            first = self.block_at(bare, spot.start);
        }
        let lacking = self.lacking(first, segment, (spot.start, end), largest_bytes);
        // Of other lanes only quiet pieces are taken.
        let own = self.blocks.walk(first).take_while(|(_, block)| block.addr < end);
        let own =
            own.filter(|(kind, block)| block.lane == lane && *kind != Kind::Bare && !self.is_quiet(block));
        let stamp = own.map(|(_, block)| block.stamp).max().unwrap_or(0);
        let reach = lacking.last().map_or(end, |piece| piece.range.end().max(end));
        let key = self.claim(first, spot.start, reach);
        let block = &mut self.blocks[key];
        (block.lane, block.stamp, block.slack) = (lane, 0, 0);
        self.blocks.set_kind(key, Kind::Live);
        Site { key, end, stamp, lacking, leaving }
    }

    /// The pieces to bring in so that everything from `start` to `end` has memory.
    fn lacking(
        &self,
        first: BlockKey,
        segment: SegmentKey,
        (start, end): (u64, u64),
        largest_bytes: u64,
    ) -> Vec<Piece> {
        let mut lacking = Vec::new();
        for (kind, block) in self.blocks.walk(first).take_while(|(_, block)| block.addr < end) {
            if kind != Kind::Bare {
                continue;
            }
            let (at, to) = (block.addr.max(start), block.end().min(end));
            let absent = |piece: DeviceRange| Piece::absent(segment, piece.addr, piece.bytes);
            let mut range = DeviceRange::new(at, to - at);
            if largest_bytes > self.shape.chunk_bytes && self.shape.is_large(end - start) {
                // What the last granule has left serves small blocks, so it is for itself.
                let whole =
                    DeviceRange::new(at, range.bytes / self.shape.granule_bytes * self.shape.granule_bytes);
                lacking.extend(self.shape.exact_pieces(whole, largest_bytes).map(absent));
                range = DeviceRange::new(whole.end(), to - whole.end());
            }
            lacking.extend(self.shape.pieces(range).map(absent));
        }
        lacking
    }

    /// Makes a spot that lacks nothing a live block, for a request of so many bytes, rounded to `bytes`.
    pub(in crate::pool) fn take(
        &mut self,
        spot: &Spot,
        lane: LaneKey,
        bytes: u64,
        requested_bytes: u64,
    ) -> (BlockId, DeviceRange) {
        let key = self.claim(spot.first, spot.start, spot.start + bytes);
        (self.enliven(key, lane, requested_bytes), DeviceRange::new(spot.start, bytes))
    }

    /// The site has its memory: makes it a live block, and what its last granule has left a free piece.
    pub(in crate::pool) fn finish(
        &mut self,
        site: &Site,
        lane: LaneKey,
        requested_bytes: u64,
    ) -> (BlockId, DeviceRange) {
        self.segments.store(&site.lacking);
        if self.blocks[site.key].end() > site.end {
            let rest = self.blocks.split(site.key, site.end);
            self.put(rest, Kind::Fine, 0);
        }
        let id = self.enliven(site.key, lane, requested_bytes);
        let block = &self.blocks[site.key];
        (id, DeviceRange::new(block.addr, block.bytes()))
    }

    /// The site gets no memory: everything is free again. Returns the block that it was, and a piece near it.
    pub(in crate::pool) fn abandon(&mut self, site: &Site) -> (Block, BlockKey) {
        let block = self.blocks[site.key];
        (block, self.scatter_by_chunks(site.key, site.stamp))
    }
}
