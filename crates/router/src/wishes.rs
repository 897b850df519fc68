//! What operators want of a fleet: records that its controller reads.

use std::time::Duration;

use poorwill_fleet::etcd::{Etcd, EtcdError, Txn};
use poorwill_fleet::keys::{self, Key};
use poorwill_fleet::name::{FleetName, ModelName, NameError, NodeName};
use poorwill_fleet::records::{Drain, Pin, RecordError, write};

use super::status::Records;

/// What an operator wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wish {
    /// A node's models go elsewhere.
    Drain {
        /// The node.
        node: String,
        /// The reason, for people.
        why: String,
        /// The wish ends by itself after this time; `None` for one that stays.
        lasts: Option<Duration>,
    },
    /// A node takes models again.
    TakeAgain {
        /// The node.
        node: String,
    },
    /// A model is kept awake.
    Pin {
        /// The model.
        model: String,
        /// On how many nodes.
        copies: u32,
        /// Only on these; empty for any.
        nodes: Vec<String>,
    },
    /// It is not kept awake any more.
    Unpin {
        /// The model.
        model: String,
    },
}

/// Why a wish was not written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WishError {
    /// This can be no name.
    #[error("{what} `{name}`: {problem}")]
    Name {
        /// `node` or `model`.
        what: &'static str,
        /// As it was given.
        name: String,
        /// What is wrong with it.
        problem: NameError,
    },
    /// The fleet has none of this name.
    #[error("there is no {what} `{name}` in the fleet; there are: {known}")]
    Unknown {
        /// `node` or `model`.
        what: &'static str,
        /// As it was given.
        name: String,
        /// Those that are there.
        known: String,
    },
    /// It contradicts itself.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// etcd did not take it.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
}

/// Writes a wish, and returns what is so from then on, in a sentence.
///
/// # Errors
/// See [`WishError`].
pub async fn wish(etcd: &Etcd, fleet: &FleetName, wish: Wish) -> Result<String, WishError> {
    let (entries, _) = etcd.read(&keys::prefix(fleet)).await?;
    let records = Records::read(fleet, &entries);
    match wish {
        Wish::Drain { node, why, lasts } => {
            let node = known_node(&records, &node)?;
            drain(etcd, fleet, node, &why, lasts).await
        }
        Wish::TakeAgain { node } => {
            let node = known_node(&records, &node)?;
            remove(etcd, fleet, Key::Drain(node.clone())).await?;
            Ok(format!("node {node} takes models again"))
        }
        Wish::Pin { model, copies, nodes } => {
            let model = known_model(&records, &model)?;
            let node = |name: &String| name.parse().map_err(|problem| wrong("node", name, problem));
            let nodes: Vec<NodeName> = nodes.iter().map(node).collect::<Result<_, _>>()?;
            if let Some(node) = nodes.iter().find(|node| !records.view.nodes.contains_key(*node)) {
                return Err(unknown("node", node.as_str(), records.view.nodes.keys()));
            }
            let key = Key::Pin(model.clone());
            let text = write(&key, &Pin { nodes, ..Pin::new(copies) })?;
            etcd.commit(&Txn::new().put(&key.in_fleet(fleet), &text, None)).await?;
            Ok(format!("model {model} is kept awake on {copies} of its nodes"))
        }
        Wish::Unpin { model } => {
            let model = known_model(&records, &model)?;
            remove(etcd, fleet, Key::Pin(model.clone())).await?;
            Ok(format!("model {model} is not pinned any more"))
        }
    }
}

async fn drain(
    etcd: &Etcd,
    fleet: &FleetName,
    node: NodeName,
    why: &str,
    lasts: Option<Duration>,
) -> Result<String, WishError> {
    let key = Key::Drain(node.clone());
    let (path, text) = (key.in_fleet(fleet), write(&key, &Drain::new(why))?);
    let Some(lasts) = lasts else {
        etcd.commit(&Txn::new().put(&path, &text, None)).await?;
        return Ok(format!("node {node} drains: its models go elsewhere"));
    };
    let lease = etcd.grant(lasts).await?;
    // One that stays is not made one that ends.
    let txn = Txn::new().if_created_at(&path, 0).put(&path, &text, Some(lease));
    let is_new = etcd.commit(&txn).await?.has_succeeded;
    Ok(match is_new {
        true => format!("node {node} drains for {} s: its models go elsewhere", lasts.as_secs()),
        false => format!("node {node} drains already"),
    })
}

async fn remove(etcd: &Etcd, fleet: &FleetName, key: Key) -> Result<(), WishError> {
    etcd.commit(&Txn::new().delete(&key.in_fleet(fleet))).await?;
    Ok(())
}

fn known_node(records: &Records, name: &str) -> Result<NodeName, WishError> {
    let node: NodeName = name.parse().map_err(|problem| wrong("node", name, problem))?;
    let view = &records.view;
    // One that is gone may be back, and is to find the wish then.
    let is_placed = view.placements.values().any(|on| on.contains_key(&node));
    match is_placed || view.nodes.contains_key(&node) || view.drains.contains(&node) {
        true => Ok(node),
        false => Err(unknown("node", name, view.nodes.keys())),
    }
}

fn known_model(records: &Records, name: &str) -> Result<ModelName, WishError> {
    let model: ModelName = name.parse().map_err(|problem| wrong("model", name, problem))?;
    let known = records.view.models();
    match known.contains(&model) || records.view.pins.contains_key(&model) {
        true => Ok(model),
        false => Err(unknown("model", name, known)),
    }
}

fn wrong(what: &'static str, name: &str, problem: NameError) -> WishError {
    WishError::Name { what, name: name.to_owned(), problem }
}

fn unknown<'n, N: std::fmt::Display + 'n>(
    what: &'static str,
    name: &str,
    known: impl IntoIterator<Item = &'n N>,
) -> WishError {
    let known: Vec<String> = known.into_iter().map(ToString::to_string).collect();
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    WishError::Unknown { what, name: name.to_owned(), known }
}
