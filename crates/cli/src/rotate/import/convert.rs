//! The whole of a llama-swap configuration: its models, who may use them, and how they share the GPUs.

use super::super::draft::{Draft, ModelDraft, literal, of_name};
use super::macros::Scope;
use super::matrix;
use super::model::{self, Usual, seconds};
use super::names;
use super::ports::Ports;
use super::selector;
use super::warnings::Warnings;
use super::yaml::{Entry, Mistake, Node, Yaml};

/// The highest that a model may have; the lowest is below zero by as much.
const PRIORITY_MAX: i64 = 3600;

#[derive(Debug)]
pub(super) struct Converted {
    pub(super) draft: Draft,
    /// With their places in the YAML.
    pub(super) warnings: Vec<String>,
}

/// # Errors
/// The first mistake that llama-swap would refuse, too.
pub(super) fn converted(file: &Node) -> Result<Converted, Mistake> {
    let Yaml::Map(entries) = &file.yaml else {
        return Mistake::at(file.place, "this is no configuration of llama-swap: it has no keys");
    };
    let scope = Scope::of_file(file)?;
    let mut warnings = Warnings::default();
    let mut draft = Draft {
        notes: vec![
            "Made from a configuration of llama-swap. `poorwill rotate check --config FILE` checks it."
                .to_owned(),
        ],
        ..Draft::default()
    };
    let Some(models) = file.get("models").filter(|models| !models.entries().is_empty()) else {
        return Mistake::at(file.place, "this is no configuration of llama-swap: it has no models");
    };
    for entry in entries {
        top_level(entry, &scope, &mut draft, &mut warnings)?;
    }
    let mut ports = Ports::new(models, file.get("startPort"), &scope)?;
    let usual = Usual {
        start_max: seconds(file.get("healthCheckTimeout"), &scope)?,
        stop_max: seconds(file.get("unloadTimeout"), &scope)?.filter(|seconds| *seconds > 0),
        idle_max: seconds(file.get("globalTTL"), &scope)?,
    };
    for entry in models.entries() {
        let port = ports.of(&entry.key);
        draft.models.extend(model::converted(entry, &scope, port, &usual, &mut warnings)?);
    }
    let places = models.entries().iter().map(|entry| (literal(&entry.key), entry.place)).collect();
    names::separate(&mut draft.models, &places, &mut warnings);
    ports.separate(&mut draft, &places, &mut warnings);
    if draft.models.is_empty() {
        return Mistake::at(models.place, "none of its models can be carried over");
    }
    shared(file, &scope, &mut draft.models, &mut warnings)?;
    for entry in file.get("selectors").map(Node::entries).unwrap_or_default() {
        draft.selectors.extend(selector::converted(entry, &scope, &draft.models, &mut warnings)?);
    }
    for entry in file.get("profiles").map(Node::entries).unwrap_or_default() {
        draft.profiles.extend(selector::profile(entry, &scope, &draft, &mut warnings)?);
    }
    let warnings = warnings.texts();
    if !warnings.is_empty() {
        draft.last_notes.push("Not carried over, or changed. Places are those of the YAML.".to_owned());
        draft.last_notes.extend(warnings.iter().map(|warning| format!("- {warning}")));
    }
    Ok(Converted { draft, warnings })
}

/// Keys of the file that concern no model.
fn top_level(
    entry: &Entry,
    scope: &Scope<'_>,
    draft: &mut Draft,
    warnings: &mut Warnings,
) -> Result<(), Mistake> {
    let reason = match entry.key.as_str() {
        // Looked at elsewhere.
        "unloadTimeout" if entry.value.text() == Some("0") => {
            "0 stands for ten seconds there; `stop_max` has its own default here"
        }
        "models" | "macros" | "startPort" | "healthCheckTimeout" | "unloadTimeout" | "globalTTL"
        | "hooks" | "groups" | "matrix" | "routing" | "selectors" | "profiles" => return Ok(()),
        "apiKeys" => return api_keys(entry, scope, draft, warnings),
        "logLevel" => "the variable POORWILL_LOG sets the level",
        "logToStdout" | "logRequests" | "logTimeFormat" => {
            "the service logs to standard error, and engines to the `log` of their model"
        }
        "metricsMaxInMemory" | "captureBuffer" | "store" | "performance" | "ui" => {
            "the page and /metrics of [control] have what there is"
        }
        "sendLoadingState" => "`keep_alive` of [front] sends comments to clients that wait for a stream",
        "includeAliasesInList" => "/v1/models lists aliases as it does",
        "upstream" => "engines are asked by the paths of their APIs only; `paths` of [front] adds some",
        "peers" => "all engines are at http://HOST:PORT, as models of their own",
        _ => "there is no such key in what this was written for",
    };
    warnings.lacks_counterpart(entry, reason);
    Ok(())
}

