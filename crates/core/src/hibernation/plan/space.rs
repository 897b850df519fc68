//! Whether devices have space for what comes back to them: a restore on a full device loses its process.
//!
//! Promise: between the comparison and the end of the restores no other caller with the same journal restores there.

use std::collections::{BTreeMap, BTreeSet};

use super::measure::{is_unknown, is_unmeasured};
use super::steps::each;
use super::{JournalEntry, JournalError, SetErrorCause, SetPlan, SetProcess, keys};
use crate::hibernation::{HeldMemory, Result as StepResult};

/// What must be free beside what a process held.
const MARGIN_BYTES: u64 = 64 << 20;

impl JournalEntry {
    /// What must be free on each device, as far as that is known.
    pub(super) fn needed_bytes(&self) -> BTreeMap<&str, u64> {
        let mut needed: BTreeMap<&str, u64> = BTreeMap::new();
        let held = || self.processes.iter().flat_map(|process| &process.held);
        for held in held() {
            let needed_bytes = needed.entry(&held.uuid).or_insert(MARGIN_BYTES);
            *needed_bytes = needed_bytes.saturating_add(held.used_bytes.unwrap_or_default());
        }
        for held in held().filter(|held| is_unknown(held)) {
            // Without a margin, which a device that was full lacks.
            needed.extend(self.enough_bytes.get(&held.uuid).map(|bytes| (held.uuid.as_str(), *bytes)));
        }
        needed
    }
}

impl SetPlan<'_> {
    pub(super) fn compares(&self) -> bool {
        self.checks_space && self.checkpointer.has_shared_devices()
    }

    /// Whether a resume can be checked. A process without a figure is measured, which takes those of its devices.
    pub(super) fn will_know_space(&self, held: &[HeldMemory]) -> bool {
        !self.compares() || (!held.is_empty() && held.iter().all(|held| self.has_free_figure(held)))
    }

    /// The first of which something is not known after its checkpoint.
    pub(super) fn unmeasured(&self, processes: &[SetProcess]) -> Option<u32> {
        let mut compared = processes.iter().filter(|_| self.compares());
        compared.find(|process| is_unmeasured(process)).map(|process| process.key.pid)
    }

    /// Whether the devices have as much free memory as the processes held there, and a margin.
    pub(super) fn check_space(&self, entry: &JournalEntry) -> Result<(), SetErrorCause> {
        if !self.compares() {
            return Ok(());
        }
        for process in &entry.processes {
            let pid = process.key.pid;
            if process.held.is_empty() || !process.held.iter().all(|held| entry.knows(held)) {
                return Err(SetErrorCause::UnknownSpace { pid });
            }
            if !process.held.iter().all(|held| self.has_free_figure(held)) {
                return Err(SetErrorCause::NoFigures { pid });
            }
        }
        self.compare(entry)
    }

    fn compare(&self, entry: &JournalEntry) -> Result<(), SetErrorCause> {
        for (uuid, needed_bytes) in entry.needed_bytes() {
            let free_bytes = self.checkpointer.free_bytes(uuid);
            if let Some(free_bytes) = free_bytes.filter(|free_bytes| *free_bytes < needed_bytes) {
                return Err(SetErrorCause::DeviceMemory { uuid: uuid.to_owned(), needed_bytes, free_bytes });
            }
        }
        Ok(())
    }

    fn has_free_figure(&self, held: &HeldMemory) -> bool {
        self.checkpointer.free_bytes(&held.uuid).is_some()
    }

    /// Restores these, where there is known to be space for all. Otherwise they stay as they are.
    pub(super) fn restore_if_space(&self, entry: &JournalEntry) -> StepResult<()> {
        let Ok(_devices) = self.lock_devices(&entry.processes) else { return Ok(()) };
        if self.check_space(entry).is_err() {
            return Ok(());
        }
        self.restore_each(&entry.processes)
    }

    /// The same for those that this call has just checkpointed. Their space was theirs a moment ago, so what is not known
    /// does not keep them away, and neither does a journal that fails. Where the device has as much in use as before, others
    /// have taken that space.
    pub(super) fn restore_at_once(&self, entry: &JournalEntry) -> StepResult<()> {
        let _devices = self.lock_devices(&entry.processes);
        let mut figures = entry.clone();
        let is_taken =
            |uuid: &str, before: u64| self.checkpointer.used_bytes(uuid).is_some_and(|now| now >= before);
        figures.enough_bytes.retain(|uuid, before| is_taken(uuid, *before));
        if self.compares() && self.compare(&figures).is_err() {
            return Ok(());
        }
        self.restore_each(&entry.processes)
    }

    fn restore_each(&self, processes: &[SetProcess]) -> StepResult<()> {
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
