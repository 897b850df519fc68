//! A set whose caller has ended: found in the journal, and brought to rest.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::settle::{Back, Settled, is_off, is_unfinished};
use super::steps::Standing;
use super::{JournalEntry, JournalError, ProcessKey, SetPhase, SetPlan, keys};
use crate::hibernation::ProcessState;

/// What a recovery did with a process.
///
/// ```
/// use poorwill::hibernation::plan::Recovery;
///
/// assert_eq!(serde_json::to_string(&Recovery::BroughtBack)?, r#""brought_back""#);
/// assert_eq!(Recovery::Lost.to_string(), "it has lost its device: restart it");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Recovery {
    /// It was locked, and runs.
    Unlocked,
    /// It was checkpointed, a part of its set, and runs.
    BroughtBack,
    /// It hibernates, with its whole set.
    Hibernating,
    /// It has lost its device.
    Lost,
    /// It could not be brought back.
    NotBroughtBack,
}

impl fmt::Display for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unlocked => "it was locked, and runs again",
            Self::BroughtBack => "it was taken off without the rest of its set, and runs again",
            Self::Hibernating => "it hibernates, and can be resumed",
            Self::Lost => "it has lost its device: restart it",
            Self::NotBroughtBack => "it could not be brought back: recover it again, or restart it",
        })
    }
}

/// A process that a recovery found in the journal.
///
/// ```
/// use poorwill::hibernation::plan::Recovered;
///
/// let line = r#"{"pid":12,"state":"running","what":"unlocked"}"#;
/// let found: Recovered = serde_json::from_str(line)?;
/// assert_eq!(found.to_string(), "process 12 is running: it was locked, and runs again");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Recovered {
    /// The process.
    pub pid: u32,
    /// Where it stands now. `None` if that cannot be known.
    pub state: Option<ProcessState>,
    /// What was done.
    pub what: Recovery,
    /// Why it could not be brought back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl fmt::Display for Recovered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.map_or("in a state that cannot be read", ProcessState::as_str);
        write!(f, "process {} is {state}: {}", self.pid, self.what)?;
        self.error.as_ref().map_or(Ok(()), |error| write!(f, " ({error})"))
    }
}

impl SetPlan<'_> {
    /// Brings a set to rest whose caller has ended. `is_same` says whether a process of the entry still lives.
    ///
    /// A set that hibernates as a whole stays so. Any other is brought back. Processes that run are not in the result.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub fn recover(
        &self,
        entry: &JournalEntry,
        is_same: impl Fn(ProcessKey) -> bool,
    ) -> Result<Vec<Recovered>, JournalError> {
        let processes: Vec<_> =
            entry.processes.iter().filter(|process| is_same(process.key)).cloned().collect();
        let before = self.at_rest(&keys(&processes));
        if before.iter().all(|(_, standing)| !is_unfinished(*standing)) {
            self.journal.remove(entry)?;
            return Ok(reports(&before, &before, Recovery::NotBroughtBack, None));
        }
        if entry.phase == SetPhase::Hibernated || before.iter().all(|(_, standing)| is_off(*standing)) {
            self.journal.write(&entry.at(SetPhase::Hibernated))?;
            return Ok(reports(&before, &before, Recovery::Hibernating, None));
        }
        let settled = self.settle(entry, &processes, Back::Restore);
        let off = if settled.is_off() { Recovery::Hibernating } else { Recovery::NotBroughtBack };
        let Settled { standings, failed } = settled;
        Ok(reports(&before, &standings, off, failed.map(|error| error.to_string()).as_deref()))
    }
}

/// `off` is what it means that a process is checkpointed.
fn reports(
    before: &[(ProcessKey, Standing)],
    after: &[(ProcessKey, Standing)],
    off: Recovery,
    error: Option<&str>,
) -> Vec<Recovered> {
    let mut found = Vec::new();
    for (&(process, was), &(_, is)) in before.iter().zip(after) {
        let (state, what) = match (was, is) {
            (_, Standing::Gone) => continue,
            (_, Standing::Unknown) => (None, Recovery::NotBroughtBack),
            (_, Standing::At(state)) => match (was, state) {
                (Standing::At(ProcessState::Running), ProcessState::Running) => continue,
                (Standing::At(ProcessState::Locked), ProcessState::Running) => {
                    (Some(state), Recovery::Unlocked)
                }
                (_, ProcessState::Running) => (Some(state), Recovery::BroughtBack),
                (_, ProcessState::Failed) => (Some(state), Recovery::Lost),
                (_, ProcessState::Checkpointed) => (Some(state), off),
                _ => (Some(state), Recovery::NotBroughtBack),
            },
        };
        let error = error.filter(|_| what == Recovery::NotBroughtBack).map(str::to_owned);
        found.push(Recovered { pid: process.pid, state, what, error });
    }
    found
}
