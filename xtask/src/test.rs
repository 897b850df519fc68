//! `cargo xtask test`: every test of the workspace with plain `cargo test`.
//!
//! Without arguments it builds first and then runs unit, integration and documentation tests, so
//! that the two durations stand apart. Then it runs the tests of promises again, over the fake CUDA library
//! and, where there is one, on the first NVIDIA GPU: a [`Pass`] each, which tells them by an environment variable
//! what they run on. Where there is a browser, rotation's page is tried in it. Last come the tests of the Python
//! package. A failure in one crate or pass does not keep the others from being tested, and no test at all counts as a
//! failure.
//!
//! With arguments it is one `cargo test` that takes them, for the whole workspace unless they choose packages.
//! Benchmarks that compile a peer are left out, for their peers are not ours to test: `cargo xtask lint` compiles
//! them, and `cargo test --package` tests one.

use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::bench::peer_packages;
use crate::python::{self, Tested};
use crate::steps::{Failure, Step, note, say};

/// One run of tests.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Pass {
    /// What it runs on.
    name: &'static str,
    /// What names it to the tests.
    device: &'static str,
    /// All of the workspace where none is named.
    packages: &'static [&'static str],
    /// What cargo is to run of them; all tests where nothing is said.
    targets: &'static [&'static str],
    /// What the test programs are given.
    test_args: &'static [&'static str],
}

/// The variable that `poorwill_testkit::device` reads.
const DEVICE: &str = "POORWILL_TEST_DEVICE";

/// The crates whose tests run on any device.
const PROMISES: &[&str] = &["poorwill-core", "poorwill", "poorwill-driver"];

const HOST: Pass =
    Pass { name: "on the host device", device: "host", packages: &[], targets: &[], test_args: &[] };
const FAKE: Pass = Pass {
    name: "on the fake CUDA library",
    device: "fake",
    packages: PROMISES,
    targets: &["--tests"],
    test_args: &[],
};
/// One test at a time: they share the GPU, and one that holds a stream may hold up all.
const GPU: Pass = Pass {
    name: "on the NVIDIA GPU",
    device: "cuda:0",
    packages: PROMISES,
    targets: &["--tests"],
    test_args: &["--test-threads=1"],
};
/// With what was built for the first pass: a choice of packages, or of `--test cli`, has some of it built again, with
/// other features or other information for debuggers. One test at a time, as each has a browser.
const PAGE: Pass = Pass {
    name: "rotation's page in a browser",
    device: "host",
    packages: &[],
    targets: &["--tests"],
    test_args: &["rotate::page::", "--ignored", "--test-threads=1"],
};

/// Exists where NVIDIA's kernel driver shows a GPU.
const GPU_IS_HERE: &str = "/dev/nvidiactl";

const NO_GPU: &str = "no NVIDIA GPU here: not run on one";

/// Any of these is Chromium.
const BROWSERS: [&str; 3] = ["chromium", "google-chrome", "chromium-browser"];
const BROWSER_DRIVER: &str = "chromedriver";

const NO_BROWSER: &str = "no Chromium with its chromedriver here: rotation's page not tried in a browser";
const BROWSER_PACKAGES: &str = "on Debian, install chromium and chromium-driver";

