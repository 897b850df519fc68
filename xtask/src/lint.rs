//! `cargo xtask lint`: formatting, clippy, documentation, a check for aarch64, and the style of all Python, all
//! with warnings as errors.

use std::path::Path;
use std::time::Instant;

use crate::python;
use crate::steps::{Failure, Step, note, say};

/// The other architecture that poorwill is written for.
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
        let why = format!("target {OTHER_TARGET} not installed; `rustup target add {OTHER_TARGET}`");
        note(&format!("!!! skipped: {why}"));
        skipped.push(why);
    }
    skipped.extend(python::lint()?);
    let skipped =
        if skipped.is_empty() { String::new() } else { format!(" (skipped: {})", skipped.join("; ")) };
    say(&format!("xtask lint: clean in {:.1} s{skipped}", start.elapsed().as_secs_f64()));
    Ok(())
}

/// Whether the standard library for `target` lies beside the compiler.
fn is_installed(target: &str) -> Result<bool, Failure> {
    let libdir = Step::rustc(["--print", "target-libdir", "--target", target]).output()?;
    Ok(Path::new(&libdir).is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_that_runs_this_is_installed() {
        let version = Step::rustc(["--version", "--verbose"]).output().unwrap();
        let host = version.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
        assert!(is_installed(host).unwrap());
    }
}
