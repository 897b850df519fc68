//! What the policy does in a few situations, step by step, with engines that do at once what they are told unless a
//! test says otherwise.
#![allow(clippy::unwrap_used)]

mod table;

use poorwill_rotate::policy::{Event, Gpu, Input, ModelId, Outcome, Refusal, RequestId, Rules, Task};

use table::{CARD, GIB, Table, seconds};

#[test]
fn a_model_is_proved_before_it_gets_requests() {
    let mut table = Table::of(&[40 * GIB], |_, _| {});
    let request = table.ask(0);
    let expected = [Task::Weigh, Task::Wake, Task::Confirm, Task::Canary, Task::Weigh].map(|task| (0, task));
    assert_eq!(table.tasks, expected);
    assert_eq!(table.admitted, [(request, 0)]);
}

#[test]
fn requests_in_turns_become_requests_in_rows() {
    // Each takes all of the card, and every request two seconds.
    let mut table = Table::of(&[70 * GIB; 3], |_, rules| rules.turn_max = seconds(30));
    let asked: Vec<u64> = (0..9).map(|nth| table.ask(nth % 3)).collect();
    let mut done = 0;
    while done < 9 {
        table.settle();
        assert!(table.admitted.len() > done, "nothing goes on: {:?}", table.stages());
        for (request, _) in table.admitted.clone().split_off(done) {
            table.pass(2000);
            table.answer(request);
            done += 1;
        }
    }
    let models: Vec<usize> = table.admitted.iter().map(|(_, model)| *model).collect();
    assert_eq!(models, [0, 0, 0, 1, 1, 1, 2, 2, 2]);
    let mut served: Vec<u64> = table.admitted.iter().map(|(request, _)| *request).collect();
    served.sort_unstable();
    assert_eq!(served, asked);
}

#[test]
fn a_turn_ends_when_another_has_waited_for_long_enough() {
    let mut table = Table::of(&[70 * GIB; 2], |_, rules| rules.turn_max = seconds(10));
    let mut running = table.ask(0);
    let other = table.ask(1);
    // Somebody always asks for the first before the request before has been answered.
    for _ in 0..9 {
        table.pass(1000);
        let next = table.ask(0);
        table.answer(running);
        running = next;
        assert_eq!(table.stages(), ["ready", "asleep"]);
    }
    table.pass(1500);
    assert_eq!(table.stage(0), "draining");
    let late = table.ask(0);
    table.answer(running);
    table.settle();
    assert_eq!(table.stages(), ["asleep", "ready"]);
    assert_eq!(table.admitted.last(), Some(&(other, 1)));
    // What came meanwhile is not forgotten.
    table.answer(other);
    table.settle();
    assert_eq!(table.admitted.last(), Some(&(late, 0)));
}

#[test]
fn nobody_leaves_right_after_it_came() {
    let mut table = Table::of(&[70 * GIB; 2], |_, rules| rules.residence_min = seconds(5));
    let first = table.ask(0);
    table.answer(first);
    let second = table.ask(1);
    table.pass(4900);
    assert_eq!(table.stages(), ["ready", "asleep"]);
    table.pass(200);
    assert_eq!(table.admitted, [(first, 0), (second, 1)]);
}

#[test]
fn a_turn_is_no_shorter_than_whoever_came_stays() {
    let mut table = Table::of(&[70 * GIB; 2], |_, rules| {
        (rules.residence_min, rules.turn_max) = (seconds(5), seconds(2));
    });
    // It is busy all the time, and the other has waited for a turn and more.
    let first = table.ask(0);
    table.ask(1);
    table.pass(4900);
    assert_eq!(table.stages(), ["ready", "asleep"]);
    table.pass(200);
    assert_eq!(table.stages(), ["draining", "asleep"]);
    table.answer(first);
    table.settle();
    assert_eq!(table.stages(), ["asleep", "ready"]);
}

#[test]
fn failures_in_a_row_are_left_alone_for_longer_and_longer_up_to_a_limit() {
    let rules = Rules { pause_min: seconds(5), pause_max: seconds(60), ..Rules::on(vec![Gpu(0)]) };
    let pauses = [1, 2, 3, 4, 5, 6, 100].map(|failures| rules.pause(failures).as_secs());
    assert_eq!(pauses, [5, 10, 20, 40, 60, 60, 60]);
}

