//! What a checkpointer reports.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Where a process stands.
///
/// ```
/// assert_eq!(poorwill::hibernation::ProcessState::Checkpointed.to_string(), "checkpointed");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ProcessState {
    /// Its device calls run.
    Running,
    /// New work waits; its memory is on the devices.
    Locked,
    /// Its memory is in host memory, and it holds no device.
    Checkpointed,
    /// On its way from `Locked` to `Checkpointed`.
    Checkpointing,
    /// On its way from `Checkpointed` to `Locked`.
    Restoring,
    /// It has lost its device; only its end is left.
    Failed,
}

impl ProcessState {
    /// Its text in JSON and errors.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Locked => "locked",
            Self::Checkpointed => "checkpointed",
            Self::Checkpointing => "checkpointing",
            Self::Restoring => "restoring",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for ProcessState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Memory of one process on one device.
///
/// ```
/// use poorwill::hibernation::HeldMemory;
///
/// let held = HeldMemory { uuid: "5a5a5a5a-0000-0000-0000-000000000000".into(), used_bytes: Some(991 << 20) };
/// assert!(held.used_bytes < Some(1 << 30));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldMemory {
    /// The device's UUID, without prefix.
    pub uuid: String,
    /// What the process holds there. `None` where the driver keeps no figure.
    pub used_bytes: Option<u64>,
}

/// What makes a checkpoint fail, found before anything is locked.
///
/// ```
/// use poorwill::hibernation::Obstacle;
///
/// let obstacle = Obstacle::Communicator("2 ranks".into());
/// assert_eq!(obstacle.to_string(), "a communicator between ranks that is not known to be suspended (2 ranks)");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", content = "what")]
#[non_exhaustive]
pub enum Obstacle {
    /// A communicator between ranks, as NCCL's. Whether it is suspended cannot be seen from outside.
    Communicator(String),
    /// Memory that another process has opened, or that was opened from another process.
    SharedMemory(String),
    /// Memory of a peer's device, or a peer with access to this one's.
    PeerMapping(String),
    /// A process without which this one cannot be taken off: a client of MPS, say.
    Service(String),
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, detail) = match self {
            Self::Communicator(detail) => {
                ("a communicator between ranks that is not known to be suspended", detail)
            }
            Self::SharedMemory(detail) => ("memory shared with another process", detail),
            Self::PeerMapping(detail) => ("memory mapped between devices", detail),
            Self::Service(detail) => ("a service between it and its device", detail),
        };
        write!(f, "{what} ({detail})")
    }
}

/// What a checkpoint of a process would take, and what would make it fail.
///
/// ```
/// use poorwill::hibernation::{HeldMemory, ProcessInspection, ProcessState};
///
/// let held = [Some(1 << 30), None].map(|used_bytes| HeldMemory { uuid: String::new(), used_bytes }).to_vec();
/// let inspection = ProcessInspection { state: ProcessState::Running, held, obstacles: Vec::new() };
/// assert_eq!(inspection.host_bytes(), None, "the second device has no figure");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessInspection {
    /// Where it stands.
    pub state: ProcessState,
    /// What it holds on each of its devices. A checkpoint takes as much host memory.
    pub held: Vec<HeldMemory>,
    /// What would make a checkpoint fail.
    pub obstacles: Vec<Obstacle>,
}

impl ProcessInspection {
    /// Host memory that a checkpoint takes. `None` if a device has no figure, or no device is known.
    #[must_use]
    pub fn host_bytes(&self) -> Option<u64> {
        if self.held.is_empty() && matches!(self.state, ProcessState::Running | ProcessState::Locked) {
            return None;
        }
        self.held.iter().try_fold(0_u64, |sum, held| Some(sum.saturating_add(held.used_bytes?)))
    }
}
