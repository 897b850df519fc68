//! `cargo xtask test`: the tests of the workspace, in two tiers.
//!
//! - The quick tier is for newcomers and developers. It runs every promise on the host device. Promises about devices
//!   run over the fake CUDA library as well, and on an NVIDIA GPU if there is one. It also runs documentation tests
//!   and the Python package's, with sources of the oldest and the newest vLLM, which are fetched once. Random tests
//!   make a tenth of their usual cases.
//! - `--full` runs everything: usual cases, long tests, all versions of vLLM, the page of rotation in a browser, stock
//!   clients and real engines of a rotation, and the Python package over PyTorch itself.
//! - `--rest` is what a quick run leaves of `--full`: the tests that it did not run, among them those of other vLLMs,
//!   and again those that scale with the effort. These include all on a GPU. `.ci/run` does one and then the other.
//!
//! Only `--full` and `cargo xtask vllm` run our worker in that of every minor of vLLM.
//!
//! One [`build`](mod@crate::build) makes every program, and the [`runner`] runs each test in its own process. A failure does
//! not stop the other tests. The end reports what was not run, and why.
//!
//! With arguments it is one `cargo test` that takes them, for the whole workspace unless they choose packages.
//! Benchmarks that compile a peer are left out, since their peers are not ours to test. `cargo xtask lint` compiles
//! them, and `cargo test --package` tests one.

mod browser;
mod logs;
mod runner;
mod seen;
mod waiting;

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use self::logs::Logs;
use self::runner::{DEVICE, Results, Test};
use self::seen::Seen;
use crate::bench::peer_packages;
use crate::build::{Built, Program, build};
use crate::effort::{EFFORT, GPU_IS_HERE, STUCK_AFTER, Tier, effort, jobs};
use crate::python_tests::{self, Tested};
use crate::steps::{Failure, Step, note, say};
use crate::tally::Tally;
use crate::toolchain::target_folder;
use crate::{ptx, rotation};

/// Name of the programs whose tests may differ between devices.
const PROMISES: &str = "promises";

/// Name of the programs about the CUDA driver: over the fake library, or on a GPU.
const CUDA: &str = "cuda";

/// Packages whose tests run whole services.
const SERVICES: [&str; 6] = [
    "poorwill-cli",
    "poorwill-fleet",
    "poorwill-front",
    "poorwill-local",
    "poorwill-rotate",
    "poorwill-router",
];

const GPU: &str = "cuda:0";

const NO_GPU: &str = "no NVIDIA GPU here: nothing was run on one";

/// In cargo's target folder: the output of tests, and a quick run's record for `--rest`.
const FOLDER: &str = "xtask-test";
const SEEN: &str = "seen.txt";
const LOGS: &str = "logs";

/// Long tests run whole fleets and demos, which need memory.
const LONG_AT_A_TIME: usize = 2;

/// How many of the slowest tests the end lists.
const SLOWEST: usize = 10;

/// The state of the run.
#[derive(Debug)]
struct Run {
    tier: Tier,
    effort: String,
    /// In cargo's target folder.
    folder: PathBuf,
    logs: Logs,
    results: Results,
    /// Parts that failed, each with its reason.
    failures: Vec<String>,
    /// Parts that were not run, each with its reason.
    left_out: Vec<String>,
}

/// `cargo xtask test`, `--full` and `--rest`.
pub(crate) fn run(tier: Tier) -> Result<(), Failure> {
    let effort = effort(tier)?;
    let mut run = Run::begin(tier, effort)?;
    if tier == Tier::Quick {
        run.forget_seen()?;
    }
    let built = build()?;
    let start = Instant::now();
    run.programs(&built)?;
    if tier != Tier::Rest {
        run.documentation();
    }
    run.gpu(&built.programs);
    run.python(&built);
    if tier == Tier::Quick {
        run.write_seen()?;
    } else {
        run.rotation();
        run.kernels();
    }
    run.end(built.took, start.elapsed())
}

/// Runs one `cargo test` with these arguments.
pub(crate) fn run_chosen(cargo_args: &[OsString]) -> Result<(), Failure> {
    let mut tally = Tally::default();
    let took = Step::cargo(arguments(cargo_args)).run_watched(|line| tally.add(line))?;
    say(&format!("xtask test: {tally}, ran in {:.1} s", took.as_secs_f64()));
    Ok(())
}

