//! What processes hold of which the driver keeps no figure, as in a container with process numbers of its own.
//!
//! Promise: the figure is by how much used memory falls in the checkpoint. So it is right if no other process takes or frees
//! memory there meanwhile. Other measured checkpoints and restores with the same journal do not. Where nothing falls it stays
//! unknown. Processes of a set that share a device get equal parts.
//!
//! What was used there before is enough for the whole set, so it is remembered before anything is checkpointed.

use super::{JournalEntry, ProcessKey, SetErrorCause, SetPlan, SetProcess};
use crate::hibernation::{HeldMemory, Result as StepResult};

impl SetPlan<'_> {
    /// Checkpoints all, and completes the entry's figures. The caller has the devices of those without figures.
    pub(super) fn checkpoint_measured(
        &self,
        processes: &[ProcessKey],
        entry: &mut JournalEntry,
    ) -> Result<Vec<StepResult<f64>>, SetErrorCause> {
        let held = entry.processes.iter().flat_map(|process| &process.held);
        let unknown = held.filter(|held| is_unknown(held));
        let used = |held: &HeldMemory| Some((held.uuid.clone(), self.checkpointer.used_bytes(&held.uuid)?));
        entry.enough_bytes = unknown.filter_map(used).collect();
        if let Some(pid) = self.without_bound(entry) {
            return Err(SetErrorCause::NoFigures { pid });
        }
        if !entry.enough_bytes.is_empty() {
            self.journal.write(entry)?;
        }
        let checkpointed = self.timed(processes, |pid| self.checkpointer.checkpoint(pid));
        let done = processes.iter().zip(&checkpointed).filter(|(_, result)| result.is_ok());
        self.complete(entry, &done.map(|(process, _)| *process).collect::<Vec<_>>());
        Ok(checkpointed)
    }

    /// The first that cannot be measured, since the driver does not say now what is in use.
    fn without_bound(&self, entry: &JournalEntry) -> Option<u32> {
        let lacks = |process: &&SetProcess| !process.held.iter().all(|held| entry.knows(held));
        entry.processes.iter().filter(|_| self.compares()).find(lacks).map(|process| process.key.pid)
    }

    /// Completes the figures of those that were checkpointed.
    fn complete(&self, entry: &mut JournalEntry, checkpointed: &[ProcessKey]) {
        for (uuid, before_bytes) in &entry.enough_bytes {
            let Some(after_bytes) = self.checkpointer.used_bytes(uuid) else { continue };
            let processes = entry.processes.iter_mut().filter(|process| checkpointed.contains(&process.key));
            let held = processes.flat_map(|process| &mut process.held).filter(|held| held.uuid == *uuid);
            let (unknown, known): (Vec<_>, Vec<_>) = held.partition(|held| is_unknown(held));
            let known_bytes = known.iter().filter_map(|held| held.used_bytes).fold(0, u64::saturating_add);
            let gained_bytes = before_bytes.saturating_sub(after_bytes).saturating_sub(known_bytes);
            let parts = u64::try_from(unknown.len()).unwrap_or(u64::MAX).max(1);
            for held in unknown {
                held.used_bytes = Some(gained_bytes.div_ceil(parts)).filter(|bytes| *bytes > 0);
            }
        }
    }
}

pub(super) fn is_unmeasured(process: &SetProcess) -> bool {
    process.held.iter().any(is_unknown)
}

pub(super) fn is_unknown(held: &HeldMemory) -> bool {
    held.used_bytes.is_none()
}
