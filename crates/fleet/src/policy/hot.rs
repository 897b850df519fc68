//! Who is hot where: pins first, then demand, where it is worth most.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::goals::Goals;
use super::plan::{Lack, Why};
use super::rules::Rules;
use crate::records::{Goal, Pin, Stage};

/// A hot copy to be had.
struct Wish<'w> {
    why: Why,
    /// Its worth is beyond all others, and so it displaces what is not pinned.
    is_pin: bool,
    /// Whether it need not pay back what it takes, nor wait until others have stayed for long enough.
    is_urgent: bool,
    may: &'w dyn Fn(usize) -> bool,
}

/// Why a wish fails.
enum Fail {
    Memory,
    Worth,
}

/// Where a wish could be had, the best first, and what leaves for it. Before that: how long it takes, whether its domain
/// has a hot copy already, the memory that stays free, and the pair.
type HotPlace = (u64, bool, Reverse<i128>, usize, Vec<usize>);

/// Hot copies stay within the budget of each GPU, also where it became smaller.
pub(super) fn fit(goals: &mut Goals<'_, '_>) {
    let table = goals.table();
    let kept = pinned(goals);
    for node in 0..table.nodes.len() {
        for gpu in 0..table.nodes[node].budgets.len() {
            while goals.free(node, gpu) < 0 {
                let is_on = |pair: &usize| table.need(*pair).any(|(on, bytes)| on == gpu && bytes > 0);
                let is_on = |pair: &usize| !table.pairs[*pair].is_frozen && is_on(pair);
                let hot = hot_on(goals, node).filter(is_on);
                let Some(least) = hot.min_by_key(|pair| (kept[*pair], worth(goals, *pair), *pair)) else {
                    break;
                };
                goals.set(least, Goal::Warm, Why::OverBudget);
            }
        }
    }
}

/// Pinned models are hot where anything can hold them.
pub(super) fn pins(goals: &mut Goals<'_, '_>, rules: &Rules, lacks: &mut Vec<(usize, Lack)>) {
    let table = goals.table();
    for pair in 0..table.pairs.len() {
        if is_pinned_there(goals, pair) && goals.get(pair) != Goal::Hot {
            let (why, may) = (Why::PinnedThere, |other| other == pair);
            let wish = Wish { why, is_pin: true, is_urgent: true, may: &may };
            if promote(goals, rules, table.pairs[pair].model, &wish).is_err() {
                lacks.push((table.pairs[pair].model, Lack::Pin { hot: 0, wanted: 1 }));
            }
        }
    }
    for (model, row) in table.models.iter().enumerate() {
        let Some(pin) = row.pin else { continue };
        let wanted = usize::try_from(pin.copies).unwrap_or(usize::MAX);
        let may = |pair| is_for(goals, pin, pair);
        let allowed: Vec<usize> = row.pairs.clone().filter(|pair| may(*pair)).collect();
        loop {
            let hot = goals.hot(model).filter(|pair| allowed.contains(pair)).count();
            if hot >= wanted {
                break;
            }
            let may = |pair| allowed.contains(&pair);
            let wish = Wish { why: Why::Pinned, is_pin: true, is_urgent: true, may: &may };
            if promote(goals, rules, model, &wish).is_err() {
                lacks.push((model, Lack::Pin { hot, wanted }));
                break;
            }
        }
    }
}

