//! Controllers: what they place, which of them leads, and that no other writes.

use poorwill_fleet::etcd::Entry;
use poorwill_fleet::keys::Key;
use poorwill_fleet::policy::Write;
use poorwill_fleet::records::Goal;
use poorwill_testkit::proxy::Proxy;

use super::fleet::{Fleet, Placed, leads, leads_no_more};
use super::history;
use super::support::{LONG_TTL, TTL, delete, eventually, put, revoke, steady, until};

fn goals(of: &[(&str, &str, Goal)]) -> Placed {
    let one = |(model, node, goal): &(&str, &str, Goal)| (((*model).to_owned(), (*node).to_owned()), *goal);
    of.iter().map(one).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_places_as_the_policy_says() {
    let Some((_servers, fleet)) = Fleet::one() else { return };
    for node in ["n1", "n2", "n3"] {
        fleet.node(node, &["org/one", "two", "three"]).await;
    }
    fleet.node("n4", &["alone"]).await;
    fleet.pin("two", 2).await;
    let plan = fleet.plan().await;
    let said = plan.changes.iter().map(|change| {
        let Write::Goal(goal) = change.write else { panic!("{change}") };
        ((change.model.to_string(), change.node.to_string()), goal)
    });
    let said: Placed = said.collect();
    assert_eq!(said.values().filter(|goal| **goal == Goal::Hot).count(), 2, "{plan:?}");

    let controller = fleet.controller(fleet.etcd.clone(), "a", TTL);
    let since = leads(&controller).await;
    assert_eq!(fleet.settled().await, said);
    assert!(fleet.fences().await.iter().all(|fence| *fence == since));
    // Two of three models on each of two nodes, and the one that no other node has.
    assert_eq!(said.len(), 7);

    let written = u64::try_from(said.len()).unwrap();
    let status = until(&mut controller.status(), "it has counted", |status| status.written == written).await;
    assert_eq!(status.problems, Vec::<String>::new());
    // Where nothing changes, nothing is written.
    let (entries, revision) = fleet.etcd.read("/").await.unwrap();
    let mut ticks = controller.status();
    for _ in 0..3 {
        ticks.changed().await.unwrap();
    }
    assert_eq!(fleet.etcd.read("/").await.unwrap(), (entries, revision));
    controller.end().await;
    assert_eq!(history::check(&history::of(&fleet.etcd, &fleet.name).await), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_node_had_goes_elsewhere_when_its_lease_ends() {
    let Some((_servers, fleet)) = Fleet::one() else { return };
    let first = fleet.node("n1", &["one"]).await;
    fleet.node("n2", &["one"]).await;
    fleet.pin("one", 1).await;
    let controller = fleet.controller(fleet.etcd.clone(), "a", TTL);
    leads(&controller).await;
    let placed = fleet.settled().await;
    assert_eq!(placed, goals(&[("one", "n1", Goal::Hot), ("one", "n2", Goal::Warm)]));
    fleet.etcd.revoke(first).await.unwrap();
    // It may be back.
    let both = goals(&[("one", "n1", Goal::Warm), ("one", "n2", Goal::Hot)]);
    assert_eq!(fleet.settled().await, both);
    // It comes back, and another joins.
    let first = fleet.node("n1", &["one"]).await;
    assert_eq!(fleet.settled().await, both);
    fleet.node("n3", &["one"]).await;
    assert_eq!(fleet.settled().await, both);
    fleet.etcd.revoke(first).await.unwrap();
    let placed = fleet.settled().await;
    let three = [("one", "n1", Goal::Warm), ("one", "n2", Goal::Hot), ("one", "n3", Goal::Warm)];
    assert_eq!(placed, goals(&three));
    controller.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_leads_and_the_other_takes_over() {
    let Some((_servers, fleet)) = Fleet::one() else { return };
    for node in ["n1", "n2"] {
        fleet.node(node, &["one"]).await;
    }
    let mut last = fleet.controller(fleet.etcd.clone(), "c0", LONG_TTL);
    let mut fence = leads(&last).await;
    fleet.settled().await;
    for (at, is_ended) in [(1, true), (2, false), (3, true)] {
        let lease_ttl = if at == 1 { TTL } else { LONG_TTL };
        let next = fleet.controller(fleet.etcd.clone(), &format!("c{at}"), lease_ttl);
        let election = fleet.key(&Key::Election);
        both_stand(&fleet).await;
        assert_eq!(next.status().borrow().leads_since, None);
        // Dropped, its lease ends by itself: it is a short one.
        if is_ended {
            last.end().await;
        } else {
            drop(last);
        }
        let next_fence = leads(&next).await;
        assert!(next_fence > fence, "{next_fence} behind {fence}");
        assert_eq!(fleet.etcd.read(&election).await.unwrap().0.len(), 1);
        fleet.node(&format!("n{at}x"), &["one", &format!("new {at}")]).await;
        fleet.settled().await;
        assert!(fleet.fences().await.contains(&next_fence));
        (last, fence) = (next, next_fence);
    }
    last.end().await;
    assert_eq!(history::check(&history::of(&fleet.etcd, &fleet.name).await), 4);
}

/// One that is dropped leaves no task behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_controller_is_gone() {
    let Some((_servers, fleet)) = Fleet::one() else { return };
    let first = fleet.controller(fleet.etcd.clone(), "a", TTL);
    leads(&first).await;
    let mut status = first.status();
    drop(first);
    eventually("its task has ended", async || status.has_changed().is_err()).await;
    status.mark_unchanged();
}

pub(crate) async fn both_stand(fleet: &Fleet) {
    let election = fleet.key(&Key::Election);
    eventually("both stand for election", async || fleet.etcd.read(&election).await.unwrap().0.len() == 2)
        .await;
}

/// The election that a controller won, with its lease.
async fn elected(fleet: &Fleet) -> Entry {
    let (mut keys, _) = fleet.etcd.read(&fleet.key(&Key::Election)).await.unwrap();
    keys.sort_by_key(|key| key.create_revision);
    keys.swap_remove(0)
}

/// Its write is on its way while another one is elected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_was_replaced_writes_nothing_more() {
    let Some((servers, fleet)) = Fleet::one() else { return };
    let proxy = Proxy::to(servers.port(0));
    fleet.node("n1", &["one"]).await;
    let old = fleet.controller(steady(&[proxy.url()]), "old", LONG_TTL);
    let since = leads(&old).await;
    fleet.settled().await;
    let written = until(&mut old.status(), "it has counted", |status| status.written > 0).await.written;
    let new = fleet.controller(fleet.etcd.clone(), "new", LONG_TTL);
    both_stand(&fleet).await;
    proxy.hold_those_with(&["/v3/kv/txn"]);
    fleet.node("n2", &["two"]).await;
    eventually("its write is held", async || proxy.is_holding("/v3/kv/txn")).await;
    revoke(&servers, elected(&fleet).await.lease);
    assert!(leads(&new).await > since);
    let placed = fleet.settled().await;
    assert!(placed.keys().any(|(model, _)| model == "two"), "{placed:?}");
    proxy.go_on();
    leads_no_more(&old, since).await;
    assert_eq!(old.status().borrow().written, written);
    assert_eq!(fleet.settled().await, placed);
    assert_eq!(history::check(&history::of(&fleet.etcd, &fleet.name).await), 2);
    new.end().await;
    old.end().await;
}

/// It does not write twice what its mirror does not show yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_waits_until_it_sees_what_it_wrote() {
    let Some((servers, fleet)) = Fleet::one() else { return };
    let proxy = Proxy::to(servers.port(0));
    let controller = fleet.controller(steady(&[proxy.url()]), "a", LONG_TTL);
    leads(&controller).await;
    proxy.hold_those_with(&["/v3/kv/txn"]);
    fleet.node("n1", &["one"]).await;
    eventually("its write is held", async || proxy.is_holding("/v3/kv/txn")).await;
    proxy.hold_those_with(&["/v3/watch"]);
    fleet.settled().await;
    // In this time it would decide again.
    tokio::time::sleep(TTL).await;
    proxy.go_on();
    fleet.node("n2", &["two"]).await;
    assert_eq!(fleet.settled().await.len(), 2);
    let history = history::of(&fleet.etcd, &fleet.name).await;
    assert_eq!(history.len(), 2, "{history:?}");
    controller.end().await;
}

/// Its lease is revoked, and it gets another one at once: it does not lead by that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_whose_lease_was_revoked_says_that_it_does_not_lead() {
    let Some((servers, fleet)) = Fleet::one() else { return };
    let old = fleet.controller(fleet.etcd.clone(), "old", TTL);
    let since = leads(&old).await;
    let new = fleet.controller(fleet.etcd.clone(), "new", TTL);
    both_stand(&fleet).await;
    revoke(&servers, elected(&fleet).await.lease);
    leads(&new).await;
    leads_no_more(&old, since).await;
    // It stands for election again.
    both_stand(&fleet).await;
    new.end().await;
    assert!(leads(&old).await > since);
    old.end().await;
}

