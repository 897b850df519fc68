//! Finds Python interpreters that the package works with.
//!
//! Scripts examine each interpreter; they fail with a reason. An interpreter that does not run, or fails, is not
//! used.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::steps::{note, workspace_root};

/// The oldest Python that the package supports, and the newest that is searched for by its number.
const OLDEST_MINOR: u32 = 10;
const NEWEST_MINOR: u32 = 14;

/// Where tools install interpreters: below a variable's path, or else below the home folder.
const INSTALLED_BY_TOOLS: [(&str, &str, &str); 2] =
    [("PYENV_ROOT", ".pyenv", "versions"), ("UV_PYTHON_INSTALL_DIR", ".local/share/uv/python", "")];

/// A usable Python.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Interpreter {
    /// Its command.
    pub(crate) program: PathBuf,
    /// Its full version, as in `3.11.7`.
    pub(crate) version: String,
    /// The file that all its names link to.
    file: PathBuf,
}

/// The oldest version, as in `3.10`.
pub(crate) fn oldest() -> String {
    format!("3.{OLDEST_MINOR}")
}

/// The first usable one on the path.
pub(crate) fn first() -> Option<OsString> {
    find(&candidates(), refusal)
}

/// All usable ones: on the path, and those of pyenv and uv. Oldest first.
pub(crate) fn all() -> Vec<Interpreter> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let programs =
        std::env::split_paths(&path).chain(folders_of_tools()).flat_map(|folder| programs(&folder));
    let mut found = distinct(programs.filter_map(|program| Interpreter::probe(&program)));
    found.sort_by_key(|interpreter| numbers(&interpreter.version));
    found
}

impl Interpreter {
    fn probe(program: &Path) -> Option<Interpreter> {
        let script = format!(
            "{}import os, platform\n\
             print(platform.python_version(), sys.executable, os.path.realpath(sys.executable), sep='\\n')\n",
            examination()
        );
        let output =
            run_script(program.as_os_str(), &script).ok().filter(|output| output.status.success())?;
        Interpreter::read(&String::from_utf8(output.stdout).ok()?)
    }

    fn read(text: &str) -> Option<Interpreter> {
        match text.lines().collect::<Vec<_>>()[..] {
            [version, program, file] => {
                Some(Interpreter { program: program.into(), version: version.to_owned(), file: file.into() })
            }
            _ => None,
        }
    }
}

/// Each interpreter once, under its first name.
fn distinct(interpreters: impl Iterator<Item = Interpreter>) -> Vec<Interpreter> {
    let mut found: Vec<Interpreter> = Vec::new();
    for interpreter in interpreters {
        if !found.iter().any(|known| known.file == interpreter.file) {
            found.push(interpreter);
        }
    }
    found
}

/// A sort key for versions; what follows the numbers, as in `3.15.0rc1`, does not count.
fn numbers(version: &str) -> Vec<u32> {
    let number = |part: &str| part.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok();
    version.split('.').map_while(number).collect()
}

fn folders_of_tools() -> Vec<PathBuf> {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let mut folders = Vec::new();
    for (variable, below_home, below) in INSTALLED_BY_TOOLS {
        let set = std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
        let root = set.or_else(|| home.as_ref().map(|home| home.join(below_home)));
        folders.extend(root.map(|root| root.join(below)).into_iter().flat_map(|root| entries(&root)));
    }
    folders.iter().map(|version| version.join("bin")).collect()
}

/// The programs of a folder that are named like a Python.
fn programs(folder: &Path) -> Vec<PathBuf> {
    entries(folder).into_iter().filter(|path| path.file_name().is_some_and(is_python)).collect()
}

fn is_python(name: &OsStr) -> bool {
    match name.to_str().and_then(|name| name.strip_prefix("python3")) {
        Some("") => true,
        Some(more) => {
            let minor = more.strip_prefix('.').and_then(|minor| minor.parse::<u32>().ok());
            minor.is_some_and(|minor| minor >= OLDEST_MINOR)
        }
        None => false,
    }
}

/// The entries of a folder, sorted; none if it cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let listed = fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<PathBuf> = listed.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths
}

/// Names of Python programs.
fn candidates() -> Vec<String> {
    let numbered = (OLDEST_MINOR..=NEWEST_MINOR).rev().map(|minor| format!("python3.{minor}"));
    ["python3".to_owned()].into_iter().chain(numbered).collect()
}

/// The first without a refusal.
fn find(names: &[String], refusal: impl Fn(&OsStr) -> io::Result<Option<String>>) -> Option<OsString> {
    for name in names.iter().map(OsStr::new) {
        match refusal(name) {
            Ok(None) => return Some(name.to_owned()),
            Ok(Some(reason)) => note(&format!("--- {} will not do: {reason}", name.display())),
            Err(_) => {}
        }
    }
    None
}

/// Why the interpreter cannot be used; an error if it does not run.
fn refusal(python: &OsStr) -> io::Result<Option<String>> {
    says(python, &examination())
}

