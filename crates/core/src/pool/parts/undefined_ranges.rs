//! Which bytes of an awake tag are *undefined*: not their owner's until they are written again.
//!
//! A dropping sleep leaves all of them undefined but those that it kept; a lost backup, ranges.
//!
//! Promise: ranges do not overlap, and no range contains defined bytes.

use std::collections::BTreeMap;

use crate::driver::DeviceRange;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::pool) struct Undefined {
    /// Every byte but those in the ranges, which were kept.
    is_all: bool,
    /// The end of each range, by first address.
    ends: BTreeMap<u64, u64>,
}

impl Undefined {
    /// `kept` ascends, without overlaps.
    pub(in crate::pool) fn all_but(kept: &[DeviceRange]) -> Self {
        Self { is_all: true, ends: kept.iter().map(|range| (range.addr, range.end())).collect() }
    }

    /// Whether every byte is undefined, except what was kept.
    pub(in crate::pool) fn is_all(&self) -> bool {
        self.is_all
    }

    /// Whether every byte is defined.
    pub(in crate::pool) fn is_nothing(&self) -> bool {
        !self.is_all && self.ends.is_empty()
    }

    pub(in crate::pool) fn lose(&mut self, range: DeviceRange) {
        self.cut(range);
        if !self.is_all {
            self.ends.insert(range.addr, range.end());
        }
    }

    /// Defines `range`, unless every byte is undefined.
    pub(in crate::pool) fn define(&mut self, range: DeviceRange) {
        if !self.is_all {
            self.cut(range);
        }
    }

    /// Takes `range` out of the ranges.
    fn cut(&mut self, range: DeviceRange) {
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

    /// What was lost, by address; none where every byte is undefined.
    pub(in crate::pool) fn ranges(&self) -> impl Iterator<Item = DeviceRange> {
        let ends = self.ends.iter().filter(|_| !self.is_all);
        ends.map(|(addr, end)| DeviceRange::new(*addr, end - addr))
    }

    /// The undefined parts of `range`, by address.
    pub(in crate::pool) fn within(&self, range: DeviceRange) -> Vec<DeviceRange> {
        if self.is_all { self.others(range) } else { self.parts(range) }
    }

    /// The defined parts of `range`, by address.
    pub(in crate::pool) fn defined_within(&self, range: DeviceRange) -> Vec<DeviceRange> {
        if self.is_all { self.parts(range) } else { self.others(range) }
    }

    /// The parts of `range` in the ranges.
    fn parts(&self, range: DeviceRange) -> Vec<DeviceRange> {
        let parts = self.touching(range).map(|(addr, end)| {
            let start = addr.max(range.addr);
            DeviceRange::new(start, end.min(range.end()) - start)
        });
        parts.collect()
    }

    /// The parts of `range` between the ranges.
    fn others(&self, range: DeviceRange) -> Vec<DeviceRange> {
        let (mut others, mut from) = (Vec::new(), range.addr);
        let ends = self.parts(range).into_iter().chain([DeviceRange::new(range.end(), 0)]);
        for part in ends {
            if from < part.addr {
                others.push(DeviceRange::new(from, part.addr - from));
            }
            from = part.end();
        }
        others
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

    fn bytes(ranges: impl IntoIterator<Item = DeviceRange>) -> [bool; 64] {
        let mut covered = [false; 64];
        for at in ranges.into_iter().flat_map(|range| range.addr..range.end()) {
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
                assert_parts(&undefined, (from, to), known);
            }
        }
    }

    fn assert_parts(undefined: &Undefined, (from, to): (usize, usize), known: [bool; 64]) {
        let (mut part, mut defined) = ([false; 64], [false; 64]);
        for at in from..to {
            (part[at], defined[at]) = (known[at], !known[at]);
        }
        assert_eq!(bytes(undefined.within(range(from, to))), part);
        assert_eq!(bytes(undefined.defined_within(range(from, to))), defined);
    }

    #[test]
    fn where_everything_is_undefined_only_kept_ranges_are_not_until_they_are_lost() {
        let mut random = fastrand::Rng::with_seed(8);
        let mut undefined = Undefined::all_but(&[range(3, 9), range(20, 40)]);
        let mut known = [true; 64];
        known[3..9].fill(false);
        known[20..40].fill(false);
        for _ in 0..20 {
            let from = random.usize(..64);
            let to = random.usize(from + 1..=64);
            assert_parts(&undefined, (from, to), known);
            // No one says that all of it is there.
            undefined.define(range(from, to));
            assert_parts(&undefined, (from, to), known);
            assert_eq!(
                (undefined.ranges().count(), undefined.is_all(), undefined.is_nothing()),
                (0, true, false)
            );
            let lost = from..(from + 3).min(to);
            undefined.lose(range(lost.start, lost.end));
            known[lost].fill(true);
        }
    }
}
