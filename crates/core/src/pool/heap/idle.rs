//! Idle memory: chunks that lie wholly in quiet free pieces, of tags that are `ready` (awake, and nobody's alone) and
//! whose memory is not pinned.

use std::collections::BTreeSet;

use super::super::keys::{BlockKey, SegmentKey, TagKey};
use super::super::piece::Piece;
use super::Heap;
use super::blocks::Block;
use super::lists::TagLists;

/// Idle memory, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::pool) struct Idle {
    /// That can be had now.
    pub(in crate::pool) quiet_bytes: u64,
    /// That can be had when events have passed.
    pub(in crate::pool) pending_bytes: u64,
    /// That stays where it is while its tag is pinned.
    pub(in crate::pool) pinned_bytes: u64,
}

/// Says of a tag whether its free pieces are free for use.
type Ready<'a> = &'a dyn Fn(TagKey) -> bool;

impl Heap {
    /// How much is idle.
    pub(in crate::pool) fn idle(&self, ready: Ready<'_>) -> Idle {
        let mut idle = Idle::default();
        for key in self.idle_coarse(ready, 0).chain(self.idle_fine(ready)) {
            let block = &self.blocks[key];
            let (start, end) = self.whole_granules(block);
            if self.is_quiet(block) {
                idle.quiet_bytes += end - start;
            } else {
                idle.pending_bytes += end - start;
            }
        }
        let granule = self.shape.granule_bytes;
        let waiting = self.deferred.blocks().map(|key| &self.blocks[key]);
        let waiting = waiting.filter(|block| !self.is_pinned(self.tag_of_lane(block.lane)));
        idle.pending_bytes += waiting.map(|block| block.bytes() / granule * granule).sum::<u64>();
        let pinned = self.lists.tags().filter(|(_, lists)| lists.is_pinned());
        idle.pinned_bytes = pinned.map(|(tag, _)| self.idle_bytes_of(tag)).sum();
        idle
    }

    /// Memory of a tag that serves no block, whether or not work may still touch it, and whatever may be done with it.
    pub(in crate::pool) fn idle_bytes_of(&self, tag: TagKey) -> u64 {
        let lists = self.lists.tag(tag);
        let pieces = lists.coarse().iter().map(|(_, key)| *key).chain(self.fine_of(lists));
        pieces.map(|key| self.whole_granules(&self.blocks[key])).map(|(start, end)| end - start).sum()
    }

    pub(in crate::pool) fn idle_granules(&self, ready: Ready<'_>) -> usize {
        let quiet = self.idle_fine(ready).map(|key| &self.blocks[key]).filter(|block| self.is_quiet(block));
        let bytes = quiet.map(|block| self.whole_granules(block)).map(|(start, end)| end - start).sum();
        self.shape.granules(bytes)
    }

    /// Takes idle memory of any size, the largest chunks first, until it is `bytes` or there is no more.
    pub(in crate::pool) fn steal_bytes(&mut self, ready: Ready<'_>, bytes: u64, leaving: &mut Vec<Piece>) {
        let sum = |leaving: &[Piece]| leaving.iter().map(|piece| piece.range.bytes).sum::<u64>();
        let wanted = sum(leaving).saturating_add(bytes);
        for bytes in self.idle_sizes(ready).into_iter().rev() {
            let short = wanted.saturating_sub(sum(leaving));
            let count = usize::try_from(short.div_ceil(bytes)).unwrap_or(usize::MAX);
            self.steal(ready, bytes, count, leaving);
        }
    }

