//! What is remembered of a set while its processes are not as they were.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::hibernation::HeldMemory;

/// A process, distinct from a later one with the same number.
///
/// ```
/// use poorwill::hibernation::plan::ProcessKey;
///
/// let process = ProcessKey { pid: 4711, start_ticks: 88_021 };
/// assert_ne!(process, ProcessKey { pid: 4711, start_ticks: 93_700 });
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ProcessKey {
    /// Its number.
    pub pid: u32,
    /// When it started, in clock ticks since the system's start.
    pub start_ticks: u64,
}

/// A process of a set, and what it held on its devices. Until it is back, only the journal knows.
///
/// ```
/// use poorwill::hibernation::plan::{ProcessKey, SetProcess};
///
/// let process = SetProcess::from(ProcessKey { pid: 4711, start_ticks: 88_021 });
/// assert!(process.held.is_empty(), "nothing is known");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetProcess {
    /// Which one.
    #[serde(flatten)]
    pub key: ProcessKey,
    /// What it needs to come back.
    pub held: Vec<HeldMemory>,
}

impl From<ProcessKey> for SetProcess {
    fn from(key: ProcessKey) -> Self {
        Self { key, held: Vec::new() }
    }
}

/// How far a set is.
///
/// ```
/// use poorwill::hibernation::plan::SetPhase;
///
/// assert_eq!(serde_json::to_string(&SetPhase::Hibernated)?, r#""hibernated""#);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SetPhase {
    /// From before the first lock. What is found afterwards is brought back, unless all are checkpointed.
    Hibernating,
    /// All are checkpointed, as was asked.
    Hibernated,
    /// From before the first restore.
    Resuming,
}

/// A set in the journal. A process belongs to one set at most.
///
/// ```
/// use poorwill::hibernation::plan::{JournalEntry, ProcessKey, SetPhase};
///
/// let [first, second] = [7, 5].map(|pid| ProcessKey { pid, start_ticks: 1 });
/// let entry = JournalEntry::new([first.into(), second.into()], SetPhase::Hibernating);
/// assert_eq!(entry.id(), second);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct JournalEntry {
    /// Its processes, in order.
    pub processes: Vec<SetProcess>,
    /// How far it is.
    pub phase: SetPhase,
    /// What is enough for them on devices where one has no figure, by UUID: all that was used there before their checkpoint.
    #[serde(default)]
    pub enough_bytes: BTreeMap<String, u64>,
}

impl JournalEntry {
    /// An entry of a set that is not empty.
    #[must_use]
    pub fn new(processes: impl IntoIterator<Item = SetProcess>, phase: SetPhase) -> Self {
        let mut processes: Vec<_> = processes.into_iter().collect();
        processes.sort_unstable_by_key(|process| process.key);
        Self { processes, phase, enough_bytes: BTreeMap::new() }
    }

    /// The set of these processes, by what is remembered of them.
    pub(super) fn of(members: &[ProcessKey], remembered: &[Self], phase: SetPhase) -> Self {
        let all = || remembered.iter().flat_map(|entry| &entry.processes);
        let known = |key: &ProcessKey| all().find(|process| process.key == *key).cloned();
        let mut entry = Self::new(members.iter().map(|key| known(key).unwrap_or((*key).into())), phase);
        for other in remembered.iter().filter(|other| !other.those(members).is_empty()) {
            for (uuid, bytes) in other.needed_bytes() {
                let enough_bytes = entry.enough_bytes.entry(uuid.to_owned()).or_default();
                *enough_bytes = enough_bytes.saturating_add(bytes);
            }
        }
        for other in remembered {
            let held = other.those(members).into_iter().flat_map(|process| process.held);
            for held in held.filter(|held| !other.knows(held)) {
                entry.enough_bytes.remove(&held.uuid);
            }
        }
        entry
    }

    /// Whether it says what is enough.
    pub(super) fn knows(&self, held: &HeldMemory) -> bool {
        held.used_bytes.is_some() || self.enough_bytes.contains_key(&held.uuid)
    }

    /// What tells it from other sets: its first process.
    #[must_use]
    pub fn id(&self) -> ProcessKey {
        self.processes.first().map_or(ProcessKey { pid: 0, start_ticks: 0 }, |process| process.key)
    }

    /// Those of its processes, in the order of `keys`.
    pub(super) fn those(&self, keys: &[ProcessKey]) -> Vec<SetProcess> {
        let find = |key: &ProcessKey| self.processes.iter().find(|process| process.key == *key).cloned();
        keys.iter().filter_map(find).collect()
    }

    pub(super) fn with(&self, processes: Vec<SetProcess>) -> Self {
        Self { processes, ..self.clone() }
    }

    pub(super) fn at(&self, phase: SetPhase) -> Self {
        Self { phase, ..self.clone() }
    }
}

/// What the callers of sets share: entries, which stay beyond the end of a caller, and one restore at a time on a device.
///
/// ```
/// use std::sync::Mutex;
///
/// use poorwill::hibernation::plan::{Journal, JournalEntry, JournalError};
///
/// #[derive(Debug, Default)]
/// struct InMemory(Mutex<Vec<JournalEntry>>);
///
/// impl Journal for InMemory {
///     fn write(&self, entry: &JournalEntry) -> Result<(), JournalError> {
///         self.remove(entry)?;
///         let mut entries = self.0.lock().map_err(|_| JournalError::new("poisoned"))?;
///         entries.push(entry.clone());
///         Ok(())
///     }
///
///     fn remove(&self, entry: &JournalEntry) -> Result<(), JournalError> {
///         let mut entries = self.0.lock().map_err(|_| JournalError::new("poisoned"))?;
///         entries.retain(|other| other.id() != entry.id());
///         Ok(())
///     }
/// }
/// ```
pub trait Journal: Send + Sync + fmt::Debug {
    /// Writes the entry in place of the set's last one: as a whole, or not at all.
    ///
    /// # Errors
    /// It could not be written.
    fn write(&self, entry: &JournalEntry) -> Result<(), JournalError>;

    /// Removes the set's entry, if there is one.
    ///
    /// # Errors
    /// It could not be removed.
    fn remove(&self, entry: &JournalEntry) -> Result<(), JournalError>;

    /// Waits until no other caller has these devices, by their UUIDs, and has them until the result is dropped. The
    /// default is for a caller that is alone.
    ///
    /// # Errors
    /// It cannot be known whether another caller has them.
    fn lock_devices(&self, uuids: &BTreeSet<&str>) -> Result<Box<dyn Send>, JournalError> {
        let _ = uuids;
        Ok(Box::new(()))
    }
}

/// The journal cannot be written.
///
/// ```
/// use poorwill::hibernation::plan::JournalError;
///
/// assert_eq!(JournalError::new("the disk is full").to_string(), "the disk is full");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct JournalError {
    /// The place, the reason and the next step.
    pub reason: String,
}

impl JournalError {
    /// An error with this reason.
    #[must_use]
    pub fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into() }
    }
}
