//! Limits of requests, and when refused ones may come again.
//!
//! Promises: the requests of a key take no more than its places. Those refused come back at different times.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::account::Permit;

/// How many retries a busy front expects.
const RETRIES_PER_SECOND: f64 = 50.0;
/// Seconds over which retries are spread.
const JITTER_MIN: f64 = 2.0;
const JITTER_MAX: f64 = 30.0;
const GOLDEN_RATIO: f64 = 1.618_033_988_749_895;

/// The requests in progress of each named key.
#[derive(Debug, Default)]
pub(super) struct KeyRequests(Mutex<BTreeMap<String, Arc<AtomicUsize>>>);

impl KeyRequests {
    /// Takes a place of the key. `None` if `max` are taken.
    pub(super) fn acquire(&self, name: &str, max: usize) -> Option<Permit> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let active = all.entry(name.to_owned()).or_default();
        Permit::acquire(active, max)
    }
}

/// Chooses `Retry-After` of refused requests. They come back at different times, and later the more there are.
#[derive(Debug)]
pub(super) struct Backoff(Mutex<Refusals>);

#[derive(Debug)]
struct Refusals {
    count: u32,
    /// Those whose clients have not come back, at `RETRIES_PER_SECOND`.
    away: f64,
    last: Instant,
}

impl Default for Backoff {
    fn default() -> Self {
        Self(Mutex::new(Refusals { count: 0, away: 0.0, last: Instant::now() }))
    }
}

impl Backoff {
    /// For one more refused request.
    pub(super) fn retry_after(&self) -> Duration {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retry_after(Instant::now())
    }
}

impl Refusals {
    fn retry_after(&mut self, now: Instant) -> Duration {
        let back = now.saturating_duration_since(self.last).as_secs_f64() * RETRIES_PER_SECOND;
        self.last = now;
        // More would spread no further, and only last longer.
        let most = (JITTER_MAX - JITTER_MIN) * RETRIES_PER_SECOND;
        self.away = ((self.away - back).max(0.0) + 1.0).min(most);
        self.count = self.count.wrapping_add(1);
        let spread = (JITTER_MIN + self.away / RETRIES_PER_SECOND).min(JITTER_MAX);
        // Multiples of the golden ratio spread evenly.
        let jitter = (f64::from(self.count) * GOLDEN_RATIO).fract() * spread;
        Duration::from_secs(1) + Duration::from_secs_f64(jitter.floor())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_requests_come_back_later_the_more_there_are() {
        let begun = Instant::now();
        let mut refusals = Refusals { count: 0, away: 0.0, last: begun };
        let mut seconds =
            |count, now| -> Vec<u64> { (0..count).map(|_| refusals.retry_after(now).as_secs()).collect() };
        let few = seconds(10, begun);
        assert!(
            few.iter().all(|wait| (1..=3).contains(wait)) && few.contains(&1) && few.contains(&2),
            "{few:?}"
        );
        let many = seconds(1000, begun);
        let last = &many[900..];
        assert!(
            last.iter().all(|wait| (1..=23).contains(wait)) && last.iter().any(|wait| *wait > 15),
            "{last:?}"
        );
        // Evenly: no second has more than a tenth of them.
        assert!((1..=23).all(|wait| last.iter().filter(|one| **one == wait).count() <= 10), "{last:?}");
        assert!(seconds(10_000, begun).iter().all(|wait| (1..=30).contains(wait)));
        let calm = seconds(10, begun + Duration::from_secs(60));
        assert!(calm.iter().all(|wait| (1..=2).contains(wait)), "{calm:?}");
    }
}
