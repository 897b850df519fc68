//! Turns that end in the middle of answers: requests that an engine keeps in its sleep.

use std::time::Duration;

use poorwill_rotation_policy::{EngineState, Event, Input, ModelId, Rules, Task, TaskOutcome};

use super::fixture::{Fixture, GIB, memory_of, seconds};

/// What a wake and a sleep take: nine swaps are a little more than the longest slice.
const TAKES: u64 = 120;
/// A swap, and a moment.
const SWAP: u64 = 2 * TAKES + 60;

/// Models each of which fills the GPU, with slices of at most two seconds. Each was awake once, the last one still is.
fn sliced(models: usize, change: impl Fn(usize, &mut Rules)) -> Fixture {
    let mut fixture = Fixture::of(&vec![70 * GIB; models], |model, rules| {
        (rules.slice_max, rules.can_restart) = (Some(seconds(2)), true);
        change(model, rules);
    });
    fixture.swap_takes = Duration::from_millis(TAKES);
    for model in (0..models).chain(0..models) {
        let request = fixture.ask(model);
        fixture.pass(SWAP);
        fixture.answer(request);
    }
    clear(&mut fixture);
    fixture
}

fn clear(fixture: &mut Fixture) {
    fixture.tasks.clear();
    fixture.admitted.clear();
    fixture.events.clear();
    fixture.kept.clear();
    fixture.tested.clear();
}

/// A request of the first model that runs.
fn running(fixture: &mut Fixture) -> u64 {
    let request = fixture.ask(0);
    fixture.pass(SWAP);
    assert_eq!(fixture.stage(0), "ready");
    clear(fixture);
    request
}

/// The same, and one of the second, until the slice of the first is over and the second should be up.
fn cut(fixture: &mut Fixture) -> [u64; 2] {
    let first = running(fixture);
    [first, wait_for_cut(fixture)]
}

fn wait_for_cut(fixture: &mut Fixture) -> u64 {
    let second = fixture.ask(1);
    fixture.pass(2_000 + SWAP);
    second
}

fn of_first(fixture: &Fixture) -> Vec<Task> {
    let tasks = fixture.tasks.iter().filter(|(model, task)| *model == 0 && *task != Task::Measure);
    tasks.map(|(_, task)| *task).collect()
}

/// Sentences on failures of the first model.
fn sentences(fixture: &Fixture) -> Vec<&str> {
    let of_first = fixture.events.iter().filter(|(model, _)| *model == 0);
    of_first
        .filter_map(|(_, event)| match event {
            Event::Failed { reason, .. } => Some(reason.as_str()),
            _ => None,
        })
        .collect()
}

/// Running requests of the first model, and those of them that it keeps.
fn running_and_kept(fixture: &Fixture) -> (usize, usize) {
    let status = fixture.policy.status(ModelId(0)).unwrap();
    (status.running, status.kept)
}

/// Kept, released or given up as wrong, and aborted.
fn ends(fixture: &Fixture) -> (usize, Vec<bool>, usize) {
    let tested = fixture.tested.iter().filter(|(model, _)| *model == 0);
    let kept = fixture.kept.iter().filter(|model| **model == 0);
    (kept.count(), tested.map(|(_, is_right)| *is_right).collect(), fixture.aborts)
}

fn failed(task: Task) -> (usize, Task, TaskOutcome) {
    (0, task, TaskOutcome::Failed("it answered 502".to_owned()))
}

fn cannot() -> (usize, Task, TaskOutcome) {
    (0, Task::SleepKeeping, TaskOutcome::Unsupported("it has a connector".to_owned()))
}

