//! Which model made which response of OpenAI's Responses API, so that later requests find it by its identifier.
//!
//! Promises: the identifier is read as the answer passes, before its client sees it, and no byte is delayed. The newest
//! `RESPONSES_MAX` are known, until the service ends, with the engine or node that made each. A response belongs to the name of the key that made it; for
//! others it is unknown, also as a `previous_response_id`.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};

use serde::Deserialize;

use super::api_error::ApiError;
use super::json;
use crate::affinity::hash;

/// Where responses are made.
pub(super) const RESPONSES: &str = "/v1/responses";
/// An entry takes about 60 bytes.
const RESPONSES_MAX: usize = 65_536;
/// How far into an answer its identifier may be.
const HEAD_BYTES: usize = 64 << 10;

/// All known responses.
#[derive(Debug, Default)]
pub(super) struct StoredResponses {
    keys: RandomState,
    known: Mutex<Known>,
}

/// Identifiers and owners are hashes, which take less memory.
#[derive(Debug, Default)]
struct Known {
    by_id: HashMap<u64, Stored>,
    /// The oldest first.
    order: VecDeque<u64>,
    /// All models that ever made one.
    models: Vec<Arc<str>>,
}

#[derive(Debug, Clone, Copy)]
struct Stored {
    owner: u64,
    /// Its position in `models`.
    model: usize,
    /// Of the URL that it came from.
    place: u64,
}

/// What a request for a new response says about stored ones.
#[derive(Debug, Deserialize)]
struct StoreFields {
    store: Option<bool>,
    previous_response_id: Option<String>,
}

/// A request for a new response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NewResponse {
    pub(super) is_stored: bool,
    /// Where the one was made that it goes on from, as far as known.
    pub(super) previous_place: Option<u64>,
}

/// Finds the identifier in an answer.
#[derive(Debug)]
pub(super) struct IdReader {
    responses: Arc<StoredResponses>,
    model: String,
    owner: Option<String>,
    place: u64,
    head: Vec<u8>,
    is_over: bool,
}

impl StoredResponses {
    fn remember(&self, id: &str, model: &str, owner: Option<&str>, place: u64) {
        let (id, owner) = (self.keys.hash_one(id), self.keys.hash_one(owner));
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        // Some engines let clients choose ids, and one's own stays one's own.
        if known.by_id.get(&id).is_some_and(|stored| stored.owner != owner) {
            return;
        }
        let position = known.models.iter().position(|one| **one == *model);
        let model = position.unwrap_or_else(|| {
            known.models.push(model.into());
            known.models.len() - 1
        });
        if known.by_id.insert(id, Stored { owner, model, place }).is_none() {
            known.order.push_back(id);
        }
        if known.order.len() > RESPONSES_MAX
            && let Some(oldest) = known.order.pop_front()
        {
            known.by_id.remove(&oldest);
        }
    }

    /// The model of a response of this owner, and the hash of the URL that it came from.
    pub(super) fn maker_of(&self, id: &str, owner: Option<&str>) -> Option<(Arc<str>, u64)> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let stored = known.by_id.get(&self.keys.hash_one(id))?;
        let is_it = stored.owner == self.keys.hash_one(owner);
        is_it.then(|| (Arc::clone(&known.models[stored.model]), stored.place))
    }

    fn is_of_another(&self, id: &str, owner: Option<&str>) -> bool {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let stored = known.by_id.get(&self.keys.hash_one(id));
        stored.is_some_and(|stored| stored.owner != self.keys.hash_one(owner))
    }

    /// What a body says of stored responses.
    pub(super) fn read(&self, body: &[u8], owner: Option<&str>) -> Result<NewResponse, ApiError> {
        let fields: StoreFields =
            serde_json::from_slice(body).map_err(|error| ApiError::bad(error.to_string()))?;
        let previous = fields.previous_response_id;
        if let Some(previous) = previous.as_deref().filter(|id| self.is_of_another(id, owner)) {
            return Err(ApiError::no_response(previous));
        }
        let maker = previous.and_then(|previous| self.maker_of(&previous, owner));
        Ok(NewResponse {
            is_stored: fields.store.unwrap_or(true),
            previous_place: maker.map(|(_, place)| place),
        })
    }

    /// For a response of this model that is to be stored.
    pub(super) fn reader(self: &Arc<Self>, model: &str, owner: Option<&str>) -> IdReader {
        IdReader {
            responses: Arc::clone(self),
            model: model.to_owned(),
            owner: owner.map(str::to_owned),
            place: 0,
            head: Vec::new(),
            is_over: false,
        }
    }
}

impl IdReader {
    /// For an answer that comes from this URL.
    pub(super) fn at_url(self, url: &str) -> Self {
        Self { place: hash(url.as_bytes()), ..self }
    }

