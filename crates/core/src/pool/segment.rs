//! Segments: reservations, and the chunks of memory that are mapped into them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use slotmap::SlotMap;

use super::blocks::BlockKey;
use super::state::TagKey;
use super::vm::Backing;
use crate::backup::Room;
use crate::digest::Digest;
use crate::driver::DeviceRange;

slotmap::new_key_type! {
    /// A segment of a pool.
    pub(super) struct SegmentKey;
}

pub(super) type Segments = SlotMap<SegmentKey, Segment>;

/// One reservation of one tag.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) tag: TagKey,
    pub(super) range: DeviceRange,
    /// The block at the segment's first byte.
    pub(super) first: BlockKey,
    /// By address. Where no chunk is, the addresses are bare.
    pub(super) chunks: BTreeMap<u64, Chunk>,
}

/// Where a chunk is: its segment and address.
pub(super) type Place = (SegmentKey, u64);

/// A piece of a segment that is mapped as a whole: one granule, the pool's chunk size, or a span.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) bytes: u64,
    pub(super) backing: Backing,
    /// A copy in host memory: what sleeps there, or what an earlier sleep left and may save the next copy.
    pub(super) backup: Option<Backup>,
}

/// Copy of a chunk's granules.
#[derive(Debug)]
pub(super) struct Backup {
    /// As long as the chunk; only stored granules have been written.
    pub(super) room: Arc<Room>,
    /// Per granule, what is stored, if anything.
    pub(super) granules: Vec<Option<Stored>>,
}

/// A stored granule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stored {
    /// Computed from the stored bytes.
    pub(super) digest: Digest,
    /// Whether these were the granule's bytes when a sleep last looked, with nothing in flight. A copy made in the
    /// background may have been overtaken by a writer.
    pub(super) proven: bool,
}

impl Segment {
    /// The chunks that `start..end` touches, with their addresses.
    pub(super) fn touching(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Chunk)> {
        let first = self.chunks.range(..=start).next_back().filter(|(at, chunk)| *at + chunk.bytes > start);
        let from = first.map_or(start, |(at, _)| *at);
        self.chunks.range(from..end).map(|(at, chunk)| (*at, chunk))
    }

    /// The chunk that would be cut at `addr`, with its address.
    pub(super) fn across(&self, addr: u64) -> Option<(u64, &Chunk)> {
        let before = self.chunks.range(..addr).next_back().map(|(at, chunk)| (*at, chunk));
        before.filter(|(at, chunk)| at + chunk.bytes > addr)
    }

    /// Bytes that its chunks hold.
    pub(super) fn held_bytes(&self) -> u64 {
        let held = self.chunks.values().filter(|chunk| chunk.backing != Backing::Absent);
        held.map(|chunk| chunk.bytes).sum()
    }
}

/// Maximal runs of consecutive numbers in an ascending list.
pub(super) fn runs(ascending: &[usize]) -> Vec<Range<usize>> {
    ascending.chunk_by(|a, b| a + 1 == *b).map(|run| run[0]..run[run.len() - 1] + 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_join_neighbours_only() {
        assert_eq!(runs(&[]), []);
        assert_eq!(runs(&[3, 5]), [3..4, 5..6]);
        assert_eq!(runs(&[0, 1, 2, 5, 7, 8]), [0..3, 5..6, 7..9]);
    }

    #[test]
    fn chunks_that_a_range_touches() {
        let chunk = |bytes| Chunk { bytes, backing: Backing::Absent, backup: None };
        let chunks = BTreeMap::from([(100, chunk(10)), (110, chunk(40)), (170, chunk(10))]);
        let range = DeviceRange::new(100, 100);
        let segment = Segment { tag: TagKey(0), range, first: BlockKey::NONE, chunks };
        let touched = |start, end| segment.touching(start, end).map(|(at, _)| at).collect::<Vec<_>>();
        assert_eq!(touched(100, 101), [100]);
        assert_eq!(touched(109, 111), [100, 110]);
        assert_eq!(touched(149, 150), [110]);
        assert_eq!(touched(150, 170), [] as [u64; 0]);
        assert_eq!(touched(120, 200), [110, 170]);
        assert_eq!(touched(180, 200), [] as [u64; 0]);
        let across =
            [100, 109, 110, 149, 150, 160, 171, 180].map(|addr| segment.across(addr).map(|(at, _)| at));
        assert_eq!(across, [None, Some(100), None, Some(110), None, None, Some(170), None]);
    }
}
