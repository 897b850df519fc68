//! Situations that are rare, and what was once wrong in them: numbers that were measured long ago, commands in the
//! middle of something, engines that are not what they were, no time at all.
#![allow(clippy::unwrap_used)]

mod table;

use std::time::Duration;

use poorwill_rotate::policy::{
    Effect, Event, Found, Gpu, Input, Limits, ModelId, Outcome, Policy, Refusal, RequestId, Rules, Task, Time,
};

use table::{CARD, GIB, Table, seconds};

#[test]
fn nobody_goes_before_who_waits_for_two_gpus() {
    let mut table = Table::of(&[70 * GIB; 3], |model, rules| {
        rules.gpus = [vec![Gpu(0), Gpu(1)], vec![Gpu(0)], vec![Gpu(1)]][model].clone();
    });
    table.late = vec![(1, Task::Wake)];
    table.ask(1);
    table.ask(0);
    // The other GPU is free, and it stays so: the large one has waited for longer.
    table.ask(2);
    assert_eq!(table.stages(), ["asleep", "waking", "asleep"]);
    table.finish();
    assert_eq!(table.stages(), ["asleep", "ready", "asleep"]);
    table.answer(0);
    table.settle();
    assert_eq!(table.stages(), ["ready", "asleep", "asleep"]);
}

#[test]
fn what_was_free_before_somebody_was_stopped_is_measured_again() {
    for is_pinned in [true, false] {
        let mut table = Table::of(&[10 * GIB, 60 * GIB, 65 * GIB], |model, rules| {
            rules.is_pinned = is_pinned && model == 0;
            (rules.can_sleep, rules.can_restart) = (model != 1, model == 1);
        });
        table.use_once(0);
        table.use_once(1);
        table.tell(Input::Sleep(ModelId(1)));
        assert_eq!(table.stage(1), "cold");
        // Neither is it refused, nor has anybody to leave for it.
        let request = table.ask(2);
        assert_eq!(table.admitted.last(), Some(&(request, 2)));
        assert_eq!(table.stages(), ["ready", "cold", "ready"]);
    }
}

#[test]
fn nobody_is_refused_for_what_was_measured_long_ago() {
    let mut table = Table::of(&[10 * GIB, 60 * GIB], |model, rules| rules.is_pinned = model == 0);
    // Somebody else had the card when the first one woke.
    table.instead =
        vec![(0, Task::Weigh, Outcome::Free(vec![70 * GIB])), (0, Task::Weigh, Outcome::Free(vec![GIB]))];
    table.use_once(0);
    assert_eq!(table.policy.free_bytes(Gpu(0)), Some(GIB));
    let request = table.ask(1);
    assert_eq!(table.admitted.last(), Some(&(request, 1)));
}

#[test]
fn nobody_leaves_in_vain() {
    let mut table = Table::of(&[50 * GIB, 20 * GIB, 40 * GIB], |model, rules| rules.is_pinned = model == 0);
    table.use_once(1);
    table.tell(Input::Sleep(ModelId(1)));
    table.settle();
    table.use_once(1);
    table.use_once(0);
    let request = table.ask(2);
    table.pass(100);
    assert!(matches!(table.refused.get(&request), Some(Refusal::NoRoom { .. })), "{:?}", table.stages());
    assert_eq!(table.stages(), ["ready", "ready", "asleep"]);
}

#[test]
fn who_leaves_already_makes_room_and_nobody_else_has_to() {
    let mut table = Table::of(&[40 * GIB, 30 * GIB, 35 * GIB], |_, _| {});
    table.use_once(1);
    let running = table.ask(0);
    table.tell(Input::Sleep(ModelId(0)));
    let request = table.ask(2);
    assert_eq!(table.stages(), ["draining", "ready", "asleep"]);
    table.answer(running);
    table.settle();
    assert_eq!(table.admitted.last(), Some(&(request, 2)));
    assert_eq!(table.stages(), ["asleep", "ready", "ready"]);
}

#[test]
fn who_looks_for_room_gives_way_to_a_stop() {
    let mut table = Table::of(&[70 * GIB, 8 * GIB], |_, rules| rules.can_restart = true);
    table.use_once(0);
    table.late = vec![(1, Task::Weigh)];
    table.instead = vec![(1, Task::Weigh, Outcome::Free(vec![GIB]))];
    let request = table.ask(1);
    table.tell(Input::Lost(ModelId(0)));
    assert_eq!(table.stages(), ["stopping", "finding memory"]);
    table.finish();
    assert_eq!(table.stages(), ["cold", "ready"]);
    assert_eq!(table.admitted.last(), Some(&(request, 1)));
}