pub(crate) fn run(cargo_args: &[OsString]) -> Result<(), Failure> {
    if !cargo_args.is_empty() {
        let mut tally = Tally::default();
        let took = Step::cargo(arguments(cargo_args)).run_watched(|line| tally.add(line))?;
        say(&format!("xtask test: {tally}, ran in {:.1} s", took.as_secs_f64()));
        return Ok(());
    }
    let mut built = Step::cargo(HOST.arguments(&["--no-run"])).run()?;
    let has_gpu = Path::new(GPU_IS_HERE).exists();
    let has_browser = has_browser(major_of);
    let (mut all, mut ran, mut failed) = (Tally::default(), Duration::ZERO, None);
    for pass in passes(has_gpu, has_browser) {
        note(&format!("==> {}", pass.name));
        let mut tally = Tally::default();
        let step = pass.step();
        let typed = step.typed().to_owned();
        let outcome = step.run_watched(|line| tally.add(line));
        let outcome = outcome
            .and_then(|took| if tally.passed == 0 { Err(Failure::NoTests { typed }) } else { Ok(took) });
        note(&format!("--- {}: {tally}", pass.name));
        match outcome {
            Ok(took) => ran += took,
            Err(failure) => failed = failed.or(Some(failure)),
        }
        all += tally;
    }
    let mut skipped = Vec::new();
    if !has_gpu {
        note(&format!("xtask test: {NO_GPU} ({GPU_IS_HERE} does not exist)"));
        skipped.push(NO_GPU.to_owned());
    }
    if !has_browser {
        note(&format!("xtask test: {NO_BROWSER} ({BROWSER_PACKAGES})"));
        skipped.push(NO_BROWSER.to_owned());
    }
    note("==> the Python package");
    match python::test(&[]) {
        Ok(Tested::Ran { tally, built: build, ran: run }) => {
            all += tally;
            built += build;
            ran += run;
        }
        Ok(Tested::Skipped { why }) => skipped.push(why),
        Err(failure) => failed = failed.or(Some(failure)),
    }
    match failed {
        Some(failure) => Err(failure),
        None => {
            say(&summary(all, &skipped, built, ran));
            Ok(())
        }
    }
}

/// What is run without arguments.
fn passes(has_gpu: bool, has_browser: bool) -> Vec<Pass> {
    let mut passes = vec![HOST, FAKE];
    passes.extend(has_gpu.then_some(GPU));
    passes.extend(has_browser.then_some(PAGE));
    passes
}

/// Whether all that the page's tests start is here, and goes together: a driver drives browsers of its own version.
fn has_browser(major_of: impl Fn(&str) -> Option<u32>) -> bool {
    let browser = BROWSERS.into_iter().find_map(&major_of);
    browser.is_some() && browser == major_of(BROWSER_DRIVER)
}

/// The major version that a program says it has; nothing where there is none that runs.
fn major_of(program: &str) -> Option<u32> {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    output.status.success().then(|| major_in(&said)).flatten()
}

fn major_in(said: &str) -> Option<u32> {
    said.split_whitespace().find_map(|word| word.split_once('.')?.0.parse().ok())
}

fn summary(tally: Tally, skipped: &[String], built: Duration, ran: Duration) -> String {
    let [built, ran] = [built, ran].map(|took| took.as_secs_f64());
    let skipped: String = skipped.iter().map(|why| format!("; {why}")).collect();
    format!("xtask test: {tally}, built in {built:.1} s, ran in {ran:.1} s{skipped}")
}

impl Pass {
    fn step(&self) -> Step {
        Step::cargo(self.arguments(&[])).env(DEVICE, self.device)
    }

    /// What `cargo` is called with, `more` among it.
    fn arguments(&self, more: &[&str]) -> Vec<OsString> {
        let mut own: Vec<OsString> = Vec::new();
        own.extend(self.packages.iter().flat_map(|package| ["-p".into(), package.into()]));
        own.extend(self.targets.iter().map(OsString::from));
        own.push("--no-fail-fast".into());
        own.extend(more.iter().map(OsString::from));
        if !self.test_args.is_empty() {
            own.push("--".into());
            own.extend(self.test_args.iter().map(OsString::from));
        }
        arguments(&own)
    }
}

/// What `cargo` is called with.
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
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) ignored: u64,
}

impl Tally {
    fn add(&mut self, line: &str) {
        if let Some((_, result)) = line.split_once("test result: ") {
            self.add_counts(result);
        }
    }

    /// The same for the last line of pytest: `=== 2 passed, 1 skipped in 0.10s ===`.
    pub(crate) fn add_pytest(&mut self, line: &str) {
        let line = line.trim_matches(['=', ' ']);
        let Some((counts, took)) = line.rsplit_once(" in ") else { return };
        let seconds = took.split(' ').next().and_then(|took| took.strip_suffix('s'));
        if seconds.is_some_and(|seconds| seconds.parse::<f64>().is_ok()) {
            self.add_counts(counts);
        }
    }

