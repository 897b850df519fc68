//! Prometheus metrics of a router and of the controller beside it, as OpenMetrics text.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use poorwill_fleet::controller;
use poorwill_fleet::records::{Goal, Stage};
use poorwill_front::operators::{Number, Removed, Seconds};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Registry, Unit};

use crate::backend::RouteCounts;
use crate::status::Records;
use poorwill_front::requests::{Forget, Requests};

const PREFIX: &str = "poorwill_fleet";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfCopies {
    stage: &'static str,
    goal: String,
}

/// Since the router began.
pub(super) struct FleetMetrics {
    registry: Registry,
    requests: Arc<Requests>,
    removed: Removed,
}

impl FleetMetrics {
    pub(super) fn new(requests: Arc<Requests>, counts: &RouteCounts) -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        let help = "Times that a request went on to another node";
        registry.register("retries", help, counts.retries.clone());
        let help = "Requests for which no node, or no other one, was left";
        registry.register("refused", help, counts.refused.clone());
        requests.register(&mut registry);
        let by_model: Vec<Box<dyn Forget>> =
            vec![Box::new(counts.retries.clone()), Box::new(counts.refused.clone())];
        Self { registry, removed: Removed::new(Arc::clone(&requests), by_model), requests }
    }

    /// With what the records say now, and what a controller in this process does.
    pub(super) fn text(
        &self,
        records: &Records,
        is_current: bool,
        controller: Option<&controller::Status>,
    ) -> Result<String, fmt::Error> {
        let nodes = &records.view.nodes;
        self.removed
            .forget(|model| nodes.values().any(|node| node.models.keys().any(|one| one.as_str() == model)));
        let mut text = String::new();
        encode_registry(&mut text, &self.registry)?;
        encode_registry(&mut text, &of_records(records, is_current))?;
        encode_registry(&mut text, &of_requests(&self.requests))?;
        encode_registry(&mut text, &of_controller(controller))?;
        encode_eof(&mut text)?;
        Ok(text)
    }
}

fn of_records(records: &Records, is_current: bool) -> Registry {
    let mut registry = Registry::with_prefix(PREFIX);
    let mut gauge = |name: &str, help: &str, value: u64| {
        let gauge = Number::default();
        gauge.set(value);
        registry.register(name, help, gauge);
    };
    let status = records.status();
    gauge("nodes", "Nodes whose leases live", wide(status.nodes.len()));
    let draining = status.nodes.iter().filter(|node| node.is_draining).count();
    gauge("nodes_draining", "Nodes whose models go elsewhere", wide(draining));
    gauge("pins", "Models that operators keep awake", wide(status.pins.len()));
    gauge("problems", "Records that are not understood, and problems of nodes", wide(status.problems.len()));
    gauge("has_leader", "Whether a controller is elected", status.leader.is_some().into());
    gauge("etcd_is_current", "Whether etcd was reached a short time ago", is_current.into());
    let copies = Family::<OfCopies, Number>::default();
    let help =
        "Models on nodes, by where they are and what is wanted; stage `gone` without a node that has it";
    registry.register("copies", help, copies.clone());
    for stage in Stage::ALL {
        for goal in [Goal::None, Goal::Warm, Goal::Hot] {
            copies.get_or_create(&OfCopies { stage: stage.as_str(), goal: goal.to_string() }).set(0);
        }
    }
    for copy in &status.models {
        let stage = copy.stage.map_or("gone", Stage::as_str);
        copies.get_or_create(&OfCopies { stage, goal: copy.goal.to_string() }).inc();
    }
    registry
}

fn of_requests(requests: &Requests) -> Registry {
    let mut registry = Registry::with_prefix(PREFIX);
    let running = Number::default();
    running.set(wide(requests.active(0).1));
    // Without a label: endpoint pickers read one number from each server.
    registry.register("requests_running", "Requests at this router that have not ended", running);
    registry
}

/// A process without a candidate does not lead.
fn of_controller(status: Option<&controller::Status>) -> Registry {
    let mut registry = Registry::with_prefix(PREFIX);
    let (leads, seconds, shortages) = (Number::default(), Seconds::default(), Number::default());
    let written = Counter::<u64, AtomicU64>::default();
    registry.register("is_leader", "Whether this process places models", leads.clone());
    let help = "Seconds that the last decision of this process took";
    registry.register_with_unit("decision", help, Unit::Seconds, seconds.clone());
    registry.register("placements_written", "Placements that this process wrote", written.clone());
    let help =
        "What models should have and do not get, by the last decision; 0 in a process that does not lead";
    registry.register("shortages", help, shortages.clone());
    if let Some(status) = status {
        let is_leader = status.leads_since.is_some();
        leads.set(is_leader.into());
        seconds.set(status.decided_in.as_secs_f64());
        written.inc_by(status.written);
        shortages.set(if is_leader { wide(status.plan.shortages.len()) } else { 0 });
    }
    registry
}

fn wide(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}
