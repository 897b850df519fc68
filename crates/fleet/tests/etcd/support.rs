//! Clients, and waiting.

use std::time::Duration;

use poorwill_fleet::etcd::{Etcd, Event, LeaseId, Limits, Txn, TxnAnswer, Watch, Watched};
use poorwill_testkit::watchdog::TEST_TIMEOUT;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::Servers;

/// What the leases of tests are granted for.
pub(crate) const TTL: Duration = Duration::from_secs(2);
/// Longer than a test.
pub(crate) const LONG_TTL: Duration = Duration::from_secs(600);
const LOOK: Duration = Duration::from_millis(10);

/// A client that waits as long as a test may take.
pub(crate) fn steady(urls: &[String]) -> Etcd {
    Etcd::new(urls, Limits { connect: TEST_TIMEOUT, call: TEST_TIMEOUT, hedge: TEST_TIMEOUT }).unwrap()
}

/// A client that soon turns to another member.
pub(crate) fn hasty(urls: &[String]) -> Etcd {
    let ms = Duration::from_millis;
    let limits = Limits { connect: ms(300), call: ms(600), hedge: ms(150) };
    Etcd::new(urls, limits).unwrap()
}

pub(crate) async fn put(etcd: &Etcd, key: &str, value: &str, lease: Option<LeaseId>) -> TxnAnswer {
    etcd.commit(&Txn::new().put(key, value, lease)).await.unwrap()
}

pub(crate) async fn delete(etcd: &Etcd, key: &str) -> TxnAnswer {
    etcd.commit(&Txn::new().delete(key)).await.unwrap()
}

/// Waits until it is so.
pub(crate) async fn eventually(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let waited = timeout(TEST_TIMEOUT, async {
        while !is_so().await {
            sleep(LOOK).await;
        }
    });
    assert!(waited.await.is_ok(), "{what}: not after {TEST_TIMEOUT:?}");
}

/// The same, in a task.
pub(crate) async fn soon(what: &str, mut is_so: impl FnMut() -> bool) {
    let waited = timeout(TEST_TIMEOUT, async {
        while !is_so() {
            sleep(LOOK).await;
        }
    });
    assert!(waited.await.is_ok(), "{what}: not after {TEST_TIMEOUT:?}");
}

/// Waits until a value is so, and returns it.
pub(crate) async fn until<T: Clone>(
    receiver: &mut watch::Receiver<T>,
    what: &str,
    is_so: impl FnMut(&T) -> bool,
) -> T {
    let waited = timeout(TEST_TIMEOUT, receiver.wait_for(is_so)).await;
    let waited = waited.unwrap_or_else(|_| panic!("{what}: not after {TEST_TIMEOUT:?}"));
    waited.unwrap_or_else(|_| panic!("{what}: its sender is gone")).clone()
}

/// The next changes of a watch, some at least.
pub(crate) async fn changes(watch: &mut Watch) -> Vec<Event> {
    loop {
        match timeout(TEST_TIMEOUT, watch.next()).await.expect("the watch goes on").unwrap() {
            Watched::Changes(changes) if changes.is_empty() => {}
            Watched::Changes(changes) => return changes,
            Watched::Ended => panic!("the watch ended"),
        }
    }
}

/// A call of the gateway beside the client.
pub(crate) fn post(servers: &Servers, path: &str, body: &Value) -> Value {
    serde_json::from_str(&servers.post(0, path, &body.to_string())).unwrap()
}

/// How many seconds are left of a lease.
pub(crate) fn left_s(servers: &Servers, lease: LeaseId) -> i64 {
    let left = post(servers, "/v3/kv/lease/timetolive", &json!({ "ID": lease.as_i64().to_string() }));
    left["TTL"].as_str().and_then(|ttl| ttl.parse().ok()).unwrap_or_default()
}

/// The keys with a prefix.
pub(crate) async fn names(etcd: &Etcd, prefix: &str) -> Vec<String> {
    etcd.read(prefix).await.unwrap().0.into_iter().map(|entry| entry.key).collect()
}

/// Has etcd forget all before this revision.
pub(crate) fn compact(servers: &Servers, revision: u64) {
    let answer = post(servers, "/v3/kv/compaction", &json!({ "revision": revision.to_string() }));
    // Twice is no error.
    let is_done = answer.get("error").is_none_or(|error| error.to_string().contains("has been compacted"));
    assert!(is_done, "{answer}");
}

/// Ends a lease as an operator would.
pub(crate) fn revoke(servers: &Servers, lease: i64) {
    let answer = post(servers, "/v3/lease/revoke", &json!({ "ID": lease.to_string() }));
    assert!(answer.get("error").is_none(), "{answer}");
}
