//! `poorwill-demo`: the commands that need no service.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use poorwill_local::command_line::{self, CommandLine};
use poorwill_local::{Command, SERVICES};

/// GPU memory runtime for language-model engines: sleep, wake, and verified bytes. The commands that need no service.
#[derive(Debug, Parser)]
#[command(name = "poorwill-demo", version, arg_required_else_help = true)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

impl CommandLine for Args {
    const PROGRAM: &str = "poorwill-demo";

    fn elsewhere(words: &[OsString]) -> Option<String> {
        let name = words.iter().find(|word| *word != "help")?;
        let name = SERVICES.iter().find(|command| name == *command)?;
        Some(format!(
            "`{name}` is a command of the program `poorwill`, and this is `poorwill-demo`: run `poorwill {name}`, or \
             `cargo poorwill {name}` in Poorwill's sources"
        ))
    }

    fn mistake(&self) -> Option<(ErrorKind, String)> {
        self.command.mistake()
    }

    fn run(self) -> ExitCode {
        self.command.run()
    }
}

fn main() -> ExitCode {
    command_line::main::<Args>()
}
