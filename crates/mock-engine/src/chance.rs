//! Chance from a seed, and mixing of bits: the same seed gives the same lies, the same text the same numbers.

use std::sync::{Mutex, PoisonError};

use fastrand::Rng;

/// A generator that is shared.
#[derive(Debug)]
pub(crate) struct Chance(Mutex<Rng>);

impl Chance {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Mutex::new(Rng::with_seed(seed)))
    }

    /// Whether something of this probability happens this time. What always or never happens takes no number.
    pub(crate) fn happens(&self, probability: f64) -> bool {
        if probability >= 1.0 {
            return true;
        }
        probability > 0.0 && self.0.lock().unwrap_or_else(PoisonError::into_inner).f64() < probability
    }
}

/// Mixes a number: neighbours give numbers that have nothing to do with each other.
pub(crate) fn mix(number: u64) -> u64 {
    Rng::with_seed(number).u64(..)
}

/// A number that follows `number`, `nth` of its row.
pub(crate) fn nth(number: u64, nth: u64) -> u64 {
    mix(number ^ mix(nth))
}

/// A number for bytes: FNV-1a, mixed.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    let fold = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    mix(bytes.iter().fold(0xcbf2_9ce4_8422_2325, fold))
}

/// One of these, chosen by `number`.
pub(crate) fn choose<T>(from: &[T], number: u64) -> Option<&T> {
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
