//! The policy against engines that lie, in virtual time: thousands of schedules, each by a seed.
//!
//! `POORWILL_SEED=17` tries one of them alone; how many there are goes by `POORWILL_EFFORT`.
#![allow(clippy::unwrap_used)]

mod world;

use std::ops::Range;
use std::time::Duration;

use poorwill_testkit::effort::{Effort, seed_of_this_run};
use world::{Lies, World};

fn seeds(usual: u32) -> Range<u64> {
    match seed_of_this_run() {
        Some(seed) => seed..seed + 1,
        None => 0..Effort::of_this_run().cases(usual).into(),
    }
}

#[test]
fn honest_engines_serve_everybody() {
    for seed in seeds(40) {
        let mut world = World::new(seed, Lies::None);
        world.run(Duration::from_secs(300));
        world.settle();
        assert!(world.admitted() > 0, "seed {seed}");
    }
}

#[test]
fn each_lie_alone_is_survived() {
    for lie in Lies::EACH {
        for seed in seeds(15) {
            let mut world = World::new(seed, lie);
            world.run(Duration::from_secs(300));
            world.settle();
        }
    }
}

#[test]
fn all_lies_together_are_survived() {
    for seed in seeds(150) {
        let mut world = World::new(seed, Lies::All);
        world.run(Duration::from_secs(300));
        world.settle();
    }
}

#[test]
fn commands_outsiders_and_what_is_nobodys_are_survived() {
    for seed in seeds(100) {
        for lies in [Lies::None, Lies::All] {
            let mut world = World::wild(seed, lies);
            world.run(Duration::from_secs(200));
            world.settle();
        }
    }
}

#[test]
fn nobody_is_passed_over_for_ever() {
    for seed in seeds(20) {
        let mut world = World::busy(seed);
        world.run(Duration::from_secs(120));
        assert!(world.admitted() > 0, "seed {seed}");
    }
}
