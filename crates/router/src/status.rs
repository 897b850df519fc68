//! What a fleet's records say, for its operators: nodes, copies of models, wishes, and who is controller.

use std::collections::{BTreeMap, BTreeSet};

use poorwill_fleet::etcd::Entry;
use poorwill_fleet::keys::Key;
use poorwill_fleet::name::{FleetName, ModelName, NodeName};
use poorwill_fleet::policy::{NodeView, View};
use poorwill_fleet::records::{Drain, Goal, Rate, Reading, Stage, read};
use serde::Serialize;

/// A fleet, by the records of its nodes, its operators and its controller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FleetStatus {
    /// Its name.
    pub fleet: String,
    /// The nodes whose leases live.
    pub nodes: Vec<NodeStatus>,
    /// Each model on each node.
    pub models: Vec<CopyStatus>,
    /// Nodes that operators drain.
    pub drains: Vec<DrainStatus>,
    /// Models that operators keep awake.
    pub pins: Vec<PinStatus>,
    /// The host and process that places models; `None` if no controller is elected.
    pub leader: Option<String>,
    /// Records that are not understood, and what nodes cannot do as they should.
    pub problems: Vec<String>,
}

/// A node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeStatus {
    /// Its name.
    pub node: String,
    /// Where routers send requests.
    pub front_url: String,
    /// Where operators look and command.
    pub control_url: String,
    /// What fails together with it.
    pub domain: String,
    /// The version of Poorwill.
    pub version: String,
    /// How many GPUs it has.
    pub gpus: usize,
    /// What awake models may take of all GPUs together.
    pub budget_bytes: u64,
    /// How many models its configuration has.
    pub models: usize,
    /// Whether its models go elsewhere.
    pub is_draining: bool,
}

/// A model on a node: what it is there, and what is wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CopyStatus {
    /// The model.
    pub model: String,
    /// The node.
    pub node: String,
    /// `None` where the node has lost its lease, or does not have it configured.
    pub stage: Option<Stage>,
    /// What the controller wants.
    pub goal: Goal,
    /// Requests that run.
    pub running: u32,
    /// Requests that wait.
    pub queued: u32,
    /// The revision of the election whose winner placed it.
    pub fence: Option<u64>,
    /// The controller's reason.
    pub why: Option<String>,
    /// When the goal became this one: milliseconds since 1970, by the controller's clock.
    pub changed_at_ms: Option<u64>,
    /// Whether an operator pins the model.
    pub is_pinned: bool,
}

/// A wish that a node's models go elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DrainStatus {
    /// The node.
    pub node: String,
    /// The operator's reason; empty also if the wish is not understood.
    pub why: String,
}

/// A wish that a model is awake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PinStatus {
    /// The model.
    pub model: String,
    /// On how many nodes.
    pub copies: u32,
    /// Only on these; empty for any.
    pub nodes: Vec<String>,
}

/// Where a model is, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ModelWhy {
    /// The model.
    pub model: String,
    /// What an operator wants of it.
    pub pin: Option<PinStatus>,
    /// Each node of the fleet.
    pub nodes: Vec<NodeWhy>,
}

/// A model on a node that may or may not have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeWhy {
    /// What it is, and what is wanted.
    #[serde(flatten)]
    pub copy: CopyStatus,
    /// Whether the node has it configured.
    pub is_configured: bool,
    /// Whether the node drains.
    pub is_draining: bool,
    /// Requests per second at the node, decayed.
    pub rate: Rate,
    /// What it takes of each GPU awake.
    pub need_bytes: Option<Vec<u64>>,
    /// All of it in a sentence.
    pub text: String,
}

/// A fleet's records, read.
#[derive(Debug)]
pub struct Records {
    fleet: FleetName,
    pub(super) view: View,
    problems: Vec<String>,
    drains: BTreeMap<NodeName, String>,
    leader: Option<String>,
}

