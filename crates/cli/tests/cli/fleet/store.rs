//! A fleet without etcd: its routers keep the records.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;

use super::parts::{LEASE, tables, until};
use crate::rotate::fixture::{
    Fixture, HANGS, Model, Rotator, TOKENS, engine_of, free_port, ran, text_of, until as until_in,
};
use crate::rotate::http::{self, Answer};
use crate::support::{Folder, command};

const PASSWORD: &str = "kept-secret";
const PROMPT: &str = "Tell me of a harbour.";
const KEEPS: &str = "this store keeps the fleet's records";

/// Two nodes, and routers with stores.
struct StoreFleet {
    nodes: [Fixture; 2],
    /// The port of each router's front, and of its store.
    routers: Vec<(u16, u16)>,
    folder: Folder,
    truth: String,
}

impl StoreFleet {
    /// A single router needs no list of stores.
    fn of(routers: usize) -> Self {
        let folder = Folder::new();
        folder.write("password", PASSWORD);
        let password = json!(format!("file:{}", folder.path().join("password").display()));
        let routers: Vec<(u16, u16)> = (0..routers).map(|_| (free_port(), free_port())).collect();
        let url = |(_, store): &(u16, u16)| format!("http://127.0.0.1:{store}");
        let urls: Vec<String> = routers.iter().map(url).collect();
        let user = format!("etcd_user = \"poor\"\netcd_password = {password}\n");
        let stores = format!("etcd = {}\n{user}", json!(urls));
        for (nth, (front, store)) in routers.iter().enumerate() {
            let etcd = if routers.len() > 1 { &*stores } else { "" };
            let text = format!(
                "[fleet]\nname = \"test\"\n{etcd}lease = \"{LEASE}s\"\n[front]\nlisten = \"127.0.0.1:{front}\"\n\
                 [store]\nlisten = \"127.0.0.1:{store}\"\npassword = {password}\n[rules]\nkeep_min = \"0s\"\n"
            );
            folder.write(format!("fleet{nth}.toml"), text);
        }
        let nodes = ["node0", "node1"].map(|name| {
            let mut node = Fixture::new("512MiB", vec![Model::new("amber")]);
            node.tables = tables(name, &urls) + &user;
            node
        });
        let truth = nodes[0].truth("amber", &[PROMPT], TOKENS).swap_remove(0);
        Self { nodes, routers, folder, truth }
    }

    fn start(&self) -> Vec<Rotator> {
        self.nodes.iter().map(|node| node.start(&[])).collect()
    }

    fn route(&self, nth: usize) -> Rotator {
        let config = format!("fleet{nth}.toml");
        let mut command = command(self.folder.path(), ["route", "--config", &config]);
        Rotator::spawned(&mut command, self.routers[nth].0)
    }

    fn ask(&self, router: usize) -> Answer {
        let body = json!({ "model": "amber", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0 });
        http::ask(self.routers[router].0, "POST", "/v1/completions", &[], &body.to_string()).unwrap()
    }

    fn is_served(&self, router: usize) {
        until("it is served", || self.ask(router).status == 200);
        assert_eq!(text_of(&self.ask(router)), self.truth);
    }

    fn keeps(&self, router: usize) -> bool {
        let health = http::ask(self.routers[router].1, "GET", "/health", &[], "");
        health.is_ok_and(|health| health.status == 200)
    }

    /// Waits until both nodes are in the store that counts.
    fn has_nodes(&self, router: usize) {
        until("both nodes are there", || {
            let config = format!("fleet{router}.toml");
            let words = ["fleet", "status", "--json", "--config", &config];
            let status = ran(&mut command(self.folder.path(), words)).json();
            status["nodes"].as_array().unwrap().len() == 2
        });
    }

    fn engines(&self) -> Vec<Option<u32>> {
        let of = |node: &Fixture| engine_of(&node.folder.join("state").join("amber.json"));
        self.nodes.iter().map(of).collect()
    }

    fn is_up(&self) -> Vec<Option<u32>> {
        until("it was started on both", || self.engines().iter().flatten().count() == 2);
        self.engines()
    }

    /// Kills the first router, and starts it again once the second one has both nodes.
    fn move_there_and_back(&self, first: Rotator, second: &Rotator) -> Rotator {
        first.kill();
        until_in(second, "it keeps the records", || second.log().contains(KEEPS));
        self.has_nodes(1);
        let first = self.route(0);
        until_in(&first, "it keeps the records", || first.log().contains(KEEPS));
        until_in(second, "it refuses", || !self.keeps(1));
        self.has_nodes(1);
        first
    }

    fn end(&self, nodes: Vec<Rotator>, before: &[Option<u32>]) {
        assert_eq!(before, self.engines(), "an engine was started anew");
        for node in nodes {
            assert!(!node.log().contains("lets a model go"), "{}", node.log());
            assert!(!node.log().contains(PASSWORD), "{}", node.log());
            node.end();
        }
    }
}

const ROUTES_KEPT: Duration = Duration::from_secs(15);

#[test]
fn a_router_keeps_the_records_and_its_end_ends_nothing() {
    let fleet = StoreFleet::of(1);
    let nodes = fleet.start();
    let router = fleet.route(0);
    fleet.is_served(0);
    let before = fleet.is_up();
    fleet.has_nodes(0);
    router.kill();
    // Until all leases are over by any clock.
    let beyond_lease = Instant::now() + Duration::from_millis(LEASE * 1000 + 500);
    while Instant::now() < beyond_lease {
        for node in &fleet.nodes {
            assert_eq!(text_of(&node.complete("amber", PROMPT)), fleet.truth);
        }
    }
    let router = fleet.route(0);
    fleet.is_served(0);
    fleet.has_nodes(0);
    fleet.is_served(0);
    assert!(!router.log().contains(PASSWORD), "{}", router.log());
    fleet.end(nodes, &before);
    router.end();
}

#[test]
fn a_second_store_takes_over_and_the_first_one_takes_back() {
    let fleet = StoreFleet::of(2);
    let nodes = fleet.start();
    let first = fleet.route(0);
    let second = fleet.route(1);
    fleet.is_served(0);
    fleet.is_served(1);
    let before = fleet.is_up();
    assert!(fleet.keeps(0) && !fleet.keeps(1), "{}", second.log());
    fleet.has_nodes(1);

    // The second router serves on all the time.
    let ends = AtomicBool::new(false);
    let first = std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let began = Instant::now();
            while !ends.load(Ordering::Relaxed) && began.elapsed() < 3 * HANGS {
                let answer = fleet.ask(1);
                // On a slow machine it may take longer than routes are kept.
                let is_slow = began.elapsed() > ROUTES_KEPT;
                let is_right = answer.status == 200 || is_slow && answer.status == 503;
                assert!(is_right, "{answer:?}\n{}", second.log());
            }
        });
        let first = fleet.move_there_and_back(first, &second);
        ends.store(true, Ordering::Relaxed);
        asking.join().unwrap();
        first
    });
    assert!(second.log().contains("another store keeps the fleet's records"), "{}", second.log());
    for router in [0, 1] {
        fleet.is_served(router);
    }
    second.end();
    fleet.is_served(0);
    fleet.end(nodes, &before);
    first.end();
}
