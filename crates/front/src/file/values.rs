//! Types of values, and readable parse errors.

use std::fmt;
use std::time::Duration;

use poorwill_core::ByteSize;
use serde::de::{self, Deserialize, Deserializer, Visitor};
use strsim::osa_distance;

use super::error::ConfigError;
use super::place::FilePlace;
use crate::settings::KeyShare;

/// A misspelled key may have one wrong letter for each this many.
const LETTERS_EACH: usize = 3;

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
                u64::try_from(bytes).map(Size).map_err(|_| E::custom(format!("{bytes} is not a size")))
            }
        }
        deserializer.deserialize_any(SizeVisitor)
    }
}

/// Adds the place, and the nearest key if a key is unknown.
pub(super) fn explained(text: &str, error: &toml::de::Error) -> ConfigError {
    let place = error.span().map(|span| FilePlace::new(text, &span));
    let mut message = without_value(error.message());
    // The parser quotes the unknown key first, then the known ones.
    let mut quoted = error.message().split('`').skip(1).step_by(2);
    let is_unknown =
        ["unknown field", "unknown variant"].iter().any(|words| error.message().starts_with(words));
    if is_unknown && let Some(nearest) = quoted.next().and_then(|wrong| nearest(wrong, quoted)) {
        message = format!("{message}; did you mean `{nearest}`?");
    }
    ConfigError::Syntax { text: message, place }
}

/// The value of a wrong type may be a secret.
fn without_value(message: &str) -> String {
    let parts = message.strip_prefix("invalid type: ").and_then(|rest| rest.rsplit_once(", expected "));
    match parts {
        Some((found, expected)) => {
            let kind = found.split(['"', '`']).next().unwrap_or_default().trim_end();
            format!("invalid type: {kind}, expected {expected}")
        }
        None => message.to_owned(),
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
