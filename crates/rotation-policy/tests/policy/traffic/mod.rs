//! The policy under traffic, with correct engines in virtual time: how long requests wait, and how much is answered.
//! `benches/turns.rs` prints tables of the same.

mod compared;
mod machine;

use std::time::Duration;

use poorwill_rotation_policy::Rules;
use poorwill_testkit::effort::Effort;

use self::compared::{
    ALONE, CONFIGURED_MIB, MEASURED_MIB, MIXED, Run, by_cost, by_slices, by_time, fast, hibernates,
    long_answers, outcome, six_started, twenty_models,
};
use self::machine::{Client, Cost, Traffic};

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn longest_wait(traffic: &Traffic) -> Duration {
    traffic.waits().last().copied().unwrap_or_default()
}

/// One client of each model, with this gap between its requests.
fn one_client_each(models: usize, gap: Duration) -> Vec<Client> {
    (0..models).map(|model| Client { model, gap, takes: millis(200) }).collect()
}

#[test]
fn a_turn_outlasts_the_gap_between_two_requests() {
    let cost = Cost::of_millis(150, 150, 0);
    for gap in [0, 50] {
        let no_grace = |_, rules: &mut Rules| rules.grace = Duration::ZERO;
        let mut steady = Traffic::new(&[cost; 2], &one_client_each(2, millis(gap)), Vec::new(), no_grace);
        steady.run(Duration::from_secs(40));
        assert!(steady.swaps > 12, "{} swaps without a grace", steady.swaps);
        let mut steady = Traffic::new(&[cost; 2], &one_client_each(2, millis(gap)), Vec::new(), |_, _| {});
        steady.run(Duration::from_secs(40));
        assert!(steady.swaps <= 6, "{} swaps with a gap of {gap} ms", steady.swaps);
        // A turn, its last request, and the swap with its measurements.
        let bound = Duration::from_secs(10) + millis(200) + millis(320);
        assert!(longest_wait(&steady) <= bound, "{:?}", longest_wait(&steady));
    }
}

/// For as long as given with swaps that take 1.6 s, by time and then by cost and demand.
fn by_time_and_by_cost(models: usize, clients: &[Client], time: Duration) -> [Traffic; 2] {
    let cost = Cost::of_millis(1200, 400, 0);
    [by_time, |_: &mut Rules| {}].map(|change| {
        let mut traffic = Traffic::new(&vec![cost; models], clients, Vec::new(), |_, rules| change(rules));
        traffic.run(time);
        // The turns of the others, each with a last request and a swap.
        let turn = Duration::from_secs(10) + millis(900) + cost.wake + cost.sleep + millis(20);
        let bound = turn * u32::try_from(models - 1).unwrap();
        assert!(longest_wait(&traffic) <= bound, "{models} models: {:?}", longest_wait(&traffic));
        traffic
    })
}

#[test]
fn models_stay_for_longer_if_their_swaps_take_longer() {
    for models in [3, 5] {
        let clients = one_client_each(models, millis(100));
        let [by_time, by_cost] = by_time_and_by_cost(models, &clients, Duration::from_secs(240));
        let shares = (by_time.swapping, by_cost.swapping);
        assert!(shares.1 * 5 < shares.0 * 4, "{models} models swap for {shares:?}");
        assert!(by_cost.answered > by_time.answered, "{} {}", by_cost.answered, by_time.answered);
    }
}

#[test]
fn a_flood_of_one_model_takes_no_more_than_a_turn_from_the_others() {
    let (few, flood) = (Client { model: 1, gap: millis(300), takes: millis(200) }, 200);
    let gaps = (0..flood).map(|nth| Client { model: 0, gap: millis(nth), takes: millis(900) });
    let clients: Vec<Client> = gaps.chain([few, Client { model: 2, ..few }]).collect();
    let cost = Cost::of_millis(168, 112, 302);
    let mut traffic = Traffic::new(&[cost; 3], &clients, Vec::new(), |_, _| {});
    traffic.run(Duration::from_secs(120));
    let turn = Duration::from_secs(10) + millis(900) + millis(168 + 112 + 302 + 20);
    assert!(longest_wait(&traffic) <= 2 * turn, "{:?}", longest_wait(&traffic));
    assert!(traffic.swaps >= 12, "{} swaps", traffic.swaps);
}

#[test]
fn models_of_unequal_demand_are_served_more_if_turns_follow_the_cost_of_swaps() {
    for gap in [500, 2000, 8000] {
        let clients_of = |model: u64| {
            let client = move |nth| Client {
                model: usize::try_from(model).unwrap(),
                gap: millis(gap + 37 * nth + 13 * model),
                takes: millis(900),
            };
            (0..10 / (model + 1)).map(client)
        };
        let clients: Vec<Client> = (0..10).flat_map(clients_of).collect();
        let [by_time, by_cost] = by_time_and_by_cost(10, &clients, Duration::from_secs(600));
        let (few, many) = (by_time.answered, by_cost.answered);
        assert!(many * 100 >= few * if gap == 500 { 145 } else { 120 }, "{few}, {many} with {gap} ms");
    }
}

