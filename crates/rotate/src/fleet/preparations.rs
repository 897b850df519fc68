//! Which warm model is started next, so that it is ready to wake before a request for it comes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::policy::StageName;
use crate::service::{ModelNow, Snapshot};

/// Between two attempts for a model: meanwhile its GPUs may be given up by what is in use.
const AGAIN: Duration = Duration::from_secs(15);

/// When each model was tried last.
#[derive(Debug, Default)]
pub(super) struct Preparations {
    tried: BTreeMap<String, Instant>,
}

impl Preparations {
    /// A cold model that should be warm, while nothing starts and host memory for it is free.
    pub(super) fn next(
        &mut self,
        snapshot: &Snapshot,
        is_warm: impl Fn(&str) -> bool,
        host_free_bytes: u64,
        now: Instant,
    ) -> Option<String> {
        if snapshot.is_ending || snapshot.models.iter().any(|model| model.stage == StageName::Starting) {
            return None;
        }
        let is_cold = |model: &&ModelNow| model.stage == StageName::Cold && model.is_supervised;
        let all = snapshot.models.iter().filter(is_cold).filter(|model| is_warm(&model.name));
        self.choose(all.map(|model| (&*model.name, host_bytes(model))), host_free_bytes, now)
    }

    /// Of these and the host memory that they take. What was tried longest ago comes first.
    fn choose<'m>(
        &mut self,
        all: impl Iterator<Item = (&'m str, u64)>,
        host_free_bytes: u64,
        now: Instant,
    ) -> Option<String> {
        let rests = |name: &str| {
            self.tried.get(name).is_some_and(|tried| now.saturating_duration_since(*tried) < AGAIN)
        };
        let open = all.filter(|(name, bytes)| *bytes <= host_free_bytes && !rests(name));
        let (name, _) = open.min_by_key(|(name, _)| self.tried.get(*name))?;
        self.tried.insert(name.to_owned(), now);
        Some(name.to_owned())
    }
}

/// What it keeps in host memory while it sleeps is at most what it gives up on its GPUs; 0 until that is known.
fn host_bytes(model: &ModelNow) -> u64 {
    let configured = || model.need_bytes.map(|bytes| vec![bytes; model.gpus.len()]);
    model.held_bytes.clone().or_else(configured).unwrap_or_default().into_iter().fold(0, u64::saturating_add)
}

#[test]
fn each_has_its_turn_where_host_memory_is_free() {
    let (mut preparations, began) = (Preparations::default(), Instant::now());
    let all = [("a", 5), ("b", 7), ("c", 90)];
    let mut at =
        |free, seconds| preparations.choose(all.into_iter(), free, began + Duration::from_secs(seconds));
    let turns: Vec<_> = [0, 1, 2, 14, 15, 16, 17].map(|seconds| at(20, seconds)).into();
    let expected = [Some("a"), Some("b"), None, None, Some("a"), Some("b"), None];
    assert_eq!(turns, expected.map(|name| name.map(str::to_owned)));
    assert_eq!(at(4, 40), None);
    assert_eq!(at(100, 40).as_deref(), Some("c"));
}
