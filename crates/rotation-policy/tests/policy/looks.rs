//! Looks at ready engines, and control calls that fail, step by step.

use poorwill_rotation_policy::{
    EngineState, Event, Input, Look, ModelId, Refusal, Rules, StageName, Task, TaskOutcome,
};

use super::fixture::{Fixture, GIB, memory_of, seconds};

fn fixture(change: impl Fn(&mut Rules)) -> Fixture {
    Fixture::of(&[40 * GIB], |_, rules| {
        rules.can_restart = true;
        change(rules);
    })
}

fn unwell() -> Look {
    Look::Unwell("it answered 503".to_owned())
}

fn look(fixture: &mut Fixture, look: Look) {
    fixture.pass(1000);
    fixture.input(Input::Looked { model: ModelId(0), look });
}

/// Of tasks that change something.
fn moves(fixture: &mut Fixture) -> Vec<Task> {
    let tasks = std::mem::take(&mut fixture.tasks).into_iter().map(|(_, task)| task);
    tasks.filter(|task| !matches!(task, Task::Measure | Task::Confirm | Task::Canary)).collect()
}

fn failures(fixture: &Fixture) -> Vec<(StageName, String)> {
    let failure = |(_, event): &(usize, Event)| match event {
        Event::Failed { stage, reason } => Some((*stage, reason.clone())),
        _ => None,
    };
    fixture.events.iter().filter_map(failure).collect()
}

fn failed_looks(fixture: &Fixture) -> Vec<u32> {
    let failed = |(_, event): &(usize, Event)| match event {
        Event::LookFailed { failed, .. } => Some(*failed),
        _ => None,
    };
    fixture.events.iter().filter_map(failed).collect()
}

#[test]
fn looks_that_fail_in_sequence_end_its_engine_and_it_is_started_for_what_waits() {
    for bad in [Look::Late, Look::Computing, unwell()] {
        let mut fixture = fixture(|_| {});
        fixture.use_once(0);
        moves(&mut fixture);
        look(&mut fixture, bad.clone());
        look(&mut fixture, bad.clone());
        look(&mut fixture, Look::Awake);
        for _ in 0..2 {
            look(&mut fixture, bad.clone());
        }
        assert_eq!((fixture.stage(0), moves(&mut fixture)), ("ready", Vec::new()), "{bad:?}");
        look(&mut fixture, bad.clone());
        assert_eq!((fixture.stage(0), moves(&mut fixture)), ("cold", vec![Task::Stop]), "{bad:?}");
        assert_eq!(failed_looks(&fixture), [1, 2, 1, 2, 3]);
        let [(StageName::Ready, reason)] = &failures(&fixture)[..] else { panic!("{:?}", fixture.events) };
        assert!(reason.starts_with("3 looks in sequence failed: it "), "{reason}");
        let request = fixture.ask(0);
        assert_eq!((moves(&mut fixture), fixture.stage(0)), (vec![Task::Start], "ready"));
        assert_eq!(fixture.admitted.last(), Some(&(request, 0)));
    }
}

#[test]
fn an_engine_that_only_others_start_is_quarantined() {
    let mut fixture = fixture(|rules| (rules.can_restart, rules.running_max) = (false, 1));
    let (running, waiting) = (fixture.ask(0), fixture.ask(0));
    for _ in 0..3 {
        look(&mut fixture, Look::Late);
    }
    assert_eq!((fixture.stage(0), fixture.aborts), ("draining", 1));
    fixture.answer(running);
    assert_eq!(fixture.stage(0), "quarantined");
    assert!(matches!(fixture.refused[&waiting], Refusal::Quarantined { .. }), "{:?}", fixture.refused);
}

#[test]
fn an_engine_that_is_given_up_soon_again_is_quarantined_for_longer_each_time() {
    let mut fixture = fixture(|rules| (rules.pause_min, rules.pause_max) = (seconds(10), seconds(3600)));
    let mut quarantines = Vec::new();
    for pause in [0, 60, 60, 11 * 60, 60] {
        fixture.pass(pause * 1000);
        let request = fixture.ask(0);
        assert_eq!((fixture.stage(0), fixture.admitted.last()), ("ready", Some(&(request, 0))));
        fixture.answer(request);
        fixture.events.clear();
        for _ in 0..3 {
            look(&mut fixture, unwell());
        }
        quarantines.push(fixture.events.iter().find_map(|(_, event)| match event {
            Event::Quarantined { until, .. } => Some(until.since(fixture.now).as_secs()),
            _ => None,
        }));
    }
    let [None, Some(second), Some(third), None, Some(later)] = quarantines[..] else {
        panic!("{quarantines:?}")
    };
    assert!(third > second && later == second, "{quarantines:?}");
}

