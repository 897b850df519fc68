//! Ranges of device memory that a caller names by address, such as those whose bytes need not survive a sleep. Pure.

use super::error::{PoolError, Result};
use super::shape::Shape;
use crate::driver::DeviceRange;

/// Ascending, without overlaps.
#[derive(Debug, Default)]
pub(in crate::pool) struct ByteRanges(Vec<DeviceRange>);

impl ByteRanges {
    /// Joins ranges that overlap or touch. `declared` is what the caller says of them.
    pub(in crate::pool) fn new(declared: &'static str, ranges: &[DeviceRange]) -> Result<Self> {
        let wrong = ranges.iter().find(|range| range.addr.checked_add(range.bytes).is_none());
        if let Some(DeviceRange { addr, bytes }) = wrong.copied() {
            return Err(PoolError::InvalidRange { declared, addr, bytes });
        }
        let mut ranges = ranges.to_vec();
        ranges.sort_unstable();
        let mut joined: Vec<DeviceRange> = Vec::with_capacity(ranges.len());
        for range in ranges {
            match joined.last_mut() {
                Some(last) if range.addr <= last.end() => {
                    last.bytes = last.bytes.max(range.end() - last.addr);
                }
                _ => joined.push(range),
            }
        }
        Ok(Self(joined))
    }

    /// Its parts in `within`, by address.
    pub(in crate::pool) fn parts(&self, within: DeviceRange) -> impl Iterator<Item = DeviceRange> {
        let first = self.0.partition_point(|range| range.end() <= within.addr);
        let touching = self.0[first..].iter().take_while(move |range| range.addr < within.end());
        touching.map(move |range| {
            let addr = range.addr.max(within.addr);
            DeviceRange::new(addr, range.end().min(within.end()) - addr)
        })
    }

    /// Numbers of the granules of `within` that lie wholly in it, ascending.
    pub(in crate::pool) fn whole_granules(&self, within: DeviceRange, shape: &Shape) -> Vec<usize> {
        let granule_bytes = shape.granule_bytes;
        let numbers = self.parts(within).flat_map(|part| {
            let start = (part.addr - within.addr).div_ceil(granule_bytes);
            let end = (part.end() - within.addr) / granule_bytes;
            (start..end).map(|number| usize::try_from(number).unwrap_or(usize::MAX))
        });
        numbers.collect()
    }

    /// Numbers of the granules of `within` that it touches, ascending.
    pub(in crate::pool) fn touched_granules(&self, within: DeviceRange, shape: &Shape) -> Vec<usize> {
        let granule_bytes = shape.granule_bytes;
        let numbers = self.parts(within).filter(|part| part.bytes > 0).flat_map(|part| {
            let start = (part.addr - within.addr) / granule_bytes;
            let end = (part.end() - within.addr).div_ceil(granule_bytes);
            (start..end).map(|number| usize::try_from(number).unwrap_or(usize::MAX))
        });
        let mut numbers: Vec<usize> = numbers.collect();
        numbers.dedup();
        numbers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::DeviceInfo;
    use crate::pool::tools::config::PoolConfig;

    const WITHIN: DeviceRange = DeviceRange::new(64, 64);

    /// With granules of 8 bytes.
    fn shape() -> Shape {
        Shape::new(&PoolConfig::default(), &DeviceInfo::new("test", "test", 8, 1 << 20))
    }

    fn named(ranges: &[(u64, u64)]) -> ByteRanges {
        let ranges: Vec<DeviceRange> =
            ranges.iter().map(|(from, to)| DeviceRange::new(*from, to - from)).collect();
        ByteRanges::new("unused", &ranges).unwrap()
    }

    fn granules<const N: usize>(ranges: &[(u64, u64)], expected: [usize; N]) {
        assert_eq!(named(ranges).whole_granules(WITHIN, &shape()), expected, "{ranges:?}");
    }

    fn touched<const N: usize>(ranges: &[(u64, u64)], expected: [usize; N]) {
        assert_eq!(named(ranges).touched_granules(WITHIN, &shape()), expected, "{ranges:?}");
    }

    #[test]
    fn only_whole_granules_count() {
        granules(&[], []);
        granules(&[(72, 80)], [1]);
        granules(&[(71, 79)], []);
        granules(&[(65, 90)], [1, 2]);
    }

    #[test]
    fn ranges_may_overlap_touch_and_reach_beyond() {
        granules(&[(76, 80), (72, 76)], [1]);
        granules(&[(72, 96), (80, 88), (88, 100)], [1, 2, 3]);
        granules(&[(0, 80), (120, 1000), (500, 500)], [0, 1, 7]);
        granules(&[(0, 64), (128, 200)], []);
    }

    #[test]
    fn every_touched_granule_counts_once() {
        touched(&[], []);
        touched(&[(70, 70), (0, 64), (128, 200)], []);
        touched(&[(71, 73)], [0, 1]);
        touched(&[(66, 67), (69, 70), (72, 80)], [0, 1]);
        touched(&[(0, 65), (127, 1000)], [0, 7]);
    }

    #[test]
    fn a_range_past_the_last_address_is_refused() {
        let refused = ByteRanges::new("kept", &[DeviceRange::new(u64::MAX - 7, 9)]);
        assert!(matches!(refused, Err(PoolError::InvalidRange { declared: "kept", bytes: 9, .. })));
    }
}
