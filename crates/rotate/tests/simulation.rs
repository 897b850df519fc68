//! The policy against engines that lie, in virtual time: thousands of schedules, each by a seed.
//!
//! `POORWILL_SEED=17` tries one of them alone, `POORWILL_SEEDS=5000` so many of each test.
#![allow(clippy::unwrap_used)]

mod world;

use std::ops::Range;
use std::time::Duration;

use world::{Lies, World};

fn seeds(usual: u64) -> Range<u64> {
    let number = |name| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
    match (number("POORWILL_SEED"), number("POORWILL_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, count) => 0..count.unwrap_or(usual),
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
