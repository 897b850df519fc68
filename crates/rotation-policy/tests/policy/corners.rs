//! Rare situations and past defects: old measurements, commands in the middle of a step, engines that changed, no time
//! at all.

use std::time::Duration;

use poorwill_rotation_policy::{
    Effect, EngineState, Event, Gpu, Input, Limits, ModelId, Policy, Refusal, RequestId, Rules, StageName,
    Task, TaskOutcome, Time,
};

use super::fixture::{CARD, Fixture, GIB, memory_of, seconds};

#[test]
fn no_model_overtakes_one_that_waits_for_two_gpus() {
    let mut fixture = Fixture::of(&[70 * GIB; 3], |model, rules| {
        rules.gpus = [vec![Gpu(0), Gpu(1)], vec![Gpu(0)], vec![Gpu(1)]][model].clone();
    });
    fixture.late = vec![(1, Task::Wake)];
    fixture.ask(1);
    fixture.ask(0);
    // The other GPU is free, and it stays so: the large one has waited for longer.
    fixture.ask(2);
    assert_eq!(fixture.stages(), ["asleep", "waking", "asleep"]);
    fixture.finish();
    assert_eq!(fixture.stages(), ["asleep", "ready", "asleep"]);
    fixture.answer(0);
    fixture.settle();
    assert_eq!(fixture.stages(), ["ready", "asleep", "asleep"]);
}

#[test]
fn free_memory_is_measured_again_after_a_stop() {
    for is_pinned in [true, false] {
        let mut fixture = Fixture::of(&[10 * GIB, 60 * GIB, 65 * GIB], |model, rules| {
            rules.is_pinned = is_pinned && model == 0;
            (rules.can_sleep, rules.can_restart) = (model != 1, model == 1);
        });
        fixture.use_once(0);
        fixture.use_once(1);
        fixture.input(Input::Sleep(ModelId(1)));
        assert_eq!(fixture.stage(1), "cold");
        // The request is not refused, and no model has to leave for it.
        let request = fixture.ask(2);
        assert_eq!(fixture.admitted.last(), Some(&(request, 2)));
        assert_eq!(fixture.stages(), ["ready", "cold", "ready"]);
    }
}

#[test]
fn no_request_is_refused_for_an_old_measurement() {
    let mut fixture = Fixture::of(&[10 * GIB, 60 * GIB], |model, rules| rules.is_pinned = model == 0);
    // Another program had the GPU's memory when the first one woke.
    fixture.instead =
        vec![(0, Task::Measure, memory_of(vec![70 * GIB])), (0, Task::Measure, memory_of(vec![GIB]))];
    fixture.use_once(0);
    assert_eq!(fixture.policy.free_bytes(Gpu(0)), Some(GIB));
    let request = fixture.ask(1);
    assert_eq!(fixture.admitted.last(), Some(&(request, 1)));
}

#[test]
fn no_model_is_evicted_in_vain() {
    let mut fixture =
        Fixture::of(&[50 * GIB, 20 * GIB, 40 * GIB], |model, rules| rules.is_pinned = model == 0);
    fixture.use_once(1);
    fixture.input(Input::Sleep(ModelId(1)));
    fixture.settle();
    fixture.use_once(1);
    fixture.use_once(0);
    let request = fixture.ask(2);
    fixture.pass(100);
    assert!(
        matches!(fixture.refused.get(&request), Some(Refusal::NoMemory { .. })),
        "{:?}",
        fixture.stages()
    );
    assert_eq!(fixture.stages(), ["ready", "ready", "asleep"]);
}

#[test]
fn a_leaving_model_counts_as_free_so_no_other_leaves() {
    let mut fixture = Fixture::of(&[40 * GIB, 30 * GIB, 35 * GIB], |_, _| {});
    fixture.use_once(1);
    let running = fixture.ask(0);
    fixture.input(Input::Sleep(ModelId(0)));
    let request = fixture.ask(2);
    assert_eq!(fixture.stages(), ["draining", "ready", "asleep"]);
    fixture.answer(running);
    fixture.settle();
    assert_eq!(fixture.admitted.last(), Some(&(request, 2)));
    assert_eq!(fixture.stages(), ["asleep", "ready", "ready"]);
}

