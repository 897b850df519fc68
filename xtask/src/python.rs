//! The Python package: built, installed and tested in a virtual environment of its own.
//!
//! `cargo xtask test` and `cargo xtask python` run its tests and check its types, `cargo xtask lint` its style. The
//! environment lies in cargo's target folder and is made once; what belongs into it is pinned in
//! `requirements-test.txt`. Nothing is written to the tree.
//!
//! Where there is no fitting Python this is skipped, and so it is where the tools cannot be installed, as without a
//! network. Both say so. Under continuous integration (`CI`) both are failures.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::steps::{Failure, Step, note, say, workspace_root};
use crate::test::Tally;

const PACKAGE: &str = "crates/python";
const TESTS: &str = "crates/python/tests";
const SOURCES: &str = "crates/python/python/poorwill";
const SETTINGS: &str = "crates/python/pyproject.toml";
const TOOLS: &str = "crates/python/requirements-test.txt";

/// Scripts of benchmarks, in the package's style.
const BENCH: &str = "bench";

/// What has to be there to build the package and to run the tools.
const MODULES: [&str; 5] = ["pip", "maturin", "mypy", "pytest", "ruff"];

/// The module that is written in Rust, whose types stand in a file of their own.
const NATIVE: &str = "poorwill._native";

/// The library that stands in for NVIDIA's driver, for tests that open a GPU.
const FAKE_PACKAGE: &str = "poorwill-fake-libcuda";
const FAKE_FILE: &str = "libpoorwill_fake_libcuda.so";
const FAKE: &str = "POORWILL_FAKE_LIBCUDA";

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
    let environment = match Environment::ready() {
        Ok(environment) => environment,
        Err(unready) => return Ok(Tested::Skipped { why: unready.skip("not tested")? }),
    };
    let built =
        Step::cargo(["build", "--locked", "--package", FAKE_PACKAGE]).run()? + environment.install()?;

    let mut tally = Tally::default();
    let fake = own_program()?.with_file_name(FAKE_FILE);
    let pytest = environment.pytest(pytest_args).env(FAKE, &fake.to_string_lossy());
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
    let compared = environment.python(["-m", "mypy.stubtest", NATIVE]).within(&environment.folder).run();
    Ok(Tested::Ran { tally, built, ran: tested? + typed? + compared? })
}

/// Checks the style of all Python, by the package's settings; `Some` says why that was left out.
pub(crate) fn lint() -> Result<Option<String>, Failure> {
    let environment = match Environment::ready() {
        Ok(environment) => environment,
        Err(unready) => return unready.skip("not linted").map(Some),
    };
    for job in [&["check"][..], &["format", "--check"]] {
        let ruff = ["-m", "ruff"].into_iter().chain(job.iter().copied());
        let all = ["--no-cache", "--config", SETTINGS, PACKAGE, BENCH];
        environment.python(ruff.chain(all)).run()?;
    }
    Ok(None)
}

/// A virtual environment with the tools. While it is held no other run changes what is installed.
#[derive(Debug)]
struct Environment {
    folder: PathBuf,
    _lock: File,
}

/// Why there is no environment.
#[derive(Debug)]
enum Unready {
    NoPython,
    NoTools(Failure),
    Failed(Failure),
}

impl Environment {
    fn ready() -> Result<Environment, Unready> {
        let target = target_folder().map_err(Unready::Failed)?;
        let environment = Environment::locked(&target).map_err(Unready::Failed)?;
        if environment.is_complete() {
            return Ok(environment);
        }
        let Some(python) = find_python(&candidates(), refusal) else { return Err(Unready::NoPython) };
        environment.make(&python).map_err(Unready::NoTools)?;
        environment.seal().map_err(Unready::Failed)?;
        Ok(environment)
    }

    fn locked(target: &Path) -> Result<Environment, Failure> {
        let path = target.join("python-venv.lock");
        let locked = File::create(&path).and_then(|lock| lock.lock().map(|()| lock));
        let lock = locked.map_err(|cause| Failure::File { path, cause })?;
        Ok(Environment { folder: target.join("python-venv"), _lock: lock })
    }

