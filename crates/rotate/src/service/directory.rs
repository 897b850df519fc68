//! The models by number, and what names mean.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use poorwill_front::backend::InFlight;

use super::handle::EngineHandle;
use super::names::Names;
use crate::config::{self, Config};

#[derive(Debug)]
pub(super) struct Directory {
    pub(super) config: Arc<Config>,
    /// By model number, which removed models keep.
    pub(super) entries: Vec<Entry>,
    pub(super) names: Names,
    pub(super) profile: Option<String>,
}

impl Directory {
    /// Without a profile if this one is not in the configuration.
    pub(super) fn new(config: Arc<Config>, entries: Vec<Entry>, profile: Option<String>) -> Self {
        let profile = profile.filter(|profile| config.profiles.contains_key(profile));
        let is_it = |entry: &Entry, name: &str| entry.is_listed && entry.model.name == name;
        let id_of = |name: &str| entries.iter().position(|entry| is_it(entry, name));
        let names = Names::new(&config, profile.as_deref(), id_of);
        Self { config, entries, names, profile }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) model: Arc<config::Model>,
    pub(super) handle: Arc<EngineHandle>,
    pub(super) is_listed: bool,
    /// Waiting and running requests by a name.
    pub(super) in_flight: InFlightCount,
    /// Parts of answers that came from its engine.
    pub(super) answered: AnsweredParts,
}

/// Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct AnsweredParts(Arc<AtomicU64>);

impl AnsweredParts {
    pub(super) fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn counter(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.0)
    }
}

/// How many requests wait and run by a name. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct InFlightCount(Arc<AtomicUsize>);

impl InFlightCount {
    /// Counts one until that is dropped.
    pub(super) fn begin(&self) -> InFlight {
        InFlight::new(&self.0)
    }

    pub(super) fn now(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }
}