    fn add_counts(&mut self, result: &str) {
        let words: Vec<&str> = result.split([' ', ';', ',', '.']).filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2) {
            let Ok(count) = pair[0].parse::<u64>() else { continue };
            match pair[1] {
                "passed" => self.passed += count,
                "failed" | "error" | "errors" => self.failed += count,
                "ignored" | "skipped" | "xfailed" => self.ignored += count,
                _ => {}
            }
        }
    }
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} ignored", self.passed, self.failed, self.ignored)
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
        assert_eq!(HOST.arguments(&[]), [&ours[..], &["--no-fail-fast"]].concat());
        assert_eq!(HOST.arguments(&["--no-run"]), [&ours[..], &["--no-fail-fast", "--no-run"]].concat());
        assert_eq!(
            arguments_of(&["pool", "--", "--nocapture"]),
            [&ours[..], &["pool", "--", "--nocapture"]].concat()
        );
    }

    #[test]
    fn the_promises_are_tested_on_every_device_that_is_here() {
        assert_eq!(passes(false, false), [HOST, FAKE]);
        assert_eq!(passes(true, true), [HOST, FAKE, GPU, PAGE]);
        let promises =
            "cargo test --locked -p poorwill-core -p poorwill -p poorwill-driver --tests --no-fail-fast";
        assert_eq!(FAKE.step().typed(), format!("POORWILL_TEST_DEVICE=fake {promises}"));
        assert_eq!(GPU.step().typed(), format!("POORWILL_TEST_DEVICE=cuda:0 {promises} -- --test-threads=1"));
        assert!(HOST.step().typed().starts_with("POORWILL_TEST_DEVICE=host cargo test --workspace "));
    }

    #[test]
    fn the_page_is_tried_where_a_browser_is_with_what_was_built_before() {
        let typed = HOST.step().typed().to_owned();
        let page = "--tests --no-fail-fast -- rotate::page:: --ignored --test-threads=1";
        assert_eq!(PAGE.step().typed(), typed.replace("--no-fail-fast", page));
        assert_eq!(passes(false, true), [HOST, FAKE, PAGE]);
        for (here, is_enough) in [
            (&[("chromium", 156), ("chromedriver", 156)][..], true),
            (&[("google-chrome", 156), ("chromedriver", 156)], true),
            (&[("chromium", 156), ("chromedriver", 140)], false),
            (&[("chromium", 156)], false),
            (&[("chromedriver", 156)], false),
            (&[], false),
        ] {
            let major_of =
                |program: &str| here.iter().find(|(name, _)| *name == program).map(|(_, major)| *major);
            assert_eq!(has_browser(major_of), is_enough, "{here:?}");
        }
        assert_eq!(major_in("Chromium 156.0.8078.79 built on Debian"), Some(156));
        assert_eq!(major_in("ChromeDriver 140.1 (a.b)"), Some(140));
        assert_eq!(major_in("no version"), None);
        assert_eq!(major_of("poorwill-no-such-program"), None);
    }

    #[test]
    fn the_summary_says_what_was_skipped() {
        let tally = Tally { passed: 5, failed: 0, ignored: 1 };
        let [built, ran] = [Duration::from_millis(1200), Duration::from_secs(3)];
        let said = "xtask test: 5 passed, 0 failed, 1 ignored, built in 1.2 s, ran in 3.0 s";
        assert_eq!(summary(tally, &[], built, ran), said);
        let skipped = [NO_GPU.to_owned(), "no Python here".to_owned()];
        assert_eq!(
            summary(tally, &skipped, built, ran),
            format!("{said}; no NVIDIA GPU here: not run on one; no Python here")
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
        tally += tally;
        assert_eq!(tally.to_string(), "10 passed, 2 failed, 2 ignored");
    }

    #[test]
    fn results_of_pytest_are_summed() {
        let mut tally = Tally::default();
        for line in [
            "collected 3 items in 0.1s",
            "========= 1 failed, 22 passed, 2 skipped, 1 xfailed, 3 warnings, 1 error in 0.08s ==========",
            "5 passed in 61.00s (0:01:01)",
            "tests/test_sizes.py ..F.  9 passed in time",
        ] {
            tally.add_pytest(line);
        }
        assert_eq!(tally, Tally { passed: 27, failed: 2, ignored: 3 });
    }
}
