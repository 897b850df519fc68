//! Chance from a seed, and mixing of bits: the same seed gives the same lies, the same text the same numbers.

use std::sync::{Mutex, PoisonError};

/// What one step adds (Steele, Lea and Flood, 2014).
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A generator that is shared.
#[derive(Debug)]
pub(super) struct Chance(Mutex<u64>);

impl Chance {
    pub(super) fn new(seed: u64) -> Self {
        Self(Mutex::new(seed))
    }

    /// Whether something of this probability happens this time. What always or never happens takes no number.
    pub(super) fn happens(&self, probability: f64) -> bool {
        if probability >= 1.0 {
            return true;
        }
        if probability <= 0.0 {
            return false;
        }
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *state = state.wrapping_add(GOLDEN);
        // The upper half of the bits fits, always.
        let drawn = u32::try_from(mix(*state) >> 32).unwrap_or(u32::MAX);
        f64::from(drawn) / 4_294_967_296.0 < probability
    }
}

/// Mixes a number so that every bit of the result depends on every bit of it (the finalizer of splitmix64).
pub(super) fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// A number that follows `number`, `nth` of its row.
pub(super) fn nth(number: u64, nth: u64) -> u64 {
    mix(number.wrapping_add(GOLDEN.wrapping_mul(nth.wrapping_add(1))))
}

/// A number for bytes: FNV-1a, mixed.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    let fold = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    mix(bytes.iter().fold(0xcbf2_9ce4_8422_2325, fold))
}

/// One of these, chosen by `number`.
pub(super) fn choose<T>(from: &[T], number: u64) -> Option<&T> {
    let len = u64::try_from(from.len()).ok()?;
    from.get(usize::try_from(number.checked_rem(len)?).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_chances() {
        let draw = |seed| {
            let chance = Chance::new(seed);
            (0..64).map(|_| chance.happens(0.5)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn probabilities_are_kept() {
        let chance = Chance::new(1);
        assert!((0..100).all(|_| chance.happens(1.0) && !chance.happens(0.0)));
        let often = (0..10_000).filter(|_| chance.happens(0.3)).count();
        assert!((2_700..3_300).contains(&often), "{often}");
    }

    #[test]
    fn there_is_nothing_to_choose_from_nothing() {
        assert_eq!(choose::<u8>(&[], 3), None);
        assert_eq!(choose(&[1, 2, 3], 5), Some(&3));
    }
}
