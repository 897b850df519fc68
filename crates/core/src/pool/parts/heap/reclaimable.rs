//! Reclaimable memory: whole chunks in complete free blocks, of tags that are `ready` (awake, and not locked
//! exclusively) and not pinned.

use std::collections::BTreeSet;

use super::Heap;
use super::blocks::HeapBlock;
use super::lists::TagLists;
use crate::pool::tools::keys::{BlockKey, SegmentKey, TagKey};
use crate::pool::tools::mapping::Mapping;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::pool) struct Reclaimable {
    /// Available now.
    pub(in crate::pool) stream_safe_bytes: u64,
    /// Available after events have passed.
    pub(in crate::pool) pending_bytes: u64,
    /// Free, but kept in place while its tag is pinned.
    pub(in crate::pool) pinned_bytes: u64,
}

type Ready<'a> = &'a dyn Fn(TagKey) -> bool;

impl Heap {
    pub(in crate::pool) fn reclaimable(&self, ready: Ready<'_>) -> Reclaimable {
        let mut reclaimable = Reclaimable::default();
        for key in self.reclaimable_large(ready, 0).chain(self.reclaimable_small(ready)) {
            let block = &self.blocks[key];
            let (start, end) = self.whole_granules(block);
            if self.is_complete(block) {
                reclaimable.stream_safe_bytes += end - start;
            } else {
                reclaimable.pending_bytes += end - start;
            }
        }
        let granule = self.shape.granule_bytes;
        let waiting = self.deferred.blocks().map(|key| &self.blocks[key]);
        let waiting = waiting.filter(|block| !self.is_pinned(self.tag_of_list(block.list)));
        reclaimable.pending_bytes += waiting.map(|block| block.bytes() / granule * granule).sum::<u64>();
        let pinned = self.lists.tags().filter(|(_, lists)| lists.is_pinned());
        reclaimable.pinned_bytes = pinned.map(|(tag, _)| self.reclaimable_bytes_of(tag)).sum();
        reclaimable
    }

    /// Free memory of a tag in whole granules, complete and pinned or not.
    pub(in crate::pool) fn reclaimable_bytes_of(&self, tag: TagKey) -> u64 {
        let lists = self.lists.tag(tag);
        let blocks = lists.large().iter().map(|(_, key)| *key).chain(self.small_of(lists));
        blocks.map(|key| self.whole_granules(&self.blocks[key])).map(|(start, end)| end - start).sum()
    }

    pub(in crate::pool) fn reclaimable_granules(&self, ready: Ready<'_>) -> usize {
        let complete = self
            .reclaimable_small(ready)
            .map(|key| &self.blocks[key])
            .filter(|block| self.is_complete(block));
        let bytes = complete.map(|block| self.whole_granules(block)).map(|(start, end)| end - start).sum();
        self.shape.granules(bytes)
    }

    /// Takes `bytes` of reclaimable memory, or all of it, the largest chunks first.
    pub(in crate::pool) fn steal_bytes(&mut self, ready: Ready<'_>, bytes: u64, leaving: &mut Vec<Mapping>) {
        let sum = |leaving: &[Mapping]| leaving.iter().map(|mapping| mapping.range.bytes).sum::<u64>();
        let wanted = sum(leaving).saturating_add(bytes);
        for bytes in self.reclaimable_sizes(ready).into_iter().rev() {
            let short = wanted.saturating_sub(sum(leaving));
            let count = usize::try_from(short.div_ceil(bytes)).unwrap_or(usize::MAX);
            self.steal(ready, bytes, count, leaving);
        }
    }

