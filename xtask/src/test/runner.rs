//! Runs tests, each in its own process, in parallel.
//!
//! A process per test isolates environment variables, signals, crashes and hangs. All programs share the machine: a
//! waiting test leaves its core to others. A test's output goes to a file, which is printed if it fails. A test that
//! runs for twenty minutes is stuck: it is killed with all its children, and has failed.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::build::Program;
use crate::effort::EFFORT;
use crate::guard::Guard;
use crate::steps::note;
use crate::tally::Tally;

/// The device of the tests; `poorwill_testkit::device` reads it.
pub(super) const DEVICE: &str = "POORWILL_TEST_DEVICE";

/// Printed by a test that scales with the effort, in `poorwill_testkit::effort`.
const SCALES: &str = "poorwill effort: ";

/// Printed by a test that ends early, since the machine or the device lacks something.
const SKIPPED: [&str; 2] = ["skipped: ", ": skipped on "];

/// No test takes this long, even on a slow machine.
const STUCK_AFTER: Duration = Duration::from_secs(20 * 60);

/// Intervals between checks of a running test: short at first, as most tests are.
const LOOKS: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(20)];

/// After this time without output, the running tests are listed.
const SILENCE: Duration = Duration::from_secs(30);

/// A test and its device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Test<'a> {
    pub(super) program: &'a Program,
    pub(super) name: String,
    pub(super) device: &'static str,
}

/// The result of one test.
#[derive(Debug)]
struct Ended {
    id: String,
    took: Duration,
    verdict: Verdict,
    scales: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    /// With the reason.
    Skipped(String),
    Failed,
}

/// The results of all tests.
#[derive(Debug, Default)]
pub(super) struct Results {
    tally: Tally,
    failed: Vec<String>,
    /// Tests that ended early, with reasons.
    skipped: Vec<(String, String)>,
    /// Tests that scale with the effort.
    scaling: Vec<String>,
    times: Vec<(Duration, String)>,
}

impl Test<'_> {
    /// Its name in output and in the record for the next run.
    pub(super) fn id(&self) -> String {
        let Program { package, target, .. } = self.program;
        let on = if self.device == "host" { String::new() } else { format!(" on {}", self.device) };
        format!("{package} {target} {}{on}", self.name)
    }
}

/// The names of a program's tests.
pub(super) fn list(program: &Program, ignored: bool) -> io::Result<Vec<String>> {
    let mut command = command(program);
    command.args(["--list", "--format", "terse"]).args(ignored.then_some("--ignored"));
    let output = command.stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(io::Error::other(format!("--list: {}", output.status)));
    }
    let names = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(names.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// Runs `tests`, `jobs` at a time, with `effort`. Their output goes to files in `logs`.
pub(super) fn run(tests: &[Test], jobs: usize, effort: &str, logs: &Path) -> Results {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Results::default());
    let board = Board::default();
    let guard = Guard::start();
    thread::scope(|scope| {
        for _ in 0..jobs.min(tests.len()) {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(test) = tests.get(number) else { break };
                    board.begin(test.id());
                    // No two running tests share a file.
                    let log = logs.join(format!("{number}.log"));
                    let ended = one(test, effort, &log, &guard, || board.look());
                    board.end(&ended.id);
                    let mut results = results.lock().expect("no thread panics");
                    results.add(ended, &log);
                    let done = results.times.len();
                    if done.is_multiple_of(100) || done == tests.len() {
                        note(&format!("    {done} of {} tests: {}", tests.len(), results.tally));
                    }
                }
            });
        }
    });
    results.into_inner().expect("no thread panics")
}

fn one(test: &Test, effort: &str, log: &Path, guard: &Guard, look: impl Fn()) -> Ended {
    let start = Instant::now();
    let outcome = start_of(test, effort, log, guard).and_then(|mut child| {
        let ended = end_of(&mut child, start, guard, look);
        guard.forget(child.id());
        ended
    });
    let text = fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let verdict = match outcome {
        // An exit code of 0 alone is not a pass.
        Ok(true) if text.contains("test result: ok. 1 passed") => {
            text.lines().find_map(reason).map_or(Verdict::Passed, Verdict::Skipped)
        }
        Ok(_) => Verdict::Failed,
        Err(error) => {
            note(&format!("!!! {}: {error}", test.id()));
            Verdict::Failed
        }
    };
    Ended { id: test.id(), took: start.elapsed(), verdict, scales: text.contains(SCALES) }
}

