//! `poorwill route` and `poorwill fleet` over a real etcd, with rotations as nodes and mock engines.
//!
//! Where there is no etcd, each test says so and ends.

mod chaos;
mod parts;
mod tls;
mod upgrade;
mod usage;

use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;

use self::parts::{Fleet, until};
use super::rotate::fixture::{self, engine_of, text_of};
use super::rotate::http;

const PROMPT: &str = "Tell me of a harbour.";

#[test]
fn a_router_serves_the_models_of_all_nodes_and_operators_move_them() {
    let Some(fleet) = Fleet::of(1, 2) else { return };
    let truth = fleet.truth(&[PROMPT]);
    let mut nodes = fleet.start();
    let router = fleet.route(0, &[]);
    for (model, truth) in fleet.models().iter().zip(&truth) {
        assert_eq!(fleet.say(0, model, PROMPT), truth[0], "{}", router.log());
    }
    // Both names that are listed, and one that is not.
    let listed = http::ask(fleet.routers[0], "GET", "/v1/models", &[], "").unwrap();
    let listed: serde_json::Value = serde_json::from_str(&listed.body).unwrap();
    let names: Vec<_> = listed["data"].as_array().unwrap().iter().map(|one| one["id"].clone()).collect();
    assert_eq!(json!(names), json!(fleet.models()));
    assert_eq!(fleet.ask(0, "cypress", PROMPT).unwrap().status, 404);

    let ordered = |words: &[&str]| fleet.order(words).succeeded();
    assert_eq!(ordered(&["pin", "birch", "--copies", "2"]), "model birch is kept awake on 2 of its nodes\n");
    until("birch is awake on both", || fleet.copies("birch", "stage", "awake") == 2);
    assert_eq!(fleet.copies("birch", "goal", "hot"), 2);
    assert!(ordered(&["drain", "node0", "--why", "new memory"]).starts_with("node node0 drains"));
    until("nothing is placed on it", || {
        let copies = fleet.status()["models"].as_array().unwrap().clone();
        copies.iter().filter(|copy| copy["node"] == "node0").all(|copy| copy["goal"] == "none")
    });
    // A client that asks it all the same is sent elsewhere, and the router does not ask it.
    until("it refuses", || {
        let refused = fleet.nodes[0].complete("birch", PROMPT);
        // A slow machine may lose its lease as well.
        refused.status == 421
            && refused.body.contains("router of the fleet")
            && refused.body.contains("\"not_placed\"")
    });
    assert_eq!(fleet.say(0, "birch", PROMPT), truth[1][0], "{}", router.log());
    ordered(&["drain", "node0", "--off"]);
    ordered(&["pin", "birch", "--off"]);
    until("it is placed there again", || fleet.copies("birch", "goal", "none") == 0);
    let table = ordered(&["status"]);
    // A node publishes what is free and what it has promised, which need not be all of its 512 MiB yet.
    for word in ["node0", "node1", "amber", "birch", " MiB"] {
        assert!(table.contains(word), "{word}: {table}");
    }

    // A node that ends in order is gone at once, and its models are served elsewhere.
    nodes.remove(0).end();
    until("it is gone", || !fleet.has_node("node0"));
    assert_eq!(fleet.say(0, "amber", PROMPT), truth[0][0], "{}", router.log());
    router.end();
}

/// Its model is started elsewhere before it leaves, and no request waits for what will not come.
#[test]
fn a_drain_makes_models_ready_elsewhere_and_refuses_what_waits() {
    let Some(mut fleet) = Fleet::of(1, 2) else { return };
    fleet.nodes[0].models[0].is_held = true;
    fleet.nodes[1].models[0].is_held = true;
    let nodes = fleet.start();
    let router = fleet.route(0, &[]);
    let truth = fleet.truth(&[PROMPT]);
    fixture::until(&nodes[0], "it is placed", || {
        nodes[0].log().contains("a model has a new goal model=\"amber\" goal=warm")
    });
    let drains = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut answer = fleet.nodes[0].complete("amber", PROMPT);
            // A slow machine may lose its lease.
            while answer.status == 421 && !drains.load(Ordering::Relaxed) {
                answer = fleet.nodes[0].complete("amber", PROMPT);
            }
            answer
        });
        fixture::until(&nodes[0], "the request waits", || fleet.nodes[0].now("amber")["queued"] == 1);
        drains.store(true, Ordering::Relaxed);
        fleet.order(&["drain", "node0"]).succeeded();
        fleet.nodes[1].open_latch();
        let answer = waiting.join().unwrap();
        assert_eq!(answer.status, 421, "{answer:?}\n{}", nodes[0].log());
        assert!(answer.body.contains("not_placed"), "{answer:?}");
    });
    until("the node is empty", || fleet.copies("amber", "goal", "none") == 1);
    // No request for it came there.
    assert_eq!(fleet.nodes[1].now("amber")["admitted"], 0);
    assert_eq!(fleet.say(0, "amber", PROMPT), truth[0][0], "{}", router.log());
    fleet.nodes[0].open_latch();
    router.end();
    nodes.into_iter().for_each(|node| drop(node.end()));
}

