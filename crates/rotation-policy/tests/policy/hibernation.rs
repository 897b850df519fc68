//! The policy of hibernation step by step. Engines act at once unless a test delays them.

use std::time::Duration;

use poorwill_rotation_policy::{
    EngineState, Event, Input, ModelId, Refusal, Rules, StageName, Task, TaskOutcome,
};

use super::fixture::{Fixture, GIB, seconds};

/// Sleeping engines that hibernate, with a residue of 1 GiB each.
fn fixture(needs: &[u64], change: impl Fn(usize, &mut Rules)) -> Fixture {
    with_residue(GIB, needs, change)
}

fn with_residue(residue: u64, needs: &[u64], change: impl Fn(usize, &mut Rules)) -> Fixture {
    Fixture::with_residue(residue, needs, EngineState::Asleep, |model, rules| {
        (rules.can_hibernate, rules.can_restart) = (true, true);
        change(model, rules);
    })
}

fn after(rules: &mut Rules, wait: Duration) {
    rules.hibernate_after = Some(wait);
}

/// Of tasks that change something.
fn moves(fixture: &mut Fixture) -> Vec<(usize, Task)> {
    let mut tasks = std::mem::take(&mut fixture.tasks);
    tasks.retain(|(_, task)| !matches!(task, Task::Measure | Task::Confirm | Task::Canary));
    tasks
}

fn failures(fixture: &Fixture) -> Vec<(StageName, &str)> {
    let failure = |(_, event): &'_ (usize, Event)| match event {
        Event::Failed { stage, reason } => Some((*stage, reason.clone())),
        _ => None,
    };
    let all = fixture.events.iter().filter_map(failure);
    all.map(|(stage, reason)| (stage, &*reason.leak())).collect()
}

#[test]
fn a_sleeper_hibernates_after_its_time_and_is_resumed_and_measured_before_it_wakes() {
    let mut fixture = fixture(&[40 * GIB], |_, rules| after(rules, seconds(5)));
    // Not behind hibernation.
    fixture.policy.set_canary_beside(ModelId(0), true);
    fixture.pass(4900);
    assert_eq!((fixture.stage(0), &*fixture.tasks), ("asleep", &[][..]));
    fixture.pass(200);
    assert_eq!(fixture.stage(0), "hibernating");
    let residue = Event::Hibernated { residue_bytes: vec![GIB] };
    assert!(fixture.events.contains(&(0, residue)), "{:?}", fixture.events);
    let status = fixture.policy.status(ModelId(0)).unwrap();
    assert_eq!((status.residue_bytes, status.promised_bytes), (Some(vec![GIB]), None));
    fixture.tasks.clear();
    let request = fixture.ask(0);
    let expected =
        [Task::Measure, Task::Resume, Task::Measure, Task::Wake, Task::Confirm, Task::Canary, Task::Measure];
    assert_eq!(fixture.tasks, expected.map(|task| (0, task)));
    assert_eq!(fixture.admitted, [(request, 0)]);
}

#[test]
fn a_request_for_a_model_on_its_way_into_hibernation_waits_and_resumes_it() {
    let mut fixture = fixture(&[40 * GIB], |_, rules| after(rules, seconds(1)));
    fixture.late = vec![(0, Task::Hibernate), (0, Task::Resume)];
    fixture.pass(1100);
    assert_eq!(fixture.stage(0), "going into hibernation");
    let request = fixture.ask(0);
    fixture.pass(1000);
    fixture.finish();
    fixture.pass(100);
    assert_eq!((fixture.stage(0), fixture.admitted.len()), ("resuming", 0));
    fixture.pass(600);
    fixture.finish();
    assert_eq!(fixture.admitted, [(request, 0)]);
    let status = fixture.policy.status(ModelId(0)).unwrap();
    assert!(status.hibernate_duration.unwrap() >= seconds(1), "{status:?}");
    assert!(status.resume_duration.unwrap() >= Duration::from_millis(600), "{status:?}");
    assert!(status.wake_duration.unwrap() < Duration::from_millis(600), "{status:?}");
}

