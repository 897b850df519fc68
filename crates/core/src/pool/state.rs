//! The bookkeeping of a pool.
//!
//! [`Heap`], [`Tags`] and [`BackupIndex`] own their data; this module applies changes of one to the others.
//! It never calls the driver or waits.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::driver::{DeviceRange, StreamId};
use crate::pool::parts::backups::BackupIndex;
use crate::pool::parts::heap::{Candidate, Heap, HeapBlock, Placement, Reclaimable};
use crate::pool::parts::hold_table::Holds;
use crate::pool::parts::lent_chunks::LentChunks;
use crate::pool::parts::peer_copies::PeerCopies;
use crate::pool::parts::physical::Counters;
use crate::pool::parts::tags::Tags;
use crate::pool::tools::error::{PoolError, Result};
use crate::pool::tools::handle::{AllocRequest, Block as Handle, BlockId};
use crate::pool::tools::keys::{BlockKey, ListKey, SegmentKey, TagKey};
use crate::pool::tools::mapping::{Backing, Mapping};
use crate::pool::tools::shape::Shape;
use crate::pool::tools::units::{UNIT_BYTES, bytes_max};
use crate::tag::{SleepAction, Tag, TagPolicy};

#[derive(Debug)]
pub(super) struct PoolState {
    heap: Heap,
    tags: Tags,
    backups: BackupIndex,
    /// Peak memory in use, by whole chunks.
    peak_used_bytes: u64,
    cached_max_bytes: Option<u64>,
    closed: bool,
    holds: Holds,
    lent: LentChunks,
    peer_copies: PeerCopies,
}

