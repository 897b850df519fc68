//! Where memory comes from: what nothing uses is taken before anything is created.
//!
//! Idle memory is loose memory (mapped nowhere) and chunks that lie wholly in quiet free pieces of tags that
//! are awake and not held ([`super::hold`]). A need takes loose memory of its size, then idle chunks of its size, wherever they are mapped
//! now; only the rest is created. What is idle then is of the wrong size. It may stay as long as the pool holds
//! no more than was ever in use at once, and a sixty-fourth; beyond that, and at the limit, chunks are made
//! of idle granules, and idle memory is given up for as much as is created, spans first. So the pool never holds
//! noticeably more than was needed at some time, and a load that is repeated finds what it had the first time.
//! Spans are not made of idle chunks: they are there so that a sleep has few pieces to give back.

use super::Shape;
use super::blocks::{Block, BlockKey};
use super::segment::SegmentKey;
use super::state::{State, TagEntry, TagKey};
use super::vm::{Backing, Piece, Vm};
use crate::tag::TagState;

/// The part of what was ever in use that may be idle beyond it.
const SPARE_PART: u64 = 64;

/// What a need gets.
#[derive(Debug, Default)]
pub(super) struct Supply {
    /// Chunks that leave where they are, to be loose memory.
    pub(super) leaving: Vec<Piece>,
    /// To create.
    pub(super) create_bytes: u64,
    /// To give up before, from what is loose by then.
    pub(super) release_bytes: u64,
    /// Loose memory that the need takes: size and count.
    pub(super) reserved: Vec<(u64, usize)>,
    /// Granules to create beyond the need; see [`State::granules_ahead`].
    pub(super) ahead: usize,
}

/// Idle memory, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Idle {
    /// That can be had now.
    pub(super) quiet_bytes: u64,
    /// That can be had when events have passed.
    pub(super) pending_bytes: u64,
    /// That stays where it is while its tag is held.
    pub(super) pinned_bytes: u64,
}

impl State {
    /// Idle memory in segments.
    pub(super) fn idle(&self) -> Idle {
        let mut idle = Idle::default();
        for key in self.idle_coarse(0).chain(self.idle_fine()) {
            let block = &self.blocks[key];
            let (start, end) = self.whole_chunks(block);
            if self.is_quiet(block) {
                idle.quiet_bytes += end - start;
            } else {
                idle.pending_bytes += end - start;
            }
        }
        idle.quiet_bytes += self.leftovers().map(|piece| piece.range.bytes).sum::<u64>();
        let granule = self.shape.granule_bytes;
        let waiting = self.waiting.iter().map(|waiting| &self.blocks[waiting.block]);
        let waiting = waiting.filter(|block| !self.is_pinned(self.lane(block.lane).tag));
        idle.pending_bytes += waiting.map(|block| block.bytes() / granule * granule).sum::<u64>();
        let pinned = self.holds.tags().filter_map(|tag| self.find_tag(tag));
        idle.pinned_bytes = pinned.map(|tag| self.idle_bytes_of(tag)).sum();
        idle
    }

    /// Takes from idle memory what `needs` can use; what the caller has `in_hand` will be loose by then. What is
    /// left is created, and the pool may hold `allowed_bytes` then: beyond that, needs for chunks become needs
    /// for granules if `may_split`, and idle memory of the wrong size is given up. Whether enough is idle and
    /// may be created is a question to ask before ([`State::idle`]).
    pub(super) fn supply(
        &mut self,
        vm: &Vm,
        needs: &mut Vec<Piece>,
        in_hand: &[Piece],
        allowed_bytes: u64,
        may_split: bool,
    ) -> Supply {
        let Shape { granule_bytes: granule, chunk_bytes: chunk, .. } = self.shape;
        let count = |needs: &[Piece], bytes| needs.iter().filter(|need| need.range.bytes == bytes).count();
        let at_hand = |bytes| vm.loose_count(bytes) + count(in_hand, bytes);
        let held_bytes = vm.counters().held_bytes();
        let excess = |create_bytes: u64| (held_bytes + create_bytes).saturating_sub(allowed_bytes);
        let mut supply = Supply::default();
        let mut create_bytes = 0;
        for span in self.shape.sizes().filter(|bytes| *bytes > chunk) {
            let missing = self.supply_size(span, count(needs, span), at_hand(span), &mut supply);
            create_bytes += missing as u64 * span;
        }
        if chunk > granule {
            let missing = self.supply_size(chunk, count(needs, chunk), at_hand(chunk), &mut supply);
            let (have, wanted) = (at_hand(granule) + self.idle_granules(), count(needs, granule));
            create_bytes += missing as u64 * chunk + wanted.saturating_sub(have) as u64 * granule;
            let too_many = usize::try_from(excess(create_bytes).div_ceil(chunk)).unwrap_or(usize::MAX);
            if may_split {
                let spare = have.saturating_sub(wanted) / self.granules(chunk);
                split_last(needs, missing.min(spare).min(too_many), chunk, granule);
            }
        }
        self.supply_size(granule, count(needs, granule), at_hand(granule), &mut supply);
        let of = |pieces: &[Piece]| pieces.iter().map(|piece| piece.range.bytes).sum::<u64>();
        let reserved: u64 = supply.reserved.iter().map(|(bytes, count)| bytes * *count as u64).sum();
        supply.create_bytes = of(needs) - reserved;
        supply.release_bytes = excess(supply.create_bytes);
        let free_bytes = vm.counters().loose_bytes() + of(in_hand) + of(&supply.leaving);
        let spare_bytes = free_bytes.saturating_sub(reserved);
        if supply.release_bytes > spare_bytes {
            self.steal_bytes(supply.release_bytes - spare_bytes, &mut supply.leaving);
        }
        supply
    }

