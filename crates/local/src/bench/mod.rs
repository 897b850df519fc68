//! `bench`: one subcommand per benchmark.

mod churn;
mod load;
mod offload;
mod sleep;

use std::process::ExitCode;

use clap::Subcommand;

pub use self::churn::ChurnArgs;
pub(crate) use self::churn::{churn, text as churn_text};
pub use self::load::LoadArgs;
pub use self::offload::OffloadArgs;
pub use self::sleep::SleepArgs;
use crate::failure;

/// Arguments of `bench`.
#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub(crate) bench: Benchmark,
}

/// A benchmark.
#[derive(Debug, Subcommand)]
pub enum Benchmark {
    /// Allocate and free as loading a large model does, and compare mapped with live memory
    Churn(ChurnArgs),
    /// Put a synthetic model to sleep and wake it, compare every byte, and compare the times with the hardware's limits
    Sleep(SleepArgs),
    /// Keep layers in host memory, read them in place or prefetch them for each pass, and compare with link and compute
    /// times
    Offload(OffloadArgs),
    /// Load a checkpoint into host memory; compare the time with direct reads, and the peak memory with its size
    Load(LoadArgs),
}

pub(crate) fn run(bench: Benchmark) -> ExitCode {
    match bench {
        Benchmark::Churn(args) => failure::finish(args.json, churn::run(&args)),
        Benchmark::Sleep(args) => failure::finish(args.json, sleep::run(&args)),
        Benchmark::Offload(args) => failure::finish(args.json, offload::run(&args)),
        Benchmark::Load(args) => failure::finish(args.json, load::run(&args)),
    }
}