#[test]
fn a_running_request_is_kept_and_goes_on() {
    for (beside, canary) in [(false, Task::Canary), (true, Task::CanaryBeside)] {
        let mut fixture = sliced(2, |_, _| {});
        fixture.policy.set_canary_beside(ModelId(0), beside);
        let [_, second] = cut(&mut fixture);
        assert_eq!((fixture.stages(), running_and_kept(&fixture)), (vec!["asleep", "ready"], (1, 1)));
        assert_eq!((of_first(&fixture), ends(&fixture)), (vec![Task::SleepKeeping], (1, vec![], 0)));
        assert!(fixture.events.contains(&(0, Event::Kept { requests: 1 })), "{:?}", fixture.events);
        fixture.answer(second);
        fixture.pass(SWAP);
        assert_eq!((fixture.stages(), running_and_kept(&fixture)), (vec!["ready", "asleep"], (1, 0)));
        assert_eq!(of_first(&fixture), [Task::SleepKeeping, Task::Wake, Task::Confirm, canary]);
        assert_eq!((ends(&fixture), fixture.admitted.as_slice()), ((1, vec![true], 0), &[(second, 1)][..]));
    }
}

#[test]
fn what_is_answered_waits_for_the_canary_beside() {
    let mut fixture = sliced(2, |_, _| {});
    fixture.policy.set_canary_beside(ModelId(0), true);
    let [_, second] = cut(&mut fixture);
    fixture.late = vec![(0, Task::CanaryBeside)];
    fixture.answer(second);
    fixture.pass(SWAP);
    assert_eq!((fixture.stage(0), ends(&fixture)), ("ready", (1, vec![], 0)));
    // Its slice ends, and the trial before it.
    fixture.ask(1);
    fixture.pass(3_000);
    assert_eq!((fixture.stage(0), ends(&fixture)), ("ready", (1, vec![], 0)));
    fixture.finish();
    fixture.pass(SWAP);
    assert_eq!((fixture.stage(0), ends(&fixture)), ("asleep", (2, vec![true], 0)));
}

#[test]
fn an_idle_model_and_one_without_a_slice_leave_as_before() {
    let mut fixture = sliced(2, |_, _| {});
    let first = running(&mut fixture);
    fixture.answer(first);
    fixture.ask(1);
    fixture.pass(SWAP);
    assert_eq!((fixture.stages(), of_first(&fixture)), (vec!["asleep", "ready"], vec![Task::Sleep]));
    assert_eq!(ends(&fixture), (0, vec![], 0));
    let mut fixture = sliced(2, |_, rules| rules.slice_max = None);
    let [first, _] = cut(&mut fixture);
    fixture.pass(9_000);
    assert_eq!((fixture.stage(0), of_first(&fixture)), ("draining", vec![]));
    fixture.answer(first);
    fixture.pass(SWAP);
    assert_eq!((of_first(&fixture), ends(&fixture)), (vec![Task::Sleep], (0, vec![], 0)));
}

#[test]
fn an_engine_that_cannot_keep_requests_is_not_cut_again() {
    let mut fixture = sliced(2, |_, _| {});
    fixture.instead = vec![cannot()];
    let [first, second] = cut(&mut fixture);
    assert_eq!((fixture.stage(0), running_and_kept(&fixture)), ("draining", (1, 0)));
    assert_eq!((ends(&fixture), sentences(&fixture).len()), ((1, vec![true], 0), 1));
    assert!(sentences(&fixture)[0].ends_with("it has a connector"), "{:?}", sentences(&fixture));
    fixture.answer(first);
    fixture.pass(SWAP);
    assert_eq!(fixture.stages(), ["asleep", "ready"]);
    fixture.answer(second);
    let [first, second] = cut(&mut fixture);
    fixture.pass(10_000);
    assert_eq!((fixture.stage(0), of_first(&fixture)), ("draining", vec![]));
    assert_eq!(ends(&fixture), (0, vec![], 0));
    fixture.answer(first);
    fixture.pass(SWAP);
    fixture.answer(second);
    // Another engine may, and other rules.
    let mut rules = Rules { need_bytes: Some(70 * GIB), can_restart: true, ..Rules::on(vec![]) };
    (rules.slice_max, rules.grace) = (Some(seconds(2)), Duration::ZERO);
    for change in [true, false] {
        if change {
            fixture.policy.set_rules(ModelId(0), &rules);
        } else {
            fixture.input(Input::Restart(ModelId(0)));
        }
        fixture.pass(SWAP);
        fixture.instead = vec![cannot()];
        let [first, second] = cut(&mut fixture);
        assert_eq!((of_first(&fixture), ends(&fixture)), (vec![Task::SleepKeeping], (1, vec![true], 0)));
        fixture.answer(first);
        fixture.pass(SWAP);
        fixture.answer(second);
    }
}

