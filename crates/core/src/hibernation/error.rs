//! What a checkpointer's call can fail with.

use std::fmt;
use std::time::Duration;

use super::types::ProcessState;

/// A call on a process that failed.
///
/// ```
/// use poorwill::hibernation::{CheckpointError, CheckpointErrorKind, CheckpointStep};
///
/// let error = CheckpointError::new(CheckpointStep::Lock, 12, CheckpointErrorKind::NoDevice);
/// assert!(error.to_string().starts_with("lock of process 12: it uses no device"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{step} of process {pid}: {kind}")]
#[non_exhaustive]
pub struct CheckpointError {
    /// Which call failed.
    pub step: CheckpointStep,
    /// The process.
    pub pid: u32,
    /// Why.
    pub kind: CheckpointErrorKind,
}

impl CheckpointError {
    /// An error of `step`.
    #[must_use]
    pub fn new(step: CheckpointStep, pid: u32, kind: CheckpointErrorKind) -> Self {
        Self { step, pid, kind }
    }
}

/// The calls of the trait, by name.
///
/// ```
/// assert_eq!(poorwill::hibernation::CheckpointStep::Inspect.to_string(), "inspection");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // Each is the call of the same name.
pub enum CheckpointStep {
    State,
    Inspect,
    Lock,
    Checkpoint,
    Restore,
    Unlock,
}

impl fmt::Display for CheckpointStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::State => "state",
            Self::Inspect => "inspection",
            Self::Lock => "lock",
            Self::Checkpoint => "checkpoint",
            Self::Restore => "restore",
            Self::Unlock => "unlock",
        })
    }
}

/// Why a call on a process failed.
///
/// ```
/// use poorwill::hibernation::CheckpointErrorKind;
///
/// assert!(CheckpointErrorKind::OwnProcess.to_string().contains("ask from another process"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointErrorKind {
    /// It has ended, or never was.
    #[error("there is no such process; it has ended, or the number is of another container")]
    NoSuchProcess,
    /// The caller named itself.
    #[error("a process cannot take itself off its device; ask from another process")]
    OwnProcess,
    /// The system keeps this caller away from it.
    #[error("{reason}")]
    NotPermitted {
        /// Whose process it is, and what would help.
        reason: String,
    },
    /// It has not used a device.
    #[error("it uses no device: it has not begun to, or it is a process without CUDA")]
    NoDevice,
    /// It stands elsewhere than this step begins.
    #[error("it is {found}, not {wanted}; {next}")]
    WrongState {
        /// Where it stands.
        found: ProcessState,
        /// Where this step begins.
        wanted: ProcessState,
        /// What to do.
        next: &'static str,
    },
    /// Its queued work did not end in time.
    #[error("its queued work did not end within {} ms; it runs on: put the engine to sleep first, or wait longer", wait_max.as_millis())]
    Busy {
        /// How long was waited.
        wait_max: Duration,
    },
    /// It did not answer. A lock is not made later either.
    #[error("it did not answer within {} ms: it is stopped, or its machine has too much to do; let it run (kill -CONT), then ask again", waited.as_millis())]
    NoAnswer {
        /// How long was waited.
        waited: Duration,
    },
    /// The host has too little memory for what is on the device.
    #[error(
        "the host has too little memory for what it holds on its devices: put its weights to sleep first"
    )]
    OutOfHostMemory,
    /// The devices had too little memory to put it back. The process is lost by it.
    #[error(
        "its devices had too little free memory to put it back, and the driver has given it up: end it, make room, and \
         start it again"
    )]
    OutOfDeviceMemory,
    /// Driver, device or container do not support it.
    #[error("{reason}")]
    Unsupported {
        /// What is missing, and what would help.
        reason: String,
    },
    /// The driver refused, with its own words.
    #[error("{name} ({code}): {text}")]
    Refused {
        /// The driver's number.
        code: i64,
        /// The number's name.
        name: String,
        /// What it means, and what would help.
        text: String,
    },
}

impl CheckpointErrorKind {
    /// A [`CheckpointErrorKind::WrongState`] with the next step of a process that is `found` and should be `wanted`.
    #[must_use]
    pub fn wrong_state(found: ProcessState, wanted: ProcessState) -> Self {
        let next = match (found, wanted) {
            (ProcessState::Running, ProcessState::Locked) => "lock it first",
            (ProcessState::Running, _) => "there is nothing to restore",
            (ProcessState::Locked, ProcessState::Checkpointed) => "there is nothing to restore; unlock it",
            (ProcessState::Locked, _) => "another caller may have locked it; unlock it, or go on from there",
            (ProcessState::Checkpointed, _) => "restore it first; another caller may have checkpointed it",
            (ProcessState::Checkpointing | ProcessState::Restoring, _) => "wait until that step has ended",
            (ProcessState::Failed, _) => "it has lost its device; end it, and start it again",
        };
        Self::WrongState { found, wanted, next }
    }
}

impl CheckpointStep {
    /// The state that a step begins in. `None` for a question.
    #[must_use]
    pub const fn begins(self) -> Option<ProcessState> {
        match self {
            Self::State | Self::Inspect => None,
            Self::Lock => Some(ProcessState::Running),
            Self::Checkpoint | Self::Unlock => Some(ProcessState::Locked),
            Self::Restore => Some(ProcessState::Checkpointed),
        }
    }
}
