//! The single build of a run: every test program of the workspace, and the libraries that Python's tests load.
//!
//! It is one call of cargo, so that every crate is compiled once, with one set of features. A second call with other
//! packages would compile most of the tree again.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::bench::peer_packages;
use crate::steps::{Failure, Step, note, workspace_root};

/// The library of the Python package, as cargo names it.
const NATIVE: &str = "_native";

/// The fake CUDA library, as cargo names it.
const FAKE: &str = "poorwill_fake_libcuda";

/// The library to preload, as cargo names it.
const PRELOAD: &str = "poorwill_preload";

/// The `poorwill` command, as cargo names it.
const COMMAND: &str = "poorwill";

/// What was built.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) programs: Vec<Program>,
    /// The Python package's native module.
    pub(crate) native: PathBuf,
    /// The library to preload.
    pub(crate) preload: PathBuf,
    /// The fake CUDA library.
    pub(crate) fake: PathBuf,
    /// The `poorwill` command, which cargo builds for its tests.
    pub(crate) command: PathBuf,
    pub(crate) took: Duration,
}

/// One test program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    pub(crate) package: String,
    /// Cargo's name of the target: `promises`, or the crate's name for unit tests.
    pub(crate) target: String,
    /// The package's folder, in which its tests run.
    pub(crate) folder: PathBuf,
    pub(crate) path: PathBuf,
}

/// Builds everything.
pub(crate) fn build() -> Result<Built, Failure> {
    let mut arguments = vec!["build", "--workspace"];
    for package in peer_packages() {
        arguments.extend(["--exclude", package]);
    }
    arguments.extend(["--lib", "--tests", "--locked", "--message-format=json-render-diagnostics"]);
    let step = Step::cargo(arguments);
    note(&format!("==> {}", step.typed()));
    let start = Instant::now();
    let messages = step.output()?;
    let took = start.elapsed();
    note(&format!("--- done in {:.1} s", took.as_secs_f64()));
    read(&messages, took).ok_or_else(|| Failure::Content {
        path: workspace_root(),
        problem: format!(
            "cargo built no test program here, or not the program {COMMAND} and all shared libraries: {NATIVE}, \
             {PRELOAD} and {FAKE}"
        ),
    })
}

/// Parses cargo's messages; `None` if a program or library is missing.
fn read(messages: &str, took: Duration) -> Option<Built> {
    let (mut programs, mut native, mut preload, mut fake) = (Vec::new(), None, None, None);
    let mut command = None;
    for message in messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        if message["reason"] != "compiler-artifact" {
            continue;
        }
        let Some(target) = message["target"]["name"].as_str() else { continue };
        if message["profile"]["test"] == true {
            programs.extend(program(&message, target));
        } else if target == NATIVE {
            native = shared_library(&message);
        } else if target == PRELOAD {
            preload = shared_library(&message);
        } else if target == FAKE {
            fake = shared_library(&message);
        } else if target == COMMAND && message["target"]["kind"][0] == "bin" {
            command = message["executable"].as_str().map(PathBuf::from);
        }
    }
    let (native, preload, fake, command) = (native?, preload?, fake?, command?);
    (!programs.is_empty()).then_some(Built { programs, native, preload, fake, command, took })
}

fn program(message: &Value, target: &str) -> Option<Program> {
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    let (_, package) = message["package_id"].as_str()?.rsplit_once(['#', '/'])?;
    let package = package.split('@').next()?.to_owned();
    // For a package whose folder has its name, the identifier has the version only.
    let package = if package.starts_with(|c: char| c.is_ascii_digit()) {
        folder.file_name()?.to_string_lossy().into_owned()
    } else {
        package
    };
    let path = message["executable"].as_str()?.into();
    Some(Program { package, target: target.to_owned(), folder, path })
}

fn shared_library(message: &Value) -> Option<PathBuf> {
    let files = message["filenames"].as_array()?.iter().filter_map(Value::as_str);
    files.map(PathBuf::from).find(|file| file.extension().is_some_and(|ending| ending == "so"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRAM: &str = r#"{"reason":"compiler-artifact","package_id":"path+file:///p/crates/core#poorwill-core@0.1.0","manifest_path":"/p/crates/core/Cargo.toml","target":{"name":"promises"},"profile":{"test":true},"filenames":["/p/target/debug/deps/promises-1"],"executable":"/p/target/debug/deps/promises-1"}"#;
    const OWN_NAME: &str = r#"{"reason":"compiler-artifact","package_id":"path+file:///p/xtask#0.1.0","manifest_path":"/p/xtask/Cargo.toml","target":{"name":"house"},"profile":{"test":true},"filenames":[],"executable":"/p/t"}"#;

    const COMMAND: &str = r#"{"reason":"compiler-artifact","target":{"name":"poorwill","kind":["bin"]},"profile":{"test":false},"filenames":["/t/poorwill"],"executable":"/t/poorwill"}"#;
    const LIBRARY: &str = r#"{"reason":"compiler-artifact","target":{"name":"poorwill","kind":["lib"]},"profile":{"test":false},"filenames":["/t/libpoorwill.rlib"],"executable":null}"#;

    fn library(name: &str) -> String {
        format!(
            r#"{{"reason":"compiler-artifact","target":{{"name":"{name}"}},"profile":{{"test":false}},"filenames":["/t/lib{name}.rlib","/t/lib{name}.so"],"executable":null}}"#
        )
    }

    #[test]
    fn programs_and_libraries_are_found() {
        let messages = [
            PROGRAM,
            OWN_NAME,
            &library(NATIVE),
            &library(PRELOAD),
            &library(FAKE),
            COMMAND,
            LIBRARY,
            r#"{"reason":"build-finished"}"#,
        ];
        let built = read(&messages.join("\n"), Duration::ZERO).unwrap();
        let [core, xtask] = &built.programs[..] else { panic!("{built:?}") };
        assert_eq!((&core.package[..], &core.target[..]), ("poorwill-core", "promises"));
        assert_eq!(core.folder, Path::new("/p/crates/core"));
        assert_eq!(core.path, Path::new("/p/target/debug/deps/promises-1"));
        assert_eq!((&xtask.package[..], &xtask.target[..]), ("xtask", "house"));
        assert_eq!(built.native, Path::new("/t/lib_native.so"));
        assert_eq!(built.preload, Path::new("/t/libpoorwill_preload.so"));
        assert_eq!(built.fake, Path::new("/t/libpoorwill_fake_libcuda.so"));
        assert_eq!(built.command, Path::new("/t/poorwill"));
    }

    #[test]
    fn missing_builds_are_noticed() {
        let [native, preload, fake] = [NATIVE, PRELOAD, FAKE].map(library);
        for missing in [
            &[PROGRAM][..],
            &[&native, &preload, &fake, COMMAND],
            &[PROGRAM, &preload, &fake, COMMAND],
            &[PROGRAM, &native, &fake, COMMAND],
            &[PROGRAM, &native, &preload, COMMAND],
            &[PROGRAM, &native, &preload, &fake, LIBRARY],
        ] {
            assert!(read(&missing.join("\n"), Duration::ZERO).is_none(), "{missing:?}");
        }
    }
}
