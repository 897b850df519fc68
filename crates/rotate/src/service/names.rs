//! What a request's name means, and which of a selector's targets a request gets.
//!
//! A request counts for its model from the choice until its [`InFlight`] is dropped. Choices of one selector follow each
//! other, so that no two of them see the same count.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use poorwill_front::backend::InFlight;
use poorwill_front::settings::Parameters;
use poorwill_rotation_policy::{ModelId, StageName};

use crate::config::{self, Config, Strategy};

/// Where a request goes.
#[derive(Debug)]
pub struct Destination {
    /// The number of its model.
    pub id: ModelId,
    /// Its model.
    pub model: Arc<config::Model>,
    /// The model's name in the engine.
    pub served_as: String,
    /// Changes to the request.
    pub parameters: Arc<Parameters>,
    /// Counts the request.
    pub in_flight: InFlight,
}

#[derive(Debug)]
pub(super) struct Names {
    meanings: HashMap<String, Meaning>,
    /// Those of the profile, for clients. `None` stands for no model.
    profile: HashMap<String, Option<Meaning>>,
    /// Held from a choice until it counts.
    choosing: Mutex<()>,
}

#[derive(Debug, Clone)]
enum Meaning {
    Model(NamedModel),
    Selector(Strategy, Vec<NamedModel>),
}

/// A model by one of its names.
#[derive(Debug, Clone)]
pub(super) struct NamedModel {
    pub(super) id: usize,
    pub(super) served_as: String,
    pub(super) parameters: Arc<Parameters>,
}

/// What a choice depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TargetNow {
    pub(super) stage: StageName,
    /// Waiting and running requests.
    pub(super) in_flight: usize,
}

impl Names {
    /// `id_of` numbers the models by their names.
    pub(super) fn new(config: &Config, profile: Option<&str>, id_of: impl Fn(&str) -> Option<usize>) -> Self {
        let mut targets: HashMap<String, NamedModel> = HashMap::new();
        for model in &config.models {
            let Some(id) = id_of(&model.name) else { continue };
            let usual = Arc::new(model.parameters.clone());
            for name in model.names() {
                let parameters = match model.variants.contains_key(name) {
                    true => Arc::new(model.parameters_of(name)),
                    false => Arc::clone(&usual),
                };
                let served_as = model.served_as(name).to_owned();
                targets.insert(name.clone(), NamedModel { id, served_as, parameters });
            }
        }
        let selectors = config.selectors.iter().map(|selector| {
            let known = selector.targets.iter().filter_map(|target| targets.get(target).cloned());
            (selector.name.clone(), Meaning::Selector(selector.strategy, known.collect()))
        });
        let selectors: Vec<_> = selectors.collect();
        let models = targets.into_iter().map(|(name, target)| (name, Meaning::Model(target)));
        let meanings: HashMap<String, Meaning> = models.chain(selectors).collect();
        let profile = profile.and_then(|profile| config.profiles.get(profile)).into_iter().flatten();
        let profile = profile.map(|(name, target)| (name.clone(), meanings.get(target).cloned())).collect();
        Self { meanings, profile, choosing: Mutex::default() }
    }

    /// The model of a name that is no selector's, whatever the profile says.
    pub(super) fn id(&self, name: &str) -> Option<usize> {
        match self.meanings.get(name)? {
            Meaning::Model(target) => Some(target.id),
            Meaning::Selector(..) => None,
        }
    }

    /// The target of a client's name, which `count` makes count before another choice is made.
    pub(super) fn chosen<T>(
        &self,
        name: &str,
        now: impl Fn(usize) -> TargetNow,
        count: impl FnOnce(&NamedModel) -> T,
    ) -> Option<T> {
        let meaning = self.profile.get(name).map_or_else(|| self.meanings.get(name), Option::as_ref);
        match meaning? {
            Meaning::Model(target) => Some(count(target)),
            Meaning::Selector(strategy, targets) => {
                let _one_at_a_time = self.choosing.lock().unwrap_or_else(PoisonError::into_inner);
                let states: Vec<TargetNow> = targets.iter().map(|target| now(target.id)).collect();
                targets.get(choice(*strategy, &states)?).map(count)
            }
        }
    }
}

