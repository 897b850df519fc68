//! Leases that are kept alive, and clocks that say so.

use std::time::Duration;

use poorwill_fleet::clock::Moment;
use poorwill_fleet::etcd::{Event, LeaseId};
use poorwill_fleet::session::Session;
use poorwill_testkit::effort::Effort;
use poorwill_testkit::proxy::Proxy;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::Servers;
use super::support::{TTL, changes, eventually, hasty, left_s, names, put, revoke, soon, steady, until};

async fn granted(session: &Session) -> LeaseId {
    until(&mut session.lease(), "a lease is granted", Option::is_some).await.unwrap()
}

async fn another(session: &Session, last: LeaseId) -> LeaseId {
    let is_another = |lease: &Option<LeaseId>| lease.is_some_and(|lease| lease != last);
    until(&mut session.lease(), "another lease is granted", is_another).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_is_renewed_and_what_is_under_it_ends_with_it() {
    let Some(servers) = Servers::one() else { return };
    let etcd = steady(&servers.urls());
    let session = Session::start(etcd.clone(), 2 * TTL);
    let clock = session.clock();
    // A machine that stalls for longer than the lease lasts gets another one.
    let mut last = (granted(&session).await, i64::MAX);
    eventually("its remaining time grows", async || {
        let lease = granted(&session).await;
        let left = left_s(&servers, lease);
        let before = std::mem::replace(&mut last, (lease, left));
        before.0 == lease && left > before.1
    })
    .await;
    eventually("its clock says that it lives", async || clock.is_valid()).await;
    put(&etcd, "/under/a", "", Some(granted(&session).await)).await;
    put(&etcd, "/under/none", "", None).await;
    let mut lease = session.lease();
    session.end().await;
    assert!(!clock.is_valid());
    assert_eq!(*lease.borrow_and_update(), None);
    assert_eq!(names(&etcd, "/under/").await, ["/under/none"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_session_ends_by_itself() {
    let Some(servers) = Servers::one() else { return };
    let etcd = steady(&servers.urls());
    let session = Session::start(etcd.clone(), TTL);
    let (lease, clock) = (granted(&session).await, session.clock());
    let written = put(&etcd, "/under/a", "", Some(lease)).await.revision;
    let mut watch = etcd.watch("/under/", written + 1).await.unwrap();
    drop(session);
    assert!(matches!(changes(&mut watch).await[..], [Event::Removed { .. }]));
    assert!(!clock.is_valid());
}

/// Whatever was renewed last: once etcd ends the lease, its clock has said so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_clock_is_over_before_etcd_ends_the_lease() {
    let Some(servers) = Servers::one() else { return };
    let etcd = steady(&servers.urls());
    let mut all = JoinSet::new();
    for at in 0..Effort::of_this_run().cases(50) {
        let (etcd, proxy) = (etcd.clone(), Proxy::to(servers.port(0)));
        all.spawn(async move {
            let session = Session::start(hasty(&[proxy.url()]), TTL);
            let (lease, clock) = (granted(&session).await, session.clock());
            let key = format!("/under/{at:04}");
            let written = put(&etcd, &key, "", Some(lease)).await.revision;
            let mut watch = etcd.watch(&key, written + 1).await.unwrap();
            // In any phase of its renewals.
            sleep(Duration::from_millis(u64::from(at * 131 % 1000))).await;
            match at % 2 {
                0 => proxy.hold(),
                _ => proxy.cut(),
            }
            assert!(matches!(changes(&mut watch).await[..], [Event::Removed { .. }]));
            assert!(!clock.is_valid(), "it is valid behind the end of its lease");
            proxy.go_on();
            let next = another(&session, lease).await;
            soon("it is valid again", || clock.is_valid()).await;
            assert_ne!(next, lease);
            session.end().await;
        });
    }
    while let Some(done) = all.join_next().await {
        done.unwrap();
    }
}

/// Holds etcd still once a lease is granted for so long, and looks at its clock until long behind that.
async fn is_over_while_etcd_holds_still(ttl: Duration) {
    let Some(servers) = Servers::one() else { return };
    let session = Session::start(hasty(&servers.urls()), ttl);
    let clock = session.clock();
    granted(&session).await;
    servers.hold(0);
    // All that etcd has renewed was asked for before now, and it grants whole seconds.
    let end = Moment::now().after(Duration::from_secs(ttl.as_secs()));
    let stop = end.after(ttl);
    loop {
        let now = Moment::now();
        assert!(!(clock.is_valid() && now >= end), "it is valid {:?} behind its end", end.until(now));
        if now >= stop {
            break;
        }
        sleep(Duration::from_millis(5)).await;
    }
    servers.go_on(0);
    eventually("it is valid again", async || clock.is_valid()).await;
    let etcd = steady(&servers.urls());
    // With a lease that etcd knows.
    eventually("something can be written under it", async || {
        let Some(lease) = *session.lease().borrow() else { return false };
        let txn = poorwill_fleet::etcd::Txn::new().put("/under/a", "", Some(lease));
        etcd.commit(&txn).await.is_ok()
    })
    .await;
    session.end().await;
    assert_eq!(etcd.read("/under/").await.unwrap().0, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_clock_is_over_while_etcd_holds_still() {
    is_over_while_etcd_holds_still(TTL).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_of_seconds_do_not_count() {
    is_over_while_etcd_holds_still(TTL + Duration::from_millis(900)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_lease_is_granted_where_one_was_revoked() {
    let Some(servers) = Servers::one() else { return };
    let etcd = steady(&servers.urls());
    let session = Session::start(etcd.clone(), TTL);
    let clock = session.clock();
    let mut lease = granted(&session).await;
    for _ in 0..3 {
        put(&etcd, "/under/a", "", Some(lease)).await;
        let receiver = session.lease();
        revoke(&servers, lease.as_i64());
        let next = another(&session, lease).await;
        assert!(receiver.has_changed().unwrap());
        assert_eq!(etcd.read("/under/").await.unwrap().0, []);
        eventually("it is valid", async || clock.is_valid()).await;
        lease = next;
    }
    session.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_is_granted_once_etcd_can_be_reached() {
    let Some(mut servers) = Servers::one() else { return };
    servers.kill(0);
    let session = Session::start(hasty(&servers.urls()), TTL);
    sleep(Duration::from_millis(300)).await;
    assert!(session.lease().borrow().is_none() && !session.clock().is_valid());
    servers.restart(0);
    granted(&session).await;
    // It outlives a restart.
    servers.restart(0);
    let clock = session.clock();
    let lease = granted(&session).await;
    eventually("it is valid", async || clock.is_valid()).await;
    // All is lost, and the lease with it.
    servers.lose_all();
    another(&session, lease).await;
    session.end().await;
}