impl Records {
    /// Of all entries below the fleet's prefix.
    pub fn read<'e>(
        fleet: &FleetName,
        entries: impl IntoIterator<Item = &'e Entry, IntoIter: Clone>,
    ) -> Self {
        let entries = entries.into_iter();
        let pairs = entries.clone().map(|entry| (entry.key.as_str(), &*entry.value));
        let (view, errors) = View::read(fleet, pairs);
        let (mut drains, mut first): (_, Option<&Entry>) = (BTreeMap::new(), None);
        for entry in entries {
            match Key::parse(fleet, &entry.key) {
                Ok(key @ Key::Drain(_)) => {
                    let wish = read::<Drain>(&key, &entry.value).ok();
                    let why = wish.as_ref().and_then(Reading::known).map(|drain| drain.why.clone());
                    if let Key::Drain(node) = key {
                        drains.insert(node, why.unwrap_or_default());
                    }
                }
                // Of all that campaign, the first leads.
                Ok(Key::Election)
                    if first.is_none_or(|first| entry.create_revision < first.create_revision) =>
                {
                    first = Some(entry);
                }
                _ => {}
            }
        }
        let leader = first.map(|entry| String::from_utf8_lossy(&entry.value).into_owned());
        let problems = errors.iter().map(ToString::to_string).collect();
        Self { fleet: fleet.clone(), view, problems, drains, leader }
    }

    /// With what a router cannot do as it should.
    pub(super) fn with_problems(mut self, problems: &[String]) -> Self {
        self.problems.extend_from_slice(problems);
        self
    }

    /// All of it.
    #[must_use]
    pub fn status(&self) -> FleetStatus {
        let view = &self.view;
        let of_nodes =
            view.nodes.iter().flat_map(|(node, of)| of.models.keys().map(move |model| (model, node)));
        let of_placements =
            view.placements.iter().flat_map(|(model, on)| on.keys().map(move |node| (model, node)));
        let pairs: BTreeSet<(&ModelName, &NodeName)> = of_nodes.chain(of_placements).collect();
        let drain =
            |(node, why): (&NodeName, &String)| DrainStatus { node: node.to_string(), why: why.clone() };
        FleetStatus {
            fleet: self.fleet.to_string(),
            nodes: view.nodes.iter().map(|(name, node)| self.node(name, node)).collect(),
            models: pairs.into_iter().map(|(model, node)| self.copy(model, node)).collect(),
            drains: self.drains.iter().map(drain).collect(),
            pins: view.pins.keys().filter_map(|model| self.pin(model)).collect(),
            leader: self.leader.clone(),
            problems: self.problems(),
        }
    }

    /// Where a model is, and why; `None` if no record mentions it.
    #[must_use]
    pub fn why(&self, model: &ModelName) -> Option<ModelWhy> {
        let view = &self.view;
        let placed = view.placements.get(model);
        let nodes: BTreeSet<&NodeName> =
            view.nodes.keys().chain(placed.into_iter().flat_map(BTreeMap::keys)).collect();
        let pin = self.pin(model);
        let is_configured =
            |node: &NodeName| view.nodes.get(node).is_some_and(|of| of.models.contains_key(model));
        if pin.is_none() && placed.is_none() && !nodes.iter().any(|node| is_configured(node)) {
            return None;
        }
        let why = |node: &NodeName| {
            let record = view.record(model.as_str(), node.as_str());
            let (copy, is_configured) = (self.copy(model, node), is_configured(node));
            NodeWhy {
                text: sentence(&copy, view.nodes.contains_key(node), is_configured),
                is_configured,
                is_draining: view.is_draining(node.as_str()),
                rate: record.map(|record| record.rate).unwrap_or_default(),
                need_bytes: record.and_then(|record| record.need_bytes.clone()),
                copy,
            }
        };
        Some(ModelWhy { model: model.to_string(), pin, nodes: nodes.into_iter().map(why).collect() })
    }

    /// Records that are not understood, and what nodes say of themselves.
    fn problems(&self) -> Vec<String> {
        let of_nodes = self.view.nodes.iter().flat_map(|(name, node)| {
            let said = node.record.iter().flat_map(|record| &record.problems);
            said.map(move |problem| format!("node `{name}`: {problem}"))
        });
        self.problems.iter().cloned().chain(of_nodes).collect()
    }

    fn node(&self, name: &NodeName, node: &NodeView) -> NodeStatus {
        let record = node.record.as_ref();
        let budget = record.map(|record| record.gpus.iter().map(|gpu| gpu.budget_bytes).sum());
        let text = |of: fn(&poorwill_fleet::records::NodeRecord) -> &String| {
            record.map(of).cloned().unwrap_or_default()
        };
        NodeStatus {
            node: name.to_string(),
            front_url: text(|record| &record.front_url),
            control_url: text(|record| &record.control_url),
            domain: text(|record| &record.domain),
            version: text(|record| &record.version),
            gpus: record.map(|record| record.gpus.len()).unwrap_or_default(),
            budget_bytes: budget.unwrap_or_default(),
            models: node.models.len(),
            is_draining: self.view.is_draining(name.as_str()),
        }
    }

    fn copy(&self, model: &ModelName, node: &NodeName) -> CopyStatus {
        let record = self.view.record(model.as_str(), node.as_str());
        let placement = self.view.placement(model.as_str(), node.as_str());
        let requests = record.map(|record| record.requests).unwrap_or_default();
        CopyStatus {
            model: model.to_string(),
            node: node.to_string(),
            stage: record.map(|record| record.stage),
            goal: self.view.goal(model.as_str(), node.as_str()),
            running: requests.running,
            queued: requests.queued,
            fence: placement.map(|placement| placement.fence),
            why: placement.map(|placement| placement.why.clone()),
            changed_at_ms: placement.map(|placement| placement.changed_at_ms),
            is_pinned: self.view.pins.contains_key(model),
        }
    }

    fn pin(&self, model: &ModelName) -> Option<PinStatus> {
        let pin = self.view.pins.get(model)?;
        let nodes = pin.nodes.iter().map(ToString::to_string).collect();
        Some(PinStatus { model: model.to_string(), copies: pin.copies, nodes })
    }
}

fn sentence(copy: &CopyStatus, is_there: bool, is_configured: bool) -> String {
    let wanted = match &copy.why {
        Some(why) if why.is_empty() => format!("{} is wanted", copy.goal),
        Some(why) => format!("{} is wanted, since {why}", copy.goal),
        None => "it was never placed there".to_owned(),
    };
    match copy.stage {
        _ if !is_there => format!("the node is gone; {wanted}"),
        None if is_configured => format!("what the node says of it is not understood; {wanted}"),
        None => format!("the node does not have it configured; {wanted}"),
        Some(stage) => format!("it is {stage}; {wanted}"),
    }
}
