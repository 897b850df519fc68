//! Taking a whole process off its devices, and putting it back: the [`Checkpointer`] trait and its contract.
//!
//! A process that sleeps still holds its context, its kernels and its graphs on the device. A checkpointer moves all of
//! that to host memory. The process keeps running on the CPU; new work for the device waits until it is back.
//!
//! Each rule has a name in brackets, and tests in `poorwill_testkit::hibernation`, which runs with every checkpointer.
//!
//! Processes that depend on each other go as a set: [`plan`].
//!
//! # The states
//!
//! ```text
//!            lock             checkpoint
//! Running ─────────► Locked ──────────────► Checkpointed
//!    ▲ ◄─────────────  ▲ ◄────────────────────  │
//!    │     unlock      │        restore         │
//!    └─────────────────┴──── Failed: the process has lost its device; only its end is left
//! ```
//!
//! - **\[outside\]** The caller is another process than the one that it names. Its own is
//!   [`CheckpointErrorKind::OwnProcess`].
//! - **\[steps\]** Each call makes one step, and only from the state that it begins in. From another state it is
//!   [`CheckpointErrorKind::WrongState`] and changes nothing.
//! - **\[theirs\]** The state belongs to the process, not to the caller. It survives the caller, and another caller
//!   goes on from it. It ends with the process.
//! - **\[lock\]** waits until the work that the process has queued is done, for `wait_max` at most. After that it is
//!   [`CheckpointErrorKind::Busy`], and the process runs on. When it returns, device calls of the process that queue
//!   work or change memory wait.
//! - **\[looks\]** Device calls that look at work or memory do not wait. A locked process gets its answers. One that is
//!   checkpointed may get an error, or end: NVIDIA's driver ends it if it looks at a stream or an event. So nothing in a
//!   process may do that meanwhile, as a sleeping engine does not.
//! - **\[checkpoint\]** moves all bytes that the process holds on its devices to host memory, and releases them. The
//!   process holds nothing there afterwards, but for a few MiB of the driver's own.
//! - **\[restore\]** takes the devices again, with the same bytes at the same addresses. New work still waits.
//! - **\[unlock\]** lets new work go on.
//! - **\[undone\]** A failed call leaves the state that it began in, or `Failed`, which `state` then reports. No call
//!   ends in a state without a name.
//! - **\[lost\]** A restore that the driver refuses, as on a full device, loses the process: `Failed`. So callers look
//!   at [`Checkpointer::free_bytes`] first. NVIDIA's driver goes on to call it checkpointed. A caller that did not see
//!   the failure learns of it from its own restore.
//! - **\[inspect\]** changes nothing, and locks nothing. It names what makes a later step fail, as far as that can be
//!   known from outside.
//! - **\[gone\]** A process that has ended is [`CheckpointErrorKind::NoSuchProcess`], in every call, also while another
//!   call waits for it.
//! - **\[answers\]** `state` may wait for a step under way, such as a lock that waits. A process that is stopped does not
//!   answer: [`CheckpointErrorKind::NoAnswer`] after a limit. A lock that its caller no longer waits for is undone.
//! - **\[threads\]** Any thread may make any call. Calls on different processes run at the same time.

mod error;
pub mod plan;
mod types;

use std::fmt;
use std::time::Duration;

pub use self::error::{CheckpointError, CheckpointErrorKind, CheckpointStep};
pub use self::types::{HeldMemory, Obstacle, ProcessInspection, ProcessState};

/// Result of a checkpointer's call.
pub type Result<T> = std::result::Result<T, CheckpointError>;

/// Takes processes off their devices, from another process. See the module for the contract.
///
/// ```
/// use std::time::Duration;
///
/// use poorwill::hibernation::{Checkpointer, ProcessState};
/// use poorwill_testkit::processes::Simulation;
///
/// let simulation = Simulation::default();
/// let pid = simulation.start(1 << 30).pid;
/// let (checkpointer, _) = simulation.caller();
/// checkpointer.lock(pid, Duration::from_secs(1))?;
/// checkpointer.checkpoint(pid)?;
/// assert_eq!(checkpointer.state(pid)?, ProcessState::Checkpointed);
/// # Ok::<(), poorwill::hibernation::CheckpointError>(())
/// ```
pub trait Checkpointer: Send + Sync + fmt::Debug {
    /// The state of a process.
    ///
    /// # Errors
    /// `NoSuchProcess`, `OwnProcess`, `NotPermitted`, `NoDevice`, `NoAnswer`, `Unsupported`.
    fn state(&self, pid: u32) -> Result<ProcessState>;

    /// What a checkpoint of the process would take, and what would make it fail.
    ///
    /// # Errors
    /// As for [`Checkpointer::state`].
    fn inspect(&self, pid: u32) -> Result<ProcessInspection>;

    /// Whether processes share devices, so that a restore may find one full.
    fn has_shared_devices(&self) -> bool {
        true
    }

    /// Free memory of the device with this UUID, without prefix. `None` without a figure.
    fn free_bytes(&self, uuid: &str) -> Option<u64>;

    /// Memory of that device that processes use, all together. `None` without a figure.
    fn used_bytes(&self, uuid: &str) -> Option<u64>;

    /// Waits for the process's queued work, then makes new work wait.
    ///
    /// # Errors
    /// As for [`Checkpointer::inspect`]; `Busy` after `wait_max`, `WrongState`.
    fn lock(&self, pid: u32, wait_max: Duration) -> Result<()>;

    /// Moves what a locked process holds on its devices to host memory.
    ///
    /// # Errors
    /// As for [`Checkpointer::inspect`]; `WrongState`, `OutOfHostMemory`, `Refused`.
    fn checkpoint(&self, pid: u32) -> Result<()>;

    /// Puts a checkpointed process back on its devices.
    ///
    /// # Errors
    /// As for [`Checkpointer::inspect`]; `WrongState`, `OutOfDeviceMemory`, `Refused`.
    fn restore(&self, pid: u32) -> Result<()>;

    /// Lets a locked process go on.
    ///
    /// # Errors
    /// As for [`Checkpointer::inspect`]; `WrongState`, `Refused`.
    fn unlock(&self, pid: u32) -> Result<()>;
}