#[test]
fn turns_by_cost_and_demand_serve_more_and_sooner() {
    let run = Run { traces: Effort::of_this_run().cases(4).into(), time: Duration::from_secs(200) };
    for (needs, per_second, percent) in [(ALONE, 8.0, 110), (MIXED, 18.0, 115)] {
        let old = outcome(needs, per_second, run, by_time);
        let new = outcome(needs, per_second, run, by_cost);
        assert!(new.served * 100 >= old.served * percent, "{old:?} {new:?}");
        assert!(new.wait(50) * 10 < old.wait(50) * 9 && new.wait(99) < old.wait(99), "{old:?} {new:?}");
        assert!(new.answered > old.answered && new.refused <= old.refused, "{old:?} {new:?}");
        assert!(new.in_swaps < old.in_swaps, "{old:?} {new:?}");
    }
}

#[test]
fn more_models_are_awake_and_more_is_answered_where_sleepers_hibernate() {
    let time = Duration::from_secs(3000);
    let [asleep, hibernating] =
        [|_: &mut Rules| {}, hibernates].map(|change| twenty_models(33, time, change));
    assert_eq!((asleep.most_awake, hibernating.most_awake), (3, 4));
    assert!(hibernating.swaps * 5 < asleep.swaps * 2, "{} {}", hibernating.swaps, asleep.swaps);
    assert!(hibernating.answered * 10 > asleep.answered * 11, "{} {}", hibernating.answered, asleep.answered);
}

#[test]
fn swaps_for_which_several_models_queue_serve_more_requests() {
    let time = Duration::from_secs(1000);
    for seed in 0..Effort::of_this_run().cases(3).into() {
        let traffic = six_started(seed, time, MEASURED_MIB, |_| {});
        let waits = traffic.waits();
        let p99 = waits[(waits.len() - 1) * 99 / 100];
        // Idle ones that left at once came to 0.95 of the time, with 10.9 s.
        assert!(traffic.coming < time.mul_f64(0.86), "seed {seed}: {:?} in starts", traffic.coming);
        assert!(p99 < millis(11_500), "seed {seed}: {p99:?}");
        assert_eq!(traffic.refused, 0);
    }
    // Needs as configured leave no memory for the small one, so its starts are added.
    let configured = six_started(0, time, CONFIGURED_MIB, |_| {});
    assert!(configured.coming < time.mul_f64(0.95), "{:?} in starts", configured.coming);
}

#[test]
fn long_answers_wait_less_where_turns_are_cut() {
    let run = Run { traces: Effort::of_this_run().cases(2).into(), time: Duration::from_secs(600) };
    let [whole, cut] = [by_cost, by_slices].map(|change| long_answers(0.1, run, change));
    assert!(cut.wait(50) * 4 < whole.wait(50) && cut.wait(99) * 4 < whole.wait(99), "{whole:?} {cut:?}");
    assert!(cut.served * 10 >= whole.served * 11 && cut.answered > whole.answered, "{whole:?} {cut:?}");
    assert!((cut.aborted, cut.refused) == (0, 0) && whole.refused > 0, "{whole:?} {cut:?}");
    // Nine others with slices of nine swaps.
    assert!(cut.largest_gap < Duration::from_secs(14) && cut.in_swaps < 0.1, "{whole:?} {cut:?}");
}

#[test]
fn answers_go_on_where_more_wait_than_can_be_served() {
    let run = Run { traces: 1, time: Duration::from_secs(300) };
    let cut = long_answers(2.0, run, by_slices);
    assert!(cut.refused > 0 && cut.aborted == 0, "{cut:?}");
    // A quarter of `wait_max`, and a turn of each other one.
    assert!(cut.largest_gap < Duration::from_secs(45), "{cut:?}");
}

#[test]
fn two_models_with_endless_answers_alternate() {
    let clients: Vec<Client> = (0..8)
        .map(|nth| Client { model: nth % 2, gap: Duration::ZERO, takes: Duration::from_secs(60) })
        .collect();
    let slices = |_: usize, rules: &mut Rules| by_slices(rules);
    let mut traffic = Traffic::new(&[fast(); 2], &clients, Vec::new(), slices).of_long_answers();
    traffic.run(Duration::from_secs(300));
    assert!(traffic.largest_gap <= Duration::from_secs(3), "{:?}", traffic.largest_gap);
    assert!(traffic.swapping * 10 <= Duration::from_secs(300), "{:?}", traffic.swapping);
    // Each has almost half of the time.
    assert!(
        traffic.answered >= 12 && traffic.aborted == Some(0),
        "{} {:?}",
        traffic.answered,
        traffic.aborted
    );
}