#[test]
fn what_a_late_engine_runs_is_aborted_at_once_and_what_an_unwell_one_runs_after_seconds() {
    for (bad, aborts_after) in [(Look::Late, 0), (unwell(), 5)] {
        let mut fixture = fixture(|_| {});
        let running = fixture.ask(0);
        moves(&mut fixture);
        for _ in 0..3 {
            look(&mut fixture, bad.clone());
        }
        let aborted = |fixture: &mut Fixture| {
            let mut passed = 0;
            while fixture.aborts == 0 {
                fixture.pass(100);
                passed += 100;
            }
            passed / 1000
        };
        assert_eq!((aborted(&mut fixture), fixture.stage(0)), (aborts_after, "draining"), "{bad:?}");
        // More of them change nothing.
        look(&mut fixture, Look::Late);
        assert_eq!((moves(&mut fixture), failures(&fixture).len()), (Vec::new(), 1));
        fixture.answer(running);
        assert_eq!((fixture.stage(0), moves(&mut fixture)), ("cold", vec![Task::Stop]));
    }
}

#[test]
fn a_request_that_does_not_end_after_its_abort_does_not_keep_its_engine() {
    let mut fixture = fixture(|_| {});
    fixture.ask(0);
    for _ in 0..3 {
        look(&mut fixture, Look::Late);
    }
    fixture.pass(10_100);
    assert!(fixture.tasks.contains(&(0, Task::Stop)), "{:?}", fixture.stage(0));
}

#[test]
fn an_engine_at_work_is_not_stopped_for_being_late() {
    let mut fixture = fixture(|rules| rules.limits.drain = seconds(60));
    let running = fixture.ask(0);
    moves(&mut fixture);
    for _ in 0..500 {
        look(&mut fixture, Look::Flowing);
    }
    // Without a byte of an answer, for so long as a request may drain.
    for _ in 0..59 {
        look(&mut fixture, Look::Computing);
    }
    assert_eq!((fixture.stage(0), failed_looks(&fixture)), ("ready", Vec::new()));
    for _ in 0..3 {
        look(&mut fixture, Look::Computing);
    }
    assert_eq!((fixture.stage(0), failed_looks(&fixture)), ("draining", vec![1, 2, 3]));
    fixture.answer(running);
}

#[test]
fn looks_at_the_same_time_count_once_and_others_not_at_all() {
    let mut fixture = fixture(|rules| rules.look_every = seconds(5));
    fixture.use_once(0);
    for _ in 0..50 {
        fixture.input(Input::Looked { model: ModelId(0), look: unwell() });
        fixture.pass(20);
    }
    assert_eq!((fixture.stage(0), failed_looks(&fixture)), ("ready", vec![1, 2]));
    fixture.input(Input::Looked { model: ModelId(7), look: unwell() });
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.settle();
    for _ in 0..9 {
        look(&mut fixture, unwell());
    }
    assert_eq!((fixture.stage(0), failed_looks(&fixture)), ("asleep", vec![1, 2]));
    // They can be switched off.
    let mut fixture = self::fixture(|rules| rules.looks_max = 0);
    fixture.use_once(0);
    for _ in 0..9 {
        look(&mut fixture, unwell());
    }
    assert_eq!((fixture.stage(0), failed_looks(&fixture)), ("ready", Vec::new()));
}

#[test]
fn looks_at_a_leaving_engine_count_too() {
    let mut fixture = fixture(|_| {});
    let running = fixture.ask(0);
    fixture.input(Input::Sleep(ModelId(0)));
    assert_eq!(fixture.stage(0), "draining");
    moves(&mut fixture);
    for _ in 0..3 {
        look(&mut fixture, Look::Late);
    }
    assert_eq!(fixture.aborts, 1);
    fixture.answer(running);
    assert_eq!((fixture.stage(0), moves(&mut fixture)), ("cold", vec![Task::Stop]));
}

