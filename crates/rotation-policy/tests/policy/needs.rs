//! What models are known to need: engines that grow, models that are too large, and those that come back.

use std::time::Duration;

use poorwill_rotation_policy::{EngineState, Event, Gpu, Input, ModelId, Refusal, Rules, Task};
use poorwill_testkit::effort::{Effort, seed_of_this_run};

use super::fixture::{CARD, Fixture, GIB, memory_of, seconds};

fn need_of(fixture: &Fixture, model: usize) -> u64 {
    fixture.policy.status(ModelId(model)).unwrap().need_bytes.unwrap()[0]
}

/// What a look finds of one that is awake.
fn look(fixture: &mut Fixture, model: usize) {
    let bytes = vec![fixture.needs[model]];
    fixture.input(Input::Holds { model: ModelId(model), bytes });
}

fn grew(fixture: &Fixture) -> Vec<(usize, u64, u64)> {
    let of_one = |(model, event): &(usize, Event)| match event {
        Event::Grew { before_bytes, need_bytes } => {
            Some((*model, before_bytes[0] / GIB, need_bytes[0] / GIB))
        }
        _ => None,
    };
    fixture.events.iter().filter_map(of_one).collect()
}

/// Engines that are stopped and started, and wait cold.
fn started(needs: &[u64], change: impl Fn(usize, &mut Rules)) -> Fixture {
    Fixture::found(needs, EngineState::Gone, |model, rules| {
        (rules.can_sleep, rules.can_restart) = (false, true);
        change(model, rules);
    })
}

#[test]
fn two_that_grow_beyond_their_card_alternate() {
    let mut fixture = started(&[20 * GIB; 2], |_, rules| rules.need_bytes = Some(25 * GIB));
    fixture.use_once(0);
    fixture.use_once(1);
    assert_eq!(fixture.stages(), ["ready", "ready"]);
    for model in [0, 1] {
        // What was configured is more than what its start took.
        assert_eq!(need_of(&fixture, model), 25 * GIB);
        fixture.needs[model] = 50 * GIB;
        look(&mut fixture, model);
    }
    assert_eq!(grew(&fixture), [(0, 25, 50), (1, 25, 50)]);
    assert_eq!(fixture.stages().iter().filter(|stage| **stage == "ready").count(), 1);
    // Nothing moves by itself.
    fixture.tasks.clear();
    fixture.pass(60_000);
    assert_eq!(fixture.tasks, []);
    for model in [0, 1, 0, 1] {
        // Its engine is small again behind its start.
        fixture.needs = vec![20 * GIB; 2];
        fixture.use_once(model);
        assert_eq!(fixture.stage(model), "ready");
        assert_eq!(fixture.stage(1 - model), "cold");
        assert_eq!(need_of(&fixture, model), 50 * GIB);
    }
}

#[test]
fn two_stops_teach_what_a_start_did_not_show() {
    let mut fixture = started(&[20 * GIB], |_, rules| rules.need_bytes = None);
    for (grown, known) in [(60, 20), (50, 50), (20, 50), (70, 50)] {
        fixture.needs[0] = 20 * GIB;
        fixture.use_once(0);
        fixture.needs[0] = grown * GIB;
        fixture.input(Input::Sleep(ModelId(0)));
        assert_eq!((fixture.stage(0), need_of(&fixture, 0)), ("cold", known * GIB), "{grown}");
    }
    assert_eq!(grew(&fixture), [(0, 20, 50)]);
}

