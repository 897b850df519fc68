//! Who has which model, as the fleet's records say.

use std::collections::BTreeMap;

use poorwill_fleet::keys::Key;
use poorwill_fleet::mirror::Contents;
use poorwill_fleet::name::{FleetName, ModelName, NodeName};
use poorwill_fleet::policy::View;
use poorwill_fleet::records::{Goal, ModelRecord};

/// All copies that may be asked, by model.
#[derive(Debug, Default)]
pub(super) struct RouteTable {
    copies: BTreeMap<ModelName, Vec<Copy>>,
    /// The model of each name in requests.
    names: BTreeMap<String, ModelName>,
    /// Under which lease each node tells of itself. A node that has lost its lease is another one.
    nodes: BTreeMap<NodeName, i64>,
}

/// A model on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Copy {
    pub(super) node: NodeName,
    pub(super) lease: i64,
    /// Where the node's front is.
    pub(super) url: String,
    pub(super) record: ModelRecord,
}

impl Copy {
    /// Whether its node knows the model by this name.
    pub(super) fn is_named(&self, model: &ModelName, name: &str) -> bool {
        model.as_str() == name || self.record.names.iter().any(|other| other == name)
    }
}

impl RouteTable {
    /// What is not understood is left out: its node may serve it, but nothing says how.
    pub(super) fn of(fleet: &FleetName, contents: &Contents, has_tls: bool) -> Self {
        let entries = contents.entries().iter().map(|(key, entry)| (key.as_str(), &*entry.value));
        let (view, _) = View::read(fleet, entries);
        let mut table = Self::default();
        for (node, of_node) in &view.nodes {
            let entry = contents.entries().get(&Key::Node(node.clone()).in_fleet(fleet));
            let (Some(record), Some(entry)) = (&of_node.record, entry) else { continue };
            table.nodes.insert(node.clone(), entry.lease);
            for (model, of_model) in &of_node.models {
                table.names.insert(model.to_string(), model.clone());
                // So that the name is known.
                let copies = table.copies.entry(model.clone()).or_default();
                let placement = view.placements.get(model).and_then(|on| on.get(node));
                let goal = placement.and_then(Option::as_ref).map_or(Goal::None, |placement| placement.goal);
                let Some(of_model) = of_model else { continue };
                // Where nodes have certificates, no key goes to one without.
                let is_safe = !has_tls || record.front_url.starts_with("https://");
                if goal == Goal::None || record.front_url.is_empty() || !is_safe {
                    continue;
                }
                copies.push(Copy {
                    node: node.clone(),
                    lease: entry.lease,
                    url: record.front_url.clone(),
                    record: of_model.clone(),
                });
            }
        }
        // A model's own name comes before other models' other names.
        for (model, record) in view.nodes.values().flat_map(|node| &node.models) {
            for name in record.iter().flat_map(|record| &record.names) {
                table.names.entry(name.clone()).or_insert_with(|| model.clone());
            }
        }
        table
    }

    /// Whether it has no model.
    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// The model that requests mean by this name.
    pub(super) fn model(&self, name: &str) -> Option<&ModelName> {
        self.names.get(name)
    }

    pub(super) fn copies(&self, model: &ModelName) -> &[Copy] {
        self.copies.get(model).map_or(&[], Vec::as_slice)
    }

    pub(super) fn models(&self) -> impl Iterator<Item = (&ModelName, &[Copy])> {
        self.copies.iter().map(|(model, copies)| (model, copies.as_slice()))
    }

    /// Other names of a model.
    pub(super) fn names(&self) -> impl Iterator<Item = (&str, &ModelName)> {
        self.names.iter().map(|(name, model)| (name.as_str(), model))
    }

    /// Whether a node still tells of itself under this lease.
    pub(super) fn is_there(&self, node: &NodeName, lease: i64) -> bool {
        self.nodes.get(node) == Some(&lease)
    }
}
