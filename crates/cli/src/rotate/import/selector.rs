//! Names of a llama-swap configuration that stand for models: selectors, and profiles that an operator chooses.

use super::super::draft::{CardDraft, Draft, ModelDraft, ProfileDraft, SelectorDraft, literal};
use super::macros::Scope;
use super::model::{LISTED, seconds, table};
use super::warnings::Warnings;
use super::yaml::{Entry, Mistake, Node};

/// Keys of a selector that have a counterpart.
const KNOWN: [&str; 7] = ["strategy", "targets", "settings", "name", "description", "unlisted", "metadata"];

/// `None` for a selector that cannot be carried over, with a warning.
pub(super) fn converted(
    entry: &Entry,
    scope: &Scope<'_>,
    models: &[ModelDraft],
    warnings: &mut Warnings,
) -> Result<Option<SelectorDraft>, Mistake> {
    let here = format!("selector `{}`", entry.key);
    let text = |key: &str| {
        let node = entry.value.get(key).filter(|node| node.text().is_some_and(|text| !text.is_empty()));
        node.map(|node| scope.text(node.text().unwrap_or_default(), node.place)).transpose()
    };
    let (strategy, requests) = strategy(entry, scope, text("strategy")?.as_deref(), &here)?;
    if models.iter().any(|model| model.is_called(&literal(&entry.key))) {
        warnings.add(entry.place, &format!("{here} is not carried over: a model has its name"));
        return Ok(None);
    }
    for other in entry.value.entries().iter().filter(|other| !KNOWN.contains(&other.key.as_str())) {
        warnings
            .add(other.place, &format!("{here}: {} is not carried over: there is no counterpart", other.key));
    }
    let mut targets = Vec::new();
    for target in entry.value.get("targets").map(Node::items).unwrap_or_default() {
        let name = scope.text(target.text().unwrap_or_default(), target.place)?;
        if models.iter().any(|model| model.is_called(&name)) {
            targets.push(name);
        } else {
            warnings.add(target.place, &format!("{here}: its target `{name}` is no model here"));
        }
    }
    if targets.is_empty() {
        warnings
            .add(entry.place, &format!("{here} is not carried over: none of its targets is a model here"));
        return Ok(None);
    }
    let metadata = entry.value.get("metadata").filter(|node| !node.is_null());
    let card = CardDraft {
        display_name: text("name")?,
        description: text("description")?,
        is_unlisted: entry.value.get("unlisted").and_then(Node::text) == Some("true"),
        metadata: metadata
            .map(|node| table(scope, node, &here, &LISTED, warnings))
            .transpose()?
            .unwrap_or_default(),
    };
    Ok(Some(SelectorDraft { name: literal(&entry.key), targets, strategy, requests, card }))
}

/// Its name here, and the requests of a spillover.
fn strategy(
    entry: &Entry,
    scope: &Scope<'_>,
    named: Option<&str>,
    here: &str,
) -> Result<(&'static str, Option<i64>), Mistake> {
    Ok(match named {
        None | Some("warm") => ("ready", None),
        Some("pin") => ("first", None),
        Some("spillover") => {
            let settings = entry.value.get("settings");
            let requests = seconds(settings.and_then(|settings| settings.get("spillover")), scope)?;
            let requests = requests.and_then(|requests| i64::try_from(requests).ok());
            ("spillover", Some(requests.map_or(1, |requests| requests.max(1))))
        }
        Some(other) => {
            return Mistake::at(entry.place, format!("{here} has the strategy `{other}`, which is unknown"));
        }
    })
}

/// `None` as for a selector.
pub(super) fn profile(
    entry: &Entry,
    scope: &Scope<'_>,
    draft: &Draft,
    warnings: &mut Warnings,
) -> Result<Option<ProfileDraft>, Mistake> {
    let here = format!("profile `{}`", entry.key);
    if let Some(description) = entry.value.get("description") {
        warnings.add(description.place, &format!("{here}: its description is not carried over"));
    }
    let mut names = Vec::new();
    for pin in entry.value.get("pins").map(Node::entries).unwrap_or_default() {
        let target = scope.text(pin.value.text().unwrap_or_default(), pin.value.place)?;
        let is_selector = draft.selectors.iter().any(|selector| selector.name == target);
        if target.is_empty() || is_selector || draft.models.iter().any(|model| model.is_called(&target)) {
            names.push((pin.key.clone(), target));
        } else {
            warnings.add(
                pin.place,
                &format!("{here}: `{}` stands for `{target}`, which is no model here", pin.key),
            );
        }
    }
    if names.is_empty() {
        warnings.add(
            entry.place,
            &format!("{here} is not carried over: none of its names stands for a model here"),
        );
        return Ok(None);
    }
    Ok(Some(ProfileDraft { name: entry.key.clone(), names }))
}
