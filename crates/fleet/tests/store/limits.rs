//! The limits of a store. What is beyond one is refused as a whole and in words, and all else goes on.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use poorwill_fleet::etcd::{Etcd, EtcdError, Event, Txn, Watched};
use poorwill_fleet::store::StoreLimits;
use serde_json::json;
use tokio::time::timeout;

use super::Servers;
use super::servers::{Settings, exchange};
use super::support::{LONG_TTL, changes, eventually, names, put, steady};

fn limited(limits: StoreLimits) -> (Servers, Etcd) {
    let servers = Servers::with(Settings { limits, ..Settings::default() });
    let etcd = steady(&servers.urls());
    (servers, etcd)
}

fn usual() -> StoreLimits {
    StoreLimits::default()
}

fn is_refused<T: std::fmt::Debug>(answer: Result<T, EtcdError>, words: &str) {
    let error = answer.unwrap_err();
    assert!(matches!(error, EtcdError::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains(words), "{error}");
}

#[tokio::test]
async fn a_full_store_keeps_what_it_has_until_something_is_removed() {
    for (limits, words) in [
        (StoreLimits { keys: 3, ..usual() }, "space exceeded: this store keeps 3 keys at most; remove some"),
        (StoreLimits { bytes: 9, ..usual() }, "this store keeps 9 bytes of keys and values at most"),
    ] {
        let (_servers, etcd) = limited(limits);
        let lease = etcd.grant(LONG_TTL).await.unwrap();
        for (key, lease) in [("/a", None), ("/b", None), ("/c", Some(lease))] {
            put(&etcd, key, "1", lease).await;
        }
        let before = etcd.read("/").await.unwrap();
        let mut watch = etcd.watch("/", before.1 + 1).await.unwrap();
        let another = Txn::new().put("/d", "1", None);
        let two = another.clone().put("/e", "1", None);
        // Neither is what would fit beside it written, nor what makes room for a part of it removed.
        for txn in [another.clone(), another.clone().put("/a", "2", None), two.delete("/a")] {
            is_refused(etcd.commit(&txn).await, words);
            assert_eq!(etcd.read("/").await.unwrap(), before);
        }
        // What is there is written again.
        put(&etcd, "/a", "2", None).await;
        put(&etcd, "/c", "2", Some(lease)).await;
        // A name takes the place of another.
        assert!(etcd.commit(&another.delete("/b")).await.unwrap().has_succeeded);
        is_refused(etcd.commit(&Txn::new().put("/e", "1", None)).await, words);
        etcd.revoke(lease).await.unwrap();
        put(&etcd, "/e", "1", None).await;
        assert_eq!(names(&etcd, "/").await, ["/a", "/d", "/e"]);
        let mut seen = Vec::new();
        while seen.len() < 6 {
            seen.extend(changes(&mut watch).await.into_iter().map(|change| match change {
                Event::Put(entry) => entry.key,
                Event::Removed { key, .. } => format!("no {key}"),
            }));
        }
        assert_eq!(seen, ["/a", "/c", "/d", "no /b", "no /c", "/e"]);
    }
}

#[tokio::test]
async fn too_long_a_value_for_the_bytes_that_are_left_is_refused() {
    let (_servers, etcd) = limited(StoreLimits { bytes: 9, ..usual() });
    put(&etcd, "/a", "1234567", None).await;
    is_refused(etcd.commit(&Txn::new().put("/a", "12345678", None)).await, "9 bytes");
    put(&etcd, "/a", "1", None).await;
    put(&etcd, "/b", "1234", None).await;
    assert_eq!(names(&etcd, "/").await, ["/a", "/b"]);
}

#[tokio::test]
async fn another_lease_is_granted_once_one_has_ended() {
    let (_servers, etcd) = limited(StoreLimits { leases: 2, ..usual() });
    let words = "this store keeps 2 leases at most";
    let kept = etcd.grant(LONG_TTL).await.unwrap();
    let revoked = etcd.grant(LONG_TTL).await.unwrap();
    put(&etcd, "/kept", "", Some(kept)).await;
    is_refused(etcd.grant(LONG_TTL).await, words);
    etcd.renew(kept, LONG_TTL).await.unwrap();
    etcd.revoke(revoked).await.unwrap();
    let short = etcd.grant(Duration::from_secs(1)).await.unwrap();
    put(&etcd, "/short", "", Some(short)).await;
    eventually("one is granted when another has expired", async || match etcd.grant(LONG_TTL).await {
        Ok(_) => true,
        refused => {
            is_refused(refused, words);
            false
        }
    })
    .await;
    assert_eq!(names(&etcd, "/").await, ["/kept"]);
    is_refused(etcd.grant(Duration::from_secs(9_000_000_001)).await, "too large lease TTL");
}

#[tokio::test]
async fn another_watch_begins_once_one_has_ended() {
    let (_servers, etcd) = limited(StoreLimits { watches: 2, ..usual() });
    let mut kept = etcd.watch("/", 1).await.unwrap();
    let ended = etcd.watch("/", 1).await.unwrap();
    is_refused(etcd.watch("/", 1).await, "too many requests: this store serves 2 watches at most; end some");
    put(&etcd, "/a", "", None).await;
    assert_eq!(changes(&mut kept).await.len(), 1);
    drop(ended);
    let mut next = None;
    eventually("another one begins", async || {
        next = etcd.watch("/", 1).await.ok();
        next.is_some()
    })
    .await;
    assert_eq!(changes(&mut next.unwrap()).await.len(), 1);
    put(&etcd, "/a", "", None).await;
    assert_eq!(changes(&mut kept).await.len(), 1);
}

#[tokio::test]
async fn the_oldest_revisions_are_forgotten_as_a_whole_and_no_key_with_them() {
    // A change has the key, the value, and the one before it.
    for limits in [StoreLimits { past: 3, ..usual() }, StoreLimits { past_bytes: 12, ..usual() }] {
        let (servers, etcd) = limited(limits);
        put(&etcd, "/b", "1", None).await;
        let mut last = 0;
        for _ in 0..6 {
            last = put(&etcd, "/a", "1", None).await.revision;
        }
        let range = |revision: u64| {
            let body = json!({ "key": STANDARD.encode("/b"), "revision": revision.to_string() });
            exchange(servers.port(0), "/v3/kv/range", &body.to_string())
        };
        assert_eq!(range(last - 2).0, 200);
        let (status, answer) = range(last - 3);
        assert!(status == 400 && answer.contains("revision has been compacted"), "{answer}");
        assert_eq!(watched(&etcd, last - 2).await, Some(3));
        assert_eq!(watched(&etcd, last - 3).await, None);
        // More than the limit at one revision.
        let many = (0..5).fold(Txn::new(), |txn, nth| txn.put(&format!("/{nth}"), "1", None));
        let last = etcd.commit(&many).await.unwrap().revision;
        assert_eq!(watched(&etcd, last).await, Some(5));
        assert_eq!(watched(&etcd, last - 1).await, None);
        assert_eq!(names(&etcd, "/").await.len(), 7);
    }
}

/// How many changes a watch tells first; `None` if it ends instead.
async fn watched(etcd: &Etcd, from: u64) -> Option<usize> {
    let mut watch = etcd.watch("/", from).await.unwrap();
    loop {
        match timeout(LONG_TTL, watch.next()).await.unwrap().unwrap() {
            Watched::Changes(changes) if changes.is_empty() => {}
            Watched::Changes(changes) => return Some(changes.len()),
            Watched::Ended => return None,
        }
    }
}

#[tokio::test]
async fn too_large_a_call_is_refused_and_the_next_one_is_served() {
    let (_servers, etcd) = limited(usual());
    let many = |count| (0..count).fold(Txn::new(), |txn, nth| txn.put(&format!("/{nth:03}"), "", None));
    is_refused(etcd.commit(&many(129)).await, "too many operations in txn request");
    let large = "a".repeat(3 << 19);
    is_refused(etcd.commit(&Txn::new().put("/large", &large, None)).await, "request is too large");
    assert_eq!(names(&etcd, "/").await, <[&str; 0]>::default());
    etcd.commit(&many(128)).await.unwrap();
    assert_eq!(names(&etcd, "/").await.len(), 128);
}