#[test]
fn sleepers_hibernate_before_an_awake_model_leaves_the_longest_idle_first() {
    // Five sleepers and an awake model of 37 GiB leave 38, and 40 are needed.
    let mut fixture = fixture(&[36 * GIB, 40 * GIB, GIB, GIB, GIB, GIB], |_, _| {});
    for model in [4, 3, 2, 5, 0] {
        fixture.use_once(model);
        fixture.settle();
    }
    for model in 2..6 {
        fixture.input(Input::Sleep(ModelId(model)));
        fixture.settle();
    }
    moves(&mut fixture);
    fixture.ask(1);
    fixture.settle();
    let expected = ["ready", "ready", "asleep", "hibernating", "hibernating", "asleep"];
    assert_eq!(fixture.stages(), expected);
    let expected = [(4, Task::Hibernate), (3, Task::Hibernate), (1, Task::Wake)];
    assert_eq!(moves(&mut fixture), expected);
}

#[test]
fn where_hibernation_is_not_enough_a_model_leaves_and_none_hibernates() {
    let mut fixture = fixture(&[36 * GIB, 70 * GIB, GIB], |_, _| {});
    fixture.use_once(0);
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.settle();
    fixture.use_once(0);
    moves(&mut fixture);
    fixture.ask(1);
    fixture.settle();
    assert_eq!(fixture.stages(), ["asleep", "ready", "asleep"]);
    assert!(!moves(&mut fixture).contains(&(2, Task::Hibernate)));
}

#[test]
fn too_much_residue_on_a_gpu_has_the_longest_idle_hibernate() {
    // Until it is measured, each counts with 2 GiB.
    let mut fixture = fixture(&[GIB; 4], |_, rules| rules.residue_max_bytes = Some(4 * GIB));
    fixture.settle();
    assert_eq!(fixture.stages(), ["hibernating", "hibernating", "asleep", "asleep"]);
    fixture.use_once(2);
    fixture.input(Input::Sleep(ModelId(2)));
    fixture.settle();
    assert_eq!(fixture.stages(), ["hibernating", "hibernating", "asleep", "asleep"]);
}

#[test]
fn a_failed_hibernation_leaves_it_asleep_and_is_tried_again_after_growing_pauses() {
    // `pause_min` is 5 s.
    assert_eq!(tries_after(TaskOutcome::Failed), [0, 5, 15, 35]);
}

#[test]
fn one_that_failed_without_its_engines_fault_is_tried_again_after_the_same_pause() {
    assert_eq!(tries_after(TaskOutcome::Later), [0, 5, 10, 15]);
}

#[test]
fn a_model_gets_its_memory_although_no_sleeper_can_hibernate() {
    let mut fixture = fixture(&[40 * GIB, 78 * GIB + GIB / 2], |_, _| {});
    fixture.settle();
    let later = |_| (0, Task::Hibernate, TaskOutcome::Later("the helper ended".to_owned()));
    fixture.instead = (0..50).map(later).collect();
    moves(&mut fixture);
    let request = fixture.ask(1);
    for _ in 0..60 {
        fixture.pass(1000);
    }
    assert_eq!(fixture.admitted, [(request, 1)]);
    let tasks = moves(&mut fixture);
    assert!(tasks.contains(&(0, Task::Hibernate)) && tasks.contains(&(0, Task::Stop)), "{tasks:?}");
}

#[test]
fn one_that_a_helper_did_not_take_off_on_request_is_tried_again() {
    let mut fixture = fixture(&[40 * GIB], |_, _| {});
    fixture.settle();
    fixture.instead = vec![(0, Task::Hibernate, TaskOutcome::Later("the helper ended".to_owned()))];
    fixture.input(Input::Hibernate(ModelId(0)));
    fixture.settle();
    assert_eq!(fixture.stage(0), "asleep");
    fixture.pass(6000);
    assert_eq!(fixture.stage(0), "hibernating");
}

