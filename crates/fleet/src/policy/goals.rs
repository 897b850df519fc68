//! The goals that a plan is made of, with the memory that they take.
//!
//! Everything here follows from the goals alone, and not from the order in which they were set. So a plan that was
//! applied leaves nothing to do.

use super::plan::Why;
use super::table::Table;
use crate::records::Goal;

pub(super) struct Goals<'t, 'v> {
    table: &'t Table<'v>,
    goals: Vec<Goal>,
    whys: Vec<Option<Why>>,
    /// Bytes of hot copies on each GPU of each node.
    taken: Vec<Vec<u128>>,
    /// Host memory that placed models will take beyond what they have, on each node.
    host_taken: Vec<u128>,
    /// Placements on each node.
    placed: Vec<usize>,
    /// Changes so far.
    changes: usize,
}

impl<'t, 'v> Goals<'t, 'v> {
    /// As they are.
    pub(super) fn of(table: &'t Table<'v>) -> Self {
        let nodes = table.nodes.len();
        let mut goals = Self {
            table,
            goals: vec![Goal::None; table.pairs.len()],
            whys: vec![None; table.pairs.len()],
            taken: table.nodes.iter().map(|node| vec![0; node.budgets.len()]).collect(),
            host_taken: vec![0; nodes],
            placed: vec![0; nodes],
            changes: 0,
        };
        for pair in 0..table.pairs.len() {
            goals.goals[pair] = table.pairs[pair].was;
            goals.count(pair, true);
        }
        goals
    }

    pub(super) fn get(&self, pair: usize) -> Goal {
        self.goals[pair]
    }

    pub(super) fn set(&mut self, pair: usize, goal: Goal, why: Why) {
        self.count(pair, false);
        self.goals[pair] = goal;
        self.count(pair, true);
        self.whys[pair] = Some(why);
        self.changes += 1;
    }

    /// Adds what it takes, or takes it off again.
    fn count(&mut self, pair: usize, is_added: bool) {
        let of = &self.table.pairs[pair];
        let (node, goal) = (of.node, self.goals[pair]);
        if goal == Goal::None {
            return;
        }
        let by = |value: &mut usize| *value = if is_added { *value + 1 } else { *value - 1 };
        let bytes =
            |value: &mut u128, bytes: u128| *value = if is_added { *value + bytes } else { *value - bytes };
        by(&mut self.placed[node]);
        if let Some(record) = of.record.filter(|record| !record.stage.holds_host()) {
            bytes(&mut self.host_taken[node], u128::from(record.host_bytes));
        }
        if goal == Goal::Hot {
            for (gpu, need) in self.table.need(pair) {
                bytes(&mut self.taken[node][gpu], u128::from(need));
            }
        }
    }

    pub(super) fn is_changed(&self, pair: usize) -> bool {
        self.goals[pair] != self.table.pairs[pair].was
    }

    /// How long it has had its goal.
    pub(super) fn age_ms(&self, pair: usize) -> u64 {
        if self.is_changed(pair) { 0 } else { self.table.pairs[pair].age_ms }
    }

    /// How many bytes a GPU lacks for this on top of its hot copies. Zero or less: it fits.
    pub(super) fn lacks(&self, pair: usize) -> impl Iterator<Item = (usize, i128)> + '_ {
        let node = self.table.pairs[pair].node;
        self.table.need(pair).map(move |(gpu, need)| (gpu, i128::from(need) - self.free(node, gpu)))
    }

    /// Below zero if hot copies take more than the budget.
    pub(super) fn free(&self, node: usize, gpu: usize) -> i128 {
        let taken = i128::try_from(self.taken[node][gpu]).unwrap_or(i128::MAX);
        i128::from(self.table.nodes[node].budgets[gpu]) - taken
    }

    /// Whether host memory is left for a copy that sleeps there.
    pub(super) fn fits_host(&self, pair: usize) -> bool {
        let of = &self.table.pairs[pair];
        let Some(record) = of.record else { return false };
        let free = u128::from(self.table.nodes[of.node].host_free_bytes);
        record.stage.holds_host() || self.host_taken[of.node] + u128::from(record.host_bytes) <= free
    }

    pub(super) fn placed_on(&self, node: usize) -> usize {
        self.placed[node]
    }

    pub(super) fn changes(&self) -> usize {
        self.changes
    }

    pub(super) fn table(&self) -> &'t Table<'v> {
        self.table
    }

    /// Placements of a model that stay where they are.
    pub(super) fn staying(&self, model: usize) -> impl Iterator<Item = usize> + '_ {
        let pairs = self.table.models[model].pairs.clone();
        pairs.filter(|pair| self.goals[*pair] != Goal::None && !self.table.pairs[*pair].is_leaving)
    }

    /// Those of them that are hot.
    pub(super) fn hot(&self, model: usize) -> impl Iterator<Item = usize> + '_ {
        self.staying(model).filter(|pair| self.goals[*pair] == Goal::Hot)
    }

    /// What differs, with the last reason. Each may be held by a pin.
    pub(super) fn into_changes(self, held: &[bool]) -> impl Iterator<Item = (usize, Goal, Why)> {
        let table = self.table;
        let all = self.goals.into_iter().zip(self.whys).enumerate();
        all.filter_map(|(pair, (goal, why))| {
            let of = &table.pairs[pair];
            let is_new = goal == Goal::Hot && !of.is_frozen && of.was_held != Some(held[pair]);
            let why = match (goal != of.was, is_new) {
                (true, _) => why,
                (false, true) => Some(if held[pair] { Why::Pinned } else { Why::NotPinned }),
                (false, false) => None,
            };
            why.map(|why| (pair, goal, why))
        })
    }
}
