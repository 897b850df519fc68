//! Standard output and standard error that are closed or have no reader.

use std::fs::File;
use std::process::{Command, Stdio};

use crate::support::{Folder, Ran, command};

/// Runs with the read end of standard output closed from the start.
fn without_a_reader(mut command: Command) -> Ran {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    Ran::from(command.stdout(writer).output().unwrap())
}

#[test]
fn the_report_has_no_reader() {
    let folder = Folder::new();
    folder.write_tensor("x.safetensors", "w", 10);
    for args in [&["verify", "x.safetensors"][..], &["verify", "x.safetensors", "--json"]] {
        let ran = without_a_reader(command(folder.path(), args));
        // The reader closed it, so there is no place for a message, and nothing was delivered.
        assert_eq!((ran.code, ran.stderr.as_str()), (1, ""));
    }
}

#[test]
fn the_error_has_no_reader() {
    let folder = Folder::new();
    without_a_reader(command(folder.path(), ["verify", "nowhere", "--json"]))
        .failed(&["nowhere", "no such file"]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    for args in [&["verify", "nowhere"][..], &["verify", "nowhere", "--json"], &["verify", "--cycles", "0"]] {
        let output = command(folder.path(), args).stderr(writer.try_clone().unwrap()).output().unwrap();
        let code = if args.contains(&"0") { 2 } else { 1 };
        assert_eq!(Ran::from(output).code, code, "{args:?}");
    }
}

#[test]
fn the_help_has_no_reader() {
    let folder = Folder::new();
    for args in [&["--help"][..], &["--version"], &["verify", "--help"]] {
        assert_eq!(without_a_reader(command(folder.path(), args)).stderr, "");
    }
}

#[test]
fn a_full_disk_is_a_failure() {
    let folder = Folder::new();
    folder.write_tensor("x.safetensors", "w", 10);
    for args in [&["verify", "x.safetensors"][..], &["verify", "x.safetensors", "--json"]] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = command(folder.path(), args).stdout(Stdio::from(full)).output().unwrap();
        Ran::from(output).failed(&["cannot print the result", "No space left"]);
    }
}
