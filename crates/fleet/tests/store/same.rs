//! Random calls get the same answers from an etcd and from a store.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fastrand::Rng;
use poorwill_fleet::etcd::{Etcd, Event, Watched};
use poorwill_testkit::effort::{Effort, seed_of_this_run};
use poorwill_testkit::etcd::Servers as EtcdServers;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::Servers;
use super::servers::exchange;
use super::support::{LONG_TTL, put, steady};

fn key(rng: &mut Rng) -> String {
    STANDARD.encode(format!("/{}", rng.char('a'..'f')))
}

/// Of one key, a few, none, or all behind it if `kinds` is 4.
fn span(rng: &mut Rng, kinds: u8) -> Value {
    match rng.u8(..kinds) {
        0 | 1 => json!({ "key": key(rng) }),
        2 => json!({ "key": key(rng), "range_end": key(rng) }),
        _ => json!({ "key": key(rng), "range_end": STANDARD.encode([0]) }),
    }
}

fn range(rng: &mut Rng, revision: u64) -> Value {
    let mut range = span(rng, 4);
    let mut set = |name: &str, value: Value| range[name] = value;
    if rng.u8(..2) == 0 {
        set("limit", rng.u8(..3).to_string().into());
    }
    match rng.u8(..4) {
        0 => set("revision", rng.u64(..revision + 2).to_string().into()),
        1 => set("min_mod_revision", rng.u64(..revision + 2).to_string().into()),
        2 => set("keys_only", true.into()),
        _ if rng.u8(..4) == 0 => set("count_only", true.into()),
        _ => {}
    }
    range
}

fn operation(rng: &mut Rng, revision: u64) -> Value {
    match rng.u8(..8) {
        0..4 => {
            let value = STANDARD.encode("v".repeat(rng.usize(..3)));
            let lease = if rng.bool() { 0 } else { rng.u8(1..5) };
            json!({ "request_put": { "key": key(rng), "value": value, "lease": lease.to_string() } })
        }
        // etcd does not see that a put is within a removal without an end, which a store refuses.
        4..6 => json!({ "request_delete_range": span(rng, 3) }),
        6 if rng.u8(..8) == 0 => json!({ "request_put": { "key": "", "value": "" } }),
        _ => json!({ "request_range": range(rng, revision) }),
    }
}

fn operations(rng: &mut Rng, revision: u64) -> Value {
    (0..rng.usize(..4)).map(|_| operation(rng, revision)).collect()
}

fn compare(rng: &mut Rng, revision: u64) -> Value {
    let created = if rng.bool() { 0 } else { rng.u64(..=revision) };
    match rng.u8(..3) {
        0 => {
            json!({ "key": key(rng), "target": "LEASE", "result": "EQUAL", "lease": rng.u8(..5).to_string() })
        }
        _ => json!({
            "key": key(rng), "target": "CREATE", "result": "EQUAL", "create_revision": created.to_string(),
        }),
    }
}

fn call(rng: &mut Rng, revision: u64) -> (&'static str, Value) {
    let lease = rng.u8(1..5).to_string();
    match rng.u8(..20) {
        0..10 => {
            let compare: Value = (0..rng.usize(..2)).map(|_| compare(rng, revision)).collect();
            let (success, failure) = (operations(rng, revision), operations(rng, revision));
            ("/v3/kv/txn", json!({ "compare": compare, "success": success, "failure": failure }))
        }
        10..15 => ("/v3/kv/range", range(rng, revision)),
        15..17 => ("/v3/lease/grant", json!({ "ID": lease, "TTL": "600" })),
        17 => ("/v3/lease/keepalive", json!({ "ID": lease })),
        18 => ("/v3/lease/revoke", json!({ "ID": lease })),
        _ if rng.u8(..5) == 0 => {
            ("/v3/kv/compaction", json!({ "revision": rng.u64(1..revision + 2).to_string() }))
        }
        _ => ("/v3/lease/grant", json!({ "ID": lease, "TTL": "9000000001" })),
    }
}

/// Without what tells one cluster from another.
fn comparable(mut answer: Value) -> Value {
    for path in ["/header", "/result/header"] {
        if let Some(header) = answer.pointer_mut(path).and_then(Value::as_object_mut) {
            header.retain(|name, _| name == "revision");
        }
    }
    answer
}

fn ask(port: u16, path: &str, body: &Value) -> (u16, Value) {
    let (status, answer) = exchange(port, path, &body.to_string());
    let answer: Value = serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{answer}: {error}"));
    (status, comparable(answer))
}

/// What a watch tells from a revision on, up to a last key; `None` if that is forgotten.
async fn watched(etcd: &Etcd, from: u64) -> Option<Vec<Event>> {
    let mut watch = etcd.watch("/", from).await.unwrap();
    let mut events = Vec::new();
    while !matches!(events.last(), Some(Event::Put(entry)) if entry.key == "/last") {
        match timeout(LONG_TTL, watch.next()).await.unwrap().unwrap() {
            Watched::Changes(changes) => events.extend(changes),
            Watched::Ended => return None,
        }
    }
    Some(events)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_calls_have_etcds_answers() {
    let first = seed_of_this_run().unwrap_or_else(|| fastrand::u64(..));
    println!("POORWILL_SEED={first}");
    for case in 0..u64::from(Effort::of_this_run().cases(3)) {
        let Some(theirs) = EtcdServers::one() else { return };
        let ours = Servers::one().unwrap();
        let (mut rng, mut revision, mut compacted) = (Rng::with_seed(first.wrapping_add(case)), 1, 0);
        for nth in 0..400 {
            let (path, body) = call(&mut rng, revision);
            let expected = ask(theirs.port(0), path, &body);
            let answered = ask(ours.port(0), path, &body);
            assert_eq!(answered, expected, "call {nth} of seed {first} + {case}: {path} {body}");
            let now = answered.1["header"]["revision"].as_str().and_then(|text| text.parse().ok());
            revision = now.unwrap_or(revision);
            if path == "/v3/kv/compaction" && answered.0 == 200 {
                compacted = body["revision"].as_str().unwrap().parse().unwrap();
            }
        }
        let (theirs, ours) = (steady(&theirs.urls()), steady(&ours.urls()));
        let last = put(&theirs, "/last", "", None).await.revision;
        assert_eq!(put(&ours, "/last", "", None).await.revision, last);
        // Versions of etcd lose a removal at the very revision that they compact to.
        for from in [1, compacted / 2 + 1, compacted + 1, last] {
            if from != compacted {
                assert_eq!(watched(&ours, from).await, watched(&theirs, from).await, "from {from}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_store_does_not_know_is_refused() {
    let ours = Servers::one().unwrap();
    for (path, body) in [
        ("/v3/kv/range", json!({ "key": "YQ==", "sort_order": "DESCEND" })),
        ("/v3/kv/txn", json!({ "compare": [{ "key": "YQ==", "target": "VALUE", "result": "EQUAL" }] })),
        ("/v3/kv/txn", json!({ "compare": [{ "key": "YQ==", "target": "LEASE", "result": "LESS" }] })),
        ("/v3/kv/txn", json!({ "success": [{ "request_txn": {} }] })),
        ("/v3/watch", json!({ "cancel_request": { "watch_id": "1" } })),
    ] {
        let (status, answer) = ask(ours.port(0), path, &body);
        assert_eq!((status, &answer["code"]), (400, &json!(3)), "{path} {body}: {answer}");
        assert!(answer["message"].as_str().unwrap().contains("a part of etcd's API only"), "{answer}");
    }
    assert_eq!(exchange(ours.port(0), "/v3/cluster/member/list", "{}").0, 404);
}