#[test]
fn a_sleep_that_failed_has_its_requests_end_this_time() {
    let mut fixture = sliced(2, |_, _| {});
    fixture.instead =
        vec![failed(Task::SleepKeeping), (0, Task::Probe, TaskOutcome::Probed(EngineState::Awake))];
    let [first, second] = cut(&mut fixture);
    assert_eq!((fixture.stage(0), running_and_kept(&fixture)), ("draining", (1, 0)));
    assert_eq!((ends(&fixture), sentences(&fixture).len()), ((1, vec![true], 0), 1));
    fixture.answer(first);
    fixture.pass(SWAP);
    fixture.answer(second);
    cut(&mut fixture);
    assert_eq!((of_first(&fixture), ends(&fixture)), (vec![Task::SleepKeeping], (1, vec![], 0)));
}

#[test]
fn a_sleep_that_failed_and_was_done_goes_on() {
    let mut fixture = sliced(2, |_, _| {});
    fixture.policy.set_canary_beside(ModelId(0), true);
    fixture.late = vec![(0, Task::SleepKeeping)];
    let [_, second] = cut(&mut fixture);
    assert_eq!(fixture.stage(0), "falling asleep");
    fixture.awake[0] = false;
    fixture.instead = vec![failed(Task::SleepKeeping)];
    fixture.finish();
    fixture.pass(SWAP);
    assert_eq!((fixture.stages(), running_and_kept(&fixture)), (vec!["asleep", "ready"], (1, 1)));
    fixture.answer(second);
    fixture.pass(SWAP);
    assert_eq!(of_first(&fixture)[1..], [Task::Probe, Task::Wake, Task::Confirm, Task::CanaryBeside]);
    assert_eq!((fixture.stage(0), ends(&fixture)), ("ready", (1, vec![true], 0)));
}

#[test]
fn a_model_is_not_woken_for_requests_that_left() {
    let mut fixture = sliced(2, |_, _| {});
    let other = fixture.ask(0);
    let [first, second] = cut(&mut fixture);
    fixture.answer(first);
    assert_eq!(running_and_kept(&fixture), (1, 1));
    fixture.answer(other);
    fixture.answer(second);
    fixture.pass(10_000);
    assert_eq!((fixture.stages(), of_first(&fixture)), (vec!["asleep", "ready"], vec![Task::SleepKeeping]));
    // What was held back is over before others are admitted.
    fixture.ask(0);
    fixture.pass(SWAP);
    assert_eq!(ends(&fixture), (1, vec![true], 0));
}

#[test]
fn kept_requests_wait_for_so_long_only() {
    let mut fixture = sliced(2, |model, rules| {
        rules.wait_max = seconds(5);
        rules.slice_max = rules.slice_max.filter(|_| model == 0);
    });
    let [first, _] = cut(&mut fixture);
    fixture.pass(4_000);
    assert_eq!(ends(&fixture), (1, vec![], 0));
    fixture.pass(1_000);
    assert_eq!((ends(&fixture), running_and_kept(&fixture)), ((1, vec![], 1), (1, 0)));
    assert!(sentences(&fixture)[0].contains("raise `wait_max`"), "{:?}", sentences(&fixture));
    fixture.answer(first);
    fixture.pass(20_000);
    assert_eq!((fixture.stages(), ends(&fixture)), (vec!["asleep", "ready"], (1, vec![], 1)));
}

