//! Small fleets, each for one choice.

use std::collections::{BTreeMap, BTreeSet};

use poorwill_fleet::name::NodeName;
use poorwill_fleet::policy::{NodeView, Plan, Rules, Time, View, Why, Write, decide};
use poorwill_fleet::records::{
    Goal, GpuRecord, ModelRecord, NodeRecord, Pin, Placement, Rate, Requests, Stage,
};

use super::views::{NOW, apply, realize};

const GIB: u64 = 1 << 30;

/// Nodes of one GPU with 80 GiB, in two racks.
fn fleet(nodes: usize) -> View {
    let mut view = View::default();
    for at in 0..nodes {
        let gpu = GpuRecord { total_bytes: 80 * GIB, budget_bytes: 80 * GIB };
        let record = NodeRecord {
            gpus: vec![gpu],
            domain: format!("rack-{}", at % 2),
            host_free_bytes: 500 * GIB,
            ..NodeRecord::new("a")
        };
        let node = NodeView { record: Some(record), ..NodeView::default() };
        view.nodes.insert(format!("n{at}").parse().unwrap(), node);
    }
    view
}

fn with(mut view: View, model: &str, nodes: &[&str], need_gib: u64, per_second: f64, stage: Stage) -> View {
    let rate: Rate = serde_json::from_value(per_second.into()).unwrap();
    for (at, node) in nodes.iter().enumerate() {
        let rate = if at == 0 { rate } else { Rate::default() };
        let need_bytes = Some(vec![need_gib * GIB]);
        let record = ModelRecord { need_bytes, rate, ..ModelRecord::new(stage, vec![0]) };
        let models = &mut view.nodes.get_mut(*node).unwrap().models;
        models.insert(model.parse().unwrap(), Some(record));
    }
    view
}

fn model<'v>(view: &'v mut View, model: &str, node: &str) -> &'v mut ModelRecord {
    view.nodes.get_mut(node).unwrap().models.get_mut(model).unwrap().as_mut().unwrap()
}

/// Plans, and lets the nodes do so, for some minutes from a start on.
fn run(view: &mut View, minutes: std::ops::Range<u64>) -> Vec<Plan> {
    let one = |minute| {
        let at = Time(NOW.0 + minute * 60_000);
        let plan = decide(view, &Rules::default(), at);
        apply(view, &plan, at);
        realize(view);
        plan
    };
    minutes.map(one).collect()
}

/// Long ago.
fn place(view: &mut View, model: &str, node: &str, goal: Goal) {
    let placement = Placement::new(5, goal, NOW.0 - 9_000_000, "");
    let of_model = view.placements.entry(model.parse().unwrap()).or_default();
    of_model.insert(node.parse().unwrap(), Some(placement));
}

fn goals(view: &View, model: &str, nodes: &[&str]) -> Vec<Goal> {
    nodes.iter().map(|node| view.goal(model, node)).collect()
}

#[test]
fn the_cheapest_wake_becomes_hot() {
    let all = ["n0", "n1", "n2", "n3"];
    for (cheap, dear) in [
        (Stage::Awake, Stage::Asleep),
        (Stage::Asleep, Stage::Hibernating),
        (Stage::Hibernating, Stage::OnDisk),
        (Stage::OnDisk, Stage::Stopped),
    ] {
        let mut view = with(fleet(4), "a", &all, 30, 1.0, dear);
        model(&mut view, "a", "n2").stage = cheap;
        run(&mut view, 0..1);
        assert_eq!(view.goal("a", "n2"), Goal::Hot, "{cheap:?} before {dear:?}");
    }
}

#[test]
fn a_first_hot_copy_pays_for_itself() {
    // 36 wakes of 2 s in an hour: more than a wake takes, and less than a start.
    for (stage, expected) in [(Stage::Asleep, Goal::Hot), (Stage::Stopped, Goal::Warm)] {
        let mut view = with(fleet(1), "a", &["n0"], 30, 0.01, stage);
        let plan = decide(&view, &Rules::default(), NOW);
        apply(&mut view, &plan, NOW);
        assert_eq!(view.goal("a", "n0"), expected);
        let is_said = plan.shortages.iter().any(|one| one.to_string().contains("longer than the wakes"));
        assert_eq!(is_said, expected == Goal::Warm, "{:?}", plan.shortages);
    }
}