/// The reason in a line by which a test ended early. The test's id has the device.
fn reason(line: &str) -> Option<String> {
    let [plainly, on_a_device] = SKIPPED;
    let why = match line.split_once(on_a_device) {
        Some((_, rest)) => rest.split_once(": ").map_or(rest, |(_, why)| why),
        None => line.split_once(plainly)?.1,
    };
    Some(why.to_owned())
}

fn start_of(test: &Test, effort: &str, log: &Path, guard: &Guard) -> io::Result<Child> {
    let file = File::create(log)?;
    let mut command = command(test.program);
    command.args(["--exact", "--include-ignored", "--nocapture", &test.name]);
    command.env(DEVICE, test.device).env(EFFORT, effort);
    guard.spawn(command.stdout(file.try_clone()?).stderr(file))
}

/// Waits for a test's process. Returns whether it succeeded.
fn end_of(child: &mut Child, start: Instant, guard: &Guard, look: impl Fn()) -> io::Result<bool> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        if start.elapsed() > STUCK_AFTER {
            guard.kill(child.id());
            // Needed if there is no guard.
            child.kill()?;
            child.wait()?;
            return Err(io::Error::other(format!("ended, since it ran for {} s", STUCK_AFTER.as_secs())));
        }
        look();
        let [soon, later] = LOOKS;
        thread::sleep(if start.elapsed() < later * 5 { soon } else { later });
    }
}

/// A test program, run as cargo would.
pub(super) fn command(program: &Program) -> Command {
    let mut command = Command::new(&program.path);
    command.current_dir(&program.folder).env("CARGO_MANIFEST_DIR", &program.folder).stdin(Stdio::null());
    command
}

impl Results {
    pub(super) fn tally(&self) -> Tally {
        self.tally
    }

    /// Counts tests that were run elsewhere.
    pub(super) fn count(&mut self, tally: Tally) {
        self.tally += tally;
    }

    pub(super) fn failed(&self) -> &[String] {
        &self.failed
    }

    /// Tests that ended early, with reasons.
    pub(super) fn skipped(&self) -> &[(String, String)] {
        &self.skipped
    }

    /// Tests that scale with the effort.
    pub(super) fn scaling(&self) -> &[String] {
        &self.scaling
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = &String> {
        self.times.iter().map(|(_, id)| id)
    }

    /// As many of the slowest, the slowest first.
    pub(super) fn slowest(&self, count: usize) -> Vec<&(Duration, String)> {
        let mut times: Vec<_> = self.times.iter().collect();
        times.sort_unstable_by_key(|(took, _)| std::cmp::Reverse(*took));
        times.truncate(count);
        times
    }

    pub(super) fn extend(&mut self, others: Results) {
        self.tally += others.tally;
        self.failed.extend(others.failed);
        self.skipped.extend(others.skipped);
        self.scaling.extend(others.scaling);
        self.times.extend(others.times);
    }

    fn add(&mut self, ended: Ended, log: &PathBuf) {
        let has_failed = ended.verdict == Verdict::Failed;
        match ended.verdict {
            Verdict::Passed => self.tally += Tally::ONE_PASSED,
            Verdict::Skipped(reason) => {
                self.tally += Tally::ONE_SKIPPED;
                self.skipped.push((ended.id.clone(), reason));
            }
            Verdict::Failed => {
                self.tally += Tally::ONE_FAILED;
                let text = fs::read(log).unwrap_or_default();
                note(&format!("!!! FAILED: {}\n{}", ended.id, String::from_utf8_lossy(&text)));
                self.failed.push(ended.id.clone());
            }
        }
        if !has_failed {
            // A leftover log does no harm.
            let _ = fs::remove_file(log);
        }
        if ended.scales {
            self.scaling.push(ended.id.clone());
        }
        self.times.push((ended.took, ended.id));
    }
}

/// The running tests, for progress messages.
#[derive(Debug, Default)]
struct Board(Mutex<Running>);

#[derive(Debug, Default)]
struct Running {
    tests: Vec<(String, Instant)>,
    reported: Option<Instant>,
}

impl Board {
    fn begin(&self, id: String) {
        self.0.lock().expect("no thread panics").tests.push((id, Instant::now()));
    }