/// The first is up. The second needs more than is said.
fn beside_another() -> Fixture {
    let mut fixture = Fixture::found(&[20 * GIB, 30 * GIB], EngineState::Gone, |model, rules| {
        (rules.can_sleep, rules.can_restart) = (false, true);
        rules.need_bytes = Some([20, 5][model] * GIB);
    });
    fixture.use_once(0);
    fixture
}

fn need_of(fixture: &Fixture, model: usize) -> Option<Vec<u64>> {
    fixture.policy.status(ModelId(model)).unwrap().need_bytes
}

#[test]
fn the_stop_of_a_failed_engine_does_not_wait_for_a_start_beside_it() {
    for (task, runs) in [(Task::Start, false), (Task::Start, true), (Task::Canary, false)] {
        let mut fixture = beside_another();
        let running = fixture.ask(0);
        if !runs {
            fixture.answer(running);
        }
        fixture.late = vec![(1, task)];
        let waiting = fixture.ask(1);
        for _ in 0..3 {
            look(&mut fixture, Look::Late);
        }
        fixture.answer(running);
        assert!(fixture.tasks.contains(&(0, Task::Stop)), "{task:?}: {:?}", fixture.stages());
        assert_eq!((fixture.stage(0), fixture.aborts), ("cold", usize::from(runs)));
        fixture.finish();
        assert_eq!(fixture.admitted.last(), Some(&(waiting, 1)), "{task:?}: {:?}", fixture.stages());
        // 30 GiB less the 20 that the other released, or nothing.
        assert_eq!(need_of(&fixture, 1), Some(vec![5 * GIB]), "{task:?}");
        fixture.answer(waiting);
        fixture.input(Input::Sleep(ModelId(1)));
        fixture.use_once(1);
        assert_eq!(need_of(&fixture, 1), Some(vec![30 * GIB]), "{task:?}");
    }
}

#[test]
fn failed_engines_are_stopped_at_once_and_a_stop_beside_them_teaches_nothing() {
    let mut fixture = Fixture::found(&[10 * GIB; 3], EngineState::Gone, |_, rules| {
        (rules.can_sleep, rules.can_restart, rules.need_bytes) = (false, true, Some(GIB));
    });
    (0..3).for_each(|model| fixture.use_once(model));
    // Another stop that releases as much would count.
    fixture.needs[0] = 40 * GIB;
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.needs[0] = 10 * GIB;
    fixture.use_once(0);
    fixture.needs[0] = 40 * GIB;
    fixture.late = vec![(0, Task::Stop), (1, Task::Stop), (2, Task::Stop)];
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.tasks.clear();
    for model in [1, 2].repeat(3) {
        fixture.pass(1000);
        fixture.input(Input::Looked { model: ModelId(model), look: unwell() });
    }
    assert_eq!(fixture.tasks, [(1, Task::Stop), (2, Task::Stop)], "{:?}", fixture.stages());
    fixture.finish();
    assert_eq!((fixture.stages(), need_of(&fixture, 0)), (vec!["cold"; 3], Some(vec![10 * GIB])));
}

#[test]
fn the_stop_of_a_failed_engine_waits_for_a_sleep_beside_it() {
    let mut fixture = Fixture::of(&[20 * GIB; 2], |_, rules| rules.can_restart = true);
    fixture.use_once(0);
    fixture.use_once(1);
    fixture.late = vec![(1, Task::Sleep)];
    fixture.input(Input::Sleep(ModelId(1)));
    for _ in 0..3 {
        look(&mut fixture, Look::Late);
    }
    assert_eq!(fixture.stages(), ["stopping", "falling asleep"]);
    assert!(!fixture.tasks.contains(&(0, Task::Stop)));
    fixture.finish();
    fixture.settle();
    assert_eq!(fixture.stages(), ["cold", "asleep"]);
    assert_eq!(fixture.policy.status(ModelId(1)).unwrap().held_bytes, Some(vec![20 * GIB]));
}