    /// It has an interpreter that works, and the tools that are wanted now, also where another Python has taken the
    /// place of the one that they were installed for.
    fn is_complete(&self) -> bool {
        let wanted = fs::read(workspace_root().join(TOOLS));
        let has_tools = wanted.is_ok_and(|wanted| fs::read(self.seal_file()).is_ok_and(|has| has == wanted));
        let accepts =
            |script: &str| says(self.interpreter().as_os_str(), script).is_ok_and(|no| no.is_none());
        has_tools && accepts(&examination()) && accepts(&search(&MODULES))
    }

    fn make(&self, python: &OsStr) -> Result<(), Failure> {
        let folder = self.folder.as_os_str();
        let arguments = ["-I", "-m", "venv", "--clear"].map(OsStr::new).into_iter().chain([folder]);
        Step::program(python, arguments).run()?;
        // Wheels only: a tool that has to be compiled first is none that we can count on.
        let install =
            self.pip(["--only-binary", ":all:", "--timeout", "15", "--retries", "2", "--requirement", TOOLS]);
        install.run().map(drop)
    }

    /// Remembers that the environment is complete.
    fn seal(&self) -> Result<(), Failure> {
        let path = self.seal_file();
        fs::copy(workspace_root().join(TOOLS), &path).map(drop).map_err(|cause| Failure::File { path, cause })
    }

    /// Builds the package as it is in the tree, without optimisation and in cargo's own target folder, and puts it
    /// into the environment. Needs no network.
    fn install(&self) -> Result<Duration, Failure> {
        let package = format!("./{PACKAGE}");
        self.pip(["--no-build-isolation", "--no-index", "--no-deps", "--force-reinstall", package.as_str()])
            .env("MATURIN_PEP517_ARGS", "--profile dev --locked")
            .run()
    }

    /// Runs the package's tests and says why one was skipped. The line that counts them has to stay plain, whatever
    /// the surroundings ask for.
    fn pytest(&self, pytest_args: &[OsString]) -> Step {
        let arguments = ["-m", "pytest", "-rfEs", TESTS].map(OsStr::new).into_iter();
        let arguments = arguments.chain(pytest_args.iter().map(OsString::as_os_str));
        self.python(arguments.chain([OsStr::new("--color=no")]))
    }

    fn pip<const N: usize>(&self, arguments: [&str; N]) -> Step {
        let quietly = ["-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"];
        self.python(quietly.into_iter().chain(arguments))
    }

    /// A step that runs the environment's interpreter, which leaves no bytecode beside what it imports.
    fn python<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Step {
        let mut all = vec![OsString::from("-B")];
        all.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        Step::program(self.interpreter().as_os_str(), all).in_environment(&self.folder)
    }

    fn interpreter(&self) -> PathBuf {
        self.folder.join("bin/python")
    }

    fn seal_file(&self) -> PathBuf {
        self.folder.join("poorwill-tools.txt")
    }

    /// A path in cargo's target folder.
    fn beside(&self, name: &str) -> PathBuf {
        self.folder.with_file_name(name)
    }
}

impl Unready {
    /// What to say of a package that is `omitted`, unless that is a failure.
    fn skip(self, omitted: &str) -> Result<String, Failure> {
        let is_ci = std::env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false");
        let why = self.skip_on(is_ci)?;
        let why = format!("Python package {omitted}: {why}");
        note(&format!("!!! {why}"));
        Ok(why)
    }

    fn skip_on(self, is_ci: bool) -> Result<String, Failure> {
        match self {
            Unready::NoPython => {
                let what = format!("no CPython {} or later with venv here", oldest());
                if is_ci { Err(Failure::Missing { what }) } else { Ok(what) }
            }
            Unready::NoTools(_) if !is_ci => {
                Ok("its tools could not be installed; pip says why above".to_owned())
            }
            Unready::NoTools(cause) | Unready::Failed(cause) => Err(cause),
        }
    }
}

/// The oldest Python that the package is for, and the newest that is asked for by its number.
const OLDEST_MINOR: u32 = 10;
const NEWEST_MINOR: u32 = 14;

