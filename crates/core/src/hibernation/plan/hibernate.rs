//! A set's way off its devices and back.

use std::time::Duration;

use super::measure::is_unmeasured;
use super::settle::Back;
use super::steps::{Standing, all};
use super::{
    JournalEntry, ProcessKey, SetError, SetErrorCause, SetPhase, SetPlan, SetProcess, distinct, keys,
    wrong_state,
};
use crate::hibernation::{CheckpointErrorKind, CheckpointStep, ProcessState, Result as StepResult};

/// How long the steps of a process took.
///
/// ```
/// use poorwill::hibernation::plan::CheckpointedProcess;
///
/// let process = CheckpointedProcess { pid: 12, lock_ms: 0.8, checkpoint_ms: 870.0 };
/// assert!(process.lock_ms < process.checkpoint_ms);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CheckpointedProcess {
    /// The process.
    pub pid: u32,
    /// Until its queued work was done.
    pub lock_ms: f64,
    /// Until it held nothing on its devices.
    pub checkpoint_ms: f64,
}

/// How long the steps back took.
///
/// ```
/// use poorwill::hibernation::plan::RestoredProcess;
///
/// let process = RestoredProcess { pid: 12, restore_ms: 660.0, unlock_ms: 1.4 };
/// assert!(process.unlock_ms < process.restore_ms);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RestoredProcess {
    /// The process.
    pub pid: u32,
    /// Until its memory was on its devices again.
    pub restore_ms: f64,
    /// Until its calls went on.
    pub unlock_ms: f64,
}

impl SetPlan<'_> {
    /// Takes all processes off their devices. [`SetPlan::inspect`] comes before.
    ///
    /// # Errors
    /// The first step that failed. The processes run on, unless `left` names them.
    pub fn hibernate(
        &self,
        processes: &[SetProcess],
        wait_max: Duration,
    ) -> Result<Vec<CheckpointedProcess>, SetError> {
        let members = keys(processes);
        distinct(&pids(&members))?;
        let mut entry = JournalEntry::new(processes.iter().cloned(), SetPhase::Hibernating);
        // Before anything is locked, since others may take long.
        let devices = self.lock_devices(processes.iter().filter(|process| is_unmeasured(process)))?;
        self.journal.write(&entry)?;
        let locked = self.timed(&members, |pid| self.checkpointer.lock(pid, wait_max));
        let ours = self.reached(&members, &locked);
        let may_be_locked_later = locked.iter().any(is_unanswered);
        let result = self.checkpoint_locked(&members, &mut entry, locked);
        drop(devices);
        result.map_err(|cause| {
            let settled = self.settle(&entry, &entry.those(&ours), Back::Undo);
            if may_be_locked_later {
                // Should that happen after this caller's end, a recovery finds it by the entry.
                drop(self.journal.write(&entry));
            }
            settled.error(cause)
        })
    }

    /// Those that a lock has changed. Where it failed, others may have locked.
    fn reached(&self, processes: &[ProcessKey], locked: &[StepResult<f64>]) -> Vec<ProcessKey> {
        let lost = Standing::At(ProcessState::Failed);
        let has_changed =
            |process: ProcessKey, lock: &StepResult<f64>| lock.is_ok() || self.standing(process.pid) == lost;
        let both = processes.iter().copied().zip(locked);
        both.filter(|(process, lock)| has_changed(*process, lock)).map(|(process, _)| process).collect()
    }

    fn checkpoint_locked(
        &self,
        processes: &[ProcessKey],
        entry: &mut JournalEntry,
        locked: Vec<StepResult<f64>>,
    ) -> Result<Vec<CheckpointedProcess>, SetErrorCause> {
        let lock_ms = all(locked)?;
        let checkpoint_ms = all(self.checkpoint_measured(processes, entry)?)?;
        if let Some(pid) = self.unmeasured(&entry.processes) {
            return Err(SetErrorCause::Unmeasured { pid });
        }
        self.journal.write(&entry.at(SetPhase::Hibernated))?;
        let times = lock_ms.into_iter().zip(checkpoint_ms);
        Ok(processes
            .iter()
            .zip(times)
            .map(|(process, (lock_ms, checkpoint_ms))| CheckpointedProcess {
                pid: process.pid,
                lock_ms,
                checkpoint_ms,
            })
            .collect())
    }

    /// Puts all processes back on their devices, if these have space for what `remembered` says that the processes held.
    ///
    /// # Errors
    /// The first step that failed. A set whose restore failed and that is not lost is checkpointed; `left` names it.
    pub fn resume(
        &self,
        members: &[ProcessKey],
        remembered: &[JournalEntry],
    ) -> Result<Vec<RestoredProcess>, SetError> {
        distinct(&pids(members))?;
        for process in members {
            let found = self.checkpointer.state(process.pid)?;
            if found != ProcessState::Checkpointed {
                let step = CheckpointStep::Restore;
                return Err(wrong_state(process.pid, step, found, ProcessState::Checkpointed).into());
            }
        }
        let entry = JournalEntry::of(members, remembered, SetPhase::Resuming);
        // Until a step that got no answer is over, too.
        let _devices = self.lock_devices(&entry.processes)?;
        self.check_space(&entry)?;
        self.journal.write(&entry)?;
        let restored = all(self.timed(members, |pid| self.checkpointer.restore(pid)));
        let (restore_ms, unlock_ms) = restored
            .and_then(|restore_ms| Ok((restore_ms, all(self.timed(members, |pid| self.unlock(pid)))?)))
            .map_err(|error| self.settle(&entry, &entry.processes, Back::Stay).error(error.into()))?;
        self.forget(&entry);
        let times = restore_ms.into_iter().zip(unlock_ms);
        Ok(members
            .iter()
            .zip(times)
            .map(|(process, (restore_ms, unlock_ms))| RestoredProcess {
                pid: process.pid,
                restore_ms,
                unlock_ms,
            })
            .collect())
    }
}

/// Whether the process may yet make the step.
fn is_unanswered(result: &StepResult<f64>) -> bool {
    result.as_ref().is_err_and(|error| matches!(error.kind, CheckpointErrorKind::NoAnswer { .. }))
}

fn pids(processes: &[ProcessKey]) -> Vec<u32> {
    processes.iter().map(|process| process.pid).collect()
}
