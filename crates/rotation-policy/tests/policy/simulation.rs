//! The policy with faulty engines in virtual time: thousands of schedules, each from a seed.
//!
//! `POORWILL_SEED=17` runs one of them. `POORWILL_EFFORT` sets how many run.

use std::ops::Range;
use std::time::Duration;

use super::simulated::{Faults, Simulation};
use poorwill_testkit::effort::{Effort, seed_of_this_run};

fn seeds(usual: u32) -> Range<u64> {
    match seed_of_this_run() {
        Some(seed) => seed..seed + 1,
        None => 0..Effort::of_this_run().cases(usual).into(),
    }
}

#[test]
fn honest_engines_serve_everybody() {
    let (mut hibernations, mut trials, mut cuts) = (0, 0, 0);
    for seed in seeds(40) {
        let mut simulation = Simulation::new(seed, Faults::None);
        simulation.run(Duration::from_secs(300));
        simulation.settle();
        assert!(simulation.admitted() > 0, "seed {seed}");
        hibernations += simulation.hibernations;
        trials += simulation.trials;
        cuts += simulation.cuts;
    }
    assert!(hibernations > 0 && trials > 0 && cuts > 0 || seed_of_this_run().is_some());
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
fn control_calls_that_fail_restart_no_healthy_engine() {
    let mut flaky_calls = 0;
    for seed in seeds(15) {
        let mut simulation = Simulation::new(seed, Faults::Flaky);
        simulation.run(Duration::from_secs(600));
        flaky_calls += simulation.flaky_calls;
    }
    // A hundred with the usual effort.
    assert!(
        flaky_calls >= 7 * seeds(15).count() as u64 || seed_of_this_run().is_some(),
        "only {flaky_calls}"
    );
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