impl PoolState {
    pub(super) fn new(shape: Shape, pool: u32, cached_max_bytes: Option<u64>) -> Self {
        let mut state = Self {
            heap: Heap::new(shape, pool),
            tags: Tags::new([Tag::weights(), Tag::kv_cache(), Tag::runtime(), Tag::cudagraph()]),
            backups: BackupIndex::new(shape.granule_bytes),
            peak_used_bytes: 0,
            cached_max_bytes,
            closed: false,
            holds: Holds::default(),
            lent: LentChunks::default(),
            peer_copies: PeerCopies::default(),
        };
        for (tag, _) in state.tags.iter() {
            state.heap.add_tag(tag);
            state.backups.add_tag(tag);
        }
        state
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    pub(super) fn close(&mut self) {
        self.closed = true;
    }

    pub(super) fn heap(&self) -> &Heap {
        &self.heap
    }

    pub(super) fn heap_mut(&mut self) -> &mut Heap {
        &mut self.heap
    }

    pub(super) fn tags(&self) -> &Tags {
        &self.tags
    }

    pub(super) fn tags_mut(&mut self) -> &mut Tags {
        &mut self.tags
    }

    pub(super) fn backups(&self) -> &BackupIndex {
        &self.backups
    }

    pub(super) fn backups_mut(&mut self) -> &mut BackupIndex {
        &mut self.backups
    }

    pub(super) fn lent(&self) -> &LentChunks {
        &self.lent
    }

    pub(super) fn lent_mut(&mut self) -> &mut LentChunks {
        &mut self.lent
    }

    pub(super) fn peer_copies(&self) -> &PeerCopies {
        &self.peer_copies
    }

    pub(super) fn peer_copies_mut(&mut self) -> &mut PeerCopies {
        &mut self.peer_copies
    }

    pub(super) fn holds(&self) -> &Holds {
        &self.holds
    }

    /// Creates the tag if need be.
    #[inline]
    pub(super) fn tag_key(&mut self, tag: &Tag) -> TagKey {
        self.tags.find_recent(tag).unwrap_or_else(|| self.find_tag(tag))
    }

    fn find_tag(&mut self, tag: &Tag) -> TagKey {
        let key = self.tags.find(tag).unwrap_or_else(|| self.make_tag(tag));
        self.tags.set_recent(key);
        key
    }

    fn make_tag(&mut self, tag: &Tag) -> TagKey {
        if self.tags.is_crowded() {
            self.forget_tags();
        }
        let key = self.tags.add(tag);
        self.heap.add_tag(key);
        self.backups.add_tag(key);
        key
    }

    /// Forgets tags without segments, holds or settings.
    fn forget_tags(&mut self) {
        let segments = self.heap.segments();
        let held: HashSet<TagKey> = self.holds.all().filter_map(|(name, _)| self.tags.find(name)).collect();
        for tag in self.tags.forget(|tag| !segments.has_some_of(tag) && !held.contains(&tag)) {
            self.heap.forget_tag(tag);
            self.backups.forget_tag(tag);
        }
    }

    /// Where there are many lists, first forgets those of streams that no longer exist.
    #[cold]
    pub(super) fn make_list(
        &mut self,
        tag: TagKey,
        request: &AllocRequest,
        exists: impl Fn(StreamId) -> bool,
    ) -> Result<ListKey> {
        if self.heap.has_many_lists() {
            self.heap.clocks_mut().end_streams(&exists);
            self.settle_waiting();
            self.heap.forget_lists(exists);
        }
        self.heap.make_list(tag, request.stream).ok_or_else(|| {
            let count = self.heap.list_count();
            let reason = format!(
                "{count} streams, by tag, use memory of the pool now: as many as it can count; free some of it, or trim"
            );
            invalid(request, reason)
        })
    }

    pub(super) fn checked_size(&self, request: &AllocRequest) -> Result<u64> {
        let AllocRequest { bytes, align, .. } = *request;
        if bytes == 0 {
            return Err(invalid(request, "a block has at least one byte".into()));
        }
        let granule = self.heap.shape().granule_bytes;
        if !align.is_power_of_two() || align > granule {
            let reason = format!("the alignment must be a power of two up to the granule of {granule}");
            return Err(invalid(request, reason));
        }
        let most = bytes_max(granule);
        let rounded = bytes.checked_next_multiple_of(UNIT_BYTES).filter(|size| *size <= most);
        rounded
            .ok_or_else(|| invalid(request, format!("a block has at most {} ({most} bytes)", ByteSize(most))))
    }

    pub(super) fn largest_chunk(&self, tag: TagKey, request: &AllocRequest) -> u64 {
        let is_discardable = self.tags.get(tag).policy().is_discardable();
        self.heap.largest_chunk(is_discardable, request.bytes, request.is_freed_in_parts)
    }

    /// See [`TagEntry::fall_asleep`](crate::pool::parts::tags::TagEntry::fall_asleep).
    pub(super) fn fall_asleep(&mut self, tag: TagKey, how: SleepAction, kept: Vec<DeviceRange>) {
        self.tags.get_mut(tag).fall_asleep(how, kept);
        self.heap.set_held(tag, false);
    }

    pub(super) fn wake(&mut self, tag: TagKey) {
        let has_blocks = self.heap.live_of(tag).live_blocks > 0;
        self.tags.get_mut(tag).wake(has_blocks);
        self.heap.set_held(tag, true);
    }

    /// The tag is awake.
    pub(super) fn begin_hold(&mut self, tag: TagKey, holder: &Arc<str>) {
        self.holds.begin(self.tags.get(tag).name(), holder);
        self.heap.set_pinned(tag, true);
    }

    pub(super) fn end_hold(&mut self, tag: &Tag, holder: &Arc<str>) {
        self.holds.end(tag, holder);
        if let Some(key) = self.tags.find(tag) {
            self.heap.set_pinned(key, self.holds.is_held(tag));
        }
    }

    pub(super) fn orphan_holds(&mut self) {
        self.holds.orphan();
    }

    pub(super) fn check_unheld(&self, op: &'static str, tags: &[TagKey]) -> Result<()> {
        self.holds.check(op, tags.iter().map(|tag| self.tags.get(*tag).name()))
    }

    /// Makes a candidate that is wholly mapped a live block.
    pub(super) fn take(
        &mut self,
        candidate: &Candidate,
        list: ListKey,
        bytes: u64,
        request: &AllocRequest,
    ) -> Handle {
        let taken = self.heap.take(candidate, list, bytes, request.bytes);
        self.make_handle(list, taken, request)
    }

    /// Makes a placement that has its memory a live block.
    pub(super) fn finish(&mut self, placement: &Placement, list: ListKey, request: &AllocRequest) -> Handle {
        let taken = self.heap.finish(placement, list, request.bytes);
        self.make_handle(list, taken, request)
    }

    fn make_handle(
        &mut self,
        list: ListKey,
        (id, range): (BlockId, DeviceRange),
        request: &AllocRequest,
    ) -> Handle {
        let tag = self.heap.tag_of_list(list);
        self.backups.invalidate(tag, || self.heap.segments().of_addr(range.addr), range);
        Handle { id, range, requested_bytes: request.bytes }
    }

    /// Frees a placement that gets no memory.
    pub(super) fn abandon(&mut self, placement: &Placement) {
        let (block, near) = self.heap.abandon(placement);
        self.forget_unused(&block, near);
    }

    /// Returns whether other streams must be waited for.
    pub(super) fn free(&mut self, op: &'static str, id: BlockId) -> Result<bool> {
        let (block, near) = self.heap.free(op, id)?;
        let tag = self.heap.tag_of_list(block.list);
        let entry = self.tags.get_mut(tag);
        entry.define(DeviceRange::new(block.addr, block.bytes()));
        if self.heap.live_of(tag).live_blocks == 0 {
            entry.restore(); // Nothing is left that could be undefined.
        }
        let Some(near) = near else { return Ok(true) };
        self.forget_unused(&block, near);
        Ok(false)
    }

    /// As [`Self::free`]; also returns the remaining blocks.
    pub(super) fn free_part(&mut self, id: BlockId, part: DeviceRange) -> Result<(bool, Vec<Handle>)> {
        const OP: &str = "free a part of";
        let (part, rest) = self.heap.cut(OP, id, part)?;
        Ok((self.free(OP, part)?, rest))
    }

    /// Frees blocks whose other streams are complete.
    pub(super) fn settle_waiting(&mut self) {
        for (key, freed_epoch) in self.heap.take_passed() {
            let (block, near) = self.heap.release(key, freed_epoch);
            self.forget_unused(&block, near);
        }
    }

    /// After a free: drops backups of granules without blocks. In a tag that sleeps without memory, removes
    /// such chunks too. `near` is a block of the segment.
    fn forget_unused(&mut self, freed: &HeapBlock, near: BlockKey) {
        let tag = self.heap.tag_of_list(freed.list);
        let entry = self.tags.get(tag);
        let sleeps = entry.state().is_asleep() && !entry.is_taken();
        if !self.backups.has(tag) && !sleeps {
            return;
        }
        let segment = self.heap.segments().of_addr(freed.addr);
        for location in self.backups.overlapping(tag, segment, freed.addr, freed.end()) {
            let bytes = self.backups.extent_bytes(tag, location);
            if !self.heap.is_touched(near, location.1, location.1 + bytes) {
                self.backups.forget_extent(tag, location);
                continue;
            }
            // Granules that were unused before the block came keep their backups.
            let range = DeviceRange::new(freed.addr, freed.bytes());
            for granule in self.backups.stored_granules(tag, location, range) {
                if !self.heap.is_touched(near, granule.addr, granule.end()) {
                    self.backups.forget_granule(tag, (segment, granule.addr));
                }
            }
        }
        if sleeps {
            self.heap.remove_absent_chunks(segment, near, DeviceRange::new(freed.addr, freed.bytes()));
        }
    }

    /// After a sleep or wake: drops unused backups, and removes unused chunks that are not open. The caller
    /// owns the memory of the returned mappings.
    #[must_use]
    pub(super) fn tidy(&mut self, tag: TagKey) -> Vec<Mapping> {
        self.forget_unused_backups(tag);
        self.heap.remove_unused_chunks(tag, |backing| !matches!(backing, Backing::Mapped { open: true, .. }))
    }

    /// After any work on a sleeping tag: blocks freed meanwhile have left chunks without memory.
    pub(super) fn tidy_absent(&mut self, tag: TagKey) {
        if self.tags.get(tag).state().is_asleep() {
            self.forget_unused_backups(tag);
            let none = self.heap.remove_unused_chunks(tag, |backing| backing == Backing::Absent);
            debug_assert!(none.is_empty(), "absent chunks have no memory to return");
        }
    }

    fn forget_unused_backups(&mut self, tag: TagKey) {
        if !self.backups.has(tag) {
            return;
        }
        let segments = self.heap.segments().of_tag(tag);
        let used: HashMap<SegmentKey, Vec<DeviceRange>> =
            segments.map(|(key, segment)| (key, self.heap.used_ranges(segment))).collect();
        self.backups.retain(tag, |segment, extent| {
            let used = used.get(&segment).map_or(&[][..], Vec::as_slice);
            let first_after = used.partition_point(|range| range.end() <= extent.addr);
            used.get(first_after).is_some_and(|range| range.addr < extent.end())
        });
    }

    pub(super) fn remove_emptied(&mut self, key: SegmentKey) {
        self.forget_segment(key);
        self.heap.remove_emptied(key);
    }

    pub(super) fn remove_swept(&mut self, key: SegmentKey) {
        self.forget_segment(key);
        self.heap.remove_swept(key);
    }

    fn forget_segment(&mut self, key: SegmentKey) {
        if let Some(tag) = self.heap.segments().tag_of(key) {
            self.backups.forget_segment(tag, key);
        }
        self.lent.forget_segment(key);
        self.peer_copies.leave_segment(key);
    }

    /// Records memory that the driver refuses to unmap: in its chunk, or as unmap-failed.
    pub(super) fn take_back(&mut self, mapping: &Mapping) {
        if self.heap.segments().mapping((mapping.segment, mapping.range.addr)).is_some() {
            self.heap.segments_mut().store(&[*mapping]);
        } else {
            self.heap.mark_unmap_failed(mapping);
        }
    }

    /// In ready tags, and what a failed undo has left in sleeping ones.
    pub(super) fn reclaimable(&self) -> Reclaimable {
        let mut reclaimable = self.heap.reclaimable(&|tag| self.tags.get(tag).is_ready());
        reclaimable.stream_safe_bytes += self.leftovers().map(|mapping| mapping.range.bytes).sum::<u64>();
        reclaimable
    }

    /// Takes up to `wanted` reclaimable chunks of one size from ready tags. Returns how many.
    pub(super) fn steal(&mut self, bytes: u64, wanted: usize, leaving: &mut Vec<Mapping>) -> usize {
        let Self { heap, tags, .. } = self;
        heap.steal(&|tag| tags.get(tag).is_ready(), bytes, wanted, leaving)
    }

    /// Takes `bytes` of them, the largest first, or all there is.
    pub(super) fn steal_bytes(&mut self, bytes: u64, leaving: &mut Vec<Mapping>) {
        let Self { heap, tags, .. } = self;
        heap.steal_bytes(&|tag| tags.get(tag).is_ready(), bytes, leaving);
    }

    /// Memory that a failed undo has left in sleeping tags, whose bytes are elsewhere.
    pub(super) fn leftovers(&self) -> impl Iterator<Item = Mapping> + '_ {
        let segments = self.tags.with_leftovers().flat_map(|tag| self.heap.segments().of_tag(tag));
        segments.flat_map(move |(key, segment)| {
            let held = segment.chunks().filter(|(_, chunk)| chunk.backing != Backing::Absent);
            let left = held.filter(move |(at, _)| !self.lent.is_only_copy((key, *at)));
            left.filter_map(move |(at, _)| self.heap.segments().mapping((key, at)))
        })
    }