    fn end(&self, id: &str) {
        self.0.lock().expect("no thread panics").tests.retain(|(running, _)| running != id);
    }

    /// Lists long-running tests from time to time.
    fn look(&self) {
        let mut running = self.0.lock().expect("no thread panics");
        let silence = running.reported.get_or_insert_with(Instant::now).elapsed();
        if silence < SILENCE {
            return;
        }
        running.reported = Some(Instant::now());
        let long = running.tests.iter().filter(|(_, since)| since.elapsed() >= SILENCE);
        for (id, since) in long {
            note(&format!("    still running after {} s: {id}", since.elapsed().as_secs()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that behaves like a test program, by this script.
    fn program(folder: &Path, script: &str) -> Program {
        let path = folder.join("program");
        // Written by another process: a file that this one has open for writing cannot be executed while a parallel
        // thread forks.
        let mut write = Command::new("sh");
        write
            .args(["-c", "printf '#!/bin/sh\\n%s\\n' \"$1\" > \"$2\" && chmod +x \"$2\"", "sh", script])
            .arg(&path);
        assert!(write.status().unwrap().success());
        Program { package: "crate".into(), target: "promises".into(), folder: folder.into(), path }
    }

    fn scratch(name: &str) -> PathBuf {
        let target = crate::toolchain::target_folder().unwrap();
        let folder = target.join(format!("xtask-runner-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn a_test_has_passed_only_if_it_says_so() {
        let folder = scratch("verdicts");
        let passes = "echo 'test result: ok. 1 passed; 0 failed'";
        let script = format!(
            "case \"$4\" in passes) {passes};; scales) echo '{SCALES}quick'; {passes};; leaves) exit 0;; \
             skips) echo 'x: skipped on host: why'; {passes};; fails) {passes}; exit 101;; esac"
        );
        let program = program(&folder, &script);
        let names = ["passes", "scales", "leaves", "skips", "fails"];
        let tests: Vec<Test> = names
            .iter()
            .map(|name| Test { program: &program, name: (*name).into(), device: "fake" })
            .collect();
        let results = run(&tests, 3, "quick", &folder);
        assert_eq!(results.tally, Tally::of(2, 2, 1));
        let mut failed = results.failed;
        failed.sort();
        assert_eq!(failed, ["crate promises fails on fake", "crate promises leaves on fake"]);
        assert_eq!(results.skipped, [("crate promises skips on fake".to_owned(), "why".to_owned())]);
        assert_eq!(results.scaling, ["crate promises scales on fake"]);
        assert_eq!(results.times.len(), names.len());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_skip_says_why() {
        let reason_in = |line| reason(line).unwrap();
        assert_eq!(reason_in("skipped: there is no: Python"), "there is no: Python");
        assert_eq!(reason_in("a::b: skipped: no room"), "no room");
        assert_eq!(reason_in("a::b: skipped on fake: held together"), "held together");
        assert_eq!(reason("3 skipped"), None);
    }

    #[test]
    fn outputs_of_tests_stay_apart() {
        let folder = scratch("apart");
        let program = program(&folder, "echo 'test result: ok. 1 passed; 0 failed'");
        let test = Test { program: &program, name: "passes".into(), device: "host" };
        let results = run(&vec![test; 100], 8, "quick", &folder);
        assert_eq!(results.tally, Tally::of(100, 0, 0));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn names_are_those_of_tests() {
        let folder = scratch("names");
        let program =
            program(&folder, "echo 'a::b: test'; echo 'c: benchmark'; test -z \"$4\" || echo 'd: test'");
        assert_eq!(list(&program, false).unwrap(), ["a::b"]);
        assert_eq!(list(&program, true).unwrap(), ["a::b", "d"]);
        fs::remove_dir_all(folder).unwrap();
    }
}
