//! From the words of a command line to a command that runs: the same way for every program.
//!
//! Wrong usage is exit code 2, with the command's name and usage on standard error.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, FromArgMatches};

/// A program's arguments.
pub trait CommandLine: CommandFactory + FromArgMatches {
    /// The program's name.
    const PROGRAM: &str;

    /// Sets what clap cannot derive.
    #[must_use]
    fn complete(command: Command) -> Command {
        command
    }

    /// Says which program has the command that these words name, if it is another one.
    #[must_use]
    fn elsewhere(_words: &[OsString]) -> Option<String> {
        None
    }

    /// What is wrong with arguments that are right one by one.
    fn mistake(&self) -> Option<(ErrorKind, String)>;

    /// Runs the command.
    fn run(self) -> ExitCode;
}

/// Reads this process's arguments, and runs the command that they name.
#[must_use]
pub fn main<A: CommandLine>() -> ExitCode {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    if let Some(message) = A::elsewhere(&words) {
        // Without standard error there is no place for it.
        let _ = writeln!(io::stderr(), "error: {message}");
        return ExitCode::from(2);
    }
    match read::<A>(&words) {
        Ok(args) => args.run(),
        // To clap, help and version are errors, too; they go to standard output.
        Err(error) => match error.print() {
            _ if error.use_stderr() => ExitCode::from(2),
            Err(printing) if printing.kind() != io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
            _ => ExitCode::SUCCESS,
        },
    }
}

/// `words` are the arguments without the program's name.
fn read<A: CommandLine>(words: &[OsString]) -> Result<A, clap::Error> {
    let read = || {
        let program = OsString::from(A::PROGRAM);
        let matches = A::complete(A::command()).try_get_matches_from([&program].into_iter().chain(words))?;
        A::from_arg_matches(&matches)
    };
    let args = read().map_err(|error| with_usage::<A>(error, words))?;
    match args.mistake() {
        None => Ok(args),
        Some((kind, message)) => {
            let mut command = chosen::<A>(words);
            let name = command.get_bin_name().unwrap_or(A::PROGRAM).to_owned();
            Err(command.error(kind, format!("`{name}`: {message}")))
        }
    }
}

/// clap leaves the usage out where a value is wrong, and with it the command's name.
fn with_usage<A: CommandLine>(mut error: clap::Error, words: &[OsString]) -> clap::Error {
    if error.use_stderr() && error.get(ContextKind::Usage).is_none() {
        error.insert(ContextKind::Usage, ContextValue::StyledStr(chosen::<A>(words).render_usage()));
    }
    error
}

/// The command that these words name.
fn chosen<A: CommandLine>(words: &[OsString]) -> Command {
    let mut command = A::complete(A::command());
    // Names of subcommands then begin with those of their parents.
    command.build();
    for word in words {
        if let Some(next) = command.find_subcommand(word).cloned() {
            command = next;
        }
    }
    command
}
