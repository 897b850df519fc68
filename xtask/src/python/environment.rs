//! Virtual environments: one per set of tools, made once below cargo's target folder, and others as needed.
//!
//! A file of requirements pins the tools; when it changes, the environment is made again. A missing tool or Python is
//! reported, and the caller may continue without it. Under continuous integration (`CI`) it is a failure.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::ops::Deref;
use std::path::{Path, PathBuf};

use super::interpreter::{self, examination, oldest, says, search};
use crate::steps::{Failure, Step, note, workspace_root};
use crate::toolchain::target_folder;

/// Tools that are installed together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tools {
    /// The environment's name in cargo's target folder.
    pub(crate) folder: &'static str,
    /// The file that pins them.
    pub(crate) requirements: &'static str,
    /// The modules that are needed to run them.
    pub(crate) modules: &'static [&'static str],
}

/// A virtual environment with tools. While this exists, no other run changes its contents.
#[derive(Debug)]
pub(crate) struct Environment {
    tools: Tools,
    venv: Venv,
    _lock: File,
}

/// Why there is no environment.
#[derive(Debug)]
pub(crate) enum Unready {
    Missing { what: String },
    NoTools(Failure),
    Failed(Failure),
}

/// A virtual environment.
#[derive(Debug)]
pub(crate) struct Venv {
    folder: PathBuf,
}

impl Environment {
    pub(crate) fn ready(tools: Tools) -> Result<Environment, Unready> {
        let target = target_folder().map_err(Unready::Failed)?;
        let environment = Environment::locked(tools, &target).map_err(Unready::Failed)?;
        if environment.is_complete() {
            return Ok(environment);
        }
        let Some(python) = interpreter::first() else {
            return Err(Unready::Missing {
                what: format!("no CPython {} or later with venv here", oldest()),
            });
        };
        environment.make(&python).map_err(Unready::NoTools)?;
        environment.seal().map_err(Unready::Failed)?;
        Ok(environment)
    }

    fn locked(tools: Tools, target: &Path) -> Result<Environment, Failure> {
        let path = target.join(format!("{}.lock", tools.folder));
        let locked = File::create(&path).and_then(|lock| lock.lock().map(|()| lock));
        let lock = locked.map_err(|cause| Failure::File { path, cause })?;
        Ok(Environment { tools, venv: Venv { folder: target.join(tools.folder) }, _lock: lock })
    }

    /// It has a working interpreter and the current tools. The interpreter may have been replaced since they were
    /// installed.
    fn is_complete(&self) -> bool {
        let wanted = fs::read(workspace_root().join(self.tools.requirements));
        let has_tools = wanted.is_ok_and(|wanted| fs::read(self.seal_file()).is_ok_and(|has| has == wanted));
        let accepts =
            |script: &str| says(self.interpreter().as_os_str(), script).is_ok_and(|no| no.is_none());
        has_tools && accepts(&examination()) && accepts(&search(self.tools.modules))
    }

    fn make(&self, python: &OsStr) -> Result<(), Failure> {
        Venv::make(python, self.folder.clone())?;
        // Wheels only: a tool that has to be compiled is not reliable.
        let from_the_index = ["--only-binary", ":all:", "--timeout", "15", "--retries", "2"];
        self.pip(from_the_index.into_iter().chain(["--requirement", self.tools.requirements])).run().map(drop)
    }

    /// Marks the environment as complete.
    fn seal(&self) -> Result<(), Failure> {
        let path = self.seal_file();
        let sealed = fs::copy(workspace_root().join(self.tools.requirements), &path);
        sealed.map(drop).map_err(|cause| Failure::File { path, cause })
    }

    fn seal_file(&self) -> PathBuf {
        self.folder.join("poorwill-tools.txt")
    }

    /// A path in cargo's target folder.
    pub(crate) fn beside(&self, name: &str) -> PathBuf {
        self.folder.with_file_name(name)
    }
}

impl Deref for Environment {
    type Target = Venv;

    fn deref(&self) -> &Venv {
        &self.venv
    }
}

