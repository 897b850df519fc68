//! What a fleet has, and what operators want of it: both are records in etcd.

use std::path::Path;

use poorwill_fleet::etcd::{Etcd, Limits, Txn};
use poorwill_fleet::keys::{self, Key};
use poorwill_fleet::name::{ModelName, NodeName};
use poorwill_fleet::policy::View;
use poorwill_fleet::records::{Drain, Goal, Pin, write};
use poorwill_rotate::config::RouterConfig;
use serde::Serialize;

use super::serve::read;
use crate::args::FleetCommand;
use crate::failure::{Failure, Outcome};
use crate::rotate::runtime;
use crate::show::fleet::status_text;

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Reply {
    Status(FleetStatus),
    Wish { wish: String },
}

/// A fleet, by the records of its nodes and its controller.
#[derive(Debug, Serialize)]
pub(crate) struct FleetStatus {
    pub(crate) fleet: String,
    pub(crate) nodes: Vec<NodeStatus>,
    pub(crate) models: Vec<CopyStatus>,
    /// Records that are not understood.
    pub(crate) problems: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct NodeStatus {
    pub(crate) node: String,
    pub(crate) front_url: String,
    pub(crate) domain: String,
    pub(crate) version: String,
    pub(crate) gpus: usize,
    pub(crate) budget_bytes: u64,
    pub(crate) models: usize,
    pub(crate) is_draining: bool,
}

/// A model on a node: what it is there, and what is wanted.
#[derive(Debug, Serialize)]
pub(crate) struct CopyStatus {
    pub(crate) model: String,
    pub(crate) node: String,
    /// `None` where the node has lost its lease, or does not have it configured.
    pub(crate) stage: Option<poorwill_fleet::records::Stage>,
    pub(crate) goal: Goal,
    pub(crate) running: u32,
    pub(crate) queued: u32,
    pub(crate) fence: Option<u64>,
    pub(crate) why: Option<String>,
    pub(crate) is_pinned: bool,
}

impl Outcome for Reply {
    fn mismatch(&self) -> Option<&str> {
        None
    }