#[test]
fn kept_requests_wait_for_so_long_only_where_the_engine_cannot_be_asked() {
    let mut fixture = sliced(2, |_, rules| (rules.can_restart, rules.wait_max) = (false, seconds(30)));
    let later = || TaskOutcome::Later("its helper is busy".to_owned());
    running(&mut fixture);
    // Another program has the memory, so whatever sleeps may.
    let measures = (0..1_000).map(|_| (1, Task::Measure, memory_of(vec![GIB])));
    fixture.instead = measures.chain((0..1_000).map(|_| (0, Task::Probe, later()))).collect();
    wait_for_cut(&mut fixture);
    fixture.pass(12_000);
    assert_eq!((fixture.stage(0), ends(&fixture)), ("probing", (1, vec![], 0)));
    fixture.pass(20_000);
    assert_eq!((fixture.stage(0), ends(&fixture)), ("probing", (1, vec![], 1)));
}

/// Of two models, the request that is cut, and the one for which it is: those of the beginning are before them.
const FIRST: u64 = 4;
const SECOND: u64 = 5;

/// Tasks of a cut, in their order.
const OF_A_CUT: [Task; 5] = [Task::SleepKeeping, Task::Wake, Task::Confirm, Task::Canary, Task::CanaryBeside];

/// In this task of a cut, or before its first wake.
fn in_task(task: Option<Task>, change: impl Fn(usize, &mut Rules)) -> Fixture {
    let mut fixture = sliced(2, change);
    fixture.policy.set_canary_beside(ModelId(0), task == Some(Task::CanaryBeside));
    running(&mut fixture);
    fixture.late = task.map(|task| (0, task)).into_iter().collect();
    let second = wait_for_cut(&mut fixture);
    if task.is_some_and(|task| task != Task::SleepKeeping) {
        fixture.answer(second);
        fixture.pass(SWAP);
    }
    assert_eq!((ends(&fixture), fixture.late.len()), ((1, vec![], 0), 0), "{task:?}");
    fixture
}

/// All that was held back is released or given up, and the model can be had.
fn comes_again(fixture: &mut Fixture, of: &str) {
    let (kept, tested, aborts) = ends(fixture);
    assert_eq!((kept, tested.len() + aborts), (1, 1), "{of}: {tested:?} {aborts}");
    for (request, _) in fixture.admitted.clone() {
        fixture.answer(request);
    }
    fixture.answer(FIRST);
    fixture.finish();
    let request = fixture.ask(0);
    fixture.pass(120_000);
    assert!(fixture.admitted.contains(&(request, 0)), "{of}: {:?}", fixture.stages());
    assert_eq!(fixture.aborts, aborts, "{of}");
}

#[test]
fn an_engine_that_is_lost_in_a_cut_ends_its_requests_once() {
    for task in OF_A_CUT.map(Some).into_iter().chain([None]) {
        let mut fixture = in_task(task, |_, _| {});
        fixture.input(Input::Lost(ModelId(0)));
        let tested = if task == Some(Task::CanaryBeside) { vec![false] } else { vec![] };
        assert_eq!(ends(&fixture), (1, tested.clone(), 1 - tested.len()), "{task:?}");
        comes_again(&mut fixture, &format!("{task:?}"));
    }
}

#[test]
fn a_restart_in_a_cut_ends_its_requests_once_or_is_refused() {
    for task in OF_A_CUT.map(Some).into_iter().chain([None]) {
        let mut fixture = in_task(task, |_, rules| rules.limits.drain = seconds(5));
        fixture.input(Input::Restart(ModelId(0)));
        let aborts = usize::from(task.is_none());
        assert_eq!(ends(&fixture), (1, vec![], aborts), "{task:?}");
        fixture.finish();
        fixture.pass(SWAP);
        if task == Some(Task::SleepKeeping) {
            assert_eq!(running_and_kept(&fixture), (1, 1));
            fixture.pass(3_000);
        }
        comes_again(&mut fixture, &format!("{task:?}"));
    }
}

