//! The plan of a set: processes that leave their devices together, and come back together.
//!
//! ```text
//! hibernate   inspect all ─ refuse ─► journal ─► lock all ─► checkpoint all ─► journal
//! resume      journal ─► restore all ─► unlock all ─► forget
//! ```
//!
//! - **\[first\]** [`SetPlan::inspect`] finds what hinders before anything is locked or written.
//! - **\[together\]** All are locked before any is checkpointed, and all restored before any is unlocked. Processes take
//!   each step at the same time.
//! - **\[whole\]** A failure brings all back: the set runs, or, if a restore fails, it is checkpointed again as a whole.
//!   Only further failures leave anything else. The error names it in [`SetError::left`].
//! - **\[space\]** Nothing is restored while its devices have less free memory than it held, and 64 MiB more: such a
//!   restore loses it. Where the driver keeps no figure of a process, it is by how much used memory falls in its checkpoint.
//!   Should a caller end before it has that, [`JournalEntry::enough_bytes`] is taken.
//!   What is not known is refused, before anything is locked, unless [`SetPlan::without_space_check`] was asked for.
//!   From the comparison to the end of the restore no other caller restores there: [`Journal::lock_devices`].
//! - **\[released\]** A lock that cannot lead anywhere is undone, even if a part of the set stays checkpointed.
//! - **\[members\]** A process that has ended or lost its device belongs to the set no more. The rest is the set.
//! - **\[recovered\]** Whenever its caller ends, the journal and the processes' states are enough: [`SetPlan::recover`]
//!   leaves no process locked and no half of a set.
//!
//! The caller sees to it that no two plans work on one process at the same time.

mod error;
mod hibernate;
mod journal;
mod measure;
mod recover;
mod settle;
mod space;
mod steps;

use std::collections::BTreeSet;

pub use self::error::{LeftProcess, SetError, SetErrorCause};
pub use self::hibernate::{CheckpointedProcess, RestoredProcess};
pub use self::journal::{Journal, JournalEntry, JournalError, ProcessKey, SetPhase, SetProcess};
pub use self::recover::{Recovered, Recovery};

use super::{
    CheckpointError, CheckpointErrorKind, CheckpointStep, Checkpointer, Obstacle, ProcessInspection,
    ProcessState,
};

/// What carries out the steps of sets, and what remembers them.
///
/// ```
/// use std::time::Duration;
///
/// use poorwill::hibernation::plan::{SetPlan, SetProcess};
/// use poorwill::hibernation::ProcessState;
/// use poorwill_testkit::processes::Simulation;
///
/// let simulation = Simulation::default();
/// let process = simulation.start(1 << 30);
/// let (checkpointer, journal) = simulation.caller();
/// let plan = SetPlan::new(&checkpointer, &journal);
///
/// let found = plan.inspect(&[process.pid])?.remove(0);
/// let set = [SetProcess { key: process, held: found.held }];
/// plan.hibernate(&set, Duration::from_secs(5))?;
/// assert_eq!(simulation.state(process), Some(ProcessState::Checkpointed));
/// plan.resume(&[process], &simulation.entries())?;
/// # Ok::<(), poorwill::hibernation::plan::SetError>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct SetPlan<'a> {
    checkpointer: &'a dyn Checkpointer,
    journal: &'a dyn Journal,
    checks_space: bool,
    suspended_communicators: usize,
}

impl<'a> SetPlan<'a> {
    /// A plan that makes its steps by `checkpointer`.
    #[must_use]
    pub fn new(checkpointer: &'a dyn Checkpointer, journal: &'a dyn Journal) -> Self {
        Self { checkpointer, journal, checks_space: true, suspended_communicators: 0 }
    }

    /// Restores also where nothing says that there is space. A restore on a full device loses the process.
    #[must_use]
    pub fn without_space_check(self) -> Self {
        Self { checks_space: false, ..self }
    }

    /// Takes the caller's word that each process has suspended so many of its communicators. Others are obstacles.
    #[must_use]
    pub fn with_suspended_communicators(self, count: usize) -> Self {
        Self { suspended_communicators: count, ..self }
    }

    /// What the set would take, and whether it can hibernate: it changes nothing.
    ///
    /// # Errors
    /// An empty set, a process named twice, one that does not run, obstacles, and a way back that cannot be checked.
    /// `left` is empty.
    pub fn inspect(&self, pids: &[u32]) -> Result<Vec<ProcessInspection>, SetError> {
        distinct(pids)?;
        let inspections: Vec<_> =
            pids.iter().map(|pid| self.checkpointer.inspect(*pid)).collect::<Result<_, _>>()?;
        for (&pid, found) in pids.iter().zip(&inspections) {
            if found.state != ProcessState::Running {
                return Err(wrong_state(pid, CheckpointStep::Lock, found.state, ProcessState::Running).into());
            }
            let obstacles = self.unexplained(&found.obstacles);
            if !obstacles.is_empty() {
                return Err(SetErrorCause::Obstacles { pid, obstacles }.into());
            }
            if !self.will_know_space(&found.held) {
                return Err(SetErrorCause::NoFigures { pid }.into());
            }
        }
        Ok(inspections)
    }

    /// All but communicators, where all of these are suspended.
    fn unexplained(&self, obstacles: &[Obstacle]) -> Vec<Obstacle> {
        let communicators = obstacles.iter().filter(|each| is_communicator(each)).count();
        let are_suspended = communicators <= self.suspended_communicators;
        obstacles.iter().filter(|each| !(are_suspended && is_communicator(each))).cloned().collect()
    }
}

fn is_communicator(obstacle: &Obstacle) -> bool {
    matches!(obstacle, Obstacle::Communicator(_))
}

fn keys(processes: &[SetProcess]) -> Vec<ProcessKey> {
    processes.iter().map(|process| process.key).collect()
}

fn distinct(pids: &[u32]) -> Result<(), SetError> {
    if pids.is_empty() {
        return Err(SetErrorCause::Empty.into());
    }
    let mut seen = BTreeSet::new();
    match pids.iter().find(|pid| !seen.insert(**pid)) {
        Some(&pid) => Err(SetErrorCause::Repeated { pid }.into()),
        None => Ok(()),
    }
}

fn wrong_state(pid: u32, step: CheckpointStep, found: ProcessState, wanted: ProcessState) -> CheckpointError {
    let next = match found {
        ProcessState::Running => "it is not hibernating, so there is nothing to resume",
        ProcessState::Locked => {
            "recover it if its helper has ended, or unlock it by the program that locked it"
        }
        ProcessState::Checkpointed => "it hibernates already: resume it first",
        ProcessState::Checkpointing | ProcessState::Restoring => {
            "another caller works on it: ask again later"
        }
        ProcessState::Failed => "it has lost its device: restart it",
    };
    CheckpointError::new(step, pid, CheckpointErrorKind::WrongState { found, wanted, next })
}
