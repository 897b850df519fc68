//! The client: pages, transactions, watches, and what is refused.

use std::collections::BTreeSet;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use poorwill_fleet::etcd::{Event, Txn, Version, Watched};
use serde_json::json;
use tokio::time::timeout;

use super::Servers;
use super::support::{LONG_TTL, changes, compact, delete, eventually, names, post, put, revoke, steady};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_is_read_in_pages_at_one_revision() {
    let Some(servers) = Servers::one() else { return };
    let etcd = steady(&servers.urls());
    let keys: Vec<String> = (0..2500).map(|at| format!("/pages/m{at:04}")).collect();
    for part in keys.chunks(100) {
        let txn = part.iter().fold(Txn::new(), |txn, key| txn.put(key, key, None));
        assert!(etcd.commit(&txn).await.unwrap().has_succeeded);
    }
    put(&etcd, "/pages0", "behind", None).await;
    put(&etcd, "/page", "before", None).await;
    let both = |count: u32| {
        Txn::new().put("/pages/a", &count.to_string(), None).put("/pages/z", &count.to_string(), None)
    };
    etcd.commit(&both(0)).await.unwrap();
    let writer = etcd.clone();
    let writing = tokio::spawn(async move {
        for count in 1.. {
            writer.commit(&both(count)).await.unwrap();
        }
    });
    let mut revisions = Vec::new();
    for _ in 0..5 {
        let (entries, revision) = etcd.read("/pages/").await.unwrap();
        let names: Vec<&str> = entries.iter().map(|entry| entry.key.as_str()).collect();
        let expected = ["/pages/a"].into_iter().chain(keys.iter().map(String::as_str)).chain(["/pages/z"]);
        assert_eq!(names, expected.collect::<Vec<_>>());
        assert_eq!(entries.first().unwrap().value, entries.last().unwrap().value);
        assert!(entries.iter().all(|entry| entry.mod_revision <= revision));
        revisions.push(revision);
    }
    assert!(revisions.is_sorted());
    // In two calls they differ, so the writer was fast enough to be noticed.
    eventually("two calls see two revisions", async || {
        let first = etcd.read("/pages/a").await.unwrap().0;
        let _ = etcd.read("/pages/").await.unwrap();
        first[0].value != etcd.read("/pages/z").await.unwrap().0[0].value
    })
    .await;
    writing.abort();
}

/// Another program writes below the prefix: each entry is there once.
#[tokio::test]
async fn keys_that_are_no_text_are_read_once() {
    let Some(servers) = Servers::one() else { return };
    let key = |at: u32| [b"/binary/\xff".as_slice(), format!("{at:04}").as_bytes()].concat();
    for part in (0..1200).collect::<Vec<u32>>().chunks(100) {
        let put = |at: &u32| json!({ "request_put": { "key": STANDARD.encode(key(*at)), "value": "" } });
        let puts: Vec<_> = part.iter().map(put).collect();
        let answer = post(&servers, "/v3/kv/txn", &json!({ "success": puts }));
        assert_eq!(answer["succeeded"], true, "{answer}");
    }
    let (entries, _) = steady(&servers.urls()).read("/binary/").await.unwrap();
    let names: BTreeSet<&str> = entries.iter().map(|entry| entry.key.as_str()).collect();
    assert_eq!((entries.len(), names.len()), (1200, 1200));
}

#[tokio::test]
async fn a_transaction_writes_all_or_nothing() {
    let Some(servers) = Servers::one() else { return };
    let etcd = steady(&servers.urls());
    let one = put(&etcd, "/t/one", "1", None).await;
    let lease = etcd.grant(LONG_TTL).await.unwrap();
    let two = put(&etcd, "/t/two", "2", Some(lease)).await;
    assert_eq!(two.revision, one.revision + 1);

    // Each comparison can fail: then nothing is written, and what was asked for is found.
    let write = |txn: Txn| txn.put("/t/three", "3", None).delete("/t/one").or_get("/t/two").or_get("/t/none");
    let other = etcd.grant(LONG_TTL).await.unwrap();
    for wrong in [
        Txn::new().if_created_at("/t/one", 0),
        Txn::new().if_created_at("/t/one", one.revision + 1),
        Txn::new().if_created_at("/t/none", one.revision),
        Txn::new().if_leased("/t/two", other),
        Txn::new().if_leased("/t/one", lease),
        Txn::new().if_created_at("/t/one", one.revision).if_leased("/t/two", other),
    ] {
        let answer = etcd.commit(&write(wrong)).await.unwrap();
        assert!(!answer.has_succeeded);
        let [found] = &answer.found[..] else { panic!("{answer:?}") };
        assert_eq!((found.key.as_str(), &*found.value), ("/t/two", &b"2"[..]));
        assert_eq!((found.create_revision, found.mod_revision), (two.revision, two.revision));
        assert_eq!(found.lease, lease.as_i64());
    }
    assert_eq!(etcd.read("/t/").await.unwrap().0.len(), 2);

    let right = Txn::new().if_created_at("/t/one", one.revision).if_created_at("/t/none", 0);
    let right = write(right.if_leased("/t/two", lease));
    assert_eq!((right.len(), right.is_empty(), Txn::new().is_empty()), (2, false, true));
    let answer = etcd.commit(&right).await.unwrap();
    assert!(answer.has_succeeded && answer.found.is_empty());
    assert_eq!(answer.revision, two.revision + 1);
    assert_eq!(names(&etcd, "/t/").await, ["/t/three", "/t/two"]);

    // What is under a lease goes with it, at once. Twice is no error.
    etcd.revoke(lease).await.unwrap();
    etcd.revoke(lease).await.unwrap();
    assert_eq!(etcd.read("/t/two").await.unwrap().0, []);
    assert!(etcd.renew(lease, LONG_TTL).await.unwrap_err().is_lease_gone());
    let under_none = etcd.commit(&Txn::new().put("/t/two", "2", Some(lease))).await.unwrap_err();
    assert!(under_none.is_lease_gone(), "{under_none}");
    etcd.renew(other, LONG_TTL).await.unwrap();
}