#[test]
fn a_search_for_memory_waits_for_a_stop() {
    let mut fixture = Fixture::of(&[70 * GIB, 8 * GIB], |_, rules| rules.can_restart = true);
    fixture.use_once(0);
    fixture.late = vec![(1, Task::Measure), (0, Task::Stop)];
    fixture.instead = vec![(1, Task::Measure, memory_of(vec![GIB]))];
    let request = fixture.ask(1);
    fixture.input(Input::Lost(ModelId(0)));
    assert_eq!(fixture.stages(), ["stopping", "finding memory"]);
    fixture.finish();
    assert_eq!(fixture.stages(), ["cold", "ready"]);
    assert_eq!(fixture.admitted.last(), Some(&(request, 1)));
}

#[test]
fn the_learned_need_does_not_outlive_the_engine() {
    let mut fixture = Fixture::of(&[70 * GIB], |_, rules| rules.need_bytes = None);
    let sleep = |fixture: &mut Fixture| {
        fixture.use_once(0);
        fixture.input(Input::Sleep(ModelId(0)));
        fixture.pass(20_000);
        fixture.policy.status(ModelId(0)).unwrap().held_bytes
    };
    assert_eq!(sleep(&mut fixture), Some(vec![70 * GIB]));
    // From now on it takes less. A first sleep may release memory left over from the start.
    fixture.needs[0] = 40 * GIB;
    assert_eq!(sleep(&mut fixture), Some(vec![70 * GIB]));
    fixture.needs[0] = 50 * GIB;
    assert_eq!(sleep(&mut fixture), Some(vec![70 * GIB]));
    fixture.needs[0] = 40 * GIB;
    assert_eq!(sleep(&mut fixture), Some(vec![70 * GIB]));
    assert_eq!(shortfalls(&fixture), []);
    // Less than any wake before: one shortfall, and not again and again.
    fixture.needs[0] = 30 * GIB;
    assert_eq!(sleep(&mut fixture), None);
    assert_eq!(sleep(&mut fixture), Some(vec![30 * GIB]));
    assert_eq!(shortfalls(&fixture).len(), 1);
    // Nor when it was seen to be gone.
    fixture.input(Input::Lost(ModelId(0)));
    assert_eq!(fixture.policy.status(ModelId(0)).unwrap().held_bytes, None);
}

#[test]
fn what_a_wake_took_again_a_sleep_releases_again() {
    for freed in [0, 39 * GIB, 69 * GIB] {
        let mut fixture = Fixture::of(&[70 * GIB], |_, rules| {
            rules.can_restart = true;
            rules.limits.release = Duration::from_millis(1);
        });
        for _ in 0..2 {
            fixture.use_once(0);
            fixture.input(Input::Sleep(ModelId(0)));
            fixture.settle();
        }
        assert_eq!(fixture.stage(0), "asleep");
        fixture.use_once(0);
        let measured = |free: u64| (0, Task::Measure, memory_of(vec![free]));
        let free = CARD - 70 * GIB;
        fixture.instead = vec![measured(free), measured(free + freed), measured(free + freed)];
        fixture.input(Input::Sleep(ModelId(0)));
        fixture.pass(1000);
        let short = Event::Shortfall { gpu: Gpu(0), expected_bytes: 70 * GIB, freed_bytes: freed };
        assert_eq!(shortfalls(&fixture), [short]);
        assert_eq!(fixture.stage(0), "cold");
    }
}

