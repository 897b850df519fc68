//! The model of PyTorch's allocator against what was measured on a GPU, and Poorwill's pool beside it.
#![allow(clippy::unwrap_used)]

use poorwill_bench::churn::{Load, Step};
use poorwill_replay::trace::{Block, TraceBuilder};
use poorwill_replay::{Card, Run, Trace, replay};

/// As `docs/benchmarks/churn.md` has it: PyTorch 2.11 on an H200, seed 0, in hundredths of a GiB. *Held* is behind
/// everything that can go back.
const MEASURED: [(&str, Load, u64, u64); 8] = [
    ("pytorch", Load::Moe, 2853, 2696),
    ("pytorch:max_split_size_mb:20", Load::Moe, 9628, 2167),
    ("cumem", Load::Moe, 2856, 2856),
    ("cumem:max_split_size_mb:20", Load::Moe, 9628, 2167),
    ("pytorch", Load::Dense, 3146, 3145),
    ("pytorch:max_split_size_mb:20", Load::Dense, 3033, 2939),
    ("cumem", Load::Dense, 3146, 3146),
    ("cumem:max_split_size_mb:20", Load::Dense, 3033, 2939),
];

const CARD: Card = Card { total_bytes: 139 << 30, taken_bytes: 1 << 30, budget_bytes: None };

fn trace(load: Load) -> Trace {
    let mut trace = TraceBuilder::new(load.name());
    let mut next = 0;
    for step in load.steps(0) {
        match step {
            Step::Alloc { bytes } => {
                trace.alloc(next, Block { bytes, stream: 0, pool: 0, stack: 0 }).unwrap();
                next += 1;
            }
            Step::Free { block } => trace.free(u64::try_from(block).unwrap()).unwrap(),
        }
    }
    trace.finish(None)
}

fn run(load: Load, setup: &str) -> Run {
    replay(&trace(load), &setup.parse().unwrap(), CARD).unwrap()
}

fn hundredths(bytes: u64) -> u64 {
    bytes * 100 / (1 << 30)
}

#[test]
fn the_model_maps_what_was_measured() {
    for (setup, load, peak, held) in MEASURED {
        let run = run(load, setup);
        let (has_peak, has_held) = (hundredths(run.peak.mapped_bytes), hundredths(run.held_bytes));
        println!("{setup} {load}: peak {has_peak} of {peak}, held {has_held} of {held}");
        let differs = |has: u64, of: u64, percent: u64| has.abs_diff(of) * 100 > of * percent;
        // Without a limit, addresses decide between equal blocks of moe. Random ones give 29.6 to 31.1 GiB at the peak.
        let (of_peak, of_held) = if load == Load::Moe && !setup.contains("split") { (9, 6) } else { (2, 3) };
        assert!(!differs(has_peak, peak, of_peak), "{setup} {load}: peak {has_peak} of {peak}");
        assert!(!differs(has_held, held, of_held), "{setup} {load}: held {has_held} of {held}");
    }
}

/// What the pool itself does is in `crates/bench/tests/promises/churn.rs`.
#[test]
fn poorwills_pool_is_the_real_one() {
    for load in Load::ALL {
        let run = run(load, "poorwill");
        assert!(run.fits());
        assert!(run.peak.mapped_bytes <= run.peak.live_bytes / 100 * 103, "{load}: {:?}", run.peak);
        assert!(
            run.held_bytes <= run.live_bytes / 1000 * 1006,
            "{load}: {} of {}",
            run.held_bytes,
            run.live_bytes
        );
    }
}
