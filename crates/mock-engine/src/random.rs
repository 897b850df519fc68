//! Deterministic random numbers: the same seed gives the same faults, and the same text the same numbers.

use std::sync::{Mutex, PoisonError};

use fastrand::Rng;

/// A shared generator.
#[derive(Debug)]
pub(crate) struct SharedRng(Mutex<Rng>);

impl SharedRng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Mutex::new(Rng::with_seed(seed)))
    }

    /// Whether an event of this probability happens; 0 and 1 draw no number.
    pub(crate) fn happens(&self, probability: f64) -> bool {
        if probability >= 1.0 {
            return true;
        }
        probability > 0.0 && self.0.lock().unwrap_or_else(PoisonError::into_inner).f64() < probability
    }
}

/// Mixes the bits: neighbours give unrelated numbers.
pub(crate) fn mix(number: u64) -> u64 {
    Rng::with_seed(number).u64(..)
}

/// The `nth` number of a sequence that starts from `number`.
pub(crate) fn nth(number: u64, nth: u64) -> u64 {
    mix(number ^ mix(nth))
}

/// FNV-1a of bytes, mixed.
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
    fn the_same_seed_gives_the_same_draws() {
        let draw = |seed| {
            let rng = SharedRng::new(seed);
            (0..64).map(|_| rng.happens(0.5)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn probabilities_are_kept() {
        let rng = SharedRng::new(1);
        assert!((0..100).all(|_| rng.happens(1.0) && !rng.happens(0.0)));
        let often = (0..10_000).filter(|_| rng.happens(0.3)).count();
        assert!((2_700..3_300).contains(&often), "{often}");
    }

    #[test]
    fn an_empty_choice_is_none() {
        assert_eq!(choose::<u8>(&[], 3), None);
        assert_eq!(choose(&[1, 2, 3], 5), Some(&3));
    }
}
