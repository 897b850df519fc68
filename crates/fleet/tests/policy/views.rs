//! Random fleets, and what the tests read from them without the policy.

use std::collections::{BTreeMap, BTreeSet};

use poorwill_fleet::keys::Key;
use poorwill_fleet::name::{FleetName, ModelName, NodeName};
use poorwill_fleet::policy::{NodeView, Plan, Rules, Time, View};
use poorwill_fleet::records::{
    Costs, Drain, Goal, GpuRecord, ModelRecord, NodeRecord, Pin, Placement, Rate, Requests, Stage, write,
};
use proptest::prelude::*;

pub(crate) const NOW: Time = Time(1_700_000_000_000);
const GIB: u64 = 1 << 30;

fn node(at: usize) -> NodeName {
    format!("node-{at}").parse().unwrap()
}

fn model(at: usize) -> ModelName {
    format!("org/model-{at}").parse().unwrap()
}

pub(crate) fn rules() -> impl Strategy<Value = Rules> {
    (1..4_usize, 1..4_usize).prop_map(|(copies_min, copies_max)| Rules {
        copies_min,
        copies_max,
        ..Rules::default()
    })
}

prop_compose! {
    fn node_record()(
        domain in 0..4_usize,
        gpus in 1..4_usize,
        budget_gib in 20..80_u64,
        host_gib in 0..400_u64,
        is_draining in prop::bool::weighted(0.15),
    ) -> NodeRecord {
        let gpu = GpuRecord { total_bytes: 80 * GIB, budget_bytes: budget_gib * GIB };
        NodeRecord {
            domain: if domain == 0 { String::new() } else { format!("rack-{domain}") },
            gpus: vec![gpu; gpus],
            host_free_bytes: host_gib * GIB,
            is_draining,
            ..NodeRecord::new("a")
        }
    }
}

prop_compose! {
    fn model_record()(
        stage in prop::sample::select(vec![
            Stage::Awake, Stage::Awake, Stage::Asleep, Stage::Asleep, Stage::OnDisk, Stage::Hibernating,
            Stage::Stopped, Stage::Stopped, Stage::Waking, Stage::Sleeping, Stage::Starting, Stage::Failed,
        ]),
        gpus in prop::sample::select(vec![vec![0], vec![0], vec![1], vec![0, 1], vec![1, 2], vec![]]),
        need_gib in prop::option::weighted(0.9, 0..60_u64),
        micros in prop::sample::select(vec![0, 0, 1_000, 2_000, 50_000, 1_000_000, 9_000_000, 30_000_000]),
        requests in prop::sample::select(vec![0, 0, 1, 20, 40, 100]),
        wake_ms in prop::option::of(100..9_000_u64),
        pinned in prop::bool::weighted(0.05),
    ) -> ModelRecord {
        ModelRecord {
            need_bytes: need_gib.map(|need| vec![need * GIB; gpus.len()]),
            host_bytes: 10 * GIB,
            requests: Requests { running: requests, queued: 0 },
            rate: Rate::from_micros(micros),
            costs: Costs { wake_ms, ..Costs::default() },
            pinned,
            ..ModelRecord::new(stage, gpus)
        }
    }
}

fn placement() -> impl Strategy<Value = Option<Placement>> {
    let goal = prop::sample::select(vec![Goal::Hot, Goal::Hot, Goal::Warm, Goal::None]);
    let age_ms = prop::sample::select(vec![0, 30_000, 90_000, 600_000, 9_000_000]);
    let one = (goal, age_ms, any::<bool>()).prop_map(|(goal, age_ms, is_held)| {
        let placement = Placement::new(5, goal, NOW.0 - age_ms, "");
        Placement { pinned: (goal == Goal::Hot).then_some(is_held), ..placement }
    });
    prop::option::weighted(0.97, one)
}

/// Fleets in any state, also in those that no policy would bring about.
pub(crate) fn view() -> impl Strategy<Value = View> {
    let nodes = prop::collection::vec(
        (
            prop::option::weighted(0.95, node_record()),
            prop::collection::btree_map(0..12_usize, prop::option::weighted(0.97, model_record()), 0..10),
            prop::bool::weighted(0.1),
        ),
        0..7,
    );
    let placements = prop::collection::btree_map((0..13_usize, 0..8_usize), placement(), 0..30);
    let pins =
        prop::collection::btree_map(0..13_usize, (1..4_u32, prop::collection::vec(0..8_usize, 0..3)), 0..3);
    (nodes, placements, pins).prop_map(|(nodes, placements, pins)| {
        let mut view = View::default();
        for (at, (record, models, is_drained)) in nodes.into_iter().enumerate() {
            let models: BTreeMap<_, _> = models.into_iter().map(|(at, record)| (model(at), record)).collect();
            // Without a record and without models, nothing of it is there.
            if record.is_some() || !models.is_empty() {
                view.nodes.insert(node(at), NodeView { record, models });
            }
            if is_drained {
                view.drains.insert(node(at));
            }
        }
        for ((of, on), placement) in placements {
            view.placements.entry(model(of)).or_default().insert(node(on), placement);
        }
        for (of, (copies, nodes)) in pins {
            let nodes = nodes.into_iter().map(node).collect();
            view.pins.insert(model(of), Pin { nodes, ..Pin::new(copies) });
        }
        view
    })
}

