//! `${NAME}` in the texts of the file: its own macros, variables of the environment, a model's name and port.
//!
//! Texts are replaced after parsing. No value can become syntax, and places of mistakes stay those of the file. `$${`
//! stands for `${`, and what cannot be a name, such as `${A:-b}`, stays as it is.

use std::borrow::Cow;
use std::collections::BTreeMap;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::ConfigError;
use super::place::FilePlace;
use super::source::Secret;
use super::values;

/// The table of macros.
const TABLE: &str = "macros";
/// The name of the model that a text belongs to.
const MODEL: &str = "MODEL";
/// The port of its url.
const PORT: &str = "PORT";
/// The process that a command ends, which is known only then: it stays as it is.
const PID: &str = "PID";
/// Before the name of a variable.
const VARIABLE: &str = "env.";

/// Parses a file, or only a table of it, and replaces its macros. `secret` resolves variables, by `env:NAME`.
pub(super) fn parsed<'t>(
    text: &'t str,
    secret: Secret<'_>,
    only: Option<&str>,
) -> Result<Spanned<DeTable<'t>>, ConfigError> {
    let mut file = unreplaced(text)?;
    if let Some(table) = only {
        let names = file.get_ref().keys().map(|key| key.get_ref().as_ref().to_owned());
        let others: Vec<String> = names.filter(|name| ![TABLE, table].contains(&name.as_str())).collect();
        others.iter().for_each(|name| drop(file.get_mut().remove(name.as_str())));
    }
    let macros = Macros { text, secret, all: definitions(text, file.get_ref())? };
    for (key, value) in file.get_mut().iter_mut() {
        match (key.get_ref().as_ref(), value.get_mut()) {
            (TABLE, _) => {}
            ("model", DeValue::Array(models)) => {
                models.iter_mut().try_for_each(|model| macros.replace_in_model(model))?;
            }
            _ => macros.replace(value, &Scope::default())?,
        }
    }
    Ok(file)
}

/// Parses a file, and leaves its macros as they are.
pub(super) fn unreplaced(text: &str) -> Result<Spanned<DeTable<'_>>, ConfigError> {
    DeTable::parse(text).map_err(|error| values::explained(text, &error, &[]))
}

struct Macros<'m> {
    text: &'m str,
    secret: Secret<'m>,
    all: BTreeMap<String, String>,
}

/// What a text belongs to.
#[derive(Default)]
struct Scope {
    model: Option<String>,
    port: Option<u16>,
}

fn definitions(text: &str, file: &DeTable<'_>) -> Result<BTreeMap<String, String>, ConfigError> {
    let mut all = BTreeMap::new();
    let table = file.get(TABLE).and_then(|table| table.get_ref().as_table());
    for (key, value) in table.into_iter().flat_map(|table| table.iter()) {
        let name = key.get_ref().as_ref();
        let is_free = is_name(name) && !name.contains('.') && ![MODEL, PORT, PID].contains(&name);
        if !is_free {
            let reason = format!(
                "`{name}` cannot be the name of a macro: it has letters, digits, - and _, begins with a letter, and is \
                 none of {MODEL}, {PORT} and {PID}"
            );
            return Err(mistake(text, &key.span(), reason));
        }
        let written = match value.get_ref() {
            DeValue::String(value) => value.as_ref().to_owned(),
            DeValue::Integer(_) | DeValue::Float(_) | DeValue::Boolean(_) => {
                text.get(value.span()).unwrap_or_default().to_owned()
            }
            _ => {
                let reason = format!("the macro `{name}` is neither a text nor a number");
                return Err(mistake(text, &value.span(), reason));
            }
        };
        all.insert(name.to_owned(), written);
    }
    Ok(all)
}