#[test]
fn what_was_learnt_of_an_engine_does_not_outlive_it() {
    let mut table = Table::of(&[70 * GIB], |_, rules| rules.need_bytes = None);
    let sleep = |table: &mut Table| {
        table.use_once(0);
        table.tell(Input::Sleep(ModelId(0)));
        table.pass(20_000);
        table.policy.status(ModelId(0)).unwrap().held_bytes
    };
    assert_eq!(sleep(&mut table), Some(vec![70 * GIB]));
    // It takes less from now on, as one does whose first sleep gave back what was left over from its start.
    table.needs[0] = 40 * GIB;
    assert_eq!(sleep(&mut table), Some(vec![70 * GIB]));
    table.needs[0] = 50 * GIB;
    assert_eq!(sleep(&mut table), Some(vec![70 * GIB]));
    table.needs[0] = 40 * GIB;
    assert_eq!(sleep(&mut table), Some(vec![70 * GIB]));
    assert_eq!(shortfalls(&table), []);
    // Less than any wake before: that is a shortfall once, and not for ever.
    table.needs[0] = 30 * GIB;
    assert_eq!(sleep(&mut table), None);
    assert_eq!(sleep(&mut table), Some(vec![30 * GIB]));
    assert_eq!(shortfalls(&table).len(), 1);
    // Nor when it was seen to be gone.
    table.tell(Input::Lost(ModelId(0)));
    assert_eq!(table.policy.status(ModelId(0)).unwrap().held_bytes, None);
}

#[test]
fn who_took_all_of_it_again_gives_all_of_it_back_again() {
    for freed in [0, 39 * GIB, 69 * GIB] {
        let mut table = Table::of(&[70 * GIB], |_, rules| {
            rules.can_restart = true;
            rules.limits.release = Duration::from_millis(1);
        });
        for _ in 0..2 {
            table.use_once(0);
            table.tell(Input::Sleep(ModelId(0)));
            table.settle();
        }
        assert_eq!(table.stage(0), "asleep");
        table.use_once(0);
        let weighed = |free: u64| (0, Task::Weigh, Outcome::Free(vec![free]));
        let free = CARD - 70 * GIB;
        table.instead = vec![weighed(free), weighed(free + freed), weighed(free + freed)];
        table.tell(Input::Sleep(ModelId(0)));
        table.pass(1000);
        let short = Event::Shortfall { gpu: Gpu(0), expected_bytes: 70 * GIB, freed_bytes: freed };
        assert_eq!(shortfalls(&table), [short]);
        assert_eq!(table.stage(0), "cold");
    }
}

#[test]
fn who_keeps_a_little_more_each_time_is_found_out() {
    let mut table = Table::of(&[64 * GIB], |_, rules| rules.can_restart = true);
    let kept = 400 << 20;
    for cycle in 0..4 {
        table.use_once(0);
        table.tell(Input::Sleep(ModelId(0)));
        table.pass(20_000);
        if !shortfalls(&table).is_empty() {
            return;
        }
        assert!(cycle < 3, "it keeps more and more, and nobody sees it");
        // What it keeps it does not take again.
        table.needs[0] -= if cycle == 0 { 0 } else { kept };
    }
}

#[test]
fn somebody_elses_memory_does_no_harm_to_who_wakes_meanwhile() {
    let free = |bytes| (0, Task::Weigh, Outcome::Free(vec![bytes]));
    // Before it wakes, and when it has: others took a lot, or gave a lot back.
    for between in [[CARD, GIB], [70 * GIB, 65 * GIB]] {
        let mut table = Table::of(&[40 * GIB], |_, rules| rules.can_restart = true);
        let sleep = |table: &mut Table| {
            table.use_once(0);
            table.tell(Input::Sleep(ModelId(0)));
            table.pass(20_000);
            assert_eq!(table.stage(0), "asleep");
        };
        sleep(&mut table);
        table.instead = between.map(free).to_vec();
        sleep(&mut table);
        sleep(&mut table);
        assert_eq!(shortfalls(&table), []);
        assert_eq!(table.policy.status(ModelId(0)).unwrap().held_bytes, Some(vec![40 * GIB]));
    }
}