/// The keys themselves are not written down.
fn api_keys(
    entry: &Entry,
    scope: &Scope<'_>,
    draft: &mut Draft,
    warnings: &mut Warnings,
) -> Result<(), Mistake> {
    for (nth, key) in entry.value.items().iter().enumerate() {
        let text = scope.text(key.text().unwrap_or_default(), key.place)?;
        let variable = text.strip_prefix("${env.").and_then(|rest| rest.strip_suffix('}'));
        let is_one = |name: &&str| !name.contains(['$', '}']);
        let name = variable.filter(is_one).map_or_else(
            || {
                let name = format!("POORWILL_KEY_{}", nth + 1);
                warnings.add(
                    key.place,
                    &format!("set the variable {name} to this key of apiKeys; keys are not written down"),
                );
                name
            },
            str::to_owned,
        );
        draft.keys.push(format!("env:{name}"));
    }
    Ok(())
}

/// How models share the machine.
fn shared(
    file: &Node,
    scope: &Scope<'_>,
    models: &mut [ModelDraft],
    warnings: &mut Warnings,
) -> Result<(), Mistake> {
    let routing = file.get("routing");
    let settings =
        routing.and_then(|routing| routing.get("router")).and_then(|router| router.get("settings"));
    let named = |key: &str| file.get(key).or_else(|| settings.and_then(|settings| settings.get(key)));
    let preload =
        file.get("hooks").and_then(|hooks| hooks.get("on_startup")).and_then(|hook| hook.get("preload"));
    for name in preload.map(Node::items).unwrap_or_default() {
        let text = scope.text(name.text().unwrap_or_default(), name.place)?;
        match of_name(models, text.trim()) {
            Some(model) => model.rules.add("preload", true),
            None => warnings.add(name.place, &format!("preload names `{text}`, which is no model here")),
        }
    }
    for group in named("groups").map(Node::entries).unwrap_or_default() {
        self::group(group, scope, models, warnings)?;
    }
    if let Some(matrix) = named("matrix") {
        matrix::converted(matrix, scope, models, warnings)?;
    }
    let scheduler =
        routing.and_then(|routing| routing.get("scheduler")).and_then(|node| node.get("settings"));
    let priorities =
        scheduler.and_then(|settings| settings.get("fifo")).and_then(|fifo| fifo.get("priority"));
    for entry in priorities.map(Node::entries).unwrap_or_default() {
        let text = scope.text(entry.value.text().unwrap_or_default(), entry.value.place)?;
        match (of_name(models, &entry.key), text.parse::<i64>()) {
            (Some(model), Ok(priority)) => {
                let nearest = priority.clamp(-PRIORITY_MAX, PRIORITY_MAX);
                if nearest != priority {
                    let text =
                        format!("the priority of `{}` is {nearest}, the nearest to {priority}", entry.key);
                    warnings.add(entry.place, &text);
                }
                model.rules.add("priority", nearest);
            }
            (None, _) => {
                warnings.add(entry.place, &format!("priority names `{}`, which is no model here", entry.key));
            }
            (_, Err(_)) => return Mistake::at(entry.value.place, format!("`{text}` is no priority")),
        }
    }
    Ok(())
}

/// Models that no other may unload are pinned, and those that never unload each other are together.
fn group(
    group: &Entry,
    scope: &Scope<'_>,
    models: &mut [ModelDraft],
    warnings: &mut Warnings,
) -> Result<(), Mistake> {
    let is = |key: &str, usual: bool| {
        let text = group.value.get(key).and_then(Node::text);
        text.map_or(usual, |text| text.eq_ignore_ascii_case("true"))
    };
    let members = group.value.get("members").map(Node::items).unwrap_or_default().iter();
    let names = members.map(|member| scope.text(member.text().unwrap_or_default(), member.place));
    let names = names.collect::<Result<Vec<String>, Mistake>>()?;
    let is_pinned = is("persistent", false);
    if !is_pinned && !is("swap", true) {
        matrix::together("group", group, &names, models, warnings);
        return Ok(());
    }
    for name in names {
        match of_name(models, &name) {
            Some(model) if is_pinned => model.rules.add("pinned", true),
            Some(_) => {}
            None => {
                warnings.add(group.place, &format!("the group {} has no model here: {name}", group.key));
            }
        }
    }
    let fate = match is_pinned {
        true => ": its models are pinned, and all of them stay",
        false => " is not carried over: its models may stay together where their measured memory fits",
    };
    warnings.add(group.place, &format!("the group {}{fate}", group.key));
    Ok(())
}
