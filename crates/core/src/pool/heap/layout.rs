//! How blocks that sleep are laid out anew: a wake brings memory in chunks as large as fit.
//!
//! While a model loads, blocks are cut up and freed, and small chunks keep what is mapped close to what is live
//! ([`super::placement`]). What lives when it wakes has proved to stay, and all of its memory is brought in anyway. So
//! the granules that only one live block touches come back as one chunk, or a few of the largest size, and the next
//! sleep has little to give back one by one. What is free at the end of a block's last granule is bound to its chunk then.

use super::super::keys::{BlockKey, SegmentKey, TagKey};
use super::super::mapping::Backing;
use super::blocks::Kind;
use super::uses::Use;
use super::{Heap, Segment};
use crate::driver::DeviceRange;

impl Heap {
    /// Lays out what has no memory of tags that sleep, which the caller has to itself, in chunks of at most
    /// `largest_bytes`. Chunks of which nothing is in use may be left, without memory.
    pub(in crate::pool) fn lay_out(&mut self, tags: &[TagKey], largest_bytes: u64) {
        for tag in tags.iter().copied() {
            for key in self.segments.keys_of(tag) {
                let regions = self.segments.get(key).map(absent_regions).unwrap_or_default();
                if !regions.is_empty() && self.lay_out_segment(key, &regions, largest_bytes) {
                    self.lists.note_cut_chunks(tag);
                }
            }
        }
    }

    /// Whether a chunk larger than a granule lies in a small block now, or not in one exclusive.
    fn lay_out_segment(&mut self, key: SegmentKey, regions: &[DeviceRange], largest_bytes: u64) -> bool {
        let Some(segment) = self.segments.get(key) else { return false };
        let (base, first, shape) = (segment.range().addr, segment.first(), self.shape);
        let uses = self.uses_of_granules(segment);
        let (mut near, mut cuts) = (first, false);
        for region in regions {
            let from = shape.granules(region.addr - base);
            let mut runs: Vec<(Use, DeviceRange)> = Vec::new();
            for (nth, is) in uses[from..from + shape.granules(region.bytes)].iter().enumerate() {
                match runs.last_mut() {
                    Some((last, run)) if last == is => run.bytes += shape.granule_bytes,
                    _ => runs.push((*is, shape.granule_range(region.addr, nth, 1))),
                }
            }
            cuts |= runs.iter().any(|(is, run)| self.is_cut(*is, *run));
            let mappings = runs.into_iter().flat_map(|(is, run)| {
                // What several use leaves as the last of them does; what is idle does not come back.
                let is_one = matches!(is, Use::Live(_) | Use::Free);
                let most = if is_one { largest_bytes } else { shape.granule_bytes };
                shape.exact_chunks(run, most)
            });
            self.segments.replace_absent(key, *region, mappings);
            near = self.relist(near, *region);
        }
        cuts
    }

    /// Whether a chunk for a run of granules would lie in a small block, or not in one exclusive.
    fn is_cut(&self, is: Use, run: DeviceRange) -> bool {
        let Use::Live(key) = is else { return false };
        let block = &self.blocks[key];
        let is_inside = block.addr <= run.addr && run.end() <= block.end();
        run.bytes > self.shape.granule_bytes && !(is_inside && self.shape.is_large(block.bytes()))
    }

    /// After chunks were laid out anew: free mappings are of the kinds that their chunks make them. Returns a block
    /// near the end.
    fn relist(&mut self, near: BlockKey, region: DeviceRange) -> BlockKey {
        let (mut near, mut at) = (near, region.addr);
        while at < region.end() {
            let key = self.block_at(near, at);
            let block = self.blocks[key];
            at = block.end();
            near = key;
            if matches!(self.blocks.kind(key), Kind::Small | Kind::Large | Kind::Pinned) {
                self.unlink(key);
                // Of no kind that its parts could be joined with before each is what it will be.
                self.blocks.set_kind(key, Kind::Live);
                // No work touches what has no memory.
                let is_inside = region.addr <= block.addr && block.end() <= region.end();
                let is_complete = is_inside || self.has_passed(&block);
                near = self.free_by_chunk(key, if is_complete { 0 } else { block.freed_epoch });
            }
        }
        near
    }
}

/// Where the chunks of a segment have no memory, as far as they touch.
fn absent_regions(segment: &Segment) -> Vec<DeviceRange> {
    let mut regions: Vec<DeviceRange> = Vec::new();
    for (at, chunk) in segment.chunks().filter(|(_, chunk)| chunk.backing == Backing::Absent) {
        match regions.last_mut() {
            Some(region) if region.end() == at => region.bytes += chunk.bytes,
            _ => regions.push(DeviceRange::new(at, chunk.bytes)),
        }
    }
    regions
}
