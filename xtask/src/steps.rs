//! Runs one step of a job: prints the command, runs it, prints its duration, and stops at a failure.
//!
//! Steps run in the workspace's root, without standard input.

use std::ffi::OsStr;
use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

pub(crate) use crate::console::{note, say};
use crate::guard::Guard;

/// Variables that change which modules Python finds, or pytest's options.
const FOREIGN: [&str; 3] = ["PYTHONHOME", "PYTHONPATH", "PYTEST_ADDOPTS"];

/// Variables by which cargo tells a program of its package. Ours would have dependencies compiled again whose build
/// scripts read their own, each time that a developer calls cargo in between.
const OF_OUR_PACKAGE: [&str; 2] = ["CARGO_MANIFEST_", "CARGO_PKG_"];

/// A command, and its text for the user to run it again.
#[derive(Debug)]
pub(crate) struct Step {
    command: Command,
    typed: String,
    limit: Option<Duration>,
}

impl Step {
    /// A step that runs the cargo that started us, or else the one on the path.
    pub(crate) fn cargo<A: AsRef<OsStr>>(args: impl IntoIterator<Item = A>) -> Step {
        let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut step = Step::new("cargo", &program, args);
        for (name, _) in std::env::vars_os() {
            if OF_OUR_PACKAGE.iter().any(|ours| name.to_string_lossy().starts_with(ours)) {
                step.command.env_remove(name);
            }
        }
        step
    }

    pub(crate) fn rustc<A: AsRef<OsStr>>(args: impl IntoIterator<Item = A>) -> Step {
        let program = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        Step::new("rustc", &program, args)
    }

    pub(crate) fn program<A: AsRef<OsStr>>(program: &OsStr, args: impl IntoIterator<Item = A>) -> Step {
        Step::new(&quoted(program), program, args)
    }

