//! A mapping of a segment and its physical memory, as passed between the code that decides and the code that
//! maps.

use super::keys::SegmentKey;
use crate::driver::{BackingId, DeviceRange};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pool) enum Backing {
    Absent,
    /// Held, not mapped.
    Held(BackingId),
    Mapped {
        id: BackingId,
        open: bool,
    },
}

/// How much is moved before other threads may lock physical memory.
#[derive(Debug, Clone, Copy)]
pub(in crate::pool) struct Batch {
    pub(in crate::pool) mappings: usize,
    /// A single mapping may have more.
    pub(in crate::pool) bytes: u64,
}

#[derive(Debug, Clone, Copy)]
pub(in crate::pool) struct Mapping {
    pub(in crate::pool) segment: SegmentKey,
    pub(in crate::pool) range: DeviceRange,
    pub(in crate::pool) backing: Backing,
}

impl Batch {
    /// Where the batch that starts at `begin` ends.
    pub(in crate::pool) fn end(self, mappings: &[Mapping], begin: usize) -> usize {
        let mut left_bytes = self.bytes;
        let fits = |mapping: &&Mapping| {
            let rest = left_bytes.checked_sub(mapping.range.bytes);
            left_bytes = rest.unwrap_or(left_bytes);
            rest.is_some()
        };
        let next = mappings[begin..].iter().take(self.mappings);
        mappings.len().min(begin + next.take_while(fits).count().max(1))
    }
}

impl Mapping {
    pub(in crate::pool) fn absent(segment: SegmentKey, addr: u64, bytes: u64) -> Self {
        Self { segment, range: DeviceRange::new(addr, bytes), backing: Backing::Absent }
    }

    pub(in crate::pool) fn is_absent(&self) -> bool {
        self.backing == Backing::Absent
    }

    pub(in crate::pool) fn is_mapped(&self) -> bool {
        matches!(self.backing, Backing::Mapped { .. })
    }

    /// Mapped, and not open for access.
    pub(in crate::pool) fn is_shut(&self) -> bool {
        matches!(self.backing, Backing::Mapped { open: false, .. })
    }
}