    pub(super) fn peak_used_bytes(&self) -> u64 {
        self.peak_used_bytes
    }

    pub(super) fn note_used(&mut self, used_bytes: u64) {
        self.peak_used_bytes = self.peak_used_bytes.max(used_bytes);
    }

    /// Held, but neither live nor resident.
    pub(super) fn cached_bytes(&self, counters: &Counters) -> u64 {
        let in_use_bytes = self.heap.held_live_bytes() + self.lent.resident_bytes();
        counters.held_bytes().saturating_sub(in_use_bytes)
    }

    pub(super) fn set_cached_max_bytes(&mut self, cached_max_bytes: Option<u64>) {
        self.cached_max_bytes = cached_max_bytes;
    }

    pub(super) fn above_mark_bytes(&self, counters: &Counters) -> u64 {
        self.cached_max_bytes.map_or(0, |mark| self.cached_bytes(counters).saturating_sub(mark))
    }

    /// Whether every chunk of a tag that a block may use is mapped and open.
    pub(super) fn is_whole(&self, tag: TagKey) -> bool {
        let open = |backing| matches!(backing, Backing::Mapped { open: true, .. });
        self.heap.segments().of_tag(tag).all(|(_, segment)| {
            let touched = self.heap.touched_chunks(segment);
            segment.chunks().all(|(at, chunk)| open(chunk.backing) || !touched.contains(&at))
        })
    }

