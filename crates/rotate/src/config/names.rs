//! What requests may say as their model: names of models and of selectors, each only once.

use std::collections::{BTreeMap, BTreeSet};

use poorwill_front::file::nearest;
use poorwill_front::settings::{Card, Mistakes, Parameters, SectionMistakes};
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
    /// Means nothing if there are mistakes.
    pub(super) fn checked(self, mistakes: &mut Mistakes) -> Selector {
        let here = &mut mistakes.of(selector(&self.name));
        let is_blank = self.name.trim().is_empty();
        here.add_if(is_blank, "its name is empty");
        odd_names([&self.name].into_iter().filter(|_| !is_blank)).for_each(|reason| here.add(reason));
        here.add_if(self.targets.is_empty(), "targets is empty; name the models that it chooses from");
        let strategy = match (self.strategy.unwrap_or(RawStrategy::Ready), self.requests) {
            (RawStrategy::Spillover, None) => {
                Err("strategy is \"spillover\", and requests is missing; say requests = 4")
            }
            (RawStrategy::Spillover, Some(0)) => {
                Err("requests is 0, and no target has fewer; make it larger")
            }
            (RawStrategy::Spillover, Some(requests)) => Ok(Strategy::Spillover { requests }),
            (_, Some(_)) => Err("requests is for strategy = \"spillover\"; leave it out"),
            (RawStrategy::Ready, None) => Ok(Strategy::Ready),
            (RawStrategy::First, None) => Ok(Strategy::First),
        };
        Selector {
            strategy: here.right(strategy.map_err(str::to_owned)).unwrap_or(Strategy::First),
            card: Card::checked(self.display_name, self.description, self.metadata, self.listed, here),
            name: self.name,
            targets: self.targets,
        }
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

    pub(super) fn check_names(&self, mistakes: &mut Mistakes) {
        let reason = "it has no model; say [[model]] with a name and a url";
        mistakes.of("the configuration").add_if(self.models.is_empty(), reason);
        let of_models =
            self.models.iter().flat_map(|model| model.names().map(|name| (name, section(&model.name))));
        let of_selectors = self.selectors.iter().map(|one| (&one.name, selector(&one.name)));
        let mut seen: BTreeMap<&str, String> = BTreeMap::new();
        let all = of_models.chain(of_selectors);
        for (name, owner) in all.filter(|(name, _)| !name.trim().is_empty()) {
            if let Some(other) = seen.insert(name, owner.clone()) {
                mistakes
                    .of(owner)
                    .add(format!("{other} has the name `{name}` as well; each name is for one of them"));
            }
        }
        for selector in &self.selectors {
            self.check_targets(selector, &seen, mistakes);
        }
        for (profile, names) in &self.profiles {
            check_profile(profile, names, &seen, &mut mistakes.of(format!("profile `{profile}`")));
        }
    }

    fn check_targets(&self, of: &Selector, names: &BTreeMap<&str, String>, mistakes: &mut Mistakes) {
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
            mistakes.of(selector(&of.name)).add(reason);
        }
    }
}

fn check_profile(
    profile: &str,
    all: &BTreeMap<String, String>,
    names: &BTreeMap<&str, String>,
    mistakes: &mut SectionMistakes<'_>,
) {
    let is_blank = |name: &str| name.trim().is_empty();
    mistakes.add_if(
        is_blank(profile) || all.keys().any(|name| is_blank(name)),
        "it has no name, or one of its names is empty",
    );
    odd_names(all.keys().filter(|name| !is_blank(name))).for_each(|reason| mistakes.add(reason));
    mistakes
        .add_if(all.is_empty(), "it is empty; say a name and what it stands for, like \"coder\" = \"qwen\"");
    for (name, target) in all.iter().filter(|(_, target)| !target.is_empty()) {
        let is_known = names.contains_key(target.as_str());
        let meant = meant(target, names);
        let reason =
            format!("`{name}` stands for `{target}`, which is no name of a model or selector{meant}");
        mistakes.add_if(!is_known, reason);
    }
}

/// The nearest name, for the end of an error.
fn meant(wrong: &str, names: &BTreeMap<&str, String>) -> String {
    let nearest = nearest(wrong, names.keys().copied());
    nearest.map(|name| format!("; did you mean `{name}`?")).unwrap_or_default()
}

/// Why names cannot be in a request, of those that cannot.
pub(super) fn odd_names<'a>(names: impl Iterator<Item = &'a String>) -> impl Iterator<Item = String> {
    let is_odd = |name: &&String| name.trim() != name.as_str() || name.contains(char::is_control);
    names.filter(is_odd).map(|odd| {
        format!("{odd:?} has blanks around it or control characters in it, and no request could say it")
    })
}

fn selector(name: &str) -> String {
    format!("selector `{name}`")
}
