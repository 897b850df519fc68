//! Models that a fleet wants awake, beside requests for others.

use poorwill_rotation_policy::{EngineState, Event, Input, ModelId, Refusal, Task};

use super::fixture::{Fixture, GIB, memory_of, seconds};

/// The first one is hot, and awake.
fn hot(needs: &[u64]) -> Fixture {
    let mut fixture = Fixture::of(needs, |model, rules| {
        rules.idle_max = (model == 0).then(|| seconds(1));
        rules.can_restart = true;
    });
    fixture.input(Input::Hot(ModelId(0), true));
    fixture.settle();
    assert_eq!(fixture.stage(0), "ready");
    fixture
}

/// A request that is answered once its model is awake.
fn serve(fixture: &mut Fixture, model: usize) {
    let request = fixture.ask(model);
    fixture.settle();
    assert_eq!(fixture.admitted.last(), Some(&(request, model)));
    fixture.answer(request);
}

fn wakes_of(fixture: &Fixture, model: usize) -> usize {
    fixture.tasks.iter().filter(|task| **task == (model, Task::Wake)).count()
}

#[test]
fn a_hot_model_gives_way_to_a_request_and_comes_back_behind_it() {
    let mut fixture = hot(&[70 * GIB; 2]);
    fixture.pass(60_000);
    assert_eq!(fixture.stage(0), "ready", "it is idle for longer than it may");
    let request = fixture.ask(1);
    fixture.settle();
    assert_eq!(fixture.admitted, [(request, 1)]);
    assert_eq!(fixture.stages(), ["asleep", "ready"]);
    fixture.answer(request);
    fixture.pass(119_000);
    assert_eq!(fixture.stages(), ["asleep", "ready"]);
    fixture.pass(12_000);
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
    assert!(fixture.refused.is_empty());
    let is_bad = |event: &Event| matches!(event, Event::Failed { .. } | Event::Quarantined { .. });
    assert!(!fixture.events.iter().any(|(_, event)| is_bad(event)), "{:?}", fixture.events);
}

#[test]
fn it_comes_back_at_once_where_memory_becomes_free() {
    let mut fixture = hot(&[70 * GIB; 2]);
    serve(&mut fixture, 1);
    assert_eq!(fixture.stages(), ["asleep", "ready"]);
    fixture.input(Input::Sleep(ModelId(1)));
    fixture.settle();
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
    // An order that has ended brings nothing back.
    serve(&mut fixture, 1);
    fixture.input(Input::Hot(ModelId(0), false));
    fixture.input(Input::Sleep(ModelId(1)));
    fixture.pass(300_000);
    assert_eq!(fixture.stages(), ["asleep", "asleep"]);
}

#[test]
fn it_leaves_last_of_idle_models() {
    let mut fixture = hot(&[30 * GIB; 3]);
    fixture.pass(60_000);
    fixture.use_once(1);
    fixture.ask(2);
    fixture.settle();
    assert_eq!(fixture.stages(), ["ready", "asleep", "ready"], "the other one was used a moment ago");
}

/// Those would alternate beside it.
#[test]
fn an_idle_hot_model_leaves_before_busy_ones() {
    let mut fixture = hot(&[30 * GIB; 3]);
    fixture.pass(60_000);
    fixture.ask(1);
    fixture.settle();
    fixture.tasks.clear();
    fixture.ask(2);
    fixture.pass(3_600_000);
    assert_eq!(fixture.stages(), ["asleep", "ready", "ready"]);
    let moves = fixture.tasks.iter().filter(|(_, task)| matches!(task, Task::Sleep | Task::Wake));
    assert_eq!(moves.collect::<Vec<_>>(), [&(0, Task::Sleep), &(2, Task::Wake)]);
}

/// By its operator, or by its fleet.
#[test]
fn a_pin_holds_a_hot_model() {
    for by in [Input::Pin, Input::Hold] {
        let mut fixture = hot(&[70 * GIB; 2]);
        fixture.input(by(ModelId(0), true));
        assert!(fixture.policy.status(ModelId(0)).unwrap().is_pinned);
        let request = fixture.ask(1);
        assert!(matches!(fixture.refused[&request], Refusal::NoMemory { .. }));
        assert_eq!(fixture.stages(), ["ready", "asleep"]);
        fixture.pass(10_000);
        fixture.input(by(ModelId(0), false));
        let request = fixture.ask(1);
        fixture.settle();
        assert_eq!(fixture.admitted, [(request, 1)]);
    }
}

