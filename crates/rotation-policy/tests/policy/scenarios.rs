//! The policy step by step in simple situations. Engines act at once unless a test delays them.

use std::time::Duration;

use poorwill_rotation_policy::{
    EngineState, Event, Gpu, Input, ModelId, Refusal, RequestId, Rules, StageName, Task, TaskOutcome,
};

use super::fixture::{CARD, Fixture, GIB, memory_of, seconds};

#[test]
fn a_model_is_verified_before_it_gets_requests() {
    let mut fixture = Fixture::of(&[40 * GIB], |_, _| {});
    let request = fixture.ask(0);
    let expected =
        [Task::Measure, Task::Wake, Task::Confirm, Task::Canary, Task::Measure].map(|task| (0, task));
    assert_eq!(fixture.tasks, expected);
    assert_eq!(fixture.admitted, [(request, 0)]);
}

#[test]
fn alternating_requests_are_served_in_turns() {
    // Each takes the whole GPU, and every request takes two seconds.
    let mut fixture = Fixture::of(&[70 * GIB; 3], |_, rules| rules.turn_max = seconds(30));
    fixture.late = vec![(0, Task::Wake)];
    let asked: Vec<u64> = (0..9).map(|nth| fixture.ask(nth % 3)).collect();
    fixture.pass(1000);
    fixture.finish();
    let mut done = 0;
    while done < 9 {
        fixture.settle();
        assert!(fixture.admitted.len() > done, "nothing goes on: {:?}", fixture.stages());
        for (request, _) in fixture.admitted.clone().split_off(done) {
            fixture.pass(2000);
            fixture.answer(request);
            done += 1;
        }
    }
    let models: Vec<usize> = fixture.admitted.iter().map(|(_, model)| *model).collect();
    assert_eq!(models, [0, 0, 0, 1, 1, 1, 2, 2, 2]);
    let mut served: Vec<u64> = fixture.admitted.iter().map(|(request, _)| *request).collect();
    served.sort_unstable();
    assert_eq!(served, asked);
}

#[test]
fn a_turn_ends_when_another_has_waited_for_long_enough() {
    let mut fixture = Fixture::of(&[70 * GIB; 2], |_, rules| rules.turn_max = seconds(10));
    let mut running = fixture.ask(0);
    let other = fixture.ask(1);
    // A new request for the first model always comes before the one before is answered.
    for _ in 0..9 {
        fixture.pass(1000);
        let next = fixture.ask(0);
        fixture.answer(running);
        running = next;
        assert_eq!(fixture.stages(), ["ready", "asleep"]);
    }
    fixture.pass(1500);
    assert_eq!(fixture.stage(0), "draining");
    let late = fixture.ask(0);
    fixture.answer(running);
    fixture.settle();
    assert_eq!(fixture.stages(), ["asleep", "ready"]);
    assert_eq!(fixture.admitted.last(), Some(&(other, 1)));
    // Requests that came meanwhile are not forgotten.
    fixture.answer(other);
    fixture.settle();
    assert_eq!(fixture.admitted.last(), Some(&(late, 0)));
}

#[test]
fn no_model_leaves_right_after_it_came() {
    let mut fixture = Fixture::of(&[70 * GIB; 2], |_, rules| rules.residence_min = seconds(5));
    let first = fixture.ask(0);
    fixture.answer(first);
    let second = fixture.ask(1);
    fixture.pass(4900);
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
    fixture.pass(200);
    assert_eq!(fixture.admitted, [(first, 0), (second, 1)]);
}

#[test]
fn an_idle_model_leaves_after_its_grace_or_its_turn_but_not_in_a_gap() {
    let mut fixture = Fixture::of(&[70 * GIB; 2], |_, rules| {
        (rules.grace, rules.turn_max) = (Duration::from_millis(500), seconds(2));
    });
    let first = fixture.ask(0);
    fixture.ask(1);
    fixture.answer(first);
    fixture.pass(400);
    // The gap ends in time, and the grace begins again.
    fixture.use_once(0);
    fixture.pass(400);
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
    fixture.pass(100);
    fixture.settle();
    assert_eq!(fixture.stages(), ["asleep", "ready"]);
    // The other is idle, too. Its turn ends amid its last gap.
    fixture.answer(1);
    fixture.ask(0);
    for _ in 0..4 {
        fixture.pass(450);
        fixture.use_once(1);
    }
    assert_eq!(fixture.stages(), ["asleep", "ready"]);
    fixture.pass(200);
    fixture.settle();
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
}