#[test]
fn a_shutdown_in_a_cut_ends_requests_that_cannot_go_on() {
    for task in OF_A_CUT.map(Some).into_iter().chain([None]) {
        let mut fixture = in_task(task, |_, _| {});
        fixture.input(Input::Shutdown);
        let runs = task == Some(Task::CanaryBeside);
        assert_eq!(ends(&fixture), (1, vec![], usize::from(!runs)), "{task:?}");
        fixture.finish();
        fixture.pass(200_000);
        let tested = if runs { vec![true] } else { vec![] };
        assert_eq!(ends(&fixture), (1, tested, usize::from(!runs)), "{task:?}");
    }
}

#[test]
fn an_engine_that_does_not_end_a_task_of_a_cut_ends_its_requests_once() {
    for task in OF_A_CUT {
        let mut fixture = in_task(Some(task), |_, _| {});
        // Each try of it.
        fixture.late = vec![(0, task); 3];
        fixture.state = EngineState::Gone;
        fixture.pass(200_000);
        let (kept, tested, aborts) = ends(&fixture);
        let beside = task == Task::CanaryBeside;
        assert_eq!((kept, tested, aborts), (1, if beside { vec![false] } else { vec![] }, 1), "{task:?}");
        fixture.late.clear();
        fixture.answer(FIRST);
        let request = fixture.ask(0);
        fixture.pass(700_000);
        assert!(fixture.admitted.contains(&(request, 0)), "{task:?}: {:?}", fixture.stages());
    }
}

#[test]
fn a_quarantine_and_lack_of_memory_end_kept_requests_once() {
    let fixed = |_: usize, rules: &mut Rules| rules.can_restart = false;
    let mut fixture = in_task(None, fixed);
    fixture.instead =
        (0..2).map(|_| (0, Task::Canary, TaskOutcome::Canary(Err("asdf".to_owned())))).collect();
    fixture.answer(SECOND);
    fixture.pass(SWAP);
    assert_eq!((fixture.stage(0), ends(&fixture)), ("quarantined", (1, vec![], 1)));
    // Another program has the memory.
    for can_restart in [false, true] {
        let mut fixture = in_task(None, |_, rules| rules.can_restart = can_restart);
        fixture.instead = (0..2_000).map(|_| (0, Task::Measure, memory_of(vec![GIB]))).collect();
        fixture.answer(SECOND);
        fixture.pass(9_000);
        assert_eq!(ends(&fixture), (1, vec![], 0));
        // What else sleeps is stopped before.
        fixture.pass(if can_restart { 12_000 } else { 2_000 });
        assert_eq!(ends(&fixture), (1, vec![], 1), "{can_restart}: {:?}", fixture.stages());
    }
}

#[test]
fn an_engine_that_keeps_requests_does_not_hibernate() {
    let mut fixture = sliced(2, |_, rules| (rules.can_hibernate, rules.hibernate_after) = (true, None));
    let rules = Rules {
        need_bytes: Some(70 * GIB),
        hibernate_after: Some(Duration::ZERO),
        can_hibernate: true,
        slice_max: Some(seconds(2)),
        ..Rules::on(vec![])
    };
    let [first, _] = cut(&mut fixture);
    fixture.policy.set_rules(ModelId(0), &rules);
    fixture.input(Input::Hibernate(ModelId(0)));
    fixture.pass(1_000);
    assert_eq!(fixture.stages(), ["asleep", "ready"]);
    fixture.answer(first);
    fixture.pass(SWAP);
    assert_eq!(fixture.stages(), ["going into hibernation", "ready"]);
}

#[test]
fn an_engine_that_keeps_requests_is_not_stopped_to_free_memory() {
    let mut fixture = sliced(2, |_, _| {});
    running(&mut fixture);
    fixture.instead = (0..3_000).map(|_| (1, Task::Measure, memory_of(vec![GIB]))).collect();
    wait_for_cut(&mut fixture);
    fixture.pass(30_000);
    assert_eq!(of_first(&fixture)[0], Task::SleepKeeping);
    assert!(!of_first(&fixture).contains(&Task::Stop), "{:?}", of_first(&fixture));
    assert_eq!((fixture.stage(0), ends(&fixture)), ("ready", (1, vec![true], 0)));
}