/// Its second search for memory begins while the other is being stopped.
#[test]
fn what_a_wake_takes_beside_a_stop_is_no_measure_of_sleeps() {
    let mut fixture = Fixture::of(&[10 * GIB, 40 * GIB], |_, rules| rules.can_restart = true);
    let sleep = |fixture: &mut Fixture| {
        fixture.input(Input::Sleep(ModelId(1)));
        fixture.pass(20_000);
    };
    fixture.use_once(1);
    sleep(&mut fixture);
    fixture.use_once(0);
    fixture.late = vec![(1, Task::Wake), (1, Task::Wake), (0, Task::Stop)];
    fixture.instead = vec![(1, Task::Wake, TaskOutcome::Failed("it answered 502".to_owned()))];
    let request = fixture.ask(1);
    for _ in 0..3 {
        look(&mut fixture, Look::Late);
    }
    fixture.finish();
    assert_eq!(fixture.stages(), ["cold", "waking"]);
    fixture.finish();
    assert_eq!(fixture.admitted.last(), Some(&(request, 1)));
    fixture.answer(request);
    sleep(&mut fixture);
    fixture.use_once(1);
    let free = |gib: u64| (1, Task::Measure, memory_of(vec![gib * GIB]));
    // It keeps 8 of 40 GiB.
    fixture.instead = [vec![free(40)], vec![free(72); 1000]].concat();
    sleep(&mut fixture);
    let is_short = |(_, event): &(usize, Event)| matches!(event, Event::Shortfall { .. });
    assert!(fixture.events.iter().any(is_short), "{:?}", fixture.stages());
}

fn failed(task: Task) -> (usize, Task, TaskOutcome) {
    (0, task, TaskOutcome::Failed("it answered 502".to_owned()))
}

fn found(state: EngineState) -> (usize, Task, TaskOutcome) {
    (0, Task::Probe, TaskOutcome::Probed(state))
}

#[test]
fn a_call_that_failed_is_asked_for_and_made_once_more() {
    use EngineState::{Asleep, Awake, Gone};
    use Task::{Probe, Sleep, Start, Stop, Wake};
    let no_answer = || (0, Probe, TaskOutcome::Failed("no answer".to_owned()));
    let sleeps = [
        (vec![failed(Sleep), found(Asleep)], vec![Sleep, Probe], "asleep"),
        (vec![failed(Sleep), found(Awake)], vec![Sleep, Probe, Sleep], "asleep"),
        (vec![failed(Sleep), no_answer(), found(Awake)], vec![Sleep, Probe, Probe, Sleep], "asleep"),
        (
            vec![failed(Sleep), found(Awake), failed(Sleep), found(Asleep)],
            vec![Sleep, Probe, Sleep, Probe],
            "asleep",
        ),
        (
            vec![failed(Sleep), found(Awake), failed(Sleep), found(Awake)],
            vec![Sleep, Probe, Sleep, Probe, Stop],
            "cold",
        ),
        (vec![failed(Sleep), no_answer(), no_answer()], vec![Sleep, Probe, Probe, Stop], "cold"),
        (vec![failed(Sleep), found(Gone)], vec![Sleep, Probe, Stop], "cold"),
    ];
    for (instead, expected, stage) in sleeps {
        let mut fixture = fixture(|_| {});
        fixture.use_once(0);
        moves(&mut fixture);
        // The fixture's engine falls asleep only where the call is answered.
        let is_done = instead.iter().any(|(_, _, outcome)| *outcome == TaskOutcome::Probed(Asleep));
        if is_done {
            let free = |bytes| (0, Task::Measure, memory_of(vec![bytes]));
            fixture.instead.extend([free(40 * GIB), free(80 * GIB), free(80 * GIB)]);
        }
        fixture.instead.extend(instead);
        fixture.input(Input::Sleep(ModelId(0)));
        fixture.settle();
        assert_eq!((moves(&mut fixture), fixture.stage(0)), (expected, stage));
    }
    let wakes = [
        (vec![failed(Wake), found(Asleep)], vec![Wake, Probe, Wake]),
        (
            vec![failed(Wake), found(Asleep), failed(Wake), found(Asleep)],
            vec![Wake, Probe, Wake, Probe, Stop, Start],
        ),
        (vec![failed(Wake), no_answer(), no_answer()], vec![Wake, Probe, Probe, Stop, Start]),
    ];
    for (instead, expected) in wakes {
        let mut fixture = fixture(|_| {});
        fixture.instead = instead;
        let request = fixture.ask(0);
        fixture.settle();
        assert_eq!(moves(&mut fixture), expected);
        assert_eq!(fixture.admitted, [(request, 0)]);
    }
}

