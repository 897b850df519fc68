//! Other processes, taken off their devices.

use std::ffi::c_int;
use std::time::Duration;

use poorwill_core::hibernation::CheckpointStep;

use crate::abi::{CallResult, CheckpointArgs, Code, In, Out};
use crate::entry::entries;
use crate::process::{make, state};

entries! {
    other cuCheckpointProcessLock(pid: c_int, args: In<CheckpointArgs>) {
        let wait_max_ms = checked(&args, true)?;
        // 0 is no limit.
        let wait_max = if wait_max_ms == 0 { Duration::MAX } else { Duration::from_millis(wait_max_ms.into()) };
        make(CheckpointStep::Lock, pid, wait_max)
    }

    other cuCheckpointProcessCheckpoint(pid: c_int, args: In<CheckpointArgs>) {
        checked(&args, false)?;
        make(CheckpointStep::Checkpoint, pid, Duration::ZERO)
    }

    other cuCheckpointProcessRestore(pid: c_int, args: In<CheckpointArgs>) {
        checked(&args, false)?;
        make(CheckpointStep::Restore, pid, Duration::ZERO)
    }

    other cuCheckpointProcessUnlock(pid: c_int, args: In<CheckpointArgs>) {
        checked(&args, false)?;
        make(CheckpointStep::Unlock, pid, Duration::ZERO)
    }

    other cuCheckpointProcessGetState(pid: c_int, found: Out<c_int>) {
        found.check()?;
        found.set(state(pid)?)
    }
}

/// The limit of a lock. Everything else must be zero.
fn checked(args: &In<CheckpointArgs>, has_timeout: bool) -> CallResult<u32> {
    let args = args.get()?;
    let is_zero = args.reserved_0 == 0 && args.reserved_1 == [0; 7] && (has_timeout || args.timeout_ms == 0);
    if is_zero { Ok(args.timeout_ms) } else { Err(Code::INVALID_VALUE) }
}