#[test]
fn another_program_that_ends_beside_a_departure_is_no_part_of_a_need() {
    // In sequence, and where looks see what the engine holds.
    for (can_sleep, times, is_seen) in
        [(false, 1, false), (true, 1, false), (false, 3, true), (true, 3, true)]
    {
        let mut fixture = Fixture::of(&[20 * GIB], |_, rules| {
            (rules.can_sleep, rules.can_restart) = (can_sleep, true);
        });
        for nth in 0..6 {
            fixture.use_once(0);
            if is_seen {
                look(&mut fixture, 0);
            }
            if nth < times {
                let free = |gib: u64| (0, Task::Measure, memory_of(vec![gib * GIB]));
                fixture.instead = vec![free(20), free(80)];
            }
            fixture.input(Input::Sleep(ModelId(0)));
            fixture.pass(20_000);
            let rests = if can_sleep { "asleep" } else { "cold" };
            let case = format!("{can_sleep}, {is_seen}, departure {nth}");
            assert_eq!((fixture.stage(0), need_of(&fixture, 0)), (rests, 20 * GIB), "{case}");
            let is_short = |(_, event): &(usize, Event)| matches!(event, Event::Shortfall { .. });
            assert!(!fixture.events.iter().any(is_short), "{case}: {:?}", fixture.events);
        }
    }
}

#[test]
fn a_stop_beside_a_death_teaches_nothing() {
    let mut fixture = started(&[20 * GIB, 30 * GIB], |_, rules| rules.need_bytes = None);
    fixture.use_once(0);
    fixture.use_once(1);
    fixture.late = vec![(0, Task::Stop)];
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.input(Input::Lost(ModelId(1)));
    fixture.instead = vec![(0, Task::Measure, memory_of(vec![CARD]))];
    fixture.finish();
    assert_eq!(need_of(&fixture, 0), 20 * GIB);
}

#[test]
fn what_a_wake_takes_is_known_once_a_sleep_was_measured() {
    let mut fixture = Fixture::of(&[20 * GIB; 2], |_, rules| rules.need_bytes = Some(25 * GIB));
    let need = |fixture: &Fixture, task| fixture.policy.measured_need(ModelId(0), task);
    fixture.use_once(0);
    assert_eq!(need(&fixture, Task::Wake), None, "what an operator says may be too little");
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.pass(1000);
    assert_eq!(need(&fixture, Task::Wake), Some(vec![25 * GIB]));
    assert_eq!(need(&fixture, Task::Start), None);
}

#[test]
fn only_an_operator_makes_a_need_smaller() {
    let mut fixture = started(&[20 * GIB], |_, rules| rules.need_bytes = Some(30 * GIB));
    fixture.use_once(0);
    fixture.input(Input::Holds { model: ModelId(0), bytes: vec![70 * GIB] });
    fixture.input(Input::Holds { model: ModelId(0), bytes: vec![10 * GIB] });
    assert_eq!(need_of(&fixture, 0), 70 * GIB);
    let mut rules = Rules::on(vec![Gpu(0)]);
    rules.need_bytes = Some(30 * GIB);
    fixture.policy.set_rules(ModelId(0), &rules);
    assert_eq!(need_of(&fixture, 0), 70 * GIB);
    rules.need_bytes = Some(40 * GIB);
    fixture.policy.set_rules(ModelId(0), &rules);
    assert_eq!(need_of(&fixture, 0), 40 * GIB);
}

#[test]
fn a_need_that_no_card_has_is_refused_with_both_sizes() {
    let mut fixture = started(&[20 * GIB, 40 * GIB, 10 * GIB], |_, _| {});
    fixture.use_once(0);
    fixture.input(Input::Holds { model: ModelId(1), bytes: vec![90 * GIB] });
    fixture.tasks.clear();
    for _ in 0..2 {
        let request = fixture.ask(1);
        let Some(Refusal::TooLarge { need_bytes, total_bytes, .. }) = fixture.refused.get(&request) else {
            panic!("{:?}", fixture.refused)
        };
        assert_eq!((*need_bytes, *total_bytes), (90 * GIB, CARD));
    }
    assert_eq!(fixture.stages(), ["ready", "cold", "cold"], "nothing leaves for it");
    assert!(fixture.tasks.iter().all(|(model, _)| *model == 1), "no other is asked: {:?}", fixture.tasks);
    let says = |(_, event): &(usize, Event)| matches!(event, Event::Failed { reason, .. } if reason.contains("92160 MiB") && reason.contains("81920 MiB"));
    assert!(fixture.events.iter().any(says), "{:?}", fixture.events);
}