#[test]
fn an_idle_model_leaves_at_once_if_its_pauses_are_longer_than_the_grace() {
    let mut fixture = Fixture::of(&[70 * GIB; 2], |_, rules| rules.grace = Duration::from_millis(500));
    // Its pauses are usually of 2 s.
    for _ in 0..3 {
        fixture.use_once(0);
        fixture.pass(2000);
    }
    let running = fixture.ask(0);
    fixture.ask(1);
    fixture.pass(100);
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
    fixture.answer(running);
    fixture.settle();
    assert_eq!(fixture.stages(), ["asleep", "ready"]);
}

#[test]
fn a_turn_ends_early_when_more_requests_wait_for_others_but_not_for_as_many() {
    let mut fixture = Fixture::of(&[70 * GIB; 3], |_, _| {});
    let running = [fixture.ask(0), fixture.ask(0)];
    let waiting = [fixture.ask(1), fixture.ask(2)];
    fixture.pass(5000);
    assert_eq!(fixture.stages(), ["ready", "asleep", "asleep"]);
    // One of two is answered, and two wait.
    fixture.answer(running[0]);
    assert_eq!(fixture.stages(), ["draining", "asleep", "asleep"]);
    fixture.answer(running[1]);
    fixture.settle();
    assert_eq!(fixture.admitted.last(), Some(&(waiting[0], 1)));
}

#[test]
fn a_turn_lasts_for_a_multiple_of_what_its_swap_takes_even_if_many_wait() {
    let mut fixture = Fixture::of(&[70 * GIB; 2], |_, rules| rules.turn_per_swap = 3);
    fixture.late = vec![(0, Task::Wake)];
    let running = fixture.ask(0);
    for _ in 0..9 {
        fixture.ask(1);
    }
    fixture.pass(2000);
    fixture.finish();
    fixture.pass(5900);
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
    fixture.pass(200);
    assert_eq!(fixture.stages(), ["draining", "asleep"]);
    fixture.answer(running);
}

#[test]
fn an_engine_with_as_many_requests_as_it_may_run_is_not_outnumbered() {
    let mut fixture = Fixture::of(&[70 * GIB; 2], |_, rules| rules.running_max = 2);
    for model in [0, 0, 1, 1, 1] {
        fixture.ask(model);
    }
    fixture.pass(9900);
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
    fixture.pass(200);
    assert_eq!(fixture.stages(), ["draining", "asleep"]);
}

#[test]
fn the_model_that_is_cheap_to_bring_back_leaves_and_the_one_that_is_asked_for_stays() {
    for (slow, often, leaves) in [(0, 0, 1), (1, 1, 0)] {
        let mut fixture = Fixture::of(&[30 * GIB, 30 * GIB, 40 * GIB], |_, _| {});
        fixture.late = vec![(slow, Task::Wake)];
        for model in [0, 1] {
            let request = fixture.ask(model);
            fixture.pass(1000);
            fixture.finish();
            fixture.answer(request);
        }
        for _ in 0..5 {
            fixture.pass(100);
            fixture.use_once(often);
        }
        // Used last, but seldom, and it takes no time to have it back.
        fixture.pass(1000);
        fixture.use_once(leaves);
        fixture.ask(2);
        fixture.settle();
        assert_eq!(fixture.stage(leaves), "asleep", "{:?}", fixture.stages());
        assert_eq!(fixture.stage(often), "ready", "{:?}", fixture.stages());
    }
}

#[test]
fn a_busy_model_stays_while_an_idle_one_leaves_and_the_busiest_stays_for_longest() {
    let mut fixture = Fixture::of(&[20 * GIB, 20 * GIB, 20 * GIB, 35 * GIB], |_, rules| {
        rules.turn_max = seconds(1);
    });
    // The idle one was used last.
    for model in [0, 0, 1] {
        fixture.ask(model);
    }
    fixture.use_once(2);
    fixture.ask(3);
    fixture.settle();
    assert_eq!(fixture.stages(), ["ready", "ready", "asleep", "ready"]);
    fixture.ask(2);
    fixture.pass(1100);
    assert_eq!(fixture.stage(0), "ready", "{:?}", fixture.stages());
}

#[test]
fn a_point_of_priority_counts_like_a_second_of_waiting() {
    let mut fixture = Fixture::of(&[70 * GIB; 4], |model, rules| {
        rules.priority = if model == 2 { 5 } else { 0 };
        (rules.running_max, rules.turn_per_swap) = (1, 0);
    });
    let running = fixture.ask(0);
    let first = fixture.ask(1);
    fixture.pass(4000);
    // The model's priority, and the request's own.
    let second = fixture.ask(2);
    let third = fixture.ask_by(3, 5);
    // It has waited for longer by now.
    fixture.pass(2000);
    let fourth = fixture.ask_by(3, 5);
    fixture.pass(10_000);
    let mut next = running;
    let mut order = Vec::new();
    for _ in 0..4 {
        fixture.answer(next);
        fixture.pass(20_000);
        next = fixture.admitted.last().unwrap().0;
        order.push(next);
    }
    assert_eq!(order, [second, third, first, fourth]);
}