#[tokio::test]
async fn any_change_behind_a_revision_is_found() {
    let Some(servers) = Servers::one() else { return };
    let etcd = steady(&servers.urls());
    let first = put(&etcd, "/n/a", "", None).await.revision;
    let second = put(&etcd, "/n/b", "", None).await.revision;
    let last = put(&etcd, "/o", "", None).await.revision;
    let cluster = etcd.read_version("/n/").await.unwrap().1.cluster;
    let changed = async |count, revision| {
        let has = etcd.changed_behind("/n/", count, Version { cluster, revision }).await.unwrap();
        has.map(|has| has.revision)
    };
    assert_eq!(changed(2, second).await, None);
    assert_eq!(changed(2, last).await, None);
    assert_eq!(changed(1, first).await, Some(last));
    assert_eq!(changed(2, first).await, Some(last));
    let last = delete(&etcd, "/n/a").await.revision;
    assert_eq!(changed(2, second).await, Some(last));
    assert_eq!(changed(1, last).await, None);
    delete(&etcd, "/n/b").await;
    assert_eq!(changed(0, last + 1).await, None);
    // What it has not reached yet is lost, and what another one has.
    assert_eq!(changed(0, last + 2).await, Some(last + 1));
    let other = Version { cluster: cluster + 1, revision: last + 1 };
    let has = etcd.changed_behind("/n/", 0, other).await.unwrap();
    assert_eq!(has, Some(Version { cluster, revision: last + 1 }));
}

#[tokio::test]
async fn a_watch_tells_every_change_in_order() {
    let Some(servers) = Servers::one() else { return };
    let etcd = steady(&servers.urls());
    let first = put(&etcd, "/w/a", "0", None).await.revision;
    let mut watch = etcd.watch("/w/", first).await.unwrap();
    let mut expected = vec![(first, "/w/a".to_owned(), Some("0".to_owned()))];
    for at in 1..20 {
        let (key, value) = (format!("/w/{}", at % 3), at.to_string());
        put(&etcd, "/x", "another prefix", None).await;
        expected.push((put(&etcd, &key, &value, None).await.revision, key.clone(), Some(value)));
        expected.push((delete(&etcd, &key).await.revision, key, None));
    }
    let mut seen = Vec::new();
    while seen.len() < expected.len() {
        // A dropped future loses nothing.
        let Ok(watched) = timeout(Duration::from_micros(300), watch.next()).await else { continue };
        let Watched::Changes(changes) = watched.unwrap() else { panic!("the watch ended") };
        seen.extend(changes.into_iter().map(|change| match change {
            Event::Put(entry) => {
                let value = String::from_utf8(entry.value.to_vec()).unwrap();
                (entry.mod_revision, entry.key, Some(value))
            }
            Event::Removed { key, revision } => (revision, key, None),
        }));
    }
    assert_eq!(seen, expected);

    // Without what was forgotten, it says that it has ended.
    compact(&servers, expected.last().unwrap().0);
    let mut late = etcd.watch("/w/", first).await.unwrap();
    let ended =
        timeout(LONG_TTL, async { while late.next().await.unwrap() == Watched::Changes(Vec::new()) {} });
    ended.await.unwrap();
    put(&etcd, "/w/a", "", None).await;
    assert_eq!(changes(&mut watch).await.len(), 1);
}

#[tokio::test]
async fn what_etcd_refuses_is_reported_in_its_words() {
    let Some(servers) = Servers::one() else { return };
    let etcd = steady(&servers.urls());
    let error = etcd.commit(&Txn::new().put("", "", None)).await.unwrap_err();
    assert_eq!(error.to_string(), "etcd refuses /v3/kv/txn: etcdserver: key is not provided (code 3)");
    assert!(!error.is_unreachable() && !error.is_lease_gone());
    let lease = etcd.grant(LONG_TTL).await.unwrap();
    revoke(&servers, lease.as_i64());
    let error = etcd.stand("/e", lease, "a test").await.unwrap_err();
    assert!(error.is_lease_gone(), "{error}");
}
