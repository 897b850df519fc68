//! The tests of the Python package: it is built, installed and tested in its own virtual environment.
//!
//! `cargo xtask test` and `cargo xtask python` run its tests and check its types.
//! Nothing is written to the tree.
//!
//! Without a supported Python, or if the tools cannot be installed, this is skipped with a message. Under continuous
//! integration (`CI`) that is a failure.

use std::ffi::OsString;
use std::path::Path;

use crate::build::{Built, build};
use crate::effort::{EFFORT, GPU_IS_HERE, Tier, effort, stuck_after};
use crate::python::environment::{Environment, Unready, is_ci};
use crate::python::{FAKE, TESTS, TOOLS, WITHOUT_PYTORCH, package, pytest, torch};
use crate::steps::{Failure, Step, note, say};
use crate::tally::Tally;
use crate::vllm::{self, Which};

/// The module written in Rust, with its types in a separate file.
const NATIVE: &str = "poorwill._native";

/// Selections of tests beside those without PyTorch: what a quick run leaves of these, and those with PyTorch (with a
/// GPU, or without).
const LEFT_BY_QUICK: &str = "(scales or long or other_versions) and not every_minor and not real_torch";
const OVER_PYTORCH: &str = "real_torch and not gpu";
const OVER_PYTORCH_AND_GPU: &str = "real_torch";

/// Under continuous integration the engines' sources exist, so none of their tests may be skipped.
const NO_SKIPS_OF_ENGINES: [&str; 2] = ["--no-skips-in=test_vllm_", "--no-skips-in=test_sglang_"];

/// The result of tests.
#[derive(Debug)]
pub(crate) enum Tested {
    Ran {
        tally: Tally,
        /// What was not run, and why.
        left_out: Option<String>,
        /// Whether the declared types match the module.
        types: Result<(), Failure>,
    },
    Skipped {
        why: String,
    },
}

/// `cargo xtask python`.
pub(crate) fn run(pytest_args: &[OsString]) -> Result<(), Failure> {
    let built = build()?;
    match test(&built, pytest_args, &effort(Tier::Quick)?)? {
        Tested::Ran { tally, left_out, types } => {
            if let Some(why) = left_out {
                say(&format!("not run: {why}"));
            }
            say(&format!("xtask python: {tally}"));
            types?;
            if tally.failed() > 0 {
                return Err(Failure::Parts { failed: vec![format!("{} tests of Python", tally.failed())] });
            }
        }
        // The reason is already printed.
        Tested::Skipped { why: _ } => {}
    }
    Ok(())
}

/// Installs the built package, and runs its tests without PyTorch, with the engines' sources if they are available.
/// Compares the declared types with the module.
pub(crate) fn test(built: &Built, pytest_args: &[OsString], effort: &str) -> Result<Tested, Failure> {
    let environment = match Environment::ready(TOOLS) {
        Ok(environment) => environment,
        Err(unready) => return Ok(Tested::Skipped { why: unready.skip("the Python package not tested")? }),
    };
    let read = Which::Read(effort);
    let ran = without_torch(&environment, built, pytest_args, effort, (WITHOUT_PYTORCH, read));
    // The comparison writes a cache to its working folder.
    let compared = environment.python(["-m", "mypy.stubtest", NATIVE]).within(environment.folder()).run();
    let (tally, left_out) = ran?;
    Ok(Tested::Ran { tally, left_out, types: compared.map(drop) })
}

/// Runs what a quick run leaves: long tests, those of other versions of vLLM, and again those that scale with the
/// effort. Workers of every minor of vLLM are in a whole run only, and in `cargo xtask vllm`.
pub(crate) fn test_left(built: &Built, effort: &str) -> Result<Tested, Failure> {
    let environment = match Environment::ready(TOOLS) {
        Ok(environment) => environment,
        Err(unready) => return Ok(Tested::Skipped { why: unready.skip("the Python package not tested")? }),
    };
    let (tally, left_out) =
        without_torch(&environment, built, &[], effort, (LEFT_BY_QUICK, Which::Read(effort)))?;
    Ok(Tested::Ran { tally, left_out, types: Ok(()) })
}

/// Runs the marked tests that read these versions of vLLM. Returns the result, and what was left out.
fn without_torch(
    environment: &Environment,
    built: &Built,
    pytest_args: &[OsString],
    effort: &str,
    (marks, versions): (&str, Which<'_>),
) -> Result<(Tally, Option<String>), Failure> {
    package::install(environment, built)?;
    let sources = vllm::sources(environment, versions);
    let sources = fetched(sources, "the plugins not tested in the code of vLLM and SGLang")?;
    let mut arguments = pytest_args.to_vec();
    if is_ci() {
        arguments.extend(NO_SKIPS_OF_ENGINES.map(OsString::from));
    }
    let pytest = pytest(environment, &[TESTS], &arguments, marks);
    let pytest =
        pytest.env(FAKE, &built.fake.to_string_lossy()).env(EFFORT, effort).limit(stuck_after(effort));
    let pytest = match &sources {
        Ok(folders) => folders.named_for(pytest),
        Err(_) => pytest,
    };
    Ok((counted(pytest)?, sources.err()))
}

/// Runs the tests that need PyTorch; none may be skipped.
pub(crate) fn test_over_torch(built: &Built, effort: &str) -> Result<Tested, Failure> {
    const OMITTED: &str = "the Python package not tested over PyTorch";
    let environment = match Environment::ready(TOOLS) {
        Ok(environment) => environment,
        Err(unready) => return Ok(Tested::Skipped { why: unready.skip(OMITTED)? }),
    };
    package::install(&environment, built)?;
    let sources = || vllm::sources(&environment, Which::Run);
    let there = torch::ready(&environment).and_then(|torch| Ok((torch, sources()?)));
    let (torch, sources) = match fetched(there, OMITTED)? {
        Ok(there) => there,
        Err(why) => return Ok(Tested::Skipped { why }),
    };
    let which = if Path::new(GPU_IS_HERE).exists() { OVER_PYTORCH_AND_GPU } else { OVER_PYTORCH };
    let pytest = pytest(&environment, &[TESTS], &["--no-skips".into()], which);
    let pytest =
        pytest.env(FAKE, &built.fake.to_string_lossy()).env(EFFORT, effort).limit(stuck_after(effort));
    let tally = counted(sources.named_for(pytest).env("PYTHONPATH", &torch.to_string_lossy()))?;
    Ok(Tested::Ran { tally, left_out: None, types: Ok(()) })
}

/// The fetched result, or what is not run without it: a failure under continuous integration.
fn fetched<T>(outcome: Result<T, Failure>, omitted: &str) -> Result<Result<T, String>, Failure> {
    match outcome {
        Ok(there) => Ok(Ok(there)),
        Err(failure @ Failure::Fetch { .. }) => {
            note(&format!("!!! {failure}"));
            Unready::NoTools(failure).skip(omitted).map(Err)
        }
        Err(other) => Err(other),
    }
}

/// Runs pytest and counts.
fn counted(pytest: Step) -> Result<Tally, Failure> {
    let mut tally = Tally::default();
    let typed = pytest.typed().to_owned();
    let tested = pytest.run_watched(|line| tally.add_pytest(line));
    match tested {
        Ok(_) if tally.all() == 0 => Err(Failure::NoTests { typed }),
        // The failures are counted, and pytest has printed them.
        Err(Failure::Status { .. }) if tally.failed() > 0 => Ok(tally),
        Ok(_) => Ok(tally),
        Err(failure) => Err(failure),
    }
}