#[test]
fn within_a_queue_priority_comes_first_then_age() {
    let mut fixture = Fixture::of(&[70 * GIB], |_, rules| rules.running_max = 1);
    let mut next = fixture.ask(0);
    let (low, high, also_high, aged) =
        (fixture.ask_by(0, -3), fixture.ask_by(0, 3), fixture.ask_by(0, 3), fixture.ask(0));
    fixture.pass(4000);
    let late = fixture.ask_by(0, 3);
    let mut order = Vec::new();
    for _ in 0..5 {
        fixture.answer(next);
        next = fixture.admitted.last().unwrap().0;
        order.push(next);
    }
    assert_eq!(order, [high, also_high, aged, late, low]);
}

#[test]
fn a_request_with_a_low_priority_waits_no_longer_than_it_may() {
    let mut fixture = Fixture::of(&[70 * GIB], |_, rules| {
        (rules.running_max, rules.wait_max) = (1, seconds(20));
    });
    fixture.ask(0);
    let low = fixture.ask_by(0, -30);
    fixture.pass(1000);
    fixture.ask(0);
    fixture.pass(18_999);
    assert!(fixture.refused.is_empty());
    fixture.pass(1);
    assert_eq!(fixture.refused.get(&low), Some(&Refusal::WaitedTooLong));
    assert_eq!(fixture.refused.len(), 1);
}

#[test]
fn a_turn_is_shorter_by_the_priority_of_what_waits_and_never_longer() {
    for (own, waits, seconds_left) in [(0, 0, 10), (0, 4, 6), (4, 4, 10), (4, 0, 10), (0, 30, 0)] {
        let mut fixture = Fixture::of(&[70 * GIB; 2], |model, rules| {
            rules.priority = if model == 0 { own } else { waits };
        });
        fixture.ask(0);
        fixture.pass(60_000);
        fixture.ask(1);
        fixture.pass(seconds_left * 1000);
        assert_eq!(fixture.stage(0), "draining", "{own} {waits}");
        if seconds_left > 0 {
            let mut fixture = Fixture::of(&[70 * GIB; 2], |model, rules| {
                rules.priority = if model == 0 { own } else { waits };
            });
            fixture.ask(0);
            fixture.ask(1);
            fixture.pass(seconds_left * 1000 - 1);
            assert_eq!(fixture.stage(0), "ready", "{own} {waits}");
        }
    }
}

#[test]
fn a_set_comes_up_and_stays_together_where_memory_is_free() {
    let together = |_, rules: &mut Rules| rules.together = Some("search".to_owned());
    // The last one is of the set, too, and does not fit. Nothing leaves for it.
    let mut fixture = Fixture::of(&[30 * GIB, 20 * GIB, 20 * GIB, 60 * GIB, 70 * GIB], |model, rules| {
        if model < 2 || model == 3 {
            together(model, rules);
        }
    });
    assert_eq!(fixture.stages(), ["asleep"; 5]);
    fixture.use_once(1);
    assert_eq!(fixture.stages(), ["ready", "ready", "asleep", "asleep", "asleep"]);
    // An operator's sleep is not undone.
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.settle();
    fixture.use_once(1);
    fixture.pass(60_000);
    assert_eq!(fixture.stages(), ["asleep", "ready", "asleep", "asleep", "asleep"]);
}

#[test]
fn while_one_of_a_set_is_in_use_the_others_leave_last() {
    for is_set in [true, false] {
        let mut fixture = Fixture::of(&[30 * GIB, 20 * GIB, 20 * GIB, 25 * GIB], |model, rules| {
            rules.together = (is_set && model < 2).then(|| "search".to_owned());
        });
        fixture.use_once(0);
        fixture.use_once(1);
        fixture.ask(0);
        fixture.pass(1000);
        fixture.use_once(2);
        // It takes the place of one of the two that are idle.
        fixture.ask(3);
        fixture.settle();
        let left = if is_set { 2 } else { 1 };
        assert_eq!(fixture.stage(left), "asleep", "{:?}", fixture.stages());
        assert_eq!(fixture.stage(3 - left), "ready", "{:?}", fixture.stages());
    }
}

