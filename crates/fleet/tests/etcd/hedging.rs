//! A member that is silent: which others are asked, and what still counts.

use std::time::Duration;

use poorwill_fleet::etcd::{Etcd, Limits, Txn};
use poorwill_fleet::session::Session;
use poorwill_testkit::etcd::Servers;
use poorwill_testkit::proxy::Proxy;

use super::support::{LONG_TTL, eventually, left_s, put, steady, until};

/// Only a hedge makes it ask another member.
const HEDGING: Limits = Limits { connect: LONG_TTL, call: LONG_TTL, hedge: Duration::from_millis(20) };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_member_is_asked_while_one_is_silent() {
    let Some(servers) = Servers::one() else { return };
    let (silent, other) = (Proxy::to(servers.port(0)), Proxy::to(servers.port(0)));
    silent.hold();
    let etcd = Etcd::new(&[silent.url(), other.url()], HEDGING).unwrap();
    let written = put(&steady(&servers.urls()), "/a", "", None).await.revision;
    assert_eq!(etcd.read("/a").await.unwrap().1, written);
    // From now on, the other one is asked first.
    silent.cut_once();
    silent.hold();
    etcd.read("/a").await.unwrap();
    let lease = etcd.grant(LONG_TTL).await.unwrap();
    etcd.renew(lease, LONG_TTL).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_answer_of_the_first_member_counts_though_another_was_asked() {
    let Some(servers) = Servers::one() else { return };
    let (slow, broken) = (Proxy::to(servers.port(0)), Proxy::to(servers.port(0)));
    slow.hold();
    broken.cut();
    let etcd = Etcd::new(&[slow.url(), broken.url()], HEDGING).unwrap();
    let reading = tokio::spawn(async move { etcd.read("/a").await });
    eventually("it is asked", async || slow.is_holding("/v3/kv/range")).await;
    slow.go_on();
    reading.await.unwrap().unwrap();
}

/// A late one could undo a newer one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_is_at_one_member_at_a_time() {
    let Some(servers) = Servers::one() else { return };
    let (slow, other) = (Proxy::to(servers.port(0)), Proxy::to(servers.port(0)));
    let txn = "/v3/kv/txn";
    slow.hold();
    other.hold_those_with(&[txn]);
    let etcd = Etcd::new(&[slow.url(), other.url()], HEDGING).unwrap();
    let writer = etcd.clone();
    let writing = tokio::spawn(async move { writer.commit(&Txn::new().put("/a", "", None)).await });
    eventually("it is asked", async || slow.is_holding(txn)).await;
    // The hedges of these come after one of the transaction would.
    for _ in 0..3 {
        etcd.read("/a").await.unwrap();
        etcd.avoid_member();
    }
    assert!(!other.is_holding(txn));
    slow.go_on();
    assert!(writing.await.unwrap().unwrap().has_succeeded);
}

/// The round trip is over a quarter of the lease, which was once the end of a call.
#[ignore = "long: several renewals of a lease of seconds"]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_lives_on_behind_a_slow_connection() {
    let Some(servers) = Servers::one() else { return };
    let (proxy, ttl) = (Proxy::to(servers.port(0)), Duration::from_secs(3));
    proxy.delay(400);
    let session = Session::start(Etcd::new(&[proxy.url()], Limits::for_lease(ttl)).unwrap(), ttl);
    let clock = session.clock();
    // A machine that stalls for longer than the lease lasts begins anew.
    let granted = until(&mut session.lease(), "a lease is granted", Option::is_some).await.unwrap();
    let (mut last, mut renewals) = ((granted, i64::MAX), 0);
    eventually("the same lease is renewed again and again", async || {
        let lease = until(&mut session.lease(), "a lease is granted", Option::is_some).await.unwrap();
        let left = left_s(&servers, lease);
        let before = std::mem::replace(&mut last, (lease, left));
        if before.0 != lease || !clock.is_valid() {
            renewals = 0;
        }
        renewals += u32::from(before.0 == lease && left > before.1);
        renewals >= 2
    })
    .await;
}
