//! What all of Python here needs: its virtual environments, the installed package, pytest and linters.
//!
//! Nothing is written to the tree.

pub(crate) mod environment;
pub(crate) mod interpreter;
pub(crate) mod package;
pub(crate) mod torch;

use std::ffi::{OsStr, OsString};

use self::environment::{Environment, Tools, Venv};
use self::package::{PACKAGE, SOURCES};
use crate::effort::jobs;
use crate::steps::{Failure, Step};

pub(crate) const TESTS: &str = "crates/python/tests";
const SETTINGS: &str = "crates/python/pyproject.toml";

/// Scripts elsewhere, in the package's style.
const SCRIPTS: [&str; 2] = ["bench", "xtask"];

/// What builds the package and runs its tests and checks.
pub(crate) const TOOLS: Tools = Tools {
    folder: "python-venv",
    requirements: "crates/python/requirements-test.txt",
    modules: &["pip", "maturin", "mypy", "pytest", "ruff", "xdist"],
};

/// The variable with the path of the fake CUDA library.
pub(crate) const FAKE: &str = "POORWILL_FAKE_LIBCUDA";

/// The selection of tests without PyTorch.
pub(crate) const WITHOUT_PYTORCH: &str = "not real_torch";

/// Checks the style of all Python and the package's types, by its settings; `Some` is the reason if that was left
/// out.
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

/// Runs the marked tests of the package in parallel, with the reasons of skips. The summary line must stay plain,
/// whatever the environment sets.
pub(crate) fn pytest(venv: &Venv, tests: &[&str], pytest_args: &[OsString], marks: &str) -> Step {
    let jobs = jobs().to_string();
    let arguments = ["-m", "pytest", "-rfEs", "-n", &jobs, "--dist", "worksteal", "-m", marks];
    let arguments = arguments.into_iter().chain(tests.iter().copied()).map(OsStr::new);
    let arguments = arguments.chain(pytest_args.iter().map(OsString::as_os_str));
    venv.python(arguments.chain([OsStr::new("--color=no")]))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn pytest_reports_skips_in_plain_text() {
        let step = pytest(
            &Venv::at(Path::new("/venv")),
            &[TESTS],
            &["--color=yes".into(), "-k".into(), "gpu".into()],
            "real_torch and not gpu",
        );
        let typed = step.typed();
        assert!(typed.starts_with("/venv/bin/python -B -m pytest -rfEs -n "), "{typed}");
        let end = "-m 'real_torch and not gpu' crates/python/tests --color=yes -k gpu --color=no";
        assert!(typed.ends_with(end), "{typed}");
    }
}
