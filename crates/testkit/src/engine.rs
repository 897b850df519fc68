//! Processes that can be taken off the host device, as children of a test.
//!
//! A test runs itself again: it calls [`run_as_child`] first, and starts [`HostEngine`]s after that. Files let it
//! fail or hold the steps of each.

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use poorwill_core::hibernation::{
    CheckpointErrorKind, CheckpointStep, Checkpointer, HeldMemory, Obstacle, ProcessState,
};
use poorwill_driver::host::{HostCheckpointer, HostProcess, HostProcessMemory, StepFailure};

use crate::child::{self, OwnedChild};
use crate::processes::DEVICE;

const ROLE: &str = "host engine";
const FOLDER: &str = "POORWILL_TEST_ENGINES";
const HELD: &str = "POORWILL_TEST_HELD_BYTES";
const POLL: Duration = Duration::from_millis(1);

/// A child that is registered in a folder. It ends with its test.
#[derive(Debug)]
pub struct HostEngine {
    child: OwnedChild,
    /// Its end ends the child.
    _stdin: Option<ChildStdin>,
    folder: PathBuf,
}

impl HostEngine {
    /// Starts one that holds this much, and waits until it is registered.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn start(folder: &Path, held_bytes: u64) -> Self {
        let folder = folder.to_owned();
        let mut command = child::command(ROLE, &[(HELD, &held_bytes.to_string())]);
        command.env(FOLDER, &folder).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = OwnedChild::start(&mut command);
        let stdin = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let is_ready = lines.map_while(Result::ok).any(|line| line.ends_with("registered"));
        assert!(is_ready, "an engine does not start");
        Self { child, _stdin: stdin, folder }
    }

    /// Its number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where it stands.
    ///
    /// # Panics
    /// If it does not say so.
    #[must_use]
    pub fn state(&self) -> ProcessState {
        HostCheckpointer::open(&self.folder).state(self.pid()).unwrap()
    }

    /// Makes a step fail, until [`Self::mend`]. A restore that fails for good loses the device with `is_lost`.
    ///
    /// # Panics
    /// If the folder is gone.
    pub fn fail(&self, step: CheckpointStep, is_lost: bool) {
        fs::write(self.file("fail", step), if is_lost { "lost" } else { "" }).unwrap();
    }

    /// Makes a step work again.
    pub fn mend(&self, step: CheckpointStep) {
        let _ = fs::remove_file(self.file("fail", step));
    }

    /// Holds a step at its beginning, until [`Self::release`].
    ///
    /// # Panics
    /// If the folder is gone.
    pub fn hold(&self, step: CheckpointStep) {
        fs::write(self.file("hold", step), "").unwrap();
    }

    /// Waits until a step is held.
    pub fn await_held(&self, step: CheckpointStep) {
        crate::watchdog::eventually("it is held", || self.file("at", step).exists());
    }

    /// Lets a held step go on.
    pub fn release(&self, step: CheckpointStep) {
        let _ = fs::remove_file(self.file("hold", step));
    }

    /// Gives it something that hinders it.
    ///
    /// # Panics
    /// If the folder is gone.
    pub fn hinder(&self, what: &str) {
        fs::write(self.folder.join(format!("{}-obstacle", self.pid())), what).unwrap();
    }

    /// Ends it as by `kill -9`.
    ///
    /// # Panics
    /// If it cannot be ended.
    pub fn kill(&mut self) {
        self.child.end();
    }

    fn file(&self, what: &str, step: CheckpointStep) -> PathBuf {
        file(&self.folder, self.pid(), what, step)
    }
}

/// Whether this process is a test's engine: then it has been one until its test ended.
///
/// # Panics
/// If it cannot be registered.
#[must_use]
pub fn run_as_child() -> bool {
    if child::role().as_deref() != Some(ROLE) {
        return false;
    }
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let held_bytes = std::env::var(HELD).unwrap().parse().unwrap();
    let memory = Memory { folder: folder.clone(), held_bytes, on_device: Mutex::new(true) };
    let _process = HostProcess::register(&folder, Box::new(memory)).unwrap();
    println!("registered");
    let _ = io::copy(&mut io::stdin(), &mut io::sink());
    true
}

fn file(folder: &Path, pid: u32, what: &str, step: CheckpointStep) -> PathBuf {
    folder.join(format!("{pid}-{what}-{step}"))
}

struct Memory {
    folder: PathBuf,
    held_bytes: u64,
    on_device: Mutex<bool>,
}

impl Memory {
    fn set_on_device(&self, on_device: bool) {
        *self.on_device.lock().unwrap() = on_device;
    }
}

impl HostProcessMemory for Memory {
    fn held(&self) -> Vec<HeldMemory> {
        let used_bytes = if *self.on_device.lock().unwrap() { self.held_bytes } else { 0 };
        vec![HeldMemory { uuid: DEVICE.to_owned(), used_bytes: Some(used_bytes) }]
    }

    fn obstacles(&self) -> Vec<Obstacle> {
        let text = fs::read_to_string(self.folder.join(format!("{}-obstacle", std::process::id())));
        text.into_iter().map(Obstacle::PeerMapping).collect()
    }

    fn take_off(&self) -> Result<(), StepFailure> {
        self.set_on_device(false);
        Ok(())
    }

    fn put_back(&self) -> Result<(), StepFailure> {
        self.set_on_device(true);
        Ok(())
    }

    fn before(&self, step: CheckpointStep) -> Result<(), StepFailure> {
        let file = |what| file(&self.folder, std::process::id(), what, step);
        if file("hold").exists() {
            fs::write(file("at"), "").unwrap();
            while file("hold").exists() {
                thread::sleep(POLL);
            }
            let _ = fs::remove_file(file("at"));
        }
        match fs::read_to_string(file("fail")) {
            Ok(text) => {
                let kind = match step {
                    CheckpointStep::Restore => CheckpointErrorKind::OutOfDeviceMemory,
                    CheckpointStep::Checkpoint => CheckpointErrorKind::OutOfHostMemory,
                    _ => CheckpointErrorKind::Refused {
                        code: 999,
                        name: "SCRIPT".into(),
                        text: "by the test".into(),
                    },
                };
                Err(StepFailure { kind, is_lost: text == "lost" })
            }
            Err(_) => Ok(()),
        }
    }
}
