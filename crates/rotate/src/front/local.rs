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

    pub(super) fn all(&self, backend: &dyn Backend) -> Bytes {
        let data: Vec<Value> = backend.listed().iter().map(|model| self.shown(model)).collect();
        json!({"object": "list", "data": data}).to_string().into()
    }

    pub(super) fn one(&self, backend: &dyn Backend, name: &str) -> Option<Bytes> {
        let all = backend.listed();
        let is_it = |model: &&Listed| model.name == name || model.aliases.iter().any(|alias| alias == name);
        all.iter().find(is_it).map(|model| self.shown(model).to_string().into())
    }

    fn shown(&self, model: &Listed) -> Value {
        json!({
            "id": model.name,
            "object": "model",
            "created": self.since,
            "owned_by": "poorwill",
            "poorwill": {"ready": model.is_ready, "stage": model.stage},
        })
    }
}
