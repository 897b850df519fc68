//! `cargo xtask lint`: formatting, clippy, documentation, a check for aarch64, and the style of all Python, with
//! warnings as errors.

use std::time::Instant;

use crate::python;
use crate::steps::{Failure, Step, note, say};
use crate::toolchain::{is_installed, not_installed};

/// The other supported architecture.
const OTHER_TARGET: &str = "aarch64-unknown-linux-gnu";

pub(crate) fn run() -> Result<(), Failure> {
    let start = Instant::now();
    Step::cargo(["fmt", "--all", "--check"]).run()?;
    Step::cargo(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]).run()?;
    Step::cargo(["doc", "--workspace", "--no-deps", "--locked"]).env("RUSTDOCFLAGS", "-D warnings").run()?;
    let mut skipped = Vec::new();
    if is_installed(OTHER_TARGET)? {
        Step::cargo(["check", "--workspace", "--locked", "--target", OTHER_TARGET]).run()?;
    } else {
        let why = not_installed(OTHER_TARGET);
        note(&format!("!!! skipped: {why}"));
        skipped.push(why);
    }
    skipped.extend(python::lint()?);
    let skipped =
        if skipped.is_empty() { String::new() } else { format!(" (skipped: {})", skipped.join("; ")) };
    say(&format!("xtask lint: clean in {:.1} s{skipped}", start.elapsed().as_secs_f64()));
    Ok(())
}
