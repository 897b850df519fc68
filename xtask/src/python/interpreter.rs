//! Which Python interpreters there are, and whether the package would work with them.
//!
//! An interpreter is asked itself, by scripts that fail and say why. What does not run, or answers no, is not used.

use std::ffi::{OsStr, OsString};
use std::io;
use std::process::{Command, Output, Stdio};

use crate::steps::{note, workspace_root};

/// The oldest Python that the package is for, and the newest that is asked for by its number.
const OLDEST_MINOR: u32 = 10;
const NEWEST_MINOR: u32 = 14;

/// The oldest version, as in `3.10`.
pub(crate) fn oldest() -> String {
    format!("3.{OLDEST_MINOR}")
}

/// The first that will do of those on the path.
pub(crate) fn first() -> Option<OsString> {
    find(&candidates(), refusal)
}

/// What a Python may be called.
fn candidates() -> Vec<String> {
    let numbered = (OLDEST_MINOR..=NEWEST_MINOR).rev().map(|minor| format!("python3.{minor}"));
    ["python3".to_owned()].into_iter().chain(numbered).collect()
}

/// The first that has nothing to say against itself.
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

/// Why the interpreter cannot be used; an error where there is none.
fn refusal(python: &OsStr) -> io::Result<Option<String>> {
    says(python, &examination())
}

/// What the interpreter says against itself by a script.
pub(crate) fn says(python: &OsStr, script: &str) -> io::Result<Option<String>> {
    let asked = ask(python, script)?;
    if asked.status.success() {
        return Ok(None);
    }
    let said = String::from_utf8_lossy(&asked.stderr);
    let last = said.lines().map(str::trim).rfind(|line| !line.is_empty());
    Ok(Some(last.map_or_else(|| asked.status.to_string(), str::to_owned)))
}

/// Runs a script, whatever the environment and the folder would have the interpreter find.
fn ask(python: &OsStr, script: &str) -> io::Result<Output> {
    Command::new(python)
        .args(["-I", "-B", "-c", script])
        .current_dir(workspace_root())
        .stdin(Stdio::null())
        .output()
}

/// A script that fails, and says why, where the package or a virtual environment would not work.
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

/// A script that fails, and says why, where one of the modules is missing. Empty folders count for nothing.
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
    use std::fs;

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
    fn what_is_no_python_is_refused() {
        assert!(refusal(OsStr::new("poorwill-no-such-python")).is_err());
        assert_eq!(refusal(OsStr::new("false")).unwrap().as_deref(), Some("exit status: 1"));
    }
}
