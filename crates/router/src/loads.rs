//! How busy each copy is, as far as this router knows.
//!
//! Promise: what the head of an answer said counts for [`HEARD_MAX`], and then what the node has published. This router's
//! own requests count at once, both when they begin and when they end.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use poorwill_fleet::name::ModelName;
use poorwill_front::backend::InFlight;

/// How long what an answer said is news.
const HEARD_MAX: Duration = Duration::from_secs(10);

/// By model, and the URL of its node.
#[derive(Debug, Default)]
pub(super) struct Loads(Mutex<HashMap<ModelName, HashMap<String, AtCopy>>>);

#[derive(Debug, Default)]
struct AtCopy {
    /// This router's own.
    in_flight: Arc<AtomicUsize>,
    others: Option<Others>,
}

/// Requests of other routers and clients, as of a moment.
#[derive(Debug, Clone, Copy)]
struct Others {
    requests: u64,
    at: Instant,
}

impl Loads {
    /// Counts a request of this router until that is dropped.
    pub(super) fn begin(&self, model: &ModelName, url: &str, now: Instant) -> InFlight {
        let mut all = self.locked();
        let of_model = all.entry(model.clone()).or_default();
        if !of_model.contains_key(url) {
            // Nodes come and go, and their addresses with them.
            of_model.retain(|_, copy| Arc::strong_count(&copy.in_flight) > 1 || copy.others(now).is_some());
        }
        InFlight::new(&of_model.entry(url.to_owned()).or_default().in_flight)
    }

    /// Takes note of what an answer said: all requests to the model there.
    pub(super) fn hear(&self, model: &ModelName, url: &str, requests: u64, now: Instant) {
        let mut all = self.locked();
        let Some(copy) = all.get_mut(model).and_then(|of_model| of_model.get_mut(url)) else { return };
        copy.others = Some(Others { requests: requests.saturating_sub(copy.own()), at: now });
    }

    /// All requests to the model there, of which its node has published so many.
    pub(super) fn of(&self, model: &ModelName, url: &str, published: u64, now: Instant) -> u64 {
        let all = self.locked();
        let Some(copy) = all.get(model).and_then(|of_model| of_model.get(url)) else { return published };
        match copy.others(now) {
            Some(others) => others.saturating_add(copy.own()),
            None => published.max(copy.own()),
        }
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<ModelName, HashMap<String, AtCopy>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AtCopy {
    fn own(&self) -> u64 {
        u64::try_from(self.in_flight.load(Ordering::Acquire)).unwrap_or(u64::MAX)
    }

    fn others(&self, now: Instant) -> Option<u64> {
        let others = self.others.filter(|others| now.saturating_duration_since(others.at) < HEARD_MAX)?;
        Some(others.requests)
    }
}

#[test]
fn what_an_answer_said_counts_for_a_while() {
    let (loads, model, began) = (Loads::default(), "m".parse().unwrap(), Instant::now());
    let load = |published, after| loads.of(&model, "http://a", published, began + after);
    let second = Duration::from_secs(1);
    assert_eq!(load(4, second), 4);
    let one = loads.begin(&model, "http://a", began);
    assert_eq!((load(0, second), load(4, second)), (1, 4));
    // Six of others, and one of this router.
    loads.hear(&model, "http://a", 7, began);
    assert_eq!(load(0, second), 7);
    let two = loads.begin(&model, "http://a", began);
    assert_eq!(load(32, second), 8);
    drop((one, two));
    assert_eq!(load(32, second), 6);
    assert_eq!(load(32, HEARD_MAX), 32);
    // Its own have ended, and nothing is known of others.
    assert_eq!(load(0, HEARD_MAX), 0);
    drop(loads.begin(&model, "http://b", began + HEARD_MAX));
    assert_eq!(loads.locked()[&model].keys().collect::<Vec<_>>(), ["http://b"]);
    loads.hear(&model, "http://nowhere", 7, began);
    assert_eq!(loads.of(&model, "http://nowhere", 2, began), 2);
}
