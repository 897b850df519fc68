//! What the commands find and do, as JSON has it.

use std::path::PathBuf;

use poorwill::hibernation::{HibernateError, Hibernator, ProcessInspection, ProcessState, Recovered};
use serde::Serialize;

/// Where processes stand.
#[derive(Debug, Serialize)]
pub(super) struct States {
    /// In the order of the request.
    pub(super) processes: Vec<StateOf>,
}

#[derive(Debug, Serialize)]
pub(super) struct StateOf {
    /// The process.
    pub(super) pid: u32,
    /// Where it stands.
    pub(super) state: ProcessState,
}

impl States {
    pub(super) fn of(hibernator: &Hibernator, pids: &[u32]) -> Result<Self, HibernateError> {
        let state = |&pid| hibernator.state(pid).map(|state| StateOf { pid, state });
        Ok(Self { processes: pids.iter().map(state).collect::<Result<_, _>>()? })
    }
}

/// What processes hold, and what they would take together.
#[derive(Debug, Serialize)]
pub(super) struct Inspections {
    /// In the order of the request.
    pub(super) processes: Vec<InspectionOf>,
    /// Host memory that hibernating them takes. `None` where the driver keeps no figure.
    pub(super) host_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
pub(super) struct InspectionOf {
    /// The process.
    pub(super) pid: u32,
    #[serde(flatten)]
    pub(super) inspection: ProcessInspection,
    /// Host memory that hibernating it takes. `None` where the driver keeps no figure.
    host_bytes: Option<u64>,
}

impl Inspections {
    pub(super) fn of(hibernator: &Hibernator, pids: &[u32]) -> Result<Self, HibernateError> {
        let inspect = |&pid| {
            let inspection = hibernator.inspect(pid)?;
            Ok(InspectionOf { pid, host_bytes: inspection.host_bytes(), inspection })
        };
        let processes: Vec<_> = pids.iter().map(inspect).collect::<Result<_, HibernateError>>()?;
        let host_bytes =
            processes.iter().try_fold(0_u64, |sum, process| Some(sum.saturating_add(process.host_bytes?)));
        Ok(Self { processes, host_bytes })
    }
}

/// What a recovery found in the journal.
#[derive(Debug, Serialize)]
pub(super) struct RecoveredSets {
    /// Processes of sets whose callers have ended.
    pub(super) recovered: Vec<Recovered>,
    /// Entries that are not understood, under their new names, and those that cannot be read now. Their processes may still
    /// hibernate, or be locked.
    pub(super) set_aside: Vec<PathBuf>,
}
