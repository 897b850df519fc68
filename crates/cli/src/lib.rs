//! The `poorwill` command: the commands of this machine, and the services.
//!
//! Exit codes: 0 done and verified, 1 failed, 2 wrong usage. With `--json`, standard output is one JSON
//! object, also after a failure. Messages, progress and usage errors go to standard error.
#![forbid(unsafe_code)]

mod args;
mod broker;
mod completions;
mod fleet;
mod man;
mod mock_engine;
mod reference;
mod replay;
mod rotate;
mod warnings;

use std::process::ExitCode;

use poorwill_local::command_line;

use self::args::Args;

/// Reads this process's arguments, and runs the command that they name.
#[must_use]
pub fn main() -> ExitCode {
    command_line::main::<Args>()
}