#[test]
fn memory_that_is_promised_is_not_given_away() {
    // The first one may grow to what its operator says, so the other does not fit beside it.
    let mut fixture = started(&[20 * GIB, 30 * GIB], |model, rules| {
        rules.need_bytes = Some([60, 30][model] * GIB);
    });
    fixture.use_once(0);
    fixture.use_once(1);
    assert_eq!(fixture.stages(), ["cold", "ready"]);
}

#[test]
fn pinned_models_stay_though_they_grow() {
    let mut fixture = Fixture::of(&[30 * GIB; 3], |model, rules| rules.is_pinned = model < 2);
    fixture.use_once(0);
    fixture.use_once(1);
    fixture.needs[0] = 60 * GIB;
    look(&mut fixture, 0);
    fixture.pass(60_000);
    assert_eq!(fixture.stages(), ["ready", "ready", "asleep"]);
}

#[test]
fn a_busy_one_that_has_to_leave_ends_its_requests() {
    let mut fixture = Fixture::of(&[30 * GIB; 2], |_, _| {});
    let running = [fixture.ask(0), fixture.ask(1)];
    fixture.needs[0] = 60 * GIB;
    look(&mut fixture, 0);
    let draining = fixture.stages().iter().position(|stage| *stage == "draining").unwrap();
    assert_eq!(fixture.aborts, 0);
    fixture.answer(running[draining]);
    fixture.settle();
    assert_eq!(fixture.stage(draining), "asleep");
    assert_eq!(fixture.stage(1 - draining), "ready");
}

/// A default model that comes up with the service, and a large one for which it leaves.
fn default_and_large(change: impl Fn(usize, &mut Rules)) -> Fixture {
    let mut fixture = Fixture::of(&[20 * GIB, 70 * GIB, 70 * GIB], |model, rules| {
        rules.preload = model == 0;
        rules.idle_max = (model > 0).then_some(seconds(3));
        change(model, rules);
    });
    fixture.pass(100);
    assert_eq!(fixture.stage(0), "ready");
    let request = fixture.ask(1);
    fixture.settle();
    assert_eq!(fixture.stages(), ["asleep", "ready", "asleep"]);
    fixture.answer(request);
    fixture
}

#[test]
fn a_default_model_comes_back_after_idleness() {
    let mut fixture = default_and_large(|_, _| {});
    fixture.pass(10_000);
    assert_eq!(fixture.stages(), ["ready", "asleep", "asleep"]);
    // Also behind a second one, and not between the two.
    let first = fixture.ask(1);
    fixture.settle();
    fixture.ask(2);
    fixture.tasks.clear();
    fixture.answer(first);
    fixture.pass(1000);
    assert!(!fixture.tasks.contains(&(0, Task::Wake)), "{:?}", fixture.tasks);
    assert_eq!(fixture.stages(), ["asleep", "asleep", "ready"]);
}

#[test]
fn a_default_model_without_memory_tries_once_to_come_back() {
    let mut fixture = default_and_large(|_, _| {});
    // Another program has it.
    fixture.instead = (0..10).map(|_| (0, Task::Measure, memory_of(vec![10 * GIB]))).collect();
    fixture.tasks.clear();
    fixture.pass(60_000);
    assert_eq!(fixture.tasks.iter().filter(|task| **task == (0, Task::Measure)).count(), 1);
    assert_eq!(fixture.stages(), ["asleep", "asleep", "asleep"]);
    // And for each time that it left.
    fixture.instead.clear();
    fixture.use_once(0);
    fixture.use_once(1);
    fixture.pass(10_000);
    assert_eq!(fixture.stages(), ["ready", "asleep", "asleep"]);
}

#[test]
fn a_default_model_that_was_put_to_sleep_stays_there() {
    let mut fixture = default_and_large(|_, _| {});
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.pass(10_000);
    assert_eq!(fixture.stages(), ["asleep", "asleep", "asleep"]);
    // So does one that left because it was idle itself.
    let mut fixture = default_and_large(|_, rules| rules.idle_max = Some(seconds(3)));
    fixture.pass(5000);
    assert_eq!(fixture.stage(0), "ready");
    fixture.tasks.clear();
    fixture.pass(60_000);
    assert_eq!(fixture.stages(), ["asleep", "asleep", "asleep"]);
    assert!(!fixture.tasks.contains(&(0, Task::Wake)), "{:?}", fixture.tasks);
}