fn shortfalls(table: &Table) -> Vec<Event> {
    let events = table.events.iter().map(|(_, event)| event.clone());
    events.filter(|event| matches!(event, Event::Shortfall { .. })).collect()
}

#[test]
fn an_engine_that_nobody_wants_is_not_started_because_it_cannot_be_looked_at() {
    let mut table = Table::of(&[40 * GIB], |_, rules| rules.can_restart = true);
    let wrong = || (0, Task::Canary, Outcome::Canary(Err("asdf".to_owned())));
    table.instead = vec![wrong(), wrong()];
    table.ask(0);
    assert_eq!(table.stage(0), "quarantined");
    let silent = || (0, Task::Look, Outcome::Failed("no answer".to_owned()));
    table.instead = vec![silent(), silent()];
    table.tasks.clear();
    table.pass(60_000);
    assert_eq!(table.tasks, [(0, Task::Look), (0, Task::Look), (0, Task::Stop)]);
    assert_eq!(table.stage(0), "cold");
    let request = table.ask(0);
    assert_eq!(table.admitted, [(request, 0)]);
}

#[test]
fn an_engine_that_is_not_there_cannot_be_lost() {
    let mut table = Table::of(&[40 * GIB], |_, rules| rules.can_restart = true);
    table.tell(Input::Restart(ModelId(0)));
    table.tasks.clear();
    table.late = vec![(0, Task::Weigh)];
    let request = table.ask(0);
    table.tell(Input::Lost(ModelId(0)));
    table.finish();
    assert_eq!(table.admitted, [(request, 0)]);
    assert!(!table.tasks.contains(&(0, Task::Stop)), "{:?}", table.tasks);
}

#[test]
fn a_restart_said_twice_takes_no_longer_and_comes_back_though_requests_cling() {
    let mut table = Table::of(&[40 * GIB], |_, rules| rules.can_restart = true);
    table.ask(0);
    table.tell(Input::Restart(ModelId(0)));
    table.pass(59_000);
    table.tell(Input::Restart(ModelId(0)));
    table.pass(10_000);
    assert_eq!((table.aborts, table.stage(0)), (1, "draining"));
    table.pass(1_000);
    assert_eq!(table.stage(0), "ready");
    assert!(table.tasks.contains(&(0, Task::Stop)) && table.tasks.contains(&(0, Task::Start)));
}

#[test]
fn a_restart_stops_who_is_left_alone_and_is_told_of_where_it_cannot_be() {
    let mut table = Table::of(&[40 * GIB], |_, rules| rules.can_restart = true);
    let wrong = || (0, Task::Canary, Outcome::Canary(Err("asdf".to_owned())));
    table.instead = vec![wrong(), wrong()];
    table.ask(0);
    table.tasks.clear();
    table.tell(Input::Restart(ModelId(0)));
    assert_eq!((table.tasks.as_slice(), table.stage(0)), (&[(0, Task::Stop)][..], "cold"));
    table.late = vec![(0, Task::Start)];
    table.ask(0);
    table.events.clear();
    table.tell(Input::Restart(ModelId(0)));
    assert!(
        matches!(table.events.as_slice(), [(0, Event::Failed { stage: "starting", .. })]),
        "{:?}",
        table.events
    );
}

#[test]
fn nothing_is_ended_or_stopped_behind_a_shutdown() {
    let mut table = Table::of(&[70 * GIB, 5 * GIB], |_, rules| rules.can_restart = true);
    table.ask(0);
    table.use_once(1);
    table.tell(Input::Sleep(ModelId(0)));
    table.tell(Input::Shutdown);
    let before = table.tasks.len();
    table.pass(3_600_000);
    table.tell(Input::Lost(ModelId(1)));
    table.tell(Input::Restart(ModelId(1)));
    table.tell(Input::Wake(ModelId(1)));
    table.pass(3_600_000);
    assert_eq!((table.tasks.len(), table.aborts), (before, 0));
}