/// `cargo xtask test --repeat N`: repeats every Rust test that waits, sleeps or has a deadline.
pub(crate) fn repeat(times: NonZero<u32>) -> Result<(), Failure> {
    let effort = effort(Tier::Quick)?;
    let mut run = Run::begin(Tier::Quick, effort)?;
    let built = build()?;
    let chosen = run.chosen(&built.programs)?.beside;
    let mut folders: Vec<&Path> = built.programs.iter().map(|program| &*program.folder).collect();
    folders.sort_unstable();
    folders.dedup();
    let mut waiting = HashSet::new();
    for folder in folders {
        let found = waiting::tests_below(folder, "rs");
        let found = found.map_err(|cause| Failure::File { path: folder.to_owned(), cause })?;
        waiting.extend(found.into_iter().map(|name| (folder, name)));
    }
    let last = |name: &str| name.rsplit("::").next().unwrap_or(name).to_owned();
    let once: Vec<Test> = chosen
        .into_iter()
        .filter(|test| waiting.contains(&(&*test.program.folder, last(&test.name))))
        .collect();
    note(&format!("==> {} tests that wait, sleep or have a deadline, {times} times", once.len()));
    let all: Vec<Test> = (0..times.get()).flat_map(|_| once.iter().cloned()).collect();
    let start = Instant::now();
    run.results = runner::run(&all, jobs(), &run.effort, run.logs.folder());
    if run.results.tally().all() == 0 {
        return Err(Failure::NoTests { typed: "cargo xtask test --repeat".to_owned() });
    }
    run.end(built.took, start.elapsed())
}

impl Run {
    fn begin(tier: Tier, effort: String) -> Result<Run, Failure> {
        let folder = target_folder()?.join(FOLDER);
        if tier == Tier::Rest && !folder.join(SEEN).is_file() {
            return Err(Failure::Usage {
                problem: "no quick run has ended here, and `--rest` goes on from one: \
                          run `cargo xtask test` first, or `cargo xtask test --full` instead"
                    .to_owned(),
            });
        }
        let logs = Logs::begin(&folder.join(LOGS))?;
        let (results, failures, left_out) = Default::default();
        Ok(Run { tier, effort, folder, logs, results, failures, left_out })
    }

    /// Runs the programs' tests, on each of their devices.
    fn programs(&mut self, built: &Built) -> Result<(), Failure> {
        let chosen = self.chosen(&built.programs)?;
        let has_browser = chosen.long.is_empty() || browser::is_here();
        if !has_browser {
            self.left_out.push(browser::MISSING.to_owned());
        }
        let can_run = |test: &Test| has_browser || !browser::is_needed(&test.program.target, &test.name);
        let long: Vec<Test> = chosen.long.into_iter().filter(can_run).collect();
        for (tests, jobs, manner) in
            [(chosen.beside, jobs(), "several at a time"), (long, LONG_AT_A_TIME, "two at a time")]
        {
            if tests.is_empty() {
                continue;
            }
            note(&format!("==> {} tests, {manner}, {EFFORT}={}", tests.len(), self.effort));
            self.results.extend(runner::run(&tests, jobs, &self.effort, self.logs.folder()));
        }
        if self.results.tally().all() == 0 {
            return Err(Failure::NoTests { typed: "cargo xtask test".to_owned() });
        }
        Ok(())
    }