    /// Takes up to `count` idle chunks of this size out of their pieces, smallest pieces first, each from its end.
    pub(in crate::pool) fn steal(
        &mut self,
        ready: Ready<'_>,
        bytes: u64,
        count: usize,
        leaving: &mut Vec<Piece>,
    ) -> usize {
        let mut found = 0;
        if count == 0 {
            return 0;
        }
        let quiet = |key: &BlockKey| self.is_quiet(&self.blocks[*key]);
        let candidates: Vec<BlockKey> = match bytes > self.shape.granule_bytes {
            true => self.idle_coarse(ready, bytes).filter(quiet).collect(),
            false => self.idle_fine(ready).filter(quiet).collect(),
        };
        for key in candidates {
            let (start, end) = self.whole_granules(&self.blocks[key]);
            let segment = self.segments.of_addr(start);
            let chunks = self.segments.get(segment).into_iter().flat_map(|s| s.chunks_in(start, end));
            let mut fitting: Vec<u64> =
                chunks.filter(|(_, chunk)| chunk.bytes == bytes).map(|(at, _)| at).collect();
            let taken = fitting.split_off(fitting.len().saturating_sub(count - found));
            // From the end, so that what is left in front of a run keeps the key.
            for run in taken.chunk_by(|before, behind| before + bytes == *behind).rev() {
                self.evict(segment, key, run[0], run[run.len() - 1] + bytes, leaving);
            }
            found += taken.len();
            if found == count {
                break;
            }
        }
        found
    }

    /// Takes the chunks of `start..end` out of a free piece; the addresses are bare from now on.
    fn evict(&mut self, segment: SegmentKey, key: BlockKey, start: u64, end: u64, leaving: &mut Vec<Piece>) {
        let chunks = self.segments.get(segment).into_iter().flat_map(|s| s.chunks_in(start, end));
        leaving.extend(chunks.filter_map(|(at, _)| self.segments.piece((segment, at))));
        self.strip_from(segment, key, start, end);
    }

    /// Sizes of the chunks that are idle.
    fn idle_sizes(&self, ready: Ready<'_>) -> BTreeSet<u64> {
        let mut sizes = BTreeSet::from([self.shape.granule_bytes]);
        for key in self.idle_coarse(ready, 0) {
            let block = &self.blocks[key];
            let segment = self.segments.get(self.segments.of_addr(block.addr));
            let chunks = segment.into_iter().flat_map(|s| s.chunks_in(block.addr, block.end()));
            sizes.extend(chunks.map(|(_, chunk)| chunk.bytes));
        }
        sizes
    }

    /// Coarse pieces of at least `bytes`.
    fn idle_coarse<'a>(&'a self, ready: Ready<'a>, bytes: u64) -> impl Iterator<Item = BlockKey> + 'a {
        let lending = self.lending(ready);
        lending.flat_map(move |lists| lists.coarse().range((bytes, BlockKey::FIRST)..).map(|(_, key)| *key))
    }

    /// Fine pieces that may hold a granule.
    fn idle_fine<'a>(&'a self, ready: Ready<'a>) -> impl Iterator<Item = BlockKey> + 'a {
        self.lending(ready).flat_map(|lists| self.fine_of(lists))
    }

    /// Of tags whose idle memory may go elsewhere.
    fn lending<'a>(&'a self, ready: Ready<'a>) -> impl Iterator<Item = &'a TagLists> + 'a {
        let tags = self.lists.tags().filter(move |(tag, lists)| ready(*tag) && !lists.is_pinned());
        tags.map(|(_, lists)| lists)
    }

    fn fine_of<'a>(&'a self, lists: &'a TagLists) -> impl Iterator<Item = BlockKey> + 'a {
        let granule_bytes = self.shape.granule_bytes;
        let lanes = lists.lanes().iter();
        lanes.flat_map(move |lane| self.lists.lane(*lane).fine().at_least(&self.blocks, granule_bytes))
    }

    /// The part of a free piece that is whole granules.
    fn whole_granules(&self, block: &Block) -> (u64, u64) {
        let granule = self.shape.granule_bytes;
        let start = block.addr.next_multiple_of(granule);
        (start, (block.end() / granule * granule).max(start))
    }

    /// Whether any whole chunk lies in a free piece.
    pub(super) fn holds_chunk(&self, block: &Block) -> bool {
        let (start, end) = self.whole_granules(block);
        start < end
    }
}