    /// Takes up to `count` reclaimable chunks of `bytes`, from the smallest blocks first, and from the end of each.
    pub(in crate::pool) fn steal(
        &mut self,
        ready: Ready<'_>,
        bytes: u64,
        count: usize,
        leaving: &mut Vec<Mapping>,
    ) -> usize {
        let mut found = 0;
        if count == 0 {
            return 0;
        }
        let complete = |key: &BlockKey| self.is_complete(&self.blocks[*key]);
        let candidates: Vec<BlockKey> = match bytes > self.shape.granule_bytes {
            true => self.reclaimable_large(ready, bytes).filter(complete).collect(),
            false => self.reclaimable_small(ready).filter(complete).collect(),
        };
        for key in candidates {
            let (start, end) = self.whole_granules(&self.blocks[key]);
            let segment = self.segments.of_addr(start);
            let chunks = self.segments.get(segment).into_iter().flat_map(|s| s.chunks_in(start, end));
            let mut fitting: Vec<u64> =
                chunks.filter(|(_, chunk)| chunk.bytes == bytes).map(|(at, _)| at).collect();
            let taken = fitting.split_off(fitting.len().saturating_sub(count - found));
            // From the end, so that the rest before a run keeps the key.
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

    /// Takes the chunks of `start..end` out of a free block. The addresses become unmapped.
    fn evict(
        &mut self,
        segment: SegmentKey,
        key: BlockKey,
        start: u64,
        end: u64,
        leaving: &mut Vec<Mapping>,
    ) {
        let chunks = self.segments.get(segment).into_iter().flat_map(|s| s.chunks_in(start, end));
        leaving.extend(chunks.filter_map(|(at, _)| self.segments.mapping((segment, at))));
        self.remove_chunks_from(segment, key, start, end);
    }

    fn reclaimable_sizes(&self, ready: Ready<'_>) -> BTreeSet<u64> {
        let mut sizes = BTreeSet::from([self.shape.granule_bytes]);
        for key in self.reclaimable_large(ready, 0) {
            let block = &self.blocks[key];
            let segment = self.segments.get(self.segments.of_addr(block.addr));
            let chunks = segment.into_iter().flat_map(|s| s.chunks_in(block.addr, block.end()));
            sizes.extend(chunks.map(|(_, chunk)| chunk.bytes));
        }
        sizes
    }

    /// Large blocks of at least `bytes`.
    fn reclaimable_large<'a>(&'a self, ready: Ready<'a>, bytes: u64) -> impl Iterator<Item = BlockKey> + 'a {
        let of_reclaimable_tags = self.of_reclaimable_tags(ready);
        of_reclaimable_tags
            .flat_map(move |lists| lists.large().range((bytes, BlockKey::FIRST)..).map(|(_, key)| *key))
    }

    /// Small blocks that may hold a granule.
    fn reclaimable_small<'a>(&'a self, ready: Ready<'a>) -> impl Iterator<Item = BlockKey> + 'a {
        self.of_reclaimable_tags(ready).flat_map(|lists| self.small_of(lists))
    }

    fn of_reclaimable_tags<'a>(&'a self, ready: Ready<'a>) -> impl Iterator<Item = &'a TagLists> + 'a {
        let tags = self.lists.tags().filter(move |(tag, lists)| ready(*tag) && !lists.is_pinned());
        tags.map(|(_, lists)| lists)
    }

    fn small_of<'a>(&'a self, lists: &'a TagLists) -> impl Iterator<Item = BlockKey> + 'a {
        let granule_bytes = self.shape.granule_bytes;
        let stream_lists = lists.stream_lists().iter();
        stream_lists
            .flat_map(move |list| self.lists.list(*list).small().at_least(&self.blocks, granule_bytes))
    }

    /// From start to end.
    fn whole_granules(&self, block: &HeapBlock) -> (u64, u64) {
        let granule = self.shape.granule_bytes;
        let start = block.addr.next_multiple_of(granule);
        (start, (block.end() / granule * granule).max(start))
    }

    /// Whether any whole granule lies in a free block.
    pub(super) fn holds_chunk(&self, block: &HeapBlock) -> bool {
        let (start, end) = self.whole_granules(block);
        start < end
    }
}