#[test]
fn one_that_needs_more_than_was_measured_gets_its_gpus_alone() {
    let mut fixture = fixture(&[20 * GIB, 20 * GIB], |model, rules| {
        if model == 0 {
            after(rules, seconds(1));
        }
    });
    fixture.pass(1200);
    fixture.use_once(1);
    fixture.settle();
    assert_eq!(fixture.stages(), ["hibernating", "ready"]);
    let more = || (0, Task::Resume, TaskOutcome::NeedsMore("51 GiB".to_owned()));
    fixture.instead = vec![more(), more()];
    let first = fixture.ask(0);
    fixture.pass(100);
    assert!(matches!(fixture.refused[&first], Refusal::NoMemory { .. }), "{:?}", fixture.refused);
    fixture.pass(6000);
    moves(&mut fixture);
    let second = fixture.ask(0);
    fixture.settle();
    assert!(fixture.admitted.contains(&(second, 0)), "{:?}", fixture.stages());
    assert_eq!(moves(&mut fixture)[..2], [(1, Task::Sleep), (0, Task::Resume)]);
}

/// The seconds at which a hibernation is tried whose first three tries have such an outcome.
fn tries_after(outcome: fn(String) -> TaskOutcome) -> Vec<u64> {
    let mut fixture = fixture(&[40 * GIB], |_, rules| after(rules, Duration::ZERO));
    fixture.settle();
    fixture.use_once(0);
    moves(&mut fixture);
    fixture.instead = (0..3).map(|_| (0, Task::Hibernate, outcome("no".to_owned()))).collect();
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.settle();
    let mut tries = Vec::new();
    for second in 0..60 {
        let tried = moves(&mut fixture).iter().filter(|(_, task)| *task == Task::Hibernate).count();
        tries.extend((0..tried).map(|_| second));
        fixture.pass(1000);
    }
    assert_eq!(fixture.stage(0), "hibernating");
    assert_eq!(failures(&fixture), [(StageName::GoingIntoHibernation, "no"); 3]);
    tries
}

#[test]
fn a_failed_hibernation_that_took_place_is_found() {
    let mut fixture = fixture(&[40 * GIB], |_, rules| after(rules, seconds(1)));
    fixture.instead = vec![(0, Task::Hibernate, TaskOutcome::Failed("the helper ended".to_owned()))];
    fixture.instead.push((0, Task::Probe, TaskOutcome::Probed(EngineState::Hibernating)));
    fixture.pass(1100);
    assert_eq!(fixture.stage(0), "hibernating");
}

#[test]
fn one_that_cannot_hibernate_sleeps_on_until_its_next_start() {
    let mut fixture = fixture(&[40 * GIB], |_, rules| after(rules, seconds(1)));
    fixture.instead =
        vec![(0, Task::Hibernate, TaskOutcome::Unsupported("it has a communicator".to_owned()))];
    fixture.pass(900_000);
    assert_eq!((fixture.stage(0), failures(&fixture).len()), ("asleep", 1), "{:?}", fixture.events);
    assert!(!fixture.policy.status(ModelId(0)).unwrap().can_hibernate);
    fixture.input(Input::Hibernate(ModelId(0)));
    assert_eq!(failures(&fixture).len(), 2);
    assert_eq!(moves(&mut fixture), [(0, Task::Hibernate)]);
    fixture.input(Input::Restart(ModelId(0)));
    fixture.use_once(0);
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.pass(1200);
    assert_eq!(fixture.stage(0), "hibernating");
}