#[test]
fn a_model_with_more_weight_stays_and_one_without_leaves_first() {
    for (weights, leaves) in [([1, 1], 0), ([10_000, 1], 1), ([1, 0], 1)] {
        let mut fixture = Fixture::of(&[30 * GIB, 30 * GIB, 40 * GIB], |model, rules| {
            rules.keep_weight = *weights.get(model).unwrap_or(&1);
        });
        fixture.use_once(0);
        fixture.pass(1000);
        fixture.use_once(1);
        fixture.pass(1000);
        fixture.ask(2);
        fixture.settle();
        assert_eq!(fixture.stage(leaves), "asleep", "{weights:?}: {:?}", fixture.stages());
    }
}

#[test]
fn coming_and_leaving_are_measured() {
    let mut fixture = Fixture::of(&[70 * GIB; 2], |model, rules| {
        (rules.can_sleep, rules.can_restart) = (model == 0, model == 1);
    });
    let durations = |fixture: &Fixture, model| {
        let status = fixture.policy.status(ModelId(model)).unwrap();
        [status.wake_duration, status.start_duration, status.leave_duration]
            .map(|took| took.map(|took| took.as_secs()))
    };
    fixture.late = vec![(0, Task::Wake)];
    fixture.ask(0);
    fixture.pass(4000);
    fixture.finish();
    assert_eq!(durations(&fixture, 0), [Some(4), None, None]);
    // The drain does not count.
    fixture.late = vec![(0, Task::Sleep), (1, Task::Stop)];
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.pass(20_000);
    fixture.answer(0);
    fixture.pass(3000);
    fixture.finish();
    fixture.settle();
    assert_eq!(durations(&fixture, 0), [Some(4), None, Some(3)]);
    // The next wake takes no time.
    fixture.use_once(0);
    assert_eq!(durations(&fixture, 0), [Some(2), None, Some(3)]);
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.use_once(1);
    fixture.input(Input::Sleep(ModelId(1)));
    fixture.pass(5000);
    fixture.finish();
    assert_eq!(durations(&fixture, 1), [Some(0), None, Some(5)]);
}

#[test]
fn models_come_up_with_the_service_where_memory_is_free() {
    // The first two fit, and none leaves for the third, which comes up for a request only.
    let mut fixture =
        Fixture::of(&[40 * GIB, 30 * GIB, 20 * GIB, 5 * GIB], |model, rules| rules.preload = model < 3);
    assert_eq!(fixture.stages(), ["ready", "ready", "asleep", "asleep"]);
    fixture.pass(60_000);
    assert_eq!(fixture.stages(), ["ready", "ready", "asleep", "asleep"]);
    // It happens once.
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.pass(60_000);
    assert_eq!(fixture.stages(), ["asleep", "ready", "asleep", "asleep"]);
    let request = fixture.ask(2);
    assert_eq!(fixture.admitted, [(request, 2)]);
}

#[test]
fn a_prepared_engine_is_started_and_sleeps() {
    let mut fixture = Fixture::found(&[70 * GIB; 2], EngineState::Gone, |_, rules| rules.can_restart = true);
    fixture.input(Input::Prepare(ModelId(0)));
    fixture.settle();
    assert_eq!(fixture.stages(), ["asleep", "cold"]);
    fixture.use_once(1);
    // What was used a short time ago stays, and the wish is forgotten.
    fixture.input(Input::Sleep(ModelId(1)));
    fixture.settle();
    fixture.input(Input::Restart(ModelId(0)));
    fixture.settle();
    fixture.use_once(1);
    fixture.input(Input::Prepare(ModelId(0)));
    fixture.pass(130_000);
    assert_eq!(fixture.stages(), ["cold", "ready"]);
    // The other one is unused now.
    fixture.input(Input::Prepare(ModelId(0)));
    fixture.settle();
    assert_eq!(fixture.stages(), ["asleep", "asleep"]);
    // What is not cold is as it should be.
    let tasks = fixture.tasks.len();
    fixture.input(Input::Prepare(ModelId(0)));
    fixture.settle();
    assert_eq!(fixture.tasks.len(), tasks);
}

#[test]
fn a_prepared_engine_stays_for_those_that_ask_meanwhile() {
    let mut fixture = Fixture::found(&[70 * GIB], EngineState::Gone, |_, rules| rules.can_restart = true);
    fixture.late = vec![(0, Task::Start)];
    fixture.input(Input::Prepare(ModelId(0)));
    let request = fixture.ask(0);
    fixture.finish();
    fixture.settle();
    assert_eq!((fixture.stage(0), &fixture.admitted), ("ready", &vec![(request, 0)]));
}

#[test]
fn a_request_for_another_model_ends_the_start_of_a_prepared_one() {
    let mut fixture = Fixture::found(&[70 * GIB; 2], EngineState::Gone, |_, rules| rules.can_restart = true);
    fixture.late = vec![(0, Task::Start)];
    fixture.input(Input::Prepare(ModelId(0)));
    assert_eq!(fixture.stages(), ["starting", "cold"]);
    let request = fixture.ask(1);
    fixture.settle();
    assert_eq!((fixture.stages(), &fixture.admitted), (vec!["cold", "ready"], &vec![(request, 1)]));
    assert_eq!(failures(&fixture), Vec::new());
}

