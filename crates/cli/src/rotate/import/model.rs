//! One model of a llama-swap configuration.

use toml::{Table, Value};

use super::super::draft::{EngineDraft, ModelDraft, literal};
use super::super::engines::{CommandLine, EngineProgram, is_secret_name, without_secrets};
use super::address;
use super::command::words;
use super::macros::Scope;
use super::warnings::Warnings;
use super::yaml::{Entry, LineColumn, Mistake, Node, Yaml};

/// What entries of the list of models have already.
pub(super) const LISTED: [&str; 7] =
    ["id", "object", "created", "owned_by", "poorwill", "name", "description"];

/// Parts of the names of engines for sound and images.
const OTHER_MEDIA: [&str; 7] =
    ["whisper", "sd-server", "stable-diffusion", "audiocpp", "comfyui", "kokoro", "speaches"];

const PROXY: &str = "http://localhost:${PORT}";

/// What the file says for every model.
#[derive(Debug)]
pub(super) struct Usual {
    pub(super) start_max: Option<u64>,
    pub(super) stop_max: Option<u64>,
    pub(super) idle_max: Option<u64>,
}

/// `None` for a model that cannot be carried over, with a warning.
pub(super) fn converted<'y>(
    entry: &'y Entry,
    file: &Scope<'y>,
    port: Option<u16>,
    usual: &Usual,
    warnings: &mut Warnings,
) -> Result<Option<ModelDraft>, Mistake> {
    let mut scope = file.of_model(&entry.key, &entry.value)?;
    let here = format!("model `{}`", entry.key);
    let Some(cmd) =
        entry.value.get("cmd").filter(|cmd| cmd.text().is_some_and(|text| !text.trim().is_empty()))
    else {
        return Mistake::at(entry.place, format!("{here} has no cmd"));
    };
    scope.set_port(port.map(|port| port.to_string()));
    let mut model = ModelDraft::new(literal(&entry.key), String::new(), EngineDraft::Vllm { sleeps: false });
    let (command, left_out) = without_secrets(&words(&scope, cmd, &here)?);
    if !left_out.is_empty() {
        let options = left_out.join(", ");
        warnings.add(
            cmd.place,
            &format!("{here}: {options} is left out of its command: the service asks engines without a key"),
        );
    }
    model.command = command;
    match address(&scope, entry, &model, warnings)? {
        Ok(url) => model.url = url,
        Err((place, reason)) => {
            warnings.add(place, &format!("{here} is not carried over: {reason}"));
            return Ok(None);
        }
    }
    // So that a later change of the url is one of the command, too.
    if port.is_some_and(|port| model.url.ends_with(&format!(":{port}"))) {
        scope.set_port(Some("${PORT}".to_owned()));
        model.command = without_secrets(&words(&scope, cmd, &here)?).0;
    }
    environment(&scope, &entry.value, &here, &mut model, warnings)?;
    model.engine = engine(&scope, entry, &mut model, warnings)?;
    if let EngineDraft::Other { health, .. } = &model.engine {
        model.canary = canary(&scope, &entry.value, &model.command, health)?;
    }
    for (key, value) in rules(&scope, &entry.value, usual)? {
        model.rules.add(key, value);
    }
    let mut rest = Rest { scope: &scope, here: &here, model: &mut model, warnings };
    for entry in entry.value.entries() {
        rest.carry(entry)?;
    }
    Ok(Some(model))
}

/// Where its engine is, or the place and reason why that cannot be said.
fn address(
    scope: &Scope<'_>,
    entry: &Entry,
    model: &ModelDraft,
    warnings: &mut Warnings,
) -> Result<Result<String, (LineColumn, String)>, Mistake> {
    let here = format!("model `{}`", entry.key);
    let proxy = entry.value.get("proxy").filter(|proxy| !proxy.is_null());
    let (text, place) =
        proxy.map_or((PROXY, entry.place), |proxy| (proxy.text().unwrap_or_default(), proxy.place));
    if !scope.has_port() && scope.mentions(text, "PORT") {
        let Some(port) = address::said(&model.command) else {
            let reason = "its proxy has ${PORT}, and its cmd has neither that nor an option for a port";
            return Ok(Err((place, reason.to_owned())));
        };
        warnings.add(place, &format!("{here}: its proxy has no port; {port} is that of its command"));
        return Ok(Ok(format!("http://localhost:{port}")));
    }
    let (url, path) = match url(&scope.text(text, place)?) {
        Ok(url) => url,
        Err(reason) => return Ok(Err((place, format!("its proxy {reason}")))),
    };
    if !path.is_empty() {
        warnings.add(place, &format!("{here}: its engine is asked without {path}, the path of its proxy"));
    }
    Ok(Ok(url))
}

