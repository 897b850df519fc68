//! The registration of processes in a folder, and what may be found there besides.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use poorwill_core::hibernation::{CheckpointErrorKind, Checkpointer, HeldMemory, ProcessState};
use poorwill_driver::host::{HostCheckpointer, HostProcess, HostProcessMemory, StepFailure};
use poorwill_testkit::child::{self, OwnedChild};
use poorwill_testkit::hibernation::{HibernationTarget, HostSetup, Setup, TARGET, targets};
use tempfile::TempDir;

struct Nothing;

impl HostProcessMemory for Nothing {
    fn held(&self) -> Vec<HeldMemory> {
        Vec::new()
    }

    fn take_off(&self) -> Result<(), StepFailure> {
        Ok(())
    }

    fn put_back(&self) -> Result<(), StepFailure> {
        Ok(())
    }
}

/// What the target does. As a test of its own it does nothing.
#[test]
fn the_target() {
    if child::role().as_deref() == Some(TARGET) {
        targets::host();
    }
}

fn socket(folder: &Path, pid: u32) -> std::path::PathBuf {
    folder.join(format!("{pid}.sock"))
}

/// A process that does nothing until its input ends.
fn other() -> OwnedChild {
    OwnedChild::start(Command::new("cat").stdin(Stdio::piped()))
}

fn end(mut other: OwnedChild) -> u32 {
    drop(other.stdin.take());
    other.wait().unwrap();
    other.id()
}

fn kind(folder: &Path, pid: u32) -> CheckpointErrorKind {
    HostCheckpointer::open(folder).state(pid).unwrap_err().kind
}

#[test]
fn a_process_is_registered_once_and_until_its_drop() {
    let folder = TempDir::new().unwrap();
    let (folder, pid) = (folder.path().join("made"), std::process::id());
    for _ in 0..2 {
        let process = HostProcess::register(&folder, Box::new(Nothing)).unwrap();
        assert_eq!(process.state(), ProcessState::Running);
        let twice = HostProcess::register(&folder, Box::new(Nothing)).unwrap_err();
        assert_eq!(twice.kind(), ErrorKind::AlreadyExists);
        assert!(twice.to_string().contains(&pid.to_string()), "{twice}");
        drop(process.enter().unwrap());
        drop(process);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "nothing is left");
    }
    let file = folder.join("file");
    fs::write(&file, "").unwrap();
    HostProcess::register(&file, Box::new(Nothing)).unwrap_err();
}

#[test]
fn what_processes_that_ended_have_left_is_removed() {
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    let leave = |pid| drop(UnixListener::bind(socket(folder, pid)).unwrap());
    let gone = end(other());
    leave(gone);
    assert_eq!(kind(folder, gone), CheckpointErrorKind::NoSuchProcess);
    assert!(!socket(folder, gone).exists(), "by who asks");
    leave(gone);
    fs::write(folder.join("journal"), "").unwrap();
    let process = HostProcess::register(folder, Box::new(Nothing)).unwrap();
    assert!(!socket(folder, gone).exists(), "by who registers");
    assert!(folder.join("journal").exists());
    drop(process);
}

#[test]
fn a_socket_of_another_process_is_none() {
    let folder = TempDir::new().unwrap();
    let (folder, other) = (folder.path(), other());
    drop(UnixListener::bind(socket(folder, other.id())).unwrap()); // Of one that had this number before.
    assert_eq!(kind(folder, other.id()), CheckpointErrorKind::NoDevice);
    assert!(!socket(folder, other.id()).exists());
    let _ours = UnixListener::bind(socket(folder, other.id())).unwrap();
    assert_eq!(kind(folder, other.id()), CheckpointErrorKind::NoDevice);
    end(other);
}

#[test]
fn a_folder_with_a_long_name_is_named() {
    let folder = TempDir::new().unwrap();
    let (long, other) = (folder.path().join("x".repeat(120)), other());
    fs::create_dir(&long).unwrap();
    let error = kind(&long, other.id());
    assert!(
        matches!(&error, CheckpointErrorKind::Unsupported { reason } if reason.contains("xxx")),
        "{error:?}"
    );
    HostProcess::register(&long, Box::new(Nothing)).unwrap_err();
    end(other);
}

#[test]
fn what_is_no_request_is_not_answered_and_harms_nothing() {
    let setup = HostSetup::open();
    let mut target = HibernationTarget::start(setup.command(module_path!(), None));
    let path = socket(&setup.processes(), target.pid());
    for request in ["", "\n", "erase\n", "lock\n", "unlock", "\u{0}\n", &"x".repeat(10_000)] {
        let mut stream = UnixStream::connect(&path).unwrap();
        let _ = stream.write_all(request.as_bytes());
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer); // It may be reset.
        assert_eq!(answer, "", "{request:.20}");
    }
    let silent = UnixStream::connect(&path).unwrap();
    let checkpointer = setup.checkpointer_within(None);
    checkpointer.lock(target.pid(), Duration::from_secs(100)).unwrap();
    checkpointer.unlock(target.pid()).unwrap();
    drop(silent);
    assert_eq!(target.ask("verify"), "same");
}