/// The message of a script that fails.
pub(crate) fn says(python: &OsStr, script: &str) -> io::Result<Option<String>> {
    let output = run_script(python, script)?;
    if output.status.success() {
        return Ok(None);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.lines().map(str::trim).rfind(|line| !line.is_empty());
    Ok(Some(last.map_or_else(|| output.status.to_string(), str::to_owned)))
}

/// Runs a script, isolated from the environment's variables and the current folder.
fn run_script(python: &OsStr, script: &str) -> io::Result<Output> {
    Command::new(python)
        .args(["-I", "-B", "-c", script])
        .current_dir(workspace_root())
        .stdin(Stdio::null())
        .output()
}

/// A script that fails with a reason if the package or a virtual environment would not work.
pub(crate) fn examination() -> String {
    format!(
        "import sys, sysconfig\n\
         version = '%d.%d' % sys.version_info[:2]\n\
         if sys.version_info < (3, {OLDEST_MINOR}): sys.exit('it is Python ' + version)\n\
         if sys.implementation.name != 'cpython': sys.exit('it is ' + sys.implementation.name)\n\
         if sysconfig.get_config_var('Py_GIL_DISABLED'): sys.exit('free threading has no stable ABI')\n\
         import venv, ensurepip\n"
    )
}

/// A script that fails with a reason if one of the modules is missing. Empty folders do not count.
pub(crate) fn search(modules: &[&str]) -> String {
    format!(
        "import sys\n\
         from importlib.util import find_spec\n\
         specs = {{name: find_spec(name) for name in '{}'.split()}}\n\
         missing = [name for name, spec in specs.items() if spec is None or spec.origin is None]\n\
         if missing: sys.exit('it lacks ' + ', '.join(missing))\n",
        modules.join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_python_is_the_same_everywhere() {
        let read = |path: &str| fs::read_to_string(workspace_root().join(path)).unwrap();
        let settings = read("crates/python/pyproject.toml");
        assert!(settings.contains(&format!("requires-python = \">={}\"", oldest())));
        assert!(settings.contains(&format!("python_version = \"{}\"", oldest())));
        assert!(settings.contains(&format!("target-version = \"py3{OLDEST_MINOR}\"")));
        assert!(read("Cargo.toml").contains(&format!("\"abi3-py3{OLDEST_MINOR}\"")));
    }

    #[test]
    fn the_first_python_that_will_do_is_taken() {
        assert_eq!(candidates()[..2], ["python3", "python3.14"]);
        let absent = || Err(io::ErrorKind::NotFound.into());
        let found = find(&candidates(), |name| match name.to_str() {
            Some("python3") => Ok(Some("it is Python 3.9".to_owned())),
            Some("python3.12" | "python3.10") => Ok(None),
            _ => absent(),
        });
        assert_eq!(found.as_deref(), Some(OsStr::new("python3.12")));
        assert_eq!(find(&candidates(), |_| absent()), None);
    }

    #[test]
    fn other_programs_than_python_are_refused() {
        assert!(refusal(OsStr::new("poorwill-no-such-python")).is_err());
        assert_eq!(refusal(OsStr::new("false")).unwrap().as_deref(), Some("exit status: 1"));
        assert_eq!(Interpreter::probe(Path::new("false")), None);
        assert_eq!(Interpreter::probe(Path::new("true")), None, "it says nothing of itself");
    }

    #[test]
    fn only_names_of_supported_pythons_are_probed() {
        for name in ["python3", "python3.10", "python3.14", "python3.20"] {
            assert!(is_python(OsStr::new(name)), "{name}");
        }
        for name in
            ["python", "python2", "python3.9", "python3.13t", "python3-config", "python3.11-config", "cp"]
        {
            assert!(!is_python(OsStr::new(name)), "{name}");
        }
    }

    #[test]
    fn one_interpreter_with_several_names_is_found_once() {
        let python = |version: &str, program: &str| {
            Interpreter::read(&format!("{version}\n{program}\n/opt/{version}/bin/python\n")).unwrap()
        };
        let found =
            [python("3.11.7", "/bin/python3"), python("3.9.1", "/a"), python("3.11.7", "/bin/python3.11")];
        let distinct = distinct(found.into_iter());
        let programs: Vec<_> = distinct.iter().map(|interpreter| interpreter.program.to_str()).collect();
        assert_eq!(programs, [Some("/bin/python3"), Some("/a")]);
        assert_eq!(Interpreter::read("3.11.7\n"), None);
    }

    #[test]
    fn versions_are_sorted_by_their_numbers() {
        let mut versions = ["3.15.0rc1", "3.9.18", "3.10.13", "3.10.2"];
        versions.sort_by_key(|version| numbers(version));
        assert_eq!(versions, ["3.9.18", "3.10.2", "3.10.13", "3.15.0rc1"]);
    }

    #[test]
    fn the_first_python_is_among_all() {
        let all = all();
        let Some(first) = first() else {
            assert!(all.iter().all(|found| !found.version.is_empty()));
            eprintln!("skipped: there is no fitting Python here");
            return;
        };
        let first = Interpreter::probe(Path::new(&first)).unwrap();
        assert!(all.iter().any(|found| found.file == first.file), "{first:?} is not in {all:?}");
    }
}
