//! Ranges whose bytes need not survive a sleep. Pure.

use super::error::{PoolError, Result};
use super::shape::Shape;
use crate::driver::DeviceRange;

/// Ascending, without overlaps.
#[derive(Debug, Default)]
pub(in crate::pool) struct Unused(Vec<DeviceRange>);

impl Unused {
    /// Joins ranges that overlap or touch.
    pub(in crate::pool) fn new(ranges: &[DeviceRange]) -> Result<Self> {
        let wrong = ranges.iter().find(|range| range.addr.checked_add(range.bytes).is_none());
        if let Some(DeviceRange { addr, bytes }) = wrong.copied() {
            return Err(PoolError::InvalidUnused { addr, bytes });
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

    /// Numbers of the granules of `within` that lie wholly in it, ascending.
    pub(in crate::pool) fn granules(&self, within: DeviceRange, shape: &Shape) -> Vec<usize> {
        let granule_bytes = shape.granule_bytes;
        let first = self.0.partition_point(|range| range.end() <= within.addr);
        let touching = self.0[first..].iter().take_while(|range| range.addr < within.end());
        let numbers = touching.flat_map(|range| {
            let start = (range.addr.max(within.addr) - within.addr).div_ceil(granule_bytes);
            let end = (range.end().min(within.end()) - within.addr) / granule_bytes;
            (start..end).map(|number| usize::try_from(number).unwrap_or(usize::MAX))
        });
        numbers.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        granule_bytes: 8,
        chunk_bytes: 8,
        span_bytes: 8,
        segment_bytes: 64,
        total_bytes: 1 << 20,
        limit_bytes: None,
        keep_backups: true,
    };

    fn granules<const N: usize>(ranges: &[(u64, u64)], expected: [usize; N]) {
        let ranges: Vec<DeviceRange> =
            ranges.iter().map(|(from, to)| DeviceRange::new(*from, to - from)).collect();
        let found = Unused::new(&ranges).unwrap().granules(DeviceRange::new(64, 64), &SHAPE);
        assert_eq!(found, expected, "{ranges:?}");
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
    fn a_range_past_the_last_address_is_refused() {
        let refused = Unused::new(&[DeviceRange::new(u64::MAX - 7, 9)]);
        assert!(matches!(refused, Err(PoolError::InvalidUnused { bytes: 9, .. })));
    }
}
