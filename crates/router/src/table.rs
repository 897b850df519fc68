//! Who has which model, as the fleet's records say.

use std::collections::{BTreeMap, BTreeSet};

use poorwill_fleet::etcd::Entry;
use poorwill_fleet::keys::Key;
use poorwill_fleet::name::{FleetName, ModelName, NodeName};
use poorwill_fleet::policy::View;
use poorwill_fleet::records::{Goal, ModelRecord};

use super::trust::Trust;

/// All copies that may be asked, by model.
#[derive(Debug, Default)]
pub(super) struct RouteTable {
    copies: BTreeMap<ModelName, Vec<Copy>>,
    /// The model of each name in requests.
    names: BTreeMap<String, ModelName>,
    /// The processes that tell of themselves at each URL, by their instances. One that has lost its lease is not there.
    instances: BTreeMap<String, BTreeSet<String>>,
    /// Nodes that nothing is sent to, each with the reason.
    problems: Vec<String>,
}

/// A model on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Copy {
    pub(super) node: NodeName,
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
    /// By the fleet's entries, and what was read of them. What is not understood is left out: its node may serve it, but nothing says how.
    pub(super) fn of(
        fleet: &FleetName,
        entries: &BTreeMap<String, Entry>,
        view: &View,
        trust: &Trust,
    ) -> Self {
        let mut table = Self::default();
        for (node, of_node) in &view.nodes {
            let entry = entries.get(&Key::Node(node.clone()).in_fleet(fleet));
            let (Some(record), Some(entry)) = (&of_node.record, entry) else { continue };
            let problem = trust.problem(fleet, node, record, entry.lease);
            table.problems.extend(problem.map(|why| format!("node `{node}`: {why}")));
            if problem.is_none() {
                table.instances.entry(record.front_url.clone()).or_default().insert(record.instance.clone());
            }
            for (model, of_model) in &of_node.models {
                table.names.insert(model.to_string(), model.clone());
                // So that the name is known.
                let copies = table.copies.entry(model.clone()).or_default();
                let Some(of_model) = of_model else { continue };
                if view.goal(model.as_str(), node.as_str()) == Goal::None
                    || record.front_url.is_empty()
                    || problem.is_some()
                {
                    continue;
                }
                copies.push(Copy {
                    node: node.clone(),
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

    /// The processes that tell of themselves at this URL.
    pub(super) fn instances_at(&self, url: &str) -> BTreeSet<String> {
        self.instances.get(url).cloned().unwrap_or_default()
    }

    /// Nodes that nothing is sent to, each with the reason.
    pub(super) fn problems(&self) -> &[String] {
        &self.problems
    }

    #[cfg(test)]
    pub(super) fn of_copies(model: &str, copies: Vec<Copy>) -> Self {
        let model: ModelName = model.parse().unwrap();
        Self {
            instances: copies
                .iter()
                .map(|copy| (copy.url.clone(), BTreeSet::from(["i".to_owned()])))
                .collect(),
            names: BTreeMap::from([(model.to_string(), model.clone())]),
            copies: BTreeMap::from([(model, copies)]),
            problems: Vec::new(),
        }
    }
}