#[test]
fn what_a_fleet_holds_is_apart_from_what_its_operator_pins() {
    let is_pinned = |fixture: &Fixture| fixture.policy.status(ModelId(0)).unwrap().is_pinned;
    let mut fixture = hot(&[70 * GIB; 2]);
    fixture.input(Input::Pin(ModelId(0), true));
    fixture.input(Input::Hold(ModelId(0), true));
    fixture.input(Input::Hold(ModelId(0), false));
    assert!(is_pinned(&fixture));
    fixture.input(Input::Hold(ModelId(0), true));
    fixture.input(Input::Pin(ModelId(0), false));
    assert!(is_pinned(&fixture));
    fixture.input(Input::Hot(ModelId(0), false));
    fixture.input(Input::Hot(ModelId(0), true));
    assert!(!is_pinned(&fixture), "it ends with its order");
    fixture.input(Input::Hot(ModelId(0), false));
    fixture.input(Input::Hold(ModelId(0), true));
    assert!(!is_pinned(&fixture), "it is not hot");
}

/// As a node orders it behind a reload. Only what is held takes memory from models in use.
#[test]
fn a_repeated_order_brings_nothing_back_that_gave_way() {
    let mut fixture = hot(&[70 * GIB; 2]);
    for _ in 0..3 {
        serve(&mut fixture, 1);
        fixture.input(Input::Hot(ModelId(0), true));
        fixture.input(Input::Hold(ModelId(0), false));
        fixture.pass(60_000);
        assert_eq!(fixture.stages(), ["asleep", "ready"]);
    }
    fixture.input(Input::Hot(ModelId(0), true));
    fixture.input(Input::Hold(ModelId(0), true));
    fixture.input(Input::Wake(ModelId(0)));
    fixture.settle();
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
}

#[test]
fn it_comes_back_after_its_engine_slept_or_died() {
    let mut fixture = hot(&[70 * GIB; 2]);
    fixture.pass(60_000);
    fixture.awake[0] = false;
    fixture.input(Input::Slept(ModelId(0)));
    fixture.pass(20_000);
    assert_eq!((fixture.stage(0), wakes_of(&fixture, 0)), ("ready", 2));
    fixture.awake[0] = false;
    fixture.state = EngineState::Gone;
    fixture.input(Input::Lost(ModelId(0)));
    fixture.pass(20_000);
    assert_eq!(fixture.stage(0), "ready");
    assert!(fixture.tasks.contains(&(0, Task::Start)));
}

/// A start takes minutes.
#[test]
fn its_start_makes_way_for_a_request_unless_it_is_held() {
    for is_held in [false, true] {
        let mut fixture =
            Fixture::found(&[70 * GIB; 2], EngineState::Gone, |_, rules| rules.can_restart = true);
        fixture.late = vec![(0, Task::Start)];
        fixture.input(Input::Hot(ModelId(0), true));
        fixture.input(Input::Hold(ModelId(0), is_held));
        fixture.settle();
        assert_eq!(fixture.stages(), ["starting", "cold"]);
        let request = fixture.ask(1);
        fixture.settle();
        let admitted: &[(u64, usize)] = if is_held { &[] } else { &[(request, 1)] };
        assert_eq!(fixture.admitted, admitted);
        assert_eq!(fixture.stage(0), if is_held { "starting" } else { "cold" });
    }
}

/// Others that swap would stop it again and again.
#[test]
fn starts_that_made_way_rest_longer_each_time() {
    let mut fixture = Fixture::found(&[70 * GIB; 2], EngineState::Gone, |_, rules| {
        (rules.can_restart, rules.idle_max) = (true, Some(seconds(1)));
    });
    fixture.late = vec![(0, Task::Start)];
    fixture.input(Input::Hot(ModelId(0), true));
    fixture.settle();
    let starts = |fixture: &Fixture| fixture.tasks.iter().filter(|task| **task == (0, Task::Start)).count();
    for (made_way, rest_ms) in [30_000, 60_000, 120_000].into_iter().enumerate() {
        assert_eq!((fixture.stage(0), starts(&fixture)), ("starting", made_way + 1));
        serve(&mut fixture, 1);
        fixture.late = vec![(0, Task::Start)];
        fixture.pass(rest_ms - 1_000);
        assert_eq!((fixture.stage(0), starts(&fixture)), ("cold", made_way + 1), "{rest_ms}");
        fixture.pass(2_000);
    }
}

