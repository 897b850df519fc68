//! Reading keys, and transactions that write them.

use serde::Deserialize;
use serde_json::{Value, json};

use super::client::Etcd;
use super::entry::Entry;
use super::error::EtcdError;
use super::lease::LeaseId;
use super::version::Version;
use super::wire::{Header, KeyValue, encoded, end_of, number};

/// Entries of one answer while a prefix is read.
const PAGE: usize = 1000;

/// A transaction: if all that it compares is so, it writes all; if not, it writes nothing.
#[derive(Debug, Clone, Default)]
pub struct Txn {
    compare: Vec<Value>,
    then: Vec<Value>,
    otherwise: Vec<Value>,
}

/// What came of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TxnAnswer {
    /// Whether all was as compared.
    pub has_succeeded: bool,
    /// The revision behind it.
    pub revision: u64,
    /// What was asked for, where it was not.
    pub found: Vec<Entry>,
}

impl Txn {
    /// Nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// If the key was created at this revision; 0 if it does not exist.
    #[must_use]
    pub fn if_created_at(mut self, key: &str, revision: u64) -> Self {
        self.compare.push(json!({
            "key": encoded(key.as_bytes()), "target": "CREATE", "result": "EQUAL",
            "create_revision": revision.to_string(),
        }));
        self
    }

    /// If the key is under this lease.
    #[must_use]
    pub fn if_leased(mut self, key: &str, lease: LeaseId) -> Self {
        self.compare.push(json!({
            "key": encoded(key.as_bytes()), "target": "LEASE", "result": "EQUAL", "lease": lease.0.to_string(),
        }));
        self
    }

    /// Writes a key, under a lease or for good.
    #[must_use]
    pub fn put(mut self, key: &str, value: &str, lease: Option<LeaseId>) -> Self {
        let lease = lease.map_or(0, |lease| lease.0);
        self.then.push(json!({ "request_put": {
            "key": encoded(key.as_bytes()), "value": encoded(value.as_bytes()), "lease": lease.to_string(),
        }}));
        self
    }

    /// Removes a key.
    #[must_use]
    pub fn delete(mut self, key: &str) -> Self {
        self.then.push(json!({ "request_delete_range": { "key": encoded(key.as_bytes()) } }));
        self
    }

    /// Reads a key if nothing is written.
    #[must_use]
    pub fn or_get(mut self, key: &str) -> Self {
        self.otherwise.push(json!({ "request_range": { "key": encoded(key.as_bytes()) } }));
        self
    }

    /// How many keys it writes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.then.len()
    }

    /// Whether it writes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.then.is_empty()
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Range {
    header: Header,
    kvs: Vec<KeyValue>,
    more: bool,
    #[serde(deserialize_with = "number")]
    count: usize,
}

#[derive(Deserialize)]
struct TxnRead {
    header: Header,
    #[serde(default)]
    succeeded: bool,
    #[serde(default)]
    responses: Vec<Response>,
}

#[derive(Deserialize)]
struct Response {
    response_range: Option<Range>,
}

impl Etcd {
    /// All entries with this prefix, in the order of their keys, and the revision at which all of them were so.
    ///
    /// # Errors
    /// See [`EtcdError`].
    pub async fn read(&self, prefix: &str) -> Result<(Vec<Entry>, u64), EtcdError> {
        self.read_version(prefix).await.map(|(entries, version)| (entries, version.revision))
    }

    /// All entries with this prefix, in the order of their keys, and the version of etcd that they are of.
    ///
    /// # Errors
    /// See [`EtcdError`].
    pub async fn read_version(&self, prefix: &str) -> Result<(Vec<Entry>, Version), EtcdError> {
        let end = encoded(&end_of(prefix.as_bytes()));
        let (mut from, mut version) = (prefix.as_bytes().to_vec(), Version::default());
        let mut entries: Vec<Entry> = Vec::new();
        loop {
            let page = json!({
                "key": encoded(&from), "range_end": end, "limit": PAGE.to_string(),
                "revision": version.revision.to_string(),
            });
            let range: Range = self.call("/v3/kv/range", &page).await?;
            if version.revision == 0 {
                version = range.header.into();
            }
            // As bytes: a foreign key that is no text would be another one as text.
            let last = range.kvs.last().map(|last| last.key.to_vec());
            entries.extend(range.kvs.into_iter().map(Entry::from));
            match last {
                Some(last) if range.more => {
                    from = last;
                    from.push(0);
                }
                _ => return Ok((entries, version)),
            }
        }
    }

    /// Whether entries with this prefix have changed behind a version, in which there were so many of them, or etcd has lost
    /// its data since. A majority of the members is asked. If so, it is the version that etcd has.
    ///
    /// # Errors
    /// See [`EtcdError`]. Without one, a majority was reached.
    pub async fn changed_behind(
        &self,
        prefix: &str,
        count: usize,
        version: Version,
    ) -> Result<Option<Version>, EtcdError> {
        let written_since = json!({
            "key": encoded(prefix.as_bytes()), "range_end": encoded(&end_of(prefix.as_bytes())),
            "min_mod_revision": (version.revision + 1).to_string(), "limit": "1", "keys_only": true,
        });
        let range: Range = self.call("/v3/kv/range", &written_since).await?;
        // It counts all of them. Without a new one, fewer are there if one was removed.
        let is_same = range.kvs.is_empty() && range.count == count;
        let has = Version::from(range.header);
        Ok((!is_same || version.is_lost_by(has)).then_some(has))
    }

    /// Carries out a transaction.
    ///
    /// # Errors
    /// See [`EtcdError`]. Unless it was refused, it may have been carried out.
    pub async fn commit(&self, txn: &Txn) -> Result<TxnAnswer, EtcdError> {
        let Txn { compare, then, otherwise } = txn;
        let body = json!({ "compare": compare, "success": then, "failure": otherwise });
        let read: TxnRead = self.call_in_turn("/v3/kv/txn", &body).await?;
        let ranges = read.responses.into_iter().filter_map(|response| response.response_range);
        let found = ranges.flat_map(|range| range.kvs).map(Entry::from).collect();
        Ok(TxnAnswer { has_succeeded: read.succeeded, revision: read.header.revision, found })
    }
}