    fn text(&self) -> String {
        match self {
            Self::Status(status) => status_text(status),
            Self::Wish { wish } => format!("{wish}\n"),
        }
    }
}

pub(super) fn run(path: &Path, command: FleetCommand) -> Result<Reply, Failure> {
    let config = read(path)?;
    runtime()?.block_on(async {
        let etcd = Etcd::with_tls(&config.etcd, Limits::default(), config.etcd_tls.as_ref())?;
        let (view, problems) = look(&etcd, &config).await?;
        match command {
            FleetCommand::Status => Ok(Reply::Status(status(&config, &view, problems))),
            FleetCommand::Drain { node, off, why } => drain(&etcd, &config, &view, &node, off, &why).await,
            FleetCommand::Pin { model, copies, nodes, off } => {
                pin(&etcd, &config, &view, &model, (copies.get(), nodes), off).await
            }
        }
    })
}

async fn look(etcd: &Etcd, config: &RouterConfig) -> Result<(View, Vec<String>), Failure> {
    let (entries, _) = etcd.read(&keys::prefix(&config.fleet)).await?;
    let entries = entries.iter().map(|entry| (entry.key.as_str(), &*entry.value));
    let (view, errors) = View::read(&config.fleet, entries);
    Ok((view, errors.iter().map(ToString::to_string).collect()))
}

fn status(config: &RouterConfig, view: &View, problems: Vec<String>) -> FleetStatus {
    let node = |(name, node): (&NodeName, &poorwill_fleet::policy::NodeView)| {
        let record = node.record.as_ref();
        NodeStatus {
            node: name.to_string(),
            front_url: record.map(|record| record.front_url.clone()).unwrap_or_default(),
            domain: record.map(|record| record.domain.clone()).unwrap_or_default(),
            version: record.map(|record| record.version.clone()).unwrap_or_default(),
            gpus: record.map(|record| record.gpus.len()).unwrap_or_default(),
            budget_bytes: record
                .map(|record| record.gpus.iter().map(|gpu| gpu.budget_bytes).sum())
                .unwrap_or_default(),
            models: node.models.len(),
            is_draining: view.drains.contains(name) || record.is_some_and(|record| record.is_draining),
        }
    };
    let mut pairs: Vec<(&ModelName, &NodeName)> =
        view.nodes.iter().flat_map(|(node, of)| of.models.keys().map(move |model| (model, node))).collect();
    pairs.extend(view.placements.iter().flat_map(|(model, on)| on.keys().map(move |node| (model, node))));
    pairs.sort_unstable();
    pairs.dedup();
    let copy = |(model, node): (&ModelName, &NodeName)| {
        let record = view.nodes.get(node).and_then(|of| of.models.get(model)).and_then(Option::as_ref);
        let placement = view.placements.get(model).and_then(|on| on.get(node)).and_then(Option::as_ref);
        let requests = record.map(|record| record.requests).unwrap_or_default();
        CopyStatus {
            model: model.to_string(),
            node: node.to_string(),
            stage: record.map(|record| record.stage),
            goal: placement.map_or(Goal::None, |placement| placement.goal),
            running: requests.running,
            queued: requests.queued,
            fence: placement.map(|placement| placement.fence),
            why: placement.map(|placement| placement.why.clone()),
            is_pinned: view.pins.contains_key(model),
        }
    };
    FleetStatus {
        fleet: config.fleet.to_string(),
        nodes: view.nodes.iter().map(node).collect(),
        models: pairs.into_iter().map(copy).collect(),
        problems,
    }
}

async fn drain(
    etcd: &Etcd,
    config: &RouterConfig,
    view: &View,
    node: &str,
    off: bool,
    why: &str,
) -> Result<Reply, Failure> {
    let node: NodeName = node.parse().map_err(|error| Failure::new(format!("node `{node}`: {error}")))?;
    if !view.nodes.contains_key(&node) && !view.drains.contains(&node) {
        let known: Vec<String> = view.nodes.keys().map(ToString::to_string).collect();
        return Err(unknown("node", node.as_str(), &known));
    }
    let key = Key::Drain(node.clone());
    let path = key.in_fleet(&config.fleet);
    let (txn, wish) = match off {
        true => (Txn::new().delete(&path), format!("node {node} takes models again")),
        false => {
            let text = write(&key, &Drain::new(why)).map_err(|error| Failure::new(error.to_string()))?;
            (Txn::new().put(&path, &text, None), format!("node {node} drains: its models go elsewhere"))
        }
    };
    etcd.commit(&txn).await?;
    Ok(Reply::Wish { wish })
}

async fn pin(
    etcd: &Etcd,
    config: &RouterConfig,
    view: &View,
    model: &str,
    (copies, nodes): (u32, Vec<String>),
    off: bool,
) -> Result<Reply, Failure> {
    let model: ModelName =
        model.parse().map_err(|error| Failure::new(format!("model `{model}`: {error}")))?;
    let known: std::collections::BTreeSet<&ModelName> =
        view.nodes.values().flat_map(|node| node.models.keys()).collect();
    if !known.contains(&model) && !view.pins.contains_key(&model) {
        let known: Vec<String> = known.iter().map(ToString::to_string).collect();
        return Err(unknown("model", model.as_str(), &known));
    }
    let node = |node: String| node.parse().map_err(|error| Failure::new(format!("node `{node}`: {error}")));
    let nodes: Vec<NodeName> = nodes.into_iter().map(node).collect::<Result<_, _>>()?;
    if let Some(node) = nodes.iter().find(|node| !view.nodes.contains_key(*node)) {
        let known: Vec<String> = view.nodes.keys().map(ToString::to_string).collect();
        return Err(unknown("node", node.as_str(), &known));
    }
    let key = Key::Pin(model.clone());
    let path = key.in_fleet(&config.fleet);
    let (txn, wish) = match off {
        true => (Txn::new().delete(&path), format!("model {model} is not pinned any more")),
        false => {
            let text = write(&key, &Pin { nodes, ..Pin::new(copies) })
                .map_err(|error| Failure::new(error.to_string()))?;
            (
                Txn::new().put(&path, &text, None),
                format!("model {model} is kept awake on {copies} of its nodes"),
            )
        }
    };
    etcd.commit(&txn).await?;
    Ok(Reply::Wish { wish })
}

fn unknown(what: &str, name: &str, known: &[String]) -> Failure {
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    Failure::new(format!("there is no {what} `{name}` in the fleet; there are: {known}"))
}
