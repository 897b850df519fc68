//! Which of several places has what belongs to a key: rendezvous hashing with bounded loads.
//!
//! Each place has a rank for each key, by a hash of both. The first one within the bound is chosen. See Thaler and
//! Ravishankar, "Using name-based mappings to increase hit rates" (1998), and Mirrokni, Thorup and Zadimoghaddam,
//! "Consistent hashing with bounded loads" (2018).
//!
//! Promises:
//!
//! - All who know the same places and loads choose the same one.
//! - A place that goes takes only its own keys along, and one that comes takes only keys that are then its own.
//! - Nothing goes to a place above the bound.

use poorwill_front::affinity::{hash, pair};

/// A place may have so many hundredths of the mean load, and [`LOAD_FREE`] more.
const LOAD_PERCENT: u128 = 125;
/// So that a few requests are no load.
const LOAD_FREE: u128 = 1;

/// The position of the place that a key goes to, of places with names and loads. `None` if there are none.
///
/// ```
/// use poorwill_router::rendezvous::choose;
///
/// let first = choose(7, &[("a", 0), ("b", 0)]);
/// assert_eq!(choose(7, &[("a", 9), ("b", 9)]), first);
/// assert_eq!(choose(7, &[("a", 9), ("b", 0)]), Some(1));
/// assert_eq!(choose(7, &[("a", 0), ("b", 9)]), Some(0));
/// ```
#[must_use]
pub fn choose(key: u64, places: &[(&str, u64)]) -> Option<usize> {
    let all: u128 = places.iter().map(|(_, load)| u128::from(*load)).sum();
    let count = u128::try_from(places.len()).unwrap_or(u128::MAX);
    // Loads and the bound, times the number of places and a hundred.
    let bound = all * LOAD_PERCENT + LOAD_FREE * count * 100;
    let is_within = |load: u64| u128::from(load) * count * 100 <= bound;
    let within = places.iter().enumerate().filter(|(_, (_, load))| is_within(*load));
    within.max_by_key(|(_, (name, _))| pair(key, hash(name.as_bytes()))).map(|(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 9] = ["gpu-1", "gpu-2", "gpu-3", "gpu-4", "gpu-5", "a", "b", "node-17.rack-3", "z"];

    fn places(rng: &mut fastrand::Rng, most: u64) -> Vec<(&'static str, u64)> {
        let mut names = NAMES;
        rng.shuffle(&mut names);
        names[..rng.usize(1..=NAMES.len())].iter().map(|name| (*name, rng.u64(..=most))).collect()
    }

    #[test]
    fn a_place_that_goes_takes_only_its_own_keys_along() {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..300 {
            let mut all = places(&mut rng, 0);
            let keys: Vec<u64> = (0..200).map(|_| rng.u64(..)).collect();
            let name = |places: &[(&'static str, u64)], key| places[choose(key, places).unwrap()].0;
            let before: Vec<&str> = keys.iter().map(|key| name(&all, *key)).collect();
            rng.shuffle(&mut all);
            assert!(keys.iter().zip(&before).all(|(key, before)| name(&all, *key) == *before));
            let (gone, _) = all.swap_remove(rng.usize(..all.len()));
            if all.is_empty() {
                continue;
            }
            for (key, before) in keys.iter().zip(before) {
                assert_eq!(name(&all, *key) == before, before != gone, "{key}");
            }
        }
    }

    #[test]
    fn nothing_goes_to_a_place_above_the_bound() {
        let mut rng = fastrand::Rng::with_seed(2);
        for round in 0..20_000 {
            let all = places(&mut rng, [3, 20, 1000, u64::MAX][round % 4]);
            let (_, load) = all[choose(rng.u64(..), &all).unwrap()];
            #[allow(clippy::cast_precision_loss, reason = "a bound of that size needs no digit of it")]
            let mean = all.iter().map(|(_, load)| *load as f64).sum::<f64>() / all.len() as f64;
            #[allow(clippy::cast_precision_loss, reason = "a bound of that size needs no digit of it")]
            let is_within = load as f64 <= (1.25 * mean + 1.0) * (1.0 + 1e-9);
            assert!(is_within, "{load} of {all:?}");
        }
        assert_eq!(choose(1, &[]), None);
    }

    #[test]
    fn keys_are_spread_evenly() {
        let all: Vec<(&str, u64)> = NAMES.iter().map(|name| (*name, 0)).collect();
        let mut counts = [0_u32; NAMES.len()];
        // As bad as keys can be.
        (0..9000).for_each(|key| counts[choose(key, &all).unwrap()] += 1);
        assert!(counts.iter().all(|count| (880..1120).contains(count)), "{counts:?}");
    }
}
