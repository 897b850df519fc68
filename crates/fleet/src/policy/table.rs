//! The view by numbers: nodes, models, and the pairs of both. Nothing here changes.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use super::demand::Demand;
use super::plan::{Change, Why, Write};
use super::rules::Rules;
use super::time::Time;
use super::view::View;
use crate::name::{ModelName, NodeName};
use crate::records::{Goal, ModelRecord, Pin, Stage};

/// Everything, in the order of names.
pub(super) struct Table<'v> {
    pub(super) nodes: Vec<NodeRow<'v>>,
    pub(super) models: Vec<ModelRow<'v>>,
    pub(super) pairs: Vec<Pair<'v>>,
    /// Placements where no such model is.
    pub(super) stray: Vec<Change>,
}

pub(super) struct NodeRow<'v> {
    pub(super) name: &'v NodeName,
    /// A number for each failure domain.
    pub(super) domain: usize,
    /// What hot copies may take of each GPU.
    pub(super) budgets: Vec<u64>,
    pub(super) host_free_bytes: u64,
    pub(super) is_draining: bool,
    /// Its pairs in `Table::pairs`.
    pub(super) pairs: Vec<usize>,
}

pub(super) struct ModelRow<'v> {
    pub(super) name: &'v ModelName,
    /// Its pairs in `Table::pairs`.
    pub(super) pairs: Range<usize>,
    pub(super) demand: Demand,
    pub(super) pin: Option<&'v Pin>,
    /// Whether a node is gone that had a hot copy.
    pub(super) lost_hot: bool,
}

/// A model that a node has configured.
pub(super) struct Pair<'v> {
    pub(super) model: usize,
    pub(super) node: usize,
    pub(super) record: Option<&'v ModelRecord>,
    pub(super) stage: Stage,
    /// Whether the node's own configuration pins it.
    pub(super) is_pinned: bool,
    pub(super) was: Goal,
    /// Whether its placement says that an operator's pin keeps it, if it says so.
    pub(super) was_held: Option<bool>,
    /// How long it has had that goal.
    pub(super) age_ms: u64,
    /// Whether something about it was not understood. It is left as it is.
    pub(super) is_frozen: bool,
    /// Whether its node drains, or it failed there.
    pub(super) is_leaving: bool,
    /// Whether its GPUs are on the node.
    pub(super) has_gpus: bool,
    /// Until it takes requests.
    pub(super) wake_ms: u64,
    /// What a hot copy is worth for each MiB that it takes.
    pub(super) worth: u64,
}

impl<'v> Table<'v> {
    pub(super) fn of(view: &'v View, rules: &Rules, now: Time) -> Self {
        let nodes = nodes(view);
        let names = models(view);
        let numbers: HashMap<&str, usize> =
            names.iter().enumerate().map(|(id, name)| (name.as_str(), id)).collect();
        let mut pairs = Vec::new();
        for (node, seen) in view.nodes.values().enumerate() {
            for (name, record) in &seen.models {
                let model = numbers[name.as_str()];
                let record = record.as_ref();
                let of_node = &nodes[node];
                let is_out = record.is_some_and(|record| record.stage.is_out());
                let is_there = |record: &&ModelRecord| {
                    record.gpus.iter().all(|gpu| *gpu < of_node.budgets.len()) && !record.gpus.is_empty()
                };
                pairs.push(Pair {
                    model,
                    node,
                    record,
                    stage: record.map_or(Stage::Unknown, |record| record.stage),
                    is_pinned: record.is_some_and(|record| record.pinned),
                    was: Goal::None,
                    was_held: None,
                    age_ms: u64::MAX,
                    is_frozen: record.is_none() || seen.record.is_none(),
                    is_leaving: of_node.is_draining || is_out,
                    has_gpus: record.filter(is_there).is_some(),
                    wake_ms: record
                        .map_or(0, |record| record.costs.ready_ms(record.stage, rules.usual_costs)),
                    worth: 0,
                });
            }
        }
        pairs.sort_by_key(|pair| pair.model);
        let mut table = Self { nodes, models: Vec::with_capacity(names.len()), pairs, stray: Vec::new() };
        let mut from = 0;
        for (id, name) in names.into_iter().enumerate() {
            let count = table.pairs[from..].iter().take_while(|pair| pair.model == id).count();
            let pairs = from..from + count;
            from = pairs.end;
            let Self { nodes, pairs: all, stray, .. } = &mut table;
            let lost_hot = place(&mut all[pairs.clone()], nodes, stray, (view, name), (rules, now));
            let demand = Demand::of(table.pairs[pairs.clone()].iter().filter_map(|pair| pair.record), rules);
            for pair in pairs.clone() {
                table.pairs[pair].worth = table.worth(pair, demand, rules);
                table.nodes[table.pairs[pair].node].pairs.push(pair);
            }
            let pin = view.pins.get(name);
            table.models.push(ModelRow { name, pairs, demand, pin, lost_hot });
        }
        table
    }