/// `None` without targets.
fn choice(strategy: Strategy, targets: &[TargetNow]) -> Option<usize> {
    let is_usable = |nth: &usize| targets[*nth].stage != StageName::Quarantined;
    let usable = || (0..targets.len()).filter(is_usable);
    let chosen = match strategy {
        Strategy::Ready => usable().min_by_key(|nth| readiness(targets[*nth])),
        Strategy::First => usable().next(),
        Strategy::Spillover { requests } => usable()
            .find(|nth| targets[*nth].in_flight < requests)
            .or_else(|| usable().min_by_key(|nth| targets[*nth].in_flight)),
    };
    chosen.or_else(|| (!targets.is_empty()).then_some(0))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Readiness {
    Ready,
    Coming,
    Away,
}

fn readiness(target: TargetNow) -> Readiness {
    match target.stage {
        StageName::Ready => Readiness::Ready,
        StageName::FindingMemory
        | StageName::Resuming
        | StageName::Waking
        | StageName::Starting
        | StageName::Confirming
        | StageName::Canary
        | StageName::Measuring => Readiness::Coming,
        // Requests wait for it, so it comes when others have left.
        StageName::Unknown
        | StageName::Probing
        | StageName::Cold
        | StageName::Asleep
        | StageName::GoingIntoHibernation
        | StageName::Hibernating
            if target.in_flight > 0 =>
        {
            Readiness::Coming
        }
        _ => Readiness::Away,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(strategy: Strategy, targets: &[(StageName, usize)]) -> Option<usize> {
        let targets =
            targets.iter().map(|(stage, in_flight)| TargetNow { stage: *stage, in_flight: *in_flight });
        choice(strategy, &targets.collect::<Vec<_>>())
    }

    #[test]
    fn a_ready_target_comes_before_one_on_its_way() {
        use StageName::{Asleep, Cold, Draining, Quarantined, Ready, Waking};
        for (targets, wanted) in [
            (&[(Asleep, 0), (Waking, 1), (Ready, 9), (Ready, 0)][..], 2),
            (&[(Asleep, 0), (Draining, 3), (Waking, 1), (Cold, 0)], 2),
            (&[(Cold, 0), (Asleep, 1)], 1),
            (&[(Cold, 0), (Asleep, 0)], 0),
            (&[(Quarantined, 0), (Draining, 2), (Asleep, 0)], 1),
            (&[(Quarantined, 0), (Quarantined, 0)], 0),
        ] {
            assert_eq!(chosen(Strategy::Ready, targets), Some(wanted), "{targets:?}");
        }
        assert_eq!(chosen(Strategy::Ready, &[]), None);
    }

    #[test]
    fn the_first_is_passed_over_only_in_quarantine() {
        use StageName::{Asleep, Quarantined, Ready};
        assert_eq!(chosen(Strategy::First, &[(Asleep, 9), (Ready, 0)]), Some(0));
        assert_eq!(chosen(Strategy::First, &[(Quarantined, 0), (Asleep, 0)]), Some(1));
        assert_eq!(chosen(Strategy::First, &[(Quarantined, 0)]), Some(0));
    }

    #[test]
    fn targets_fill_one_behind_the_other_and_then_evenly() {
        use StageName::{Asleep, Quarantined, Ready};
        let spillover = Strategy::Spillover { requests: 2 };
        for (targets, wanted) in [
            (&[(Asleep, 1), (Ready, 0)][..], 0),
            (&[(Ready, 2), (Asleep, 0)], 1),
            (&[(Ready, 5), (Ready, 3), (Ready, 3)], 1),
            (&[(Quarantined, 0), (Ready, 4)], 1),
        ] {
            assert_eq!(chosen(spillover, targets), Some(wanted), "{targets:?}");
        }
    }
}