#[test]
fn copies_follow_demand_and_stay_for_a_while() {
    let all = ["n0", "n1", "n2", "n3"];
    let mut view = with(fleet(4), "a", &all, 30, 1.0, Stage::Asleep);
    let hot = |view: &View| goals(view, "a", &all).into_iter().filter(|goal| *goal == Goal::Hot).count();
    run(&mut view, 0..3);
    assert_eq!(hot(&view), 1);
    // A copy carries 32 requests, and one that came stays for two minutes.
    let (mut since, mut least) = (BTreeMap::new(), usize::MAX);
    for (minute, running) in (3..27).zip([70, 10].into_iter().cycle()) {
        model(&mut view, "a", "n0").requests = Requests { running, queued: 0 };
        for change in run(&mut view, minute..minute + 1).remove(0).changes {
            if change.write == Write::Goal(Goal::Hot) {
                since.insert(change.node, minute);
            } else if let Some(since) = since.get(&change.node) {
                assert!(minute >= since + 2, "{change} at minute {minute}");
            }
        }
        least = least.min(hot(&view));
        assert!(running == 10 || hot(&view) == 3, "minute {minute}");
    }
    assert_eq!(least, 1);
    run(&mut view, 27..30);
    assert_eq!(hot(&view), 1);
}

#[test]
fn a_hot_copy_leaves_for_one_that_is_worth_more() {
    for (other, leaves) in [(1.0, false), (1.2, true)] {
        let mut view = with(fleet(1), "a", &["n0"], 60, 1.0, Stage::Asleep);
        run(&mut view, 0..1);
        view = with(view, "b", &["n0"], 60, other, Stage::Asleep);
        // Not at once: it stays for its least time.
        let plans = run(&mut view, 1..2);
        assert_eq!(view.goal("a", "n0"), Goal::Hot);
        assert!(plans[0].shortages.iter().any(|one| one.to_string().contains("no GPU has memory")));
        run(&mut view, 2..4);
        let expected = if leaves { [Goal::Warm, Goal::Hot] } else { [Goal::Hot, Goal::Warm] };
        assert_eq!([view.goal("a", "n0"), view.goal("b", "n0")], expected);
    }
}

#[test]
fn placements_are_spread_over_domains() {
    // Two racks: even and odd.
    let mut view = with(fleet(6), "a", &["n0", "n2", "n4", "n5"], 30, 0.0, Stage::Stopped);
    run(&mut view, 0..1);
    assert_eq!(goals(&view, "a", &["n0", "n5"]), [Goal::Warm, Goal::Warm]);
    // Where they are not, one moves, and the old one leaves later.
    let mut view = with(fleet(6), "a", &["n0", "n2", "n5"], 30, 0.0, Stage::Asleep);
    for node in ["n0", "n2"] {
        place(&mut view, "a", node, Goal::Warm);
    }
    run(&mut view, 0..3);
    let warm = goals(&view, "a", &["n0", "n2", "n5"]);
    assert_eq!(warm.iter().filter(|goal| **goal == Goal::Warm).count(), 2, "{warm:?}");
    assert_eq!(warm[2], Goal::Warm);
}

#[test]
fn a_node_that_is_gone_is_replaced_at_once() {
    let all = ["n0", "n1", "n2"];
    let mut view = with(fleet(3), "a", &all, 30, 1.0, Stage::Asleep);
    run(&mut view, 0..2);
    let hot = *all.iter().find(|node| view.goal("a", node) == Goal::Hot).unwrap();
    view.nodes.remove(hot);
    for record in view.nodes.values_mut().flat_map(|node| node.models.values_mut()).flatten() {
        record.rate = Rate::from_micros(1_000_000);
    }
    // For any other reason a hot copy would not pay.
    let rules = Rules { pay_back_ms: 0, ..Rules::default() };
    let plan = decide(&view, &rules, Time(NOW.0 + 120_000));
    let lowered = plan.changes.iter().filter(|change| change.why == Why::NodeGone);
    assert_eq!(lowered.map(|change| change.node.as_str()).collect::<Vec<_>>(), [hot]);
    let raised = plan.changes.iter().filter(|change| change.write == Write::Goal(Goal::Hot));
    assert_eq!(raised.count(), 1, "{:?}", plan.changes);
}

/// It may be back in a moment, and finds its placements.
#[test]
fn a_node_that_is_gone_is_forgotten_after_a_while() {
    let mut view = with(fleet(1), "a", &["n0"], 30, 0.0, Stage::Asleep);
    run(&mut view, 0..2);
    view.nodes.clear();
    let rules = Rules::default();
    let node: NodeName = "n0".parse().unwrap();
    assert_eq!(view.missing_nodes(), BTreeSet::from([node.clone()]));
    for (missing_ms, is_forgotten) in
        [(None, false), (Some(rules.forget_node_ms - 1), false), (Some(rules.forget_node_ms), true)]
    {
        view.missing_ms.extend(missing_ms.map(|ms| (node.clone(), ms)));
        let plan = decide(&view, &rules, NOW);
        let removes = plan.changes.iter().any(|change| change.write == Write::Remove);
        assert_eq!((removes, plan.changes.len()), (is_forgotten, usize::from(is_forgotten)));
    }
    view.nodes.insert(node, NodeView::default());
    assert!(view.missing_nodes().is_empty());
}

