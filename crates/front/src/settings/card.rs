//! What the list of models shows of a name.

use serde_json::{Map, Value};

use super::mistakes::SectionMistakes;
use super::parameters;

/// Fields of the list of models, besides those of metadata.
const LISTED: [(&str, &str); 7] = [
    ("id", "leave it out"),
    ("object", "leave it out"),
    ("created", "leave it out"),
    ("owned_by", "leave it out"),
    ("poorwill", "leave it out"),
    ("name", "say display_name instead"),
    ("description", "say description outside of metadata"),
];

/// What the list of models shows besides a name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Card {
    /// A name for people.
    pub display_name: Option<String>,
    /// A description for people.
    pub description: Option<String>,
    /// More fields of its entries.
    pub metadata: Map<String, Value>,
    /// Whether the list leaves it out.
    pub is_hidden: bool,
}

impl Card {
    /// As a configuration says it. Means nothing if there are mistakes.
    pub fn checked(
        display_name: Option<String>,
        description: Option<String>,
        metadata: toml::Table,
        is_listed: Option<bool>,
        mistakes: &mut SectionMistakes<'_>,
    ) -> Self {
        let is_blank = display_name.as_ref().is_some_and(|name| name.trim().is_empty());
        mistakes.add_if(is_blank, "display_name is empty; leave it out");
        for (field, instead) in LISTED.iter().filter(|(field, _)| metadata.contains_key(*field)) {
            mistakes.add(format!("metadata has `{field}`, which the list of models has already; {instead}"));
        }
        let field = |(field, value): (String, toml::Value)| {
            let value = parameters::json_of(value).map_err(|reason| format!("metadata: `{field}` {reason}"));
            Some((field, mistakes.right(value)?))
        };
        let metadata = metadata.into_iter().filter_map(field).collect();
        Self { display_name, description, metadata, is_hidden: is_listed == Some(false) }
    }
}