/// The URL's host and port, and the path behind them.
fn url(proxy: &str) -> Result<(String, String), String> {
    let Some(rest) = proxy.strip_prefix("http://") else {
        return Err("does not begin with http://".to_owned());
    };
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    if authority.contains('$') {
        return Err("has a variable in its address".to_owned());
    }
    let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let port = if has_port { "" } else { ":80" };
    Ok((format!("http://{authority}{port}"), path.trim_end_matches('/').to_owned()))
}

fn environment(
    scope: &Scope<'_>,
    table: &Node,
    here: &str,
    model: &mut ModelDraft,
    warnings: &mut Warnings,
) -> Result<(), Mistake> {
    for item in table.get("env").map(Node::items).unwrap_or_default() {
        let text = scope.text(item.text().unwrap_or_default(), item.place)?;
        let Some((name, value)) = text.split_once('=') else {
            warnings.add(
                item.place,
                &format!("{here}: `{text}` in its env has no value, and is not carried over"),
            );
            continue;
        };
        let is_secret = is_secret_name(name) && !value.starts_with("${env.");
        let value = if is_secret {
            warnings.add(
                item.place,
                &format!("{here}: set the variable {name} to what it is here; it may be a secret"),
            );
            format!("${{env.{name}}}")
        } else {
            value.to_owned()
        };
        model.environment.push((name.to_owned(), value));
    }
    let visible =
        model.environment.iter().find(|(name, _)| name == "CUDA_VISIBLE_DEVICES").map(|(_, value)| value);
    let gpus = visible
        .map(|list| list.split(',').map(|gpu| gpu.trim().parse().ok()).collect::<Option<Vec<usize>>>());
    model.gpus = gpus.flatten().filter(|gpus| !gpus.is_empty());
    if visible.is_none() {
        model.notes.push("Say which GPUs it is on, unless it is GPU 0 alone.".to_owned());
    }
    Ok(())
}

/// An engine with an adapter, or any other with its health check.
fn engine(
    scope: &Scope<'_>,
    entry: &Entry,
    model: &mut ModelDraft,
    warnings: &mut Warnings,
) -> Result<EngineDraft, Mistake> {
    let kind = CommandLine::of(&model.command).map(|line| (line.kind, line));
    if let Some((kind @ (EngineProgram::Vllm | EngineProgram::Sglang), line)) = kind {
        let has_option = kind.sleep_option().is_some_and(|option| line.has(option));
        let is_set = |(name, value): (&str, &str)| {
            model.environment.iter().any(|(variable, set)| variable == name && set == value)
        };
        let sleeps = has_option && kind.sleep_variable().is_none_or(is_set);
        if !sleeps {
            model.command_notes.push(format!(
                "It is stopped and started. To let it sleep instead, which is much faster, add {}, and remove \
                 sleeps = false.",
                kind.sleep_needs()
            ));
        }
        return Ok(if kind == EngineProgram::Vllm {
            EngineDraft::Vllm { sleeps }
        } else {
            EngineDraft::Sglang { sleeps }
        });
    }
    let node = entry.value.get("checkEndpoint").filter(|node| !node.is_null());
    let place = node.map_or(entry.place, |node| node.place);
    let path = scope.text(node.and_then(Node::text).unwrap_or("/health"), place)?;
    let health = match path.as_str() {
        "" => "/health".to_owned(),
        "none" => {
            warnings.add(
                place,
                &format!("model `{}` has no health check; /v1/models is asked instead", entry.key),
            );
            "/v1/models".to_owned()
        }
        path if path.starts_with('/') => path.to_owned(),
        path => format!("/{path}"),
    };
    Ok(EngineDraft::Other { health, calls: Vec::new() })
}

