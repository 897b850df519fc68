//! The policy with faulty engines in virtual time: thousands of schedules, each from a seed.
//!
//! `POORWILL_SEED=17` runs one of them. `POORWILL_EFFORT` sets how many run.
#![allow(clippy::unwrap_used)]

mod simulated;

use std::ops::Range;
use std::time::Duration;

use poorwill_rotate::policy::Rules;
use poorwill_testkit::effort::{Effort, seed_of_this_run};
use simulated::traffic::{Client, Cost, Load, Traffic};
use simulated::{Faults, GIB, Simulation};

fn seeds(usual: u32) -> Range<u64> {
    match seed_of_this_run() {
        Some(seed) => seed..seed + 1,
        None => 0..Effort::of_this_run().cases(usual).into(),
    }
}

#[test]
fn honest_engines_serve_everybody() {
    let mut hibernations = 0;
    for seed in seeds(40) {
        let mut simulation = Simulation::new(seed, Faults::None);
        simulation.run(Duration::from_secs(300));
        simulation.settle();
        assert!(simulation.admitted() > 0, "seed {seed}");
        hibernations += simulation.hibernations;
    }
    assert!(hibernations > 0 || seed_of_this_run().is_some());
}

#[test]
fn each_fault_alone_is_survived() {
    for lie in Faults::EACH {
        for seed in seeds(15) {
            let mut simulation = Simulation::new(seed, lie);
            simulation.run(Duration::from_secs(300));
            simulation.settle();
        }
    }
}

#[test]
fn all_faults_together_are_survived() {
    for seed in seeds(150) {
        let mut simulation = Simulation::new(seed, Faults::All);
        simulation.run(Duration::from_secs(300));
        simulation.settle();
    }
}

#[test]
fn commands_other_programs_and_repeated_reports_are_survived() {
    for seed in seeds(100) {
        for faults in [Faults::None, Faults::All] {
            let mut simulation = Simulation::chaos(seed, faults);
            simulation.run(Duration::from_secs(200));
            simulation.settle();
        }
    }
}

#[test]
fn no_model_starves() {
    for seed in seeds(20) {
        let mut simulation = Simulation::busy(seed);
        simulation.run(Duration::from_secs(120));
        assert!(simulation.admitted() > 0, "seed {seed}");
    }
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
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
        assert!(steady.longest_wait() <= bound, "{:?}", steady.longest_wait());
    }
}