#[test]
fn a_prepared_engine_that_is_to_sleep_while_it_starts_does() {
    let mut fixture = Fixture::found(&[70 * GIB], EngineState::Gone, |_, rules| rules.can_restart = true);
    fixture.late = vec![(0, Task::Start)];
    fixture.input(Input::Prepare(ModelId(0)));
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.finish();
    fixture.settle();
    assert_eq!(fixture.stage(0), "asleep");
}

#[test]
fn a_request_for_what_leaves_for_a_prepared_engine_is_served_first() {
    let mut fixture = Fixture::found(&[70 * GIB; 2], EngineState::Gone, |_, rules| rules.can_restart = true);
    fixture.use_once(1);
    fixture.pass(130_000);
    fixture.late = vec![(1, Task::Sleep)];
    fixture.input(Input::Prepare(ModelId(0)));
    assert_eq!(fixture.stages(), ["cold", "falling asleep"]);
    let request = fixture.ask(1);
    fixture.finish();
    fixture.pass(1000);
    assert_eq!((fixture.stages(), fixture.admitted.last()), (vec!["cold", "ready"], Some(&(request, 1))));
}

#[test]
fn only_what_is_unused_and_can_sleep_leaves_for_a_prepared_engine() {
    for (can_sleep, of_set, needs, expected) in [
        (false, false, 70, ["cold", "ready", "cold"]),
        (true, true, 70, ["cold", "ready", "cold"]),
        // All that could leave would not be enough.
        (true, false, 90, ["cold", "ready", "cold"]),
        (true, false, 70, ["asleep", "asleep", "cold"]),
    ] {
        let needs = [needs * GIB, 70 * GIB, GIB];
        let mut fixture = Fixture::found(&needs, EngineState::Gone, |model, rules| {
            (rules.can_restart, rules.can_sleep) = (true, model != 1 || can_sleep);
            rules.together = (of_set && model > 0).then(|| "set".to_owned());
        });
        fixture.use_once(1);
        fixture.pass(119_000);
        if of_set {
            fixture.use_once(2);
        }
        fixture.pass(2_000);
        fixture.input(Input::Prepare(ModelId(0)));
        fixture.settle();
        let stages = fixture.stages();
        assert_eq!(stages[..2], expected[..2], "{can_sleep} {of_set} {needs:?}");
    }
}

#[test]
fn what_cannot_sleep_or_is_pinned_is_not_put_to_sleep() {
    let mut fixture = Fixture::found(&[30 * GIB; 2], EngineState::Gone, |model, rules| {
        (rules.can_restart, rules.can_sleep, rules.is_pinned) = (true, model == 1, model == 1);
    });
    fixture.input(Input::Prepare(ModelId(0)));
    fixture.input(Input::Prepare(ModelId(1)));
    fixture.settle();
    assert_eq!(fixture.stages(), ["cold", "ready"]);
}

#[test]
fn a_model_that_was_found_awake_is_not_preloaded_later() {
    let mut fixture = Fixture::found(&[40 * GIB], EngineState::Awake, |_, rules| {
        (rules.preload, rules.idle_max) = (true, Some(seconds(10)));
    });
    assert_eq!(fixture.stages(), ["ready"]);
    fixture.pass(60_000);
    assert_eq!(fixture.stages(), ["asleep"]);
}

#[test]
fn a_failed_preload_is_tried_again_after_those_that_wait() {
    // The first comes up with its set.
    let mut fixture = Fixture::of(&[40 * GIB, 30 * GIB, 40 * GIB], |model, rules| {
        rules.can_restart = true;
        rules.together = (model < 2).then(|| "set".into());
    });
    fixture.late = vec![(0, Task::Wake)];
    let crashed = || (0, Task::Wake, TaskOutcome::Failed("it crashed".to_owned()));
    fixture.instead.extend([crashed(), crashed()]);
    fixture.use_once(1);
    assert_eq!(fixture.stages(), ["waking", "ready", "asleep"]);
    let request = fixture.ask(2);
    fixture.finish();
    fixture.pass(1000);
    assert_eq!(fixture.stages(), ["cold", "ready", "ready"], "no model leaves for it");
    assert_eq!(fixture.admitted.last(), Some(&(request, 2)));
}