    fn chosen<'a>(&self, programs: &'a [Program]) -> Result<Chosen<'a>, Failure> {
        let seen = match self.tier {
            Tier::Rest => self.read_seen()?,
            Tier::Quick | Tier::Full => Seen::default(),
        };
        let mut chosen = Chosen::default();
        for program in in_order(programs) {
            let list = |ignored| {
                runner::list(program, ignored)
                    .map_err(|cause| Failure::File { path: program.path.clone(), cause })
            };
            let long: HashSet<String> = list(true)?.into_iter().collect();
            for name in list(false)? {
                for device in devices_of(program) {
                    let test = Test { program, name: name.clone(), device };
                    if long.contains(&name) {
                        if self.tier != Tier::Quick {
                            chosen.long.push(test);
                        }
                    } else if !seen.is_done(&test.id()) {
                        chosen.beside.push(test);
                    }
                }
            }
        }
        Ok(chosen)
    }

    /// One test at a time, in one process per program: they share the GPU, whose context is slow to create. A test
    /// that holds a stream may block all others.
    fn gpu(&mut self, programs: &[Program]) {
        if !Path::new(GPU_IS_HERE).exists() {
            self.left_out.push(NO_GPU.to_owned());
            return;
        }
        for program in programs.iter().filter(|program| is_about_devices(program)) {
            let step = Step::program(program.path.as_os_str(), ["--test-threads=1"]);
            let step = step.within(&program.folder).env(DEVICE, GPU).env(EFFORT, &self.effort);
            self.watched(step);
        }
    }

    fn documentation(&mut self) {
        let step = Step::cargo(arguments(&["--doc".into()])).limit(STUCK_AFTER);
        self.watched(step);
    }

    /// Runs a step that prints results as test programs do.
    fn watched(&mut self, step: Step) {
        let typed = step.typed().to_owned();
        let mut tally = Tally::default();
        let outcome = step.run_watched(|line| tally.add(line)).map(drop);
        self.results.count(tally);
        self.note_failure(&typed, outcome);
    }

    fn python(&mut self, built: &Built) {
        note("==> the Python package");
        let tested = match self.tier {
            Tier::Rest => python_tests::test_left(built, &self.effort),
            Tier::Quick | Tier::Full => python_tests::test(built, &[], &self.effort),
        };
        self.part("the Python package", tested);
        if self.tier != Tier::Quick {
            note("==> the Python package over PyTorch");
            let tested = python_tests::test_over_torch(built, &self.effort);
            self.part("the Python package over PyTorch", tested);
        }
    }

    fn rotation(&mut self) {
        let clients = ("clients of a rotation", rotation::clients as fn() -> _);
        for (name, run) in [clients, ("engines of a rotation", rotation::engines)] {
            note(&format!("==> {name}"));
            match run() {
                Ok(why) => self.left_out.extend(why),
                Err(failure) => self.note_failure(name, Err(failure)),
            }
        }
    }

    fn kernels(&mut self) {
        note("==> kernels, compiled again");
        match ptx::check() {
            Ok(why) => self.left_out.extend(why),
            Err(failure) => self.note_failure("the GPU's kernels", Err(failure)),
        }
    }

    /// Records the result of a part.
    fn part(&mut self, name: &str, outcome: Result<Tested, Failure>) {
        match outcome {
            Ok(Tested::Ran { tally, left_out, types }) => {
                self.left_out.extend(left_out);
                self.results.count(tally);
                if tally.failed() > 0 {
                    self.failures.push(format!("{name}: {tally}"));
                }
                self.note_failure(&format!("{name}'s types"), types);
            }
            Ok(Tested::Skipped { why }) => self.left_out.push(why),
            Err(failure) => self.note_failure(name, Err(failure)),
        }
    }

    fn note_failure(&mut self, name: &str, outcome: Result<(), Failure>) {
        if let Err(failure) = outcome {
            note(&format!("!!! {failure}"));
            self.failures.push(name.to_owned());
        }
    }

    /// Prints the results of all parts.
    fn end(mut self, built: Duration, ran: Duration) -> Result<(), Failure> {
        let results = &self.results;
        say("the slowest tests:");
        for (took, id) in results.slowest(SLOWEST) {
            say(&format!("{:>8.1} s  {id}", took.as_secs_f64()));
        }
        for why in &self.left_out {
            say(&format!("not run: {why}"));
        }
        for why in skips(results.skipped()) {
            say(&why);
        }
        for id in results.failed() {
            say(&format!("failed: {id}"));
        }
        let [built, ran] = [built, ran].map(|took| took.as_secs_f64());
        say(&format!("xtask test ({}): built in {built:.1} s, ran in {ran:.1} s", self.tier));
        say(&results.tally().to_string());
        if !results.failed().is_empty() {
            self.failures.push(format!("{} tests of Rust", results.failed().len()));
        }
        if self.failures.is_empty() { Ok(()) } else { Err(Failure::Parts { failed: self.failures }) }
    }

    /// So that a run that ends early leaves no older record.
    fn forget_seen(&self) -> Result<(), Failure> {
        let path = self.folder.join(SEEN);
        let removed = if path.exists() { fs::remove_file(&path) } else { Ok(()) };
        removed.map_err(|cause| Failure::File { path, cause })
    }

    fn write_seen(&self) -> Result<(), Failure> {
        let path = self.folder.join(SEEN);
        let seen = Seen::new(self.results.ids(), self.results.scaling());
        seen.write(&path).map_err(|cause| Failure::File { path, cause })
    }

    fn read_seen(&self) -> Result<Seen, Failure> {
        let path = self.folder.join(SEEN);
        Seen::read(&path).map_err(|cause| Failure::File { path, cause })
    }
}