    /// What the pool may hold when `used_bytes` of it are in use: as much as ever was, and a little beyond for
    /// idle memory of the wrong size, which the next large or small block may want again.
    pub(super) fn allowed_bytes(&self, used_bytes: u64) -> u64 {
        let most = self.peak_used_bytes.max(used_bytes);
        most.saturating_add(most / SPARE_PART).min(self.shape.limit_bytes.unwrap_or(u64::MAX))
    }

    /// How many granules to create beyond `supply`, because more memory is in use than ever before: as many as
    /// the blocks of now would need if no two shared one, and those of one chunk. The same blocks may lie less well together the next
    /// time, and are to find enough then.
    pub(super) fn granules_ahead(
        &self,
        vm: &Vm,
        supply: &Supply,
        used_bytes: u64,
        allowed_bytes: u64,
    ) -> usize {
        if used_bytes <= self.peak_used_bytes {
            return 0;
        }
        let granule = self.shape.granule_bytes;
        let held_bytes = vm.counters().held_bytes() + supply.create_bytes - supply.release_bytes;
        let room = allowed_bytes.saturating_sub(held_bytes) / granule;
        let wanted = self.fine_demand_bytes.saturating_add(self.shape.chunk_bytes);
        let missing = wanted.saturating_sub(vm.held_of(granule)) / granule;
        usize::try_from(room.min(missing)).unwrap_or(0)
    }

    /// Finds `wanted` chunks of one size; returns how many are missing.
    fn supply_size(&mut self, bytes: u64, wanted: usize, at_hand: usize, supply: &mut Supply) -> usize {
        let taken = at_hand.min(wanted);
        let found = self.steal(bytes, wanted - taken, &mut supply.leaving);
        supply.reserved.push((bytes, taken + found));
        wanted - taken - found
    }

    /// Takes idle memory of any kind, the largest chunks first, until it is `bytes` or there is no more.
    pub(super) fn steal_bytes(&mut self, bytes: u64, leaving: &mut Vec<Piece>) {
        let sum = |leaving: &[Piece]| leaving.iter().map(|piece| piece.range.bytes).sum::<u64>();
        let wanted = sum(leaving).saturating_add(bytes);
        for bytes in self.shape.sizes().chain([self.shape.granule_bytes]) {
            let short = wanted.saturating_sub(sum(leaving));
            let count = usize::try_from(short.div_ceil(bytes)).unwrap_or(usize::MAX);
            self.steal(bytes, count, leaving);
        }
        let leftovers: Vec<Piece> = self.leftovers().collect();
        for piece in leftovers {
            if sum(leaving) >= wanted {
                return;
            }
            if let Some(chunk) = self.chunk_mut((piece.segment, piece.range.addr)) {
                chunk.backing = Backing::Absent;
                leaving.push(piece);
            }
        }
    }

    /// Takes up to `count` idle chunks of this size out of their pieces, smallest pieces first, each from its end.
    fn steal(&mut self, bytes: u64, count: usize, leaving: &mut Vec<Piece>) -> usize {
        let mut found = 0;
        if count == 0 {
            return 0;
        }
        let quiet = |key: &BlockKey| self.is_quiet(&self.blocks[*key]);
        let candidates: Vec<BlockKey> = match bytes > self.shape.granule_bytes {
            true => self.idle_coarse(bytes).filter(quiet).collect(),
            false => self.idle_fine().filter(quiet).collect(),
        };
        for key in candidates {
            let (start, end) = self.whole_chunks(&self.blocks[key]);
            let segment = self.segment_of(start);
            let chunks = self.segments.get(segment).into_iter().flat_map(|s| s.chunks.range(start..end));
            let fitting = chunks.rev().filter(|(_, chunk)| chunk.bytes == bytes).map(|(at, _)| *at);
            let taken: Vec<u64> = fitting.take(count - found).collect();
            // What is left in front of a run keeps the key.
            for run in taken.chunk_by(|behind, before| before + bytes == *behind) {
                self.evict(segment, key, run[run.len() - 1], run[0] + bytes, leaving);
            }
            found += taken.len();
            if found == count {
                break;
            }
        }
        found
    }