#[test]
fn an_engine_that_lacks_what_it_needs_is_started_once() {
    let mut fixture = Fixture::found(&[40 * GIB], EngineState::Gone, |_, rules| rules.can_restart = true);
    fixture.instead.push((0, Task::Start, TaskOutcome::Unsupported("it has no sleep mode".to_owned())));
    let request = fixture.ask(0);
    let starts = fixture.tasks.iter().filter(|(_, task)| *task == Task::Start).count();
    assert_eq!((fixture.stage(0), starts), ("quarantined", 1));
    assert!(matches!(fixture.refused[&request], Refusal::Quarantined { .. }));
}

#[test]
fn no_engine_is_stopped_and_nothing_fails_for_a_model_that_no_client_asked_for() {
    let mut fixture = Fixture::of(&[40 * GIB; 2], |_, rules| {
        (rules.preload, rules.can_restart) = (true, true);
        // Larger than the GPU, as if another program had it.
        rules.need_bytes = Some(2 * CARD);
    });
    fixture.pass(60_000);
    assert_eq!(fixture.stages(), ["asleep", "asleep"]);
    assert_eq!((failures(&fixture), fixture.tasks.contains(&(0, Task::Stop))), (Vec::new(), false));
}

#[test]
fn a_turn_is_no_shorter_than_the_residence() {
    let mut fixture = Fixture::of(&[70 * GIB; 2], |_, rules| {
        (rules.residence_min, rules.turn_max) = (seconds(5), seconds(2));
    });
    // It is always busy, and the other has waited longer than a turn.
    let first = fixture.ask(0);
    fixture.ask(1);
    fixture.pass(4900);
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
    fixture.pass(200);
    assert_eq!(fixture.stages(), ["draining", "asleep"]);
    fixture.answer(first);
    fixture.settle();
    assert_eq!(fixture.stages(), ["asleep", "ready"]);
}

#[test]
fn failures_in_a_row_are_left_alone_for_longer_and_longer_up_to_a_limit() {
    let rules = Rules { pause_min: seconds(5), pause_max: seconds(60), ..Rules::on(vec![Gpu(0)]) };
    let pauses = [1, 2, 3, 4, 5, 6, 100].map(|failures| rules.pause(failures).as_secs());
    assert_eq!(pauses, [5, 10, 20, 40, 60, 60, 60]);
}

#[test]
fn those_that_fit_together_are_awake_together_and_the_one_that_was_not_used_for_longest_leaves() {
    let mut fixture = Fixture::of(&[30 * GIB, 30 * GIB, 15 * GIB, 25 * GIB], |_, _| {});
    for model in [0, 1, 2] {
        let request = fixture.ask(model);
        fixture.pass(100);
        fixture.answer(request);
    }
    assert_eq!(fixture.stages(), ["ready", "ready", "ready", "asleep"]);
    let again = fixture.ask(0);
    fixture.answer(again);
    // 5 GiB are free, and it takes 25: the second was not used for longest, and suffices.
    fixture.ask(3);
    fixture.settle();
    assert_eq!(fixture.stages(), ["ready", "asleep", "ready", "ready"]);
}

#[test]
fn no_model_is_evicted_needlessly() {
    let mut fixture = Fixture::of(&[10 * GIB, 60 * GIB, 50 * GIB], |_, _| {});
    for model in [0, 1] {
        let request = fixture.ask(model);
        fixture.pass(100);
        fixture.answer(request);
    }
    // The first was idle for longer, but does not suffice; without the second it need not leave.
    fixture.ask(2);
    fixture.settle();
    assert_eq!(fixture.stages(), ["ready", "asleep", "ready"]);
}

#[test]
fn pinned_models_stay_and_the_others_are_refused() {
    let mut fixture = Fixture::of(&[70 * GIB; 2], |model, rules| {
        rules.is_pinned = model == 0;
        rules.idle_max = Some(seconds(1));
    });
    let first = fixture.ask(0);
    fixture.answer(first);
    fixture.pass(5000);
    let second = fixture.ask(1);
    assert!(matches!(fixture.refused[&second], Refusal::NoMemory { .. }));
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
    fixture.input(Input::Pin(ModelId(0), false));
    fixture.pass(10_000);
    assert_eq!(fixture.stages(), ["asleep", "asleep"]);
    let third = fixture.ask(1);
    assert_eq!(fixture.admitted.last(), Some(&(third, 1)));
}

#[test]
fn queues_end_somewhere_and_so_does_waiting() {
    let mut fixture = Fixture::of(&[70 * GIB; 2], |_, rules| {
        (rules.queue_max, rules.wait_max, rules.turn_max) = (2, seconds(20), seconds(3600));
    });
    fixture.ask(0);
    let waiting: Vec<u64> = (0..3).map(|_| fixture.ask(1)).collect();
    assert_eq!(fixture.refused.get(&waiting[2]), Some(&Refusal::QueueFull));
    fixture.pass(19_999);
    assert_eq!(fixture.refused.len(), 1);
    fixture.pass(1);
    assert_eq!(fixture.refused.get(&waiting[0]), Some(&Refusal::WaitedTooLong));
    assert_eq!(fixture.refused.get(&waiting[1]), Some(&Refusal::WaitedTooLong));
    assert_eq!(fixture.policy.status(ModelId(1)).unwrap().queued, 0);
}

