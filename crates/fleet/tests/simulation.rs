//! A few hours of a small fleet under each policy. `benches/fleet.rs` prints a day of a large one.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "a test's figures are small"
)]

use crate::simulated::{Figures, Fleet, LeastRecent, Placing, Simulation, Size, Static, World};
use poorwill_testkit::effort::{Effort, seed_of_this_run};

const SMALL: Size =
    Size { nodes: 30, gpus: 2, models: 300, copies: 5, per_second: 6.0, hours_before: 1, hours: 2 };

fn run(seed: u64, placing: impl Fn(&World) -> Box<dyn Placing>) -> Figures {
    let placing = placing(&World::new(SMALL, seed));
    Simulation::new(SMALL, seed, placing).run()
}

fn seeds() -> std::ops::Range<u64> {
    match seed_of_this_run() {
        Some(seed) => seed..seed + 1,
        None => 0..Effort::of_this_run().cases(1).into(),
    }
}

#[test]
fn a_fleet_keeps_more_requests_from_cold_starts_than_the_others() {
    for seed in seeds() {
        let fleet = run(seed, |world| Box::new(Fleet::new(world)));
        let others = [run(seed, |_| Box::new(Static)), run(seed, |_| Box::new(LeastRecent))];
        for figures in others.iter().chain([&fleet]) {
            println!("seed {seed}\n{}\n{}", Figures::HEADER, figures.row());
            assert!(figures.answered() > 10_000, "seed {seed}: {figures:?}");
        }
        for other in &others {
            let waited = other.counts.starts_waited;
            assert!(fleet.counts.starts_waited < waited, "seed {seed}: {}", other.name);
            assert!(fleet.refused <= other.refused, "seed {seed}: {}", other.name);
        }
        // A day with hundreds of nodes has fewer of both.
        assert!(fleet.wait_ms(10) <= others[0].wait_ms(10), "seed {seed}");
        assert!(fleet.wait_ms(500) == 0, "seed {seed}: most requests find a hot copy");
    }
}
