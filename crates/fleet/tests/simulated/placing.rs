//! Three policies: the fleet's, a fixed one, and the longest idle place anywhere.

use std::collections::BTreeMap;

use poorwill_fleet::name::{ModelName, NodeName};
use poorwill_fleet::policy::{NodeView, Rules, Time, View, decide};
use poorwill_fleet::records::{
    Costs, Goal, GpuRecord, ModelRecord, NodeRecord, Placement, Rate, Requests, Stage,
};

use super::world::{GPU_GIB, World};

const GIB: u64 = 1 << 30;
/// How long a busy GPU is expected to stay so.
const BUSY_MS: u64 = 10_000;

/// Where models are, and where a request goes.
pub(crate) trait Placing {
    fn name(&self) -> &'static str;

    /// The copy that a request goes to. The node of it may be dead for less than a lease.
    fn route(&mut self, world: &World, model: usize) -> Option<usize>;

    /// Goals that change.
    fn goals(&mut self, world: &World) -> Vec<(usize, Goal)>;
}

/// Copies on nodes that are not known to be dead.
fn known(world: &World, model: usize) -> impl Iterator<Item = usize> + '_ {
    let copies = world.models[model].copies.iter().copied();
    copies.filter(|copy| !world.nodes[world.copies[*copy].node].is_known_dead)
}

fn load(world: &World, copy: usize) -> usize {
    world.copies[copy].running + world.copies[copy].waiting()
}

/// Each model on the first node of its own order that lives.
pub(crate) struct Static;

impl Placing for Static {
    fn name(&self) -> &'static str {
        "static"
    }

    fn route(&mut self, world: &World, model: usize) -> Option<usize> {
        known(world, model).next()
    }

    /// A home that comes back has its models started again.
    fn goals(&mut self, world: &World) -> Vec<(usize, Goal)> {
        let homes = world.models.iter().map(|model| model.copies[0]);
        homes.filter(|home| world.copies[*home].goal == Goal::None).map(|home| (home, Goal::Warm)).collect()
    }
}

/// An awake copy, or else the node that can have it now, was started, and whose victim is idle for longest.
pub(crate) struct LeastRecent;

impl Placing for LeastRecent {
    fn name(&self) -> &'static str {
        "least recently used"
    }

    fn route(&mut self, world: &World, model: usize) -> Option<usize> {
        let up = known(world, model).filter(|copy| world.copies[*copy].is_up());
        let up = up.min_by_key(|copy| (load(world, *copy), *copy));
        up.filter(|copy| load(world, *copy) < 64).or_else(|| {
            known(world, model).min_by_key(|copy| {
                let (victims, is_enough) = world.victims(*copy, true);
                let idle_since = victims.iter().map(|victim| world.copies[*victim].last_used).max();
                (!is_enough, world.copies[*copy].stage == Stage::Stopped, idle_since, *copy)
            })
        })
    }

    fn goals(&mut self, _: &World) -> Vec<(usize, Goal)> {
        Vec::new()
    }
}

/// The fleet's policy, asked as its controller would.
pub(crate) struct Fleet {
    view: View,
    rules: Rules,
    rng: fastrand::Rng,
    gone_since_ms: BTreeMap<NodeName, u64>,
}

impl Fleet {
    pub(crate) fn new(world: &World) -> Self {
        Self::with(world, Rules::default())
    }

    pub(crate) fn with(world: &World, rules: Rules) -> Self {
        let rng = fastrand::Rng::with_seed(7);
        let mut fleet = Self { view: View::default(), rules, rng, gone_since_ms: BTreeMap::new() };
        // Every model lies where it was started first.
        for (model, of) in world.models.iter().enumerate() {
            let placement = Placement::new(1, Goal::Warm, 0, "it was started here");
            let node = node_name(world.copies[of.copies[0]].node);
            fleet.view.placements.entry(model_name(model)).or_default().insert(node, Some(placement));
        }
        fleet
    }

    /// The records that nodes would publish.
    fn look(&mut self, world: &World) {
        for (at, node) in world.nodes.iter().enumerate() {
            let name = node_name(at);
            if node.is_known_dead || !node.is_alive && !self.view.nodes.contains_key(&name) {
                self.view.nodes.remove(&name);
                continue;
            }
            // The last ones that a dead node published.
            if !node.is_alive {
                continue;
            }
            let seen = self.view.nodes.entry(name).or_insert_with(|| node_view(world, at));
            if let Some(record) = &mut seen.record {
                record.host_free_bytes = world.host_free_gib(at) * GIB;
            }
            for (copy, record) in node.copies.iter().zip(seen.models.values_mut()) {
                let of = &world.copies[*copy];
                let Some(record) = record else { continue };
                record.stage = of.stage;
                record.requests = Requests {
                    running: stepped(of.running as u32, record.requests.running),
                    queued: stepped(of.waiting() as u32, record.requests.queued),
                };
                record.rate = Rate::from_micros((of.rate(world.now) * 1e6) as u64);
            }
        }
    }
}

/// As nodes publish counts.
fn stepped(count: u32, before: u32) -> u32 {
    let is_kept = count > 0 && count <= before && count * 8 > before * 3;
    if is_kept { before } else { count.checked_next_power_of_two().filter(|_| count > 0).unwrap_or_default() }
}