/// Hot copies that the demand does not need any more become warm.
pub(super) fn shrink(goals: &mut Goals<'_, '_>, rules: &Rules) {
    let table = goals.table();
    let kept = pinned(goals);
    for (model, row) in table.models.iter().enumerate() {
        let hot: Vec<usize> = goals.hot(model).collect();
        let pinned = hot.iter().filter(|pair| kept[**pair]).count();
        let most = row.demand.copies.max(pinned);
        let surplus = hot.len().saturating_sub(most);
        if surplus == 0 {
            continue;
        }
        let may = |pair: &usize| {
            !kept[*pair] && !table.pairs[*pair].is_frozen && goals.age_ms(*pair) >= rules.keep_min_ms
        };
        let mut leavers: Vec<usize> = hot.iter().copied().filter(may).collect();
        // Those that share their domain leave first, then those with few requests.
        leavers.sort_by_cached_key(|pair| {
            let domain = table.domain(*pair);
            let beside = hot.iter().filter(|other| table.domain(**other) == domain).count();
            let requests = table.pairs[*pair].record.map_or(0, |record| record.requests.all());
            (table.stage(*pair) == Stage::Awake, Reverse(beside), requests, *pair)
        });
        for pair in leavers.into_iter().take(surplus) {
            goals.set(pair, Goal::Warm, Why::FewerSuffice { copies: row.demand.copies });
        }
    }
}

/// Models in demand get hot copies, those that are worth most first.
pub(super) fn grow(goals: &mut Goals<'_, '_>, rules: &Rules, lacks: &mut Vec<(usize, Lack)>) {
    let table = goals.table();
    let entry = |model: usize, is_urgent: bool| {
        let worth = table.models[model].pairs.clone().map(|pair| table.pairs[pair].worth).max();
        (Reverse(is_urgent), Reverse(worth), model)
    };
    let lacks_copies = |goals: &Goals<'_, '_>, model: usize| {
        let least = table.models[model].demand.copies;
        least > 0 && goals.hot(model).count() < least
    };
    let wanting = (0..table.models.len()).filter(|model| lacks_copies(goals, *model));
    let mut queue: BTreeSet<_> = wanting.map(|model| entry(model, replaces(goals, model))).collect();
    while let Some((Reverse(is_urgent), _, model)) = queue.pop_first() {
        let demand = table.models[model].demand;
        let (hot, wanted) = (goals.hot(model).count(), demand.copies);
        let (requests, rate, copies) = (demand.requests, demand.rate, wanted);
        let why = if is_urgent { Why::Replaces } else { Why::Demand { requests, rate, copies } };
        let wish = Wish { why, is_pin: false, is_urgent, may: &|_| true };
        match promote(goals, rules, model, &wish) {
            Ok(displaced) => {
                let again = displaced.into_iter().map(|pair| table.pairs[pair].model).chain([model]);
                let again = again.filter(|model| lacks_copies(goals, *model));
                queue.extend(again.map(|model| entry(model, replaces(goals, model))).collect::<Vec<_>>());
            }
            Err(Fail::Memory) => lacks.push((model, Lack::Memory { hot, wanted })),
            Err(Fail::Worth) => lacks.push((model, Lack::Worth { wanted })),
        }
    }
}

/// Whether a hot copy of it is lost, or leaves.
fn replaces(goals: &Goals<'_, '_>, model: usize) -> bool {
    let table = goals.table();
    let row = &table.models[model];
    let leaves = |pair: usize| table.pairs[pair].is_leaving && goals.get(pair) == Goal::Hot;
    row.lost_hot || row.pairs.clone().any(leaves)
}

/// Makes a copy hot where that is best. Returns what left for it.
fn promote(
    goals: &mut Goals<'_, '_>,
    rules: &Rules,
    model: usize,
    wish: &Wish<'_>,
) -> Result<Vec<usize>, Fail> {
    let table = goals.table();
    let row = &table.models[model];
    let (mut best, mut fail): (Option<HotPlace>, Fail) = (None, Fail::Memory);
    let hot_domains: BTreeSet<usize> = goals.hot(model).map(|pair| table.domain(pair)).collect();
    for pair in row.pairs.clone() {
        let is_open = table.is_usable(pair) && table.pairs[pair].has_gpus && goals.get(pair) != Goal::Hot;
        if !is_open || !(wish.may)(pair) || is_unclear(goals, table.pairs[pair].node) {
            continue;
        }
        let was_hot = table.pairs[pair].was == Goal::Hot;
        let Some(leavers) = leavers(goals, rules, pair, wish) else { continue };
        let left = goals.lacks(pair).map(|(_, lacks)| -lacks).min().unwrap_or_default();
        let takes = table.pairs[pair].wake_ms.saturating_add(swap_ms(goals, rules, &leavers));
        if !wish.is_urgent && hot_domains.is_empty() && !was_hot && !pays(goals, rules, pair, takes) {
            fail = Fail::Worth;
            continue;
        }
        let place = (takes, hot_domains.contains(&table.domain(pair)), Reverse(left), pair, leavers);
        if best.as_ref().is_none_or(|best| place < *best) {
            best = Some(place);
        }
    }
    let Some((_, _, _, pair, leavers)) = best else { return Err(fail) };
    for leaver in &leavers {
        goals.set(*leaver, Goal::Warm, Why::Displaced { by: row.name.clone() });
    }
    goals.set(pair, Goal::Hot, wish.why.clone());
    Ok(leavers)
}

