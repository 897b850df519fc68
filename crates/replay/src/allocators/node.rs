//! A block in a segment, with the blocks beside it.

use super::segment::PartState;

/// A block, by its place.
pub(super) type NodePlace = u32;

/// No block.
pub(super) const NONE: NodePlace = NodePlace::MAX;

#[derive(Debug, Clone, Copy)]
pub(super) struct Node {
    pub(super) addr: u64,
    pub(super) bytes: u64,
    pub(super) before: NodePlace,
    pub(super) behind: NodePlace,
    pub(super) list: u32,
    pub(super) state: PartState,
    /// Whether it is in the sets of its state.
    pub(super) is_filed: bool,
    /// Whether its segment grows.
    pub(super) is_expandable: bool,
    /// How often its list had been asked when it became free.
    pub(super) asked: u64,
}

impl Node {
    /// Whether a run may have it.
    pub(super) const fn is_in_run(&self) -> bool {
        self.is_expandable && self.is_filed && self.state.is_open()
    }

    /// Whether it is all of its segment.
    pub(super) fn is_whole(&self) -> bool {
        self.before == NONE && self.behind == NONE
    }

    /// From the first to the last address of whole units of its segment.
    pub(super) fn whole_units(&self, unit_bytes: u64) -> (u64, u64) {
        let first = self.addr.div_ceil(unit_bytes) * unit_bytes;
        (first, first.max((self.addr + self.bytes) / unit_bytes * unit_bytes))
    }
}