#[test]
fn a_residue_that_stays_is_reported_and_its_engine_resumed() {
    let mut fixture = with_residue(0, &[40 * GIB], |_, rules| after(rules, seconds(1)));
    fixture.pass(12_000);
    assert_eq!(moves(&mut fixture), [(0, Task::Hibernate), (0, Task::Resume)]);
    assert!(fixture.events.iter().any(|(_, event)| matches!(event, Event::Shortfall { .. })));
    fixture.pass(900_000);
    assert_eq!((fixture.stage(0), moves(&mut fixture)), ("asleep", Vec::new()));
}

#[test]
fn a_failed_resume_is_repeated_once_and_then_the_engine_is_restarted() {
    let mut fixture = fixture(&[40 * GIB], |_, rules| after(rules, seconds(1)));
    let failed = || (0, Task::Resume, TaskOutcome::Failed("no".to_owned()));
    for (failures, expected) in [
        (1, vec![Task::Hibernate, Task::Resume, Task::Resume, Task::Wake]),
        (2, vec![Task::Hibernate, Task::Resume, Task::Resume, Task::Stop, Task::Start]),
    ] {
        fixture.input(Input::Sleep(ModelId(0)));
        fixture.pass(2000);
        assert_eq!(fixture.stage(0), "hibernating");
        fixture.instead = (0..failures).map(|_| failed()).collect();
        let request = fixture.ask(0);
        fixture.settle();
        assert_eq!(fixture.admitted.last(), Some(&(request, 0)));
        fixture.answer(request);
        let mut moves = moves(&mut fixture);
        moves.retain(|(_, task)| *task != Task::Sleep);
        assert_eq!(moves, expected.iter().map(|task| (0, *task)).collect::<Vec<_>>());
    }
}

#[test]
fn a_command_has_a_ready_model_sleep_and_hibernate() {
    let mut fixture = fixture(&[40 * GIB; 2], |model, rules| rules.can_hibernate = model == 0);
    fixture.use_once(0);
    moves(&mut fixture);
    fixture.input(Input::Hibernate(ModelId(0)));
    fixture.settle();
    assert_eq!(moves(&mut fixture), [(0, Task::Sleep), (0, Task::Hibernate)]);
    assert_eq!(fixture.stage(0), "hibernating");
    // It is none for good.
    fixture.use_once(0);
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.pass(60_000);
    assert_eq!(fixture.stage(0), "asleep");
    fixture.input(Input::Hibernate(ModelId(1)));
    assert!(failures(&fixture)[0].1.contains("cannot hibernate here"), "{:?}", failures(&fixture));
}

#[test]
fn a_hibernation_that_is_checked_again_is_asked_for() {
    let mut fixture = fixture(&[40 * GIB; 2], |_, rules| after(rules, Duration::ZERO));
    fixture.settle();
    moves(&mut fixture);
    fixture.instead = vec![(1, Task::Probe, TaskOutcome::Probed(EngineState::Asleep))];
    fixture.late = vec![(1, Task::Hibernate)];
    (0..2).for_each(|model| fixture.input(Input::Recheck(ModelId(model))));
    assert_eq!(fixture.tasks[..2], [(0, Task::Probe), (1, Task::Probe)]);
    assert_eq!(fixture.stages(), ["hibernating", "going into hibernation"]);
}

#[test]
fn a_dead_hibernating_engine_is_stopped_and_started_for_the_next_request() {
    let mut fixture = fixture(&[40 * GIB], |_, rules| after(rules, Duration::ZERO));
    fixture.settle();
    moves(&mut fixture);
    fixture.input(Input::Lost(ModelId(0)));
    assert_eq!((fixture.stage(0), moves(&mut fixture)), ("cold", vec![(0, Task::Stop)]));
    let request = fixture.ask(0);
    assert_eq!(fixture.admitted, [(request, 0)]);
}

