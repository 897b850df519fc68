//! JSON of the gateway, for its client and for a store: bytes are base64, and numbers of 64 bits are text. What is zero or
//! empty is left out.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::entry::Entry;

pub(crate) fn encoded(bytes: &[u8]) -> Value {
    STANDARD.encode(bytes).into()
}

/// The end of a range that has all keys with this prefix.
pub(super) fn end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // All keys from there on.
    vec![0]
}

pub(crate) fn decoded<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
    let text = String::deserialize(deserializer)?;
    STANDARD.decode(text).map(Bytes::from).map_err(serde::de::Error::custom)
}

/// The gateway takes bare numbers as well.
pub(crate) fn number<'de, D, N>(deserializer: D) -> Result<N, D::Error>
where
    D: Deserializer<'de>,
    N: std::str::FromStr<Err: std::fmt::Display>,
{
    let text = match Value::deserialize(deserializer)? {
        Value::String(text) => text,
        other => other.to_string(),
    };
    text.parse().map_err(|error| serde::de::Error::custom(format!("`{text}`: {error}")))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Header {
    #[serde(deserialize_with = "number")]
    pub(super) cluster_id: u64,
    #[serde(deserialize_with = "number")]
    pub(super) revision: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct KeyValue {
    #[serde(deserialize_with = "decoded")]
    pub(super) key: Bytes,
    #[serde(deserialize_with = "decoded")]
    value: Bytes,
    #[serde(deserialize_with = "number")]
    create_revision: u64,
    #[serde(deserialize_with = "number")]
    mod_revision: u64,
    #[serde(deserialize_with = "number")]
    lease: i64,
}

impl From<KeyValue> for Entry {
    fn from(raw: KeyValue) -> Self {
        let KeyValue { key, value, create_revision, mod_revision, lease } = raw;
        // A key that is no text is none of ours, and is named in an error.
        let key = String::from_utf8_lossy(&key).into_owned();
        Self { key, value, create_revision, mod_revision, lease }
    }
}

#[test]
fn prefixes_end_behind_their_last_key() {
    assert_eq!(end_of(b"/a/"), b"/a0");
    assert_eq!(end_of(b"a\xff\xff"), b"b");
    assert_eq!(end_of(b"\xff"), [0]);
    assert_eq!(end_of(b""), [0]);
}

#[test]
fn numbers_are_text_and_absent_if_zero() {
    let read = |json: &str| serde_json::from_str::<KeyValue>(json).map(Entry::from);
    let entry = read(r#"{"key": "L2E=", "mod_revision": "2"}"#).unwrap();
    assert_eq!((entry.key.as_str(), entry.mod_revision, entry.lease), ("/a", 2, 0));
    assert!(read(r#"{"key": "L2E=", "mod_revision": "two"}"#).is_err());
    assert!(read(r#"{"key": "?"}"#).is_err());
}
