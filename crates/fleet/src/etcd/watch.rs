//! Watching a prefix: every change from a revision on, in order.

use serde::Deserialize;
use serde_json::json;

use super::client::Etcd;
use super::entry::Entry;
use super::error::EtcdError;
use super::hints::hinted;
use super::http::Lines;
use super::wire::{KeyValue, encoded, end_of, number};

/// A watch.
#[derive(Debug)]
pub struct Watch {
    lines: Lines,
}

/// What a watch tells of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Watched {
    /// These changes, in order; none at first.
    Changes(Vec<Event>),
    /// It has ended: etcd has forgotten what came first, or does not say why. All has to be read again.
    Ended,
}

/// A change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// It was written.
    Put(Entry),
    /// The key was removed, or its lease ended.
    Removed {
        /// The key.
        key: String,
        /// When.
        revision: u64,
    },
}

#[derive(Deserialize)]
struct Answer {
    result: Option<Answered>,
}

#[derive(Deserialize)]
struct Answered {
    #[serde(default)]
    canceled: bool,
    #[serde(default)]
    cancel_reason: String,
    #[serde(default, deserialize_with = "number")]
    compact_revision: u64,
    #[serde(default)]
    events: Vec<EventRead>,
}

#[derive(Deserialize)]
struct EventRead {
    #[serde(default, rename = "type")]
    kind: String,
    kv: KeyValue,
}

impl From<EventRead> for Event {
    fn from(event: EventRead) -> Self {
        let entry = Entry::from(event.kv);
        match event.kind == "DELETE" {
            true => Self::Removed { key: entry.key, revision: entry.mod_revision },
            false => Self::Put(entry),
        }
    }
}

impl Event {
    /// When it was.
    #[must_use]
    pub fn revision(&self) -> u64 {
        match self {
            Self::Put(entry) => entry.mod_revision,
            Self::Removed { revision, .. } => *revision,
        }
    }
}

impl Etcd {
    /// Watches all keys with this prefix, from this revision on.
    ///
    /// # Errors
    /// See [`EtcdError`].
    pub async fn watch(&self, prefix: &str, from_revision: u64) -> Result<Watch, EtcdError> {
        let body = json!({ "create_request": {
            "key": encoded(prefix.as_bytes()), "range_end": encoded(&end_of(prefix.as_bytes())),
            "start_revision": from_revision.to_string(),
        }});
        Ok(Watch { lines: self.stream("/v3/watch", &body).await? })
    }
}

impl Watch {
    /// The next changes. A dropped future loses nothing.
    ///
    /// # Errors
    /// The connection broke, etcd refuses the watch, or what came is none of etcd's.
    pub async fn next(&mut self) -> Result<Watched, EtcdError> {
        let Some(Answer { result: Some(answered) }) = self.lines.next().await? else {
            return Ok(Watched::Ended);
        };
        match (answered.canceled, &*answered.cancel_reason) {
            (true, reason) if answered.compact_revision == 0 && !reason.is_empty() => {
                Err(EtcdError::WatchRefused { reason: hinted("", reason.to_owned(), 0) })
            }
            (false, _) if answered.compact_revision == 0 => {
                Ok(Watched::Changes(answered.events.into_iter().map(Event::from).collect()))
            }
            _ => Ok(Watched::Ended),
        }
    }
}
