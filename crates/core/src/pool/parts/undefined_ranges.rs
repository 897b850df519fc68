//! Which bytes of an awake tag are *undefined*: not their owner's until they are written again.
//!
//! A dropping sleep leaves all of them undefined; a lost backup, ranges.
//!
//! Promise: ranges do not overlap, and no range contains defined bytes.

use std::collections::BTreeMap;

use crate::driver::DeviceRange;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::pool) struct Undefined {
    /// Every byte. There are no ranges then.
    is_all: bool,
    /// The end of each range, by first address.
    ends: BTreeMap<u64, u64>,
}

impl Undefined {
    pub(in crate::pool) fn all() -> Self {
        Self { is_all: true, ends: BTreeMap::new() }
    }

    pub(in crate::pool) fn is_all(&self) -> bool {
        self.is_all
    }

    /// Whether every byte is defined.
    pub(in crate::pool) fn is_nothing(&self) -> bool {
        !self.is_all && self.ends.is_empty()
    }

    pub(in crate::pool) fn lose(&mut self, range: DeviceRange) {
        if !self.is_all {
            self.define(range);
            self.ends.insert(range.addr, range.end());
        }
    }

    /// Defines `range`, unless every byte is undefined.
    pub(in crate::pool) fn define(&mut self, range: DeviceRange) {
        for (addr, end) in self.touching(range).collect::<Vec<_>>() {
            self.ends.remove(&addr);
            if addr < range.addr {
                self.ends.insert(addr, range.addr);
            }
            if range.end() < end {
                self.ends.insert(range.end(), end);
            }
        }
    }

    /// By address; none where every byte is undefined.
    pub(in crate::pool) fn ranges(&self) -> impl Iterator<Item = DeviceRange> {
        self.ends.iter().map(|(addr, end)| DeviceRange::new(*addr, end - addr))
    }

    /// The undefined parts of `range`, by address.
    pub(in crate::pool) fn within(&self, range: DeviceRange) -> impl Iterator<Item = DeviceRange> {
        self.touching(range).map(move |(addr, end)| {
            let start = addr.max(range.addr);
            DeviceRange::new(start, end.min(range.end()) - start)
        })
    }

    fn touching(&self, range: DeviceRange) -> impl Iterator<Item = (u64, u64)> {
        let before = self.ends.range(..range.addr).next_back().filter(|(_, end)| **end > range.addr);
        let inside = self.ends.range(range.addr..range.end());
        before.into_iter().chain(inside).map(|(addr, end)| (*addr, *end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(from: usize, to: usize) -> DeviceRange {
        DeviceRange::new(from as u64, (to - from) as u64)
    }

    fn bytes(ranges: impl Iterator<Item = DeviceRange>) -> [bool; 64] {
        let mut covered = [false; 64];
        for at in ranges.flat_map(|range| range.addr..range.end()) {
            let covered = &mut covered[usize::try_from(at).unwrap()];
            assert!(!std::mem::replace(covered, true), "ranges overlap");
        }
        covered
    }

    #[test]
    fn ranges_are_what_was_lost_and_not_defined() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..200 {
            let (mut undefined, mut known) = (Undefined::default(), [false; 64]);
            for _ in 0..20 {
                let from = random.usize(..64);
                let to = random.usize(from + 1..=64);
                let is_lost = random.bool();
                if is_lost {
                    undefined.lose(range(from, to));
                } else {
                    undefined.define(range(from, to));
                }
                known[from..to].fill(is_lost);
                assert_eq!(bytes(undefined.ranges()), known);
                assert_eq!(undefined.is_nothing(), known == [false; 64]);
                let mut part = [false; 64];
                part[from..to].copy_from_slice(&known[from..to]);
                assert_eq!(bytes(undefined.within(range(from, to))), part);
            }
        }
    }

    #[test]
    fn where_everything_is_undefined_no_range_is() {
        let mut undefined = Undefined::all();
        undefined.lose(range(1, 5));
        assert_eq!(
            (undefined.ranges().count(), undefined.is_all(), undefined.is_nothing()),
            (0, true, false)
        );
        undefined.define(range(0, 64));
        assert!(undefined.is_all());
    }
}
