//! A day of a fleet in virtual time, under three policies, and how long a decision takes.
//!
//! Arguments: `day`, or `day NODES MODELS REQUESTS_PER_SECOND`; `rules NODES MODELS REQUESTS_PER_SECOND`, which runs days
//! without one rule each; or `decide`.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "a benchmark's figures are small"
)]

#[path = "../tests/simulated/mod.rs"]
mod simulated;

use std::process::ExitCode;
use std::time::Instant;

use poorwill_fleet::policy::Rules;
use poorwill_fleet::records::Rate;
use simulated::{Figures, Fleet, LeastRecent, Placing, Simulation, Size, Static, World};

const SEED: u64 = 1;

fn size(nodes: usize, models: usize, per_second: f64) -> Size {
    Size { nodes, gpus: 2, models, copies: 5, per_second, hours_before: 2, hours: 24 }
}

fn main() -> ExitCode {
    // Cargo adds `--bench`.
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["day"] => day(size(1_000, 10_000, 100.0)),
        [what @ ("day" | "rules"), nodes, models, per_second] => {
            let sizes = (nodes.parse(), models.parse(), per_second.parse());
            let (Ok(nodes), Ok(models), Ok(per_second)) = sizes else {
                eprintln!("nodes, models and requests per second are numbers");
                return ExitCode::from(2);
            };
            let size = size(nodes, models, per_second);
            if what == "day" { day(size) } else { rules(size) }
        }
        ["decide"] => {
            for (nodes, models, copies) in
                [(50, 500, 5), (50, 500, 50), (1_000, 10_000, 5), (1_000, 10_000, 20)]
            {
                decisions(Size { copies, ..size(nodes, models, 100.0) });
            }
        }
        _ => println!("name what to do: `day`, `day NODES MODELS REQUESTS_PER_SECOND`, or `decide`"),
    }
    ExitCode::SUCCESS
}

fn day(size: Size) {
    println!("{size:?}\n{}", Figures::HEADER);
    let fleet: Box<dyn Placing> = Box::new(Fleet::new(&World::new(size, SEED)));
    for placing in [fleet, Box::new(Static), Box::new(LeastRecent)] {
        let began = Instant::now();
        let figures = Simulation::new(size, SEED, placing).run();
        println!("{}", figures.row());
        eprintln!("{:.0} s", began.elapsed().as_secs_f64());
    }
}

/// A day with all rules, and days without one of them.
fn rules(size: Size) {
    let never = Rate::from_micros(u64::MAX);
    for (without, rules) in [
        ("nothing", Rules::default()),
        ("hot copies by demand", Rules { hot_rate_min: never, ..Rules::default() }),
        ("a least rate of hot copies", Rules { hot_rate_min: Rate::default(), ..Rules::default() }),
        ("more than one hot copy", Rules { copies_max: 1, ..Rules::default() }),
        ("a second placement", Rules { copies_min: 1, ..Rules::default() }),
        ("paying back", Rules { pay_back_ms: u64::MAX, ..Rules::default() }),
        ("keeping hot", Rules { keep_min_ms: 0, ..Rules::default() }),
        ("keeping spare ones", Rules { spare_keep_ms: 0, ..Rules::default() }),
        ("giving up spare ones", Rules { spare_keep_ms: u64::MAX, ..Rules::default() }),
    ] {
        let placing = Box::new(Fleet::with(&World::new(size, SEED), rules));
        println!("{} without {without}", Simulation::new(size, SEED, placing).run().row());
    }
}

/// The first decision, which places everything, and ten that find more hot copies wanted than may come in a minute. With
/// the reading of what changed.
fn decisions(size: Size) {
    let mut world = World::new(size, SEED);
    let mut fleet = Fleet::new(&world);
    let mut took_ms = Vec::new();
    for round in 0..11 {
        let began = Instant::now();
        let goals = fleet.goals(&world);
        took_ms.push(began.elapsed().as_secs_f64() * 1e3);
        if round == 0 {
            let asked = (0..world.copies.len()).step_by(2);
            asked.for_each(|copy| (0..copy % 50).for_each(|_| world.asked(copy)));
        }
        for (copy, goal) in goals {
            world.set_goal(copy, goal);
        }
        world.now += 60_000;
    }
    let first = took_ms.remove(0);
    took_ms.sort_by(f64::total_cmp);
    println!(
        "{} nodes, {} models, each on {}: the first {first:.0} ms, later ones {:.1} to {:.1} ms",
        size.nodes, size.models, size.copies, took_ms[0], took_ms[9],
    );
}