#[test]
fn engines_that_grow_never_stay_beside_one_another_for_longer_than_a_look() {
    let seeds = match seed_of_this_run() {
        Some(seed) => seed..seed + 1,
        None => 0..Effort::of_this_run().cases(60).into(),
    };
    for seed in seeds {
        grow(seed);
    }
}

/// How an engine's memory changes: at once, with its first request, or a little with each.
#[derive(Debug, Clone, Copy)]
enum Growth {
    Later,
    AtRequest,
    Gradually,
}

fn grow(seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let models = rng.usize(2..6);
    let small: Vec<u64> = (0..models).map(|_| rng.u64(5..30) * GIB).collect();
    let large: Vec<u64> = small.iter().map(|small| small + rng.u64(0..45) * GIB).collect();
    let growth: Vec<Growth> =
        (0..models).map(|_| [Growth::Later, Growth::AtRequest, Growth::Gradually][rng.usize(..3)]).collect();
    let configured: Vec<Option<u64>> =
        small.iter().map(|small| rng.bool().then_some(small + rng.u64(0..10) * GIB)).collect();
    let sleeps: Vec<bool> = (0..models).map(|_| rng.bool()).collect();
    let mut fixture = Fixture::found(&small, EngineState::Gone, |model, rules| {
        (rules.can_sleep, rules.can_restart) = (sleeps[model], true);
        (rules.need_bytes, rules.preload) = (configured[model], model == 0);
        rules.wait_max = Duration::from_secs(3600);
    });
    let mut asked: Vec<(u64, usize)> = Vec::new();
    let mut known = vec![0; models];
    for second in 0..400 {
        let model = rng.usize(..models);
        asked.push((fixture.ask(model), model));
        let is_ready: Vec<bool> = (0..models).map(|model| fixture.stage(model) == "ready").collect();
        for model in 0..models {
            let is_asked = asked.iter().any(|(_, of)| *of == model);
            fixture.needs[model] = match growth[model] {
                _ if !is_ready[model] && fixture.stage(model) != "draining" => small[model],
                Growth::AtRequest if is_asked => large[model],
                Growth::Gradually => large[model].min(fixture.needs[model] + GIB),
                Growth::Later if second % 7 == 0 => large[model],
                _ => fixture.needs[model],
            };
        }
        // Those that are not awake begin small again; what is awake is looked at.
        (0..models).filter(|model| is_ready[*model]).for_each(|model| look(&mut fixture, model));
        let awake: u64 = (0..models)
            .filter(|model| fixture.stage(*model) == "ready")
            .map(|model| fixture.needs[model])
            .sum();
        assert!(awake <= CARD, "seed {seed}, {second} s: {:?} of {:?}", fixture.stages(), fixture.needs);
        fixture.pass(rng.u64(0..1000));
        if rng.bool() && !asked.is_empty() {
            let (request, _) = asked.swap_remove(rng.usize(..asked.len()));
            fixture.answer(request);
        }
        for (model, known) in known.iter_mut().enumerate() {
            let need = fixture.policy.status(ModelId(model)).unwrap().need_bytes.map_or(0, |bytes| bytes[0]);
            assert!(need >= *known, "seed {seed}: the need of {model} fell from {known} to {need}");
            *known = need;
        }
    }
    for (request, _) in asked.drain(..) {
        fixture.answer(request);
    }
    fixture.pass(60_000);
    for (model, small) in small.iter().enumerate() {
        fixture.needs[model] = *small;
        let request = fixture.ask(model);
        fixture.pass(60_000);
        assert_eq!(fixture.admitted.last(), Some(&(request, model)), "seed {seed}: {:?}", fixture.stages());
        fixture.answer(request);
    }
}
