//! Whether devices have space for what comes back to them: a restore on a full device loses its process.
//!
//! Promise: between the comparison and the end of the restores no other caller with the same journal restores there.

use std::collections::{BTreeMap, BTreeSet};

use super::steps::each;
use super::{JournalError, SetErrorCause, SetPlan, SetProcess, keys};
use crate::hibernation::{HeldMemory, Result as StepResult};

/// What must be free beside what a process held.
const MARGIN_BYTES: u64 = 64 << 20;

impl SetPlan<'_> {
    fn compares(&self) -> bool {
        self.checks_space && self.checkpointer.has_shared_devices()
    }

    /// Whether a resume can be checked. A process without a figure is measured, which takes those of its devices.
    pub(super) fn will_know_space(&self, held: &[HeldMemory]) -> bool {
        let has_figure = |held: &HeldMemory| self.checkpointer.free_bytes(&held.uuid).is_some();
        !self.compares() || (!held.is_empty() && held.iter().all(has_figure))
    }

    /// Whether the devices have as much free memory as the processes held there, and a margin.
    pub(super) fn check_space(&self, processes: &[SetProcess]) -> Result<(), SetErrorCause> {
        if !self.compares() {
            return Ok(());
        }
        let mut needed: BTreeMap<&str, u64> = BTreeMap::new();
        for process in processes {
            let unknown = SetErrorCause::UnknownSpace { pid: process.key.pid };
            if !self.will_know_space(&process.held) {
                return Err(unknown);
            }
            for held in &process.held {
                let Some(used_bytes) = held.used_bytes else { return Err(unknown) };
                let needed_bytes = needed.entry(&held.uuid).or_insert(MARGIN_BYTES);
                *needed_bytes = needed_bytes.saturating_add(used_bytes);
            }
        }
        for (uuid, needed_bytes) in needed {
            let free_bytes = self.checkpointer.free_bytes(uuid).unwrap_or_default();
            if free_bytes < needed_bytes {
                return Err(SetErrorCause::DeviceMemory { uuid: uuid.to_owned(), needed_bytes, free_bytes });
            }
        }
        Ok(())
    }

    /// Restores these, where there is known to be space for all. Otherwise they stay as they are.
    pub(super) fn restore_if_space(&self, processes: &[SetProcess]) -> StepResult<()> {
        let Ok(_devices) = self.lock_devices(processes) else { return Ok(()) };
        if self.check_space(processes).is_err() {
            return Ok(());
        }
        each(&keys(processes), |process| self.checkpointer.restore(process.pid)).into_iter().collect()
    }

    /// Waits until no other caller restores or measures on the devices of these.
    pub(super) fn lock_devices<'p>(
        &self,
        processes: impl IntoIterator<Item = &'p SetProcess>,
    ) -> Result<Option<Box<dyn Send>>, JournalError> {
        let held = processes.into_iter().flat_map(|process| &process.held);
        let uuids: BTreeSet<&str> = held.map(|held| held.uuid.as_str()).collect();
        if uuids.is_empty() || !self.checkpointer.has_shared_devices() {
            return Ok(None);
        }
        self.journal.lock_devices(&uuids).map(Some)
    }
}
