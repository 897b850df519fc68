//! Where a set comes to rest after a failure: all of it runs, or all of it is checkpointed.

use super::steps::{Standing, TRIES, each};
use super::{
    JournalEntry, LeftProcess, ProcessKey, SetError, SetErrorCause, SetPhase, SetPlan, SetProcess, keys,
};
use crate::hibernation::{CheckpointError, CheckpointErrorKind, ProcessState, Result};

/// What is done about processes that are checkpointed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Back {
    /// This call has just checkpointed them: they are restored.
    Undo,
    /// They are restored, if there is known to be space for all.
    Restore,
    /// They stay so: a restore has failed.
    Stay,
}

/// Where each process of a set came to rest.
#[derive(Debug)]
pub(super) struct Settled {
    pub(super) standings: Vec<(ProcessKey, Standing)>,
    /// The first step back that failed for good.
    pub(super) failed: Option<CheckpointError>,
}

impl Settled {
    /// Whether all that is left of the set is checkpointed.
    pub(super) fn is_off(&self) -> bool {
        self.standings.iter().all(|(_, standing)| is_off(*standing))
    }

    pub(super) fn error(self, cause: SetErrorCause) -> SetError {
        SetError { cause, left: self.standings.iter().filter_map(left).collect() }
    }
}

fn left((process, standing): &(ProcessKey, Standing)) -> Option<LeftProcess> {
    let state = match standing {
        Standing::Gone | Standing::At(ProcessState::Running) => return None,
        Standing::At(state) => Some(*state),
        Standing::Unknown => None,
    };
    Some(LeftProcess { pid: process.pid, state })
}

impl SetPlan<'_> {
    /// Restores what is checkpointed, and unlocks all. If one stays checkpointed, the others are checkpointed again. If
    /// that fails, too, they are unlocked.
    pub(super) fn settle(&self, entry: &JournalEntry, processes: &[SetProcess], back: Back) -> Settled {
        let all = keys(processes);
        self.at_rest(&all);
        let restored = match back {
            Back::Undo => {
                self.restore_at_once(&entry.with(self.those_at(processes, ProcessState::Checkpointed)))
            }
            Back::Restore => {
                self.restore_if_space(&entry.with(self.those_at(processes, ProcessState::Checkpointed)))
            }
            Back::Stay => Ok(()),
        };
        let put_back = if self.those_at(processes, ProcessState::Checkpointed).is_empty() {
            Ok(())
        } else {
            self.step_from(&all, ProcessState::Locked, |pid| self.checkpointer.checkpoint(pid))
        };
        let unlocked = self.step_from(&all, ProcessState::Locked, |pid| self.unlock(pid));
        let settled =
            Settled { standings: self.standings(&all), failed: restored.and(put_back).and(unlocked).err() };
        self.remember(entry, &settled);
        settled
    }

    pub(super) fn unlock(&self, pid: u32) -> Result<()> {
        tried(TRIES, || self.checkpointer.unlock(pid))
    }

    /// Makes a step of those in a state.
    fn step_from(
        &self,
        processes: &[ProcessKey],
        state: ProcessState,
        step: impl Fn(u32) -> Result<()> + Sync,
    ) -> Result<()> {
        let found = self.standings(processes).into_iter();
        let there: Vec<_> = found
            .filter(|(_, standing)| *standing == Standing::At(state))
            .map(|(process, _)| process)
            .collect();
        each(&there, |process| step(process.pid)).into_iter().collect()
    }

    fn those_at(&self, processes: &[SetProcess], state: ProcessState) -> Vec<SetProcess> {
        let is_there = |process: &&SetProcess| self.standing(process.key.pid) == Standing::At(state);
        processes.iter().filter(is_there).cloned().collect()
    }

    /// Keeps an entry while there is something to bring back.
    fn remember(&self, entry: &JournalEntry, settled: &Settled) {
        if !settled.standings.iter().any(|(_, standing)| is_unfinished(*standing)) {
            self.forget(entry);
        } else if settled.is_off() {
            // Should it not be written, a recovery finds the same.
            drop(self.journal.write(&entry.at(SetPhase::Hibernated)));
        }
    }
}

/// Whether it waits for a further step.
pub(super) fn is_unfinished(standing: Standing) -> bool {
    !matches!(standing, Standing::Gone | Standing::At(ProcessState::Running | ProcessState::Failed))
}

/// Whether it keeps no set from being off its devices as a whole.
pub(super) fn is_off(standing: Standing) -> bool {
    matches!(standing, Standing::Gone | Standing::At(ProcessState::Checkpointed | ProcessState::Failed))
}

/// Makes a call again while it fails, unless that cannot help.
fn tried(tries: u32, call: impl Fn() -> Result<()>) -> Result<()> {
    let mut result = Ok(());
    for _ in 0..tries {
        result = call();
        match &result {
            Err(error) if !is_final(&error.kind) => {}
            _ => break,
        }
    }
    result
}

fn is_final(kind: &CheckpointErrorKind) -> bool {
    matches!(kind, CheckpointErrorKind::NoSuchProcess | CheckpointErrorKind::WrongState { .. })
}
