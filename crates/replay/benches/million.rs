//! A million events through every allocator, and through the reader of snapshots: how long it takes.
//!
//! `cargo bench -p poorwill-replay --bench million`
#![allow(clippy::unwrap_used)]

use std::time::Instant;

use fastrand::Rng;
use poorwill_replay::trace::{Block, TraceBuilder};
use poorwill_replay::{Card, Setup, Trace, replay};

const EVENTS: usize = 1_000_000;
const CARD: Card = Card { total_bytes: 80 << 30, taken_bytes: 1 << 30, budget_bytes: None };

/// Sizes as of training: many small ones, some large, up to 4 000 live at a time.
fn trace() -> Trace {
    let mut rng = Rng::with_seed(7);
    let mut trace = TraceBuilder::new("a million");
    let stacks: Vec<u32> = (0..500).map(|nth| trace.stack(vec![format!("model.py:{nth} forward")])).collect();
    let (mut live, mut next) = (Vec::new(), 0);
    while trace.len() < EVENTS {
        if live.len() < 4000 && rng.u8(..) < 140 || live.is_empty() {
            let bytes = match rng.u8(..) {
                0..180 => rng.u64(1..1 << 20),
                180..245 => rng.u64(1 << 20..16 << 20),
                _ => rng.u64(16 << 20..200 << 20),
            };
            let stack = stacks[rng.usize(..stacks.len())];
            trace.alloc(next, Block { bytes, stream: 0, pool: 0, stack }).unwrap();
            live.push(next);
            next += 1;
        } else {
            trace.free(live.swap_remove(rng.usize(..live.len()))).unwrap();
        }
    }
    trace.finish(None)
}

fn main() {
    let began = Instant::now();
    let trace = trace();
    println!("{:>60} {:8.3} s", "made", began.elapsed().as_secs_f64());
    let began = Instant::now();
    for text in Setup::ALL {
        let setup: Setup = text.parse().unwrap();
        let one = Instant::now();
        let run = replay(&trace, &setup, CARD).unwrap();
        let peak = run.peak.mapped_bytes >> 20;
        println!("{text:>60} {:8.3} s  peak {peak} MiB, fits {}", one.elapsed().as_secs_f64(), run.fits());
    }
    println!("{:>60} {:8.3} s", "all", began.elapsed().as_secs_f64());
}
