//! The `poorwill` command.
//!
//! Exit codes: 0 done and verified, 1 failed, 2 wrong usage. With `--json`, standard output is one JSON
//! object, also when the command fails; messages, progress and complaints about usage go to standard error.
#![forbid(unsafe_code)]

mod args;
mod bench;
mod demo;
mod doctor;
mod failure;
mod mock_engine;
mod nap;
mod progress;
#[cfg(target_os = "linux")]
mod rotate;
mod show;

use std::process::ExitCode;

use self::args::{Args, Command};

fn main() -> ExitCode {
    let args = match Args::read() {
        Ok(args) => args,
        Err(error) => {
            // Help and version are errors to clap, and go to standard output.
            return match error.print() {
                _ if error.use_stderr() => ExitCode::from(2),
                Err(printing) if printing.kind() != std::io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
                _ => ExitCode::SUCCESS,
            };
        }
    };
    match args.command {
        Command::Demo(args) => failure::finish(args.json, demo::run(&args)),
        Command::Nap(args) => failure::finish(args.json, nap::run(&args)),
        Command::Doctor(args) => failure::finish(args.json, doctor::run(&args)),
        Command::Bench(args) => bench::run(args.bench),
        #[cfg(target_os = "linux")]
        Command::Rotate(args) => rotate::run(args),
        Command::MockEngine(args) => mock_engine::run(args),
    }
}