fn oldest() -> String {
    format!("3.{OLDEST_MINOR}")
}

/// What a Python may be called.
fn candidates() -> Vec<String> {
    let numbered = (OLDEST_MINOR..=NEWEST_MINOR).rev().map(|minor| format!("python3.{minor}"));
    ["python3".to_owned()].into_iter().chain(numbered).collect()
}

/// The first that has nothing to say against itself.
fn find_python(names: &[String], refusal: impl Fn(&OsStr) -> io::Result<Option<String>>) -> Option<OsString> {
    for name in names.iter().map(OsStr::new) {
        match refusal(name) {
            Ok(None) => return Some(name.to_owned()),
            Ok(Some(reason)) => note(&format!("--- {} will not do: {reason}", name.display())),
            Err(_) => {}
        }
    }
    None
}

/// Why the interpreter cannot be used; an error where there is none.
fn refusal(python: &OsStr) -> io::Result<Option<String>> {
    says(python, &examination())
}

/// What the interpreter says against itself by a script, whatever the environment and the folder would have it find.
fn says(python: &OsStr, script: &str) -> io::Result<Option<String>> {
    let asked = Command::new(python)
        .args(["-I", "-B", "-c", script])
        .current_dir(workspace_root())
        .stdin(Stdio::null())
        .output()?;
    if asked.status.success() {
        return Ok(None);
    }
    let said = String::from_utf8_lossy(&asked.stderr);
    let last = said.lines().map(str::trim).rfind(|line| !line.is_empty());
    Ok(Some(last.map_or_else(|| asked.status.to_string(), str::to_owned)))
}

/// A script that fails, and says why, where the package or a virtual environment would not work.
fn examination() -> String {
    format!(
        "import sys, sysconfig\n\
         version = '%d.%d' % sys.version_info[:2]\n\
         if sys.version_info < (3, {OLDEST_MINOR}): sys.exit('it is Python ' + version)\n\
         if sys.implementation.name != 'cpython': sys.exit('it is ' + sys.implementation.name)\n\
         if sysconfig.get_config_var('Py_GIL_DISABLED'): sys.exit('free threading has no stable ABI')\n\
         import venv, ensurepip\n"
    )
}

/// A script that fails, and says why, where one of the modules is missing. Empty folders count for nothing.
fn search(modules: &[&str]) -> String {
    format!(
        "import sys\n\
         from importlib.util import find_spec\n\
         specs = {{name: find_spec(name) for name in '{}'.split()}}\n\
         missing = [name for name, spec in specs.items() if spec is None or spec.origin is None]\n\
         if missing: sys.exit('it lacks ' + ', '.join(missing))\n",
        modules.join(" ")
    )
}

/// Cargo's target folder, which it marks as one that holds nothing but caches.
fn target_folder() -> Result<PathBuf, Failure> {
    let path = own_program()?;
    match path.ancestors().find(|folder| folder.join("CACHEDIR.TAG").is_file()) {
        Some(target) => Ok(target.to_owned()),
        None => {
            Err(Failure::Content { path, problem: "it does not lie in cargo's target folder".to_owned() })
        }
    }
}

