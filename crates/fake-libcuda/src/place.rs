//! Where the shared library of this crate is.
//!
//! Cargo builds it together with the part that Rust code links, so it lies beside or above whatever program
//! asks: tests and benchmarks run in the folder `deps` that it is written to, programs one folder above and
//! examples beside that.

use std::path::{Path, PathBuf};

const VARIABLE: &str = "POORWILL_FAKE_LIBCUDA";
const FILE: &str = "libpoorwill_fake_libcuda.so";

/// The shared library: what the environment variable `POORWILL_FAKE_LIBCUDA` names (any library with the
/// symbols of libcuda), otherwise the one that cargo built with the running program.
///
/// # Panics
/// When it is not there; the message says where it was looked for.
#[must_use]
pub fn path() -> PathBuf {
    if let Some(named) = std::env::var_os(VARIABLE).filter(|named| !named.is_empty()) {
        return named.into();
    }
    let program = std::env::current_exe().unwrap_or_default();
    let candidates = candidates(&program);
    candidates.iter().find(|candidate| candidate.is_file()).cloned().unwrap_or_else(|| {
        let looked: Vec<String> = candidates.iter().map(|path| format!("  {}", path.display())).collect();
        panic!(
            "no {FILE} for the program {}: {VARIABLE} is not set, and there is none of\n{}",
            program.display(),
            looked.join("\n")
        )
    })
}

/// `deps` folders first: what lies elsewhere may be a copy of an older build.
fn candidates(program: &Path) -> Vec<PathBuf> {
    let folders: Vec<&Path> = program.ancestors().skip(1).take(2).collect();
    let beside_deps =
        folders.iter().filter(|folder| folder.ends_with("deps")).map(|folder| folder.join(FILE));
    let in_deps = folders.iter().map(|folder| folder.join("deps").join(FILE));
    let beside = folders.iter().map(|folder| folder.join(FILE));
    let mut found: Vec<PathBuf> = Vec::new();
    for candidate in beside_deps.chain(in_deps).chain(beside) {
        if !found.contains(&candidate) {
            found.push(candidate);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_that_cargo_writes_to_comes_first() {
        for (program, first) in [
            ("/t/debug/deps/a-1", "/t/debug/deps"),
            ("/t/debug/a", "/t/debug/deps"),
            ("/t/debug/examples/a", "/t/debug/examples/deps"),
        ] {
            let candidates = candidates(Path::new(program));
            assert_eq!(candidates[0], Path::new(first).join(FILE), "{program}");
            for folder in ["/t/debug/deps", "/t/debug"] {
                assert!(candidates.contains(&Path::new(folder).join(FILE)), "{program}: {candidates:?}");
            }
        }
    }
}
