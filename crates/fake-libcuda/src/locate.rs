//! Finds the shared library of this crate, or of the fake NVML.
//!
//! Cargo builds the library into the folder `deps`. Tests and benchmarks run there, programs in its parent,
//! and examples beside it.

use std::path::{Path, PathBuf};

/// The value of `variable`, otherwise the `file` that cargo built.
pub(crate) fn find(variable: &str, file: &str) -> PathBuf {
    if let Some(named) = std::env::var_os(variable).filter(|named| !named.is_empty()) {
        return named.into();
    }
    let program = std::env::current_exe().unwrap_or_default();
    let candidates = candidates(&program, file);
    candidates.iter().find(|candidate| candidate.is_file()).cloned().unwrap_or_else(|| {
        let looked: Vec<String> = candidates.iter().map(|path| format!("  {}", path.display())).collect();
        panic!(
            "no {file} for the program {}: {variable} is not set, and there is none of\n{}",
            program.display(),
            looked.join("\n")
        )
    })
}

/// `deps` first: a file elsewhere may be older.
fn candidates(program: &Path, file: &str) -> Vec<PathBuf> {
    let folders: Vec<&Path> = program.ancestors().skip(1).take(2).collect();
    let beside_deps =
        folders.iter().filter(|folder| folder.ends_with("deps")).map(|folder| folder.join(file));
    let in_deps = folders.iter().map(|folder| folder.join("deps").join(file));
    let beside = folders.iter().map(|folder| folder.join(file));
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

    const FILE: &str = "libtest.so";

    #[test]
    fn the_folder_that_cargo_writes_to_comes_first() {
        for (program, first) in [
            ("/t/debug/deps/a-1", "/t/debug/deps"),
            ("/t/debug/a", "/t/debug/deps"),
            ("/t/debug/examples/a", "/t/debug/examples/deps"),
        ] {
            let candidates = candidates(Path::new(program), FILE);
            assert_eq!(candidates[0], Path::new(first).join(FILE), "{program}");
            for folder in ["/t/debug/deps", "/t/debug"] {
                assert!(candidates.contains(&Path::new(folder).join(FILE)), "{program}: {candidates:?}");
            }
        }
    }
}
