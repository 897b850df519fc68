//! Which process a handle belongs to.
//!
//! [`Owner`] detects a fork without a system call. Promise: in a forked child [`Owner::check`] fails and
//! [`Owner::is_here`] is false.

use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use poorwill_core::{DriverError, DriverErrorKind, Op};

use crate::parents_only::replace_in_child;

/// Forks between the first process and this one. Only forked children increment it.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// 0, or an error number.
static REGISTERED: OnceLock<c_int> = OnceLock::new();

extern "C" fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    replace_in_child();
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    forks: u32,
    process: u32,
}

impl Owner {
    pub(crate) fn this() -> Result<Self, DriverError> {
        let failed = *REGISTERED.get_or_init(|| {
            // SAFETY: `count_fork` is a plain function that lives as long as the program. It uses atomics and `dup3`,
            // and is therefore safe to run in a child between fork and exec.
            unsafe { libc::pthread_atfork(None, None, Some(count_fork)) }
        });
        if failed != 0 {
            return Err(DriverError::new(
                Op::Open,
                DriverErrorKind::OutOfHostMemory {
                    asked_bytes: 0,
                    reason: format!("pthread_atfork failed with {failed}"),
                },
            ));
        }
        Ok(Self { forks: FORKS.load(Ordering::Relaxed), process: std::process::id() })
    }

    pub(crate) fn forks(&self) -> u32 {
        self.forks
    }

    pub(crate) fn is_here(&self) -> bool {
        FORKS.load(Ordering::Relaxed) == self.forks
    }

    pub(crate) fn check(&self, op: Op) -> Result<(), DriverError> {
        if self.is_here() {
            return Ok(());
        }
        let this = std::process::id();
        Err(DriverError::new(op, DriverErrorKind::WrongProcess { opened_by: self.process, this }))
    }
}
