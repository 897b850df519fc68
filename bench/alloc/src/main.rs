//! Allocating and freeing in a full pool, beside a peer.
//!
//! `cargo xtask bench alloc [--live N] [--rounds N] [--json]`
//!
//! Both allocators are filled with the same blocks and then run the same trace. Each step frees a random live
//! block and allocates a new one. The pool is on the host device with its default configuration, with one tag
//! on the default stream. The peer, `offset-allocator`, hands out ranges of one arena in units of 512 bytes.
//! No block is ever written.
//!
//! The pool does more: it also backs its blocks with memory, counts per tag, takes a lock, and detects stale
//! handles. The figure is the cost of that.
//!
//! Exit codes: 0 done, 1 an allocator failed or handed out live addresses, 2 wrong usage.
#![forbid(unsafe_code)]

mod allocator;
mod measure;
mod report;
mod survey;
mod trace;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use self::allocator::{Peer, Poorwill};
use self::report::Report;
use self::survey::Survey;

/// Any error ends the run.
type BenchResult<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Allocating and freeing in a full pool, beside a peer on the same trace.
#[derive(Debug, Clone, Copy, Parser)]
#[command(name = "alloc", bin_name = "cargo xtask bench alloc")]
struct Options {
    /// Live blocks, at most four million
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=LIVE_MAX))]
    live: u32,

    /// How often both are timed; they begin in turns
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// This many blocks of the trace fit the peer's arena three times.
const LIVE_MAX: i64 = 4_000_000;

fn main() -> ExitCode {
    let options = match Options::try_parse() {
        Ok(options) => options,
        Err(error) => {
            // Help is an error to clap, and goes to standard output. A closed pipe is no error.
            let _ = error.print();
            if !error.use_stderr() {
                return ExitCode::SUCCESS;
            }
            // A wrong value is reported without it.
            if !error.to_string().contains("Usage:") {
                eprintln!("\n{}", Options::command().render_usage());
            }
            return ExitCode::from(2);
        }
    };
    match run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(Options { live, rounds, json }: Options) -> BenchResult<()> {
    let poorwill = Survey::of(Poorwill::open()?, live)?;
    let peer = Survey::of(Peer::new(live), live)?;
    let times = measure::both(Poorwill::open()?, Peer::new(live), live, rounds)?;
    let report = Report::new(live, rounds, &times, &poorwill, &peer);
    if json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print!("{report}");
    }
    Ok(())
}
