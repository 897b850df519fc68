//! The program `poorwill`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    poorwill_cli::main()
}