/// This program, which lies where cargo puts what it builds.
fn own_program() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(|cause| Failure::File { path: "xtask".into(), cause })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_python_is_the_same_everywhere() {
        let read = |path: &str| fs::read_to_string(workspace_root().join(path)).unwrap();
        assert!(read(SETTINGS).contains(&format!("requires-python = \">={}\"", oldest())));
        assert!(read(SETTINGS).contains(&format!("python_version = \"{}\"", oldest())));
        assert!(read(SETTINGS).contains(&format!("target-version = \"py3{OLDEST_MINOR}\"")));
        assert!(read("Cargo.toml").contains(&format!("\"abi3-py3{OLDEST_MINOR}\"")));
    }

    #[test]
    fn every_tool_has_one_version() {
        let tools = fs::read_to_string(workspace_root().join(TOOLS)).unwrap();
        for line in tools.lines().filter(|line| !line.starts_with('#')) {
            assert!(line.contains("=="), "{line}");
        }
    }

    #[test]
    fn the_first_python_that_will_do_is_taken() {
        assert_eq!(candidates()[..2], ["python3", "python3.14"]);
        let absent = || Err(io::ErrorKind::NotFound.into());
        let found = find_python(&candidates(), |name| match name.to_str() {
            Some("python3") => Ok(Some("it is Python 3.9".to_owned())),
            Some("python3.12" | "python3.10") => Ok(None),
            _ => absent(),
        });
        assert_eq!(found.as_deref(), Some(OsStr::new("python3.12")));
        assert_eq!(find_python(&candidates(), |_| absent()), None);
    }

    #[test]
    fn what_is_no_python_is_refused() {
        assert!(refusal(OsStr::new("poorwill-no-such-python")).is_err());
        assert_eq!(refusal(OsStr::new("false")).unwrap().as_deref(), Some("exit status: 1"));
    }

    #[test]
    fn what_is_missing_fails_under_continuous_integration_only() {
        let no_tools = || Unready::NoTools(Failure::NoTests { typed: "pip".to_owned() });
        let said = no_tools().skip_on(false).unwrap();
        assert_eq!(said, "its tools could not be installed; pip says why above");
        assert!(no_tools().skip_on(true).is_err());
        let said = Unready::NoPython.skip_on(false).unwrap();
        assert_eq!(said, "no CPython 3.10 or later with venv here");
        let failure = Unready::NoPython.skip_on(true).unwrap_err().to_string();
        assert!(failure.starts_with(&format!("{said}; install it")), "{failure}");
        assert!(Unready::Failed(Failure::NoTests { typed: "lock".to_owned() }).skip_on(false).is_err());
    }

    #[test]
    fn an_environment_without_its_packages_is_not_complete() {
        let Some(python) = find_python(&candidates(), refusal) else {
            eprintln!("skipped: there is no fitting Python here");
            return;
        };
        let environment =
            environment(target_folder().unwrap().join(format!("python-venv-of-{}", std::process::id())));
        let folder = &environment.folder;
        assert!(!environment.is_complete(), "there is none");
        let venv = ["-I", "-m", "venv", "--without-pip"].map(OsStr::new);
        Step::program(&python, venv.into_iter().chain([folder.as_os_str()])).run().unwrap();
        environment.seal().unwrap();
        assert!(!environment.is_complete(), "it is empty");

        let version = "import sys; print('python%d.%d' % sys.version_info[:2])";
        let version = Step::program(&python, ["-c", version]).output().unwrap();
        let installed = folder.join("lib").join(version).join("site-packages");
        for module in MODULES {
            assert!(!environment.is_complete(), "{module} is not there");
            fs::create_dir(installed.join(module)).unwrap();
            assert!(!environment.is_complete(), "{module} is an empty folder");
            fs::write(installed.join(module).join("__init__.py"), "").unwrap();
        }
        assert!(environment.is_complete());
        fs::rename(&installed, folder.join("lib/of-another-version")).unwrap();
        assert!(!environment.is_complete(), "the interpreter looks elsewhere");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn pytest_says_what_it_skips_and_stays_plain() {
        let step = environment("/venv".into()).pytest(&["--color=yes".into(), "-k".into(), "gpu".into()]);
        let typed = "/venv/bin/python -B -m pytest -rfEs crates/python/tests --color=yes -k gpu --color=no";
        assert_eq!(step.typed(), typed);
    }

    #[test]
    fn steps_run_in_the_environment() {
        let environment = environment("/target/python-venv".into());
        let step = environment.python(["-m", "pytest"]);
        assert_eq!(step.typed(), "/target/python-venv/bin/python -B -m pytest");
        assert_eq!(environment.beside("python-mypy"), Path::new("/target/python-mypy"));
        assert!(target_folder().unwrap().join("CACHEDIR.TAG").is_file());
    }

    fn environment(folder: PathBuf) -> Environment {
        let nothing = File::open(workspace_root().join(TOOLS)).unwrap();
        Environment { folder, _lock: nothing }
    }
}
