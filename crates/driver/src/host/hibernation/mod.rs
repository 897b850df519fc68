//! Processes that can be taken off the host device, and who takes them off.
//!
//! It plays what NVIDIA's driver does, for machines without a GPU: rule for rule, in real processes.
//!
//! - A [`HostProcess`] registers itself in a folder. It listens on the socket `PID.sock` there, and holds its state. So
//!   the state ends with the process, not with the caller.
//! - Its device calls [`enter`](HostProcess::enter), and wait there while the process is locked.
//! - A [`HostCheckpointer`] of another process asks it to make each step. A caller that ends during its request harms
//!   nothing: what had not begun is not done, and a lock that was not awaited is undone.
//!
//! ```
//! use poorwill_core::hibernation::{Checkpointer, CheckpointErrorKind};
//! use poorwill_driver::host::HostCheckpointer;
//!
//! let checkpointer = HostCheckpointer::open("/run/user/0/poorwill-processes");
//! let error = checkpointer.state(std::process::id()).unwrap_err();
//! assert_eq!(error.kind, CheckpointErrorKind::OwnProcess);
//! ```

mod client;
mod position;
mod process;
mod serve;
mod wire;

pub use client::HostCheckpointer;
pub use position::{DeviceCall, DeviceLost, HostProcessMemory, StepFailure};
pub use process::HostProcess;

use std::path::{Path, PathBuf};

fn socket_path(folder: &Path, pid: u32) -> PathBuf {
    folder.join(format!("{pid}.sock"))
}