#[test]
fn those_that_fit_together_are_awake_together_and_the_one_that_was_not_used_for_longest_leaves() {
    let mut table = Table::of(&[30 * GIB, 30 * GIB, 15 * GIB, 25 * GIB], |_, _| {});
    for model in [0, 1, 2] {
        let request = table.ask(model);
        table.pass(100);
        table.answer(request);
    }
    assert_eq!(table.stages(), ["ready", "ready", "ready", "asleep"]);
    let again = table.ask(0);
    table.answer(again);
    // 5 GiB are free, and it takes 25: the second was not used for longest, and suffices.
    table.ask(3);
    table.settle();
    assert_eq!(table.stages(), ["ready", "asleep", "ready", "ready"]);
}

#[test]
fn nobody_leaves_who_need_not() {
    let mut table = Table::of(&[10 * GIB, 60 * GIB, 50 * GIB], |_, _| {});
    for model in [0, 1] {
        let request = table.ask(model);
        table.pass(100);
        table.answer(request);
    }
    // The first was not used for longer, and would not suffice; without the second it need not leave.
    table.ask(2);
    table.settle();
    assert_eq!(table.stages(), ["ready", "asleep", "ready"]);
}

#[test]
fn pinned_models_stay_and_the_others_are_told() {
    let mut table = Table::of(&[70 * GIB; 2], |model, rules| {
        rules.is_pinned = model == 0;
        rules.idle_max = Some(seconds(1));
    });
    let first = table.ask(0);
    table.answer(first);
    table.pass(5000);
    let second = table.ask(1);
    assert!(matches!(table.refused[&second], Refusal::NoRoom { .. }));
    assert_eq!(table.stages(), ["ready", "asleep"]);
    table.tell(Input::Pin(ModelId(0), false));
    table.pass(10_000);
    assert_eq!(table.stages(), ["asleep", "asleep"]);
    let third = table.ask(1);
    assert_eq!(table.admitted.last(), Some(&(third, 1)));
}

#[test]
fn queues_end_somewhere_and_so_does_waiting() {
    let mut table = Table::of(&[70 * GIB; 2], |_, rules| {
        (rules.queue_max, rules.wait_max, rules.turn_max) = (2, seconds(20), seconds(3600));
    });
    table.ask(0);
    let waiting: Vec<u64> = (0..3).map(|_| table.ask(1)).collect();
    assert_eq!(table.refused.get(&waiting[2]), Some(&Refusal::QueueFull));
    table.pass(19_999);
    assert_eq!(table.refused.len(), 1);
    table.pass(1);
    assert_eq!(table.refused.get(&waiting[0]), Some(&Refusal::WaitedTooLong));
    assert_eq!(table.refused.get(&waiting[1]), Some(&Refusal::WaitedTooLong));
    assert_eq!(table.policy.status(ModelId(1)).unwrap().queued, 0);
}

#[test]
fn requests_that_left_are_nobodys_any_more() {
    let mut table = Table::of(&[70 * GIB; 2], |_, rules| rules.running_max = 1);
    let running = table.ask(0);
    let (gone, kept) = (table.ask(0), table.ask(0));
    table.answer(gone);
    table.answer(gone);
    table.answer(99);
    table.answer(running);
    assert_eq!(table.admitted, [(running, 0), (kept, 0)]);
}

#[test]
fn gibberish_is_answered_by_one_restart_and_then_by_being_left_alone_for_longer_and_longer() {
    let mut table = Table::of(&[40 * GIB], |_, rules| rules.can_restart = true);
    let wrong = || (0, Task::Canary, Outcome::Canary(Err("asdf".to_owned())));
    table.instead = vec![wrong()];
    let request = table.ask(0);
    assert_eq!(table.admitted, [(request, 0)], "one restart is enough here");
    assert!(table.tasks.contains(&(0, Task::Stop)) && table.tasks.contains(&(0, Task::Start)));
    table.answer(request);
    let mut pauses = Vec::new();
    for _ in 0..3 {
        table.tell(Input::Sleep(ModelId(0)));
        table.settle();
        assert_eq!(table.stage(0), "asleep");
        table.instead = vec![wrong(), wrong()];
        let request = table.ask(0);
        let Refusal::Quarantined { until } = table.refused[&request] else { panic!("{:?}", table.refused) };
        pauses.push(until.since(table.now));
        // Meanwhile it is refused at once.
        let other = table.ask(0);
        assert_eq!(table.refused[&other], Refusal::Quarantined { until });
        table.now = until;
        table.tell(Input::Tick);
    }
    assert!(pauses.windows(2).all(|pair| pair[1] > pair[0]), "{pauses:?}");
    let request = table.ask(0);
    assert_eq!(table.admitted.last(), Some(&(request, 0)));
    assert_eq!(table.policy.status(ModelId(0)).unwrap().failures, 0);
}

