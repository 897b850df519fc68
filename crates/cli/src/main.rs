//! The `poorwill` command.
//!
//! Exit codes: 0 done and verified, 1 failed, 2 wrong usage. With `--json`, standard output is one JSON
//! object, also after a failure. Messages, progress and usage errors go to standard error.
#![forbid(unsafe_code)]

mod args;
mod bench;
mod completions;
mod demo;
mod doctor;
mod failure;
#[cfg(target_os = "linux")]
mod fleet;
#[cfg(target_os = "linux")]
mod hibernate;
mod man;
mod mock_engine;
mod progress;
mod reference;
mod replay;
#[cfg(target_os = "linux")]
mod rotate;
mod show;
mod verify;

use std::io::Write;
use std::process::ExitCode;

use self::args::{Args, Command};

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    for (old, new) in args::old_names(&words) {
        // Without standard error there is no place for it.
        let _ = writeln!(std::io::stderr(), "`{old}` is now `{new}`");
    }
    let args = match Args::read(&words) {
        Ok(args) => args,
        Err(error) => {
            // To clap, help and version are errors, too; they go to standard output.
            return match error.print() {
                _ if error.use_stderr() => ExitCode::from(2),
                Err(printing) if printing.kind() != std::io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
                _ => ExitCode::SUCCESS,
            };
        }
    };
    match args.command {
        Command::Demo(args) => failure::finish(args.json, demo::run(&args)),
        Command::Verify(args) => failure::finish(args.json, verify::run(&args)),
        #[cfg(target_os = "linux")]
        Command::Hibernate(args) => hibernate::run(args),
        Command::Doctor(args) => failure::finish(args.json, doctor::run(&args)),
        Command::Bench(args) => bench::run(args.bench),
        Command::Replay(args) => failure::finish(args.json, replay::run(&args)),
        #[cfg(target_os = "linux")]
        Command::Rotate(args) => rotate::run(args),
        #[cfg(target_os = "linux")]
        Command::Route(args) => fleet::route(&args),
        #[cfg(target_os = "linux")]
        Command::Fleet(args) => fleet::run(args),
        Command::Completions(args) => failure::print(completions::run(args.shell)),
        Command::Man(args) => failure::print(man::run(args.dir.as_deref())),
        Command::MockEngine(args) => mock_engine::run(args),
        Command::Reference => failure::print(Ok(reference::page())),
    }
}
