//! The Python package: built, installed and tested in a virtual environment of its own.
//!
//! `cargo xtask test` and `cargo xtask python` run its tests and check its types, `cargo xtask lint` its style. Nothing
//! is written to the tree.
//!
//! Where there is no fitting Python this is skipped, and so it is where the tools cannot be installed, as without a
//! network. Both say so. Under continuous integration (`CI`) both are failures.

pub(crate) mod environment;
pub(crate) mod interpreter;

use std::ffi::{OsStr, OsString};
use std::time::Duration;

use self::environment::{Environment, Tools, Venv};
use crate::steps::{Failure, Step, note, say};
use crate::test::Tally;
use crate::toolchain::own_program;

/// Where the package lies.
pub(crate) const PACKAGE: &str = "crates/python";
const TESTS: &str = "crates/python/tests";
const SOURCES: &str = "crates/python/python/poorwill";
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

/// The library that stands in for NVIDIA's driver, for tests that open a GPU.
const FAKE_PACKAGE: &str = "poorwill-fake-libcuda";
const FAKE_FILE: &str = "libpoorwill_fake_libcuda.so";
/// What tells the tests where it is.
pub(crate) const FAKE: &str = "POORWILL_FAKE_LIBCUDA";

/// What became of the package's tests.
#[derive(Debug)]
pub(crate) enum Tested {
    Ran { tally: Tally, built: Duration, ran: Duration },
    Skipped { why: String },
}

/// `cargo xtask python`.
pub(crate) fn run(pytest_args: &[OsString]) -> Result<(), Failure> {
    match test(pytest_args)? {
        Tested::Ran { tally, built, ran } => {
            let [built, ran] = [built, ran].map(|took| took.as_secs_f64());
            say(&format!("xtask python: {tally}, built in {built:.1} s, ran in {ran:.1} s"));
        }
        // It has been said, and there is nothing else to say.
        Tested::Skipped { why: _ } => {}
    }
    Ok(())
}

/// Builds and installs the package, then runs its tests and compares its types with what is there.
pub(crate) fn test(pytest_args: &[OsString]) -> Result<Tested, Failure> {
    let environment = match Environment::ready(TOOLS) {
        Ok(environment) => environment,
        Err(unready) => return Ok(Tested::Skipped { why: unready.skip("Python package not tested")? }),
    };
    let (fake_built, fake) = fake()?;
    let built = fake_built + install(&environment)?;

    let mut tally = Tally::default();
    let pytest = pytest(&environment, &[TESTS], pytest_args).env(FAKE, &fake);
    let typed = pytest.typed().to_owned();
    let tested = pytest.run_watched(|line| tally.add_pytest(line));
    let tested =
        tested.and_then(|took| if tally.passed == 0 { Err(Failure::NoTests { typed }) } else { Ok(took) });
    note(&format!("--- the Python package: {tally}"));

    let cache = environment.beside("python-mypy");
    let mypy = ["-m", "mypy", "--strict", "--config-file", SETTINGS, "--cache-dir"].map(OsStr::new);
    let checked = [cache.as_os_str(), SOURCES.as_ref(), TESTS.as_ref()];
    let typed = environment.python(mypy.into_iter().chain(checked)).run();
    // Whether the native module has what its file of types says. The comparison keeps a cache where it runs.
    let compared = environment.python(["-m", "mypy.stubtest", NATIVE]).within(environment.folder()).run();
    Ok(Tested::Ran { tally, built, ran: tested? + typed? + compared? })
}

/// Checks the style of all Python, by the package's settings; `Some` says why that was left out.
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
    Ok(None)
}

/// Builds the package as it is in the tree, without optimisation and in cargo's own target folder, and puts it into
/// the environment. Needs no network.
pub(crate) fn install(venv: &Venv) -> Result<Duration, Failure> {
    let package = format!("./{PACKAGE}");
    venv.pip(["--no-build-isolation", "--no-index", "--no-deps", "--force-reinstall", package.as_str()])
        .env("MATURIN_PEP517_ARGS", "--profile dev --locked")
        .run()
}

/// Builds the library that stands in for NVIDIA's driver. How long that took, and where it is.
pub(crate) fn fake() -> Result<(Duration, String), Failure> {
    let built = Step::cargo(["build", "--locked", "--package", FAKE_PACKAGE]).run()?;
    Ok((built, own_program()?.with_file_name(FAKE_FILE).to_string_lossy().into_owned()))
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
