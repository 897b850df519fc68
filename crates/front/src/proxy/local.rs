//! Answers without an engine: the list of models.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde_json::{Map, Value, json};

use crate::backend::{Backend, Listed, NameKind};

/// In OpenAI's format.
#[derive(Debug)]
pub(super) struct Catalogue {
    /// `created` of every model, in seconds since 1970. Clients expect a number, which has no meaning here.
    since: u64,
}

impl Catalogue {
    pub(super) fn new() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |passed| passed.as_secs());
        Self { since }
    }

    /// Each name has an entry of its own, since clients offer what is listed.
    pub(super) fn all(&self, backend: &dyn Backend) -> Bytes {
        let names = backend.listed();
        let data: Vec<Value> =
            names.iter().filter(|one| !one.card.is_hidden).map(|one| self.shown(one)).collect();
        json!({"object": "list", "data": data}).to_string().into()
    }

    /// The same names, as Ollama's clients read them.
    pub(super) fn tags(&self, backend: &dyn Backend) -> Bytes {
        let names = backend.listed();
        let shown = names.iter().filter(|one| !one.card.is_hidden);
        let models: Vec<Value> = shown.map(|one| json!({"name": one.name, "model": one.name})).collect();
        json!({ "models": models }).to_string().into()
    }

    /// Also one that the list leaves out.
    pub(super) fn one(&self, backend: &dyn Backend, name: &str) -> Option<Bytes> {
        let all = backend.listed();
        all.iter().find(|one| one.name == name).map(|one| self.shown(one).to_string().into())
    }

    fn shown(&self, one: &Listed) -> Value {
        let mut own = json!({"ready": one.is_ready, "stage": one.stage});
        match &one.kind {
            NameKind::Model => {}
            NameKind::Alias { model } => own["alias_of"] = model.as_str().into(),
            NameKind::Adapter { model } => own["adapter_of"] = model.as_str().into(),
            NameKind::Selector { targets } => own["targets"] = targets.clone().into(),
        }
        let mut entry: Map<String, Value> = one.card.metadata.clone();
        for (key, value) in [
            ("id", one.name.as_str().into()),
            ("object", "model".into()),
            ("created", self.since.into()),
            ("owned_by", "poorwill".into()),
            ("poorwill", own),
        ] {
            entry.insert(key.to_owned(), value);
        }
        for (key, text) in [("name", &one.card.display_name), ("description", &one.card.description)] {
            entry.extend(text.as_ref().map(|text| (key.to_owned(), text.as_str().into())));
        }
        Value::Object(entry)
    }
}
