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
    /// Copies in host memory, by the address of the [stretch](Segment::stretches) that they are of: what sleeps there, or
    /// what an earlier sleep left and may save the next copy.
    pub(super) backups: BTreeMap<u64, Backup>,
}

/// Where a chunk is: its segment and address.
pub(super) type Place = (SegmentKey, u64);

/// A piece of a segment that is mapped as a whole: one granule, the pool's chunk size, or a span.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) bytes: u64,
    pub(super) backing: Backing,
}

/// Copy of a stretch's granules.
#[derive(Debug)]
pub(super) struct Backup {
    /// As long as the stretch; only stored granules have been written.
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
    /// Whether a wake has copied it to the device and nobody knows whether it was what the digest says:
    /// [`super::spoiled`].
    pub(super) loaded_unseen: bool,
}

impl Segment {
    /// The chunks that `start..end` touches, with their addresses.
    pub(super) fn touching(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Chunk)> {
        let first = self.chunks.range(..=start).next_back().filter(|(at, chunk)| *at + chunk.bytes > start);
        let from = first.map_or(start, |(at, _)| *at);
        self.chunks.range(from..end).map(|(at, chunk)| (*at, chunk))
    }

    /// The stretches that `start..end` touches: the parts of chunks that have backups of their own, no longer than
    /// `chunk_bytes` each. So what is stored stays as it is when spans are made of chunks, or chunks of spans.
    pub(super) fn stretches(
        &self,
        start: u64,
        end: u64,
        chunk_bytes: u64,
    ) -> impl Iterator<Item = DeviceRange> {
        let of_chunk = move |(at, chunk): (u64, &Chunk)| {
            let (bytes, length) = (chunk.bytes, chunk.bytes.min(chunk_bytes));
            (0..bytes / length).map(move |nth| DeviceRange::new(at + nth * length, length))
        };
        let touched = self.touching(start, end).flat_map(of_chunk);
        touched.filter(move |stretch| stretch.addr < end && start < stretch.end())
    }

    /// The chunk that a stretch is of, if there is such a stretch.
    pub(super) fn chunk_of(&self, stretch: DeviceRange, chunk_bytes: u64) -> Option<&Chunk> {
        let mut there = self.stretches(stretch.addr, stretch.addr + 1, chunk_bytes);
        there.next().filter(|there| *there == stretch)?;
        self.touching(stretch.addr, stretch.addr + 1).next().map(|(_, chunk)| chunk)
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

    fn segment() -> Segment {
        let chunk = |bytes| Chunk { bytes, backing: Backing::Absent };
        let chunks = BTreeMap::from([(100, chunk(10)), (110, chunk(40)), (170, chunk(10))]);
        let range = DeviceRange::new(100, 100);
        Segment { tag: TagKey(0), range, first: BlockKey::NONE, chunks, backups: BTreeMap::new() }
    }

    #[test]
    fn stretches_are_no_longer_than_a_chunk() {
        let segment = segment();
        let touched = |start, end| {
            segment.stretches(start, end, 20).map(|range| (range.addr, range.bytes)).collect::<Vec<_>>()
        };
        assert_eq!(touched(100, 200), [(100, 10), (110, 20), (130, 20), (170, 10)]);
        assert_eq!(touched(109, 111), [(100, 10), (110, 20)]);
        assert_eq!(touched(130, 131), [(130, 20)]);
        assert_eq!(touched(150, 170), []);
        let of = |addr, bytes| segment.chunk_of(DeviceRange::new(addr, bytes), 20).map(|chunk| chunk.bytes);
        let found = [(100, 10), (110, 20), (130, 20), (120, 20), (110, 40), (150, 20), (170, 20)];
        let found = found.map(|(addr, bytes)| of(addr, bytes));
        assert_eq!(found, [Some(10), Some(40), Some(40), None, None, None, None]);
    }

    #[test]
    fn chunks_that_a_range_touches() {
        let segment = segment();
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
