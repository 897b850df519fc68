//! Which models run beside each other, and which leave last: llama-swap's matrix, and its groups without swaps.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::super::draft::{ModelDraft, literal, of_name};
use super::macros::Scope;
use super::model::seconds;
use super::warnings::Warnings;
use super::yaml::{Entry, Mistake, Node};

/// Sets without alternatives become `together`, the largest first, and costs weights.
pub(super) fn converted(
    matrix: &Node,
    scope: &Scope<'_>,
    models: &mut [ModelDraft],
    warnings: &mut Warnings,
) -> Result<(), Mistake> {
    let named = |name: &str| {
        let whole = matrix.get("vars").and_then(|vars| vars.get(name)).and_then(Node::text);
        whole.unwrap_or(name).to_owned()
    };
    for cost in matrix.get("evict_costs").map(Node::entries).unwrap_or_default() {
        let weight = seconds(Some(&cost.value), scope)?.and_then(|weight| u32::try_from(weight).ok());
        match (of_name(models, &named(&cost.key)), weight) {
            (Some(model), Some(weight)) => model.rules.add("keep_weight", i64::from(weight)),
            (Some(_), None) => {
                let text =
                    format!("evict_costs of `{}` is not carried over: a weight is 0 or more", cost.key);
                warnings.add(cost.place, &text);
            }
            (None, _) => {
                warnings
                    .add(cost.place, &format!("evict_costs names `{}`, which is no model here", cost.key));
            }
        }
    }
    let sets = matrix.get("sets").map(Node::entries).unwrap_or_default();
    let mut fixed = Vec::new();
    for set in sets {
        match members(sets, set.value.text().unwrap_or_default(), 0) {
            Some(names) => fixed.push((set, names.iter().map(|name| named(name)).collect::<Vec<_>>())),
            None => {
                let text = format!(
                    "the set {} is not carried over: it has alternatives; models stay together where their measured \
                     memory fits",
                    set.key
                );
                warnings.add(set.place, &text);
            }
        }
    }
    fixed.sort_by_key(|(_, names)| Reverse(names.len()));
    for (set, names) in fixed {
        together("set", set, &names, models, warnings);
    }
    Ok(())
}

/// `None` for a set with alternatives, or one that contains itself.
fn members(sets: &[Entry], text: &str, depth: usize) -> Option<Vec<String>> {
    if text.contains('|') || depth > sets.len() {
        return None;
    }
    let mut all = Vec::new();
    for word in text.split(['&', '(', ')']).map(str::trim).filter(|word| !word.is_empty()) {
        let more = match word.strip_prefix('+') {
            Some(name) => {
                let set = sets.iter().find(|set| set.key == name)?;
                members(sets, set.value.text()?, depth + 1)?
            }
            None => vec![word.to_owned()],
        };
        for name in more {
            if !all.contains(&name) {
                all.push(name);
            }
        }
    }
    Some(all)
}

/// A model is in one set here: the first that names it.
pub(super) fn together(
    kind: &str,
    set: &Entry,
    names: &[String],
    models: &mut [ModelDraft],
    warnings: &mut Warnings,
) {
    let is_free = |model: &ModelDraft| !model.rules.has("together");
    let mut own = BTreeSet::new();
    let mut others = Vec::new();
    for name in names {
        match models.iter().position(|model| model.is_called(name)) {
            Some(at) if is_free(&models[at]) => drop(own.insert(at)),
            _ => others.push(name.as_str()),
        }
    }
    let what = format!("the {kind} {}", set.key);
    if own.len() < 2 {
        let text =
            format!("{what} is not carried over: less than two of its models are here and in no other");
        warnings.add(set.place, &text);
        return;
    }
    if !others.is_empty() {
        let text = format!("{what} lacks models that are not here, or in another: {}", others.join(", "));
        warnings.add(set.place, &text);
    }
    let text = format!("{what}: its models are `together`, and wake together where memory is free");
    warnings.add(set.place, &text);
    for at in own {
        models[at].rules.add("together", literal(&set.key));
    }
}