#[test]
fn a_wake_that_was_done_goes_on_with_the_check_of_its_answers() {
    let mut fixture = fixture(|_| {});
    fixture.instead = vec![failed(Task::Wake), found(EngineState::Awake)];
    // The fixture's engine wakes only where the call is answered.
    fixture.instead.push((0, Task::Confirm, TaskOutcome::Awake(true)));
    let request = fixture.ask(0);
    assert_eq!((moves(&mut fixture), fixture.stage(0)), (vec![Task::Wake, Task::Probe], "ready"));
    assert_eq!(fixture.admitted, [(request, 0)]);
    let [(StageName::Waking, reason)] = &failures(&fixture)[..] else { panic!("{:?}", fixture.events) };
    assert_eq!(reason, "it answered 502; it was done nevertheless");
}

#[test]
fn a_call_that_took_all_of_its_time_is_not_made_again() {
    let mut fixture = fixture(|rules| rules.limits.sleep = seconds(30));
    fixture.use_once(0);
    moves(&mut fixture);
    fixture.late = vec![(0, Task::Sleep)];
    fixture.instead = vec![found(EngineState::Awake)];
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.pass(29_000);
    assert_eq!((fixture.stage(0), moves(&mut fixture)), ("falling asleep", vec![Task::Sleep]));
    fixture.pass(2000);
    assert_eq!((fixture.stage(0), moves(&mut fixture)), ("cold", vec![Task::Probe, Task::Stop]));
}

#[test]
fn memory_is_measured_before_the_second_wake() {
    let mut fixture = fixture(|_| {});
    fixture.late = vec![(0, Task::Wake)];
    fixture.instead = vec![failed(Task::Wake)];
    fixture.ask(0);
    fixture.tasks.clear();
    fixture.finish();
    let expected = [Task::Probe, Task::Measure, Task::Wake].map(|task| (0, task));
    assert_eq!(fixture.tasks[..3], expected);
    assert_eq!(fixture.stage(0), "ready");
}

#[test]
fn a_wake_that_ended_for_lack_of_memory_does_not_count_for_the_next_one() {
    use Task::{Probe, Wake};
    let mut fixture = fixture(|rules| rules.can_restart = false);
    fixture.instead = vec![failed(Wake)];
    fixture.late = vec![(0, Wake)];
    let request = fixture.ask(0);
    // Another program has the memory by now.
    fixture.instead.extend(vec![(0, Task::Measure, memory_of(vec![GIB])); 1000]);
    fixture.finish();
    fixture.pass(11_000);
    assert!(matches!(fixture.refused[&request], Refusal::NoMemory { .. }), "{:?}", fixture.refused);
    assert_eq!((fixture.stage(0), moves(&mut fixture)), ("asleep", vec![Wake, Probe, Probe]));
    fixture.pass(10_000);
    fixture.instead = vec![failed(Wake)];
    let request = fixture.ask(0);
    assert_eq!((fixture.stage(0), moves(&mut fixture)), ("ready", vec![Wake, Probe, Wake]));
    assert_eq!(fixture.admitted, [(request, 0)]);
}

/// SGLang does not say whether it still sleeps, so its memory did.
#[test]
fn one_that_slept_on_by_its_memory_sleeps_for_later_probes_without_memory() {
    use Task::{Probe, Wake};
    let moving = || found(EngineState::Moving);
    let mut fixture = fixture(|rules| rules.can_restart = false);
    let free = |gib: u64| (0, Task::Measure, memory_of(vec![gib * GIB]));
    fixture.instead = vec![failed(Wake), moving(), free(80), free(80)];
    // Another program has the memory when it is searched again.
    fixture.instead.extend(vec![free(1); 1000]);
    fixture.instead.push(moving());
    let request = fixture.ask(0);
    fixture.pass(11_000);
    assert!(matches!(fixture.refused[&request], Refusal::NoMemory { .. }), "{:?}", fixture.refused);
    assert_eq!((fixture.stage(0), moves(&mut fixture)), ("asleep", vec![Wake, Probe, Probe]));
    fixture.pass(10_000);
    fixture.instead.clear();
    let request = fixture.ask(0);
    assert_eq!((fixture.stage(0), moves(&mut fixture)), ("ready", vec![Wake]));
    assert_eq!(fixture.admitted, [(request, 0)]);
}

