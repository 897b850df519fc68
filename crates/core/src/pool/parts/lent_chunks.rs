//! Chunks of sleeping tags whose memory is lent, or came back.
//!
//! Promise: the bytes of a chunk that [came back](LentChunks::came_back) are those of the sleep that lent it, but for what
//! the sleep dropped.

use std::collections::BTreeMap;

use crate::pool::tools::keys::{Location, SegmentKey};

#[derive(Debug, Default)]
pub(in crate::pool) struct LentChunks {
    chunks: BTreeMap<Location, LentChunk>,
    lent_bytes: u64,
    /// Lent from addresses that are given back.
    orphans: Vec<u64>,
}

#[derive(Debug, Clone, Copy)]
struct LentChunk {
    bytes: u64,
    is_back: bool,
}

impl LentChunks {
    /// In use by nothing else, as far as this pool knows.
    pub(in crate::pool) fn lent_bytes(&self) -> u64 {
        self.lent_bytes
    }

    pub(in crate::pool) fn lend(&mut self, location: Location, bytes: u64) {
        self.forget(location);
        self.chunks.insert(location, LentChunk { bytes, is_back: false });
        self.lent_bytes += bytes;
    }

    /// The pool has its memory again.
    pub(in crate::pool) fn note_back(&mut self, location: Location) {
        if let Some(chunk) = self.chunks.get_mut(&location).filter(|chunk| !chunk.is_back) {
            chunk.is_back = true;
            self.lent_bytes -= chunk.bytes;
        }
    }

    pub(in crate::pool) fn has_come_back(&self, location: Location) -> bool {
        self.chunks.get(&location).is_some_and(|chunk| chunk.is_back)
    }

    pub(in crate::pool) fn forget(&mut self, location: Location) {
        if let Some(LentChunk { bytes, is_back: false }) = self.chunks.remove(&location) {
            self.lent_bytes -= bytes;
        }
    }

    /// The addresses of a segment are given back.
    pub(in crate::pool) fn forget_segment(&mut self, segment: SegmentKey) {
        let of_segment: Vec<Location> = self.of_segment(segment).map(|(location, _)| location).collect();
        for location in of_segment {
            if !self.has_come_back(location) {
                self.orphans.push(location.1);
            }
            self.forget(location);
        }
    }

    /// Lent, and without an owner: the caller takes them back before their addresses are lent again.
    pub(in crate::pool) fn take_orphans(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.orphans)
    }

    /// By address, with sizes.
    pub(in crate::pool) fn of_segment(&self, segment: SegmentKey) -> impl Iterator<Item = (Location, u64)> {
        let of_segment = self.chunks.range((segment, 0)..=(segment, u64::MAX));
        of_segment.map(|(location, chunk)| (*location, chunk.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_lent_until_they_are_back_or_forgotten() {
        let segment = SegmentKey::default();
        let mut lent = LentChunks::default();
        lent.lend((segment, 0), 5);
        lent.lend((segment, 8), 7);
        lent.lend((segment, 8), 6);
        assert_eq!(lent.lent_bytes(), 11);
        lent.note_back((segment, 0));
        lent.note_back((segment, 0));
        lent.note_back((segment, 3));
        assert_eq!((lent.lent_bytes(), lent.has_come_back((segment, 0))), (6, true));
        assert!(!lent.has_come_back((segment, 8)));
        assert_eq!(lent.of_segment(segment).collect::<Vec<_>>(), [((segment, 0), 5), ((segment, 8), 6)]);
        lent.forget((segment, 9));
        lent.forget_segment(segment);
        assert_eq!((lent.lent_bytes(), lent.of_segment(segment).count()), (0, 0));
        assert_eq!((lent.take_orphans(), lent.take_orphans()), (vec![8], vec![]), "the other was back");
    }
}
