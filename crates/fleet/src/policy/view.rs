//! What a controller knows: the records of its fleet.

use std::collections::{BTreeMap, BTreeSet};

use crate::keys::{Key, KeyError};
use crate::name::{FleetName, ModelName, NodeName};
use crate::records::{
    Drain, Goal, ModelRecord, NodeRecord, Pin, Placement, Reading, Record, RecordError, read,
};

/// All that the policy decides upon.
///
/// `None` stands for a record that is there and not understood: it is newer, or wrong. What it is about is left as it is.
///
/// ```
/// use poorwill_fleet::policy::View;
///
/// let json = br#"{"format": 1, "instance": "5f0c"}"#.as_slice();
/// let (view, errors) = View::read(&"prod".parse()?, [("/poorwill/prod/nodes/gpu-17", json)]);
/// assert_eq!((view.nodes.len(), errors.len()), (1, 0));
/// # Ok::<(), poorwill_fleet::name::NameError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    /// The nodes whose leases live.
    pub nodes: BTreeMap<NodeName, NodeView>,
    /// Who has which goal.
    pub placements: BTreeMap<ModelName, BTreeMap<NodeName, Option<Placement>>>,
    /// Nodes that operators drain, whatever else the wish says.
    pub drains: BTreeSet<NodeName>,
    /// Models that operators pin.
    pub pins: BTreeMap<ModelName, Pin>,
    /// For how long nodes with placements are gone, as far as a controller knows. Records do not say it.
    pub missing_ms: BTreeMap<NodeName, u64>,
}

impl View {
    /// Nodes that have placements, and are not there.
    #[must_use]
    pub fn missing_nodes(&self) -> BTreeSet<NodeName> {
        let placed = self.placements.values().flat_map(BTreeMap::keys);
        placed.filter(|node| !self.nodes.contains_key(*node)).cloned().collect()
    }

    /// All models that nodes have configured.
    #[must_use]
    pub fn models(&self) -> BTreeSet<&ModelName> {
        self.nodes.values().flat_map(|node| node.models.keys()).collect()
    }

    /// What a node says of a model, if that is understood.
    #[must_use]
    pub fn record(&self, model: &str, node: &str) -> Option<&ModelRecord> {
        self.nodes.get(node)?.models.get(model)?.as_ref()
    }

    /// What a controller wants of a model on a node, if that is understood.
    #[must_use]
    pub fn placement(&self, model: &str, node: &str) -> Option<&Placement> {
        self.placements.get(model)?.get(node)?.as_ref()
    }

    /// The same, where what is not placed or not understood is to be as little as can be.
    #[must_use]
    pub fn goal(&self, model: &str, node: &str) -> Goal {
        self.placement(model, node).map_or(Goal::None, |placement| placement.goal)
    }

    /// Whether a node says so, or an operator wants it.
    #[must_use]
    pub fn is_draining(&self, node: &str) -> bool {
        let record = self.nodes.get(node).and_then(|of| of.record.as_ref());
        self.drains.contains(node) || record.is_some_and(|record| record.is_draining)
    }
}

/// A node with its models.
///
/// ```
/// use poorwill_fleet::policy::NodeView;
/// use poorwill_fleet::records::NodeRecord;
///
/// let node = NodeView { record: Some(NodeRecord::new("5f0c")), ..NodeView::default() };
/// assert!(node.models.is_empty());
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeView {
    /// The node itself. `None` also before it has published it.
    pub record: Option<NodeRecord>,
    /// The models of its configuration.
    pub models: BTreeMap<ModelName, Option<ModelRecord>>,
}

/// Why an entry was not understood.
///
/// ```
/// use poorwill_fleet::policy::{View, ViewError};
///
/// let (_, errors) = View::read(&"prod".parse()?, [("/poorwill/prod/nodes/gpu-17", &b"{"[..])]);
/// assert!(matches!(errors[..], [ViewError::Record(_)]));
/// # Ok::<(), poorwill_fleet::name::NameError>(())
/// ```
#[derive(Debug, thiserror::Error)]
pub enum ViewError {
    /// Its key is none of the fleet's.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// Its record is wrong.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// Its record is for readers of a newer format.
    #[error("record `{key}` has format {format}; upgrade this controller")]
    Newer {
        /// Where it lies, without its fleet.
        key: Key,
        /// Its format.
        format: u32,
    },
}

impl View {
    /// Reads the entries of a fleet, in any order. What is not understood comes back as errors.
    pub fn read<'e>(
        fleet: &FleetName,
        entries: impl IntoIterator<Item = (&'e str, &'e [u8])>,
    ) -> (Self, Vec<ViewError>) {
        let (mut view, mut errors) = (Self::default(), Vec::new());
        for (key, json) in entries {
            match Key::parse(fleet, key) {
                Ok(key) => add(&mut view, &key, json, &mut errors),
                Err(error) => errors.push(error.into()),
            }
        }
        (view, errors)
    }
}

fn add(view: &mut View, key: &Key, json: &[u8], errors: &mut Vec<ViewError>) {
    match key {
        Key::Node(node) => {
            view.nodes.entry(node.clone()).or_default().record = known(key, json, errors);
        }
        Key::Model { node, model } => {
            let record = known(key, json, errors);
            view.nodes.entry(node.clone()).or_default().models.insert(model.clone(), record);
        }
        Key::Placement { model, node } => {
            let placement = known(key, json, errors);
            view.placements.entry(model.clone()).or_default().insert(node.clone(), placement);
        }
        Key::Drain(node) => {
            // A wish to drain is heeded even if its text is not understood.
            let _: Option<Drain> = known(key, json, errors);
            view.drains.insert(node.clone());
        }
        Key::Pin(model) => {
            view.pins.extend(known(key, json, errors).map(|pin| (model.clone(), pin)));
        }
        Key::Election => {}
    }
}

fn known<T: Record>(key: &Key, json: &[u8], errors: &mut Vec<ViewError>) -> Option<T> {
    match read(key, json) {
        Ok(Reading::Known(record)) => return Some(record),
        Ok(Reading::Newer { format }) => errors.push(ViewError::Newer { key: key.clone(), format }),
        Err(error) => errors.push(error.into()),
    }
    None
}