#[test]
fn a_model_that_keeps_a_little_more_each_time_is_detected() {
    let mut fixture = Fixture::of(&[64 * GIB], |_, rules| rules.can_restart = true);
    let kept = 400 << 20;
    for cycle in 0..4 {
        fixture.use_once(0);
        fixture.input(Input::Sleep(ModelId(0)));
        fixture.pass(20_000);
        if !shortfalls(&fixture).is_empty() {
            return;
        }
        assert!(cycle < 3, "its growth goes unnoticed");
        // What it keeps it does not take again.
        fixture.needs[0] -= if cycle == 0 { 0 } else { kept };
    }
}

#[test]
fn memory_of_other_programs_does_not_disturb_a_wake() {
    let free = |bytes| (0, Task::Measure, memory_of(vec![bytes]));
    // Before and after its wake, other programs took or released much.
    for between in [[CARD, GIB], [70 * GIB, 65 * GIB]] {
        let mut fixture = Fixture::of(&[40 * GIB], |_, rules| rules.can_restart = true);
        let sleep = |fixture: &mut Fixture| {
            fixture.use_once(0);
            fixture.input(Input::Sleep(ModelId(0)));
            fixture.pass(20_000);
            assert_eq!(fixture.stage(0), "asleep");
        };
        sleep(&mut fixture);
        fixture.instead = between.map(free).to_vec();
        sleep(&mut fixture);
        sleep(&mut fixture);
        assert_eq!(shortfalls(&fixture), []);
        assert_eq!(fixture.policy.status(ModelId(0)).unwrap().held_bytes, Some(vec![40 * GIB]));
    }
}

fn shortfalls(fixture: &Fixture) -> Vec<Event> {
    let events = fixture.events.iter().map(|(_, event)| event.clone());
    events.filter(|event| matches!(event, Event::Shortfall { .. })).collect()
}

#[test]
fn an_unneeded_engine_is_not_started_after_a_failed_probe() {
    let mut fixture = Fixture::of(&[40 * GIB], |_, rules| rules.can_restart = true);
    let wrong = || (0, Task::Canary, TaskOutcome::Canary(Err("asdf".to_owned())));
    fixture.instead = vec![wrong(), wrong()];
    fixture.ask(0);
    assert_eq!(fixture.stage(0), "quarantined");
    let silent = || (0, Task::Probe, TaskOutcome::Failed("no answer".to_owned()));
    fixture.instead = vec![silent(), silent()];
    fixture.tasks.clear();
    fixture.pass(60_000);
    assert_eq!(fixture.tasks, [(0, Task::Probe), (0, Task::Probe), (0, Task::Stop)]);
    assert_eq!(fixture.stage(0), "cold");
    let request = fixture.ask(0);
    assert_eq!(fixture.admitted, [(request, 0)]);
}

#[test]
fn an_engine_that_is_not_there_cannot_be_lost() {
    let mut fixture = Fixture::of(&[40 * GIB], |_, rules| rules.can_restart = true);
    fixture.input(Input::Restart(ModelId(0)));
    fixture.tasks.clear();
    fixture.late = vec![(0, Task::Measure)];
    let request = fixture.ask(0);
    fixture.input(Input::Lost(ModelId(0)));
    fixture.finish();
    assert_eq!(fixture.admitted, [(request, 0)]);
    assert!(!fixture.tasks.contains(&(0, Task::Stop)), "{:?}", fixture.tasks);
}

#[test]
fn a_repeated_restart_takes_no_longer_and_comes_back() {
    let mut fixture = Fixture::of(&[40 * GIB], |_, rules| rules.can_restart = true);
    fixture.ask(0);
    fixture.input(Input::Restart(ModelId(0)));
    fixture.pass(59_000);
    fixture.input(Input::Restart(ModelId(0)));
    fixture.pass(10_000);
    assert_eq!((fixture.aborts, fixture.stage(0)), (1, "draining"));
    fixture.pass(1_000);
    assert_eq!(fixture.stage(0), "ready");
    assert!(fixture.tasks.contains(&(0, Task::Stop)) && fixture.tasks.contains(&(0, Task::Start)));
}

