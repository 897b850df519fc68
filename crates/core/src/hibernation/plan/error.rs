//! Why a set did not go where it was to go, and what it left.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::journal::JournalError;
use crate::ByteSize;
use crate::hibernation::{CheckpointError, Obstacle, ProcessState};

/// A plan that failed.
///
/// ```
/// use poorwill::hibernation::plan::{SetError, SetErrorCause};
///
/// let error = SetError::from(SetErrorCause::Repeated { pid: 12 });
/// assert_eq!(error.to_string(), "process 12 is named twice: name each once");
/// assert!(error.left.is_empty());
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SetError {
    /// The step, the process and the reason.
    pub cause: SetErrorCause,
    /// Processes that do not run as before, and are left so.
    pub left: Vec<LeftProcess>,
}

/// What failed.
///
/// ```
/// use poorwill::hibernation::plan::SetErrorCause;
///
/// assert_eq!(SetErrorCause::Empty.to_string(), "no process is named: name one at least");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SetErrorCause {
    /// A set without processes.
    #[error("no process is named: name one at least")]
    Empty,
    /// A process twice in a set.
    #[error("process {pid} is named twice: name each once")]
    Repeated {
        /// The process.
        pid: u32,
    },
    /// A step of one process.
    #[error(transparent)]
    Process(#[from] CheckpointError),
    /// Something would make a step fail. Nothing was locked.
    #[error("process {pid} cannot hibernate, and nothing was changed: it has {}", list(obstacles))]
    Obstacles {
        /// The process.
        pid: u32,
        /// All that was found.
        obstacles: Vec<Obstacle>,
    },
    /// A restore would fail, and lose the set. Nothing was changed.
    #[error(
        "the set needs {} on device {uuid} to come back, and {} are free there; it can still be resumed: make room first",
        ByteSize(*needed_bytes), ByteSize(*free_bytes)
    )]
    DeviceMemory {
        /// The device.
        uuid: String,
        /// What the processes held there, with a margin.
        needed_bytes: u64,
        /// What is free.
        free_bytes: u64,
    },
    /// What it held is not remembered, so a restore might fail and lose it. Nothing was changed.
    #[error(
        "process {pid} might be lost on its way back: nothing says what it held on its devices; nothing was changed: name \
         the journal with which it hibernated, or free memory there and add --without-space-check to `poorwill hibernate`"
    )]
    UnknownSpace {
        /// The first such process.
        pid: u32,
    },
    /// The driver does not say what it holds, or what is free there, so a restore might fail and lose it.
    #[error(
        "process {pid} might be lost on its way back: the driver has no figure of what it holds on its devices, or of what \
         is free there; nothing was changed: make libnvidia-ml.so.1 loadable (in a container \
         NVIDIA_DRIVER_CAPABILITIES=utility), or keep memory free and add --without-space-check to `poorwill hibernate`"
    )]
    NoFigures {
        /// The first such process.
        pid: u32,
    },
    /// By its checkpoint nothing got free, so a restore might fail and lose it. It may not stay off.
    #[error(
        "what process {pid} needs to come back could not be measured, so it may not stay off: by its checkpoint nothing got \
         free, as where another process takes memory meanwhile; hibernate it again when it runs"
    )]
    Unmeasured {
        /// The first such process.
        pid: u32,
    },
    /// Without a journal a process might stay locked.
    #[error("the journal cannot be written: {reason}")]
    Journal {
        /// As in [`JournalError`].
        reason: String,
    },
}

impl From<JournalError> for SetErrorCause {
    fn from(error: JournalError) -> Self {
        Self::Journal { reason: error.reason }
    }
}

/// A process that is not as it was before the plan.
///
/// ```
/// use poorwill::hibernation::plan::LeftProcess;
/// use poorwill::hibernation::ProcessState;
///
/// let left = LeftProcess { pid: 12, state: Some(ProcessState::Locked) };
/// assert_eq!(left.to_string(), "process 12 is locked: recover it");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftProcess {
    /// The process.
    pub pid: u32,
    /// Where it stands. `None` if that cannot be known.
    pub state: Option<ProcessState>,
}

impl fmt::Display for LeftProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, state } = self;
        match state {
            Some(state @ ProcessState::Failed) => write!(f, "process {pid} is {state}: restart it"),
            Some(state @ ProcessState::Checkpointed) => write!(f, "process {pid} is {state}: resume it"),
            Some(state) => write!(f, "process {pid} is {state}: recover it"),
            None => write!(f, "process {pid} is in a state that cannot be read: recover it"),
        }
    }
}

impl fmt::Display for SetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.cause)?;
        self.left.iter().try_for_each(|left| write!(f, "; {left}"))
    }
}

impl std::error::Error for SetError {}

impl SetError {
    /// The process that failed.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        match &self.cause {
            SetErrorCause::Process(error) => Some(error.pid),
            SetErrorCause::Obstacles { pid, .. }
            | SetErrorCause::Repeated { pid }
            | SetErrorCause::NoFigures { pid }
            | SetErrorCause::Unmeasured { pid }
            | SetErrorCause::UnknownSpace { pid } => Some(*pid),
            SetErrorCause::Empty | SetErrorCause::DeviceMemory { .. } | SetErrorCause::Journal { .. } => None,
        }
    }
}

impl<C: Into<SetErrorCause>> From<C> for SetError {
    fn from(cause: C) -> Self {
        Self { cause: cause.into(), left: Vec::new() }
    }
}

fn list(obstacles: &[Obstacle]) -> String {
    obstacles.iter().map(Obstacle::to_string).collect::<Vec<_>>().join(", and ")
}