/// SGLang does not say whether it slept.
#[test]
fn where_an_engine_does_not_say_what_it_does_its_memory_does() {
    use EngineState::Moving;
    use Task::{Probe, Sleep, Start, Stop, Wake};
    let free = |gib: u64| (0, Task::Measure, memory_of(vec![gib * GIB]));
    // Of 80 GiB it takes 40.
    for (before, now, expected) in [
        (40, 80, vec![Sleep, Probe]),
        (40, 40, vec![Sleep, Probe, Sleep]),
        (40, 45, vec![Sleep, Probe, Stop]),
        (40, 30, vec![Sleep, Probe, Stop]),
    ] {
        let mut fixture = fixture(|_| {});
        fixture.use_once(0);
        moves(&mut fixture);
        fixture.instead = vec![failed(Sleep), found(Moving), free(before), free(now), free(now), free(now)];
        fixture.input(Input::Sleep(ModelId(0)));
        fixture.settle();
        let is_stopped = expected.contains(&Stop);
        assert_eq!(moves(&mut fixture), expected, "{now}");
        assert_eq!(fixture.stage(0) == "cold", is_stopped, "{:?}", failures(&fixture));
        let words = failures(&fixture).remove(0).1;
        assert_eq!(words.contains("neither the engine nor its memory"), is_stopped, "{words}");
    }
    for (before, now, expected) in [
        (80, 40, vec![Wake, Probe]),
        (80, 80, vec![Wake, Probe, Wake]),
        (80, 75, vec![Wake, Probe, Stop, Start]),
    ] {
        let mut fixture = fixture(|_| {});
        fixture.instead = vec![failed(Wake), found(Moving), free(before), free(now)];
        if now == 40 {
            fixture.instead.push((0, Task::Confirm, TaskOutcome::Awake(true)));
        }
        let request = fixture.ask(0);
        fixture.settle();
        assert_eq!((moves(&mut fixture), &*fixture.admitted), (expected, &[(request, 0)][..]), "{now}");
    }
}

/// Its memory is measured once the stop is over, which frees 20 GiB, and may free more.
#[test]
fn where_a_stop_ran_beside_a_wake_its_memory_says_whether_it_was_done() {
    use Task::{Confirm, Measure, Probe, Stop, Wake};
    let free = |gib: u64| (0, Measure, memory_of(vec![gib * GIB]));
    let cases = [20, 25].into_iter().flat_map(|configured| {
        [(false, false), (false, true), (true, false), (true, true)]
            .map(|(over, done)| (configured, over, done))
    });
    for (configured, is_over, is_done) in cases {
        let mut fixture = Fixture::of(&[40 * GIB, 20 * GIB], |model, rules| {
            (rules.can_restart, rules.need_bytes) = (true, Some([40, configured][model] * GIB));
        });
        fixture.use_once(1);
        fixture.tasks.clear();
        fixture.late = vec![(0, Wake)];
        if !is_over {
            fixture.late.push((1, Stop));
        }
        let now = if is_done { 40 } else { 80 };
        fixture.instead = vec![free(60), failed(Wake), found(EngineState::Moving), free(now)];
        if is_done {
            fixture.instead.push((0, Confirm, TaskOutcome::Awake(true)));
        }
        let request = fixture.ask(0);
        for _ in 0..3 {
            fixture.pass(1000);
            fixture.input(Input::Looked { model: ModelId(1), look: unwell() });
        }
        assert!(fixture.tasks.contains(&(1, Stop)), "{:?}", fixture.tasks);
        fixture.finish();
        let case = format!("{configured}, {is_over}, {is_done}: {:?}", failures(&fixture));
        assert_eq!(fixture.stages(), ["ready", "cold"], "{case}");
        assert_eq!(fixture.admitted.last(), Some(&(request, 0)), "{case}");
        fixture.tasks.retain(|(model, _)| *model == 0);
        let expected = if is_done { vec![Wake, Probe] } else { vec![Wake, Probe, Wake] };
        assert_eq!(moves(&mut fixture), expected, "{case}");
    }
}