/// Turns by time alone, as the rotation began with: the baseline.
fn by_time(rules: &mut Rules) {
    (rules.turn_per_swap, rules.grace, rules.residence_min) = (0, Duration::ZERO, Duration::from_secs(2));
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
        assert!(traffic.longest_wait() <= bound, "{models} models: {:?}", traffic.longest_wait());
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
    assert!(traffic.longest_wait() <= 2 * turn, "{:?}", traffic.longest_wait());
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

/// What engines on an H200 took: with weights in host memory, and with weights that are read again.
fn on_an_h200(level: usize, need_gib: u64) -> Cost {
    let cost = [Cost::of_millis(168, 112, 302), Cost::of_millis(863, 119, 316)][level - 1];
    Cost { need_bytes: need_gib * GIB, ..cost }
}

/// Ten models of which one fits, and ten of which two or three fit.
fn ten_models(needs_gib: [u64; 10]) -> Vec<Cost> {
    needs_gib.iter().enumerate().map(|(nth, need)| on_an_h200(1 + nth % 2, *need)).collect()
}

const ALONE: [u64; 10] = [70; 10];
const MIXED: [u64; 10] = [38, 20, 70, 20, 38, 20, 38, 70, 20, 20];

/// Answers of half a second in the median, and 16 at a time.
fn load(per_second: f64) -> Load {
    Load { per_second, models: 10, median: millis(550), sigma: 1.0 }
}

/// Over several traces.
#[derive(Debug)]
struct Outcome {
    answered: u64,
    refused: u64,
    served: Duration,
    /// Of the time.
    in_swaps: f64,
    /// Half, and 99 in 100 of the requests waited at most for these.
    p50: Duration,
    p99: Duration,
    longest: Duration,
}

impl Outcome {
    /// Whether 99 in 100 requests were admitted before their time was over.
    fn keeps_up(&self) -> bool {
        self.refused * 99 <= self.answered
    }
}

fn outcome(needs_gib: [u64; 10], per_second: f64, run: Run, change: fn(&mut Rules)) -> Outcome {
    let costs = ten_models(needs_gib);
    let mut waits = Vec::new();
    let (mut answered, mut refused) = (0, 0);
    let (mut served, mut swapping) = (Duration::ZERO, Duration::ZERO);
    for seed in 0..run.traces {
        let trace = load(per_second).trace(seed, run.time);
        let mut traffic = Traffic::new(&costs, &[], trace, |_, rules| {
            // What waits is refused after `wait_max` only.
            (rules.running_max, rules.queue_max) = (16, 1 << 20);
            change(rules);
        });
        traffic.run(run.time);
        (answered, refused) = (answered + traffic.answered, refused + traffic.refused);
        (served, swapping) = (served + traffic.served, swapping + traffic.swapping);
        waits.extend(traffic.waits());
    }
    waits.sort_unstable();
    let time = run.time.as_secs_f64() * f64::from(u32::try_from(run.traces).unwrap());
    Outcome {
        answered,
        refused,
        served,
        in_swaps: swapping.as_secs_f64() / time,
        p50: waits[waits.len() / 2],
        p99: waits[waits.len() * 99 / 100],
        longest: waits[waits.len() - 1],
    }
}

#[derive(Debug, Clone, Copy)]
struct Run {
    traces: u64,
    time: Duration,
}

/// The rules as they are if nothing is set.
fn by_cost(_: &mut Rules) {}

#[test]
fn turns_by_cost_and_demand_serve_more_and_sooner() {
    let run = Run { traces: 4, time: Duration::from_secs(200) };
    for (needs, per_second, percent) in [(ALONE, 8.0, 110), (MIXED, 18.0, 115)] {
        let old = outcome(needs, per_second, run, by_time);
        let new = outcome(needs, per_second, run, by_cost);
        assert!(new.served * 100 >= old.served * percent, "{old:?} {new:?}");
        assert!(new.p50 * 10 < old.p50 * 9 && new.p99 < old.p99, "{old:?} {new:?}");
        assert!(new.in_swaps < old.in_swaps, "{old:?} {new:?}");
    }
}

/// The most requests a second with which it keeps up, to one in a hundred.
fn capacity(needs_gib: [u64; 10], run: Run, change: fn(&mut Rules)) -> f64 {
    let (mut low, mut high) = (1.0, 64.0);
    while high > low * 1.01 {
        let middle = f64::midpoint(low, high);
        if outcome(needs_gib, middle, run, change).keeps_up() { low = middle } else { high = middle }
    }
    low
}

#[test]
#[ignore = "takes minutes: prints the table of docs/benchmarks/rotation.md"]
fn table_of_turns() {
    let run = Run { traces: 20, time: Duration::from_secs(600) };
    println!("| models | rules | requests/s | tokens/s | in swaps | wait p50 | p99 | longest |");
    println!("|---|---|---|---|---|---|---|---|");
    for (name, needs) in [("one fits", ALONE), ("one to four fit", MIXED)] {
        let keeps_up = [by_time as fn(&mut Rules), by_cost].map(|change| capacity(needs, run, change));
        let row = |rules: &str, per_second: f64, change: fn(&mut Rules)| {
            let of = outcome(needs, per_second, run, change);
            let seconds = |time: Duration| time.as_secs_f64();
            println!(
                "| {name} | {rules} | {per_second:.2} | {:.0} | {:.3} | {:.1} | {:.1} | {:.1} |",
                seconds(of.served) * 100.0 / (20.0 * seconds(run.time)),
                of.in_swaps,
                seconds(of.p50),
                seconds(of.p99),
                seconds(of.longest)
            );
        };
        row("by time", keeps_up[0], by_time);
        row("by cost", keeps_up[0], by_cost);
        row("by cost", keeps_up[1], by_cost);
        row("by time", keeps_up[1], by_time);
    }
}

/// Twenty models of an H200: four are asked for all the time, and the others now and then. Asleep, each still holds
/// 1.2 GiB.
fn twenty_models(need_gib: u64, time: Duration, change: impl Fn(&mut Rules)) -> Traffic {
    let residue_bytes = GIB * 12 / 10;
    let cost = Cost { residue_bytes, ..on_an_h200(1, need_gib) };
    let client = |model: usize| {
        let gap = if model < 4 { 1 } else { 600 + 60 * u64::try_from(model).unwrap() };
        Client { model, gap: Duration::from_secs(gap), takes: millis(500) }
    };
    let clients: Vec<Client> = (0..20).map(client).collect();
    let change = |_: usize, rules: &mut Rules| {
        rules.wait_max = Duration::from_secs(36_000);
        change(rules);
    };
    let mut traffic = Traffic::new(&[cost; 20], &clients, Vec::new(), change).on(139 * GIB);
    traffic.run(time);
    traffic
}

fn hibernates(rules: &mut Rules) {
    rules.can_hibernate = true;
}

fn hibernates_after(rules: &mut Rules) {
    (rules.can_hibernate, rules.hibernate_after) = (true, Some(Duration::from_secs(60)));
}

fn hibernates_at_once(rules: &mut Rules) {
    (rules.can_hibernate, rules.hibernate_after) = (true, Some(Duration::ZERO));
}

#[test]
fn more_models_are_awake_and_more_is_answered_where_sleepers_hibernate() {
    let time = Duration::from_secs(3000);
    let [asleep, hibernating] =
        [|_: &mut Rules| {}, hibernates].map(|change| twenty_models(33, time, change));
    assert_eq!((asleep.most_awake, hibernating.most_awake), (3, 4));
    assert!(hibernating.swaps * 3 < asleep.swaps, "{} {}", hibernating.swaps, asleep.swaps);
    assert!(hibernating.answered * 10 > asleep.answered * 11, "{} {}", hibernating.answered, asleep.answered);
}

#[test]
#[ignore = "prints a table"]
fn table_of_hibernation() {
    println!(
        "| need of each | rules | awake at most | swaps | moving | answered | wait p50 | p99 | longest |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for need_gib in [15, 20, 28, 33, 40, 45, 60, 68, 115] {
        for (name, change) in [
            ("asleep", (|_| {}) as fn(&mut Rules)),
            ("hibernate where memory is short", hibernates),
            ("hibernate after 1 min", hibernates_after),
            ("hibernate at once", hibernates_at_once),
        ] {
            let traffic = twenty_models(need_gib, Duration::from_secs(3600), change);
            let waits = traffic.waits();
            let seconds = |share: usize| waits[(waits.len() - 1) * share / 100].as_secs_f64();
            println!(
                "| {need_gib} GiB | {name} | {} | {} | {:.3} | {} | {:.2} s | {:.2} s | {:.2} s |",
                traffic.most_awake,
                traffic.swaps,
                traffic.swapping.as_secs_f64() / 3600.0,
                traffic.answered,
                seconds(50),
                seconds(99),
                seconds(100)
            );
        }
    }
}
