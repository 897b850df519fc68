//! Running the program, and files to run it with.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

pub(crate) use poorwill_testkit::command::{Folder, Ran, assert_clean};

/// The program with these arguments in a folder, without a terminal and without the caller's settings.
pub(crate) fn command(folder: &Path, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
    poorwill_testkit::command::command(env!("CARGO_BIN_EXE_poorwill"), folder, args)
}

/// Runs the program to its end.
pub(crate) fn run(folder: &Folder, args: &[&str]) -> Ran {
    Ran::from(command(folder.path(), args).output().unwrap())
}