/// Whether the wakes that a first hot copy saves take as long as it does, within a set time.
fn pays(goals: &Goals<'_, '_>, rules: &Rules, pair: usize, takes_ms: u64) -> bool {
    let of = &goals.table().pairs[pair];
    let measured = of.record.and_then(|record| record.costs.wake_ms);
    let wake_ms = u128::from(measured.or(rules.usual_costs.wake_ms).unwrap_or_default());
    let rate = u128::from(goals.table().models[of.model].demand.rate.as_micros());
    // Millionths per second, times milliseconds.
    let wakes = rate * u128::from(rules.pay_back_ms) / 1_000;
    wakes * wake_ms >= u128::from(takes_ms) * 1_000_000
}

/// What has to leave for it; `None` if that is worth more, or not enough.
fn leavers(goals: &Goals<'_, '_>, rules: &Rules, pair: usize, wish: &Wish<'_>) -> Option<Vec<usize>> {
    let table = goals.table();
    let of = &table.pairs[pair];
    let mut lacks: Vec<(usize, i128)> = goals.lacks(pair).filter(|(_, lacks)| *lacks > 0).collect();
    if lacks.is_empty() {
        return Some(Vec::new());
    }
    // No need is met beyond the whole budget.
    if table.need(pair).any(|(gpu, need)| need > table.nodes[of.node].budgets[gpu]) {
        return None;
    }
    let may = |other: &usize| {
        // What came in this plan stays.
        let least_ms = if wish.is_urgent { 1 } else { rules.keep_min_ms.max(1) };
        let is_old = wish.is_pin || goals.age_ms(*other) >= least_ms;
        let other_pair = &table.pairs[*other];
        is_old && !other_pair.is_frozen && other_pair.model != of.model && !is_kept(goals, *other)
    };
    let mut hot: Vec<usize> = hot_on(goals, of.node).filter(may).collect();
    hot.sort_by_key(|other| (worth(goals, *other), *other));
    let mut leavers: Vec<usize> = Vec::new();
    for other in hot {
        if lacks.iter().all(|(_, lacks)| *lacks <= 0) {
            break;
        }
        let helps = table.need(other).any(|(gpu, need)| {
            need > 0 && lacks.iter().any(|(lacking, lacks)| *lacking == gpu && *lacks > 0)
        });
        if helps {
            free(goals, &mut lacks, other, 1);
            leavers.push(other);
        }
    }
    if lacks.iter().any(|(_, lacks)| *lacks > 0) {
        return None;
    }
    // Those that are worth most stay if the others suffice.
    for at in (0..leavers.len()).rev() {
        free(goals, &mut lacks, leavers[at], -1);
        if lacks.iter().all(|(_, lacks)| *lacks <= 0) {
            leavers.remove(at);
        } else {
            free(goals, &mut lacks, leavers[at], 1);
        }
    }
    let theirs: u128 = leavers.iter().map(|other| u128::from(worth(goals, *other))).sum();
    let is_worth_it = u128::from(of.worth) > theirs;
    (wish.is_pin || is_worth_it).then_some(leavers)
}

