//! Processes that are taken off their devices in memory alone, callers that fail or end at any call, and a journal.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use poorwill_core::hibernation::plan::{Journal, JournalEntry, JournalError, ProcessKey};
use poorwill_core::hibernation::{
    CheckpointError, CheckpointErrorKind, CheckpointStep, Checkpointer, HeldMemory, Obstacle,
    ProcessInspection, ProcessState, Result,
};

/// The device of all processes.
pub const DEVICE: &str = "5a5a5a5a-0000-0000-0000-000000000000";

/// What is used of a device with so much free memory, whatever processes do.
pub const OTHERS_BYTES: u64 = 1 << 40;

/// How often an interrupted step is seen before it is done.
const STEP_POLLS: u32 = 2;

/// Processes and a journal. Clones are the same.
#[derive(Debug, Clone, Default)]
pub struct Simulation {
    world: Arc<Mutex<World>>,
}

#[derive(Debug, Default)]
struct World {
    processes: BTreeMap<u32, Process>,
    journal: BTreeMap<ProcessKey, JournalEntry>,
    started: u32,
    memory: DeviceMemory,
    is_locked: bool,
    unlocked_restores: u32,
    log: Vec<(CheckpointStep, u32)>,
}

/// What is free on the device.
#[derive(Debug, Clone, Copy, Default)]
enum DeviceMemory {
    /// More than anything needs.
    #[default]
    Ample,
    /// What processes do not hold of this.
    Total(u64),
    /// This, or there is no figure.
    Free(Option<u64>),
}

#[derive(Debug)]
struct Process {
    start_ticks: u64,
    held_bytes: u64,
    state: ProcessState,
    /// Where an interrupted step leads, and after how many looks at it.
    towards: Option<(ProcessState, u32)>,
    obstacles: Vec<Obstacle>,
}

/// When a caller ends, or which of its calls fail.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum CallerFault {
    /// None.
    #[default]
    Never,
    /// The call with this number, from 1, counting those on the journal.
    Nth(u32),
    /// Each call whose number is a multiple.
    Every(u32),
    /// The n-th call fails, and its process has lost its device.
    Loses(u32),
    /// The process ends during the n-th call.
    Ends(u32),
    /// These steps of these processes, each time.
    Steps(Vec<(CheckpointStep, u32)>),
    /// The journal cannot be used from the n-th call on.
    JournalFrom(u32),
    /// The caller ends before the n-th call takes effect.
    KilledBefore(u32),
    /// The caller ends during the n-th call, which goes on.
    KilledDuring(u32),
    /// The caller ends after the n-th call, before it learns the result.
    KilledAfter(u32),
}

/// One caller: counts its calls.
#[derive(Debug, Default)]
struct Caller {
    fault: CallerFault,
    calls: u32,
    is_killed: bool,
}

/// What happens to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Done,
    Fails,
    Loses,
    Ends,
    DoneUnseen,
    GoesOn,
    Unmade,
}

/// A caller's view of the processes.
#[derive(Debug, Clone)]
pub struct SimulatedCheckpointer {
    simulation: Simulation,
    caller: Arc<Mutex<Caller>>,
}

/// A caller's view of the journal.
#[derive(Debug, Clone)]
pub struct SimulatedJournal {
    simulation: Simulation,
    caller: Arc<Mutex<Caller>>,
}

impl Simulation {
    /// A new process that holds this much.
    #[must_use]
    pub fn start(&self, held_bytes: u64) -> ProcessKey {
        let mut world = self.world();
        world.started += 1;
        let process = ProcessKey { pid: 1000 + world.started, start_ticks: u64::from(world.started) };
        let state = ProcessState::Running;
        let value = Process {
            start_ticks: process.start_ticks,
            held_bytes,
            state,
            towards: None,
            obstacles: Vec::new(),
        };
        world.processes.insert(process.pid, value);
        process
    }

    /// Ends a process.
    pub fn end(&self, process: ProcessKey) {
        self.world().processes.remove(&process.pid);
    }