#[test]
fn steps_without_any_time_let_time_pass() {
    let zero = Duration::ZERO;
    for answers in [true, false] {
        let mut rules = Rules::on(vec![Gpu(0)]);
        rules.limits = Limits {
            look: zero,
            drain: zero,
            abort: zero,
            sleep: zero,
            release: zero,
            room: zero,
            wake: zero,
            confirm: zero,
            canary: zero,
            start: zero,
            stop: zero,
            poll: zero,
        };
        (rules.residence_min, rules.turn_max, rules.idle_max) = (zero, zero, Some(zero));
        (rules.pause_min, rules.pause_max) = (zero, zero);
        let mut policy = Policy::new(vec![rules.clone(), rules]);
        let mut now = Time::ZERO;
        for nth in 0..500_u64 {
            let request = RequestId(nth);
            let model = ModelId(usize::from(nth % 2 == 0));
            let mut inputs = vec![Input::Tick, Input::Arrived { request, model }];
            let mut said = 0;
            while let Some(input) = inputs.pop() {
                for effect in policy.step(now, input) {
                    said += 1;
                    assert!(said < 1000, "{effect:?} and on and on at {now:?}");
                    if let Effect::Run { op, task: Task::Look, .. } = effect
                        && answers
                    {
                        inputs.push(Input::Ended { op, outcome: Outcome::Found(Found::Awake) });
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
fn a_start_that_fails_is_no_more_tried_with_what_it_took_once() {
    let mut table = Table::of(&[40 * GIB, 70 * GIB], |model, rules| {
        rules.can_restart = model == 0;
    });
    table.tell(Input::Restart(ModelId(0)));
    // Somebody else left while it started.
    let free = |bytes| (0, Task::Weigh, Outcome::Free(vec![bytes]));
    table.instead = vec![free(45 * GIB), free(40 * GIB)];
    table.use_once(0);
    table.tell(Input::Restart(ModelId(0)));
    assert_eq!(table.stage(0), "ready");
    table.tell(Input::Sleep(ModelId(0)));
    table.settle();
    table.tell(Input::Restart(ModelId(0)));
    table.instead = vec![free(45 * GIB), free(40 * GIB)];
    table.use_once(0);
    table.tell(Input::Sleep(ModelId(0)));
    table.settle();
    table.tell(Input::Restart(ModelId(0)));
    table.use_once(1);
    assert_eq!(table.stages(), ["cold", "ready"]);
    table.instead = vec![(0, Task::Start, Outcome::Failed("out of memory".to_owned()))];
    let request = table.ask(0);
    table.settle();
    assert_eq!(table.admitted.last(), Some(&(request, 0)));
    assert_eq!(table.stages(), ["ready", "asleep"]);
}

#[test]
fn who_is_thought_to_hold_nothing_leaves_if_nothing_else_makes_room() {
    let mut table = Table::of(&[40 * GIB, 70 * GIB], |_, rules| rules.can_restart = true);
    table.tell(Input::Restart(ModelId(0)));
    // Somebody else left while it started, so it seems to take nothing.
    let free = |bytes| (0, Task::Weigh, Outcome::Free(vec![bytes]));
    table.instead = vec![free(40 * GIB), free(40 * GIB)];
    table.use_once(0);
    let request = table.ask(1);
    table.settle();
    assert_eq!(table.admitted.last(), Some(&(request, 1)));
}

#[test]
fn a_wake_that_fails_is_no_more_tried_with_what_was_given_back_once() {
    let mut table = Table::of(&[40 * GIB, 70 * GIB], |_, rules| rules.need_bytes = None);
    let free = |bytes| (0, Task::Weigh, Outcome::Free(vec![bytes]));
    table.use_once(0);
    // Somebody else took most of it while it fell asleep.
    table.instead = vec![free(40 * GIB), free(45 * GIB), free(45 * GIB)];
    table.tell(Input::Sleep(ModelId(0)));
    table.settle();
    assert_eq!(table.policy.status(ModelId(0)).unwrap().held_bytes, Some(vec![5 * GIB]));
    table.use_once(1);
    table.instead = vec![(0, Task::Wake, Outcome::Failed("out of memory".to_owned()))];
    table.ask(0);
    assert_eq!(table.stages(), ["quarantined", "ready"]);
    table.pass(10_000);
    let request = table.ask(0);
    table.settle();
    assert_eq!(table.admitted.last(), Some(&(request, 0)));
    assert_eq!(table.stages(), ["ready", "asleep"]);
}

#[test]
fn who_ended_last_was_used_last() {
    let mut table = Table::of(&[30 * GIB, 30 * GIB, 40 * GIB], |_, rules| rules.idle_max = Some(seconds(5)));
    let long = table.ask(0);
    table.pass(1_000);
    let short = table.ask(1);
    table.pass(1_000);
    table.answer(short);
    table.pass(3_900);
    table.answer(long);
    table.ask(2);
    table.settle();
    assert_eq!(table.stages(), ["ready", "asleep", "ready"]);
    table.pass(4_500);
    assert_eq!(table.stage(0), "ready", "it was idle since it ended, not since it began");
    table.pass(1_000);
    assert_eq!(table.stage(0), "asleep");
}

#[test]
fn nobody_comes_for_requests_that_left_nor_for_a_call_that_was_taken_back() {
    let mut table = Table::of(&[70 * GIB; 2], |_, _| {});
    let running = table.ask(0);
    let waiting = table.ask(1);
    table.pass(10_000);
    assert_eq!(table.stage(0), "draining");
    table.answer(waiting);
    table.answer(running);
    table.settle();
    assert_eq!(table.stages(), ["asleep", "asleep"]);
    let running = table.ask(0);
    table.tell(Input::Wake(ModelId(1)));
    table.tell(Input::Sleep(ModelId(1)));
    table.pass(20_000);
    table.answer(running);
    table.pass(20_000);
    assert_eq!(table.stages(), ["ready", "asleep"]);
}

#[test]
fn who_was_called_while_there_is_no_room_comes_when_it_is_looked_for_again() {
    let mut table = Table::of(&[40 * GIB], |_, rules| rules.limits.room = seconds(1));
    table.instead = (0..500).map(|_| (0, Task::Weigh, Outcome::Free(vec![GIB]))).collect();
    table.ask(0);
    table.pass(1500);
    table.instead.clear();
    table.tell(Input::Wake(ModelId(0)));
    assert_eq!(table.stage(0), "asleep");
    table.pass(10_000);
    assert_eq!(table.stage(0), "ready");
}

#[test]
fn a_first_sleep_is_watched_until_no_more_comes_and_what_was_learnt_does_not_shrink_by_a_little() {
    let mut table = Table::of(&[70 * GIB], |_, rules| rules.need_bytes = None);
    table.use_once(0);
    let free = |bytes| (0, Task::Weigh, Outcome::Free(vec![bytes]));
    table.instead = vec![free(10 * GIB), free(40 * GIB)];
    table.tell(Input::Sleep(ModelId(0)));
    table.settle();
    assert_eq!(table.policy.status(ModelId(0)).unwrap().held_bytes, Some(vec![70 * GIB]));
    table.needs[0] = 70 * GIB - (100 << 20);
    table.use_once(0);
    table.tell(Input::Sleep(ModelId(0)));
    table.settle();
    assert_eq!(table.stage(0), "asleep");
    assert_eq!(table.policy.status(ModelId(0)).unwrap().held_bytes, Some(vec![70 * GIB]));
}

#[test]
fn a_sleep_that_gives_nothing_back_is_none() {
    let mut table = Table::of(&[40 * GIB], |_, rules| rules.can_restart = true);
    table.tell(Input::Restart(ModelId(0)));
    // Somebody else left while it started, so it seems to take nothing.
    let free = |bytes| (0, Task::Weigh, Outcome::Free(vec![bytes]));
    table.instead = vec![free(40 * GIB), free(40 * GIB)];
    table.use_once(0);
    // What it gives back comes late.
    table.instead = vec![free(40 * GIB), free(40 * GIB), free(40 * GIB)];
    table.tell(Input::Sleep(ModelId(0)));
    table.settle();
    assert_eq!(table.stage(0), "asleep");
    assert_eq!(table.policy.status(ModelId(0)).unwrap().held_bytes, Some(vec![40 * GIB]));
}

#[test]
fn what_somebody_else_left_behind_is_no_part_of_a_sleep() {
    let mut table = Table::of(&[30 * GIB, 40 * GIB], |_, rules| rules.can_restart = true);
    for model in [0, 1] {
        table.use_once(model);
        table.tell(Input::Sleep(ModelId(model)));
        table.settle();
        table.use_once(model);
    }
    assert_eq!(table.stages(), ["ready", "ready"]);
    table.late = vec![(0, Task::Sleep)];
    table.tell(Input::Sleep(ModelId(0)));
    table.tell(Input::Lost(ModelId(1)));
    // It keeps half of what it has, and the other has freed more than that.
    table.instead = vec![(0, Task::Weigh, Outcome::Free(vec![(10 + 40 + 15) * GIB])); 10_000];
    table.finish();
    assert_eq!(table.stages(), ["releasing memory", "stopping"]);
    table.pass(15_000);
    assert_eq!(shortfalls(&table).len(), 1);
    assert_eq!(table.stage(0), "cold");
}
