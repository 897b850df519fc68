//! The last changes of a fleet's placements, as its records had them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use poorwill_fleet::etcd::Entry;
use poorwill_fleet::keys::Key;
use poorwill_fleet::name::{FleetName, ModelName, NodeName};
use poorwill_fleet::records::{Goal, Placement, Reading, read};
use serde::Serialize;

const KEPT_MAX: usize = 200;

/// A placement that changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Placed {
    /// By the controller's clock, or this router's if it was removed.
    pub(super) at_unix_ms: u64,
    pub(super) model: String,
    pub(super) node: String,
    /// `None` for what was there before this router was.
    pub(super) before: Option<Goal>,
    pub(super) goal: Goal,
    pub(super) why: String,
    pub(super) fence: u64,
}

/// The history, from every side. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct SharedHistory(Arc<Mutex<PlacementHistory>>);

impl SharedHistory {
    /// As [`PlacementHistory::take_in`].
    pub(super) fn take_in<'e>(
        &self,
        fleet: &FleetName,
        entries: impl IntoIterator<Item = &'e Entry>,
        now_ms: u64,
    ) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take_in(fleet, entries, now_ms);
    }

    pub(super) fn newest(&self) -> Vec<Placed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).newest()
    }
}

/// The newest are last.
#[derive(Debug, Default)]
struct PlacementHistory {
    known: BTreeMap<(ModelName, NodeName), LastGoal>,
    kept: VecDeque<Placed>,
    has_begun: bool,
}

#[derive(Debug, Clone)]
struct LastGoal {
    /// The record. An etcd that was restored gives its revisions again.
    value: Bytes,
    goal: Goal,
    fence: u64,
}

impl PlacementHistory {
    /// Takes in all entries below the fleet's prefix, which are as of `now_ms`.
    fn take_in<'e>(&mut self, fleet: &FleetName, entries: impl IntoIterator<Item = &'e Entry>, now_ms: u64) {
        let (mut there, mut changed) = (BTreeMap::new(), Vec::new());
        // What comes later was not placed there before.
        let none = self.has_begun.then_some(Goal::None);
        for entry in entries {
            let Ok(key) = Key::parse(fleet, &entry.key) else { continue };
            let Key::Placement { model, node } = &key else { continue };
            let pair = (model.clone(), node.clone());
            let mut known = self.known.remove(&pair);
            if let Some(known) = known.take_if(|known| known.value == entry.value) {
                there.insert(pair, known);
                continue;
            }
            let Ok(Reading::Known(placement)) = read::<Placement>(&key, &entry.value) else {
                // What it was is still the last that is known.
                there.extend(known.map(|known| (pair, LastGoal { value: entry.value.clone(), ..known })));
                continue;
            };
            let Placement { goal, fence, changed_at_ms, why, .. } = placement;
            let before = known.map(|known| known.goal).or(none);
            if before != Some(goal) {
                let (model, node) = (model.to_string(), node.to_string());
                changed.push(Placed { at_unix_ms: changed_at_ms, model, node, before, goal, why, fence });
            }
            there.insert(pair, LastGoal { value: entry.value.clone(), goal, fence });
        }
        for ((model, node), gone) in std::mem::replace(&mut self.known, there) {
            if gone.goal != Goal::None {
                changed.push(Placed {
                    at_unix_ms: now_ms,
                    model: model.to_string(),
                    node: node.to_string(),
                    before: Some(gone.goal),
                    goal: Goal::None,
                    why: "the node is gone, or does not have it configured".to_owned(),
                    fence: gone.fence,
                });
            }
        }
        self.has_begun = true;
        changed.sort_by_key(|placed| placed.at_unix_ms);
        self.kept.extend(changed);
        let over = self.kept.len().saturating_sub(KEPT_MAX);
        self.kept.drain(..over);
    }

    /// The newest first.
    fn newest(&self) -> Vec<Placed> {
        self.kept.iter().rev().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use poorwill_fleet::records::write;

    use super::*;

    fn entry(node: &str, goal: Goal, mod_revision: u64) -> Entry {
        let key = Key::Placement { model: "org/a".parse().unwrap(), node: node.parse().unwrap() };
        let placement = Placement::new(7, goal, mod_revision * 10, "it is pinned");
        Entry {
            key: key.in_fleet(&"t".parse().unwrap()),
            value: Bytes::from(write(&key, &placement).unwrap()),
            create_revision: 1,
            mod_revision,
            lease: 0,
        }
    }

    fn take_in(history: &mut PlacementHistory, entries: &[Entry]) -> Vec<(String, Option<Goal>, Goal)> {
        let before = history.kept.len();
        history.take_in(&"t".parse().unwrap(), entries, 1000);
        let new = history.kept.iter().skip(before);
        new.map(|placed| (placed.node.clone(), placed.before, placed.goal)).collect()
    }

    #[test]
    fn changes_of_goals_are_kept_in_their_order() {
        let mut history = PlacementHistory::default();
        let there = [entry("n1", Goal::Hot, 6), entry("n2", Goal::Warm, 5)];
        let seen = take_in(&mut history, &there);
        assert_eq!(seen, [("n2".to_owned(), None, Goal::Warm), ("n1".to_owned(), None, Goal::Hot)]);
        assert_eq!(take_in(&mut history, &there), []);
        // Another controller wrote the same again.
        assert_eq!(take_in(&mut history, &[entry("n1", Goal::Hot, 8), there[1].clone()]), []);
        let mut wrong = entry("n2", Goal::Hot, 9);
        wrong.value = Bytes::from_static(b"{");
        assert_eq!(take_in(&mut history, &[entry("n1", Goal::Hot, 8), wrong]), []);
        let now = [entry("n2", Goal::None, 10), entry("n3", Goal::Hot, 11)];
        let seen = take_in(&mut history, &now);
        let n = |node: &str, before, goal| (node.to_owned(), Some(before), goal);
        let expected =
            [n("n2", Goal::Warm, Goal::None), n("n3", Goal::None, Goal::Hot), n("n1", Goal::Hot, Goal::None)];
        assert_eq!(seen, expected);
        assert_eq!(history.newest()[0].at_unix_ms, 1000, "the removed one has no time of its own");
    }

    #[test]
    fn a_change_is_noticed_at_a_revision_that_was_there_before() {
        let mut history = PlacementHistory::default();
        take_in(&mut history, &[entry("n1", Goal::Hot, 6), entry("n2", Goal::Warm, 9)]);
        let restored = [entry("n1", Goal::None, 6), entry("n2", Goal::Hot, 4)];
        let n = |node: &str, before, goal| (node.to_owned(), Some(before), goal);
        let expected = [n("n2", Goal::Warm, Goal::Hot), n("n1", Goal::Hot, Goal::None)];
        assert_eq!(take_in(&mut history, &restored), expected);
    }

    #[test]
    fn only_the_last_are_kept() {
        let mut history = PlacementHistory::default();
        let all: Vec<Entry> = (1..=250).map(|nth| entry(&format!("n{nth}"), Goal::Warm, nth)).collect();
        history.take_in(&"t".parse().unwrap(), &all, 0);
        let newest = history.newest();
        assert_eq!((newest.len(), newest[0].node.as_str(), newest[199].node.as_str()), (200, "n250", "n51"));
    }
}