fn node_name(node: usize) -> NodeName {
    format!("n{node:06}").parse().unwrap()
}

fn model_name(model: usize) -> ModelName {
    format!("m{model:06}").parse().unwrap()
}

fn number(name: &str) -> usize {
    name[1..].parse().unwrap()
}

fn node_view(world: &World, node: usize) -> NodeView {
    let gpu = GpuRecord { total_bytes: GPU_GIB * GIB, budget_bytes: GPU_GIB * GIB };
    let record = NodeRecord {
        gpus: vec![gpu; world.size().gpus],
        domain: format!("rack-{}", world.domain(node)),
        ..NodeRecord::new("a")
    };
    let models = world.nodes[node].copies.iter().map(|copy| {
        let of = &world.copies[*copy];
        let model = world.model_of(*copy);
        let record = ModelRecord {
            need_bytes: Some(vec![model.need_gib * GIB]),
            host_bytes: world.host_gib(*copy) * GIB,
            costs: Costs {
                wake_ms: Some(model.wake_ms),
                sleep_ms: Some(model.sleep_ms),
                resume_ms: None,
                reload_ms: Some(model.reload_ms),
                start_ms: Some(model.start_ms),
            },
            ..ModelRecord::new(of.stage, vec![of.gpu % world.size().gpus])
        };
        (model_name(of.model), Some(record))
    });
    let models: BTreeMap<_, _> = models.collect();
    NodeView { record: Some(record), models }
}

/// Until its GPU can be had: longer while another model starts there.
fn busy_ms(world: &World, copy: usize) -> u64 {
    let beside = world.gpus[world.copies[copy].gpu].copies.iter().copied();
    let starting = beside.filter(|other| world.copies[*other].stage == Stage::Starting);
    starting.map(|other| world.cost_ms(other)).fold(BUSY_MS, u64::max)
}

/// Until these have left, and the hot ones are back.
fn displaced_ms(world: &World, victims: &[usize]) -> u64 {
    let one = |victim: &usize| {
        let model = world.model_of(*victim);
        let is_hot = world.copies[*victim].goal == Goal::Hot;
        model.sleep_ms + if is_hot { model.wake_ms } else { 0 }
    };
    victims.iter().map(one).sum()
}

impl Placing for Fleet {
    fn name(&self) -> &'static str {
        "fleet"
    }

    fn route(&mut self, world: &World, model: usize) -> Option<usize> {
        let placed: Vec<usize> =
            known(world, model).filter(|copy| world.copies[*copy].goal != Goal::None).collect();
        let is_open = |copy: &usize| {
            let of = &world.copies[*copy];
            of.stage == Stage::Awake && !of.is_closing
        };
        let awake: Vec<usize> = placed.iter().copied().filter(is_open).collect();
        if !awake.is_empty() {
            // Two at random, and the one with less to do.
            let mut one = || awake[self.rng.usize(..awake.len())];
            let two = [one(), one()];
            return two.into_iter().min_by_key(|copy| (load(world, *copy), *copy));
        }
        placed.into_iter().min_by_key(|copy| {
            let (victims, is_enough) = world.victims(*copy, true);
            let takes = match world.copies[*copy].stage {
                // Already on its way.
                Stage::Waking => 0,
                Stage::Awake => BUSY_MS,
                _ if is_enough => world.cost_ms(*copy) + displaced_ms(world, &victims),
                _ => world.cost_ms(*copy) + busy_ms(world, *copy),
            };
            let idle_since = victims.iter().map(|victim| world.copies[*victim].last_used).max();
            (takes, idle_since, *copy)
        })
    }

    fn goals(&mut self, world: &World) -> Vec<(usize, Goal)> {
        self.look(world);
        let known = std::mem::take(&mut self.gone_since_ms);
        let since = |node: NodeName| {
            let since_ms = known.get(&node).copied().unwrap_or(world.now);
            (node, since_ms)
        };
        self.gone_since_ms = self.view.missing_nodes().into_iter().map(since).collect();
        let for_ms = |(node, since_ms): (&NodeName, &u64)| (node.clone(), world.now - since_ms);
        self.view.missing_ms = self.gone_since_ms.iter().map(for_ms).collect();
        let plan = decide(&self.view, &self.rules, Time(world.now));
        let mut goals = Vec::new();
        for change in plan.changes {
            let placements = self.view.placements.entry(change.model.clone()).or_default();
            let before = placements.remove(&change.node).flatten();
            let placement = change.placement(1, before.as_ref(), Time(world.now));
            let goal = placement.as_ref().map_or(Goal::None, |placement| placement.goal);
            placements.extend(placement.map(|placement| (change.node.clone(), Some(placement))));
            let (node, model) = (number(change.node.as_str()), number(change.model.as_str()));
            let copies = &world.models[model].copies;
            let copy = copies.iter().copied().find(|copy| world.copies[*copy].node == node).unwrap();
            goals.push((copy, goal));
        }
        // A home that was placed from the start is no change.
        if world.now == 0 {
            let homes = world.models.iter().map(|model| model.copies[0]);
            let unchanged: Vec<usize> =
                homes.filter(|home| !goals.iter().any(|(copy, _)| copy == home)).collect();
            goals.extend(unchanged.into_iter().map(|home| (home, Goal::Warm)));
        }
        goals
    }
}