#[test]
fn who_says_that_it_sleeps_and_holds_its_memory_is_stopped() {
    let mut table = Table::of(&[70 * GIB; 2], |_, rules| rules.can_restart = true);
    let first = table.ask(0);
    table.answer(first);
    let kept = Outcome::Free(vec![CARD - 70 * GIB]);
    // From the second measurement on: before its sleep, and then as long as it is waited for.
    table.instead = (0..700).map(|_| (0, Task::Weigh, kept.clone())).collect();
    let second = table.ask(1);
    table.pass(20_000);
    let shortfall = Event::Shortfall { gpu: Gpu(0), expected_bytes: 70 * GIB / 4 * 3, freed_bytes: 0 };
    assert!(table.events.contains(&(0, shortfall)), "{:?}", table.events);
    assert!(table.tasks.contains(&(0, Task::Stop)));
    assert_eq!(table.stage(0), "cold");
    assert_eq!(table.admitted.last(), Some(&(second, 1)));
}

#[test]
fn what_is_measured_decides_and_not_what_is_thought() {
    let mut table = Table::of(&[40 * GIB], |_, rules| rules.limits.room = seconds(1));
    // Somebody else has the card.
    table.instead = (0..500).map(|_| (0, Task::Weigh, Outcome::Free(vec![GIB]))).collect();
    let request = table.ask(0);
    table.pass(1500);
    assert!(matches!(table.refused[&request], Refusal::NoRoom { .. }));
    assert!(!table.tasks.contains(&(0, Task::Wake)));
    table.instead.clear();
    table.pass(10_000);
    let request = table.ask(0);
    assert_eq!(table.admitted, [(request, 0)]);
}

#[test]
fn models_on_other_gpus_do_not_wait_for_one_another() {
    let mut table = Table::of(&[70 * GIB; 3], |model, rules| {
        rules.gpus = [vec![Gpu(0)], vec![Gpu(1)], vec![Gpu(0), Gpu(1)]][model].clone();
    });
    let (one, other) = (table.ask(0), table.ask(1));
    assert_eq!(table.admitted, [(one, 0), (other, 1)]);
    let both = table.ask(2);
    table.answer(one);
    table.pass(60_000);
    assert_eq!(table.stages(), ["asleep", "draining", "asleep"]);
    table.answer(other);
    table.settle();
    assert_eq!(table.admitted.last(), Some(&(both, 2)));
    assert_eq!(table.stages(), ["asleep", "asleep", "ready"]);
}

#[test]
fn a_shutdown_lets_running_requests_end_and_nothing_else_begin() {
    let mut table = Table::of(&[70 * GIB; 2], |_, _| {});
    let running = table.ask(0);
    let waiting = table.ask(1);
    table.tell(Input::Shutdown);
    assert_eq!(table.refused[&waiting], Refusal::ShuttingDown);
    let late = table.ask(0);
    assert_eq!(table.refused[&late], Refusal::ShuttingDown);
    let before = table.tasks.len();
    table.answer(running);
    table.pass(3_600_000);
    assert_eq!(table.tasks.len(), before);
}

#[test]
fn a_restart_that_is_asked_for_drains_and_comes_back() {
    let mut table = Table::of(&[70 * GIB], |_, rules| rules.can_restart = true);
    let running = table.ask(0);
    table.tell(Input::Restart(ModelId(0)));
    assert_eq!(table.stage(0), "draining");
    table.tasks.clear();
    table.answer(running);
    assert_eq!(table.stage(0), "ready");
    assert_eq!(table.tasks[..3], [(0, Task::Stop), (0, Task::Weigh), (0, Task::Start)]);
}

#[test]
fn what_nobody_knows_is_nobodys() {
    let mut table = Table::of(&[70 * GIB], |_, _| {});
    for input in [Input::Wake(ModelId(7)), Input::Restart(ModelId(0)), Input::Lost(ModelId(9))] {
        table.tell(input);
    }
    let request = RequestId(5);
    assert!(table.policy.step(table.now, Input::Arrived { request, model: ModelId(3) }).is_empty());
    assert_eq!(table.stages(), ["asleep"]);
    assert_eq!(table.policy.status(ModelId(1)), None);
}
