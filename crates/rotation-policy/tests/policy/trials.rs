//! Canaries beside the first requests of a model that woke.

use poorwill_rotation_policy::{EngineState, Input, ModelId, Task, TaskOutcome};

use super::fixture::Fixture;

const GIB: u64 = 1 << 30;
const WRONG: &str = "asdf";

/// A model that slept once, and another in whose favour it left.
fn asleep() -> Fixture {
    let mut fixture = Fixture::of(&[70 * GIB, 70 * GIB], |_, rules| rules.can_restart = true);
    for model in [0, 1] {
        fixture.policy.set_canary_beside(ModelId(model), true);
    }
    for model in [0, 1] {
        let request = fixture.ask(model);
        fixture.settle();
        fixture.answer(request);
    }
    assert_eq!(fixture.stages(), ["asleep", "ready"]);
    fixture.tasks.clear();
    fixture.admitted.clear();
    fixture.tested.clear();
    fixture
}

/// A request of the first model, once the other has left.
fn ask(fixture: &mut Fixture) -> u64 {
    let request = fixture.ask(0);
    fixture.settle();
    request
}

fn wrong() -> (usize, Task, TaskOutcome) {
    (0, Task::CanaryBeside, TaskOutcome::Canary(Err(WRONG.to_owned())))
}

fn of_first(fixture: &Fixture) -> Vec<Task> {
    let tasks = fixture.tasks.iter().filter(|(model, task)| *model == 0 && *task != Task::Measure);
    tasks.map(|(_, task)| *task).collect()
}

#[test]
fn a_request_goes_on_before_its_canary_is_answered() {
    let mut fixture = asleep();
    fixture.late = vec![(0, Task::CanaryBeside)];
    let request = ask(&mut fixture);
    assert_eq!(of_first(&fixture), [Task::Wake, Task::Confirm, Task::CanaryBeside]);
    assert_eq!((fixture.admitted.as_slice(), fixture.stage(0)), (&[(request, 0)][..], "ready"));
    assert_eq!(fixture.tested, []);
    fixture.finish();
    assert_eq!((fixture.tested.as_slice(), fixture.aborts), (&[(0, true)][..], 0));
}

#[test]
fn a_start_and_what_is_doubtful_have_their_canary_before() {
    let mut fixture = asleep();
    // Its first call fails, and was done.
    fixture.instead = vec![
        (0, Task::Wake, TaskOutcome::Failed("it answered 502".to_owned())),
        (0, Task::Probe, TaskOutcome::Probed(EngineState::Awake)),
        (0, Task::Confirm, TaskOutcome::Awake(true)),
    ];
    ask(&mut fixture);
    let expected = [Task::Wake, Task::Probe, Task::Confirm, Task::Canary];
    assert_eq!(of_first(&fixture), expected);
    fixture.tasks.clear();
    fixture.input(Input::Restart(ModelId(1)));
    fixture.ask(1);
    fixture.settle();
    assert!(fixture.tasks.iter().all(|(_, task)| *task != Task::CanaryBeside), "{:?}", fixture.tasks);
}

#[test]
fn an_answer_that_differs_once_is_asked_for_again() {
    let mut fixture = asleep();
    fixture.instead = vec![wrong()];
    let request = ask(&mut fixture);
    assert_eq!(fixture.admitted, [(request, 0)]);
    assert_eq!((fixture.tested.as_slice(), fixture.aborts), (&[(0, true)][..], 0));
}

#[test]
fn a_wrong_engine_is_stopped_and_its_requests_hear_of_it_before() {
    let mut fixture = asleep();
    fixture.late = vec![(0, Task::CanaryBeside)];
    let first = ask(&mut fixture);
    fixture.instead = vec![wrong(), wrong()];
    fixture.finish();
    assert_eq!(
        (fixture.tested.as_slice(), fixture.aborts, fixture.stage(0)),
        (&[(0, false)][..], 1, "draining")
    );
    // It comes again, and is let through once a start has brought a right engine.
    let second = fixture.ask(0);
    fixture.answer(first);
    assert_eq!(fixture.admitted, [(first, 0), (second, 0)]);
    let expected = [Task::Stop, Task::Start, Task::Confirm, Task::Canary];
    assert_eq!(of_first(&fixture)[4..], expected);
}

#[test]
fn one_whose_starts_are_wrong_as_well_is_quarantined() {
    let mut fixture = asleep();
    let before = || (0, Task::Canary, TaskOutcome::Canary(Err(WRONG.to_owned())));
    fixture.instead = vec![wrong(), wrong(), before(), before()];
    let request = ask(&mut fixture);
    fixture.ask(0);
    fixture.answer(request);
    fixture.settle();
    assert_eq!((fixture.tested.as_slice(), fixture.stage(0)), (&[(0, false)][..], "quarantined"));
}

#[test]
fn a_model_leaves_after_its_trial() {
    let mut fixture = asleep();
    fixture.late = vec![(0, Task::CanaryBeside)];
    let request = ask(&mut fixture);
    fixture.answer(request);
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.pass(1_000);
    assert_eq!(fixture.stage(0), "draining");
    fixture.finish();
    fixture.settle();
    assert_eq!((fixture.tested.as_slice(), fixture.stage(0)), (&[(0, true)][..], "asleep"));
}

#[test]
fn a_trial_without_an_end_is_one_that_failed() {
    let mut fixture = asleep();
    fixture.late = vec![(0, Task::CanaryBeside), (0, Task::CanaryBeside)];
    let request = ask(&mut fixture);
    fixture.pass(59_000);
    assert_eq!(fixture.tested, []);
    fixture.pass(2_000);
    assert_eq!((fixture.tested.as_slice(), fixture.aborts), (&[(0, false)][..], 1));
    fixture.answer(request);
    // The engine is lost in another.
    let mut fixture = asleep();
    fixture.late = vec![(0, Task::CanaryBeside)];
    ask(&mut fixture);
    fixture.input(Input::Lost(ModelId(0)));
    assert_eq!(fixture.tested, [(0, false)]);
}

#[test]
fn one_that_stays_since_its_sleep_was_given_up_is_tested() {
    let mut fixture = asleep();
    fixture.late = vec![(0, Task::Wake)];
    fixture.input(Input::Wake(ModelId(0)));
    fixture.settle();
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.instead =
        (0..600).map(|_| (0, Task::Measure, TaskOutcome::Failed("no answer".to_owned()))).collect();
    fixture.finish();
    fixture.pass(11_000);
    assert_eq!((fixture.stage(0), fixture.tested.as_slice()), ("ready", &[(0, true)][..]));
}

#[test]
fn one_that_others_put_to_sleep_has_its_canary_before() {
    let mut fixture = asleep();
    let request = ask(&mut fixture);
    fixture.answer(request);
    (fixture.state, fixture.awake[0]) = (EngineState::Asleep, false);
    fixture.tasks.clear();
    fixture.input(Input::Slept(ModelId(0)));
    ask(&mut fixture);
    assert_eq!(of_first(&fixture), [Task::Probe, Task::Wake, Task::Confirm, Task::Canary]);
}

#[test]
fn few_run_beside_a_canary() {
    let mut fixture = asleep();
    fixture.late = vec![(0, Task::CanaryBeside)];
    for _ in 0..20 {
        fixture.ask(0);
    }
    fixture.settle();
    assert_eq!(fixture.admitted.len(), 8);
    fixture.finish();
    assert_eq!(fixture.admitted.len(), 20);
}
