//! Types of values, and readable parse errors.

use std::fmt;
use std::time::Duration;

use poorwill_core::ByteSize;
use serde::de::{self, Deserialize, Deserializer, Visitor};
use strsim::osa_distance;

use super::error::ConfigError;
use super::place::FilePlace;
use super::tables::TableKeys;
use crate::settings::KeyShare;

/// A misspelled key may have one wrong letter for each this many.
const LETTERS_EACH: usize = 3;

/// Tables that one message names.
const HEADERS_MAX: usize = 2;

/// Short enough to be added to any `Instant`.
const WAIT_MAX: Duration = Duration::from_secs(366 * 24 * 3600);

/// An invalid value may be a key, so errors do not repeat it.
#[derive(Debug, Clone, Default)]
pub(super) struct KeySources(pub(super) Vec<KeySource>);

#[derive(Debug, Clone)]
pub(super) struct KeySource {
    pub(super) source: String,
    pub(super) share: Option<KeyShare>,
}

/// Such as `90s`, `1m 30s` or `250ms`.
#[derive(Debug, Clone, Copy)]
pub struct Wait(pub Duration);

/// Such as `40GiB`, or a number of bytes.
#[derive(Debug, Clone, Copy)]
pub struct Size(pub u64);

impl<'de> Deserialize<'de> for KeySources {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let otherwise = || {
            de::Error::custom(
                "keys are a list in brackets, like [\"env:NAME\", \"file:PATH\"], or with tables, like \
                 [{ source = \"env:NAME\", name = \"team\", requests_max = 64, priority = 5 }]; `source` and `name` are \
                 required, `requests_max` is at least 1, and `priority` is from -3600 to 3600",
            )
        };
        let toml::Value::Array(all) = toml::Value::deserialize(deserializer)? else {
            return Err(otherwise());
        };
        let sources = all.into_iter().map(|one| match one {
            toml::Value::String(source) => Ok(KeySource { source, share: None }),
            toml::Value::Table(table) => named_source(table).ok_or_else(otherwise),
            _ => Err(otherwise()),
        });
        sources.collect::<Result<_, _>>().map(Self)
    }
}

/// `None` if the table is not as it has to be.
fn named_source(mut table: toml::Table) -> Option<KeySource> {
    let mut text = |key| match table.remove(key) {
        Some(toml::Value::String(text)) => Some(text),
        _ => None,
    };
    let (source, name) = (text("source")?, text("name")?);
    let requests_max = match table.remove("requests_max") {
        None => None,
        Some(toml::Value::Integer(most)) => Some(usize::try_from(most).ok().filter(|most| *most > 0)?),
        Some(_) => return None,
    };
    let priority = match table.remove("priority") {
        None => 0,
        Some(toml::Value::Integer(points)) => {
            i32::try_from(points).ok().filter(|points| is_priority(*points))?
        }
        Some(_) => return None,
    };
    let is_plain = !name.trim().is_empty() && !name.contains(char::is_control);
    (is_plain && table.is_empty())
        .then_some(KeySource { source, share: Some(KeyShare { name, requests_max, priority }) })
}

/// Whether a priority is in its bounds. A point counts like a second of waiting, so more of them would be starvation.
#[must_use]
pub fn is_priority(points: i32) -> bool {
    (-3600..=3600).contains(&points)
}

impl<'de> Deserialize<'de> for Wait {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WaitVisitor;
        impl Visitor<'_> for WaitVisitor {
            type Value = Wait;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a length of time in quotes, like \"90s\" or \"250ms\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Wait, E> {
                let wait = humantime::parse_duration(text).map_err(|error| {
                    E::custom(format!(
                        "`{text}` is not a length of time: {error}; write it like 90s or 250ms"
                    ))
                })?;
                if wait > WAIT_MAX {
                    return Err(E::custom(format!(
                        "`{text}` is longer than a year; write it like 90s or 12h"
                    )));
                }
                Ok(Wait(wait))
            }
        }
        deserializer.deserialize_str(WaitVisitor)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SizeVisitor;
        impl Visitor<'_> for SizeVisitor {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size in quotes, like \"40GiB\", or a number of bytes")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
                text.parse::<ByteSize>().map(|size| Size(size.0)).map_err(E::custom)
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Size, E> {
                u64::try_from(bytes)
                    .map(Size)
                    .map_err(|_| E::custom(format!("{bytes} is not a size; write it like \"40GiB\"")))
            }
        }
        deserializer.deserialize_any(SizeVisitor)
    }
}

