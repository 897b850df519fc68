//! Counters of models that were removed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::requests::{Forget, Requests};

/// How long a removed model's counters stay, from the first scrape without it. Every scraper sees their last values.
/// A query of Prometheus looks back as far.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(300);

/// Forgets the series of removed models some minutes later.
pub struct Removed {
    requests: Arc<Requests>,
    /// What has a model's label.
    by_model: Vec<Box<dyn Forget>>,
    /// Removed models that have series, since the first scrape without them.
    since: Mutex<BTreeMap<String, Instant>>,
}

impl fmt::Debug for Removed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Removed").field("since", &self.since).finish_non_exhaustive()
    }
}

impl Removed {
    /// Of these series and those of the requests.
    #[must_use]
    pub fn new(requests: Arc<Requests>, mut by_model: Vec<Box<dyn Forget>>) -> Self {
        by_model.extend(requests.series());
        Self { requests, by_model, since: Mutex::default() }
    }

    /// At each scrape.
    pub fn forget(&self, is_there: impl Fn(&str) -> bool) {
        let mut with_series = BTreeSet::new();
        self.by_model.iter().for_each(|series| series.models(&mut with_series));
        with_series.retain(|model| !model.is_empty() && !is_there(model));
        let mut removed = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        removed.retain(|model, _| with_series.contains(model));
        for model in with_series {
            let since = *removed.entry(model.clone()).or_insert_with(Instant::now);
            if since.elapsed() >= FORGOTTEN_AFTER {
                self.by_model.iter().for_each(|series| series.forget(&model));
                self.requests.forget(&model);
                removed.remove(&model);
            }
        }
    }
}
