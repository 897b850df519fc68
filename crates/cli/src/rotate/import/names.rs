//! Names of models: each stands for one model here, so that an alias that is a name already is dropped, with a note.

use std::collections::{BTreeMap, BTreeSet};

use super::super::draft::ModelDraft;
use super::warnings::Warnings;
use super::yaml::LineColumn;

/// Names come before variants, and these before aliases; earlier models before later ones.
pub(super) fn separate(
    models: &mut [ModelDraft],
    places: &BTreeMap<String, LineColumn>,
    warnings: &mut Warnings,
) {
    let mut taken: BTreeSet<String> = models.iter().map(|model| model.name.clone()).collect();
    for model in models.iter_mut() {
        let ModelDraft { name, variants, .. } = model;
        let place = places.get(name).copied().unwrap_or_default();
        // A variant of the model's own name changes its requests.
        variants.retain(|(variant, _)| {
            let is_free = variant == name || taken.insert(variant.clone());
            if !is_free {
                warnings.add(place, &format!("model `{name}`: its variant `{variant}` is dropped: {TAKEN}"));
            }
            is_free
        });
    }
    for model in models {
        let ModelDraft { name, aliases, variants, .. } = model;
        let place = places.get(name).copied().unwrap_or_default();
        aliases.retain(|alias| {
            let reason = if alias == name {
                "it is the model's own name"
            } else if alias.trim() != alias || alias.is_empty() || alias.contains(char::is_control) {
                "no request could say it"
            } else if variants.iter().any(|(variant, _)| variant == alias) {
                // The same name of the same model.
                return false;
            } else if taken.insert(alias.clone()) {
                return true;
            } else {
                TAKEN
            };
            warnings.add(place, &format!("model `{name}`: its alias {alias:?} is dropped: {reason}"));
            false
        });
    }
}

const TAKEN: &str = "it is a name already";