/// Adds the place. Of an unknown key it says the table that has it, or else the nearest key.
pub(super) fn explained(text: &str, error: &toml::de::Error, tables: &[TableKeys]) -> ConfigError {
    let place = error.span().map(|span| FilePlace::new(text, &span));
    let message = without_value(error.message());
    // The parser quotes the unknown key first, then the known ones.
    let mut quoted = error.message().split('`').skip(1).step_by(2);
    let is_key = error.message().starts_with("unknown field");
    let is_unknown = is_key || error.message().starts_with("unknown variant");
    let text = match quoted.next().filter(|_| is_unknown) {
        Some(wrong) => {
            let elsewhere = if is_key { tables } else { &[] };
            in_another_table(wrong, elsewhere).unwrap_or_else(|| match nearest(wrong, quoted) {
                Some(nearest) => format!("{message}; did you mean `{nearest}`?"),
                None => nearly_in_another_table(wrong, elsewhere)
                    .map_or(message, |meant| format!("unknown field `{wrong}`; did you mean {meant}?")),
            })
        }
        None => message,
    };
    ConfigError::Syntax { text, place }
}

/// For a key that is right, and stands below the wrong header.
fn in_another_table(key: &str, tables: &[TableKeys]) -> Option<String> {
    let headers: Vec<&str> =
        tables.iter().filter(|table| table.has(key)).map(TableKeys::header).take(HEADERS_MAX).collect();
    let all = headers.join(" or ");
    (!headers.is_empty()).then(|| format!("unknown field `{key}`: it belongs to {all}; put it there"))
}

fn nearly_in_another_table(wrong: &str, tables: &[TableKeys]) -> Option<String> {
    let near =
        |table: &TableKeys| nearest(wrong, table.keys()).map(|key| format!("`{key}` of {}", table.header()));
    tables.iter().find_map(near)
}

/// The value of a wrong type may be a secret. Types are in the words of the file, and what is missing is said.
fn without_value(message: &str) -> String {
    if let Some(field) = message.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
        return format!("missing field `{field}`; add {field} = … here");
    }
    if message == "invalid socket address syntax" {
        return "it is no address and port; write it like 127.0.0.1:8080, without a name of a host"
            .to_owned();
    }
    let is_value = |kind: &str| message.strip_prefix(kind)?.rsplit_once(", expected ");
    if let Some((found, expected)) = is_value("invalid type: ") {
        let kind = found.split(['"', '`']).next().unwrap_or_default().trim_end();
        return format!("invalid type: {kind}, expected {}", in_words(expected));
    }
    match is_value("invalid value: ") {
        Some((found, expected)) => format!("invalid value: {found}, expected {}", in_words(expected)),
        None => message.to_owned(),
    }
}

/// What a type of Rust is in a file.
fn in_words(expected: &str) -> &str {
    match expected {
        "a sequence" => "a list in brackets, like [\"a\", \"b\"] or [0, 1]",
        "usize" | "u8" | "u16" | "u32" | "u64" => "a whole number from 0 on",
        "i32" | "i64" => "a whole number",
        "f64" => "a number",
        "a boolean" => "true or false",
        "a string" | "path string" => "a text in quotes",
        "a map" => "a table",
        table if table.starts_with("struct ") => "a table",
        other => other,
    }
}

/// The one that was meant; `None` if none is similar enough.
pub fn nearest<'a>(wrong: &str, all: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let most = (wrong.chars().count() / LETTERS_EACH).max(1);
    let is_part = |one: &str| one.starts_with(wrong) || wrong.starts_with(one);
    let with_distance = all.map(|one| (if is_part(one) { 1 } else { osa_distance(wrong, one) }, one));
    with_distance.filter(|(distance, _)| *distance <= most).min().map(|(_, one)| one)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_similar_key_is_suggested() {
        let all = ["name", "aliases", "url"];
        assert_eq!(nearest("nmae", all.into_iter()), Some("name"));
        assert_eq!(nearest("aliasses", all.into_iter()), Some("aliases"));
        assert_eq!(nearest("temperature", all.into_iter()), None);
    }
}
