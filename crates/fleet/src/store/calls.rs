//! Calls of etcd's API, as the gateway takes them: bytes are base64, and numbers are text or not.

use bytes::Bytes;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::refusal::Refusal;
use crate::etcd::wire::{decoded, number};

/// An empty body is a call without fields.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Refusal> {
    let body = if body.trim_ascii().is_empty() { b"{}" } else { body };
    serde_json::from_slice(body).map_err(|error| Refusal::unreadable(&error))
}

/// One key, or all from a key to another one.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct KeySpan {
    #[serde(deserialize_with = "decoded")]
    pub(super) key: Bytes,
    #[serde(deserialize_with = "decoded")]
    pub(super) range_end: Bytes,
}

impl KeySpan {
    pub(super) fn has(&self, key: &[u8]) -> bool {
        match &*self.range_end {
            [] => key == self.key,
            [0] => key >= &*self.key,
            end => key >= &*self.key && key < end,
        }
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RangeCall {
    #[serde(deserialize_with = "decoded")]
    pub(super) key: Bytes,
    #[serde(deserialize_with = "decoded")]
    pub(super) range_end: Bytes,
    #[serde(deserialize_with = "number")]
    pub(super) limit: usize,
    #[serde(deserialize_with = "number")]
    pub(super) revision: u64,
    #[serde(deserialize_with = "number")]
    pub(super) min_mod_revision: u64,
    pub(super) keys_only: bool,
    pub(super) count_only: bool,
}

impl RangeCall {
    pub(super) fn span(&self) -> KeySpan {
        KeySpan { key: self.key.clone(), range_end: self.range_end.clone() }
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct PutCall {
    #[serde(deserialize_with = "decoded")]
    pub(super) key: Bytes,
    #[serde(deserialize_with = "decoded")]
    pub(super) value: Bytes,
    #[serde(deserialize_with = "number")]
    pub(super) lease: i64,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) enum Operation {
    #[serde(rename = "request_range")]
    Range(RangeCall),
    #[serde(rename = "request_put")]
    Put(PutCall),
    #[serde(rename = "request_delete_range")]
    Delete(KeySpan),
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum Comparison {
    Equal,
}

/// That a number of a key is equal to this one. A key that does not exist has zeros.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "target", rename_all = "UPPERCASE", deny_unknown_fields)]
pub(super) enum Compare {
    Create {
        #[serde(deserialize_with = "decoded")]
        key: Bytes,
        #[serde(rename = "result")]
        _result: Comparison,
        #[serde(default, deserialize_with = "number")]
        create_revision: u64,
    },
    Lease {
        #[serde(deserialize_with = "decoded")]
        key: Bytes,
        #[serde(rename = "result")]
        _result: Comparison,
        #[serde(default, deserialize_with = "number")]
        lease: i64,
    },
}

impl Compare {
    pub(super) fn key(&self) -> &Bytes {
        match self {
            Self::Create { key, .. } | Self::Lease { key, .. } => key,
        }
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct TxnCall {
    pub(super) compare: Vec<Compare>,
    pub(super) success: Vec<Operation>,
    pub(super) failure: Vec<Operation>,
}

/// A call that names a lease.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct LeaseCall {
    #[serde(rename = "ID", deserialize_with = "number")]
    pub(super) id: i64,
    #[serde(rename = "TTL", deserialize_with = "number")]
    pub(super) ttl_s: i64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct CompactCall {
    #[serde(deserialize_with = "number")]
    pub(super) revision: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WatchCall {
    pub(super) create_request: WatchedSpan,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct WatchedSpan {
    #[serde(deserialize_with = "decoded")]
    pub(super) key: Bytes,
    #[serde(deserialize_with = "decoded")]
    pub(super) range_end: Bytes,
    #[serde(deserialize_with = "number")]
    pub(super) start_revision: u64,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct PasswordCall {
    pub(super) name: String,
    pub(super) password: String,
}
