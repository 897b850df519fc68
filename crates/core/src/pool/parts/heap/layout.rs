//! Lays out sleeping blocks anew, so that a wake maps chunks as large as possible.
//!
//! While a model loads, small chunks keep mapped memory close to live memory ([`super::placement`]). Blocks that are
//! live at a wake are likely to stay, and are mapped as a whole. So granules that only one live block touches become
//! one chunk, or a few of the largest size, and the next sleep unmaps fewer chunks. The free end of a block's last
//! granule becomes pinned.

use super::blocks::HeapBlockKind;
use super::uses::Use;
use super::{Heap, Segment};
use crate::driver::DeviceRange;
use crate::pool::tools::keys::{BlockKey, SegmentKey, TagKey};
use crate::pool::tools::mapping::Backing;

impl Heap {
    /// Lays out the absent memory of sleeping tags, locked by the caller. Unused chunks without memory may be
    /// left.
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

    /// Returns whether any chunk [is cut](Self::is_cut).
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
                // A shared granule leaves with the last of its blocks. Unused memory does not come back.
                let is_one = matches!(is, Use::Live(_) | Use::Free);
                let most = if is_one { largest_bytes } else { shape.granule_bytes };
                shape.exact_chunks(run, most)
            });
            self.segments.replace_absent(key, *region, mappings);
            near = self.relist(near, *region);
        }
        cuts
    }

    /// Whether a chunk for `run`, if larger than a granule, would lie in a small block, or partly outside its block.
    fn is_cut(&self, is: Use, run: DeviceRange) -> bool {
        let Use::Live(key) = is else { return false };
        let block = &self.blocks[key];
        let is_inside = block.addr <= run.addr && run.end() <= block.end();
        run.bytes > self.shape.granule_bytes && !(is_inside && self.shape.is_large(block.bytes()))
    }

    /// Relists free blocks by their new chunks. Returns a block near the end.
    fn relist(&mut self, near: BlockKey, region: DeviceRange) -> BlockKey {
        let (mut near, mut at) = (near, region.addr);
        while at < region.end() {
            let key = self.block_at(near, at);
            let block = self.blocks[key];
            at = block.end();
            near = key;
            if matches!(
                self.blocks.kind(key),
                HeapBlockKind::Small | HeapBlockKind::Large | HeapBlockKind::Pinned
            ) {
                self.unlink(key);
                // Its parts must not be joined before all have their kind.
                self.blocks.set_kind(key, HeapBlockKind::Live);
                let is_inside = region.addr <= block.addr && block.end() <= region.end();
                let is_complete = is_inside || self.has_passed(&block);
                near = self.free_by_chunk(key, if is_complete { 0 } else { block.freed_epoch });
            }
        }
        near
    }
}

/// Maximal ranges of chunks without memory.
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