/// An operator removes its candidacy, and its lease lives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_stands_again_where_its_candidacy_was_removed() {
    let Some((_servers, fleet)) = Fleet::one() else { return };
    let controller = fleet.controller(fleet.etcd.clone(), "a", LONG_TTL);
    let since = leads(&controller).await;
    delete(&fleet.etcd, &elected(&fleet).await.key).await;
    leads_no_more(&controller, since).await;
    assert!(leads(&controller).await > since);
    controller.end().await;
}

/// It removes what another one has just removed: that leaves it nothing to wait for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_goes_on_where_a_placement_was_removed_beside_it() {
    let Some((servers, fleet)) = Fleet::one() else { return };
    let proxy = Proxy::to(servers.port(0));
    fleet.node("n1", &["one"]).await;
    let controller = fleet.controller(steady(&[proxy.url()]), "a", LONG_TTL);
    leads(&controller).await;
    let placed = fleet.settled().await;
    assert_eq!(placed.len(), 1);
    proxy.hold_those_with(&["/v3/kv/txn"]);
    let configured = Key::Model { model: "one".parse().unwrap(), node: "n1".parse().unwrap() };
    delete(&fleet.etcd, &fleet.key(&configured)).await;
    eventually("its removal is held", async || proxy.is_holding("/v3/kv/txn")).await;
    let placement = Key::Placement { model: "one".parse().unwrap(), node: "n1".parse().unwrap() };
    delete(&fleet.etcd, &fleet.key(&placement)).await;
    put(&fleet.etcd, "/elsewhere", "", None).await;
    let written = controller.status().borrow().written;
    proxy.go_on();
    let mut status = controller.status();
    until(&mut status, "it has removed it", |status| status.written > written).await;
    // It decides on, without any change.
    for _ in 0..3 {
        until(&mut status, "it decides", |_| true).await;
        tokio::time::timeout(LONG_TTL, status.changed()).await.unwrap().unwrap();
    }
    controller.end().await;
}
