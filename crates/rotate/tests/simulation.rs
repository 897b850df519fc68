//! The policy with faulty engines in virtual time: thousands of schedules, each from a seed.
//!
//! `POORWILL_SEED=17` runs one of them. `POORWILL_EFFORT` sets how many run.
#![allow(clippy::unwrap_used)]

mod simulated;

use std::ops::Range;
use std::time::Duration;

use poorwill_rotate::policy::Rules;
use poorwill_testkit::effort::{Effort, seed_of_this_run};
use simulated::steady::{Client, Cost, Steady};
use simulated::{Faults, Simulation};

fn seeds(usual: u32) -> Range<u64> {
    match seed_of_this_run() {
        Some(seed) => seed..seed + 1,
        None => 0..Effort::of_this_run().cases(usual).into(),
    }
}

#[test]
fn honest_engines_serve_everybody() {
    for seed in seeds(40) {
        let mut simulation = Simulation::new(seed, Faults::None);
        simulation.run(Duration::from_secs(300));
        simulation.settle();
        assert!(simulation.admitted() > 0, "seed {seed}");
    }
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
    let cost = Cost { wake: millis(150), sleep: millis(150) };
    for gap in [0, 50] {
        let no_grace = |_, rules: &mut Rules| rules.grace = Duration::ZERO;
        let mut steady = Steady::new(&[cost; 2], &one_client_each(2, millis(gap)), no_grace);
        steady.run(Duration::from_secs(40));
        assert!(steady.swaps > 12, "{} swaps without a grace", steady.swaps);
        let mut steady = Steady::new(&[cost; 2], &one_client_each(2, millis(gap)), |_, _| {});
        steady.run(Duration::from_secs(40));
        assert!(steady.swaps <= 6, "{} swaps with a gap of {gap} ms", steady.swaps);
        // A turn, its last request, and the swap with its measurements.
        let bound = Duration::from_secs(10) + millis(200) + millis(320);
        assert!(steady.longest_wait() <= bound, "{:?}", steady.longest_wait());
    }
}

/// For as long as given with swaps that take 1.6 s, regardless of that and then by it.
fn regardless_and_by_cost(models: usize, clients: &[Client], time: Duration) -> [Steady; 2] {
    let cost = Cost { wake: millis(1200), sleep: millis(400) };
    [0, Rules::on(Vec::new()).turn_per_swap].map(|per_swap| {
        let mut steady = Steady::new(&vec![cost; models], clients, |_, rules| rules.turn_per_swap = per_swap);
        steady.run(time);
        // The turns of the others, each with a last request and a swap.
        let turn = Duration::from_secs(10) + millis(900) + cost.wake + cost.sleep + millis(20);
        let bound = turn * u32::try_from(models - 1).unwrap();
        assert!(steady.longest_wait() <= bound, "{models} models: {:?}", steady.longest_wait());
        steady
    })
}

#[test]
fn models_stay_for_longer_if_their_swaps_take_longer() {
    for models in [3, 5] {
        let clients = one_client_each(models, millis(100));
        let [regardless, by_cost] = regardless_and_by_cost(models, &clients, Duration::from_secs(240));
        let shares = (regardless.swapping, by_cost.swapping);
        assert!(shares.1 * 5 < shares.0 * 4, "{models} models swap for {shares:?}");
        assert!(by_cost.answered > regardless.answered, "{} {}", by_cost.answered, regardless.answered);
    }
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
        let [regardless, by_cost] = regardless_and_by_cost(10, &clients, Duration::from_secs(600));
        let (few, many) = (regardless.answered, by_cost.answered);
        // With long gaps there is nothing to gain, and nothing is lost.
        assert!(many * 100 >= few * if gap == 500 { 115 } else { 100 }, "{few}, {many} with {gap} ms");
        assert!(by_cost.swapping <= regardless.swapping);
    }
}
