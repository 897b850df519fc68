//! An etcd of three members, of which some are killed, hold still or are cut off. A store has no members.

use poorwill_fleet::etcd::{Etcd, Txn};
use poorwill_fleet::mirror::{Contents, Mirror};
use poorwill_testkit::etcd::Servers;

use super::controller::both_stand;
use super::fleet::{Fleet, leads};
use super::mirror::{observed, reaches};
use super::support::{TTL, delete, eventually, hasty, put, steady, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_member_is_asked_where_one_is_gone_or_holds_still() {
    let Some(mut servers) = Servers::three() else { return };
    let etcd = hasty(&servers.urls());
    put(&steady(&servers.urls()), "/a", "at first", None).await;
    let leader = servers.leader();
    // The one that answers now, and the leader, whichever that is.
    for member in [0, leader] {
        servers.kill(member);
        eventually("it is written", async || {
            etcd.commit(&Txn::new().put("/a", "killed", None)).await.is_ok()
        })
        .await;
        servers.restart(member);
        servers.hold(member);
        eventually("it is written", async || etcd.commit(&Txn::new().put("/a", "held", None)).await.is_ok())
            .await;
        servers.go_on(member);
        let _ = servers.leader();
    }
    // Each of them alone is not enough.
    servers.hold(1);
    servers.hold(2);
    let error = etcd.commit(&Txn::new().put("/a", "alone", None)).await.unwrap_err();
    let error = error.to_string();
    assert!(servers.urls().iter().all(|url| error.contains(url)), "{error}");
}

/// It follows on whichever member is killed or cut off, and what is written meanwhile is not lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_follows_when_the_leader_is_killed() {
    let Some(mut servers) = Servers::three() else { return };
    let urls = servers.urls();
    let leader = servers.leader();
    let mirror = Mirror::start(hasty(&[vec![urls[leader].clone()], urls.clone()].concat()), "/m/");
    let observing = observed(&mirror);
    let mut contents = mirror.contents();
    let etcd = hasty(&urls);
    let first = put(&steady(&urls), "/m/a", "", None).await.revision;
    reaches(&mut contents, first).await;
    servers.kill(leader);
    let mut last = 0;
    eventually("it is written", async || {
        let written = etcd.commit(&Txn::new().put("/m/b", "", None)).await;
        last = written.map_or(0, |answer| answer.revision);
        last > 0
    })
    .await;
    let seen = reaches(&mut contents, last).await;
    assert_eq!(seen.entries().keys().collect::<Vec<_>>(), ["/m/a", "/m/b"]);
    servers.restart(leader);
    drop(mirror);
    assert!(observing.await.unwrap().is_sorted_by_key(|(revision, _)| *revision));
}

/// The member of its watch is cut off from the others, and tells nothing of what they agree on.
async fn follows_though_isolated(change: impl AsyncFn(&Etcd) -> u64) {
    let Some(servers) = Servers::three() else { return };
    let urls = servers.urls();
    let alone = (servers.leader() + 1) % 3;
    let others: Vec<String> = (0..3).filter(|at| *at != alone).map(|at| urls[at].clone()).collect();
    let etcd = steady(&others);
    let first = put(&etcd, "/m/a", "", None).await.revision;
    let mirror = Mirror::start(hasty(&[vec![urls[alone].clone()], others].concat()), "/m/");
    let observing = observed(&mirror);
    let mut contents = mirror.contents();
    reaches(&mut contents, first).await;
    servers.isolate(alone);
    let last = change(&etcd).await;
    let (expected, _) = etcd.read("/m/").await.unwrap();
    let is_so = |contents: &Contents| contents.entries().values().eq(&expected);
    let seen = until(&mut contents, "it follows", is_so).await;
    assert!(seen.revision() >= last);
    servers.rejoin();
    let back = put(&etcd, "/m/back", "", None).await.revision;
    reaches(&mut contents, back).await;
    drop(mirror);
    // A member that is behind is not believed to have lost anything.
    assert!(observing.await.unwrap().is_sorted_by_key(|(revision, _)| *revision));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_follows_a_write_though_its_member_is_isolated() {
    follows_though_isolated(async |etcd| put(etcd, "/m/b", "", None).await.revision).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_follows_a_removal_though_its_member_is_isolated() {
    follows_though_isolated(async |etcd| delete(etcd, "/m/a").await.revision).await;
}

/// A candidate waits at a member that holds still, and the leader ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_candidate_is_elected_though_its_member_holds_still() {
    let Some(servers) = Servers::three() else { return };
    let urls = servers.urls();
    let fleet = Fleet::new(steady(&urls[..1]));
    let first = fleet.controller(hasty(&urls[..1]), "first", TTL);
    leads(&first).await;
    let next = fleet.controller(hasty(&[urls[2].clone(), urls[0].clone(), urls[1].clone()]), "next", TTL);
    both_stand(&fleet).await;
    servers.hold(2);
    // As if its machine was lost.
    drop(first);
    leads(&next).await;
    next.end().await;
}
