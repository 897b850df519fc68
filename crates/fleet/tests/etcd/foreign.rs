//! What this version does not understand is reported, and left as it is.

use poorwill_fleet::keys::{self, Key};

use super::fleet::{Fleet, leads};
use super::support::{TTL, put, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_is_reported_and_left_as_it_is() {
    let Some((_servers, fleet)) = Fleet::one() else { return };
    let lease = fleet.node("n1", &["one", "newer"]).await;
    fleet.node("n2", &["one", "newer", "newer there"]).await;
    let [one, newer, newer_there] = ["one", "newer", "newer there"].map(|model| model.parse().unwrap());
    let [n1, n2, gone] = ["n1", "n2", "gone"].map(|node| node.parse().unwrap());
    let prefix = keys::prefix(&fleet.name);
    let left: Vec<(String, &str, &str)> = [
        (format!("{prefix}moods/n1"), "good", "`/poorwill/prod/moods/n1`: no such kind of record"),
        (format!("{prefix}placements/%zz/n1"), "{}", "`%` must be followed by"),
        (fleet.key(&Key::Placement { model: newer, node: n1 }), r#"{"format": 99}"#, "has format 99"),
        (fleet.key(&Key::Placement { model: one, node: gone }), r#"{"format": 98}"#, "has format 98"),
        (fleet.key(&Key::Model { node: n2, model: newer_there }), r#"{"format": 97}"#, "has format 97"),
        (fleet.key(&Key::Pin("two".parse().unwrap())), r#"{"format": 96, "copies": 1}"#, "has format 96"),
        (fleet.key(&Key::Pin("one".parse().unwrap())), r#"{"format": 1, "copies": "#, "EOF"),
        (fleet.key(&Key::Node("n3".parse().unwrap())), r#"{"format": 95}"#, "upgrade this controller"),
    ]
    .into();
    for (key, value, _) in &left {
        put(&fleet.etcd, key, value, None).await;
    }
    // Of another fleet, whose name begins the same.
    put(&fleet.etcd, "/poorwill/prod2/placements/one/n1", "{}", None).await;
    let before = fleet.etcd.read("/poorwill/").await.unwrap().0;

    let controller = fleet.controller(fleet.etcd.clone(), "a", TTL);
    leads(&controller).await;
    let placed = fleet.settled().await;
    let are_all_reported = |problems: &[String]| {
        let is_reported = |words: &str| problems.iter().any(|problem| problem.contains(words));
        problems.len() == left.len() && left.iter().all(|(_, _, words)| is_reported(words))
    };
    let problems = controller.status().borrow().problems.clone();
    assert!(are_all_reported(&problems), "{problems:#?}");
    // What is understood is placed.
    assert_eq!(placed.keys().filter(|(model, _)| model == "one").count(), 2, "{placed:?}");
    assert!(placed.keys().all(|(model, _)| model != "newer there"), "{placed:?}");
    let after = fleet.etcd.read("/poorwill/").await.unwrap().0;
    for entry in &before {
        assert!(after.contains(entry), "{entry:?} is changed");
    }
    // Once it is gone, there is nothing to tell of.
    for (key, ..) in &left {
        super::support::delete(&fleet.etcd, key).await;
    }
    until(&mut controller.status(), "nothing is reported", |status| status.problems.is_empty()).await;
    fleet.etcd.revoke(lease).await.unwrap();
    fleet.settled().await;
    controller.end().await;
}