#[test]
fn a_stop_that_failed_is_repeated_where_the_engine_is_still_there() {
    let mut fixture = Fixture::of(&[70 * GIB], |_, rules| rules.can_restart = true);
    fixture.instead = vec![(0, Task::Stop, TaskOutcome::Failed("it hangs".to_owned()))];
    fixture.input(Input::Restart(ModelId(0)));
    assert_eq!((fixture.tasks.as_slice(), fixture.stage(0)), (&[(0, Task::Stop)][..], "quarantined"));
    fixture.pass(6_000);
    let expected = [Task::Stop, Task::Probe, Task::Stop].map(|task| (0, task));
    assert_eq!((fixture.tasks.as_slice(), fixture.stage(0)), (&expected[..], "cold"));
}

#[test]
fn a_restart_stops_a_quarantined_model_or_reports_that_it_cannot() {
    let mut fixture = Fixture::of(&[40 * GIB], |_, rules| rules.can_restart = true);
    let wrong = || (0, Task::Canary, TaskOutcome::Canary(Err("asdf".to_owned())));
    fixture.instead = vec![wrong(), wrong()];
    fixture.ask(0);
    fixture.tasks.clear();
    fixture.input(Input::Restart(ModelId(0)));
    assert_eq!((fixture.tasks.as_slice(), fixture.stage(0)), (&[(0, Task::Stop)][..], "cold"));
    fixture.late = vec![(0, Task::Start)];
    fixture.ask(0);
    fixture.events.clear();
    fixture.input(Input::Restart(ModelId(0)));
    assert!(
        matches!(fixture.events.as_slice(), [(0, Event::Failed { stage: StageName::Starting, .. })]),
        "{:?}",
        fixture.events
    );
}

#[test]
fn nothing_is_ended_or_stopped_after_a_shutdown() {
    let mut fixture = Fixture::of(&[70 * GIB, 5 * GIB], |_, rules| rules.can_restart = true);
    fixture.ask(0);
    fixture.use_once(1);
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.input(Input::Shutdown);
    let before = fixture.tasks.len();
    fixture.pass(3_600_000);
    fixture.input(Input::Lost(ModelId(1)));
    fixture.input(Input::Restart(ModelId(1)));
    fixture.input(Input::Wake(ModelId(1)));
    fixture.pass(3_600_000);
    assert_eq!((fixture.tasks.len(), fixture.aborts), (before, 0));
}

#[test]
fn steps_without_any_time_let_time_pass() {
    let zero = Duration::ZERO;
    for answers in [true, false] {
        let mut rules = Rules::on(vec![Gpu(0)]);
        rules.limits = Limits {
            probe: zero,
            drain: zero,
            abort: zero,
            sleep: zero,
            release: zero,
            find_memory: zero,
            wake: zero,
            confirm: zero,
            canary: zero,
            start: zero,
            stop: zero,
            poll: zero,
        };
        (rules.residence_min, rules.grace) = (zero, zero);
        (rules.turn_max, rules.idle_max) = (zero, Some(zero));
        (rules.pause_min, rules.pause_max) = (zero, zero);
        let mut policy = Policy::new(vec![rules.clone(), rules]);
        let mut now = Time::ZERO;
        for nth in 0..500_u64 {
            let request = RequestId(nth);
            let model = ModelId(usize::from(nth % 2 == 0));
            let mut inputs = vec![Input::Tick, Input::Arrived { request, model, priority: 0 }];
            let mut count = 0;
            while let Some(input) = inputs.pop() {
                for effect in policy.step(now, input) {
                    count += 1;
                    assert!(count < 1000, "{effect:?} and on and on at {now:?}");
                    if let Effect::Run { op, task: Task::Probe, .. } = effect
                        && answers
                    {
                        inputs.push(Input::Ended { op, outcome: TaskOutcome::Probed(EngineState::Awake) });
                    }
                }
            }
            let next = policy.wakeup().unwrap();
            assert!(next > now);
            now = next;
        }
    }
}

