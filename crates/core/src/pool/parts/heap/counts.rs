//! How much is live, by tag and in all.

use std::collections::BTreeSet;

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
    tags: SecondaryMap<TagKey, TagCounts>,
    asleep: BTreeSet<TagKey>,
}

#[derive(Debug, Clone, Copy, Default)]
pub(in crate::pool) struct TagCounts {
    pub(in crate::pool) live_bytes: u64,
    pub(in crate::pool) live_blocks: usize,
}

impl Counts {
    pub(super) fn add_tag(&mut self, tag: TagKey) {
        self.tags.insert(tag, TagCounts::default());
    }

    pub(super) fn forget_tag(&mut self, tag: TagKey) {
        self.tags.remove(tag);
    }

    pub(super) fn tag(&self, tag: TagKey) -> TagCounts {
        self.tags[tag]
    }

    pub(super) fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    pub(super) fn held_live_bytes(&self) -> u64 {
        self.held_live_bytes
    }

    /// Whether a tag holds its memory: each does at first.
    pub(super) fn set_held(&mut self, tag: TagKey, is_held: bool) {
        let bytes = self.tags[tag].live_bytes;
        if is_held && self.asleep.remove(&tag) {
            self.held_live_bytes += bytes;
        } else if !is_held && self.asleep.insert(tag) {
            self.held_live_bytes -= bytes;
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
        if !self.asleep.contains(&tag) {
            self.held_live_bytes += bytes;
        }
        let of_tag = &mut self.tags[tag];
        of_tag.live_bytes += bytes;
        of_tag.live_blocks += 1;
    }

    pub(super) fn remove(&mut self, shape: &Shape, tag: TagKey, bytes: u64) {
        self.live_bytes -= bytes;
        self.small_demand_bytes -= shape.small_demand(bytes);
        if !self.asleep.contains(&tag) {
            self.held_live_bytes -= bytes;
        }
        let of_tag = &mut self.tags[tag];
        of_tag.live_bytes -= bytes;
        of_tag.live_blocks -= 1;
    }
}