    /// Another process gets its number.
    #[must_use]
    pub fn reuse(&self, process: ProcessKey) -> ProcessKey {
        let later = ProcessKey { start_ticks: process.start_ticks + 1_000_000, ..process };
        if let Some(found) = self.world().processes.get_mut(&process.pid) {
            found.start_ticks = later.start_ticks;
            found.state = ProcessState::Running;
        }
        later
    }

    /// Sets the state, as another program may.
    pub fn set_state(&self, process: ProcessKey, state: ProcessState) {
        if let Some(found) = self.world().processes.get_mut(&process.pid) {
            found.state = state;
        }
    }

    /// Sets the device's free memory. `None`: there is no figure.
    pub fn set_free_bytes(&self, free_bytes: Option<u64>) {
        self.world().memory = DeviceMemory::Free(free_bytes);
    }

    /// Sets the device's memory. What processes hold on it is not free.
    pub fn set_total_bytes(&self, total_bytes: u64) {
        self.world().memory = DeviceMemory::Total(total_bytes);
    }

    /// Sets what hinders a process.
    pub fn hinder(&self, process: ProcessKey, obstacles: Vec<Obstacle>) {
        if let Some(found) = self.world().processes.get_mut(&process.pid) {
            found.obstacles = obstacles;
        }
    }

    /// The state. `None` if it has ended.
    #[must_use]
    pub fn state(&self, process: ProcessKey) -> Option<ProcessState> {
        let world = self.world();
        world
            .processes
            .get(&process.pid)
            .filter(|found| found.start_ticks == process.start_ticks)
            .map(|found| found.state)
    }

    /// Whether it lives.
    #[must_use]
    pub fn is_alive(&self, process: ProcessKey) -> bool {
        self.state(process).is_some()
    }

    /// All entries of the journal.
    #[must_use]
    pub fn entries(&self) -> Vec<JournalEntry> {
        self.world().journal.values().cloned().collect()
    }

    /// Steps that took effect, in order.
    #[must_use]
    pub fn steps(&self) -> Vec<(CheckpointStep, u32)> {
        self.world().log.clone()
    }

    /// How many restores were made while another caller could have made one.
    #[must_use]
    pub fn unlocked_restores(&self) -> u32 {
        self.world().unlocked_restores
    }

    /// A caller without faults.
    #[must_use]
    pub fn caller(&self) -> (SimulatedCheckpointer, SimulatedJournal) {
        self.caller_with(CallerFault::Never)
    }

