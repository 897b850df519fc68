//! Which bytes of awake tags are *undefined*: lost with their backup, and not written again by their owner since. Pure.
//!
//! Promise: the ranges do not overlap, and each belongs to one tag. What is cleared is out of every range.

use std::collections::BTreeMap;

use super::state::TagKey;
use crate::driver::DeviceRange;

/// Undefined ranges of a pool.
#[derive(Debug, Default)]
pub(super) struct Undefined {
    /// By first address.
    parts: BTreeMap<u64, Part>,
}

#[derive(Debug, Clone, Copy)]
struct Part {
    end: u64,
    tag: TagKey,
}

impl Undefined {
    /// From now on `range`, which is of `tag`, is undefined.
    pub(super) fn add(&mut self, tag: TagKey, range: DeviceRange) {
        self.clear(range);
        self.parts.insert(range.addr, Part { end: range.end(), tag });
    }

    /// Nothing in `range` is undefined any more. Returns whether anything was.
    pub(super) fn clear(&mut self, range: DeviceRange) -> bool {
        let touched: Vec<(u64, Part)> = self.touching(range).collect();
        for (addr, part) in &touched {
            self.parts.remove(addr);
            if *addr < range.addr {
                self.parts.insert(*addr, Part { end: range.addr, ..*part });
            }
            if range.end() < part.end {
                self.parts.insert(range.end(), *part);
            }
        }
        !touched.is_empty()
    }

    /// Nothing of a tag is undefined any more.
    pub(super) fn clear_tag(&mut self, tag: TagKey) {
        self.parts.retain(|_, part| part.tag != tag);
    }

    /// Whether anything of a tag is undefined.
    pub(super) fn has_any(&self, tag: TagKey) -> bool {
        self.parts.values().any(|part| part.tag == tag)
    }

    /// The undefined ranges of the tags that are `wanted`, by address.
    pub(super) fn of_tags(&self, wanted: impl Fn(TagKey) -> bool) -> Vec<DeviceRange> {
        let parts = self.parts.iter().filter(|(_, part)| wanted(part.tag));
        parts.map(|(addr, part)| DeviceRange::new(*addr, part.end - addr)).collect()
    }

    /// What is undefined of `range`, by address.
    pub(super) fn within(&self, range: DeviceRange) -> Vec<DeviceRange> {
        let clipped = |(addr, part): (u64, Part)| {
            let start = addr.max(range.addr);
            DeviceRange::new(start, part.end.min(range.end()) - start)
        };
        self.touching(range).map(clipped).collect()
    }

    fn touching(&self, range: DeviceRange) -> impl Iterator<Item = (u64, Part)> {
        let before = self.parts.range(..range.addr).next_back().filter(|(_, part)| part.end > range.addr);
        let inside = self.parts.range(range.addr..range.end());
        before.into_iter().chain(inside).map(|(addr, part)| (*addr, *part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(from: u64, to: u64) -> DeviceRange {
        DeviceRange::new(from, to - from)
    }

    #[test]
    fn ranges_are_what_was_added_and_not_cleared() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..200 {
            let (mut undefined, mut bytes) = (Undefined::default(), [None; 64]);
            for _ in 0..20 {
                let from = random.usize(..64);
                let to = random.usize(from + 1..=64);
                let tag = TagKey(random.usize(..3));
                let part = range(from as u64, to as u64);
                match random.u8(..4) {
                    0 | 1 => {
                        undefined.add(tag, part);
                        bytes[from..to].fill(Some(tag));
                    }
                    2 => {
                        let any = bytes[from..to].iter().any(Option::is_some);
                        assert_eq!(undefined.clear(part), any);
                        bytes[from..to].fill(None);
                    }
                    _ => {
                        undefined.clear_tag(tag);
                        bytes.iter_mut().for_each(|byte| *byte = byte.filter(|is| *is != tag));
                    }
                }
                let whole = |ranges: Vec<DeviceRange>| {
                    let mut said = [false; 64];
                    ranges.iter().flat_map(|part| part.addr..part.end()).for_each(|at| {
                        assert!(!std::mem::replace(&mut said[usize::try_from(at).unwrap()], true));
                    });
                    said
                };
                for tag in (0..3).map(TagKey) {
                    let of_tag = bytes.map(|byte| byte == Some(tag));
                    assert_eq!(whole(undefined.of_tags(|other| other == tag)), of_tag);
                    assert_eq!(undefined.has_any(tag), of_tag.contains(&true));
                }
                let mut there = bytes.map(|byte| byte.is_some());
                assert_eq!(whole(undefined.within(range(0, 64))), there);
                (0..64).filter(|at| !(from..to).contains(at)).for_each(|at| there[at] = false);
                assert_eq!(whole(undefined.within(part)), there);
            }
        }
    }
}
