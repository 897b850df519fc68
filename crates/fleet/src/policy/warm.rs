//! Which nodes have a model placed, awake or not: enough of them, in different failure domains.

use std::cmp::Reverse;

use super::goals::Goals;
use super::plan::{Lack, Why};
use super::rules::Rules;
use crate::records::Goal;

/// Models with too few placements get more.
pub(super) fn copies(goals: &mut Goals<'_, '_>, rules: &Rules, lacks: &mut Vec<(usize, Lack)>) {
    for model in 0..goals.table().models.len() {
        loop {
            let placed: Vec<usize> = goals.staying(model).collect();
            if placed.len() >= rules.copies_min {
                break;
            }
            let Some(pair) = best(goals, model, &placed) else {
                lacks.push((model, Lack::Nodes { placed: placed.len(), wanted: rules.copies_min }));
                break;
            };
            goals.set(pair, Goal::Warm, Why::FewCopies { placed: placed.len(), wanted: rules.copies_min });
        }
    }
}

/// Models whose placements could fail together get another.
pub(super) fn spread(goals: &mut Goals<'_, '_>, rules: &Rules) {
    for model in 0..goals.table().models.len() {
        let placed: Vec<usize> = goals.staying(model).collect();
        if domains(goals, &placed) >= rules.copies_min || placed.is_empty() {
            continue;
        }
        let Some(pair) = best(goals, model, &placed) else { continue };
        if !shares_domain(goals, &placed, pair) {
            goals.set(pair, Goal::Warm, Why::Spread);
        }
    }
}

/// Warm placements beyond what is needed end after a while, where the others are ready.
pub(super) fn spare(goals: &mut Goals<'_, '_>, rules: &Rules) {
    let table = goals.table();
    for (model, row) in table.models.iter().enumerate() {
        let wanted = rules.copies_min.max(row.demand.copies);
        let mut placed: Vec<usize> = goals.staying(model).collect();
        if placed.len() <= wanted {
            continue;
        }
        let mut spare: Vec<usize> = placed.clone();
        spare.retain(|pair| {
            let is_old = goals.age_ms(*pair) >= rules.spare_keep_ms.max(1);
            is_old && goals.get(*pair) == Goal::Warm && !table.pairs[*pair].is_frozen
        });
        // What is awake, or nearly, leaves last; of others what its node could use.
        spare.sort_by_cached_key(|pair| {
            let of = &table.pairs[*pair];
            (Reverse(of.wake_ms), Reverse(goals.placed_on(of.node)), *pair)
        });
        for pair in spare {
            let rest: Vec<usize> = placed.iter().copied().filter(|other| *other != pair).collect();
            let ready = rest.iter().filter(|other| table.is_ready(**other)).count();
            let is_spread = domains(goals, &rest) >= domains(goals, &placed).min(rules.copies_min);
            if rest.len() >= wanted && ready >= rules.copies_min && is_spread {
                goals.set(pair, Goal::None, Why::Spare);
                placed = rest;
            }
        }
    }
}

/// Where one more placement is best.
fn best(goals: &Goals<'_, '_>, model: usize, placed: &[usize]) -> Option<usize> {
    let table = goals.table();
    let is_open = |pair: &usize| table.is_usable(*pair) && goals.get(*pair) == Goal::None;
    table.models[model].pairs.clone().filter(is_open).min_by_key(|pair| {
        let of = &table.pairs[*pair];
        let shares = shares_domain(goals, placed, *pair);
        // Where hot copies leave no memory, it cannot be started without them leaving.
        let is_taken = goals.lacks(*pair).any(|(_, lacks)| lacks > 0);
        let is_short = !goals.fits_host(*pair);
        (shares, !of.has_gpus, of.wake_ms, is_short, is_taken, goals.placed_on(of.node), *pair)
    })
}

fn shares_domain(goals: &Goals<'_, '_>, placed: &[usize], pair: usize) -> bool {
    let table = goals.table();
    placed.iter().any(|other| table.domain(*other) == table.domain(pair))
}

fn domains(goals: &Goals<'_, '_>, placed: &[usize]) -> usize {
    let is_first = |at: &usize| !shares_domain(goals, &placed[..*at], placed[*at]);
    (0..placed.len()).filter(is_first).count()
}
