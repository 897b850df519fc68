//! Exit codes and output of a command that ends.

use std::error::Error;
use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use poorwill::chain;
use serde::Serialize;
use serde_json::{Map, Value};

/// What a command found, as JSON and as text.
pub trait CommandOutput: Serialize {
    /// What a mismatch means.
    const MISMATCH: &'static str = "not verified";
    /// The exit code if there is no result.
    const FAILED: u8 = 1;
    /// What was wrong.
    fn mismatch(&self) -> Option<&str>;
    /// The exit code of a result.
    fn code(&self) -> u8 {
        u8::from(self.mismatch().is_some())
    }
    /// For people.
    fn text(&self) -> String;
}

/// Why a command failed. Any error becomes one, with its causes.
#[derive(Debug)]
pub struct Failure {
    message: String,
    /// Lines of a file that show the mistake, below the message on standard error.
    excerpt: Option<String>,
    /// What programs may want to know, beside the message in JSON.
    details: Map<String, Value>,
    /// Further mistakes, each with an excerpt of its own.
    others: Vec<Failure>,
}

impl Failure {
    /// With a message that names the operation and the next step.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), excerpt: None, details: Map::new(), others: Vec::new() }
    }

    /// With lines of a file that show the mistake.
    #[must_use]
    pub fn with_excerpt(self, excerpt: Option<String>) -> Self {
        Self { excerpt, ..self }
    }

    /// With what programs may want to know, for JSON.
    #[must_use]
    pub fn with_details(self, details: Map<String, Value>) -> Self {
        Self { details, ..self }
    }

    /// With further mistakes, each with an excerpt of its own.
    #[must_use]
    pub fn with_others(self, others: Vec<Self>) -> Self {
        Self { others, ..self }
    }

    fn json(&self) -> Value {
        let mut fields = Map::from_iter([("error".to_owned(), Value::from(self.to_string()))]);
        fields.extend(self.details.clone());
        Value::Object(fields)
    }

    fn print(&self) {
        let excerpt = self.excerpt.as_ref().map(|excerpt| format!("{excerpt}\n")).unwrap_or_default();
        // Without standard error there is no place for the message.
        let _ = write!(io::stderr(), "error: {}\n{excerpt}", self.message);
        self.others.iter().for_each(Self::print);
    }
}

impl<E: Error + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::new(chain(&error))
    }
}

impl fmt::Display for Failure {
    /// A line for each mistake.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        self.others.iter().try_for_each(|other| write!(f, "\n{other}"))
    }
}

/// Prints a failure to standard error.
#[must_use]
pub fn report_error(failure: &Failure) -> ExitCode {
    failure.print();
    ExitCode::FAILURE
}

/// Prints how a command ended, as JSON or text, and says its exit code.
pub fn finish<O: CommandOutput>(json: bool, outcome: Result<O, Failure>) -> ExitCode {
    if let Some(mismatch) = outcome.as_ref().ok().and_then(CommandOutput::mismatch) {
        // As in `Failure::print`.
        let _ = writeln!(io::stderr(), "error: {}: {mismatch}", O::MISMATCH);
    }
    let printed = match &outcome {
        Ok(outcome) if json => print_json(outcome),
        Ok(outcome) => write_stdout(&outcome.text()),
        Err(failure) => {
            failure.print();
            if json { print_json(&failure.json()) } else { Ok(()) }
        }
    };
    match (outcome, printed) {
        (Ok(outcome), Ok(())) => ExitCode::from(outcome.code()),
        (_, Err(error)) if error.kind() != io::ErrorKind::BrokenPipe => {
            let _ = writeln!(io::stderr(), "error: cannot print the result: {error}");
            ExitCode::from(O::FAILED)
        }
        _ => ExitCode::from(O::FAILED),
    }
}

/// Prints a text to standard output, and says the exit code.
#[must_use]
pub fn print(text: Result<String, Failure>) -> ExitCode {
    let printed = text.and_then(|text| {
        write_stdout(&text).or_else(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => Ok(()),
            _ => Err(Failure::new(format!("cannot print the result: {error}"))),
        })
    });
    match printed {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report_error(&failure),
    }
}

/// Something that the command went on after.
pub(crate) fn warn(message: &str) {
    // Without standard error there is no place for it.
    let _ = writeln!(io::stderr(), "warning: {message}");
}

fn print_json(value: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_string(value)?;
    write_stdout(&(text + "\n"))
}

fn write_stdout(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}