/// The tests of a tier.
#[derive(Debug, Default)]
struct Chosen<'a> {
    beside: Vec<Test<'a>>,
    /// Tests that a quick run leaves out. They take long or need much.
    long: Vec<Test<'a>>,
}

/// A line for each reason, with the number of its tests.
fn skips(skipped: &[(String, String)]) -> Vec<String> {
    let mut by_reason: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (id, reason) in skipped {
        by_reason.entry(reason).or_default().push(id);
    }
    let line = |(reason, ids): (&str, Vec<&str>)| match ids[..] {
        [id] => format!("not run: {id}: {reason}"),
        _ => format!("not run: {} tests, as {}: {reason}", ids.len(), ids[0]),
    };
    by_reason.into_iter().map(line).collect()
}

/// Programs of whole services first: their tests wait rather than compute, and leave the cores to the others.
fn in_order(programs: &[Program]) -> Vec<&Program> {
    let waits = |program: &&Program| SERVICES.contains(&&*program.package);
    let (first, then): (Vec<_>, Vec<_>) = programs.iter().partition(waits);
    first.into_iter().chain(then).collect()
}

/// The devices of a program's tests without a GPU.
fn devices_of(program: &Program) -> &'static [&'static str] {
    match &*program.target {
        name if name.starts_with(PROMISES) => &["host", "fake"],
        CUDA => &["fake"],
        _ => &["host"],
    }
}

fn is_about_devices(program: &Program) -> bool {
    program.target.starts_with(PROMISES) || program.target == CUDA
}

/// The arguments of `cargo`.
fn arguments(cargo_args: &[OsString]) -> Vec<OsString> {
    let mut arguments = vec!["test".into()];
    if !chooses_packages(cargo_args) {
        arguments.push("--workspace".into());
        arguments.extend(peer_packages().flat_map(|package| ["--exclude".into(), package.into()]));
    }
    arguments.push("--locked".into());
    arguments.extend_from_slice(cargo_args);
    arguments
}

/// With `--workspace`, cargo would ignore a choice of packages.
fn chooses_packages(cargo_args: &[OsString]) -> bool {
    cargo_args.iter().map(|arg| arg.to_string_lossy()).take_while(|arg| arg != "--").any(|arg| {
        arg == "--package"
            || arg.starts_with("--package=")
            || arg.starts_with("-p")
            || arg == "--workspace"
            || arg.starts_with("--manifest-path")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments_of(words: &[&str]) -> Vec<OsString> {
        arguments(&words.iter().map(OsString::from).collect::<Vec<_>>())
    }

    fn program(package: &str, target: &str) -> Program {
        Program { package: package.into(), target: target.into(), folder: "/p".into(), path: "/p/t".into() }
    }

    #[test]
    fn arguments_reach_cargo_as_given() {
        let ours = ["test", "--workspace", "--exclude", "poorwill-bench-alloc", "--locked"];
        assert_eq!(arguments_of(&["--doc"]), [&ours[..], &["--doc"]].concat());
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
    fn promises_are_tested_on_every_device_and_the_rest_once() {
        assert_eq!(devices_of(&program("poorwill-core", "promises")), ["host", "fake"]);
        assert_eq!(devices_of(&program("poorwill-core", "promises_cycles")), ["host", "fake"]);
        assert_eq!(devices_of(&program("poorwill-driver", "cuda")), ["fake"]);
        assert_eq!(devices_of(&program("poorwill-core", "plain")), ["host"]);
        assert!(is_about_devices(&program("poorwill-driver", "cuda")));
        assert!(!is_about_devices(&program("poorwill", "poorwill")));
    }

    #[test]
    fn skips_are_listed_by_reason() {
        let skipped = [("a", "no room"), ("b", "no time"), ("c", "no room")];
        let skipped = skipped.map(|(id, reason)| (id.to_owned(), reason.to_owned()));
        assert_eq!(skips(&skipped), ["not run: 2 tests, as a: no room", "not run: b: no time"]);
    }

    #[test]
    fn tests_that_wait_begin_first() {
        let programs =
            ["xtask", "poorwill-cli", "poorwill", "poorwill-rotate"].map(|name| program(name, "t"));
        let order: Vec<&str> = in_order(&programs).iter().map(|program| &*program.package).collect();
        assert_eq!(order, ["poorwill-cli", "poorwill-rotate", "xtask", "poorwill"]);
    }
}
