//! What a model's requests have to say, or may not say.

use std::collections::BTreeSet;

use serde_json::{Map, Number, Value};

use super::mistakes::SectionMistakes;

/// Clients read answers by these, so they stay as the client wrote them.
const KEPT: [&str; 2] = ["model", "stream"];

/// Changes to the top level of a request's JSON body.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parameters {
    /// Fields with these values, whatever the client says.
    pub set: Map<String, Value>,
    /// Fields that are removed.
    pub strip: BTreeSet<String>,
}

impl Parameters {
    /// As a configuration says it. Means nothing if there are mistakes.
    pub fn checked(set: toml::Table, strip: Vec<String>, mistakes: &mut SectionMistakes<'_>) -> Self {
        let set = fields("parameters", set, mistakes);
        let mut all = BTreeSet::new();
        for field in strip {
            if let Err(reason) = check_field("strip", &field) {
                mistakes.add(reason);
                continue;
            }
            let is_set = set.contains_key(&field);
            let reason = format!("strip removes `{field}`, and parameters set it; leave out one of them");
            mistakes.add_if(is_set, reason);
            let reason = format!("strip has `{field}` twice");
            mistakes.add_if(!all.insert(field), reason);
        }
        Self { set, strip: all }
    }

    /// Whether bodies stay as they are.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.set.is_empty() && self.strip.is_empty()
    }

    /// Whether the client's own field is left out.
    #[must_use]
    pub fn replaces(&self, field: &str) -> bool {
        self.set.contains_key(field) || self.strip.contains(field)
    }

    /// With these fields as well, instead of those of the same name.
    #[must_use]
    pub fn with(mut self, set: &Map<String, Value>) -> Self {
        self.set.extend(set.iter().map(|(field, value)| (field.clone(), value.clone())));
        self
    }
}

/// The fields of a table, as JSON. `section` is for mistakes.
pub fn fields(section: &str, table: toml::Table, mistakes: &mut SectionMistakes<'_>) -> Map<String, Value> {
    let checked = |(field, value): (String, toml::Value)| {
        let value = check_field(section, &field)
            .and_then(|()| json_of(value).map_err(|reason| format!("{section}: `{field}` {reason}")));
        Some((field, mistakes.right(value)?))
    };
    table.into_iter().filter_map(checked).collect()
}

fn check_field(section: &str, field: &str) -> Result<(), String> {
    if field.is_empty() {
        return Err(format!("{section} has a field without a name"));
    }
    if KEPT.contains(&field) {
        return Err(format!(
            "{section} cannot have `{field}`, which is the client's own choice; leave it out"
        ));
    }
    Ok(())
}

/// JSON has fewer values than TOML.
pub(super) fn json_of(value: toml::Value) -> Result<Value, String> {
    Ok(match value {
        toml::Value::String(text) => text.into(),
        toml::Value::Integer(number) => number.into(),
        toml::Value::Float(number) => Number::from_f64(number)
            .ok_or_else(|| format!("is {number}, and JSON has no such number"))?
            .into(),
        toml::Value::Boolean(is_true) => is_true.into(),
        toml::Value::Datetime(time) => {
            return Err(format!("is the date {time}, and JSON has none; write it in quotes"));
        }
        toml::Value::Array(all) => all.into_iter().map(json_of).collect::<Result<_, _>>()?,
        toml::Value::Table(table) => {
            let inner = table.into_iter().map(|(key, value)| Ok::<_, String>((key, json_of(value)?)));
            Value::Object(inner.collect::<Result<_, _>>()?)
        }
    })
}
