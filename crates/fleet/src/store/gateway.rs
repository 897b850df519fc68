//! The calls with one answer, as etcd's gateway writes it: numbers of 64 bits are text, and what is zero or empty is left
//! out.

use bytes::Bytes;
use serde_json::{Value, json};

use super::calls::{CompactCall, LeaseCall, RangeCall, TxnCall, parse};
use super::refusal::Refusal;
use super::state::{Done, Found, PastChange, Store, StoredValue};
use crate::etcd::wire::encoded;

/// Which call a path is.
type Answering = fn(&mut Store, &[u8]) -> Result<Value, Refusal>;

/// What answers a path, if anything does.
pub(super) fn answering(path: &str) -> Option<Answering> {
    Some(match path {
        "/v3/kv/range" => range,
        "/v3/kv/txn" => txn,
        "/v3/kv/compaction" => compact,
        "/v3/lease/grant" => grant,
        "/v3/lease/keepalive" => keep_alive,
        "/v3/lease/revoke" => revoke,
        "/v3/kv/lease/timetolive" => time_to_live,
        _ => return None,
    })
}

fn range(store: &mut Store, body: &[u8]) -> Result<Value, Refusal> {
    let found = store.range(&parse::<RangeCall>(body)?)?;
    Ok(found_json(header(store), &found))
}

fn txn(store: &mut Store, body: &[u8]) -> Result<Value, Refusal> {
    let (has_succeeded, done) = store.txn(&parse::<TxnCall>(body)?)?;
    let response = |(revision, done): (u64, Done)| {
        let header = json!({ "revision": revision.to_string() });
        match done {
            Done::Found(found) => json!({ "response_range": found_json(header, &found) }),
            Done::Put => json!({ "response_put": { "header": header } }),
            Done::Deleted(count) => {
                json!({ "response_delete_range": lean([("header", header), ("deleted", number(count))]) })
            }
        }
    };
    let responses: Vec<Value> = done.into_iter().map(response).collect();
    let succeeded = has_succeeded.into();
    Ok(lean([("header", header(store)), ("succeeded", succeeded), ("responses", responses.into())]))
}

fn compact(store: &mut Store, body: &[u8]) -> Result<Value, Refusal> {
    store.compact(parse::<CompactCall>(body)?.revision)?;
    Ok(json!({ "header": header(store) }))
}

fn grant(store: &mut Store, body: &[u8]) -> Result<Value, Refusal> {
    let LeaseCall { id, ttl_s } = parse(body)?;
    let (id, ttl_s) = store.grant(id, ttl_s)?;
    Ok(json!({ "header": header(store), "ID": number(id), "TTL": number(ttl_s) }))
}

fn keep_alive(store: &mut Store, body: &[u8]) -> Result<Value, Refusal> {
    let LeaseCall { id, .. } = parse(body)?;
    let ttl_s = store.keep_alive(id);
    Ok(json!({ "result": lean([("header", header(store)), ("ID", number(id)), ("TTL", number(ttl_s))]) }))
}

fn revoke(store: &mut Store, body: &[u8]) -> Result<Value, Refusal> {
    store.revoke(parse::<LeaseCall>(body)?.id)?;
    Ok(json!({ "header": header(store) }))
}

fn time_to_live(store: &mut Store, body: &[u8]) -> Result<Value, Refusal> {
    let LeaseCall { id, .. } = parse(body)?;
    let (left_s, granted_s) = store.time_to_live(id);
    let (ttl, granted) = (number(left_s), number(granted_s));
    Ok(lean([("header", header(store)), ("ID", number(id)), ("TTL", ttl), ("grantedTTL", granted)]))
}

/// A store is a cluster of one member.
pub(super) fn header(store: &Store) -> Value {
    let cluster = number(store.cluster());
    json!({
        "cluster_id": cluster, "member_id": cluster, "revision": number(store.revision()), "raft_term": "1",
    })
}

pub(super) fn event_json(change: &PastChange) -> Value {
    match &change.now {
        Some(value) => json!({ "kv": entry_json(&change.key, value) }),
        None => {
            let (key, revision) = (encoded(&change.key), number(change.revision));
            json!({ "type": "DELETE", "kv": { "key": key, "mod_revision": revision } })
        }
    }
}

fn found_json(header: Value, found: &Found) -> Value {
    let entries: Vec<Value> = found.entries.iter().map(|(key, value)| entry_json(key, value)).collect();
    let (more, count) = (found.has_more.into(), number(found.count));
    lean([("header", header), ("kvs", entries.into()), ("more", more), ("count", count)])
}

fn entry_json(key: &Bytes, value: &StoredValue) -> Value {
    lean([
        ("key", encoded(key)),
        ("create_revision", number(value.create_revision)),
        ("mod_revision", number(value.mod_revision)),
        ("version", number(value.version)),
        ("value", encoded(&value.value)),
        ("lease", number(value.lease)),
    ])
}

pub(super) fn number(number: impl ToString + Copy) -> Value {
    number.to_string().into()
}

/// Without what is zero or empty. No text in base64 is a zero.
pub(super) fn lean<const N: usize>(fields: [(&str, Value); N]) -> Value {
    let is_empty = |value: &Value| match value {
        Value::Bool(is_so) => !is_so,
        Value::String(text) => text.is_empty() || text == "0",
        Value::Array(all) => all.is_empty(),
        _ => false,
    };
    let fields = fields.into_iter().filter(|(_, value)| !is_empty(value));
    Value::Object(fields.map(|(name, value)| (name.to_owned(), value)).collect())
}
