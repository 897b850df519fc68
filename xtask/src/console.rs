//! What is printed.

use std::io::{self, Write};

/// Prints a line of the result. A closed pipe is the reader's choice, not our failure.
pub(crate) fn say(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// Prints a line of progress, beside cargo's own.
pub(crate) fn note(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}
