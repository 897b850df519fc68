//! Placements leave nodes that drain, and engines that failed, when elsewhere is ready.

use super::goals::Goals;
use super::plan::Why;
use crate::records::{Goal, Stage};

pub(super) fn leave(goals: &mut Goals<'_, '_>) {
    let table = goals.table();
    for (model, row) in table.models.iter().enumerate() {
        for pair in row.pairs.clone() {
            let of = &table.pairs[pair];
            if !of.is_leaving || of.is_frozen || goals.get(pair) == Goal::None {
                continue;
            }
            let drains = table.nodes[of.node].is_draining;
            if drains && is_cold(goals, pair) && goals.staying(model).next().is_some() {
                goals.set(pair, Goal::None, Why::DrainedCold);
            } else if is_ready_elsewhere(goals, model, goals.get(pair)) {
                goals.set(pair, Goal::None, if drains { Why::Drained } else { Why::FailedThere });
            } else if drains && !row.pairs.clone().any(|other| table.is_usable(other)) {
                goals.set(pair, Goal::None, Why::DrainedAlone);
            }
        }
    }
}

/// Whether nothing is lost with it: no engine runs there, and no request waits for one.
fn is_cold(goals: &Goals<'_, '_>, pair: usize) -> bool {
    let has_requests = goals.table().pairs[pair].record.is_none_or(|record| record.requests.all() > 0);
    goals.get(pair) == Goal::Warm && goals.table().stage(pair) == Stage::Stopped && !has_requests
}

fn is_ready_elsewhere(goals: &Goals<'_, '_>, model: usize, goal: Goal) -> bool {
    let table = goals.table();
    let hot = goals.hot(model).count();
    if goal == Goal::Hot && hot > 0 {
        let awake = goals.hot(model).filter(|pair| table.is_awake(*pair)).count();
        return awake >= table.models[model].demand.copies.clamp(1, hot);
    }
    goals.staying(model).any(|pair| table.is_ready(pair))
}
