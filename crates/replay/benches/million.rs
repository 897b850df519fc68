//! A million events through every allocator, or those of a file, which is read first: how long it takes.
//!
//! `cargo bench -p poorwill-replay --bench million [-- FILE]`
#![allow(clippy::unwrap_used)]

use std::time::Instant;
use std::{env, fs};

use fastrand::Rng;
use poorwill_replay::trace::{Block, TraceBuilder};
use poorwill_replay::{Card, Setup, Trace, read, replay};

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
    // Cargo adds an option of its own.
    match env::args().skip(1).find(|argument| !argument.starts_with("--")) {
        None => replay_all(&trace(), began),
        Some(path) => {
            let traces = read::read(&path, fs::read(&path).unwrap()).unwrap();
            traces.iter().for_each(|trace| replay_all(trace, began));
        }
    }
}

fn replay_all(trace: &Trace, began: Instant) {
    println!("{:>60} {:8.3} s, {} steps", "made or read", began.elapsed().as_secs_f64(), trace.steps.len());
    for text in Setup::ALL {
        let setup: Setup = text.parse().unwrap();
        let one = Instant::now();
        let run = replay(trace, &setup, CARD).unwrap();
        let peak = run.peak.mapped_bytes >> 20;
        println!("{text:>60} {:8.3} s  peak {peak} MiB, fits {}", one.elapsed().as_secs_f64(), run.fits());
    }
    println!("{:>60} {:8.3} s", "all", began.elapsed().as_secs_f64());
}
