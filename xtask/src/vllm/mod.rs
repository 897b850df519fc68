//! `cargo xtask vllm`: tests the plugins for vLLM and SGLang against the sources of the supported versions.
//!
//! The engines cannot be imported without PyTorch and a GPU, so their sources are read, and run with stubs around them.
//! They are fetched once. The package is built and installed as for its other tests. Nothing may be skipped in this
//! job, since it exists for those tests.

mod sources;

use std::path::PathBuf;

use self::sources::{Engine, SGLANG, Sources, VLLM};
use crate::build::build;
use crate::effort::{EFFORT, Tier, effort, stuck_after};
use crate::python::environment::Environment;
use crate::python::{self, TOOLS, WITHOUT_PYTORCH, package};
use crate::steps::{Failure, Step, say, workspace_root};
use crate::tally::Tally;

/// Where the sources are, for tests.
#[derive(Debug)]
pub(crate) struct Folders {
    vllm: PathBuf,
    sglang: PathBuf,
}

impl Folders {
    /// The step with the variables that name them.
    pub(crate) fn named_for(&self, step: Step) -> Step {
        let step = step.env("POORWILL_VLLM_SOURCES", &self.vllm.to_string_lossy());
        step.env("POORWILL_SGLANG_SOURCES", &self.sglang.to_string_lossy())
    }
}

/// Which versions' sources to use, as the package's tests define them.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Which<'a> {
    /// Those whose code is run.
    Run,
    /// Those that are read with this effort as well.
    Read(&'a str),
}

const TESTS: [&str; 16] = [
    "crates/python/tests/test_sglang_contract.py",
    "crates/python/tests/test_sglang_upstream.py",
    "crates/python/tests/test_sglang_versions.py",
    "crates/python/tests/test_vllm_connectors.py",
    "crates/python/tests/test_vllm_contract.py",
    "crates/python/tests/test_vllm_engine.py",
    "crates/python/tests/test_vllm_entry_point.py",
    "crates/python/tests/test_vllm_frontend.py",
    "crates/python/tests/test_vllm_generations.py",
    "crates/python/tests/test_vllm_hibernation.py",
    "crates/python/tests/test_vllm_level2.py",
    "crates/python/tests/test_vllm_parallel.py",
    "crates/python/tests/test_vllm_rl.py",
    "crates/python/tests/test_vllm_suites.py",
    "crates/python/tests/test_vllm_triton.py",
    "crates/python/tests/test_vllm_versions.py",
];

/// The tests' folder. A module in it lists each engine's versions; it imports the installed package.
const BELOW: &str = "crates/python/tests";

pub(crate) fn run() -> Result<(), Failure> {
    let effort = effort(Tier::Full)?;
    let environment = match Environment::ready(TOOLS) {
        Ok(environment) => environment,
        // The reason is printed here.
        Err(unready) => return unready.skip("the plugins for vLLM and SGLang not tested").map(drop),
    };
    let built = build()?;
    package::install(&environment, &built)?;
    let which = Which::Read(&effort);
    let folders = sources(&environment, which)?;
    let mut tally = Tally::default();
    let pytest = python::pytest(&environment, &TESTS, &[], WITHOUT_PYTORCH);
    let pytest = folders.named_for(pytest).env(EFFORT, &effort);
    let pytest = pytest.env(python::FAKE, &built.fake.to_string_lossy());
    let pytest = pytest.limit(stuck_after(&effort));
    let typed = pytest.typed().to_owned();
    pytest.run_watched(|line| tally.add_pytest(line))?;
    check_complete(tally, typed)?;
    let vllm = versions(&VLLM, &environment, which)?.join(", ");
    let sglang = versions(&SGLANG, &environment, which)?.join(", ");
    say(&format!("xtask vllm: {tally}, against vLLM {vllm} and SGLang {sglang}"));
    Ok(())
}

/// The folders of all versions' sources. Fetches the requested ones that are missing. The package must be installed.
pub(crate) fn sources(environment: &Environment, which: Which<'_>) -> Result<Folders, Failure> {
    for engine in [&VLLM, &SGLANG] {
        for version in versions(engine, environment, which)? {
            Sources::of(engine, &version, environment).ready(environment)?;
        }
    }
    Ok(Folders { vllm: VLLM.folder(environment), sglang: SGLANG.folder(environment) })
}

/// The requested versions of an engine.
fn versions(engine: &Engine, environment: &Environment, which: Which<'_>) -> Result<Vec<String>, Failure> {
    let version_set = match which {
        Which::Run => "run",
        Which::Read(effort) => effort,
    };
    let step = environment.python(["-m", engine.versions, version_set]).within(&workspace_root().join(BELOW));
    Ok(step.output()?.lines().map(str::to_owned).collect())
}

/// Fails if some tests did not run: then they have proved nothing.
fn check_complete(tally: Tally, typed: String) -> Result<(), Failure> {
    match tally {
        none if none.all() == 0 => Err(Failure::NoTests { typed }),
        some => match some.skipped() {
            0 => Ok(()),
            skipped => Err(Failure::Skipped { typed, skipped }),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_was_skipped_is_a_failure() {
        let tally = |passed, skipped| Tally::of(passed, 0, skipped);
        assert!(check_complete(tally(3, 0), "pytest".to_owned()).is_ok());
        let message = check_complete(tally(3, 2), "pytest".to_owned()).unwrap_err().to_string();
        assert!(message.starts_with("`pytest` skipped 2 of its tests"), "{message}");
        assert!(matches!(check_complete(tally(0, 0), "pytest".to_owned()), Err(Failure::NoTests { .. })));
    }
}
