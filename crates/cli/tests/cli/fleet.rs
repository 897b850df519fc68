//! `poorwill route` and `poorwill fleet` over a real etcd, with rotations as nodes and mock engines.
//!
//! Where there is no etcd, each test says so and ends.

mod chaos;
mod hot;
mod parts;
mod store;
mod tls;
mod upgrade;
mod usage;
mod users;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;

use self::parts::{Fleet, LEASE, until};
use super::rotate::fixture::{self, Rotator, engine_of, text_of};
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

/// The process stands still with a request in its queue, until etcd has ended its lease. It goes on, and etcd is away.
/// Nothing says that the model is not its own any more.
/// Row: a node is cut off from etcd.
#[test]
fn a_node_that_was_stopped_beyond_its_lease_serves_what_was_placed_on_it() {
    let Some(mut fleet) = Fleet::of(1, 1) else { return };
    fleet.nodes[0].models[0].is_held = true;
    let [node] = fleet.start().try_into().ok().unwrap();
    let router = fleet.route(0, &["--only", "controller"]);
    until("it is placed", || fleet.copies("amber", "goal", "warm") == 1);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut answer = fleet.nodes[0].complete("amber", PROMPT);
            // The placement is in etcd, and not yet there.
            while answer.status == 421 {
                answer = fleet.nodes[0].complete("amber", PROMPT);
            }
            answer
        });
        fixture::until(&node, "the request waits", || fleet.nodes[0].now("amber")["queued"] == 1);
        node.signal("STOP");
        until("etcd has ended its lease", || !fleet.has_node("node0"));
        fleet.etcd.hold(0);
        node.signal("CONT");
        fleet.nodes[0].open_latch();
        let answer = waiting.join().unwrap();
        assert_eq!(answer.status, 200, "{answer:?}\n{}", node.log());
        fleet.etcd.go_on(0);
    });
    until("it is back", || fleet.has_node("node0"));
    assert_eq!(fleet.nodes[0].complete("amber", PROMPT).status, 200);
    assert_eq!(fleet.nodes[0].now("amber")["starts"], 1);
    assert!(!node.log().contains("lets a model go"), "{}", node.log());
    router.end();
    node.end();
}

/// Row: etcd is gone.
#[test]
fn without_etcd_models_are_served_and_none_ends() {
    let Some(mut fleet) = Fleet::of(1, 2) else { return };
    let truth = fleet.truth(&[PROMPT]);
    let nodes = fleet.start();
    let router = fleet.route(0, &[]);
    assert_eq!(fleet.say(0, "amber", PROMPT), truth[0][0]);
    until("it was started on both", || engines_of(&fleet).iter().flatten().count() == 2);
    let before = engines_of(&fleet);
    fleet.etcd.kill(0);
    // Until all leases are over by any clock.
    let beyond_lease = Instant::now() + Duration::from_millis(LEASE * 1000 + 500);
    while Instant::now() < beyond_lease {
        let answer = fleet.ask(0, "amber", PROMPT).unwrap();
        assert_eq!((answer.status, text_of(&answer)), (200, truth[0][0].clone()), "{}", router.log());
    }
    assert_eq!(before, engines_of(&fleet));
    fleet.etcd.restart(0);
    until("both are there", || fleet.has_node("node0") && fleet.has_node("node1"));
    assert_eq!(fleet.say(0, "amber", PROMPT), truth[0][0], "{}", router.log());
    assert_eq!(before, engines_of(&fleet), "an engine was started anew");
    for node in nodes {
        assert!(!node.log().contains("lets a model go"), "{}", node.log());
        node.end();
    }
    router.end();
}

/// Its lease would last for an hour. Its state folder says that its holder is dead.
/// Row: only its process is killed.
#[test]
fn a_killed_node_is_back_before_its_lease_is_over_and_its_engines_stay() {
    let Some(mut fleet) = Fleet::of(1, 1) else { return };
    fleet.nodes[0].tables = fleet.nodes[0].tables.replace(&format!("\"{LEASE}s\""), "\"1h\"");
    let truth = fleet.truth(&[PROMPT]);
    let [mut node] = fleet.start().try_into().ok().unwrap();
    let router = fleet.route(0, &[]);
    assert_eq!(fleet.say(0, "amber", PROMPT), truth[0][0]);
    let before = engines_of(&fleet);
    for _ in 0..3 {
        node.kill();
        node = fleet.nodes[0].start(&[]);
        fixture::until(&node, "its name is its own", || {
            node.log().contains("ends the lease of the process before")
        });
        assert_eq!(fleet.say(0, "amber", PROMPT), truth[0][0], "{}\n{}", node.log(), router.log());
        assert_eq!(before, engines_of(&fleet), "{}", node.log());
        assert!(!node.log().contains("lets a model go"), "{}", node.log());
    }
    // Without etcd it serves what it was ordered before.
    fleet.etcd.kill(0);
    node.kill();
    node = fleet.nodes[0].start(&[]);
    fixture::until(&node, "it serves", || fleet.nodes[0].complete("amber", PROMPT).status == 200);
    assert_eq!(fleet.say(0, "amber", PROMPT), truth[0][0], "{}", router.log());
    assert_eq!(before, engines_of(&fleet), "{}", node.log());
    router.end();
    node.end();
}

