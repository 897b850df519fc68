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
        let pinned = self.lists.tags_with_granules().filter(|(_, lists)| lists.is_pinned());
        reclaimable.pinned_bytes = pinned.map(|(tag, _)| self.reclaimable_bytes_of(tag)).sum();
        reclaimable
    }

    /// Free memory of a tag in whole granules, complete and pinned or not.
    pub(in crate::pool) fn reclaimable_bytes_of(&self, tag: TagKey) -> u64 {
        let lists = self.lists.tag(tag);
        let blocks = lists.large().iter().map(|(_, key)| *key).chain(self.small_of(lists));
        blocks.map(|key| self.whole_granules(&self.blocks[key])).map(|(start, end)| end - start).sum()
    }

    /// Takes `bytes` of reclaimable memory, or all of it: the smallest chunk that is as large, else the largest first.
    pub(in crate::pool) fn steal_bytes(&mut self, ready: Ready<'_>, bytes: u64, leaving: &mut Vec<Mapping>) {
        let sum = |leaving: &[Mapping]| leaving.iter().map(|mapping| mapping.range.bytes).sum::<u64>();
        let wanted = sum(leaving).saturating_add(bytes);
        let mut sizes = self.reclaimable_sizes(ready);
        while let Some(bytes) = best_size(&sizes, wanted.saturating_sub(sum(leaving))) {
            let short = wanted.saturating_sub(sum(leaving));
            let count = usize::try_from((short / bytes).max(1)).unwrap_or(usize::MAX);
            if self.steal(ready, bytes, count, leaving) < count {
                sizes.remove(&bytes);
            }
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
        let tags =
            self.lists.tags_with_granules().filter(move |(tag, lists)| ready(*tag) && !lists.is_pinned());
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

    /// In whole granules.
    pub(super) fn whole_bytes(&self, block: &HeapBlock) -> u64 {
        let (start, end) =
            if block.bytes() < self.shape.granule_bytes { (0, 0) } else { self.whole_granules(block) };
        end - start
    }
}

/// Which of `sizes` to give up for `short` bytes.
fn best_size(sizes: &BTreeSet<u64>, short: u64) -> Option<u64> {
    (short > 0).then(|| sizes.range(short..).next().or(sizes.last())).flatten().copied()
}

#[cfg(test)]
mod tests {
    use slotmap::SlotMap;

    use super::super::blocks::HeapBlockKind;
    use super::*;
    use crate::driver::{DeviceInfo, DeviceRange, EventId, StreamId};
    use crate::pool::tools::config::PoolConfig;
    use crate::pool::tools::handle::BlockId;
    use crate::pool::tools::shape::Shape;
    use crate::pool::tools::units::UNIT_BYTES;

    const GRANULE: u64 = 64 << 10;
    const CHUNK: u64 = 4 * GRANULE;

    struct Model {
        heap: Heap,
        tags: Vec<TagKey>,
        live: Vec<(BlockId, DeviceRange)>,
        next_addr: u64,
    }

    impl Model {
        fn new(tags: usize) -> Self {
            let config = PoolConfig::default().in_chunks_of(4).in_spans_of(4).in_segments_of(8);
            let shape = Shape::new(&config, &DeviceInfo::new("test", "test", GRANULE, u64::MAX));
            let (mut heap, mut keys) = (Heap::new(shape, 1), SlotMap::<TagKey, ()>::with_key());
            let tags: Vec<TagKey> = (0..tags).map(|_| keys.insert(())).collect();
            tags.iter().for_each(|tag| heap.add_tag(*tag));
            Self { heap, tags, live: Vec::new(), next_addr: 16 * CHUNK }
        }

        fn alloc(&mut self, tag: TagKey, stream: u64, bytes: u64) {
            let stream = StreamId(stream);
            let list = self.heap.find_list(tag, stream);
            let list = list.unwrap_or_else(|| self.heap.make_list(tag, stream).unwrap());
            if let Some(ready) = self.heap.ready_candidate(tag, list, (bytes, UNIT_BYTES), CHUNK) {
                self.live.push(self.heap.take(&ready, list, bytes, bytes));
                return;
            }
            let candidate = loop {
                if let Some(found) = self.heap.cheapest_candidate(tag, list, (bytes, UNIT_BYTES), CHUNK) {
                    break found;
                }
                let reserved = bytes.next_multiple_of(2 * CHUNK);
                self.heap.add_segment(tag, list, DeviceRange::new(self.next_addr, reserved));
                self.next_addr += reserved + CHUNK;
            };
            let placement = self.heap.occupy(&candidate, list, bytes, CHUNK);
            self.live.push(self.heap.finish(&placement, list, bytes));
        }

        fn pass(&mut self) {
            let clocks = self.heap.clocks_mut();
            for due in clocks.begin() {
                clocks.recorded(due, EventId(1));
                clocks.pass(due.clock, due.epoch);
            }
        }

        /// By all blocks of all segments.
        fn walk(&self, ready: Ready<'_>) -> (BTreeSet<TagKey>, Reclaimable) {
            let (mut tags, mut sums) = (BTreeSet::new(), Reclaimable::default());
            for (_, segment) in self.heap.segments.iter() {
                let tag = segment.tag();
                for (kind, block) in self.heap.walk(segment) {
                    let (start, end) = self.heap.whole_granules(block);
                    if !matches!(kind, HeapBlockKind::Small | HeapBlockKind::Large) || start == end {
                        continue;
                    }
                    tags.insert(tag);
                    let is_pinned = self.heap.is_pinned(tag);
                    let sum = match (is_pinned, ready(tag), self.heap.is_complete(block)) {
                        (true, ..) => &mut sums.pinned_bytes,
                        (false, false, _) => continue,
                        (false, true, true) => &mut sums.stream_safe_bytes,
                        (false, true, false) => &mut sums.pending_bytes,
                    };
                    *sum += end - start;
                }
            }
            (tags, sums)
        }
    }

    #[test]
    fn what_is_reclaimable_is_what_a_walk_of_all_blocks_finds() {
        let (mut random, mut seen, mut pins) = (fastrand::Rng::with_seed(11), 0, 0);
        let mut model = Model::new(6);
        let asleep = model.tags[5];
        let ready = |tag: TagKey| tag != asleep;
        for _ in 0..20_000 {
            let tag = model.tags[random.usize(..6)];
            match random.u32(..16) {
                0..6 if model.live.len() < 60 => {
                    let most = if random.bool() { GRANULE / UNIT_BYTES } else { 3 * CHUNK / UNIT_BYTES };
                    model.alloc(tag, random.u64(..3), random.u64(1..=most) * UNIT_BYTES);
                }
                6..11 if !model.live.is_empty() => {
                    let (id, _) = model.live.swap_remove(random.usize(..model.live.len()));
                    model.heap.free("free", id).unwrap();
                }
                11 if !model.live.is_empty() => {
                    let (id, range) = model.live.swap_remove(random.usize(..model.live.len()));
                    let units = range.bytes / UNIT_BYTES;
                    let (from, to) = (random.u64(..units), random.u64(1..=units));
                    let [from, to] = [from.min(to - 1), to].map(|unit| range.addr + unit * UNIT_BYTES);
                    let (part, rest) = model.heap.cut("cut", id, DeviceRange::new(from, to - from)).unwrap();
                    model.live.extend(rest.iter().map(|block| (block.id, block.range)));
                    model.heap.free("free", part).unwrap();
                }
                12 => model.pass(),
                13 => model.heap.steal_bytes(&ready, random.u64(..CHUNK), &mut Vec::new()),
                14 => model.heap.set_pinned(tag, random.bool()),
                _ => model.heap.join_lists(),
            }
            let (tags, sums) = model.walk(&ready);
            let kept: BTreeSet<TagKey> = model.heap.lists.tags_with_granules().map(|(tag, _)| tag).collect();
            assert_eq!((kept, model.heap.reclaimable(&ready)), (tags, sums));
            let blocks = model.heap.segments.iter().flat_map(|(_, segment)| model.heap.walk(segment));
            let pinned = blocks.filter(|(kind, _)| *kind == HeapBlockKind::Pinned);
            let pinned_bytes: u64 = pinned.map(|(_, block)| model.heap.whole_bytes(block)).sum();
            assert_eq!(model.heap.lists.pinned_bytes(), pinned_bytes);
            pins += usize::from(pinned_bytes > 0);
            seen +=
                usize::from(sums.stream_safe_bytes > 0 && sums.pending_bytes > 0 && sums.pinned_bytes > 0);
        }
        assert!(seen > 500 && pins > 500, "{seen} states had all three, {pins} parts of chunks");
    }

    #[test]
    fn tags_without_free_granules_are_not_visited() {
        let mut model = Model::new(300);
        for tag in model.tags.clone() {
            model.alloc(tag, 0, 2048);
            assert_eq!(model.heap.lists.tags_with_granules().count(), 0, "and each but the first has others");
        }
        let blocks = std::mem::take(&mut model.live);
        for (nth, (id, _)) in blocks.into_iter().enumerate() {
            model.heap.free("free", id).unwrap();
            assert_eq!(model.heap.lists.tags_with_granules().count(), nth + 1);
        }
        model.pass();
        model.heap.steal_bytes(&|_| true, u64::MAX, &mut Vec::new());
        assert_eq!(model.heap.lists.tags_with_granules().count(), 0);
    }
}
