//! Chunks of sleeping tags whose memory is lent, is resident, or came back.
//!
//! Resident memory is held and not mapped, and has the only copy of its bytes: nothing but the wake, or a backup, may end
//! that.
//!
//! Promise: the bytes of a chunk that [came back](LentChunks::has_come_back) are those of the sleep that lent it, but for
//! what the sleep dropped.

use std::collections::BTreeMap;

use crate::driver::BackingId;
use crate::pool::tools::keys::{Location, SegmentKey};

#[derive(Debug, Default)]
pub(in crate::pool) struct LentChunks {
    chunks: BTreeMap<Location, LentChunk>,
    lent_bytes: u64,
    resident_bytes: u64,
    /// Whether the broker may believe that some is resident.
    is_announced: bool,
    /// Lent from addresses that are given back.
    orphans: Vec<u64>,
    /// Resident at addresses that are given back.
    left: Vec<(BackingId, u64)>,
}

#[derive(Debug, Clone, Copy)]
pub(in crate::pool) struct LentChunk {
    pub(in crate::pool) bytes: u64,
    pub(in crate::pool) whereabouts: Whereabouts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pool) enum Whereabouts {
    /// With the broker, or given up by it.
    Broker,
    Resident(BackingId),
    /// In its chunk again.
    Back {
        was_resident: bool,
    },
}

impl LentChunks {
    /// In use by nothing else, as far as this pool knows.
    pub(in crate::pool) fn lent_bytes(&self) -> u64 {
        self.lent_bytes
    }

    pub(in crate::pool) fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    /// The resident bytes, unless the broker knows that there are none. It subtracts what it asks for, so the same figure is
    /// news.
    pub(in crate::pool) fn news_for_broker(&mut self) -> Option<u64> {
        self.is_announced |= self.resident_bytes > 0;
        self.is_announced.then_some(self.resident_bytes)
    }

    pub(in crate::pool) fn set_announced(&mut self, is_announced: bool) {
        self.is_announced = is_announced;
    }

    pub(in crate::pool) fn lend(&mut self, location: Location, bytes: u64) {
        self.insert(location, bytes, Whereabouts::Broker);
    }

    pub(in crate::pool) fn keep(&mut self, location: Location, bytes: u64, backing: BackingId) {
        self.insert(location, bytes, Whereabouts::Resident(backing));
    }

    fn insert(&mut self, location: Location, bytes: u64, whereabouts: Whereabouts) {
        self.forget(location);
        let chunk = LentChunk { bytes, whereabouts };
        self.count(chunk, |sum| sum + bytes);
        self.chunks.insert(location, chunk);
    }

    fn count(&mut self, chunk: LentChunk, change: impl Fn(u64) -> u64) {
        match chunk.whereabouts {
            Whereabouts::Broker => self.lent_bytes = change(self.lent_bytes),
            Whereabouts::Resident(_) => self.resident_bytes = change(self.resident_bytes),
            Whereabouts::Back { .. } => {}
        }
    }

    /// Its memory is in its chunk again.
    pub(in crate::pool) fn note_back(&mut self, location: Location) {
        let Some(chunk) = self.chunks.get(&location).copied() else { return };
        let was_resident = match chunk.whereabouts {
            Whereabouts::Back { .. } => return,
            whereabouts => matches!(whereabouts, Whereabouts::Resident(_)),
        };
        self.insert(location, chunk.bytes, Whereabouts::Back { was_resident });
    }

    pub(in crate::pool) fn get(&self, location: Location) -> Option<LentChunk> {
        self.chunks.get(&location).copied()
    }

    pub(in crate::pool) fn has_come_back(&self, location: Location) -> bool {
        let chunk = self.chunks.get(&location);
        chunk.is_some_and(|chunk| matches!(chunk.whereabouts, Whereabouts::Back { .. }))
    }

    /// Whether its bytes are nowhere else.
    pub(in crate::pool) fn is_only_copy(&self, location: Location) -> bool {
        self.chunks.get(&location).is_some_and(|chunk| chunk.whereabouts.is_only_copy())
    }

    /// Resident memory is the caller's now.
    pub(in crate::pool) fn forget(&mut self, location: Location) {
        if let Some(chunk) = self.chunks.remove(&location) {
            self.count(chunk, |sum| sum - chunk.bytes);
        }
    }

    /// The addresses of a segment are given back.
    pub(in crate::pool) fn forget_segment(&mut self, segment: SegmentKey) {
        for (location, chunk) in self.of_segment(segment).collect::<Vec<_>>() {
            if chunk.whereabouts == Whereabouts::Broker {
                self.orphans.push(location.1);
            }
            self.leave(location);
            self.forget(location);
        }
    }

    /// If it is resident, it has no more use.
    pub(in crate::pool) fn leave(&mut self, location: Location) {
        if let Some(LentChunk { bytes, whereabouts: Whereabouts::Resident(backing) }) =
            self.chunks.get(&location).copied()
        {
            self.left.push((backing, bytes));
            self.forget(location);
        }
    }

    /// Lent, and without an owner: the caller takes them back before their addresses are lent again.
    pub(in crate::pool) fn take_orphans(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.orphans)
    }

    /// Memory that was resident and is no longer of use: the caller releases it.
    pub(in crate::pool) fn take_left(&mut self) -> Vec<(BackingId, u64)> {
        std::mem::take(&mut self.left)
    }

    /// By address.
    pub(in crate::pool) fn of_segment(
        &self,
        segment: SegmentKey,
    ) -> impl Iterator<Item = (Location, LentChunk)> {
        let of_segment = self.chunks.range((segment, 0)..=(segment, u64::MAX));
        of_segment.map(|(location, chunk)| (*location, *chunk))
    }
}

impl Whereabouts {
    pub(in crate::pool) fn is_only_copy(self) -> bool {
        matches!(self, Self::Resident(_) | Self::Back { was_resident: true })
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
        let places: Vec<(u64, u64)> =
            lent.of_segment(segment).map(|(at, chunk)| (at.1, chunk.bytes)).collect();
        assert_eq!(places, [(0, 5), (8, 6)]);
        lent.forget((segment, 9));
        lent.forget_segment(segment);
        assert_eq!((lent.lent_bytes(), lent.of_segment(segment).count()), (0, 0));
        assert_eq!((lent.take_orphans(), lent.take_orphans()), (vec![8], vec![]), "the other was back");
    }

    #[test]
    fn resident_bytes_are_the_only_copy_until_they_are_forgotten() {
        let segment = SegmentKey::default();
        let mut lent = LentChunks::default();
        assert_eq!(lent.news_for_broker(), None);
        lent.keep((segment, 0), 5, BackingId(1));
        lent.keep((segment, 8), 7, BackingId(2));
        assert_eq!((lent.resident_bytes(), lent.lent_bytes()), (12, 0));
        assert_eq!([lent.news_for_broker(), lent.news_for_broker()], [Some(12), Some(12)]);
        lent.note_back((segment, 0));
        assert!(lent.is_only_copy((segment, 0)) && lent.has_come_back((segment, 0)));
        assert!(lent.is_only_copy((segment, 8)) && !lent.has_come_back((segment, 8)));
        assert_eq!(lent.news_for_broker(), Some(7));
        lent.keep((segment, 0), 5, BackingId(1));
        lent.note_back((segment, 0));
        lent.forget_segment(segment);
        assert_eq!((lent.take_left(), lent.take_left()), (vec![(BackingId(2), 7)], vec![]));
        assert_eq!((lent.resident_bytes(), lent.is_only_copy((segment, 0))), (0, false));
    }
}
