//! Why processes could not be taken off or put back.

use std::fmt;
use std::io;
use std::path::PathBuf;

use poorwill_core::hibernation::plan::{LeftProcess, SetError, SetErrorCause};
use poorwill_core::hibernation::{CheckpointError, CheckpointErrorKind};
use poorwill_core::{ByteSize, DriverError, DriverErrorKind};
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

/// Why a call of a [`Hibernator`](super::Hibernator) failed. In JSON it has `message`, `kind`, `pid` and `left`.
///
/// ```
/// use poorwill::hibernation::{HibernateError, HostMemorySource};
///
/// let error = HibernateError::HostMemory {
///     needed_bytes: 3 << 30,
///     available_bytes: 1 << 30,
///     source_of: HostMemorySource::Request,
/// };
/// assert_eq!(error.code(), "out_of_host_memory");
/// assert!(error.to_string().contains("3 GiB of host memory, and the request allows 1 GiB"));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HibernateError {
    /// The driver cannot take processes off, or there is none.
    #[error("processes cannot be taken off their GPUs here")]
    Unusable(#[source] DriverError),
    /// The set was refused, or a step failed.
    #[error(transparent)]
    Set(#[from] SetError),
    /// The set takes more host memory than there is. Nothing was changed.
    #[error(
        "hibernating takes {} of host memory, and {source_of} {}; nothing was changed: put the engine to sleep first, or free some",
        ByteSize(*needed_bytes), ByteSize(*available_bytes)
    )]
    HostMemory {
        /// What the processes hold on their devices.
        needed_bytes: u64,
        /// What they may take.
        available_bytes: u64,
        /// Who says so.
        source_of: HostMemorySource,
    },
    /// A limit was set, and nothing says what the set takes. Nothing was changed.
    #[error(
        "the driver does not say what process {pid} holds, so it cannot be compared with the limit of {}; nothing was \
         changed: leave the limit away",
        ByteSize(*limit_bytes)
    )]
    UnknownHostMemory {
        /// The first such process.
        pid: u32,
        /// The request's limit.
        limit_bytes: u64,
    },
    /// Only a part of a set was named. Nothing was changed.
    #[error("process {pid} hibernates together with {}: resume them in one call", list(missing))]
    Parted {
        /// The named process.
        pid: u32,
        /// Those that are missing.
        missing: Vec<u32>,
    },
    /// The journal's folder cannot be used.
    #[error("cannot {action} {}: choose another folder for the journal, or mend this one", path.display())]
    Journal {
        /// What failed.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

/// What limits host memory.
///
/// ```
/// assert_eq!(poorwill::hibernation::HostMemorySource::System.to_string(), "the system has left");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HostMemorySource {
    /// The request.
    Request,
    /// The machine.
    System,
    /// The control group of a process.
    ControlGroup,
}

impl fmt::Display for HostMemorySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Request => "the request allows",
            Self::System => "the system has left",
            Self::ControlGroup => "the control group of its processes has left",
        })
    }
}

impl HibernateError {
    /// Its kind, as in JSON: `no_such_process`, `own_process`, `not_permitted`, `no_device`, `no_answer`,
    /// `wrong_state`, `busy`, `out_of_host_memory`, `out_of_device_memory`, `unsupported`, `obstacles`, `refused`,
    /// `failed`, `unknown_space`, `no_figures`, `bad_request` or `journal`.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::HostMemory { .. } | Self::UnknownHostMemory { .. } => "out_of_host_memory",
            Self::Parted { .. } => "bad_request",
            Self::Unusable(DriverError { kind: DriverErrorKind::Unsupported { .. }, .. }) => "unsupported",
            // Another time there may be one.
            Self::Unusable(_) => "no_device",
            Self::Journal { .. } => "journal",
            Self::Set(error) => match &error.cause {
                SetErrorCause::Empty | SetErrorCause::Repeated { .. } => "bad_request",
                SetErrorCause::Obstacles { .. } => "obstacles",
                SetErrorCause::DeviceMemory { .. } => "out_of_device_memory",
                SetErrorCause::UnknownSpace { .. } => "unknown_space",
                SetErrorCause::NoFigures { .. } | SetErrorCause::Unmeasured { .. } => "no_figures",
                SetErrorCause::Journal { .. } => "journal",
                SetErrorCause::Process(error) => code(&error.kind),
                _ => "refused",
            },
        }
    }

    /// The process that failed, where it is one.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        match self {
            Self::Set(error) => error.pid(),
            Self::UnknownHostMemory { pid, .. } | Self::Parted { pid, .. } => Some(*pid),
            Self::Unusable(_) | Self::HostMemory { .. } | Self::Journal { .. } => None,
        }
    }

    /// Processes that do not run as before, and are left so.
    #[must_use]
    pub fn left(&self) -> &[LeftProcess] {
        match self {
            Self::Set(error) => &error.left,
            _ => &[],
        }
    }
}

fn code(kind: &CheckpointErrorKind) -> &'static str {
    use poorwill_core::hibernation::ProcessState::Failed;
    match kind {
        CheckpointErrorKind::NoSuchProcess => "no_such_process",
        CheckpointErrorKind::OwnProcess => "own_process",
        CheckpointErrorKind::NotPermitted { .. } => "not_permitted",
        CheckpointErrorKind::NoDevice => "no_device",
        CheckpointErrorKind::NoAnswer { .. } => "no_answer",
        CheckpointErrorKind::WrongState { found: Failed, .. } => "failed",
        CheckpointErrorKind::WrongState { .. } => "wrong_state",
        CheckpointErrorKind::Busy { .. } => "busy",
        CheckpointErrorKind::OutOfHostMemory => "out_of_host_memory",
        CheckpointErrorKind::OutOfDeviceMemory => "out_of_device_memory",
        CheckpointErrorKind::Unsupported { .. } => "unsupported",
        _ => "refused",
    }
}

impl From<CheckpointError> for HibernateError {
    fn from(error: CheckpointError) -> Self {
        Self::Set(error.into())
    }
}

impl Serialize for HibernateError {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("HibernateError", 4)?;
        fields.serialize_field("message", &poorwill_core::chain(self))?;
        fields.serialize_field("kind", self.code())?;
        fields.serialize_field("pid", &self.pid())?;
        fields.serialize_field("left", self.left())?;
        fields.end()
    }
}

fn list(pids: &[u32]) -> String {
    pids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}
