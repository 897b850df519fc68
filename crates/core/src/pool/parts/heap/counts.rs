//! How much is live, by tag and in all.

use slotmap::SecondaryMap;

use crate::pool::tools::keys::TagKey;
use crate::pool::tools::shape::Shape;

#[derive(Debug, Default)]
pub(super) struct Counts {
    live_bytes: u64,
    /// Of tags that hold their memory.
    held_live_bytes: u64,
    peak_live_bytes: u64,
    /// Granules that live blocks would need if no two shared one. Blocks below a granule do share.
    small_demand_bytes: u64,
    tags: SecondaryMap<TagKey, OfTag>,
}

#[derive(Debug, Default)]
struct OfTag {
    counts: TagCounts,
    is_asleep: bool,
}

#[derive(Debug, Clone, Copy, Default)]
pub(in crate::pool) struct TagCounts {
    pub(in crate::pool) live_bytes: u64,
    pub(in crate::pool) live_blocks: usize,
}

impl Counts {
    pub(super) fn add_tag(&mut self, tag: TagKey) {
        self.tags.insert(tag, OfTag::default());
    }

    pub(super) fn forget_tag(&mut self, tag: TagKey) {
        self.tags.remove(tag);
    }

    pub(super) fn tag(&self, tag: TagKey) -> TagCounts {
        self.tags[tag].counts
    }

    pub(super) fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    pub(super) fn held_live_bytes(&self) -> u64 {
        self.held_live_bytes
    }

    /// Whether a tag holds its memory: each does at first.
    pub(super) fn set_held(&mut self, tag: TagKey, is_held: bool) {
        let of_tag = &mut self.tags[tag];
        let was_asleep = std::mem::replace(&mut of_tag.is_asleep, !is_held);
        match (was_asleep, is_held) {
            (true, true) => self.held_live_bytes += of_tag.counts.live_bytes,
            (false, false) => self.held_live_bytes -= of_tag.counts.live_bytes,
            _ => {}
        }
    }

    pub(super) fn peak_live_bytes(&self) -> u64 {
        self.peak_live_bytes
    }

    pub(super) fn small_demand_bytes(&self) -> u64 {
        self.small_demand_bytes
    }

    pub(super) fn add(&mut self, shape: &Shape, tag: TagKey, bytes: u64) {
        self.live_bytes += bytes;
        self.peak_live_bytes = self.peak_live_bytes.max(self.live_bytes);
        self.small_demand_bytes += shape.small_demand(bytes);
        let of_tag = &mut self.tags[tag];
        if !of_tag.is_asleep {
            self.held_live_bytes += bytes;
        }
        of_tag.counts.live_bytes += bytes;
        of_tag.counts.live_blocks += 1;
    }

    pub(super) fn remove(&mut self, shape: &Shape, tag: TagKey, bytes: u64) {
        self.live_bytes -= bytes;
        self.small_demand_bytes -= shape.small_demand(bytes);
        let of_tag = &mut self.tags[tag];
        if !of_tag.is_asleep {
            self.held_live_bytes -= bytes;
        }
        of_tag.counts.live_bytes -= bytes;
        of_tag.counts.live_blocks -= 1;
    }
}
