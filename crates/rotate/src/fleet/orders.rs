//! What this node was ordered last, and which processes were this node, in its state folder.
//!
//! Promises:
//!
//! - An order holds until another one comes, also over a start without etcd.
//! - Who holds the folder knows the processes before it by their instances. All of them are dead.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use poorwill_fleet::records::Goal;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt as _;

const FILE: &str = "placements.json";
/// Processes that are remembered.
const INSTANCES_MAX: usize = 64;

/// The file in the state folder cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}; remove it, and the node takes what etcd has", path.display())]
pub struct OrdersError {
    path: PathBuf,
    reason: String,
}

/// The last order for each model.
#[derive(Debug, Default)]
pub(super) struct Orders {
    path: Option<PathBuf>,
    kept: OrdersFile,
    is_changed: bool,
    /// Hot models that no operator pinned, as etcd said since this start.
    giving_way: BTreeSet<String>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OrdersFile {
    /// Processes that had this folder, the last one at the end.
    instances: Vec<String>,
    models: BTreeMap<String, Goal>,
}

impl Orders {
    /// As the folder has them; without a folder, none.
    pub(super) fn read(state: Option<&Path>, instance: &str) -> Result<Self, OrdersError> {
        let path = state.map(|folder| folder.join(FILE));
        let mut kept = path.as_deref().map(read).transpose()?.unwrap_or_default();
        kept.instances.push(instance.to_owned());
        let surplus = kept.instances.len().saturating_sub(INSTANCES_MAX);
        kept.instances.drain(..surplus);
        Ok(Self { path, kept, is_changed: true, giving_way: BTreeSet::new() })
    }

    /// Whether a process was this node before, or is it now.
    pub(super) fn was_here(&self, instance: &str) -> bool {
        self.kept.instances.iter().any(|known| known == instance)
    }

    /// What was ordered of each model.
    pub(super) fn goals(&self) -> &BTreeMap<String, Goal> {
        &self.kept.models
    }

    pub(super) fn goal(&self, model: &str) -> Option<Goal> {
        self.kept.models.get(model).copied()
    }

    /// Hot models that give way to nothing: those that operators pinned, and before etcd said so, all.
    pub(super) fn held(&self) -> BTreeSet<String> {
        let hot = self.kept.models.iter().filter(|(_, goal)| **goal == Goal::Hot);
        hot.map(|(model, _)| model).filter(|model| !self.giving_way.contains(*model)).cloned().collect()
    }

    pub(super) fn take(&mut self, model: &str, goal: Goal, is_held: bool) {
        self.is_changed |= self.kept.models.insert(model.to_owned(), goal) != Some(goal);
        if is_held {
            self.giving_way.remove(model);
        } else {
            self.giving_way.insert(model.to_owned());
        }
    }

    /// Nothing orders anything of it now. It still takes requests, and is not kept awake for them.
    pub(super) fn absent(&mut self, model: &str) -> Option<Goal> {
        let goal = self.goal(model)?.min(Goal::Warm);
        self.take(model, goal, false);
        Some(goal)
    }

    /// Writes what has changed, before anything is done by it.
    pub(super) async fn keep(&mut self) {
        if !self.is_changed {
            return;
        }
        let Some(path) = &self.path else { return };
        let written = async {
            let new = path.with_extension("new");
            let mut file = tokio::fs::File::create(&new).await?;
            file.write_all(&serde_json::to_vec(&self.kept)?).await?;
            // A loss of power leaves the old ones or these.
            file.sync_all().await?;
            tokio::fs::rename(&new, path).await
        };
        match written.await {
            Ok(()) => self.is_changed = false,
            Err(error) => {
                let error: std::io::Error = error;
                tracing::warn!(path = %path.display(), %error, "cannot save this node's placements for its next start");
            }
        }
    }
}

fn read(path: &Path) -> Result<OrdersFile, OrdersError> {
    let failed = |reason: String| OrdersError { path: path.to_path_buf(), reason };
    match std::fs::read(path) {
        Ok(json) => serde_json::from_slice(&json).map_err(|error| failed(error.to_string())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(OrdersFile::default()),
        Err(error) => Err(failed(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn orders_outlive_their_process() {
        let folder = tempfile::tempdir().unwrap();
        let read = |instance: &str| Orders::read(Some(folder.path()), instance);
        let mut orders = read("first").unwrap();
        orders.take("a", Goal::Hot, true);
        orders.take("b", Goal::Warm, true);
        orders.keep().await;
        assert!(read("between").unwrap().held().iter().eq(["a"]));
        orders.take("a", Goal::Hot, false);
        assert!(orders.held().is_empty());
        orders.take("a", Goal::Warm, false);
        orders.keep().await;
        let orders = read("second").unwrap();
        let goals = ["a", "b"].map(|model| (model.to_owned(), Goal::Warm));
        assert_eq!(*orders.goals(), BTreeMap::from(goals));
        assert!(orders.was_here("first") && orders.was_here("second") && !orders.was_here("third"));
        std::fs::write(folder.path().join(FILE), "{").unwrap();
        assert!(read("third").unwrap_err().to_string().contains("remove it"));
    }

    #[test]
    fn an_absent_placement_orders_nothing() {
        let mut orders = Orders::default();
        assert_eq!(orders.absent("a"), None);
        for (goal, then) in [(Goal::Hot, Goal::Warm), (Goal::Warm, Goal::Warm), (Goal::None, Goal::None)] {
            orders.take("a", goal, true);
            assert_eq!(orders.absent("a"), Some(then));
            assert!(orders.held().is_empty());
        }
    }
}
