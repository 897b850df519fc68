//! What processes hold of which the driver keeps no figure, as in a container with process numbers of its own.
//!
//! Promise: the figure is what free memory gains by the checkpoint. So it is right if no other process takes or frees memory
//! there meanwhile. Other measured checkpoints and restores with the same journal do not. Without a gain it stays unknown.
//! Processes of a set that share a device get equal parts.

use std::collections::BTreeMap;

use super::{JournalEntry, ProcessKey, SetPlan, SetProcess};
use crate::hibernation::{HeldMemory, Result as StepResult};

/// Free memory of devices, by their UUIDs.
type FreeBytes = BTreeMap<String, u64>;

impl SetPlan<'_> {
    /// Checkpoints all, and completes the entry's figures. The caller has the devices of those without figures.
    pub(super) fn checkpoint_measured(
        &self,
        processes: &[ProcessKey],
        entry: &mut JournalEntry,
    ) -> Vec<StepResult<f64>> {
        let free_before = self.free_without_figures(&entry.processes);
        let checkpointed = self.timed(processes, |pid| self.checkpointer.checkpoint(pid));
        let done = processes.iter().zip(&checkpointed).filter(|(_, result)| result.is_ok());
        self.complete(entry, &done.map(|(process, _)| *process).collect::<Vec<_>>(), &free_before);
        checkpointed
    }

    /// Of the devices where a process has no figure.
    fn free_without_figures(&self, processes: &[SetProcess]) -> FreeBytes {
        let unknown = processes.iter().flat_map(|process| &process.held).filter(|held| is_unknown(held));
        unknown
            .filter_map(|held| Some((held.uuid.clone(), self.checkpointer.free_bytes(&held.uuid)?)))
            .collect()
    }

    /// Completes the figures of those that were checkpointed since `before`.
    fn complete(&self, entry: &mut JournalEntry, checkpointed: &[ProcessKey], before: &FreeBytes) {
        for (uuid, before_bytes) in before {
            let Some(after_bytes) = self.checkpointer.free_bytes(uuid) else { continue };
            let processes = entry.processes.iter_mut().filter(|process| checkpointed.contains(&process.key));
            let held = processes.flat_map(|process| &mut process.held).filter(|held| held.uuid == *uuid);
            let (unknown, known): (Vec<_>, Vec<_>) = held.partition(|held| is_unknown(held));
            let known_bytes = known.iter().filter_map(|held| held.used_bytes).fold(0, u64::saturating_add);
            let gained_bytes = after_bytes.saturating_sub(*before_bytes).saturating_sub(known_bytes);
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

fn is_unknown(held: &HeldMemory) -> bool {
    held.used_bytes.is_none()
}
