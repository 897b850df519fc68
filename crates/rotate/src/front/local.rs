//! Answers without an engine: the list of models.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde_json::{Value, json};

use super::{Backend, Listed};

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

    /// Aliases have entries of their own, since clients offer what is listed.
    pub(super) fn all(&self, backend: &dyn Backend) -> Bytes {
        let models = backend.listed();
        let names = models.iter().flat_map(|model| {
            [&model.name].into_iter().chain(&model.aliases).map(move |name| self.shown(model, name))
        });
        let data: Vec<Value> = names.collect();
        json!({"object": "list", "data": data}).to_string().into()
    }

    pub(super) fn one(&self, backend: &dyn Backend, name: &str) -> Option<Bytes> {
        let all = backend.listed();
        let is_it = |model: &&Listed| model.name == name || model.aliases.iter().any(|alias| alias == name);
        all.iter().find(is_it).map(|model| self.shown(model, name).to_string().into())
    }

    fn shown(&self, model: &Listed, name: &str) -> Value {
        let mut own = json!({"ready": model.is_ready, "stage": model.stage});
        if name != model.name {
            own["alias_of"] = model.name.as_str().into();
        }
        json!({
            "id": name,
            "object": "model",
            "created": self.since,
            "owned_by": "poorwill",
            "poorwill": own,
        })
    }
}
