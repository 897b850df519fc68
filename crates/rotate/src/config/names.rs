//! What requests may say as their model: names of models and of selectors, each only once.

use std::collections::{BTreeMap, BTreeSet};

use poorwill_front::file::{ConfigError, invalid, nearest};
use poorwill_front::settings::{Card, Parameters};
use poorwill_rotation_policy::ModelId;
use serde::Deserialize;

use super::{Config, Model, section};

/// A name for several models, of which each request gets one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selector {
    /// The name in requests.
    pub name: String,
    /// Names of models, aliases or adapters, the preferred ones first.
    pub targets: Vec<String>,
    /// How one is chosen.
    pub strategy: Strategy,
    /// Its entry in the list of models.
    pub card: Card,
}

/// How a selector chooses. A quarantined target is passed over if another one is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// The first that is ready, or else on its way, or else the first.
    Ready,
    /// The first.
    First,
    /// The first with fewer requests, or else the one with the fewest.
    Spillover {
        /// Waiting and running ones.
        requests: usize,
    },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawSelector {
    name: String,
    #[serde(default)]
    targets: Vec<String>,
    strategy: Option<RawStrategy>,
    requests: Option<usize>,
    display_name: Option<String>,
    description: Option<String>,
    #[serde(default)]
    metadata: toml::Table,
    listed: Option<bool>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RawStrategy {
    Ready,
    First,
    Spillover,
}

impl RawSelector {
    pub(super) fn checked(self) -> Result<Selector, ConfigError> {
        let here = selector(&self.name);
        let invalid = |reason: &str| Err(invalid(&here, reason));
        if self.name.trim().is_empty() {
            return invalid("its name is empty");
        }
        if let Some(name) = odd_name([&self.name]) {
            return invalid(&name);
        }
        if self.targets.is_empty() {
            return invalid("targets is empty; name the models that it chooses from");
        }
        let strategy = match (self.strategy.unwrap_or(RawStrategy::Ready), self.requests) {
            (RawStrategy::Spillover, None) => {
                return invalid("strategy is \"spillover\", and requests is missing; say requests = 4");
            }
            (RawStrategy::Spillover, Some(0)) => {
                return invalid("requests is 0, and no target has fewer; make it larger");
            }
            (RawStrategy::Spillover, Some(requests)) => Strategy::Spillover { requests },
            (_, Some(_)) => return invalid("requests is for strategy = \"spillover\"; leave it out"),
            (RawStrategy::Ready, None) => Strategy::Ready,
            (RawStrategy::First, None) => Strategy::First,
        };
        let card = Card::checked(self.display_name, self.description, self.metadata, self.listed);
        let card = card.map_err(|reason| super::invalid(&here, &reason))?;
        Ok(Selector { name: self.name, targets: self.targets, strategy, card })
    }
}

impl Model {
    /// All names in requests.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        [&self.name].into_iter().chain(&self.aliases).chain(&self.adapters)
    }

    /// The name that the engine uses for one of [`names`](Self::names).
    #[must_use]
    pub fn served_as<'a>(&'a self, name: &'a str) -> &'a str {
        if self.adapters.iter().any(|adapter| adapter == name) { name } else { &self.served_as }
    }

    /// The parameters of requests that say this name.
    #[must_use]
    pub fn parameters_of(&self, name: &str) -> Parameters {
        match self.variants.get(name) {
            Some(set) => self.parameters.clone().with(set),
            None => self.parameters.clone(),
        }
    }
}

impl Config {
    /// The model with this name, alias or adapter.
    #[must_use]
    pub fn model(&self, name: &str) -> Option<ModelId> {
        self.models.iter().position(|model| model.names().any(|one| one == name)).map(ModelId)
    }

    pub(super) fn check_names(&self) -> Result<(), ConfigError> {
        if self.models.is_empty() {
            return Err(invalid("the configuration", "it has no model; say [[model]] with a name and a url"));
        }
        let of_models =
            self.models.iter().flat_map(|model| model.names().map(|name| (name, section(&model.name))));
        let of_selectors = self.selectors.iter().map(|one| (&one.name, selector(&one.name)));
        let mut seen: BTreeMap<&str, String> = BTreeMap::new();
        for (name, owner) in of_models.chain(of_selectors) {
            if let Some(other) = seen.insert(name, owner.clone()) {
                return Err(invalid(&owner, &format!("{other} has the name `{name}` as well")));
            }
        }
        self.selectors.iter().try_for_each(|selector| self.check_targets(selector, &seen))?;
        self.profiles.iter().try_for_each(|(profile, names)| check_profile(profile, names, &seen))
    }

    fn check_targets(&self, of: &Selector, names: &BTreeMap<&str, String>) -> Result<(), ConfigError> {
        let mut seen = BTreeSet::new();
        for target in &of.targets {
            let is_selector = || self.selectors.iter().any(|other| other.name == *target);
            let reason = if !names.contains_key(target.as_str()) {
                format!("targets has `{target}`, which is no name of a model{}", meant(target, names))
            } else if is_selector() {
                format!("targets has `{target}`, which is a selector; name the models themselves")
            } else if !seen.insert(target) {
                format!("targets has `{target}` twice")
            } else {
                continue;
            };
            return Err(invalid(&selector(&of.name), &reason));
        }
        Ok(())
    }
}

fn check_profile(
    profile: &str,
    all: &BTreeMap<String, String>,
    names: &BTreeMap<&str, String>,
) -> Result<(), ConfigError> {
    let invalid = |reason: &str| Err(invalid(&format!("profile `{profile}`"), reason));
    if profile.trim().is_empty() || all.keys().any(|name| name.trim().is_empty()) {
        return invalid("it has no name, or one of its names is empty");
    }
    if let Some(reason) = odd_name(all.keys()) {
        return invalid(&reason);
    }
    if all.is_empty() {
        return invalid("it is empty; say a name and what it stands for, like \"coder\" = \"qwen\"");
    }
    let unknown = all.iter().find(|(_, target)| !target.is_empty() && !names.contains_key(target.as_str()));
    match unknown {
        Some((name, target)) => invalid(&format!(
            "`{name}` stands for `{target}`, which is no name of a model or selector{}",
            meant(target, names)
        )),
        None => Ok(()),
    }
}

/// The nearest name, for the end of an error.
fn meant(wrong: &str, names: &BTreeMap<&str, String>) -> String {
    let nearest = nearest(wrong, names.keys().copied());
    nearest.map(|name| format!("; did you mean `{name}`?")).unwrap_or_default()
}

/// Why a name cannot be in a request, if it cannot.
pub(super) fn odd_name<'a>(names: impl IntoIterator<Item = &'a String>) -> Option<String> {
    let is_odd = |name: &&String| name.trim() != name.as_str() || name.contains(char::is_control);
    let odd = names.into_iter().find(is_odd)?;
    Some(format!("{odd:?} has blanks around it or control characters in it, and no request could say it"))
}

fn selector(name: &str) -> String {
    format!("selector `{name}`")
}