#[test]
fn a_failed_start_discards_the_learned_need() {
    let mut fixture = Fixture::of(&[40 * GIB, 70 * GIB], |model, rules| {
        rules.can_restart = model == 0;
    });
    fixture.input(Input::Restart(ModelId(0)));
    // Another program left while it started.
    let free = |bytes| (0, Task::Measure, memory_of(vec![bytes]));
    fixture.instead = vec![free(45 * GIB), free(40 * GIB)];
    fixture.use_once(0);
    fixture.input(Input::Restart(ModelId(0)));
    assert_eq!(fixture.stage(0), "ready");
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.settle();
    fixture.input(Input::Restart(ModelId(0)));
    fixture.instead = vec![free(45 * GIB), free(40 * GIB)];
    fixture.use_once(0);
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.settle();
    fixture.input(Input::Restart(ModelId(0)));
    fixture.use_once(1);
    assert_eq!(fixture.stages(), ["cold", "ready"]);
    fixture.instead = vec![(0, Task::Start, TaskOutcome::Failed("out of memory".to_owned()))];
    let request = fixture.ask(0);
    fixture.settle();
    assert_eq!(fixture.admitted.last(), Some(&(request, 0)));
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
}

#[test]
fn a_model_thought_to_hold_nothing_leaves_if_nothing_else_helps() {
    let mut fixture = Fixture::of(&[40 * GIB, 70 * GIB], |_, rules| rules.can_restart = true);
    fixture.input(Input::Restart(ModelId(0)));
    // Another program left while it started, so it seems to take nothing.
    let free = |bytes| (0, Task::Measure, memory_of(vec![bytes]));
    fixture.instead = vec![free(40 * GIB), free(40 * GIB)];
    fixture.use_once(0);
    let request = fixture.ask(1);
    fixture.settle();
    assert_eq!(fixture.admitted.last(), Some(&(request, 1)));
}

#[test]
fn a_failed_wake_discards_the_learned_need() {
    let mut fixture = Fixture::of(&[40 * GIB, 70 * GIB], |_, rules| rules.need_bytes = None);
    let free = |bytes| (0, Task::Measure, memory_of(vec![bytes]));
    fixture.use_once(0);
    // Another program took most of it while it fell asleep.
    fixture.instead = vec![free(40 * GIB), free(45 * GIB), free(45 * GIB)];
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.settle();
    assert_eq!(fixture.policy.status(ModelId(0)).unwrap().held_bytes, Some(vec![5 * GIB]));
    fixture.use_once(1);
    let lacks = || (0, Task::Wake, TaskOutcome::Failed("out of memory".to_owned()));
    fixture.instead = vec![lacks(), lacks()];
    fixture.ask(0);
    assert_eq!(fixture.stages(), ["quarantined", "ready"]);
    fixture.pass(10_000);
    let request = fixture.ask(0);
    fixture.settle();
    assert_eq!(fixture.admitted.last(), Some(&(request, 0)));
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
}

#[test]
fn the_model_whose_request_ended_last_was_used_last() {
    let mut fixture =
        Fixture::of(&[30 * GIB, 30 * GIB, 40 * GIB], |_, rules| rules.idle_max = Some(seconds(5)));
    let long = fixture.ask(0);
    fixture.pass(1_000);
    let short = fixture.ask(1);
    fixture.pass(1_000);
    fixture.answer(short);
    fixture.pass(3_900);
    fixture.answer(long);
    fixture.ask(2);
    fixture.settle();
    assert_eq!(fixture.stages(), ["ready", "asleep", "ready"]);
    fixture.pass(4_500);
    assert_eq!(fixture.stage(0), "ready", "it was idle since it ended, not since it began");
    fixture.pass(1_000);
    assert_eq!(fixture.stage(0), "asleep");
}

