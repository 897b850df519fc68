//! A wheel, installed as users do: into fresh virtual environments outside the tree, without a network.

use std::env::temp_dir;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::wheel::VERSION;
use crate::python::environment::Venv;
use crate::python::interpreter::Interpreter;
use crate::steps::{Failure, workspace_root};

/// The script that checks an installed package.
const QUESTIONS: &str = "xtask/src/dist/installed.py";

/// Installs the wheel under each interpreter, and checks that it works.
pub(crate) fn check(wheel: &Path, interpreters: &[Interpreter]) -> Result<(), Failure> {
    let scratch = Scratch::new()?;
    let questions = workspace_root().join(QUESTIONS);
    for interpreter in interpreters {
        let venv = Venv::make(interpreter.program.as_os_str(), scratch.0.join("venv"))?;
        let alone = ["--no-index", "--no-deps"].map(OsStr::new).into_iter();
        venv.pip(alone.chain([wheel.as_os_str()])).within(&scratch.0).run()?;
        let ask = [OsStr::new("-I"), questions.as_os_str(), OsStr::new(VERSION)];
        venv.python(ask).within(&scratch.0).run()?;
    }
    Ok(())
}

/// A temporary folder outside the tree, removed on drop.
#[derive(Debug)]
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Scratch, Failure> {
        let path = temp_dir().join(format!("poorwill-dist-{}", std::process::id()));
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.map(|()| Scratch(path.clone())).map_err(|cause| Failure::File { path, cause })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The system clears what remains in a temporary folder.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scratch_folder_is_ours_and_goes() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.0.clone();
        assert!(path.is_dir() && !path.starts_with(workspace_root()));
        assert!(Scratch::new().is_err(), "it is there already, and not taken from whoever has it");
        drop(scratch);
        assert!(!path.exists());
    }
}
