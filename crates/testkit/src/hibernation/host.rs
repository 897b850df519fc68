//! Targets on the host device.

use std::any::Any;
use std::path::PathBuf;
use std::process::Command;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use poorwill_core::Driver;
use poorwill_core::hibernation::{CheckpointErrorKind, CheckpointStep, Checkpointer, HeldMemory, Obstacle};
use poorwill_driver::host::{HostCheckpointer, HostProcess, HostProcessMemory, StepFailure};
use poorwill_driver::{HostConfig, HostDevice};
use tempfile::TempDir;

use super::fault::{Hold, STEPS, TargetFault};
use super::target::{Enter, serve};
use super::{Setup, target_command};

/// The folder of the target's socket.
pub(super) const FOLDER: &str = "POORWILL_HOST_PROCESSES";
const SETUP: &str = "POORWILL_TEST_SETUP";
const FAULT: &str = "POORWILL_TEST_CHECKPOINT";

/// Targets on the host device, in a folder of their own.
#[derive(Debug)]
pub struct HostSetup {
    folder: PathBuf,
    _removed: Option<TempDir>,
}

impl HostSetup {
    /// A fresh folder, or that of the process which started this one.
    ///
    /// # Panics
    /// If there is no space for it.
    #[must_use]
    pub fn open() -> Self {
        if let Some(folder) = std::env::var_os(SETUP) {
            return Self { folder: folder.into(), _removed: None };
        }
        let folder = TempDir::new().unwrap();
        Self { folder: folder.path().to_owned(), _removed: Some(folder) }
    }

    /// Where targets register.
    #[must_use]
    pub fn processes(&self) -> PathBuf {
        self.folder.join("processes")
    }
}

impl Setup for HostSetup {
    fn checkpointer_within(&self, answer_max: Option<Duration>) -> Arc<dyn Checkpointer> {
        let checkpointer = HostCheckpointer::open(self.processes());
        Arc::new(match answer_max {
            Some(answer_max) => checkpointer.answering_within(answer_max),
            None => checkpointer,
        })
    }

    fn command(&self, module: &str, fault: Option<TargetFault>) -> Command {
        let mut command = target_command(module);
        command.env(FOLDER, self.processes());
        if let Some(fault) = fault {
            command.env(FAULT, self.text(fault));
        }
        command
    }

    fn hold(&self) -> Hold {
        Hold::of(&self.folder)
    }

    fn variables(&self) -> Vec<(&'static str, String)> {
        vec![(SETUP, self.folder.to_str().unwrap().to_owned())]
    }
}

impl HostSetup {
    fn text(&self, fault: TargetFault) -> String {
        match fault {
            TargetFault::Fails(step) => format!("fails {step}"),
            TargetFault::Loses(step) => format!("loses {step}"),
            TargetFault::Holds(step) => format!("holds {step} {}", self.hold().path()),
            TargetFault::Obstacle => "obstacle".to_owned(),
        }
    }
}

/// What the target does.
///
/// # Panics
/// If it cannot register itself.
pub fn target() {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let device = Arc::new(HostDevice::open(&HostConfig::of_pages(256)).unwrap());
    let script = std::env::var(FAULT).map_or_else(|_| TargetScript::default(), |text| text.parse().unwrap());
    let memory = TargetMemory { device: Arc::clone(&device), script };
    let process = Arc::new(HostProcess::register(&folder, Box::new(memory)).unwrap());
    let enter: Enter = Arc::new(move || process.enter().ok().map(|call| Box::new(call) as Box<dyn Any>));
    serve(&(device as Arc<dyn Driver>), &enter);
}

/// What the variable says.
#[derive(Debug, Default)]
struct TargetScript {
    fails: Option<CheckpointStep>,
    is_lost: bool,
    holds: Option<(CheckpointStep, Hold)>,
    has_obstacle: bool,
    has_failed: AtomicBool,
}

impl FromStr for TargetScript {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.splitn(3, ' ');
        let what = words.next();
        let mut step = || {
            let name = words.next().ok_or("no step")?;
            STEPS.into_iter().find(|step| step.to_string() == name).ok_or(format!("no step `{name}`"))
        };
        match what {
            Some("fails") => Ok(Self { fails: Some(step()?), ..Self::default() }),
            Some("loses") => Ok(Self { fails: Some(step()?), is_lost: true, ..Self::default() }),
            Some("obstacle") => Ok(Self { has_obstacle: true, ..Self::default() }),
            Some("holds") => {
                let step = step()?;
                let path = PathBuf::from(words.next().ok_or("no path")?);
                let hold = Hold::of(path.parent().ok_or("no folder")?);
                Ok(Self { holds: Some((step, hold)), ..Self::default() })
            }
            _ => Err(format!("no fault `{text}`")),
        }
    }
}

struct TargetMemory {
    device: Arc<HostDevice>,
    script: TargetScript,
}

impl HostProcessMemory for TargetMemory {
    fn held(&self) -> Vec<HeldMemory> {
        let memory = self.device.memory_info().unwrap();
        let used_bytes = Some(memory.total_bytes - memory.free_bytes);
        vec![HeldMemory { uuid: "host".into(), used_bytes }]
    }

    fn obstacles(&self) -> Vec<Obstacle> {
        if self.script.has_obstacle { vec![Obstacle::Communicator("of a test".into())] } else { Vec::new() }
    }

    fn is_idle(&self) -> bool {
        self.device.is_idle()
    }

    fn take_off(&self) -> Result<(), StepFailure> {
        self.device.take_off().map_err(|_| CheckpointErrorKind::OutOfHostMemory.into())
    }

    fn put_back(&self) -> Result<(), StepFailure> {
        self.device.put_back().map_err(|_| CheckpointErrorKind::OutOfDeviceMemory.into())
    }

    fn before(&self, step: CheckpointStep) -> Result<(), StepFailure> {
        if let Some((held, hold)) = &self.script.holds
            && *held == step
        {
            hold.wait();
        }
        if self.script.fails == Some(step) && !self.script.has_failed.swap(true, Ordering::AcqRel) {
            let (name, text) = ("TEST".to_owned(), "on purpose".to_owned());
            let kind = CheckpointErrorKind::Refused { code: 7, name, text };
            return Err(StepFailure { kind, is_lost: self.script.is_lost });
        }
        Ok(())
    }
}
