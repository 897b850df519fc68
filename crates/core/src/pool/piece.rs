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

/// How much is moved before others may have the lock of physical memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Group {
    pub(super) pieces: usize,
    /// A single piece may have more.
    pub(super) bytes: u64,
}

/// A chunk that is being brought in or taken out.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub(super) segment: SegmentKey,
    pub(super) range: DeviceRange,
    pub(super) backing: Backing,
}

impl Group {
    /// Where the next group of `pieces` ends.
    pub(super) fn end(self, pieces: &[Piece], begin: usize) -> usize {
        let mut room_bytes = self.bytes;
        let fits = |piece: &&Piece| {
            let rest = room_bytes.checked_sub(piece.range.bytes);
            room_bytes = rest.unwrap_or(room_bytes);
            rest.is_some()
        };
        let next = pieces[begin..].iter().take(self.pieces);
        pieces.len().min(begin + next.take_while(fits).count().max(1))
    }
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
