//! How a command ends: exit codes, and what is printed on the way out.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use poorwill::checkpoint::CheckpointError;
use poorwill::doctor::NoSuchDevice;
use poorwill::{DriverError, OpenError, PoolError, chain};
use poorwill_bench::synthetic::SyntheticError;
use poorwill_bench::{nap, sleep};
use serde::Serialize;

/// What a command has to say, for people and for programs.
pub(crate) trait Outcome: Serialize {
    /// What it means that something was wrong.
    const WRONG: &'static str = "not verified";
    /// What was wrong, unless everything was verified.
    fn mismatch(&self) -> Option<&str>;
    /// The report for people, line by line.
    fn text(&self) -> String;
}

/// Why a command failed.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
}

impl Failure {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}

macro_rules! failure_from {
    ($($error:ty),+) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self::new(chain(&error))
            }
        })+
    };
}

failure_from!(
    CheckpointError,
    SyntheticError,
    nap::Error,
    sleep::Error,
    NoSuchDevice,
    OpenError,
    PoolError,
    DriverError
);

#[cfg(target_os = "linux")]
failure_from!(poorwill::offload::BadSwitch, poorwill::offload::LoadError, poorwill_bench::offload::Error);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Complains, and says that it failed.
#[cfg(target_os = "linux")]
pub(crate) fn complain(failure: &Failure) -> ExitCode {
    // Standard error is the last place to complain to.
    let _ = writeln!(io::stderr(), "error: {failure}");
    ExitCode::FAILURE
}

/// Prints the outcome and turns it into an exit code.
pub(crate) fn finish<O: Outcome>(json: bool, outcome: Result<O, Failure>) -> ExitCode {
    if let Some(mismatch) = outcome.as_ref().ok().and_then(Outcome::mismatch) {
        // Standard error is the last place to complain to.
        let _ = writeln!(io::stderr(), "error: {}: {mismatch}", O::WRONG);
    }
    let printed = match &outcome {
        Ok(outcome) if json => print_json(outcome),
        Ok(outcome) => print(&outcome.text()),
        Err(failure) => {
            let _ = writeln!(io::stderr(), "error: {}", failure.message);
            if json { print_json(&serde_json::json!({ "error": failure.message })) } else { Ok(()) }
        }
    };
    match (outcome, printed) {
        (Ok(outcome), Ok(())) if outcome.mismatch().is_none() => ExitCode::SUCCESS,
        (_, Err(error)) if error.kind() != io::ErrorKind::BrokenPipe => {
            let _ = writeln!(io::stderr(), "error: cannot print the result: {error}");
            ExitCode::FAILURE
        }
        _ => ExitCode::FAILURE,
    }
}

fn print_json(value: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_string(value)?;
    print(&(text + "\n"))
}

fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}