/// Row: etcd lost its data, or is an older state.
#[test]
fn an_etcd_that_lost_its_data_needs_no_hand() {
    let Some(mut fleet) = Fleet::of(1, 2) else { return };
    let truth = fleet.truth(&[PROMPT]);
    let mut nodes = fleet.start();
    let mut router = fleet.route(0, &[]);
    until("amber is placed on both", || {
        fleet.copies("amber", "goal", "none") == 0 && fleet.has_node("node1")
    });
    until("it was started on both", || engines_of(&fleet).iter().flatten().count() == 2);
    let before = engines_of(&fleet);
    for ends in [false, true] {
        if ends {
            nodes.drain(..).for_each(Rotator::kill);
            router.kill();
            fleet.etcd.lose_all();
            nodes = fleet.start();
            router = fleet.route(0, &[]);
        } else {
            fleet.etcd.lose_all();
        }
        until("both are there", || fleet.has_node("node0") && fleet.has_node("node1"));
        until("amber is placed", || fleet.copies("amber", "goal", "warm") == 2);
        assert_eq!(fleet.say(0, "amber", PROMPT), truth[0][0], "{}", router.log());
        assert_eq!(fleet.status()["problems"], json!([]));
        assert_eq!(before, engines_of(&fleet), "an engine was started anew");
    }
    for node in nodes {
        assert!(!node.log().contains("lets a model go"), "{}", node.log());
        node.end();
    }
    router.end();
}