/// An engine without texts is asked for its health page, since no test request suits it.
fn canary(
    scope: &Scope<'_>,
    model: &Node,
    command: &[String],
    health: &str,
) -> Result<Vec<(&'static str, Value)>, Mistake> {
    let capabilities = model.get("capabilities").map(|node| scope.node(node)).transpose()?;
    let capability = |key: &str| capabilities.as_ref().and_then(|node| node.get(key));
    if capability("reranker").and_then(Node::text) == Some("true") {
        return Ok(vec![("kind", "rerank".into())]);
    }
    let out: Vec<&str> =
        capability("out").map(Node::items).unwrap_or_default().iter().filter_map(Node::text).collect();
    let has_no_text = !out.is_empty() && !out.contains(&"text");
    let is_known = |word: &String| OTHER_MEDIA.iter().any(|name| word.to_lowercase().contains(name));
    if has_no_text || out.is_empty() && command.iter().filter(|word| !word.starts_with('-')).any(is_known) {
        return Ok(vec![("kind", "get".into()), ("path", health.into())]);
    }
    Ok(Vec::new())
}

fn rules(scope: &Scope<'_>, model: &Node, usual: &Usual) -> Result<Vec<(&'static str, Value)>, Mistake> {
    let own = |key: &str| seconds(model.get(key), scope);
    // -1 stands for the file's, as 0 does for a time to stop; a ttl of 0 is none.
    let idle_max = own("ttl")?.or(usual.idle_max).filter(|seconds| *seconds > 0);
    let stop_max = own("unloadTimeout")?.filter(|seconds| *seconds > 0).or(usual.stop_max);
    let times = [
        ("idle_max", idle_max),
        ("start_max", usual.start_max.map(|wait| wait.max(15))),
        ("stop_max", stop_max),
    ];
    let mut rules: Vec<(&'static str, Value)> = times
        .into_iter()
        .filter_map(|(key, seconds)| Some((key, Value::from(format!("{}s", seconds?)))))
        .collect();
    let limit = seconds(model.get("concurrencyLimit"), scope)?.and_then(|limit| i64::try_from(limit).ok());
    rules.extend(limit.filter(|limit| *limit > 0).map(|limit| ("running_max", limit.into())));
    Ok(rules)
}

/// A whole number; `None` for -1 and where there is none.
pub(super) fn seconds(node: Option<&Node>, scope: &Scope<'_>) -> Result<Option<u64>, Mistake> {
    let Some((node, text)) = node.and_then(|node| Some((node, node.text()?))) else { return Ok(None) };
    let text = with_variables(&scope.text(text, node.place)?, node.place)?;
    match text.parse::<i64>().map(u64::try_from) {
        Ok(Ok(seconds)) => Ok(Some(seconds)),
        Ok(Err(_)) if text == "-1" => Ok(None),
        _ => Mistake::at(node.place, format!("`{text}` is no whole number")),
    }
}

/// Numbers cannot be variables in the new file.
fn with_variables(text: &str, place: LineColumn) -> Result<String, Mistake> {
    let Some(name) = text.strip_prefix("${env.").and_then(|rest| rest.strip_suffix('}')) else {
        return Ok(text.to_owned());
    };
    std::env::var(name)
        .or_else(|_| Mistake::at(place, format!("the variable {name} is not set, and a number is needed")))
}

/// The keys of a model that are names, texts and tables.
struct Rest<'r, 'y> {
    scope: &'r Scope<'y>,
    here: &'r str,
    model: &'r mut ModelDraft,
    warnings: &'r mut Warnings,
}

impl Rest<'_, '_> {
    fn carry(&mut self, entry: &Entry) -> Result<(), Mistake> {
        let value = &entry.value;
        let text = || self.scope.text(value.text().unwrap_or_default(), value.place);
        let is_filled = !value.is_null() && value.text() != Some("");
        match entry.key.as_str() {
            // Looked at elsewhere.
            "unloadTimeout" if value.text() == Some("0") => {
                let text =
                    format!("{}: unloadTimeout is 0, which is the file's; so is `stop_max` here", self.here);
                self.warnings.add(entry.place, &text);
            }
            "cmd" | "proxy" | "env" | "checkEndpoint" | "ttl" | "unloadTimeout" | "concurrencyLimit"
            | "macros" => {}
            _ if !is_filled => {}
            "useModelName" => self.model.served_as = Some(text()?),
            "aliases" => {
                for alias in value.items() {
                    let id = alias.get("id").unwrap_or(alias);
                    self.model.aliases.push(self.scope.text(id.text().unwrap_or_default(), id.place)?);
                    for entry in alias.entries().iter().filter(|entry| entry.key != "id") {
                        self.lacks(entry, "an alias is shown as its model is");
                    }
                }
            }
            "cmdStop" => self.model.stop_command = words(self.scope, value, self.here)?,
            "name" => self.model.card.display_name = Some(text()?),
            "description" => self.model.card.description = Some(text()?),
            "unlisted" => self.model.card.is_unlisted = value.text() == Some("true"),
            "metadata" => {
                self.model.card.metadata = table(self.scope, value, self.here, &LISTED, self.warnings)?;
            }
            "filters" => self.filters(value)?,
            "timeouts" => self.lacks(entry, "connections to engines have limits of their own"),
            "compat" => self.lacks(entry, "a websocket counts as a request"),
            "capabilities" => self.lacks(entry, "what an engine takes is asked from it"),
            "sendLoadingState" => self.lacks(entry, "`keep_alive` of [front] is for all models"),
            _ => self.lacks(entry, "there is no counterpart"),
        }
        Ok(())
    }

    fn lacks(&mut self, entry: &Entry, reason: &str) {
        let text = format!("{}: {} is not carried over: {reason}", self.here, entry.key);
        self.warnings.add(entry.place, &text);
    }

    fn filters(&mut self, filters: &Node) -> Result<(), Mistake> {
        for entry in filters.entries() {
            match entry.key.as_str() {
                "stripParams" | "strip_params" => {
                    let list = self.scope.text(entry.value.text().unwrap_or_default(), entry.value.place)?;
                    for name in list.split(',').map(str::trim).filter(|name| !["", "model"].contains(name)) {
                        if name == "stream" {
                            self.lacks(entry, "stream is the client's choice");
                        } else if !self.model.strip.iter().any(|one| one == name) {
                            self.model.strip.push(name.to_owned());
                        }
                    }
                }
                "setParams" => self.model.parameters = self.parameters(&entry.value)?,
                "setParamsByID" => {
                    for variant in entry.value.entries() {
                        let name = self.scope.text(&variant.key, variant.place)?;
                        let set = self.parameters(&variant.value)?;
                        self.model.variants.push((name, set));
                    }
                }
                _ => self.lacks(entry, "there is no counterpart"),
            }
        }
        // What is set, is set also where clients send something else.
        let set = &self.model.parameters;
        self.model.strip.retain(|name| !set.contains_key(name));
        Ok(())
    }

    fn parameters(&mut self, node: &Node) -> Result<Table, Mistake> {
        table(self.scope, node, self.here, &["model", "stream"], self.warnings)
    }
}

/// Without nulls, which TOML does not have, and without the keys of `refused`.
pub(super) fn table(
    scope: &Scope<'_>,
    node: &Node,
    here: &str,
    refused: &[&str],
    warnings: &mut Warnings,
) -> Result<Table, Mistake> {
    let mut table = Table::new();
    for entry in scope.node(node)?.entries() {
        let reason = match value(&entry.value) {
            _ if refused.contains(&entry.key.as_str()) => "it cannot be set here",
            None => "TOML has no null",
            Some(value) => {
                table.insert(entry.key.clone(), value);
                continue;
            }
        };
        warnings.add(entry.place, &format!("{here}: {} is not carried over: {reason}", entry.key));
    }
    Ok(table)
}

/// `None` for null.
fn value(node: &Node) -> Option<Value> {
    match &node.yaml {
        _ if node.is_null() => None,
        Yaml::Scalar { text, is_plain } => Some(scalar(text, *is_plain)),
        Yaml::List(items) => Some(Value::Array(items.iter().filter_map(value).collect())),
        Yaml::Map(entries) => {
            let entries = entries.iter().filter_map(|entry| Some((entry.key.clone(), value(&entry.value)?)));
            Some(Value::Table(entries.collect()))
        }
    }
}

fn scalar(text: &str, is_plain: bool) -> Value {
    let is_number = text.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
    match text {
        _ if !is_plain => Value::from(text),
        "true" | "True" | "TRUE" => Value::from(true),
        "false" | "False" | "FALSE" => Value::from(false),
        _ if is_number => match (text.parse::<i64>(), text.parse::<f64>()) {
            (Ok(integer), _) => Value::from(integer),
            (_, Ok(float)) if float.is_finite() => Value::from(float),
            _ => Value::from(text),
        },
        _ => Value::from(text),
    }
}