#[test]
fn requests_that_left_are_forgotten() {
    let mut fixture = Fixture::of(&[70 * GIB; 2], |_, rules| rules.running_max = 1);
    let running = fixture.ask(0);
    let (gone, kept) = (fixture.ask(0), fixture.ask(0));
    fixture.answer(gone);
    fixture.answer(gone);
    fixture.answer(99);
    fixture.answer(running);
    assert_eq!(fixture.admitted, [(running, 0), (kept, 0)]);
}

#[test]
fn gibberish_is_answered_by_one_restart_and_then_by_being_left_alone_for_longer_and_longer() {
    let mut fixture = Fixture::of(&[40 * GIB], |_, rules| rules.can_restart = true);
    let wrong = || (0, Task::Canary, TaskOutcome::Canary(Err("asdf".to_owned())));
    fixture.instead = vec![wrong()];
    let request = fixture.ask(0);
    assert_eq!(fixture.admitted, [(request, 0)], "one restart is enough here");
    assert!(fixture.tasks.contains(&(0, Task::Stop)) && fixture.tasks.contains(&(0, Task::Start)));
    fixture.answer(request);
    let mut pauses = Vec::new();
    for _ in 0..3 {
        fixture.input(Input::Sleep(ModelId(0)));
        fixture.settle();
        assert_eq!(fixture.stage(0), "asleep");
        fixture.instead = vec![wrong(), wrong()];
        let request = fixture.ask(0);
        let Refusal::Quarantined { until } = fixture.refused[&request] else {
            panic!("{:?}", fixture.refused)
        };
        pauses.push(until.since(fixture.now));
        // Meanwhile it is refused at once.
        let other = fixture.ask(0);
        assert_eq!(fixture.refused[&other], Refusal::Quarantined { until });
        fixture.now = until;
        fixture.input(Input::Tick);
    }
    assert!(pauses.windows(2).all(|pair| pair[1] > pair[0]), "{pauses:?}");
    let request = fixture.ask(0);
    assert_eq!(fixture.admitted.last(), Some(&(request, 0)));
    assert_eq!(fixture.policy.status(ModelId(0)).unwrap().failures, 0);
}

#[test]
fn a_model_that_reports_sleep_and_holds_its_memory_is_stopped() {
    let mut fixture = Fixture::of(&[70 * GIB; 2], |_, rules| rules.can_restart = true);
    let first = fixture.ask(0);
    fixture.answer(first);
    let kept = memory_of(vec![CARD - 70 * GIB]);
    // From the second measurement on: before its sleep, and then as long as the service waits.
    fixture.instead = (0..700).map(|_| (0, Task::Measure, kept.clone())).collect();
    let second = fixture.ask(1);
    fixture.pass(20_000);
    let shortfall = Event::Shortfall { gpu: Gpu(0), expected_bytes: 70 * GIB / 2, freed_bytes: 0 };
    assert!(fixture.events.contains(&(0, shortfall)), "{:?}", fixture.events);
    assert!(fixture.tasks.contains(&(0, Task::Stop)));
    assert_eq!(fixture.stage(0), "cold");
    assert_eq!(fixture.admitted.last(), Some(&(second, 1)));
}

/// The stage and the reason of each failure.
fn failures(fixture: &Fixture) -> Vec<(StageName, &str)> {
    let events = fixture.events.iter();
    let failures = events.filter_map(|(_, event)| match event {
        Event::Failed { stage, reason } => Some((*stage, reason.as_str())),
        _ => None,
    });
    failures.collect()
}

#[test]
fn memory_that_cannot_be_measured_is_a_failure_of_the_search() {
    for can_restart in [false, true] {
        let mut fixture = Fixture::of(&[40 * GIB], |_, rules| {
            (rules.limits.find_memory, rules.can_restart) = (seconds(1), can_restart);
        });
        let broken = || (0, Task::Measure, TaskOutcome::Failed("cannot measure GPU 0".to_owned()));
        fixture.instead = (0..500).map(|_| broken()).collect();
        let request = fixture.ask(0);
        fixture.pass(1500);
        assert!(matches!(fixture.refused[&request], Refusal::NoMemory { .. }));
        assert_eq!(failures(&fixture), [(StageName::FindingMemory, "cannot measure GPU 0")]);
        let failed = |(_, event): &(usize, Event)| matches!(event, Event::Failed { .. });
        let at = fixture.events.iter().position(failed).unwrap();
        assert_eq!(fixture.events[at - 1].1, Event::Stage(StageName::FindingMemory));
        assert_eq!(fixture.events[at + 1].1, Event::Stage(StageName::Unknown));
    }
}