/// For this long, in turns: whose they were, and their milliseconds.
fn turns(fixture: &mut Fixture, millis: u64) -> Vec<(usize, u64)> {
    const STEP: u64 = 10;
    let mut turns: Vec<(usize, u64)> = Vec::new();
    let mut before = None;
    for _ in 0..millis / STEP {
        fixture.pass(STEP);
        let ready = (0..fixture.needs.len()).find(|model| fixture.stage(*model) == "ready");
        match (ready, turns.last_mut()) {
            (Some(model), Some((_, took))) if before == Some(model) => *took += STEP,
            (Some(model), _) => turns.push((model, STEP)),
            (None, _) => {}
        }
        before = ready;
    }
    // The first and the last one may be parts.
    turns.pop();
    turns.drain(..turns.len().min(1));
    turns
}

/// Permanent requests of models whose swaps take this long.
fn shared(models: usize, takes: u64, change: impl Fn(usize, &mut Rules)) -> Vec<(usize, u64)> {
    let mut fixture = sliced(models, change);
    fixture.swap_takes = Duration::from_millis(takes);
    for model in 0..models {
        fixture.ask(model);
        fixture.ask(model);
    }
    // What they cost is known well after some.
    fixture.pass(40_000);
    let turns = turns(&mut fixture, 30_000);
    assert_eq!(ends(&fixture).2, 0);
    turns
}

#[test]
fn permanent_requests_take_turns_by_the_cost_of_swaps() {
    // Nine swaps, the longest slice, and three swaps.
    for (takes, slice) in [(50, 900), (120, 2_000), (500, 3_000)] {
        let turns = shared(2, takes, |_, _| {});
        assert!(turns.len() >= 6, "{takes} ms: {turns:?}");
        assert!(turns.windows(2).all(|pair| pair[0].0 != pair[1].0), "{takes} ms: {turns:?}");
        let is_right = |(_, took): &(usize, u64)| took.abs_diff(slice) <= 20;
        assert!(turns.iter().all(is_right), "{takes} ms: {turns:?}");
    }
    let turns = shared(3, TAKES, |_, _| {});
    assert!(
        turns.windows(3).all(|three| (0..3).all(|one| three.iter().any(|(of, _)| *of == one))),
        "{turns:?}"
    );
}

#[test]
fn a_higher_priority_cuts_in_and_a_lower_one_gets_on() {
    let turns = shared(2, TAKES, |model, rules| rules.priority = if model == 1 { 5 } else { 0 });
    let of = |model: usize| turns.iter().filter(move |(of, _)| *of == model).map(|(_, took)| *took);
    // The least turn is three swaps.
    assert!(of(0).all(|took| (700..=760).contains(&took)), "{turns:?}");
    assert!(of(1).all(|took| took.abs_diff(2_000) <= 20), "{turns:?}");
    assert!(of(0).count() >= 4, "{turns:?}");
}

#[test]
fn a_restart_in_the_moment_of_a_cut_leaves_requests_their_time() {
    let mut fixture = sliced(2, |_, _| {});
    fixture.policy.set_canary_beside(ModelId(0), true);
    fixture.late = vec![(0, Task::CanaryBeside)];
    let [first, _] = cut(&mut fixture);
    assert_eq!((fixture.stage(0), ends(&fixture)), ("ready", (0, vec![], 0)));
    fixture.input(Input::Restart(ModelId(0)));
    fixture.finish();
    fixture.pass(50_000);
    assert_eq!((fixture.stage(0), ends(&fixture)), ("draining", (0, vec![true], 0)));
    fixture.answer(first);
    assert_eq!(of_first(&fixture), [Task::Stop]);
}

