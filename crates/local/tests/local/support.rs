//! Running the program, and files to run it with.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use poorwill_bench::synthetic::SyntheticMoe;
pub(crate) use poorwill_testkit::command::{Folder, Ran, assert_clean, entry, file};

/// The program with these arguments in a folder, without a terminal and without the caller's settings.
pub(crate) fn command(folder: &Path, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
    poorwill_testkit::command::command(env!("CARGO_BIN_EXE_poorwill-demo"), folder, args)
}

/// Runs the program to its end.
pub(crate) fn run(folder: &Folder, args: &[&str]) -> Ran {
    Ran::from(command(folder.path(), args).output().unwrap())
}

/// A folder with a mixture of experts of about 7 MB in `model/`: three shards and their index.
pub(crate) fn folder_with_model() -> Folder {
    let folder = Folder::new();
    let model = SyntheticMoe {
        layers: 2,
        experts: 12,
        hidden: 256,
        moe_intermediate: 256,
        vocab: 1000,
        shards: 3,
        seed: 1,
    };
    model.write(&folder.join("model"), |_| {}).unwrap();
    folder
}