    pub(super) fn push(&mut self, data: &[u8]) {
        if self.is_over {
            return;
        }
        let left = HEAD_BYTES - self.head.len();
        self.head.extend_from_slice(&data[..data.len().min(left)]);
        let id = id_in(&self.head);
        if let Some(id) = &id {
            self.responses.remember(id, &self.model, self.owner.as_deref(), self.place);
        }
        if id.is_some() || self.head.len() == HEAD_BYTES {
            self.is_over = true;
            self.head = Vec::new();
        }
    }
}

/// Of a whole response, or of the first event that has one. Both may be cut anywhere.
fn id_in(head: &[u8]) -> Option<String> {
    let head = head.trim_ascii_start();
    if head.starts_with(b"{") {
        return id_of(head);
    }
    let events = head.split(|byte| *byte == b'\n').filter_map(|line| line.strip_prefix(b"data:"));
    events.into_iter().find_map(|event| id_of(event.get(json::value_at(event, "response")?..)?))
}

fn id_of(response: &[u8]) -> Option<String> {
    let value = response.get(json::value_at(response, "id")?..)?;
    String::deserialize(&mut serde_json::Deserializer::from_slice(value)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_found_as_soon_as_they_have_come() {
        for (answer, wanted) in [
            (r#"{"id":"resp_1","object":"response"}"#, Some("resp_1")),
            (r#" {"output":[{"id":"msg_1","x":"\"id\":\"resp_0\""}],"id" : "resp_1"}"#, Some("resp_1")),
            (
                "event: response.created\ndata: {\"response\":{\"tools\":[],\"id\":\"resp_1\"},\"type\":\"response.created\"}\n\n",
                Some("resp_1"),
            ),
            (
                ": waiting\r\n\r\ndata: {\"type\":\"ping\"}\r\n\r\ndata:{\"response\":{\"id\":\"resp_1\"}}\r\n\r\n",
                Some("resp_1"),
            ),
            (r#"{"object":"response"}"#, None),
            (r#"{"id":7}"#, None),
            ("data: {\"id\":\"item_1\"}\n\n", None),
            ("audio", None),
        ] {
            assert_eq!(id_in(answer.as_bytes()).as_deref(), wanted, "{answer}");
            let found: Vec<_> =
                (0..answer.len()).filter_map(|end| id_in(&answer.as_bytes()[..end])).collect();
            assert!(found.iter().all(|id| Some(id.as_str()) == wanted), "{answer}: {found:?}");
        }
    }

    #[test]
    fn the_newest_are_known_to_their_owners() {
        let all = Arc::new(StoredResponses::default());
        for nth in 0..RESPONSES_MAX + 10 {
            all.remember(&format!("resp_{nth}"), "a", None, 0);
        }
        assert_eq!(all.maker_of("resp_9", None), None);
        assert_eq!(all.maker_of("resp_10", None), Some(("a".into(), 0)));
        all.remember("resp_x", "b", Some("one"), 7);
        assert_eq!(all.maker_of("resp_x", Some("one")), Some(("b".into(), 7)));
        assert_eq!(all.maker_of("resp_x", Some("two")), None);
        assert_eq!(all.maker_of("resp_x", None), None);
        // Another key cannot take it over.
        all.remember("resp_x", "a", Some("two"), 8);
        assert_eq!(all.maker_of("resp_x", Some("one")), Some(("b".into(), 7)));
        assert_eq!(all.maker_of("resp_x", Some("two")), None);
        let known = all.known.lock().unwrap();
        assert_eq!(
            (known.by_id.len(), known.order.len(), known.models.len()),
            (RESPONSES_MAX, RESPONSES_MAX, 2)
        );
    }

    #[test]
    fn what_is_not_to_be_stored_is_not_read() {
        let all = Arc::new(StoredResponses::default());
        let reads = |body: &str, owner| all.read(body.as_bytes(), owner).map(|new| new.is_stored);
        for (body, wanted) in [
            ("{}", true),
            (r#"{"store":null}"#, true),
            (r#"{"store":true}"#, true),
            (r#"{"store":false}"#, false),
        ] {
            assert_eq!(reads(body, None).ok(), Some(wanted), "{body}");
        }
        for body in [r#"{"store":1}"#, r#"{"previous_response_id":"a","previous_response_id":"b"}"#] {
            assert!(reads(body, None).is_err(), "{body}");
        }
        let mut reader = all.reader("a", Some("one")).at_url("http://one");
        reader.push(br#"{"id":"re"#);
        reader.push(br#"sp_1""#);
        reader.push(&vec![b' '; 2 * HEAD_BYTES]);
        assert!(reader.is_over && reader.head.is_empty());
        let next = r#"{"previous_response_id":"resp_1"}"#;
        assert_eq!(reads(next, Some("one")).ok(), Some(true));
        let place = all.read(next.as_bytes(), Some("one")).unwrap().previous_place;
        assert_eq!(place, Some(hash(b"http://one")));
        assert!(reads(next, Some("two")).is_err() && reads(next, None).is_err());
    }
}
