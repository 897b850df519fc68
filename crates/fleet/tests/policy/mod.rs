//! Promises of the placement policy, for random fleets.

mod cases;
mod views;

use std::collections::BTreeSet;

use poorwill_fleet::policy::{Lack, Plan, Rules, Shortage, Time, View, Write, decide};
use poorwill_fleet::records::{Goal, Placement, write};
use poorwill_testkit::effort::Effort;
use proptest::prelude::*;

use views::{NOW, apply, fits_beside, hot_on, is_frozen, is_leaving, is_usable, realize, rules, view};

fn config() -> ProptestConfig {
    let cases = Effort::of_this_run().cases(400);
    ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 4000, ..ProptestConfig::default() }
}

/// The view after its plan.
fn planned(view: &View, rules: &Rules) -> (Plan, View) {
    let plan = decide(view, rules, NOW);
    let mut after = view.clone();
    apply(&mut after, &plan, NOW);
    (plan, after)
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn one_goal_for_each_and_only_where_it_is_configured(view in view(), rules in rules()) {
        let plan = decide(&view, &rules, NOW);
        let mut seen = BTreeSet::new();
        for change in &plan.changes {
            prop_assert!(seen.insert((&change.model, &change.node)), "twice: {change}");
            let node = view.nodes.get(&change.node);
            let is_there = node.is_some_and(|node| node.models.contains_key(&change.model));
            match change.write {
                // It may be back.
                Write::Goal(Goal::Warm) if node.is_none() => {}
                Write::Goal(_) => {
                    prop_assert!(is_there, "{change}");
                    prop_assert!(!is_frozen(&view, &change.model, &change.node), "{change}");
                }
                Write::Remove => prop_assert!(!is_there, "{change}"),
            }
        }
    }

    #[test]
    fn hot_copies_fit(view in view(), rules in rules()) {
        let (_, after) = planned(&view, &rules);
        for (name, node) in &after.nodes {
            let Some(record) = &node.record else { continue };
            let hot = hot_on(&after, name);
            // What is not understood cannot be changed.
            if hot.iter().any(|model| is_frozen(&after, model, name)) {
                continue;
            }
            for gpu in 0..record.gpus.len() {
                let taken: u64 = hot.iter().map(|model| views::need(&after, model, name, gpu)).sum();
                prop_assert!(taken <= record.gpus[gpu].budget_bytes, "{name} {gpu}: {taken}");
            }
        }
    }

    #[test]
    fn pinned_models_are_hot_where_anything_can_hold_them(view in view(), rules in rules()) {
        let (plan, after) = planned(&view, &rules);
        for (model, pin) in &after.pins {
            let may = |node: &poorwill_fleet::name::NodeName| pin.nodes.is_empty() || pin.nodes.contains(node);
            let hot = |node: &_| hot_on(&after, node).contains(model);
            let nodes = || after.nodes.keys().filter(|node| may(node));
            let held = nodes().filter(|node| hot(node) && !is_leaving(&after, model, node)).count();
            if held >= usize::try_from(pin.copies).unwrap() {
                continue;
            }
            let lacks = |one: &Shortage| one.model == *model && matches!(one.lack, Lack::Pin { .. });
            let is_said = plan.shortages.iter().any(lacks);
            prop_assert!(is_said, "`{model}`: {:?}", plan.shortages);
            for node in nodes().filter(|node| !hot(node) && is_usable(&after, model, node)) {
                let stays = |other: &_| {
                    after.pins.contains_key(other)
                        || is_frozen(&after, other, node)
                        || after.nodes[node].models[other].as_ref().is_some_and(|record| record.pinned)
                };
                prop_assert!(!fits_beside(&after, model, node, stays), "`{model}` could be on {node}");
            }
        }
    }

    #[test]
    fn a_pin_holds_as_many_hot_copies_as_it_asks_for(view in view(), rules in rules()) {
        let (_, after) = planned(&view, &rules);
        for (model, nodes) in &after.placements {
            let known = nodes.iter().filter(|(node, _)| !is_frozen(&after, model, node));
            let is_there = |node: &_| after.nodes.contains_key(node) && !is_leaving(&after, model, node);
            let hot = |node: &_| is_there(node) && hot_on(&after, node).contains(model);
            let pin = after.pins.get(model);
            let may = |node: &_| pin.is_some_and(|pin| pin.nodes.is_empty() || pin.nodes.contains(node));
            let all_known = nodes.keys().all(|node| !is_frozen(&after, model, node));
            let (mut held, mut could) = (0, 0);
            for (node, placement) in known {
                let is_held = placement.as_ref().is_some_and(Placement::is_held);
                prop_assert!(!is_held || hot(node) && may(node), "`{model}` on {node}");
                (held, could) = (held + u64::from(is_held), could + u64::from(hot(node) && may(node)));
            }
            let wanted = pin.map_or(0, |pin| u64::from(pin.copies)).min(could);
            prop_assert!(held <= wanted && (held == wanted || !all_known), "`{model}`: {held} of {wanted}");
        }
    }

    #[test]
    fn memory_is_not_said_to_lack_where_it_is_free(view in view(), rules in rules()) {
        let (plan, after) = planned(&view, &rules);
        for shortage in plan.shortages.iter().filter(|one| matches!(one.lack, Lack::Memory { .. })) {
            for node in after.nodes.keys().filter(|node| is_usable(&after, &shortage.model, node)) {
                let is_hot = hot_on(&after, node).contains(&shortage.model);
                prop_assert!(is_hot || !fits_beside(&after, &shortage.model, node, |_| true), "{shortage} {node}");
            }
        }
    }

    #[test]
    fn a_plan_leaves_nothing_to_do(view in view(), rules in rules()) {
        let (plan, after) = planned(&view, &rules);
        let again = decide(&after, &rules, NOW);
        prop_assert_eq!(&again.changes, &Vec::new(), "after {:#?}", plan.changes);
    }

    #[test]
    fn the_order_of_entries_makes_no_difference(view in view(), rules in rules(), seed in any::<u64>()) {
        let fleet = "prod".parse().unwrap();
        let mut entries = views::entries(&view, &fleet);
        let read = |entries: &[(String, String)]| {
            View::read(&fleet, entries.iter().map(|(key, json)| (key.as_str(), json.as_bytes())))
        };
        let (first, errors) = read(&entries);
        fastrand::Rng::with_seed(seed).shuffle(&mut entries);
        let (second, others) = read(&entries);
        prop_assert_eq!(errors.len(), others.len());
        prop_assert_eq!(&first, &second);
        prop_assert_eq!(first, view.clone());
        prop_assert_eq!(decide(&view, &rules, NOW), decide(&second, &rules, NOW));
    }

    #[test]
    fn nodes_that_are_gone_keep_nothing_awake_and_are_forgotten(view in view(), rules in rules()) {
        let (_, mut after) = planned(&view, &rules);
        let of_gone = |view: &View| {
            let all = view.placements.values().flatten();
            let gone = all.filter(|(node, _)| !view.nodes.contains_key(*node));
            gone.filter_map(|(_, placement)| placement.clone()).collect::<Vec<_>>()
        };
        prop_assert!(of_gone(&after).iter().all(|placement| placement.goal != Goal::Hot));
        let forgotten = |node| (node, rules.forget_node_ms);
        after.missing_ms = after.missing_nodes().into_iter().map(forgotten).collect();
        let later = Time(NOW.0 + rules.forget_node_ms);
        let plan = decide(&after, &rules, later);
        apply(&mut after, &plan, later);
        prop_assert_eq!(of_gone(&after), Vec::new());
    }

    #[test]
    fn a_steady_fleet_comes_to_rest_and_drains_end_empty(view in view(), rules in rules()) {
        let mut view = view;
        let mut at = NOW;
        let mut last = Plan::default();
        for minute in 0..150 {
            let missing_ms = at.0 - NOW.0;
            view.missing_ms = view.missing_nodes().into_iter().map(|node| (node, missing_ms)).collect();
            last = decide(&view, &rules, at);
            apply(&mut view, &last, at);
            realize(&mut view);
            at = Time(at.0 + 60_000);
            prop_assert!(minute < 120 || last.changes.is_empty(), "minute {minute}: {:#?}", last.changes);
        }
        for (model, nodes) in &view.placements {
            for (node, placement) in nodes {
                let goal = placement.as_ref().map_or(Goal::None, |placement| placement.goal);
                let is_empty = goal == Goal::None || is_frozen(&view, model, node);
                prop_assert!(is_empty || !views::is_draining(&view, node), "`{model}` on {node}: {last:?}");
            }
        }
    }
}

/// Their JSON is valid, too.
#[test]
fn placements_can_be_written() {
    let placement = Placement::new(3, Goal::Hot, NOW.0, "it is pinned");
    let key =
        poorwill_fleet::keys::Key::Placement { model: "a".parse().unwrap(), node: "b".parse().unwrap() };
    let json = write(&key, &placement).unwrap();
    assert!(json.starts_with(r#"{"format":1,"fence":3,"goal":"hot","changed_at_ms":"#), "{json}");
}