fn free(goals: &Goals<'_, '_>, lacks: &mut [(usize, i128)], pair: usize, sign: i128) {
    for (gpu, need) in goals.table().need(pair) {
        for (_, lacks) in lacks.iter_mut().filter(|(lacking, _)| *lacking == gpu) {
            *lacks -= sign * i128::from(need);
        }
    }
}

/// How long it takes until these have left, and are back when they are wanted.
fn swap_ms(goals: &Goals<'_, '_>, rules: &Rules, leavers: &[usize]) -> u64 {
    let usual = rules.usual_costs;
    let one = |pair: &usize| {
        let costs = goals.table().pairs[*pair].record.map(|record| record.costs).unwrap_or_default();
        let sleep = costs.sleep_ms.or(usual.sleep_ms).unwrap_or_default();
        let wake = costs.wake_ms.or(usual.wake_ms).unwrap_or_default();
        if worth(goals, *pair) == 0 { sleep } else { sleep.saturating_add(wake) }
    };
    leavers.iter().map(one).fold(0, u64::saturating_add)
}

fn hot_on<'g>(goals: &'g Goals<'_, '_>, node: usize) -> impl Iterator<Item = usize> + 'g {
    goals.table().nodes[node].pairs.iter().copied().filter(|pair| goals.get(*pair) == Goal::Hot)
}

/// Whether a hot copy there takes memory that is not known.
fn is_unclear(goals: &Goals<'_, '_>, node: usize) -> bool {
    hot_on(goals, node).any(|pair| goals.table().pairs[pair].record.is_none())
}

/// One that failed keeps no other away.
fn worth(goals: &Goals<'_, '_>, pair: usize) -> u64 {
    let of = &goals.table().pairs[pair];
    if of.is_leaving { 0 } else { of.worth }
}

fn is_for(goals: &Goals<'_, '_>, pin: &Pin, pair: usize) -> bool {
    let table = goals.table();
    pin.nodes.is_empty() || pin.nodes.contains(table.nodes[table.pairs[pair].node].name)
}

fn is_pinned_there(goals: &Goals<'_, '_>, pair: usize) -> bool {
    let of = &goals.table().pairs[pair];
    of.is_pinned && !of.is_leaving && !of.is_frozen
}

/// Whether a hot copy is kept by its node's configuration, or by a pin.
fn is_kept(goals: &Goals<'_, '_>, pair: usize) -> bool {
    let is_staying = goals.get(pair) == Goal::Hot && !goals.table().pairs[pair].is_leaving;
    is_staying && is_pinned_there(goals, pair) || is_held(goals, pair)
}

/// Whether a hot copy is one of those that its pin asks for.
fn is_held(goals: &Goals<'_, '_>, pair: usize) -> bool {
    if goals.get(pair) != Goal::Hot || goals.table().pairs[pair].is_leaving {
        return false;
    }
    let model = goals.table().pairs[pair].model;
    let Some(pin) = goals.table().models[model].pin else { return false };
    let mut hot: Vec<usize> = goals.hot(model).filter(|pair| is_for(goals, pin, *pair)).collect();
    hot.sort_by_key(|pair| (Reverse(goals.age_ms(*pair)), *pair));
    hot.iter().take(usize::try_from(pin.copies).unwrap_or(usize::MAX)).any(|kept| *kept == pair)
}

/// Which pairs are held by a pin. What is not understood stays as it is.
pub(super) fn held(goals: &Goals<'_, '_>) -> Vec<bool> {
    let pairs = goals.table().pairs.iter().enumerate();
    pairs
        .map(|(pair, of)| if of.is_frozen { of.was_held.unwrap_or(true) } else { is_held(goals, pair) })
        .collect()
}

fn pinned(goals: &Goals<'_, '_>) -> Vec<bool> {
    (0..goals.table().pairs.len()).map(|pair| is_kept(goals, pair)).collect()
}
