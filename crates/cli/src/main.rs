//! The `poorwill` command.
//!
//! Exit codes: 0 done and verified, 1 failed, 2 wrong usage. With `--json`, standard output is one JSON
//! object, also when the command fails; messages and progress go to standard error.
#![forbid(unsafe_code)]

mod args;
mod demo;
mod failure;
mod nap;
mod progress;
mod show;

use std::process::ExitCode;

use clap::Parser;

use self::args::{Args, Command};

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            // Help and version are errors to clap, and go to standard output with code 0.
            let printed = error.print();
            return ExitCode::from(if error.use_stderr() || printed.is_err() { 2 } else { 0 });
        }
    };
    match args.command {
        Command::Demo(args) => failure::finish(args.json, demo::run(&args)),
        Command::Nap(args) => failure::finish(args.json, nap::run(&args)),
    }
}