impl Venv {
    /// A new one with only pip; the folder is replaced.
    pub(crate) fn make(python: &OsStr, folder: PathBuf) -> Result<Venv, Failure> {
        let arguments = ["-I", "-m", "venv", "--clear"].map(OsStr::new).into_iter();
        Step::program(python, arguments.chain([folder.as_os_str()])).run()?;
        Ok(Venv { folder })
    }

    /// An existing one.
    #[cfg(test)]
    pub(crate) fn at(folder: &Path) -> Venv {
        Venv { folder: folder.to_owned() }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// A step that installs something.
    pub(crate) fn pip<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Step {
        let quietly = ["-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"];
        let quietly = quietly.map(OsString::from).into_iter();
        self.python(quietly.chain(arguments.into_iter().map(|argument| argument.as_ref().to_owned())))
    }

    /// A step that runs the environment's interpreter, without writing bytecode beside imported files.
    pub(crate) fn python<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Step {
        let mut all = vec![OsString::from("-B")];
        all.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        Step::program(self.interpreter().as_os_str(), all).in_environment(&self.folder)
    }

    pub(crate) fn interpreter(&self) -> PathBuf {
        self.folder.join("bin/python")
    }
}

/// Whether this is continuous integration, where nothing may be missing.
pub(crate) fn is_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false")
}

impl Unready {
    pub(crate) fn no_python() -> Unready {
        Unready::Missing { what: format!("no CPython {} or later with venv here", oldest()) }
    }

    /// The message about `omitted` tests, unless their omission is a failure.
    pub(crate) fn skip(self, omitted: &str) -> Result<String, Failure> {
        let why = self.skip_on(is_ci())?;
        let why = format!("{omitted}: {why}");
        note(&format!("!!! {why}"));
        Ok(why)
    }

    fn skip_on(self, is_ci: bool) -> Result<String, Failure> {
        match self {
            Unready::Missing { what } => {
                if is_ci {
                    Err(Failure::Missing { what })
                } else {
                    Ok(what)
                }
            }
            Unready::NoTools(_) if !is_ci => {
                Ok("its tools could not be installed; pip says why above".to_owned())
            }
            Unready::NoTools(cause) | Unready::Failed(cause) => Err(cause),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOOLS: Tools = crate::python::TOOLS;

    #[test]
    fn every_tool_has_one_version() {
        for tools in
            [TOOLS, crate::dist::TOOLS, crate::rotation::CLIENTS, crate::rotation::ENGINES, crate::ptx::TOOLS]
        {
            let pinned = fs::read_to_string(workspace_root().join(tools.requirements)).unwrap();
            for line in pinned.lines().filter(|line| !line.starts_with('#')) {
                assert!(line.contains("=="), "{line}");
            }
        }
    }

    #[test]
    fn missing_tools_fail_under_continuous_integration_only() {
        let no_tools = || Unready::NoTools(Failure::NoTests { typed: "pip".to_owned() });
        let message = no_tools().skip_on(false).unwrap();
        assert_eq!(message, "its tools could not be installed; pip says why above");
        assert!(no_tools().skip_on(true).is_err());
        let message = Unready::no_python().skip_on(false).unwrap();
        assert_eq!(message, "no CPython 3.10 or later with venv here");
        let failure = Unready::no_python().skip_on(true).unwrap_err().to_string();
        assert!(failure.starts_with(&format!("{message}; install it")), "{failure}");
        assert!(Unready::Failed(Failure::NoTests { typed: "lock".to_owned() }).skip_on(false).is_err());
    }

    #[test]
    fn an_environment_without_its_packages_is_not_complete() {
        let Some(python) = interpreter::first() else {
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
        for module in TOOLS.modules {
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
    fn steps_run_in_the_environment() {
        let environment = environment("/target/python-venv".into());
        let step = environment.python(["-m", "pytest"]);
        assert_eq!(step.typed(), "/target/python-venv/bin/python -B -m pytest");
        assert_eq!(environment.beside("python-mypy"), Path::new("/target/python-mypy"));
    }

    fn environment(folder: PathBuf) -> Environment {
        let nothing = File::open(workspace_root().join(TOOLS.requirements)).unwrap();
        Environment { tools: TOOLS, venv: Venv { folder }, _lock: nothing }
    }
}
