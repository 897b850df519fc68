//! What the engine holds beside its memory, awake or asleep, and how it leaves its device.
//!
//! It stands for an engine's context, kernels and graphs. As a registered process the engine can be taken off its device
//! by another one, as NVIDIA's driver does it. Then it holds nothing, and calls of its memory wait.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memmap2::MmapMut;
use poorwill::hibernation::{CheckpointErrorKind, HeldMemory, Obstacle, ProcessState};
use poorwill_driver::host::{DeviceCall, DeviceLost, HostProcess, HostProcessMemory, StepFailure};

use crate::fault::{Fault, Faults};
use crate::memory::Memory;

/// Its one device.
const DEVICE: &str = "mock";

#[derive(Debug)]
pub(crate) struct Residue {
    /// `None` if it cannot be taken off. Declared first, so that no step runs while the rest is dropped.
    process: Option<HostProcess>,
    _held: Arc<HeldResidue>,
}

#[derive(Debug)]
struct HeldResidue {
    bytes: usize,
    held: Mutex<Option<MmapMut>>,
    faults: Arc<Faults>,
    memory: Arc<Memory>,
}

/// The hooks of the registered process.
struct Hooks(Arc<HeldResidue>);

impl Residue {
    /// Of this size. With a folder, this process is registered there.
    pub(crate) fn open(
        bytes: u64,
        folder: Option<&Path>,
        memory: &Arc<Memory>,
        faults: &Arc<Faults>,
    ) -> io::Result<Self> {
        let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
        let (faults, memory) = (Arc::clone(faults), Arc::clone(memory));
        let held = Arc::new(HeldResidue { bytes, held: Mutex::default(), faults, memory });
        held.put_back()?;
        let hooks = |held| Box::new(Hooks(held));
        let process = folder.map(|folder| HostProcess::register(folder, hooks(Arc::clone(&held))));
        Ok(Self { process: process.transpose()?, _held: held })
    }

    /// Waits while the process is taken off, or put back.
    pub(crate) fn enter(&self) -> Result<Option<DeviceCall>, DeviceLost> {
        self.process.as_ref().map(HostProcess::enter).transpose()
    }

    /// Whether calls of its memory would wait.
    pub(crate) fn is_off(&self) -> bool {
        self.process.as_ref().is_some_and(|process| process.state() != ProcessState::Running)
    }
}

impl HeldResidue {
    fn put_back(&self) -> io::Result<()> {
        if self.bytes == 0 {
            return Ok(());
        }
        let mut pages = MmapMut::map_anon(self.bytes)?;
        // Pages without bytes would take no memory.
        pages.fill(0xa5);
        *self.held() = Some(pages);
        Ok(())
    }

    fn held(&self) -> MutexGuard<'_, Option<MmapMut>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn awake_bytes(&self) -> u64 {
        self.memory.held_bytes().unwrap_or(0)
    }
}

fn refused(name: &str, text: &str) -> StepFailure {
    CheckpointErrorKind::Refused { code: 1, name: name.to_owned(), text: text.to_owned() }.into()
}

impl HostProcessMemory for Hooks {
    fn held(&self) -> Vec<HeldMemory> {
        let residue =
            self.0.held().as_ref().map_or(0, |pages| u64::try_from(pages.len()).unwrap_or(u64::MAX));
        let used_bytes = Some(residue.saturating_add(self.0.awake_bytes()));
        vec![HeldMemory { uuid: DEVICE.to_owned(), used_bytes }]
    }

    fn obstacles(&self) -> Vec<Obstacle> {
        let is_there = self.0.faults.occurs(Fault::Communicator);
        is_there
            .then(|| Obstacle::Communicator("a mocked one with another rank".to_owned()))
            .into_iter()
            .collect()
    }

    fn take_off(&self) -> Result<(), StepFailure> {
        if self.0.awake_bytes() > 0 {
            return Err(refused(
                "AWAKE",
                "a mock engine leaves its device asleep only; put it to sleep first",
            ));
        }
        if self.0.faults.occurs(Fault::HibernateRefuses) {
            return Err(refused("REFUSED", "this engine is configured to refuse"));
        }
        if !self.0.faults.occurs(Fault::ResidueStays) {
            *self.0.held() = None;
        }
        Ok(())
    }

    fn put_back(&self) -> Result<(), StepFailure> {
        if self.0.faults.occurs(Fault::ResumeFails) {
            return Err(refused("REFUSED", "this engine is configured not to come back"));
        }
        self.0.put_back().map_err(|_| CheckpointErrorKind::OutOfDeviceMemory.into())
    }
}