/// As they lie in etcd. What is not understood is of a newer format.
pub(crate) fn entries(view: &View, fleet: &FleetName) -> Vec<(String, String)> {
    const NEWER: &str = r#"{"format": 99}"#;
    let mut entries = Vec::new();
    let mut add = |key: Key, json: Option<String>| {
        entries.push((key.in_fleet(fleet), json.unwrap_or_else(|| NEWER.to_owned())));
    };
    for (name, seen) in &view.nodes {
        let key = Key::Node(name.clone());
        add(key.clone(), seen.record.as_ref().map(|record| write(&key, record).unwrap()));
        for (model, record) in &seen.models {
            let key = Key::Model { node: name.clone(), model: model.clone() };
            add(key.clone(), record.as_ref().map(|record| write(&key, record).unwrap()));
        }
    }
    for (model, nodes) in &view.placements {
        for (node, placement) in nodes {
            let key = Key::Placement { model: model.clone(), node: node.clone() };
            add(key.clone(), placement.as_ref().map(|placement| write(&key, placement).unwrap()));
        }
    }
    for node in &view.drains {
        let key = Key::Drain(node.clone());
        add(key.clone(), Some(write(&key, &Drain::new("")).unwrap()));
    }
    for (model, pin) in &view.pins {
        let key = Key::Pin(model.clone());
        add(key.clone(), Some(write(&key, pin).unwrap()));
    }
    entries
}

/// Writes a plan as a controller would.
pub(crate) fn apply(view: &mut View, plan: &Plan, at: Time) {
    for change in &plan.changes {
        let nodes = view.placements.entry(change.model.clone()).or_default();
        let before = nodes.remove(&change.node).flatten();
        let placement = change.placement(5, before.as_ref(), at);
        nodes.extend(placement.map(|placement| (change.node.clone(), Some(placement))));
    }
    view.placements.retain(|_, nodes| !nodes.is_empty());
}

/// Nodes do what they were asked to. What failed stays so.
pub(crate) fn realize(view: &mut View) {
    for (name, node) in &mut view.nodes {
        for (model, record) in &mut node.models {
            let Some(record) = record.as_mut().filter(|record| !record.stage.is_out()) else { continue };
            let placement = view.placements.get(model).and_then(|nodes| nodes.get(name)).cloned().flatten();
            record.stage = match placement.map_or(Goal::None, |placement| placement.goal) {
                Goal::Hot => Stage::Awake,
                Goal::Warm => Stage::Asleep,
                Goal::None => Stage::Stopped,
            };
        }
    }
}

pub(crate) fn is_frozen(view: &View, model: &ModelName, node: &NodeName) -> bool {
    let placement = view.placements.get(model).and_then(|nodes| nodes.get(node));
    let is_node_known = view.nodes.get(node).is_none_or(|node| node.record.is_some());
    let is_known = view.record(model.as_str(), node.as_str()).is_some() || !view.nodes.contains_key(node);
    !is_node_known || !is_known || placement.is_some_and(Option::is_none)
}

pub(crate) fn is_draining(view: &View, node: &NodeName) -> bool {
    let record = view.nodes.get(node).and_then(|node| node.record.as_ref());
    view.drains.contains(node) || record.is_some_and(|record| record.is_draining)
}

pub(crate) fn is_leaving(view: &View, model: &ModelName, node: &NodeName) -> bool {
    is_draining(view, node)
        || view.record(model.as_str(), node.as_str()).is_some_and(|record| record.stage.is_out())
}

/// Whether a new hot copy may go there, memory aside.
pub(crate) fn is_usable(view: &View, model: &ModelName, node: &NodeName) -> bool {
    let Some(record) = view.record(model.as_str(), node.as_str()) else { return false };
    let Some(of_node) = view.nodes[node].record.as_ref() else { return false };
    let has_gpus = !record.gpus.is_empty() && record.gpus.iter().all(|gpu| *gpu < of_node.gpus.len());
    // Where a hot copy is not understood, memory is not known.
    let is_clear = hot_on(view, node).iter().all(|hot| view.nodes[node].models[hot].is_some());
    has_gpus && is_clear && !is_frozen(view, model, node) && !is_leaving(view, model, node)
}

/// Models of a node with the goal hot.
pub(crate) fn hot_on(view: &View, node: &NodeName) -> BTreeSet<ModelName> {
    let is_hot = |model: &&ModelName| view.goal(model.as_str(), node.as_str()) == Goal::Hot;
    view.nodes[node].models.keys().filter(is_hot).cloned().collect()
}

/// What a model needs of one GPU.
pub(crate) fn need(view: &View, model: &ModelName, node: &NodeName, gpu: usize) -> u64 {
    let (Some(record), Some(of_node)) =
        (view.record(model.as_str(), node.as_str()), view.nodes[node].record.as_ref())
    else {
        return 0;
    };
    // Goals for GPUs that are not there take nothing.
    if record.gpus.iter().any(|gpu| *gpu >= of_node.gpus.len()) {
        return 0;
    }
    let Some(at) = record.gpus.iter().position(|on| *on == gpu) else { return 0 };
    record.need_bytes.as_ref().map_or(of_node.gpus[gpu].budget_bytes, |need| need[at])
}

/// Whether it would fit beside the hot copies that stay.
pub(crate) fn fits_beside(
    view: &View,
    model: &ModelName,
    node: &NodeName,
    stays: impl Fn(&ModelName) -> bool,
) -> bool {
    let gpus = &view.nodes[node].record.as_ref().unwrap().gpus;
    let hot = hot_on(view, node);
    (0..gpus.len()).all(|gpu| {
        let others = hot.iter().filter(|other| *other != model && stays(other));
        let taken: u64 = others.map(|other| need(view, other, node, gpu)).sum();
        let own = need(view, model, node, gpu);
        own == 0 || taken + own <= gpus[gpu].budget_bytes
    })
}