    fn worth(&self, pair: usize, demand: Demand, rules: &Rules) -> u64 {
        let usual = rules.usual_costs.wake_ms.unwrap_or(1);
        let wake_ms = self.pairs[pair].record.and_then(|record| record.costs.wake_ms).unwrap_or(usual).max(1);
        let mib = self.need(pair).map(|(_, bytes)| u128::from(bytes >> 20)).sum::<u128>().max(1);
        let worth = u128::from(demand.share_micros()) * u128::from(wake_ms) / mib;
        u64::try_from(worth).unwrap_or(u64::MAX)
    }

    /// What it takes of each GPU while hot. Without a known need, it gets its GPUs alone.
    pub(super) fn need(&self, pair: usize) -> impl Iterator<Item = (usize, u64)> + '_ {
        let Pair { record, has_gpus, node, .. } = &self.pairs[pair];
        let budgets = &self.nodes[*node].budgets;
        let record = record.filter(|_| *has_gpus);
        record.into_iter().flat_map(move |record| {
            record.gpus.iter().enumerate().map(move |(at, gpu)| {
                let known = record.need_bytes.as_ref().and_then(|need| need.get(at).copied());
                (*gpu, known.unwrap_or(budgets[*gpu]))
            })
        })
    }

    pub(super) fn domain(&self, pair: usize) -> usize {
        self.nodes[self.pairs[pair].node].domain
    }

    pub(super) fn stage(&self, pair: usize) -> Stage {
        self.pairs[pair].stage
    }

    /// Whether it takes requests. A node whose record is not understood lives, and is taken to do as it should.
    pub(super) fn is_awake(&self, pair: usize) -> bool {
        self.pairs[pair].record.is_none() || self.stage(pair) == Stage::Awake
    }

    /// Whether it does so after a wake at most.
    pub(super) fn is_ready(&self, pair: usize) -> bool {
        self.pairs[pair].record.is_none() || self.stage(pair).is_ready()
    }

    /// Whether it may get a placement.
    pub(super) fn is_usable(&self, pair: usize) -> bool {
        let pair = &self.pairs[pair];
        !pair.is_frozen && !pair.is_leaving
    }
}

fn nodes(view: &View) -> Vec<NodeRow<'_>> {
    let mut domains = BTreeMap::new();
    let rows = view.nodes.iter().map(|(name, seen)| {
        let record = seen.record.as_ref();
        // Without a domain, a node fails alone.
        let domain = record.map_or("", |record| &record.domain);
        let domain = if domain.is_empty() { (true, name.as_str()) } else { (false, domain) };
        let next = domains.len();
        NodeRow {
            name,
            domain: *domains.entry(domain).or_insert(next),
            budgets: record.iter().flat_map(|record| &record.gpus).map(|gpu| gpu.budget_bytes).collect(),
            host_free_bytes: record.map_or(0, |record| record.host_free_bytes),
            is_draining: view.is_draining(name.as_str()),
            pairs: Vec::new(),
        }
    });
    rows.collect()
}

/// Takes in the placements of a model, which has these pairs. Whether a hot one is on a node that is gone.
fn place(
    pairs: &mut [Pair<'_>],
    nodes: &[NodeRow<'_>],
    stray: &mut Vec<Change>,
    (view, name): (&View, &ModelName),
    (rules, now): (&Rules, Time),
) -> bool {
    let mut lost_hot = false;
    for (node, placement) in view.placements.get(name).into_iter().flatten() {
        let at = pairs.iter().position(|pair| nodes[pair.node].name == node);
        let Some(at) = at else {
            let seen = view.nodes.get(node);
            // A newer version wrote it, or publishes the node just now.
            if placement.is_none() || seen.is_some_and(|seen| seen.record.is_none()) {
                continue;
            }
            let is_hot = placement.as_ref().is_some_and(|placement| placement.goal == Goal::Hot);
            let missing_ms = view.missing_ms.get(node).copied().unwrap_or_default();
            let (write, why) = match seen {
                Some(_) => (Write::Remove, Why::NotConfigured),
                // It may be back in a moment, with engines that live. Memory is for others meanwhile.
                None if is_hot => (Write::Goal(Goal::Warm), Why::NodeGone),
                None if missing_ms >= rules.forget_node_ms => (Write::Remove, Why::NodeForgotten),
                None => continue,
            };
            lost_hot |= seen.is_none() && is_hot;
            stray.push(Change { model: name.clone(), node: node.clone(), write, is_held: false, why });
            continue;
        };
        let pair = &mut pairs[at];
        match placement {
            Some(placement) => {
                (pair.was, pair.age_ms) = (placement.goal, now.age_ms(placement.changed_at_ms));
                pair.was_held = placement.pinned;
            }
            None => pair.is_frozen = true,
        }
    }
    lost_hot
}

fn models(view: &View) -> Vec<&ModelName> {
    let configured = view.nodes.values().flat_map(|node| node.models.keys());
    let all = configured.chain(view.placements.keys()).chain(view.pins.keys());
    let numbers: HashMap<&ModelName, ()> = all.map(|name| (name, ())).collect();
    let mut names: Vec<&ModelName> = numbers.into_keys().collect();
    names.sort_unstable();
    names
}