/// The process stands still with a request in its queue, until etcd has ended its lease. It goes on, and its engine is
/// ready; but it cannot know that it is still a node.
#[test]
fn a_node_that_was_stopped_beyond_its_lease_serves_nothing_until_it_has_another() {
    let Some(mut fleet) = Fleet::of(1, 1) else { return };
    fleet.nodes[0].models[0].is_held = true;
    let [node] = fleet.start().try_into().ok().unwrap();
    let router = fleet.route(0, &["--only", "controller"]);
    until("it is placed", || fleet.copies("amber", "goal", "warm") == 1);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut answer = fleet.nodes[0].complete("amber", PROMPT);
            // The placement is in etcd, and not yet there.
            while answer.body.contains("not_placed") {
                answer = fleet.nodes[0].complete("amber", PROMPT);
            }
            answer
        });
        fixture::until(&node, "the request waits", || fleet.nodes[0].now("amber")["queued"] == 1);
        // The node keeps its placement: a controller would withdraw it, and the node may read that when it goes on.
        router.signal("STOP");
        node.signal("STOP");
        until("etcd has ended its lease", || !fleet.has_node("node0"));
        fleet.etcd.hold(0);
        node.signal("CONT");
        fleet.nodes[0].open_latch();
        let answer = waiting.join().unwrap();
        assert_eq!(answer.status, 421, "{answer:?}\n{}", node.log());
        assert!(answer.body.contains("no_lease"), "{answer:?}");
        // Its model is there all the same, and awake.
        fixture::until(&node, "it is ready", || fleet.nodes[0].now("amber")["stage"] == "ready");
        fleet.etcd.go_on(0);
        router.signal("CONT");
    });
    until("it serves again", || fleet.nodes[0].complete("amber", PROMPT).status == 200);
    assert_eq!(fleet.nodes[0].now("amber")["starts"], 1);
    assert!(!node.log().contains("went to its engine after"), "{}", node.log());
    router.end();
    node.end();
}

#[test]
fn without_etcd_no_model_ends_and_nothing_is_served_behind_the_lease() {
    let Some(mut fleet) = Fleet::of(1, 2) else { return };
    let truth = fleet.truth(&[PROMPT]);
    let nodes = fleet.start();
    let router = fleet.route(0, &[]);
    assert_eq!(fleet.say(0, "amber", PROMPT), truth[0][0]);
    until("it was started on both", || engines_of(&fleet).iter().flatten().count() == 2);
    let before = engines_of(&fleet);
    fleet.etcd.kill(0);
    // Its leases are over by the nodes' own clocks.
    until("no node serves", || fleet.ask(0, "amber", PROMPT).unwrap().status == 503);
    let refused = fleet.ask(0, "amber", PROMPT).unwrap();
    assert!(refused.body.contains("not_placed") && refused.body.contains("try again"), "{refused:?}");
    assert_eq!(before, engines_of(&fleet));
    fleet.etcd.restart(0);
    assert_eq!(fleet.say(0, "amber", PROMPT), truth[0][0], "{}", router.log());
    assert_eq!(before, engines_of(&fleet), "an engine was started anew");
    router.end();
    nodes.into_iter().for_each(|node| drop(node.end()));
}

fn engines_of(fleet: &Fleet) -> Vec<Option<u32>> {
    let of = |node: &fixture::Fixture| engine_of(&node.folder.join("state").join("amber.json"));
    fleet.nodes.iter().map(of).collect()
}

#[test]
fn of_two_nodes_with_one_name_the_second_waits() {
    let Some(mut fleet) = Fleet::of(1, 2) else { return };
    let tables = fleet.nodes[0].tables.clone();
    fleet.nodes[1].tables = tables;
    let first = fleet.nodes[0].start(&[]);
    let router = fleet.route(0, &[]);
    assert_eq!(text_of(&fleet.served(0, "amber", PROMPT)), fleet.truth(&[PROMPT])[0][0]);
    let second = fleet.nodes[1].start(&[]);
    fixture::until(&second, "it says so", || {
        second.log().contains("node `node0` is there already, as process ")
    });
    assert!(second.log().contains("give this node another name"), "{}", second.log());
    assert_eq!(fleet.nodes[1].complete("amber", PROMPT).status, 421);
    first.kill();
    fixture::until(&second, "it is the node now", || fleet.nodes[1].complete("amber", PROMPT).status == 200);
    router.end();
    second.end();
}

#[test]
fn a_second_router_leads_when_the_first_is_killed_or_stopped() {
    let Some(fleet) = Fleet::of(2, 2) else { return };
    let truth = fleet.truth(&[PROMPT]);
    let nodes = fleet.start();
    let first = fleet.route(0, &[]);
    assert_eq!(fleet.say(0, "amber", PROMPT), truth[0][0]);
    let fence = fleet.fence("amber");
    let second = fleet.route(1, &[]);
    // Beyond its lease.
    first.signal("STOP");
    fleet.order(&["pin", "amber", "--copies", "2"]).succeeded();
    until("another leads", || fleet.copies("amber", "goal", "hot") == 2);
    let later = fleet.fence("amber");
    assert!(later > fence, "{later} and {fence}");
    first.signal("CONT");
    fixture::until(&first, "it notices", || first.log().contains("lost leadership"));
    fleet.order(&["pin", "amber", "--off"]).succeeded();
    for router in [0, 1] {
        assert_eq!(fleet.say(router, "birch", PROMPT), truth[1][0]);
    }
    assert!(fleet.fence("amber") >= later, "what the first wrote counts");
    second.kill();
    fleet.order(&["pin", "birch", "--copies", "2"]).succeeded();
    until("the first leads again", || fleet.copies("birch", "goal", "hot") == 2);
    assert!(fleet.fence("birch") > later);
    first.end();
    nodes.into_iter().for_each(|node| drop(node.end()));
}