#[test]
fn a_stop_waits_for_the_measurement_that_says_whether_a_wake_was_done() {
    use Task::{Measure, Probe, Stop, Wake};
    let mut fixture = Fixture::of(&[40 * GIB, 20 * GIB], |_, rules| rules.can_restart = true);
    fixture.use_once(1);
    fixture.late = vec![(0, Wake)];
    let request = fixture.ask(0);
    fixture.late = vec![(0, Measure)];
    fixture.instead = vec![failed(Wake), found(EngineState::Moving)];
    fixture.tasks.clear();
    fixture.finish();
    for _ in 0..3 {
        fixture.pass(1000);
        fixture.input(Input::Looked { model: ModelId(1), look: unwell() });
    }
    assert_eq!(fixture.stages(), ["waking", "stopping"]);
    assert_eq!(fixture.tasks, [(0, Probe), (0, Measure)]);
    fixture.finish();
    assert_eq!(fixture.stages(), ["ready", "cold"], "{:?}", failures(&fixture));
    assert_eq!(fixture.admitted.last(), Some(&(request, 0)));
    fixture.tasks.retain(|task| *task != (1, Stop));
    assert_eq!(moves(&mut fixture), [Probe, Wake]);
}

#[test]
fn no_sleep_begins_before_memory_said_whether_a_wake_was_done() {
    use Task::{Measure, Probe, Stop, Wake};
    let mut fixture = Fixture::of(&[10 * GIB, 40 * GIB, 20 * GIB], |_, rules| rules.can_restart = true);
    fixture.use_once(0);
    fixture.use_once(2);
    fixture.late = vec![(1, Wake), (2, Stop)];
    let request = fixture.ask(1);
    for _ in 0..3 {
        fixture.pass(1000);
        fixture.input(Input::Looked { model: ModelId(2), look: unwell() });
    }
    fixture.input(Input::Sleep(ModelId(0)));
    assert_eq!(fixture.stages(), ["draining", "waking", "stopping"]);
    fixture.instead = vec![
        (1, Wake, TaskOutcome::Failed("it answered 502".to_owned())),
        (1, Probe, TaskOutcome::Probed(EngineState::Moving)),
    ];
    fixture.tasks.clear();
    fixture.finish();
    fixture.settle();
    assert_eq!(fixture.tasks[..2], [(1, Probe), (1, Measure)]);
    assert_eq!(fixture.stages(), ["asleep", "ready", "cold"], "{:?}", failures(&fixture));
    assert!(fixture.admitted.contains(&(request, 1)));
}

/// SGLang does not say later, either.
#[test]
fn one_that_slept_by_its_memory_sleeps_for_later_probes() {
    let mut fixture = Fixture::of(&[40 * GIB; 2], |_, rules| rules.can_restart = false);
    fixture.use_once(0);
    let free = |model: usize, gib: u64| (model, Task::Measure, memory_of(vec![gib * GIB]));
    let moving = || found(EngineState::Moving);
    fixture.instead = vec![failed(Task::Sleep), moving(), free(0, 40), free(0, 80), free(0, 80), free(0, 80)];
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.settle();
    assert_eq!(fixture.stage(0), "asleep");
    // Another program has the memory, so all that should hold none are asked.
    fixture.instead = (0..1000).map(|_| free(1, 10)).chain([moving()]).collect();
    fixture.tasks.clear();
    fixture.ask(1);
    fixture.pass(15_000);
    assert!(fixture.tasks.contains(&(0, Task::Probe)), "it was not asked");
    assert_eq!(fixture.stage(0), "asleep", "{:?}", failures(&fixture));
}

#[test]
fn a_sleep_that_comes_before_it_is_up_is_done_behind_unless_requests_wait() {
    for asks in [false, true] {
        let mut fixture = fixture(|_| {});
        fixture.late = vec![(0, Task::Wake)];
        fixture.input(Input::Wake(ModelId(0)));
        fixture.input(Input::Sleep(ModelId(0)));
        if asks {
            fixture.ask(0);
        }
        fixture.finish();
        fixture.settle();
        assert_eq!(fixture.stage(0), if asks { "ready" } else { "asleep" });
    }
}
