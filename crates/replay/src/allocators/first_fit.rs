//! The first of many ranges by address that is long enough, found without a walk over those before it.

use std::collections::HashMap;

/// Bits of an address that a level tells apart.
const LEVEL_BITS: u32 = 4;
const WIDTH: usize = 1 << LEVEL_BITS;
/// Addresses are multiples of it.
const GRAIN_BITS: u32 = 9;
/// Enough for all addresses.
const LEVELS: usize = (u64::BITS - GRAIN_BITS).div_ceil(LEVEL_BITS) as usize;

/// Ranges by where they begin, in a tree of maxima. Each call looks at one branch.
#[derive(Debug, Default)]
pub(super) struct FirstFit {
    /// From the leaves up: by the upper bits of addresses, the longest range behind each value of the next bits.
    levels: [HashMap<u64, [u64; WIDTH]>; LEVELS],
}

impl FirstFit {
    /// How long the range is that begins at an address; nothing if none does.
    pub(super) fn set(&mut self, addr: u64, bytes: u64) {
        let (mut key, mut longest) = (addr >> GRAIN_BITS, bytes);
        for level in &mut self.levels {
            let (above, place) = split(key);
            let lengths = level.entry(above).or_default();
            lengths[place] = longest;
            longest = lengths.iter().copied().max().unwrap_or(0);
            if longest == 0 {
                level.remove(&above);
            }
            key = above;
        }
    }

    /// Where the first range of so many bytes or more begins.
    pub(super) fn first(&self, bytes: u64) -> Option<u64> {
        let is_enough = |longest: &u64| *longest >= bytes.max(1);
        let mut key = 0;
        for level in self.levels.iter().rev() {
            let place = level.get(&key)?.iter().position(is_enough)?;
            key = key << LEVEL_BITS | u64::try_from(place).ok()?;
        }
        Some(key << GRAIN_BITS)
    }
}

fn split(key: u64) -> (u64, usize) {
    (key >> LEVEL_BITS, usize::try_from(key & (WIDTH as u64 - 1)).unwrap_or(0))
}

#[test]
fn the_first_one_that_is_long_enough_is_found() {
    let mut ranges = FirstFit::default();
    assert_eq!(ranges.first(1), None);
    let last = u64::MAX >> GRAIN_BITS << GRAIN_BITS;
    for (addr, bytes) in [(last, 9), (0, 3), (512, 5), (1 << 47, 7)] {
        ranges.set(addr, bytes);
    }
    assert_eq!(
        [0, 3, 4, 6, 8, 10].map(|bytes| ranges.first(bytes)),
        [Some(0), Some(0), Some(512), Some(1 << 47), Some(last), None]
    );
    ranges.set(512, 0);
    assert_eq!(ranges.first(4), Some(1 << 47));
    [0, 1 << 47, last].into_iter().for_each(|addr| ranges.set(addr, 0));
    assert!(ranges.first(0).is_none() && ranges.levels.iter().all(HashMap::is_empty));
}
