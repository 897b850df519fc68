//! Which warm model is started next, so that it is ready to wake before a request for it comes.
//!
//! Promises:
//!
//! - One is started at a time, and only while as much host memory is free as it may keep in its sleep.
//! - One that is cold again behind an attempt rests, twice as long each time.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::service::{ModelNow, Snapshot};
use poorwill_rotation_policy::StageName;

/// How long the first attempt may take to begin, and the first rest.
const AGAIN: Duration = Duration::from_secs(15);
const REST_MAX: Duration = Duration::from_secs(3600);
/// A model that was up or asleep for so long begins anew with the first rest.
const SETTLED: Duration = Duration::from_secs(600);

/// What was tried.
#[derive(Debug, Default)]
pub(super) struct Preparations {
    tried: BTreeMap<String, Attempts>,
    /// The one that was ordered last, until it is over.
    current: Option<String>,
}

#[derive(Debug, Clone, Copy)]
struct Attempts {
    count: u32,
    last: Instant,
    rests_until: Instant,
}

/// What matters of a model.
#[derive(Debug, Clone, Copy)]
struct Candidate<'m> {
    name: &'m str,
    stage: StageName,
    /// Whether it should be started, if it is cold.
    is_warm: bool,
    /// What it may keep in host memory.
    host_bytes: u64,
}

impl Preparations {
    /// A cold model that should be warm.
    pub(super) fn next(
        &mut self,
        snapshot: &Snapshot,
        is_warm: impl Fn(&str) -> bool,
        host_free_bytes: u64,
        now: Instant,
    ) -> Option<String> {
        if snapshot.is_ending || snapshot.models.iter().any(|model| model.is_starting) {
            return None;
        }
        let candidate = |model| host_bytes(snapshot, model);
        let all: Vec<Candidate<'_>> = snapshot
            .models
            .iter()
            .map(|model| Candidate {
                name: &model.name,
                stage: model.stage,
                is_warm: model.is_supervised && is_warm(&model.name),
                host_bytes: candidate(model),
            })
            .collect();
        self.choose(&all, host_free_bytes, now)
    }

    /// What was tried longest ago comes first.
    fn choose(&mut self, all: &[Candidate<'_>], host_free_bytes: u64, now: Instant) -> Option<String> {
        let stage = |name: &str| all.iter().find(|one| one.name == name).map(|one| one.stage);
        let since = |then: Instant| now.saturating_duration_since(then);
        if let Some(current) = &self.current {
            let attempts = self.tried.get_mut(current)?;
            match stage(current) {
                Some(StageName::Cold) if since(attempts.last) < AGAIN => return None,
                Some(StageName::Cold) => attempts.rests_until = now + attempts.rest(),
                Some(StageName::Asleep | StageName::Hibernating | StageName::Ready) | None => {}
                Some(StageName::Quarantined) => {}
                Some(_) => return None,
            }
            self.current = None;
        }
        self.tried.retain(|name, attempts| {
            let is_cold = stage(name) == Some(StageName::Cold);
            if !is_cold {
                attempts.rests_until = now + attempts.rest();
            }
            is_cold || since(attempts.last) < SETTLED
        });
        let rests = |name: &str| self.tried.get(name).is_some_and(|attempts| now < attempts.rests_until);
        let is_open = |one: &&Candidate<'_>| {
            one.is_warm
                && one.stage == StageName::Cold
                && one.host_bytes <= host_free_bytes
                && !rests(one.name)
        };
        let name = all.iter().filter(is_open).map(|one| one.name);
        let name = name.min_by_key(|name| self.tried.get(*name).map(|attempts| attempts.last))?.to_owned();
        let count = self.tried.get(&name).map_or(0, |attempts| attempts.count) + 1;
        // A model that falls back rests as well.
        let attempts = Attempts { count, last: now, rests_until: now };
        let attempts = Attempts { rests_until: now + attempts.rest(), ..attempts };
        self.tried.insert(name.clone(), attempts);
        self.current = Some(name.clone());
        Some(name)
    }
}

impl Attempts {
    fn rest(self) -> Duration {
        let doubled = 1_u32.checked_shl(self.count - 1).unwrap_or(u32::MAX);
        AGAIN.saturating_mul(doubled).min(REST_MAX)
    }
}

/// At most what it gives up on its GPUs; all that these have, while that is not known.
fn host_bytes(snapshot: &Snapshot, model: &ModelNow) -> u64 {
    let whole = |gpu: &usize| {
        let of = snapshot.gpus.iter().find(|one| one.gpu == *gpu);
        of.and_then(|gpu| gpu.total_bytes).unwrap_or_default()
    };
    let configured = |gpu| model.need_bytes.unwrap_or_else(|| whole(gpu));
    let measured = model.held_bytes.clone();
    let bytes = measured.unwrap_or_else(|| model.gpus.iter().map(configured).collect());
    bytes.into_iter().fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Machine {
        preparations: Preparations,
        began: Instant,
        stages: BTreeMap<&'static str, StageName>,
        host_free_bytes: u64,
    }

    impl Machine {
        fn of(names: &[&'static str]) -> Self {
            let stages = names.iter().map(|name| (*name, StageName::Cold)).collect();
            Self { preparations: Preparations::default(), began: Instant::now(), stages, host_free_bytes: 20 }
        }

        /// What is ordered so many seconds after the beginning.
        fn at(&mut self, seconds: u64) -> Option<String> {
            let all = self.stages.iter().map(|(name, stage)| Candidate {
                name,
                stage: *stage,
                is_warm: *name != "not",
                host_bytes: if *name == "large" { 90 } else { 5 },
            });
            let now = self.began + Duration::from_secs(seconds);
            self.preparations.choose(&all.collect::<Vec<_>>(), self.host_free_bytes, now)
        }
    }

    #[test]
    fn one_at_a_time_has_its_turn_where_host_memory_is_free() {
        let mut machine = Machine::of(&["a", "b", "large", "not"]);
        assert_eq!(machine.at(0).as_deref(), Some("a"));
        // Others have to leave for it first.
        assert_eq!(machine.at(14), None);
        machine.stages.insert("a", StageName::Canary);
        assert_eq!(machine.at(900), None);
        machine.stages.insert("a", StageName::Asleep);
        assert_eq!(machine.at(901).as_deref(), Some("b"));
        machine.stages.insert("b", StageName::Asleep);
        assert_eq!(machine.at(902), None);
        machine.host_free_bytes = 90;
        assert_eq!(machine.at(903).as_deref(), Some("large"));
    }

    #[test]
    fn what_falls_back_rests_twice_as_long_each_time() {
        let mut machine = Machine::of(&["a"]);
        let mut ordered = Vec::new();
        for seconds in 0..1000 {
            // It comes up, and its sleep fails.
            let is_up = ordered.last().is_some_and(|last| (5..8).contains(&(seconds - last)));
            machine.stages.insert("a", if is_up { StageName::Ready } else { StageName::Cold });
            if machine.at(seconds).is_some() {
                ordered.push(seconds);
            }
        }
        let between: Vec<u64> = ordered.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(between, [22, 37, 67, 127, 247, 487]);
        // Asleep for long, it begins anew.
        machine.stages.insert("a", StageName::Asleep);
        assert_eq!(machine.at(2000), None);
        machine.stages.insert("a", StageName::Cold);
        assert!(machine.at(2001).is_some() && machine.at(2020).is_none() && machine.at(2040).is_some());
    }
}
