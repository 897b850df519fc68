//! What an allocator has of a device's addresses.

use crate::trace::BlockNumber;

/// A range of device addresses with memory of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Where it begins.
    pub addr: u64,
    /// The private pool that it belongs to.
    pub pool: u32,
    /// From its beginning on, without gaps.
    pub parts: Vec<SegmentPart>,
}

impl Segment {
    /// Without addresses at its end that have no memory; `None` if nothing is left.
    pub(super) fn trimmed(mut self) -> Option<Self> {
        let is_mapped = |part: &SegmentPart| part.state != PartState::Unmapped;
        self.parts.truncate(self.parts.iter().rposition(is_mapped).map_or(0, |at| at + 1));
        (!self.parts.is_empty()).then_some(self)
    }
}

/// A part of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentPart {
    /// How long it is.
    pub bytes: u64,
    /// What it is.
    pub state: PartState,
}

/// What a part of a segment is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartState {
    /// A block has it.
    Live(BlockNumber),
    /// Nothing has it, and memory is there.
    Cached,
    /// Addresses only.
    Unmapped,
}

impl PartState {
    /// Whether a block may come there.
    pub(super) const fn is_open(self) -> bool {
        !matches!(self, Self::Live(_))
    }
}