    /// Takes the chunks of `start..end` out of a free piece; the addresses are bare from now on.
    pub(super) fn evict(
        &mut self,
        segment: SegmentKey,
        key: BlockKey,
        start: u64,
        end: u64,
        leaving: &mut Vec<Piece>,
    ) {
        let chunks = self.segments.get(segment).into_iter().flat_map(|s| s.chunks.range(start..end));
        let places: Vec<u64> = chunks.map(|(at, _)| *at).collect();
        leaving.extend(places.into_iter().filter_map(|at| self.piece((segment, at))));
        self.strip(segment, key, start, end);
    }

    /// Coarse pieces of at least `bytes`, of tags whose free pieces are free for use.
    fn idle_coarse(&self, bytes: u64) -> impl Iterator<Item = BlockKey> + '_ {
        self.lending()
            .flat_map(move |entry| entry.coarse.range((bytes, BlockKey::FIRST)..).map(|(_, key)| *key))
    }

    /// Fine pieces that may hold a granule, of the same tags.
    fn idle_fine(&self) -> impl Iterator<Item = BlockKey> + '_ {
        self.lending().flat_map(|entry| self.fine_of(entry))
    }

    fn fine_of<'a>(&'a self, entry: &'a TagEntry) -> impl Iterator<Item = BlockKey> + 'a {
        let lanes = entry.lanes.iter();
        lanes.flat_map(|lane| self.lane(*lane).fine.at_least(&self.blocks, self.shape.granule_bytes))
    }

    /// Tags whose idle memory may go elsewhere.
    fn lending(&self) -> impl Iterator<Item = &TagEntry> + '_ {
        self.tags.iter().filter(|entry| entry.is_settled() && !self.holds.is_held(&entry.tag))
    }

    /// Memory of a tag that serves no block, whether or not work may still touch it.
    pub(super) fn idle_bytes_of(&self, tag: TagKey) -> u64 {
        let entry = self.tag(tag);
        let pieces = entry.coarse.iter().map(|(_, key)| *key).chain(self.fine_of(entry));
        pieces.map(|key| self.whole_chunks(&self.blocks[key])).map(|(start, end)| end - start).sum()
    }

    fn idle_granules(&self) -> usize {
        let quiet = self.idle_fine().map(|key| &self.blocks[key]).filter(|block| self.is_quiet(block));
        let bytes = quiet.map(|block| self.whole_chunks(block)).map(|(start, end)| end - start).sum();
        self.granules(bytes)
    }

    /// The part of a free piece that is whole chunks.
    fn whole_chunks(&self, block: &Block) -> (u64, u64) {
        let granule = self.shape.granule_bytes;
        let start = block.addr.next_multiple_of(granule);
        (start, (block.end() / granule * granule).max(start))
    }

    /// Whether any whole chunk lies in a free piece.
    pub(super) fn holds_chunk(&self, block: &Block) -> bool {
        let (start, end) = self.whole_chunks(block);
        start < end
    }

    /// Memory that a failed undo has left in tags that sleep: their bytes are elsewhere.
    fn leftovers(&self) -> impl Iterator<Item = Piece> + '_ {
        let of = |entry: &TagEntry| {
            entry.has_leftovers
                && !entry.gate.is_closed()
                && matches!(entry.state, TagState::AsleepBackedUp | TagState::AsleepDropped)
        };
        let segments = self.segments.iter().filter(move |(_, segment)| of(self.tag(segment.tag)));
        segments.flat_map(move |(key, segment)| {
            let held = segment.chunks.iter().filter(|(_, chunk)| chunk.backing != Backing::Absent);
            held.filter_map(move |(at, _)| self.piece((key, *at)))
        })
    }
}

/// Makes granules of the last `count` needs for a chunk.
fn split_last(needs: &mut Vec<Piece>, count: usize, chunk: u64, granule: u64) {
    let chunks: Vec<usize> = (0..needs.len()).filter(|nth| needs[*nth].range.bytes == chunk).collect();
    for nth in chunks.into_iter().rev().take(count) {
        let Piece { segment, range, .. } = needs[nth];
        let granules =
            (0..range.bytes / granule).map(|i| Piece::absent(segment, range.addr + i * granule, granule));
        needs.splice(nth..=nth, granules);
    }
}