    pub(super) fn declare(&mut self, tag: &Tag, policy: TagPolicy) -> Result<()> {
        let key = self.tag_key(tag);
        let has_blocks = self.heap.live_of(key).live_blocks > 0;
        self.tags.get_mut(key).declare(policy, has_blocks)
    }

    /// A live block and its tag, which is awake unless a call has exclusive access.
    pub(super) fn reachable(&self, op: &'static str, id: BlockId) -> Result<(HeapBlock, TagKey)> {
        let block = self.heap.live_block(op, id)?;
        let tag = self.heap.tag_of_list(block.list);
        if !self.tags.get(tag).is_taken() {
            self.tags.check_awake(op, tag)?;
        }
        Ok((block, tag))
    }

    pub(super) fn record_use(
        &mut self,
        op: &'static str,
        id: BlockId,
        stream: StreamId,
        exists: impl Fn(StreamId) -> bool,
    ) -> Result<()> {
        let block = self.heap.live_block(op, id)?;
        self.heap.record_use(id, block.list, stream, exists);
        Ok(())
    }
}

/// The error of a request that no state of the pool could satisfy.
pub(super) fn invalid(request: &AllocRequest, reason: String) -> PoolError {
    let AllocRequest { bytes, align, ref tag, .. } = *request;
    PoolError::InvalidRequest { bytes, align, tag: tag.clone(), reason }
}
