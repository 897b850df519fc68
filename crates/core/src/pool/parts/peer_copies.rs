//! Which chunks have a copy in another device's memory.
//!
//! Promise: a copy is found by the address of its chunk, with the digests that its backup had when it was made. What is no
//! longer of use is taken back from the broker that holds it.

use std::collections::BTreeMap;

use crate::digest::Digest;
use crate::pool::tools::keys::{Location, SegmentKey};

#[derive(Debug, Default)]
pub(in crate::pool) struct PeerCopies {
    copies: BTreeMap<Location, PeerCopy>,
    bytes: u64,
    /// By peer and address: of no more use.
    left: Vec<(usize, u64)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::pool) struct PeerCopy {
    /// By number.
    pub(in crate::pool) peer: usize,
    pub(in crate::pool) bytes: u64,
    /// Of its granules: `None` for what has no backup.
    pub(in crate::pool) digests: Vec<Option<Digest>>,
}

impl PeerCopies {
    pub(in crate::pool) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(in crate::pool) fn get(&self, location: Location) -> Option<&PeerCopy> {
        self.copies.get(&location)
    }

    pub(in crate::pool) fn len(&self) -> usize {
        self.copies.len()
    }

    pub(in crate::pool) fn of_segment(&self, key: SegmentKey) -> impl Iterator<Item = (Location, &PeerCopy)> {
        self.copies.range((key, 0)..=(key, u64::MAX)).map(|(location, copy)| (*location, copy))
    }

    /// A broker holds it.
    pub(in crate::pool) fn insert(&mut self, location: Location, copy: PeerCopy) {
        self.forget(location);
        self.bytes += copy.bytes;
        self.copies.insert(location, copy);
    }

    /// No broker holds it any more.
    pub(in crate::pool) fn forget(&mut self, location: Location) {
        if let Some(copy) = self.copies.remove(&location) {
            self.bytes -= copy.bytes;
        }
    }

    /// It is of no more use.
    pub(in crate::pool) fn leave(&mut self, location: Location) {
        if let Some(copy) = self.copies.get(&location) {
            self.left.push((copy.peer, location.1));
            self.forget(location);
        }
    }

    /// The addresses of a segment are given back, or its bytes are dropped.
    pub(in crate::pool) fn leave_segment(&mut self, key: SegmentKey) {
        let all: Vec<Location> = self.of_segment(key).map(|(location, _)| location).collect();
        all.into_iter().for_each(|location| self.leave(location));
    }

    /// What the caller takes back from brokers, before their addresses are used again.
    pub(in crate::pool) fn take_left(&mut self) -> Vec<(usize, u64)> {
        std::mem::take(&mut self.left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_count_until_they_are_forgotten_or_left() {
        let key = SegmentKey::default();
        let copy = |peer, bytes| PeerCopy { peer, bytes, digests: vec![None] };
        let mut copies = PeerCopies::default();
        copies.insert((key, 0), copy(0, 5));
        copies.insert((key, 8), copy(1, 7));
        copies.insert((key, 8), copy(1, 6));
        assert_eq!((copies.bytes(), copies.len(), copies.get((key, 8))), (11, 2, Some(&copy(1, 6))));
        copies.forget((key, 0));
        copies.forget((key, 0));
        assert_eq!((copies.bytes(), copies.take_left()), (6, vec![]), "its broker lost it");
        copies.leave((key, 0));
        copies.leave_segment(key);
        assert_eq!((copies.bytes(), copies.len()), (0, 0));
        assert_eq!((copies.take_left(), copies.take_left()), (vec![(1, 8)], vec![]));
    }
}