impl Macros<'_> {
    /// The name and the url come first: the other values may mention them.
    fn replace_in_model(&self, model: &mut Spanned<DeValue<'_>>) -> Result<(), ConfigError> {
        let mut scope = Scope::default();
        if let DeValue::Table(table) = model.get_mut() {
            if let Some(name) = table.get_mut("name") {
                self.replace(name, &scope)?;
                scope.model = name.get_ref().as_str().map(str::to_owned);
            }
            if let Some(url) = table.get_mut("url") {
                self.replace(url, &scope)?;
                scope.port = url.get_ref().as_str().and_then(port_of);
            }
            let mut rest =
                table.iter_mut().filter(|(key, _)| !["name", "url"].contains(&key.get_ref().as_ref()));
            return rest.try_for_each(|(_, value)| self.replace(value, &scope));
        }
        self.replace(model, &scope)
    }

    /// In a value, and in all values that it contains.
    fn replace(&self, value: &mut Spanned<DeValue<'_>>, scope: &Scope) -> Result<(), ConfigError> {
        let span = value.span();
        match value.get_mut() {
            DeValue::String(text) if text.contains("${") => {
                let replaced = self.replaced(text, scope, &mut Vec::new());
                *text = Cow::Owned(replaced.map_err(|reason| mistake(self.text, &span, reason))?);
                Ok(())
            }
            DeValue::Array(values) => values.iter_mut().try_for_each(|value| self.replace(value, scope)),
            DeValue::Table(table) => table.iter_mut().try_for_each(|(_, value)| self.replace(value, scope)),
            _ => Ok(()),
        }
    }

    /// `within` are the macros whose texts this one is in.
    fn replaced(&self, text: &str, scope: &Scope, within: &mut Vec<String>) -> Result<String, String> {
        let (mut replaced, mut rest) = (String::new(), text);
        while let Some(at) = rest.find('$') {
            replaced.push_str(&rest[..at]);
            rest = &rest[at..];
            let name = rest.strip_prefix("${").and_then(|rest| rest.split_once('}')).map(|(name, _)| name);
            if let Some(name) = name.filter(|name| is_name(name)) {
                replaced.push_str(&self.value(name, scope, within)?);
                rest = &rest[name.len() + 3..];
            } else if let Some(after) = rest.strip_prefix("$${") {
                replaced.push_str("${");
                rest = after;
            } else {
                replaced.push('$');
                rest = &rest[1..];
            }
        }
        Ok(replaced + rest)
    }

    fn value(&self, name: &str, scope: &Scope, within: &mut Vec<String>) -> Result<String, String> {
        let of_model = |value: Option<String>, what: &str| {
            value.ok_or_else(|| format!("`${{{name}}}` is {what}, and there is none here; write it out"))
        };
        match name {
            PID => return Ok(format!("${{{PID}}}")),
            MODEL => return of_model(scope.model.clone(), "the name of its [[model]]"),
            PORT => {
                return of_model(
                    scope.port.map(|port| port.to_string()),
                    "the port in the url of its [[model]]",
                );
            }
            _ => {}
        }
        if let Some(variable) = name.strip_prefix(VARIABLE) {
            return (self.secret)(&format!("env:{variable}"))
                .map_err(|reason| format!("`${{{name}}}`: {reason}"));
        }
        let Some(text) = self.all.get(name) else {
            return Err(format!(
                "`${{{name}}}` is no macro; say {name} = \"…\" under [macros], `${{env.{name}}}` for a variable of the \
                 environment, or `$${{{name}}}` to keep it as it is"
            ));
        };
        if within.iter().any(|outer| outer == name) {
            return Err(format!("the macro `{name}` contains itself, by {}", within.join(", ")));
        }
        within.push(name.to_owned());
        let replaced = self.replaced(text, scope, within);
        within.pop();
        replaced
    }
}

fn is_name(text: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && text.chars().all(is_part)
}

fn port_of(url: &str) -> Option<u16> {
    url.trim_end_matches('/').rsplit_once(':')?.1.parse().ok()
}

fn mistake(text: &str, span: &std::ops::Range<usize>, reason: String) -> ConfigError {
    ConfigError::Syntax { text: reason, place: Some(FilePlace::new(text, span)) }
}
