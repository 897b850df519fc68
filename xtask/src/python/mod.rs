//! The Python package: built, installed and tested in a virtual environment of its own.
//!
//! `cargo xtask test` and `cargo xtask python` run its tests and check its types, `cargo xtask lint` its style. Nothing
//! is written to the tree.
//!
//! Where there is no fitting Python this is skipped, and so it is where the tools cannot be installed, as without a
//! network. Both say so. Under continuous integration (`CI`) both are failures.

pub(crate) mod environment;
pub(crate) mod interpreter;
pub(crate) mod package;

use std::ffi::{OsStr, OsString};

use self::environment::{Environment, Tools, Venv};
use crate::steps::{Failure, Step, note, say};
use crate::test::Tally;
use crate::test::build::{Built, build};

/// Where the package lies.
pub(crate) const PACKAGE: &str = "crates/python";
const TESTS: &str = "crates/python/tests";
const SOURCES: &str = "crates/python/python/poorwill";

/// What it is called in Python.
const MODULE: &str = "poorwill";
const SETTINGS: &str = "crates/python/pyproject.toml";

/// Scripts elsewhere, in the package's style.
const SCRIPTS: [&str; 2] = ["bench", "xtask"];

/// What builds the package and runs its tests and checks.
pub(crate) const TOOLS: Tools = Tools {
    folder: "python-venv",
    requirements: "crates/python/requirements-test.txt",
    modules: &["pip", "maturin", "mypy", "pytest", "ruff"],
};

/// The module that is written in Rust, whose types stand in a file of their own.
const NATIVE: &str = "poorwill._native";

/// What tells the tests where the library is that stands in for NVIDIA's driver.
pub(crate) const FAKE: &str = "POORWILL_FAKE_LIBCUDA";

/// What became of tests.
#[derive(Debug)]
pub(crate) enum Tested {
    Ran { tally: Tally },
    Skipped { why: String },
}

/// `cargo xtask python`.
pub(crate) fn run(pytest_args: &[OsString]) -> Result<(), Failure> {
    let built = build()?;
    match test(&built, pytest_args)? {
        Tested::Ran { tally } => {
            say(&format!("xtask python: {tally}"));
            if tally.failed > 0 {
                return Err(Failure::Parts { failed: vec![format!("{} tests of Python", tally.failed)] });
            }
        }
        // It has been said, and there is nothing else to say.
        Tested::Skipped { why: _ } => {}
    }
    Ok(())
}

/// Installs the package as it was built, runs its tests, and compares the types that it states with what is there.
pub(crate) fn test(built: &Built, pytest_args: &[OsString]) -> Result<Tested, Failure> {
    let environment = match Environment::ready(TOOLS) {
        Ok(environment) => environment,
        Err(unready) => return Ok(Tested::Skipped { why: unready.skip("Python package not tested")? }),
    };
    package::install(&environment, &built.native)?;
    let mut tally = Tally::default();
    let pytest = pytest(&environment, &[TESTS], pytest_args).env(FAKE, &built.fake.to_string_lossy());
    let typed = pytest.typed().to_owned();
    let tested = pytest.run_watched(|line| tally.add_pytest(line));
    note(&format!("--- the Python package: {tally}"));
    // The comparison keeps a cache where it runs.
    let compared = environment.python(["-m", "mypy.stubtest", NATIVE]).within(environment.folder()).run();
    compared?;
    match tested {
        Ok(_) if tally.passed == 0 => Err(Failure::NoTests { typed }),
        // Counted, and told in their own words.
        Err(Failure::Status { .. }) if tally.failed > 0 => Ok(Tested::Ran { tally }),
        Ok(_) => Ok(Tested::Ran { tally }),
        Err(failure) => Err(failure),
    }
}

/// Checks the style of all Python, and the package's types, by its settings; `Some` says why that was left out.
pub(crate) fn lint() -> Result<Option<String>, Failure> {
    let environment = match Environment::ready(TOOLS) {
        Ok(environment) => environment,
        Err(unready) => return unready.skip("Python not linted").map(Some),
    };
    for job in [&["check"][..], &["format", "--check"]] {
        let ruff = ["-m", "ruff"].into_iter().chain(job.iter().copied());
        let all = ["--no-cache", "--config", SETTINGS, PACKAGE].into_iter().chain(SCRIPTS);
        environment.python(ruff.chain(all)).run()?;
    }
    let cache = environment.beside("python-mypy");
    let mypy = ["-m", "mypy", "--strict", "--config-file", SETTINGS, "--cache-dir"].map(OsStr::new);
    environment
        .python(mypy.into_iter().chain([cache.as_os_str(), SOURCES.as_ref(), TESTS.as_ref()]))
        .run()?;
    Ok(None)
}

/// Runs tests of the package, and says why one was skipped. The line that counts them has to stay plain, whatever the
/// surroundings ask for.
pub(crate) fn pytest(venv: &Venv, tests: &[&str], pytest_args: &[OsString]) -> Step {
    let arguments = ["-m", "pytest", "-rfEs"].into_iter().chain(tests.iter().copied()).map(OsStr::new);
    let arguments = arguments.chain(pytest_args.iter().map(OsString::as_os_str));
    venv.python(arguments.chain([OsStr::new("--color=no")]))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn pytest_says_what_it_skips_and_stays_plain() {
        let step = pytest(
            &Venv::at(Path::new("/venv")),
            &[TESTS],
            &["--color=yes".into(), "-k".into(), "gpu".into()],
        );
        let typed = "/venv/bin/python -B -m pytest -rfEs crates/python/tests --color=yes -k gpu --color=no";
        assert_eq!(step.typed(), typed);
    }
}
