//! `poorwill bench`: one subcommand per benchmark.

mod churn;
#[cfg(target_os = "linux")]
mod load;
#[cfg(target_os = "linux")]
mod offload;
mod sleep;
mod trace;

use std::process::ExitCode;

pub(crate) use self::churn::churn;
use crate::args::Bench;
use crate::failure;

pub(crate) fn run(bench: Bench) -> ExitCode {
    match bench {
        Bench::Churn(args) => failure::finish(args.json, churn::run(&args)),
        Bench::Sleep(args) => failure::finish(args.json, sleep::run(&args)),
        #[cfg(target_os = "linux")]
        Bench::Offload(args) => failure::finish(args.json, offload::run(&args)),
        #[cfg(target_os = "linux")]
        Bench::Load(args) => failure::finish(args.json, load::run(&args)),
    }
}
