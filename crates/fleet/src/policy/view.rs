//! What a controller knows: the records of its fleet.

use std::collections::{BTreeMap, BTreeSet};

use crate::keys::{Key, KeyError};
use crate::name::{FleetName, ModelName, NodeName};
use crate::records::{Drain, ModelRecord, NodeRecord, Pin, Placement, Reading, Record, RecordError, read};

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
                Ok(Key::Node(node)) => {
                    let record = known(&Key::Node(node.clone()), json, &mut errors);
                    view.nodes.entry(node).or_default().record = record;
                }
                Ok(Key::Model { node, model }) => {
                    let key = Key::Model { node: node.clone(), model: model.clone() };
                    let record = known(&key, json, &mut errors);
                    view.nodes.entry(node).or_default().models.insert(model, record);
                }
                Ok(Key::Placement { model, node }) => {
                    let key = Key::Placement { model: model.clone(), node: node.clone() };
                    let placement = known(&key, json, &mut errors);
                    view.placements.entry(model).or_default().insert(node, placement);
                }
                Ok(Key::Drain(node)) => {
                    // A wish to drain is heeded even if its text is not understood.
                    let _: Option<Drain> = known(&Key::Drain(node.clone()), json, &mut errors);
                    view.drains.insert(node);
                }
                Ok(Key::Pin(model)) => {
                    if let Some(pin) = known(&Key::Pin(model.clone()), json, &mut errors) {
                        view.pins.insert(model, pin);
                    }
                }
                Ok(Key::Election) => {}
                Err(error) => errors.push(error.into()),
            }
        }
        (view, errors)
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