#[test]
fn a_drain_waits_until_elsewhere_is_ready() {
    let mut view = with(fleet(2), "a", &["n0", "n1"], 30, 1.0, Stage::Stopped);
    model(&mut view, "a", "n0").stage = Stage::Awake;
    run(&mut view, 0..1);
    assert_eq!(goals(&view, "a", &["n0", "n1"]), [Goal::Hot, Goal::Warm]);
    model(&mut view, "a", "n1").stage = Stage::Stopped;
    view.drains.insert("n0".parse().unwrap());
    let decide_and_apply = |view: &mut View, minute: u64| {
        let at = Time(NOW.0 + minute * 60_000);
        let plan = decide(view, &Rules::default(), at);
        apply(view, &plan, at);
    };
    decide_and_apply(&mut view, 1);
    assert_eq!(goals(&view, "a", &["n0", "n1"]), [Goal::Hot, Goal::Hot]);
    model(&mut view, "a", "n1").stage = Stage::Starting;
    decide_and_apply(&mut view, 2);
    assert_eq!(view.goal("a", "n0"), Goal::Hot);
    model(&mut view, "a", "n1").stage = Stage::Awake;
    decide_and_apply(&mut view, 3);
    assert_eq!(goals(&view, "a", &["n0", "n1"]), [Goal::None, Goal::Hot]);
}

#[test]
fn a_drain_ends_beside_a_node_that_is_not_understood() {
    let mut view = with(fleet(3), "a", &["n0", "n1", "n2"], 30, 0.0, Stage::Awake);
    let newer = view.nodes.get_mut("n1").unwrap();
    newer.record = None;
    newer.models.values_mut().for_each(|record| *record = None);
    for node in ["n1", "n2"] {
        place(&mut view, "a", node, Goal::Hot);
    }
    view.drains.insert("n2".parse().unwrap());
    run(&mut view, 0..3);
    assert_eq!(goals(&view, "a", &["n1", "n2"]), [Goal::Hot, Goal::None]);
}

/// A node learns it from the placement, whose age stays.
#[test]
fn a_pin_holds_the_oldest_copies() {
    let mut view = with(fleet(2), "a", &["n0", "n1"], 30, 20.0, Stage::Awake);
    place(&mut view, "a", "n0", Goal::Hot);
    place(&mut view, "a", "n1", Goal::Hot);
    let newer = view.placements.get_mut("a").unwrap().get_mut("n0").unwrap().as_mut().unwrap();
    newer.changed_at_ms += 1_000;
    let before = newer.changed_at_ms;
    let held = |view: &View| ["n0", "n1"].map(|node| view.placement("a", node).unwrap().is_held());
    view.pins.insert("a".parse().unwrap(), Pin::new(1));
    run(&mut view, 0..2);
    assert_eq!(held(&view), [false, true]);
    view.pins.insert("a".parse().unwrap(), Pin::new(2));
    let plans = run(&mut view, 2..4);
    assert_eq!(
        plans[0].changes.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["`a` on `n0`: hot, since it is pinned"]
    );
    assert_eq!(plans[1].changes, []);
    assert_eq!((held(&view), view.placement("a", "n0").unwrap().changed_at_ms), ([true; 2], before));
    let pin = Pin { nodes: vec!["n0".parse().unwrap()], ..Pin::new(1) };
    view.pins.insert("a".parse().unwrap(), pin);
    run(&mut view, 4..5);
    assert_eq!(held(&view), [true, false]);
    view.pins.clear();
    run(&mut view, 5..6);
    assert_eq!(held(&view), [false; 2]);
}

#[test]
fn a_pin_displaces_what_is_not_pinned() {
    let mut view = with(fleet(1), "a", &["n0"], 60, 30.0, Stage::Asleep);
    view = with(view, "b", &["n0"], 60, 0.0, Stage::Asleep);
    run(&mut view, 0..1);
    assert_eq!(view.goal("a", "n0"), Goal::Hot);
    view.pins.insert("b".parse().unwrap(), Pin::new(1));
    let plans = run(&mut view, 1..5);
    assert_eq!([view.goal("a", "n0"), view.goal("b", "n0")], [Goal::Warm, Goal::Hot]);
    let texts: Vec<String> = plans[0].changes.iter().map(ToString::to_string).collect();
    assert_eq!(
        texts,
        ["`a` on `n0`: warm, since `b` is worth more there", "`b` on `n0`: hot, since it is pinned"]
    );
}

#[test]
fn what_failed_is_replaced_and_then_let_go() {
    let mut view = with(fleet(3), "a", &["n0", "n1", "n2"], 30, 1.0, Stage::Asleep);
    run(&mut view, 0..2);
    let hot = ["n0", "n1", "n2"].into_iter().find(|node| view.goal("a", node) == Goal::Hot).unwrap();
    model(&mut view, "a", hot).stage = Stage::Failed;
    run(&mut view, 2..5);
    assert_eq!(view.goal("a", hot), Goal::None);
    let left = goals(&view, "a", &["n0", "n1", "n2"]);
    assert!(left.contains(&Goal::Hot) && left.contains(&Goal::Warm), "{left:?}");
}