/// Requests for others took its memory.
#[test]
fn what_is_held_takes_its_turn_again_after_its_engine_died() {
    for is_held in [false, true] {
        let mut fixture = hot(&[70 * GIB; 2]);
        fixture.input(Input::Hold(ModelId(0), is_held));
        fixture.awake[0] = false;
        fixture.state = EngineState::Gone;
        let request = fixture.ask(1);
        fixture.input(Input::Lost(ModelId(0)));
        fixture.pass(1_000);
        fixture.answer(request);
        // It would never be unused.
        for _ in 0..12 {
            fixture.pass(10_000);
            fixture.ask(1);
        }
        assert_eq!(fixture.stage(0) == "ready", is_held);
    }
}

/// It would have to leave for each request.
#[test]
fn it_does_not_swap_with_requests_for_ever() {
    let mut fixture = hot(&[70 * GIB; 2]);
    for _ in 0..60 {
        serve(&mut fixture, 1);
        fixture.pass(59_900);
    }
    assert_eq!((wakes_of(&fixture, 0), wakes_of(&fixture, 1)), (1, 1));
    fixture.pass(180_000);
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
}

/// Two hot models that do not fit beside each other: neither order displaces the other.
#[test]
fn hot_models_do_not_displace_each_other() {
    let mut fixture = hot(&[70 * GIB; 2]);
    fixture.input(Input::Hot(ModelId(1), true));
    fixture.pass(3_600_000);
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
    assert_eq!(wakes_of(&fixture, 1), 0);
    serve(&mut fixture, 1);
    fixture.pass(3_600_000);
    assert_eq!(fixture.stages(), ["asleep", "ready"]);
    assert_eq!(wakes_of(&fixture, 0), 1);
}

#[test]
fn it_looks_again_for_memory_that_another_program_had() {
    let mut fixture = hot(&[70 * GIB; 2]);
    serve(&mut fixture, 1);
    fixture.instead = vec![(0, Task::Measure, memory_of(vec![GIB]))];
    fixture.input(Input::Sleep(ModelId(1)));
    fixture.pass(9_000);
    assert_eq!(fixture.stages(), ["asleep", "asleep"]);
    fixture.pass(2_000);
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
}

/// They change neither what is reported nor when it hibernates.
#[test]
fn looks_that_find_no_memory_are_not_reported() {
    let mut fixture = Fixture::of(&[70 * GIB; 2], |_, rules| {
        (rules.can_hibernate, rules.can_restart) = (true, true);
        rules.hibernate_after = Some(seconds(25));
    });
    fixture.input(Input::Hot(ModelId(0), true));
    fixture.settle();
    serve(&mut fixture, 1);
    fixture.events.clear();
    fixture.tasks.clear();
    fixture.instead = vec![(0, Task::Measure, memory_of(vec![GIB])); 3];
    fixture.input(Input::Sleep(ModelId(1)));
    fixture.pass(22_000);
    assert!(fixture.instead.is_empty(), "it looked");
    let of_it = fixture.events.iter().filter(|(model, _)| *model == 0);
    assert_eq!(of_it.collect::<Vec<_>>(), Vec::<&(usize, Event)>::new());
    fixture.pass(5_000);
    assert!(fixture.tasks.contains(&(0, Task::Hibernate)), "{:?}", fixture.tasks);
}

/// What an operator puts to sleep sleeps until it is wanted.
#[test]
fn a_command_to_sleep_holds() {
    let mut fixture = hot(&[70 * GIB; 2]);
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.pass(600_000);
    assert_eq!(fixture.stages(), ["asleep", "asleep"]);
    fixture.use_once(0);
    fixture.pass(600_000);
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
}

#[test]
fn a_command_to_sleep_while_it_comes_up_holds() {
    let mut fixture = Fixture::of(&[70 * GIB; 2], |_, _| {});
    fixture.late = vec![(0, Task::Wake)];
    fixture.input(Input::Hot(ModelId(0), true));
    fixture.settle();
    assert_eq!(fixture.stage(0), "waking");
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.finish();
    fixture.pass(600_000);
    assert_eq!(fixture.stages(), ["asleep", "asleep"]);
}
