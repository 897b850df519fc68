//! Several controllers, whose connections break, whose leases are revoked, and who come and go.

use std::time::Duration;

use fastrand::Rng;
use poorwill_fleet::controller::Controller;
use poorwill_fleet::etcd::LeaseId;
use poorwill_fleet::keys::Key;
use poorwill_testkit::effort::{Effort, seed_of_this_run};
use poorwill_testkit::etcd::Servers;
use poorwill_testkit::proxy::Proxy;
use tokio::time::sleep;

use super::fleet::Fleet;
use super::history;
use super::support::{TTL, hasty, revoke, steady};

struct Chaos<'s> {
    servers: &'s Servers,
    fleet: Fleet,
    rng: Rng,
    proxies: Vec<Proxy>,
    controllers: Vec<Option<Controller>>,
    nodes: Vec<Option<LeaseId>>,
    started: u32,
}

impl Chaos<'_> {
    async fn step(&mut self) {
        let at = self.rng.usize(..self.proxies.len());
        match self.rng.u8(..16) {
            0 => self.proxies[at].hold(),
            1 => self.proxies[at].cut(),
            2 => self.proxies[at].cut_once(),
            3 => self.proxies[at].hold_those_with(&["/v3/watch"]),
            4 => self.proxies[at].hold_those_with(&["/v3/lease/keepalive"]),
            5 => self.proxies[at].hold_those_with(&["/v3/kv/txn"]),
            6..9 => self.proxies[at].go_on(),
            9 => {
                let (keys, _) = self.fleet.etcd.read(&self.fleet.key(&Key::Election)).await.unwrap();
                if let Some(key) = keys.iter().min_by_key(|key| key.create_revision) {
                    revoke(self.servers, key.lease);
                }
            }
            10 => drop(self.controllers[at].take()),
            11 | 12 => self.start(at),
            _ => {
                let node = self.rng.usize(..self.nodes.len());
                match self.nodes[node].take() {
                    Some(lease) => self.fleet.etcd.revoke(lease).await.unwrap(),
                    None => {
                        let lease = self.fleet.node(&format!("n{node}"), &["one", "two", "three"]).await;
                        self.nodes[node] = Some(lease);
                    }
                }
            }
        }
    }

    fn start(&mut self, at: usize) {
        self.started += 1;
        let etcd = hasty(&[self.proxies[at].url()]);
        let who = format!("c{}", self.started);
        self.controllers[at] = Some(self.fleet.controller(etcd, &who, TTL));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn controllers_take_turns_whatever_happens() {
    let Some(servers) = Servers::one() else { return };
    let seed = seed_of_this_run().unwrap_or_else(|| fastrand::u64(..));
    println!("POORWILL_SEED={seed}");
    let fleet = Fleet::new(steady(&servers.urls()));
    let mut chaos = Chaos {
        servers: &servers,
        fleet: fleet.clone(),
        rng: Rng::with_seed(seed),
        proxies: (0..3).map(|_| Proxy::to(servers.port(0))).collect(),
        controllers: (0..3).map(|_| None).collect(),
        nodes: vec![None; 5],
        started: 0,
    };
    for at in 0..3 {
        chaos.start(at);
    }
    fleet.pin("two", 2).await;
    for _ in 0..Effort::of_this_run().cases(300) {
        chaos.step().await;
        sleep(Duration::from_millis(chaos.rng.u64(..400))).await;
    }
    for (at, proxy) in chaos.proxies.iter().enumerate() {
        proxy.cut_once();
        if chaos.controllers[at].is_none() {
            let again = fleet.controller(fleet.etcd.clone(), "last", TTL);
            chaos.controllers[at] = Some(again);
        }
    }
    fleet.node("last", &["last"]).await;
    let placed = fleet.settled().await;
    assert!(placed.keys().any(|(model, _)| model == "last"), "{placed:?}");
    let history = history::of(&fleet.etcd, &fleet.name).await;
    let wrote = history::check(&history);
    println!("{} changes of placements by {wrote} controllers", history.len());
    for controller in chaos.controllers.into_iter().flatten() {
        controller.end().await;
    }
}