#[test]
fn a_slice_of_nothing_lasts_for_a_swap() {
    let turns =
        shared(2, TAKES, |_, rules| (rules.slice_max, rules.turn_per_swap) = (Some(Duration::ZERO), 0));
    assert!(turns.iter().all(|(_, took)| took.abs_diff(2 * TAKES) <= 20), "{turns:?}");
    // Also where swaps take no time.
    let mut fixture = sliced(2, |_, rules| rules.slice_max = Some(Duration::ZERO));
    fixture.swap_takes = Duration::ZERO;
    for model in [0, 1] {
        fixture.ask(model);
    }
    fixture.pass(4_000);
    assert!(ends(&fixture).0 > 100, "{:?}", ends(&fixture));
}

#[test]
fn kept_requests_wait_with_their_own_priority() {
    for (priority, next) in [(0, 0), (-10, 2)] {
        let mut fixture = sliced(3, |_, _| {});
        fixture.ask_by(0, priority);
        fixture.pass(SWAP);
        let second = wait_for_cut(&mut fixture);
        fixture.ask(2);
        fixture.answer(second);
        // It may stay for more, since several wait.
        fixture.pass(SWAP + 1_000);
        assert_eq!(fixture.stage(next), "ready", "{priority}: {:?}", fixture.stages());
    }
}

#[test]
fn what_gets_no_answer_is_aborted_in_its_turns() {
    let mut fixture = sliced(2, |_, rules| rules.limits.drain = seconds(5));
    let [first, _] = cut(&mut fixture);
    // Both have requests that never end, and those of the second get on.
    for _ in 0..40 {
        let now = fixture.now;
        fixture.policy.flowed(ModelId(1), now);
        fixture.pass(500);
        if fixture.aborts > 0 {
            break;
        }
    }
    let cuts = fixture.kept.iter().filter(|model| **model == 0).count();
    // 2 s in each turn.
    assert_eq!((fixture.aborts, cuts, fixture.stage(0)), (1, 2, "draining"));
    fixture.answer(first);
    fixture.pass(SWAP);
    assert_eq!(of_first(&fixture).last(), Some(&Task::Sleep));
}

#[test]
fn an_idle_time_is_no_stall() {
    let mut fixture = sliced(2, |_, rules| rules.limits.drain = seconds(5));
    // The second is awake, idle for long, and is cut with what came a moment ago.
    fixture.pass(60_000);
    fixture.ask(1);
    fixture.ask(0);
    fixture.pass(SWAP);
    assert_eq!((fixture.stages(), fixture.kept.as_slice()), (vec!["ready", "asleep"], &[1][..]));
    // It also left when it was idle for long, before a turn in which nothing came.
    let mut fixture = sliced(2, |_, rules| rules.limits.drain = seconds(5));
    fixture.pass(60_000);
    let first = fixture.ask(0);
    fixture.pass(SWAP);
    fixture.ask(1);
    fixture.answer(first);
    fixture.pass(SWAP);
    fixture.ask(0);
    fixture.pass(2_000 + SWAP);
    assert_eq!((fixture.kept.as_slice(), fixture.aborts), (&[1][..], 0));
}

#[test]
fn no_turn_is_cut_where_the_canary_could_not_be_judged_beside_it() {
    let mut fixture = sliced(2, |_, _| {});
    fixture.policy.set_keeps(ModelId(0), false);
    let [first, _] = cut(&mut fixture);
    fixture.pass(9_000);
    assert_eq!((fixture.stage(0), ends(&fixture)), ("draining", (0, vec![], 0)));
    fixture.policy.set_keeps(ModelId(0), true);
    fixture.answer(first);
}

#[test]
fn the_next_canary_finds_a_place_beside_those_that_are_kept() {
    let mut fixture = sliced(2, |_, rules| rules.running_max = 3);
    running(&mut fixture);
    for _ in 0..3 {
        fixture.ask(0);
    }
    fixture.pass(SWAP);
    let status = fixture.policy.status(ModelId(0)).unwrap();
    assert_eq!((status.running, status.queued), (2, 2));
}
