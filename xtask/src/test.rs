//! `cargo xtask test`: every test of the workspace with plain `cargo test`.
//!
//! Without arguments it builds first and then runs unit, integration and documentation tests, so
//! that the two durations stand apart; a failure in one crate does not keep the others from being
//! tested, and no test at all counts as a failure. With arguments it is one `cargo test` that takes
//! them, for the whole workspace unless they choose packages. Benchmarks that compile a peer are left
//! out, for their peers are not ours to test: `cargo xtask lint` compiles them, and
//! `cargo test --package` tests one.

use std::ffi::OsString;

use crate::bench::peer_packages;
use crate::steps::{Failure, Step, say};

pub(crate) fn run(cargo_args: &[OsString]) -> Result<(), Failure> {
    let built = if cargo_args.is_empty() {
        let took = Step::cargo(arguments(&["--no-run".into()])).run()?;
        format!(", built in {:.1} s", took.as_secs_f64())
    } else {
        String::new()
    };

    let mut tally = Tally::default();
    let took = Step::cargo(arguments(cargo_args)).run_watched(|line| tally.add(line))?;
    if cargo_args.is_empty() && tally.passed == 0 {
        return Err(Failure::NoTests { typed: "cargo test --workspace".to_owned() });
    }
    say(&format!(
        "xtask test: {} passed, {} failed, {} ignored{built}, ran in {:.1} s",
        tally.passed,
        tally.failed,
        tally.ignored,
        took.as_secs_f64()
    ));
    Ok(())
}

/// What `cargo` is called with.
fn arguments(cargo_args: &[OsString]) -> Vec<OsString> {
    let mut arguments = vec!["test".into()];
    if !chooses_packages(cargo_args) {
        arguments.push("--workspace".into());
        arguments.extend(peer_packages().flat_map(|package| ["--exclude".into(), package.into()]));
    }
    arguments.push("--locked".into());
    if cargo_args.is_empty() {
        arguments.push("--no-fail-fast".into());
    }
    arguments.extend_from_slice(cargo_args);
    arguments
}

/// Beside `--workspace` cargo would ignore a choice of packages.
fn chooses_packages(cargo_args: &[OsString]) -> bool {
    cargo_args.iter().map(|arg| arg.to_string_lossy()).take_while(|arg| arg != "--").any(|arg| {
        arg == "--package"
            || arg.starts_with("--package=")
            || arg.starts_with("-p")
            || arg == "--workspace"
            || arg.starts_with("--manifest-path")
    })
}

/// The sums over all lines in which a test executable gives its result.
#[derive(Debug, Default, PartialEq)]
struct Tally {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Tally {
    fn add(&mut self, line: &str) {
        let Some((_, result)) = line.split_once("test result: ") else { return };
        let words: Vec<&str> = result.split([' ', ';', '.']).filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2) {
            let Ok(count) = pair[0].parse::<u64>() else { continue };
            match pair[1] {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                "ignored" => self.ignored += count,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments_of(words: &[&str]) -> Vec<OsString> {
        arguments(&words.iter().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn arguments_reach_cargo_as_given() {
        let ours = ["test", "--workspace", "--exclude", "poorwill-bench-alloc", "--locked"];
        assert_eq!(arguments_of(&[]), [&ours[..], &["--no-fail-fast"]].concat());
        assert_eq!(
            arguments_of(&["pool", "--", "--nocapture"]),
            [&ours[..], &["pool", "--", "--nocapture"]].concat()
        );
    }

    #[test]
    fn a_choice_of_packages_replaces_the_workspace() {
        for choice in [&["-p", "xtask"][..], &["-pxtask"], &["--package", "xtask"], &["--package=xtask"]] {
            assert!(!arguments_of(choice).contains(&"--workspace".into()), "{choice:?}");
        }
        assert!(arguments_of(&["--", "-p"]).contains(&"--workspace".into()));
    }

    #[test]
    fn results_are_summed() {
        let mut tally = Tally::default();
        for line in [
            "running 3 tests",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 7 filtered out; finished in 0.02s",
            "test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out",
            "test passed ... ok",
        ] {
            tally.add(line);
        }
        assert_eq!(tally, Tally { passed: 5, failed: 1, ignored: 1 });
    }
}
