//! A fleet without machines: records that a test writes, and what the policy makes of them.

use std::collections::BTreeMap;

use poorwill_fleet::clock::now_unix_ms;
use poorwill_fleet::controller::{Controller, Settings, Status};
use poorwill_fleet::etcd::{Etcd, LeaseId};
use poorwill_fleet::keys::{self, Key};
use poorwill_fleet::name::FleetName;
use poorwill_fleet::policy::{Plan, Rules, Time, View, decide};
use poorwill_fleet::records::{Goal, GpuRecord, ModelRecord, NodeRecord, Pin, Record, Stage, write};

use super::Servers;
use super::support::{LONG_TTL, TTL, eventually, put, steady, until};

const GIB: u64 = 1 << 30;

/// A fleet in an etcd.
#[derive(Debug, Clone)]
pub(crate) struct Fleet {
    pub(crate) etcd: Etcd,
    pub(crate) name: FleetName,
}

/// Placements: which model has which goal on which node.
pub(crate) type Placed = BTreeMap<(String, String), Goal>;

impl Fleet {
    /// In an etcd or a store of its own.
    pub(crate) fn one() -> Option<(Servers, Self)> {
        let servers = Servers::one()?;
        let fleet = Self::new(steady(&servers.urls()));
        Some((servers, fleet))
    }

    pub(crate) fn new(etcd: Etcd) -> Self {
        Self { etcd, name: "prod".parse().unwrap() }
    }

    pub(crate) fn key(&self, key: &Key) -> String {
        key.in_fleet(&self.name)
    }

    /// A node with these models asleep, each of which fills a GPU. All is under the lease.
    pub(crate) async fn node(&self, name: &str, models: &[&str]) -> LeaseId {
        let lease = self.etcd.grant(LONG_TTL).await.unwrap();
        let gpu = GpuRecord { total_bytes: 80 * GIB, budget_bytes: 80 * GIB };
        let node = NodeRecord { gpus: vec![gpu; 8], host_free_bytes: 900 * GIB, ..NodeRecord::new("a") };
        self.put(&Key::Node(name.parse().unwrap()), &node, Some(lease)).await;
        for (at, model) in models.iter().enumerate() {
            self.model(name, model, at % 8, lease).await;
        }
        lease
    }

    pub(crate) async fn model(&self, node: &str, model: &str, gpu: usize, lease: LeaseId) {
        let record =
            ModelRecord { need_bytes: Some(vec![70 * GIB]), ..ModelRecord::new(Stage::Asleep, vec![gpu]) };
        let key = Key::Model { node: node.parse().unwrap(), model: model.parse().unwrap() };
        self.put(&key, &record, Some(lease)).await;
    }

    pub(crate) async fn pin(&self, model: &str, copies: u32) {
        self.put(&Key::Pin(model.parse().unwrap()), &Pin::new(copies), None).await;
    }

    async fn put<T: Record>(&self, key: &Key, record: &T, lease: Option<LeaseId>) {
        put(&self.etcd, &self.key(key), &write(key, record).unwrap(), lease).await;
    }

    pub(crate) fn settings(&self, who: &str) -> Settings {
        let (fleet, rules) = (self.name.clone(), Rules::default());
        Settings { fleet, rules, lease_ttl: TTL, who: who.to_owned() }
    }

    /// A controller with these clients and lease times.
    pub(crate) fn controller(&self, etcd: Etcd, who: &str, lease_ttl: std::time::Duration) -> Controller {
        Controller::start(etcd, Settings { lease_ttl, ..self.settings(who) })
    }

    pub(crate) async fn view(&self) -> View {
        let (entries, _) = self.etcd.read(&keys::prefix(&self.name)).await.unwrap();
        View::read(&self.name, entries.iter().map(|entry| (entry.key.as_str(), &*entry.value))).0
    }

    /// What the policy would write now.
    pub(crate) async fn plan(&self) -> Plan {
        decide(&self.view().await, &Rules::default(), Time(now_unix_ms()))
    }

    pub(crate) async fn placed(&self) -> Placed {
        let placements = self.view().await.placements;
        let each = placements.iter().flat_map(|(model, nodes)| nodes.iter().map(move |at| (model, at)));
        each.filter_map(|(model, (node, placement))| {
            Some(((model.to_string(), node.to_string()), placement.as_ref()?.goal))
        })
        .collect()
    }

    pub(crate) async fn fences(&self) -> Vec<u64> {
        let placements = self.view().await.placements;
        let all = placements.values().flat_map(BTreeMap::values).flatten();
        all.map(|placement| placement.fence).collect()
    }

    /// Waits until the policy has nothing to add, and returns what is placed.
    pub(crate) async fn settled(&self) -> Placed {
        eventually("all is placed", async || self.plan().await.changes.is_empty()).await;
        self.placed().await
    }
}

/// Waits until it leads, and returns the revision of its election.
pub(crate) async fn leads(controller: &Controller) -> u64 {
    let leads = |status: &Status| status.leads_since.is_some();
    until(&mut controller.status(), "it leads", leads).await.leads_since.unwrap()
}

pub(crate) async fn leads_no_more(controller: &Controller, since: u64) {
    let is_over = |status: &Status| status.leads_since != Some(since);
    until(&mut controller.status(), "it leads no more", is_over).await;
}
