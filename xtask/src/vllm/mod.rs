//! `cargo xtask vllm`: the plugin for vLLM, held against the sources of the versions that it is for.
//!
//! vLLM cannot be imported without PyTorch and a GPU, so its sources are read, and run with stubs around them. They
//! come from its source distributions, which are fetched once; the package is built and installed as for its other
//! tests. Nothing may be skipped here: this is the job that those tests are for.

mod sources;

use std::path::PathBuf;

use self::sources::Sources;
use crate::python::environment::Environment;
use crate::python::{self, TOOLS, WITHOUT_PYTORCH, package};
use crate::steps::{Failure, say};
use crate::test::build::build;
use crate::test::{Tally, Tier, effort, stuck_after};

/// What the plugin is held against; `TESTED` in Python.
const VERSIONS: [&str; 2] = ["0.20.2", "0.33.0"];

/// What tells the tests where the sources are.
pub(crate) const VARIABLE: &str = "POORWILL_VLLM_SOURCES";

const TESTS: [&str; 5] = [
    "crates/python/tests/test_vllm_contract.py",
    "crates/python/tests/test_vllm_engine.py",
    "crates/python/tests/test_vllm_entry_point.py",
    "crates/python/tests/test_vllm_frontend.py",
    "crates/python/tests/test_vllm_suites.py",
];

pub(crate) fn run() -> Result<(), Failure> {
    let limit = stuck_after(&effort(Tier::Full)?);
    let environment = match Environment::ready(TOOLS) {
        Ok(environment) => environment,
        // It is said, and there is nothing else to say.
        Err(unready) => return unready.skip("the plugin for vLLM not tested").map(drop),
    };
    let folder = sources(&environment)?;
    let built = build()?;
    package::install(&environment, &built.native)?;
    let mut tally = Tally::default();
    let pytest = python::pytest(&environment, &TESTS, &[], WITHOUT_PYTORCH);
    let pytest = pytest.env(VARIABLE, &folder.to_string_lossy());
    let pytest = pytest.env(python::FAKE, &built.fake.to_string_lossy());
    let pytest = pytest.limit(limit);
    let typed = pytest.typed().to_owned();
    pytest.run_watched(|line| tally.add_pytest(line))?;
    whole(tally, typed)?;
    say(&format!("xtask vllm: {tally}, against vLLM {}", VERSIONS.join(" and ")));
    Ok(())
}

/// The folder of all versions' sources; what is not there yet is fetched.
pub(crate) fn sources(environment: &Environment) -> Result<PathBuf, Failure> {
    for version in VERSIONS {
        Sources::of(version, environment).ready(environment)?;
    }
    Ok(sources::folder(environment))
}

/// Tests of which some did not run have not shown what they are for.
fn whole(tally: Tally, typed: String) -> Result<(), Failure> {
    match tally {
        none if none.all() == 0 => Err(Failure::NoTests { typed }),
        Tally { skipped: 0, .. } => Ok(()),
        Tally { skipped, .. } => Err(Failure::Skipped { typed, skipped }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::steps::workspace_root;

    #[test]
    fn the_versions_are_those_that_the_package_names() {
        let path = workspace_root().join("crates/python/python/poorwill/vllm/_versions.py");
        let named = format!("TESTED = ({})", VERSIONS.map(|version| format!("\"{version}\"")).join(", "));
        let text = fs::read_to_string(path).unwrap();
        assert!(text.lines().any(|line| line == named), "{named}");
    }

    #[test]
    fn a_test_that_was_skipped_is_a_failure() {
        let tally = |passed, skipped| Tally { passed, failed: 0, skipped };
        assert!(whole(tally(3, 0), "pytest".to_owned()).is_ok());
        let said = whole(tally(3, 2), "pytest".to_owned()).unwrap_err().to_string();
        assert!(said.starts_with("`pytest` skipped 2 of its tests"), "{said}");
        assert!(matches!(whole(tally(0, 0), "pytest".to_owned()), Err(Failure::NoTests { .. })));
    }
}
