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
