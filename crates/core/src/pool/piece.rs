//! A piece of a segment with the physical memory under it: what is handed between those who decide and those who map.

use super::keys::SegmentKey;
use crate::driver::{BackingId, DeviceRange};

/// Physical memory of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Backing {
    Absent,
    /// Held, not mapped.
    Held(BackingId),
    Mapped {
        id: BackingId,
        open: bool,
    },
}

/// A chunk that is being brought in or taken out.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub(super) segment: SegmentKey,
    pub(super) range: DeviceRange,
    pub(super) backing: Backing,
}

impl Piece {
    /// A place without memory.
    pub(super) fn absent(segment: SegmentKey, addr: u64, bytes: u64) -> Self {
        Self { segment, range: DeviceRange::new(addr, bytes), backing: Backing::Absent }
    }

    pub(super) fn is_absent(&self) -> bool {
        self.backing == Backing::Absent
    }

    pub(super) fn is_mapped(&self) -> bool {
        matches!(self.backing, Backing::Mapped { .. })
    }

    /// Mapped, and not open for access.
    pub(super) fn is_shut(&self) -> bool {
        matches!(self.backing, Backing::Mapped { open: false, .. })
    }
}