    /// A caller with a fault.
    #[must_use]
    pub fn caller_with(&self, fault: CallerFault) -> (SimulatedCheckpointer, SimulatedJournal) {
        let caller = Arc::new(Mutex::new(Caller { fault, ..Caller::default() }));
        let journal = SimulatedJournal { simulation: self.clone(), caller: Arc::clone(&caller) };
        (SimulatedCheckpointer { simulation: self.clone(), caller }, journal)
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl World {
    fn held_bytes(&self) -> u64 {
        let held = self.processes.values().filter(|process| process.state != ProcessState::Checkpointed);
        held.map(|process| process.held_bytes).sum()
    }
}

impl SimulatedCheckpointer {
    /// How many calls were made, those on the journal included.
    #[must_use]
    pub fn calls(&self) -> u32 {
        lock(&self.caller).calls
    }

    /// Whether the fault has ended this caller.
    #[must_use]
    pub fn is_killed(&self) -> bool {
        lock(&self.caller).is_killed
    }

    fn step(&self, step: CheckpointStep, pid: u32) -> Result<()> {
        let fate = lock(&self.caller).fate(Some((step, pid)));
        let failed = || CheckpointError::new(step, pid, refused(step));
        let mut world = self.simulation.world();
        let found = world.processes.get_mut(&pid).filter(|_| fate != Fate::Unmade);
        let Some(process) = found else {
            let kind = if fate == Fate::Unmade { refused(step) } else { CheckpointErrorKind::NoSuchProcess };
            return Err(CheckpointError::new(step, pid, kind));
        };
        let (wanted, after, during) = course(step);
        if process.state != wanted {
            return Err(CheckpointError::new(
                step,
                pid,
                CheckpointErrorKind::wrong_state(process.state, wanted),
            ));
        }
        match fate {
            Fate::Done | Fate::DoneUnseen => {
                process.state = after;
                world.log.push((step, pid));
                world.unlocked_restores += u32::from(step == CheckpointStep::Restore && !world.is_locked);
            }
            // A lock or unlock ends with its caller.
            Fate::GoesOn if during == wanted => {}
            Fate::GoesOn => {
                process.state = during;
                process.towards = Some((after, STEP_POLLS));
            }
            Fate::Loses => process.state = ProcessState::Failed,
            Fate::Ends => drop(world.processes.remove(&pid)),
            Fate::Fails | Fate::Unmade => {}
        }
        if fate == Fate::Done { Ok(()) } else { Err(failed()) }
    }
}

/// Where a step begins, where it ends, and what is seen of it meanwhile.
fn course(step: CheckpointStep) -> (ProcessState, ProcessState, ProcessState) {
    use ProcessState::{Checkpointed, Checkpointing, Locked, Restoring, Running};
    match step {
        CheckpointStep::Lock => (Running, Locked, Running),
        CheckpointStep::Checkpoint => (Locked, Checkpointed, Checkpointing),
        CheckpointStep::Restore => (Checkpointed, Locked, Restoring),
        _ => (Locked, Running, Locked),
    }
}

fn refused(step: CheckpointStep) -> CheckpointErrorKind {
    match step {
        CheckpointStep::Restore => CheckpointErrorKind::OutOfDeviceMemory,
        CheckpointStep::Checkpoint => CheckpointErrorKind::OutOfHostMemory,
        _ => CheckpointErrorKind::Refused { code: 999, name: "UNKNOWN".into(), text: "by the script".into() },
    }
}

impl Caller {
    fn fate(&mut self, call: Option<(CheckpointStep, u32)>) -> Fate {
        self.calls += 1;
        let is_nth = |n: u32| n == self.calls;
        let fate = match &self.fault {
            _ if self.is_killed => Fate::Unmade,
            CallerFault::Nth(n) if is_nth(*n) => Fate::Fails,
            CallerFault::Every(n) if self.calls.is_multiple_of(*n) => Fate::Fails,
            CallerFault::JournalFrom(n) if call.is_none() && self.calls >= *n => Fate::Fails,
            CallerFault::Loses(n) if is_nth(*n) => Fate::Loses,
            CallerFault::Ends(n) if is_nth(*n) => Fate::Ends,
            CallerFault::KilledBefore(n) if is_nth(*n) => Fate::Unmade,
            CallerFault::KilledDuring(n) if is_nth(*n) => Fate::GoesOn,
            CallerFault::KilledAfter(n) if is_nth(*n) => Fate::DoneUnseen,
            CallerFault::Steps(steps) => match call {
                Some((step, pid)) if steps.contains(&(step, pid)) => Fate::Fails,
                _ => Fate::Done,
            },
            _ => Fate::Done,
        };
        self.is_killed |= matches!(fate, Fate::Unmade | Fate::GoesOn | Fate::DoneUnseen);
        fate
    }
}

impl Checkpointer for SimulatedCheckpointer {
    fn state(&self, pid: u32) -> Result<ProcessState> {
        let fate = lock(&self.caller).fate(Some((CheckpointStep::State, pid)));
        let failed = |kind| CheckpointError::new(CheckpointStep::State, pid, kind);
        let mut world = self.simulation.world();
        let Some(process) = world.processes.get_mut(&pid) else {
            return Err(failed(CheckpointErrorKind::NoSuchProcess));
        };
        if fate != Fate::Done {
            return Err(failed(refused(CheckpointStep::State)));
        }
        match process.towards.take() {
            Some((state, 0)) => process.state = state,
            Some((state, polls)) => process.towards = Some((state, polls - 1)),
            None => {}
        }
        Ok(process.state)
    }

    fn inspect(&self, pid: u32) -> Result<ProcessInspection> {
        let fate = lock(&self.caller).fate(Some((CheckpointStep::Inspect, pid)));
        let failed = |kind| CheckpointError::new(CheckpointStep::Inspect, pid, kind);
        let world = self.simulation.world();
        let process = world.processes.get(&pid).ok_or_else(|| failed(CheckpointErrorKind::NoSuchProcess))?;
        if fate != Fate::Done {
            return Err(failed(refused(CheckpointStep::Inspect)));
        }
        let held = vec![HeldMemory { uuid: DEVICE.to_owned(), used_bytes: Some(process.held_bytes) }];
        Ok(ProcessInspection { state: process.state, held, obstacles: process.obstacles.clone() })
    }

    fn free_bytes(&self, uuid: &str) -> Option<u64> {
        let world = self.simulation.world();
        let free_bytes = match world.memory {
            DeviceMemory::Ample => Some(u64::MAX),
            DeviceMemory::Total(bytes) => Some(bytes.saturating_sub(world.held_bytes())),
            DeviceMemory::Free(bytes) => bytes,
        };
        free_bytes.filter(|_| uuid == DEVICE)
    }

    fn used_bytes(&self, uuid: &str) -> Option<u64> {
        let world = self.simulation.world();
        let used_bytes = match world.memory {
            DeviceMemory::Ample | DeviceMemory::Total(_) => Some(world.held_bytes()),
            // Others take what a process leaves.
            DeviceMemory::Free(bytes) => bytes.map(|_| OTHERS_BYTES),
        };
        used_bytes.filter(|_| uuid == DEVICE)
    }

    fn lock(&self, pid: u32, _: Duration) -> Result<()> {
        self.step(CheckpointStep::Lock, pid)
    }

    fn checkpoint(&self, pid: u32) -> Result<()> {
        self.step(CheckpointStep::Checkpoint, pid)
    }

    fn restore(&self, pid: u32) -> Result<()> {
        self.step(CheckpointStep::Restore, pid)
    }

    fn unlock(&self, pid: u32) -> Result<()> {
        self.step(CheckpointStep::Unlock, pid)
    }
}

impl SimulatedJournal {
    fn change(
        &self,
        change: impl FnOnce(&mut BTreeMap<ProcessKey, JournalEntry>),
    ) -> std::result::Result<(), JournalError> {
        let fate = lock(&self.caller).fate(None);
        if matches!(fate, Fate::Done | Fate::DoneUnseen | Fate::GoesOn) {
            change(&mut self.simulation.world().journal);
        }
        if fate == Fate::Done { Ok(()) } else { Err(JournalError::new("by the script")) }
    }
}

impl Journal for SimulatedJournal {
    fn write(&self, entry: &JournalEntry) -> std::result::Result<(), JournalError> {
        self.change(|journal| drop(journal.insert(entry.id(), entry.clone())))
    }

    fn remove(&self, entry: &JournalEntry) -> std::result::Result<(), JournalError> {
        self.change(|journal| drop(journal.remove(&entry.id())))
    }

    /// Not a call that is counted.
    fn lock_devices(&self, _uuids: &BTreeSet<&str>) -> std::result::Result<Box<dyn Send>, JournalError> {
        let caller = lock(&self.caller);
        if matches!(caller.fault, CallerFault::JournalFrom(n) if caller.calls >= n) {
            return Err(JournalError::new("by the script"));
        }
        drop(caller);
        let was_locked = std::mem::replace(&mut self.simulation.world().is_locked, true);
        if was_locked {
            Err(JournalError::new("its caller waits for itself"))
        } else {
            Ok(Box::new(DevicesLocked(self.simulation.clone())))
        }
    }
}

/// The devices, until it is dropped.
struct DevicesLocked(Simulation);

impl Drop for DevicesLocked {
    fn drop(&mut self) {
        self.0.world().is_locked = false;
    }
}

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}
