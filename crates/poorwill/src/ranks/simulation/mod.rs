//! The protocol in virtual time: thousands of schedules, each from a seed.
//!
//! Messages are lost, late, doubled and reordered. The decision's file fails now and then. Ranks and coordinators are stopped
//! and killed in every state; coordinators overlap. The state machines and the look at the decision are those of the real
//! thing. `POORWILL_SEED=17` runs one schedule. `POORWILL_EFFORT=long` runs 100 000.

mod register;
mod world;

use poorwill_testkit::effort::{Effort, seed_of_this_run};

use self::world::{Defect, Seen, World};

/// Twenty times as many in a long run.
const SCHEDULES: u32 = 5_000;

#[test]
fn no_schedule_splits_a_group() {
    let seeds = match seed_of_this_run() {
        Some(seed) => seed..seed + 1,
        None => 0..Effort::of_this_run().cases(SCHEDULES).into(),
    };
    let is_all = seeds.end - seeds.start >= u64::from(SCHEDULES);
    let mut seen = Seen::default();
    for seed in seeds {
        if let Err(violation) = World::new(seed, None).run(&mut seen) {
            panic!("POORWILL_SEED={seed}: {violation}");
        }
    }
    if is_all {
        seen.assert_complete();
    }
}

#[test]
fn broken_protocols_are_noticed() {
    for defect in Defect::ALL {
        let found =
            (0..2_000).find_map(|seed| World::new(seed, Some(defect)).run(&mut Seen::default()).err());
        let violation = found.unwrap_or_else(|| panic!("{defect:?} is not noticed"));
        assert!(defect.words().iter().any(|words| violation.contains(words)), "{defect:?}: {violation}");
    }
}