    fn new<A: AsRef<OsStr>>(name: &str, program: &OsStr, args: impl IntoIterator<Item = A>) -> Step {
        let mut command = Command::new(program);
        command.current_dir(workspace_root()).stdin(Stdio::null());
        let mut typed = name.to_owned();
        for arg in args {
            command.arg(&arg);
            typed.push(' ');
            typed.push_str(&quoted(arg.as_ref()));
        }
        Step { command, typed, limit: None }
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Step {
        self.command.env(name, value);
        self.typed = format!("{name}={} {}", quoted(OsStr::new(value)), self.typed);
        self
    }

    /// Runs in another folder than the workspace's root.
    pub(crate) fn within(mut self, folder: &Path) -> Step {
        self.command.current_dir(folder);
        self.typed = format!("cd {} && {}", quoted(folder.as_os_str()), self.typed);
        self
    }

    /// Puts the programs of a virtual environment first, as its `activate` does, and removes the variables that would
    /// add other modules or options.
    pub(crate) fn in_environment(mut self, folder: &Path) -> Step {
        let mut path = folder.join("bin").into_os_string();
        if let Some(others) = std::env::var_os("PATH") {
            path.push(":");
            path.push(others);
        }
        self.command.env("VIRTUAL_ENV", folder).env("PATH", path);
        for variable in FOREIGN {
            self.command.env_remove(variable);
        }
        self
    }

    /// A watched step that takes longer is killed with all its children.
    pub(crate) fn limit(mut self, limit: Duration) -> Step {
        self.limit = Some(limit);
        self
    }

    /// The text of the command.
    pub(crate) fn typed(&self) -> &str {
        &self.typed
    }

    /// Runs it with the terminal's own output.
    pub(crate) fn run(mut self) -> Result<Duration, Failure> {
        note(&format!("==> {}", self.typed));
        let start = Instant::now();
        match self.command.status() {
            Ok(status) => finish(self.typed, status, start),
            Err(cause) => Err(Failure::Start { typed: self.typed, cause }),
        }
    }

    /// Runs it and passes each line of standard output to `watch` at once.
    pub(crate) fn run_watched(mut self, mut watch: impl FnMut(&str)) -> Result<Duration, Failure> {
        note(&format!("==> {}", self.typed));
        let start = Instant::now();
        let guard = self.limit.map(|_| Guard::start());
        let command = self.command.stdout(Stdio::piped());
        let spawned = match &guard {
            Some(guard) => guard.spawn(command),
            None => command.spawn(),
        };
        let mut child = match spawned {
            Ok(child) => child,
            Err(cause) => return Err(Failure::Start { typed: self.typed, cause }),
        };
        let group = child.id();
        let (end, ended) = mpsc::channel::<()>();
        let (outcome, is_stuck) = thread::scope(|scope| {
            let is_stuck = scope.spawn(move || {
                let (Some(guard), Some(limit)) = (guard, self.limit) else { return false };
                let is_stuck = ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
                if is_stuck {
                    guard.kill(group);
                }
                guard.forget(group);
                is_stuck
            });
            let passed_on = child.stdout.take().map_or(Ok(()), |output| pass_on(output, &mut watch));
            // Always waited for, so that no child is left.
            let status = child.wait();
            drop(end);
            (passed_on.and(status), is_stuck.join().expect("it only waits"))
        });
        match (outcome, self.limit) {
            (_, Some(limit)) if is_stuck => Err(Failure::Stuck { typed: self.typed, limit }),
            (Ok(status), _) => finish(self.typed, status, start),
            (Err(cause), _) => Err(Failure::Output { typed: self.typed, cause }),
        }
    }

    /// What it writes to standard output, if the program is there and succeeds; nothing is shown.
    pub(crate) fn output_if_there(mut self) -> Option<String> {
        let output = self.command.stderr(Stdio::null()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Runs it without printing, and returns its standard output.
    pub(crate) fn output(mut self) -> Result<String, Failure> {
        match self.command.stderr(Stdio::inherit()).output() {
            Ok(output) if output.status.success() => {
                Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
            }
            Ok(output) => Err(Failure::Status { typed: self.typed, status: output.status }),
            Err(cause) => Err(Failure::Start { typed: self.typed, cause }),
        }
    }
}

/// Why a job stopped.
#[derive(Debug)]
pub(crate) enum Failure {
    Start { typed: String, cause: io::Error },
    Output { typed: String, cause: io::Error },
    Status { typed: String, status: ExitStatus },
    Stuck { typed: String, limit: Duration },
    NoTests { typed: String },
    Skipped { typed: String, skipped: u64 },
    Fetch { what: String, cause: Box<Failure> },
    Missing { what: String },
    Usage { problem: String },
    Parts { failed: Vec<String> },
    File { path: PathBuf, cause: io::Error },
    Content { path: PathBuf, problem: String },
}

impl Failure {
    /// Whether the request was wrong.
    pub(crate) fn is_usage(&self) -> bool {
        matches!(self, Failure::Usage { .. })
    }

    /// The exit code of the step's command, if it ended.
    pub(crate) fn exit_code(&self) -> Option<i32> {
        match self {
            Failure::Status { status, .. } => status.code(),
            _ => None,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Start { typed, cause } => {
                write!(f, "cannot start `{typed}`: {cause}; is the Rust toolchain on the path?")
            }
            Failure::Output { typed, cause } => write!(f, "cannot read the output of `{typed}`: {cause}"),
            Failure::Status { typed, status } => {
                write!(f, "`{typed}` failed ({status}); its own message stands above")
            }
            Failure::Stuck { typed, limit } => {
                write!(f, "`{typed}` was ended, since it ran for {} s", limit.as_secs())
            }
            Failure::NoTests { typed } => write!(f, "`{typed}` succeeded, but no test ran"),
            Failure::Skipped { typed, skipped } => {
                write!(
                    f,
                    "`{typed}` skipped {skipped} of its tests; why stands above, and none may be skipped here"
                )
            }
            Failure::Fetch { what, cause } => {
                write!(
                    f,
                    "{what} is not here: no package index could be reached, or the file is not the one that is pinned: {cause}"
                )
            }
            Failure::Missing { what } => {
                write!(f, "{what}; install it, for under continuous integration (`CI`) nothing is skipped")
            }
            Failure::Usage { problem } => f.write_str(problem),
            Failure::Parts { failed } => {
                write!(f, "failed, with the reasons above: {}", failed.join("; "))
            }
            Failure::File { path, cause } => write!(f, "cannot read or write {}: {cause}", path.display()),
            Failure::Content { path, problem } => write!(f, "{}: {problem}", path.display()),
        }
    }
}

/// The workspace that cargo runs us for. Checkouts that share a target folder share this program, so the path at
/// compile time is only the second choice.
pub(crate) fn workspace_root() -> PathBuf {
    let own = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&own).parent().unwrap_or(Path::new(".")).to_owned()
}

fn finish(typed: String, status: ExitStatus, start: Instant) -> Result<Duration, Failure> {
    let took = start.elapsed();
    let verdict = if status.success() { "done" } else { "failed" };
    note(&format!("--- {verdict} in {:.1} s", took.as_secs_f64()));
    if status.success() { Ok(took) } else { Err(Failure::Status { typed, status }) }
}

fn pass_on(output: impl io::Read, watch: &mut impl FnMut(&str)) -> io::Result<()> {
    let mut output = BufReader::new(output);
    let mut line = Vec::new();
    while output.read_until(b'\n', &mut line)? > 0 {
        let _ = io::stdout().write_all(&line);
        watch(String::from_utf8_lossy(&line).trim_end());
        line.clear();
    }
    Ok(())
}

/// Quotes an argument for a shell.
fn quoted(arg: &OsStr) -> String {
    let arg = arg.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=+./:,@%".contains(c);
    if !arg.is_empty() && arg.chars().all(plain) {
        arg.into_owned()
    } else {
        format!("'{}'", arg.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_command_is_named() {
        let failure = a_failing_step().run().unwrap_err();
        let message = failure.to_string();
        assert!(message.starts_with("`false --always` failed (exit status: 1)"), "{message}");
        assert_eq!(failure.exit_code(), Some(1));
    }

    #[test]
    fn a_missing_program_is_named() {
        let step = Step::new("ghost", OsStr::new("poorwill-no-such-program"), ["--now"]);
        let failure = step.run().unwrap_err();
        assert!(matches!(failure, Failure::Start { .. }));
        assert!(failure.to_string().contains("`ghost --now`"));
    }

    #[test]
    fn a_watched_command_shows_its_lines_and_its_status() {
        let mut lines = Vec::new();
        Step::cargo(["--version"]).run_watched(|line| lines.push(line.to_owned())).unwrap();
        assert!(matches!(&lines[..], [line] if line.starts_with("cargo ")), "{lines:?}");
        assert!(matches!(a_failing_step().run_watched(|_| ()), Err(Failure::Status { .. })));
    }

    #[test]
    fn a_stuck_command_is_killed_with_its_children() {
        let step = || Step::program(OsStr::new("sh"), ["-c", "sleep 3600 & wait"]);
        let stuck = step().limit(Duration::ZERO).run_watched(|_| ());
        assert!(matches!(stuck, Err(Failure::Stuck { .. })), "{stuck:?}");
        let step = Step::cargo(["--version"]).limit(Duration::from_secs(3600));
        step.run_watched(|_| ()).unwrap();
        let failing = a_failing_step().limit(Duration::from_secs(3600)).run_watched(|_| ());
        assert!(matches!(failing, Err(Failure::Status { .. })));
    }

    #[test]
    fn a_step_is_shown_as_typed() {
        let step = Step::cargo(["doc", "--workspace"]).env("RUSTDOCFLAGS", "-D warnings");
        assert_eq!(step.typed, "RUSTDOCFLAGS='-D warnings' cargo doc --workspace");
        let step = Step::program(OsStr::new("/bin/pwd"), ["-P"]).within(Path::new("/"));
        assert_eq!(step.typed, "cd / && /bin/pwd -P");
        assert_eq!(step.output().unwrap(), "/");
        assert_eq!(quoted(OsStr::new("it's")), r"'it'\''s'");
        assert_eq!(quoted(OsStr::new("")), "''");
    }

    #[test]
    fn a_virtual_environment_comes_first() {
        let step = Step::program(OsStr::new("python"), ["-m", "pytest"]).in_environment(Path::new("/venv"));
        let changed = |name: &str| step.command.get_envs().find(|(changed, _)| *changed == name).unwrap().1;
        assert_eq!(changed("VIRTUAL_ENV"), Some(OsStr::new("/venv")));
        assert!(changed("PATH").unwrap().to_string_lossy().starts_with("/venv/bin"));
        for removed in ["PYTHONHOME", "PYTHONPATH", "PYTEST_ADDOPTS"] {
            assert_eq!(changed(removed), None);
        }
    }

    #[test]
    fn cargo_does_not_hear_of_our_package() {
        assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some(), "cargo and our runner set it");
        let step = Step::cargo(["build"]);
        let removed = |name: &str| step.command.get_envs().any(|changed| changed == (OsStr::new(name), None));
        assert!(removed("CARGO_MANIFEST_DIR") && !removed("CARGO_HOME"));
    }

    #[test]
    fn steps_run_in_the_workspace_root() {
        assert!(workspace_root().join("Cargo.lock").is_file());
    }

    /// Fails without output, so that the log of a good run shows no error.
    fn a_failing_step() -> Step {
        Step::new("false", OsStr::new("false"), ["--always"])
    }
}