#[test]
fn no_model_wakes_for_requests_that_left_or_a_withdrawn_command() {
    let mut fixture = Fixture::of(&[70 * GIB; 2], |_, _| {});
    let running = fixture.ask(0);
    let waiting = fixture.ask(1);
    fixture.pass(10_000);
    assert_eq!(fixture.stage(0), "draining");
    fixture.answer(waiting);
    fixture.answer(running);
    fixture.settle();
    assert_eq!(fixture.stages(), ["asleep", "asleep"]);
    let running = fixture.ask(0);
    fixture.input(Input::Wake(ModelId(1)));
    fixture.input(Input::Sleep(ModelId(1)));
    fixture.pass(20_000);
    fixture.answer(running);
    fixture.pass(20_000);
    assert_eq!(fixture.stages(), ["ready", "asleep"]);
}

#[test]
fn a_model_selected_without_memory_comes_at_the_next_search() {
    let mut fixture = Fixture::of(&[40 * GIB], |_, rules| rules.limits.find_memory = seconds(1));
    fixture.instead = (0..500).map(|_| (0, Task::Measure, memory_of(vec![GIB]))).collect();
    fixture.ask(0);
    fixture.pass(1500);
    fixture.instead.clear();
    fixture.input(Input::Wake(ModelId(0)));
    assert_eq!(fixture.stage(0), "asleep");
    fixture.pass(10_000);
    assert_eq!(fixture.stage(0), "ready");
}

#[test]
fn a_first_sleep_is_measured_until_steady_and_small_drops_change_nothing() {
    let mut fixture = Fixture::of(&[70 * GIB], |_, rules| rules.need_bytes = None);
    fixture.use_once(0);
    let free = |bytes| (0, Task::Measure, memory_of(vec![bytes]));
    fixture.instead = vec![free(10 * GIB), free(40 * GIB)];
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.settle();
    assert_eq!(fixture.policy.status(ModelId(0)).unwrap().held_bytes, Some(vec![70 * GIB]));
    fixture.needs[0] = 70 * GIB - (100 << 20);
    fixture.use_once(0);
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.settle();
    assert_eq!(fixture.stage(0), "asleep");
    assert_eq!(fixture.policy.status(ModelId(0)).unwrap().held_bytes, Some(vec![70 * GIB]));
}

#[test]
fn a_sleep_that_gives_nothing_back_is_none() {
    let mut fixture = Fixture::of(&[40 * GIB], |_, rules| rules.can_restart = true);
    fixture.input(Input::Restart(ModelId(0)));
    // Another program left while it started, so it seems to take nothing.
    let free = |bytes| (0, Task::Measure, memory_of(vec![bytes]));
    fixture.instead = vec![free(40 * GIB), free(40 * GIB)];
    fixture.use_once(0);
    // Its memory is released late.
    fixture.instead = vec![free(40 * GIB), free(40 * GIB), free(40 * GIB)];
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.settle();
    assert_eq!(fixture.stage(0), "asleep");
    assert_eq!(fixture.policy.status(ModelId(0)).unwrap().held_bytes, Some(vec![40 * GIB]));
}

#[test]
fn memory_that_others_freed_is_no_part_of_a_sleep() {
    let mut fixture = Fixture::of(&[30 * GIB, 40 * GIB], |_, rules| rules.can_restart = true);
    for model in [0, 1] {
        fixture.use_once(model);
        fixture.input(Input::Sleep(ModelId(model)));
        fixture.settle();
        fixture.use_once(model);
    }
    assert_eq!(fixture.stages(), ["ready", "ready"]);
    fixture.late = vec![(0, Task::Sleep)];
    fixture.input(Input::Sleep(ModelId(0)));
    fixture.input(Input::Lost(ModelId(1)));
    // It keeps half of its memory, and the other has released more than that.
    fixture.instead = vec![(0, Task::Measure, memory_of(vec![(10 + 40 + 15) * GIB])); 10_000];
    fixture.finish();
    assert_eq!(fixture.stages(), ["releasing memory", "stopping"]);
    fixture.pass(15_000);
    assert_eq!(shortfalls(&fixture).len(), 1);
    assert_eq!(fixture.stage(0), "cold");
}
