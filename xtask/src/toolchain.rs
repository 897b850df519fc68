//! The toolchain: cargo's target folder, this program in it, and the compiler's targets.

use std::path::{Path, PathBuf};

use crate::steps::{Failure, Step};

/// Cargo's target folder, which cargo marks as a cache.
pub(crate) fn target_folder() -> Result<PathBuf, Failure> {
    let path = own_program()?;
    match path.ancestors().find(|folder| folder.join("CACHEDIR.TAG").is_file()) {
        Some(target) => Ok(target.to_owned()),
        None => {
            Err(Failure::Content { path, problem: "it does not lie in cargo's target folder".to_owned() })
        }
    }
}

/// This program, in cargo's folder of builds.
pub(crate) fn own_program() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(|cause| Failure::File { path: "xtask".into(), cause })
}

/// Whether the compiler has the standard library for `target`.
pub(crate) fn is_installed(target: &str) -> Result<bool, Failure> {
    let libdir = Step::rustc(["--print", "target-libdir", "--target", target]).output()?;
    Ok(Path::new(&libdir).is_dir())
}

/// Why nothing is built for `target`, and what helps.
pub(crate) fn not_installed(target: &str) -> String {
    format!("target {target} not installed; `rustup target add {target}`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_that_runs_this_is_installed() {
        let version = Step::rustc(["--version", "--verbose"]).output().unwrap();
        let host = version.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
        assert!(is_installed(host).unwrap());
    }

    #[test]
    fn this_program_lies_in_a_target_folder() {
        assert!(target_folder().unwrap().join("CACHEDIR.TAG").is_file());
    }
}