#[test]
fn an_engine_that_is_stopped_for_lack_of_memory_failed_in_the_search() {
    let mut fixture = Fixture::of(&[40 * GIB], |_, rules| {
        (rules.limits.find_memory, rules.can_restart) = (seconds(1), true);
    });
    // It changes all the time, so no measurement decides.
    fixture.instead = (0..500).map(|nth| (0, Task::Measure, memory_of(vec![GIB * (1 + nth % 2)]))).collect();
    fixture.ask(0);
    fixture.pass(1500);
    assert!(fixture.tasks.contains(&(0, Task::Stop)));
    let reason = "there is too little free memory for it to wake";
    assert_eq!(failures(&fixture)[0], (StageName::FindingMemory, reason));
}

#[test]
fn measurements_decide_not_estimates() {
    let mut fixture = Fixture::of(&[40 * GIB], |_, rules| rules.limits.find_memory = seconds(1));
    // Another program has the GPU.
    fixture.instead = (0..500).map(|_| (0, Task::Measure, memory_of(vec![GIB]))).collect();
    let request = fixture.ask(0);
    fixture.pass(1500);
    assert!(matches!(fixture.refused[&request], Refusal::NoMemory { .. }));
    assert!(!fixture.tasks.contains(&(0, Task::Wake)));
    assert_eq!(failures(&fixture), [(StageName::FindingMemory, "its GPUs have too little free memory")]);
    fixture.instead.clear();
    fixture.pass(10_000);
    let request = fixture.ask(0);
    assert_eq!(fixture.admitted, [(request, 0)]);
}

#[test]
fn models_on_other_gpus_do_not_wait_for_one_another() {
    let mut fixture = Fixture::of(&[70 * GIB; 3], |model, rules| {
        rules.gpus = [vec![Gpu(0)], vec![Gpu(1)], vec![Gpu(0), Gpu(1)]][model].clone();
    });
    let (one, other) = (fixture.ask(0), fixture.ask(1));
    assert_eq!(fixture.admitted, [(one, 0), (other, 1)]);
    let both = fixture.ask(2);
    fixture.answer(one);
    fixture.pass(60_000);
    assert_eq!(fixture.stages(), ["asleep", "draining", "asleep"]);
    fixture.answer(other);
    fixture.settle();
    assert_eq!(fixture.admitted.last(), Some(&(both, 2)));
    assert_eq!(fixture.stages(), ["asleep", "asleep", "ready"]);
}

#[test]
fn a_shutdown_lets_running_requests_end_and_nothing_else_begin() {
    let mut fixture = Fixture::of(&[70 * GIB; 2], |_, _| {});
    let running = fixture.ask(0);
    let waiting = fixture.ask(1);
    fixture.input(Input::Shutdown);
    assert_eq!(fixture.refused[&waiting], Refusal::ShuttingDown);
    let late = fixture.ask(0);
    assert_eq!(fixture.refused[&late], Refusal::ShuttingDown);
    let before = fixture.tasks.len();
    fixture.answer(running);
    fixture.pass(3_600_000);
    assert_eq!(fixture.tasks.len(), before);
}

#[test]
fn a_requested_restart_drains_and_comes_back() {
    let mut fixture = Fixture::of(&[70 * GIB], |_, rules| rules.can_restart = true);
    let running = fixture.ask(0);
    fixture.input(Input::Restart(ModelId(0)));
    assert_eq!(fixture.stage(0), "draining");
    fixture.tasks.clear();
    fixture.answer(running);
    assert_eq!(fixture.stage(0), "ready");
    assert_eq!(fixture.tasks[..3], [(0, Task::Stop), (0, Task::Measure), (0, Task::Start)]);
}

#[test]
fn unknown_ids_are_ignored() {
    let mut fixture = Fixture::of(&[70 * GIB], |_, _| {});
    for input in [Input::Wake(ModelId(7)), Input::Restart(ModelId(0)), Input::Lost(ModelId(9))] {
        fixture.input(input);
    }
    let request = RequestId(5);
    assert!(
        fixture
            .policy
            .step(fixture.now, Input::Arrived { request, model: ModelId(3), priority: 0 })
            .is_empty()
    );
    assert_eq!(fixture.stages(), ["asleep"]);
    assert_eq!(fixture.policy.status(ModelId(1)), None);
}