#[test]
fn what_a_resume_takes_is_a_part_of_a_turn() {
    let turn = |hibernate_after: Option<Duration>| {
        let mut fixture = fixture(&[70 * GIB; 2], |_, rules| {
            (rules.hibernate_after, rules.turn_per_swap) = (hibernate_after, 3);
        });
        fixture.settle();
        fixture.late = vec![(0, Task::Resume)];
        let first = fixture.ask(0);
        fixture.pass(1000);
        fixture.finish();
        assert_eq!(fixture.admitted, [(first, 0)]);
        // More wait for the other than it has itself, so its turn is as short as can be.
        for _ in 0..3 {
            fixture.ask(1);
        }
        let mut passed = 0;
        while fixture.stage(0) == "ready" {
            fixture.pass(100);
            passed += 100;
        }
        fixture.answer(first);
        passed
    };
    assert_eq!(turn(None), 0);
    assert!((3000..=3200).contains(&turn(Some(Duration::ZERO))), "{}", turn(Some(Duration::ZERO)));
}

/// The helper cannot be asked. Neither is the engine, since it might hibernate, and it is not stopped.
#[test]
fn an_engine_is_let_be_while_nothing_is_known_of_it() {
    let mut fixture = fixture(&[40 * GIB], |_, rules| after(rules, seconds(1)));
    fixture.pass(1200);
    moves(&mut fixture);
    let later = |task| (0, task, TaskOutcome::Later("no helper".to_owned()));
    fixture.instead = (0..5).map(|_| later(Task::Probe)).collect();
    fixture.input(Input::Recheck(ModelId(0)));
    let request = fixture.ask(0);
    fixture.pass(4000);
    assert_eq!((fixture.stage(0), fixture.admitted.len()), ("probing", 0));
    fixture.pass(100_000);
    assert_eq!(fixture.admitted, [(request, 0)]);
    let moves = moves(&mut fixture);
    assert!(
        moves.iter().all(|(_, task)| [Task::Probe, Task::Resume, Task::Wake].contains(task)),
        "{moves:?}"
    );
    assert!(failures(&fixture).iter().all(|(_, reason)| *reason == "no helper"));
}

#[test]
fn a_resume_that_has_to_wait_refuses_requests_and_stops_no_engine() {
    let mut fixture = fixture(&[40 * GIB], |_, rules| after(rules, seconds(1)));
    fixture.pass(1200);
    moves(&mut fixture);
    let later = || (0, Task::Resume, TaskOutcome::Later("its GPU is full".to_owned()));
    fixture.instead = vec![later(), later()];
    let first = fixture.ask(0);
    fixture.pass(100);
    assert!(matches!(fixture.refused[&first], Refusal::NoMemory { .. }), "{:?}", fixture.refused);
    assert_eq!(fixture.stage(0), "hibernating");
    fixture.pass(6000);
    let second = fixture.ask(0);
    assert_eq!(fixture.admitted, [(second, 0)]);
    assert!(!moves(&mut fixture).contains(&(0, Task::Stop)));
}

#[test]
fn one_that_cannot_hibernate_tries_again_after_a_reload() {
    let kept = std::cell::RefCell::new(None);
    let mut fixture = fixture(&[40 * GIB], |_, rules| {
        after(rules, seconds(1));
        kept.replace(Some(rules.clone()));
    });
    fixture.instead =
        vec![(0, Task::Hibernate, TaskOutcome::Unsupported("the driver is too old".to_owned()))];
    fixture.pass(1200);
    let why = |fixture: &Fixture| fixture.policy.status(ModelId(0)).unwrap().cannot_hibernate;
    assert_eq!((fixture.stage(0), why(&fixture).as_deref()), ("asleep", Some("the driver is too old")));
    fixture.use_once(0);
    fixture.input(Input::Hibernate(ModelId(0)));
    assert!(
        failures(&fixture)[1].1.ends_with("or a reload: the driver is too old"),
        "{:?}",
        failures(&fixture)
    );
    fixture.policy.set_rules(ModelId(0), &kept.take().unwrap());
    fixture.input(Input::Hibernate(ModelId(0)));
    fixture.settle();
    assert_eq!((fixture.stage(0), why(&fixture)), ("hibernating", None));
}