/// Row: a record is newer than its reader, or wrong.
#[test]
fn placements_that_cannot_be_followed_are_named_and_change_nothing() {
    let Some(fleet) = Fleet::of(1, 1) else { return };
    let truth = fleet.truth(&[PROMPT]);
    let [node] = fleet.start().try_into().ok().unwrap();
    let router = fleet.route(0, &[]);
    assert_eq!(fleet.say(0, "amber", PROMPT), truth[0][0]);
    // Its controller would write them again.
    router.signal("STOP");
    for (record, word) in [
        (r#"{"format": 99}"#, "has format 99; upgrade this node"),
        ("{", "record `placements/amber/node0`: "),
    ] {
        fleet.etcd.put("/poorwill/test/placements/amber/node0", record);
        until("its status names it", || {
            let problems = fleet.status()["problems"].to_string();
            problems.contains("node `node0`: ") && problems.contains(word)
        });
        assert_eq!(fleet.nodes[0].say("amber", PROMPT), truth[0][0]);
    }
    let metrics = http::ask(fleet.nodes[0].control, "GET", "/metrics", &[], "").unwrap().body;
    assert!(metrics.contains("poorwill_rotate_fleet_placements_refused 1\n"), "{metrics}");
    assert!(!node.log().contains("lets a model go"), "{}", node.log());
    router.signal("CONT");
    router.end();
    node.end();
}

/// What was written behind the saved state is lost, and leases and the election of that state are there.
#[test]
fn an_etcd_that_is_restored_needs_no_hand() {
    let Some(mut fleet) = Fleet::of(1, 2) else { return };
    let truth = fleet.truth(&[PROMPT]);
    let nodes = fleet.start();
    let router = fleet.route(0, &[]);
    until("it was started on both", || engines_of(&fleet).iter().flatten().count() == 2);
    fleet.etcd.save();
    // Far beyond the revision of the saved state.
    for nth in 0..2_000 {
        fleet.etcd.put("/poorwill/another/wish", &nth.to_string());
    }
    fleet.order(&["pin", "amber", "--copies", "2"]).succeeded();
    until("amber is awake on both", || fleet.copies("amber", "stage", "awake") == 2);
    let before = engines_of(&fleet);
    fleet.etcd.restore();
    // No stage of long ago stays, and the controller goes on.
    until("nodes have said what is", || fleet.copies("amber", "stage", "awake") == 2);
    fleet.order(&["pin", "birch", "--copies", "2"]).succeeded();
    until("birch is awake on both", || fleet.copies("birch", "stage", "awake") == 2);
    assert_eq!(fleet.say(0, "amber", PROMPT), truth[0][0], "{}", router.log());
    assert_eq!(before, engines_of(&fleet), "an engine was started anew");
    nodes.into_iter().for_each(|node| drop(node.end()));
    router.end();
}

/// One who can write to etcd, and has no key, gets no request and no key.
#[test]
fn nodes_that_did_not_sign_their_address_get_nothing() {
    let Some(fleet) = Fleet::of(1, 1) else { return };
    let node_key = format!("node_key = {}\n", json!(format!("env:{}", fixture::KEY_NAME)));
    let mut node = fixture::Fixture::new("512MiB", vec![fixture::Model::new("amber")]);
    (node.has_keys, node.tables) = (true, fleet.nodes[0].tables.clone());
    let node_started = node.start(&[]);
    let router = fleet.route_with(&node_key);
    let truth = node.truth("amber", &[PROMPT], fixture::TOKENS);
    assert_eq!(fleet.say(0, "amber", PROMPT), truth[0], "{}", router.log());
    let thief = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", thief.local_addr().unwrap());
    let record = json!({ "format": 1, "instance": "thief", "front_url": url });
    let model = json!({ "format": 1, "stage": "awake", "gpus": [0] });
    let placement = json!({ "format": 1, "fence": 1, "goal": "warm", "changed_at_ms": 0 });
    fleet.etcd.put("/poorwill/test/nodes/thief", &record.to_string());
    fleet.etcd.put("/poorwill/test/nodes/thief/models/amber", &model.to_string());
    fleet.etcd.put("/poorwill/test/placements/amber/thief", &placement.to_string());
    fixture::until(&router, "it is named", || {
        router.log().contains("node `thief`: its address is not signed")
    });
    let check = fleet.check(&node_key);
    assert!(check.contains("warning: node `thief`: its address is not signed with node_key"), "{check}");
    for _ in 0..20 {
        assert_eq!(fleet.say(0, "amber", PROMPT), truth[0]);
    }
    thief.set_nonblocking(true).unwrap();
    assert!(thief.accept().is_err(), "a request came to it");
    router.end();
    node_started.end();
}

/// Each row of the guide's table has a test that names it.
#[test]
fn what_the_guide_says_of_parts_that_are_gone_is_tested() {
    let guide = include_str!("../../../../docs/fleet.md");
    let table = guide.split("## What may go wrong").nth(1).and_then(|rest| rest.split("## ").next()).unwrap();
    let rows = table.lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next());
    let rows: Vec<&str> = rows.filter(|row| *row != "what").collect();
    let tests = [include_str!("fleet.rs"), include_str!("fleet/chaos.rs")].concat();
    let untested: Vec<&&str> = rows.iter().filter(|row| !tests.contains(&format!("Row: {row}."))).collect();
    assert!(rows.len() > 5 && untested.is_empty(), "{untested:?} of {rows:?}");
}

fn engines_of(fleet: &Fleet) -> Vec<Option<u32>> {
    let of = |node: &fixture::Fixture| engine_of(&node.folder.join("state").join("amber.json"));
    fleet.nodes.iter().map(of).collect()
}

/// Row: two nodes have one name.
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

/// Row: the controller dies or is stopped.
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

/// Two routers that know nothing of each other.
#[test]
fn requests_with_the_same_beginning_go_to_the_same_node() {
    let Some(fleet) = Fleet::of(2, 2) else { return };
    let nodes = fleet.start();
    let routers = [fleet.route(0, &[]), fleet.route(1, &["--only", "front"])];
    fleet.order(&["pin", "birch", "--copies", "2"]).succeeded();
    let admitted = || fleet.nodes.iter().map(|node| node.now("birch")["admitted"].as_u64().unwrap());
    let node_of = |router: usize, prompt: &str| {
        let before: Vec<u64> = admitted().collect();
        assert_eq!(fleet.served(router, "birch", prompt).status, 200);
        admitted().zip(before).position(|(now, before)| now > before)
    };
    // As soon as both routers know that both nodes have it awake.
    until("each prompt has a node of its own, for both routers", || {
        let chosen = [0, 1].map(|router| {
            (0..16).map(|nth| node_of(router, &format!("{nth}: {PROMPT}"))).collect::<Vec<_>>()
        });
        chosen[0] == chosen[1] && chosen[0].contains(&Some(0)) && chosen[0].contains(&Some(1))
    });
    routers.into_iter().for_each(|router| drop(router.end()));
    nodes.into_iter().for_each(|node| drop(node.end()));
}
