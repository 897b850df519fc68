//! Which process has a number, since when, and in which system.

use poorwill_core::hibernation::plan::ProcessKey;
use poorwill_driver::system::proc;
use serde::{Deserialize, Serialize};

/// Where a number means the same process: one start of the system, and one container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PidScope {
    pub(super) boot: String,
    /// The namespace of process numbers.
    pub(super) namespace: String,
}

impl PidScope {
    /// `None` values of the system are empty, and equal.
    pub(super) fn here() -> Self {
        Self { boot: proc::boot(), namespace: proc::namespace() }
    }
}

/// The process that has this number now. `None` also for one that has ended and whose parent has not looked yet.
pub(super) fn key_of(pid: u32) -> Option<ProcessKey> {
    let stat = proc::stat(pid).ok().flatten().filter(|stat| !stat.has_ended)?;
    Some(ProcessKey { pid, start_ticks: stat.start_ticks })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_one_key() {
        let own = key_of(std::process::id()).unwrap();
        assert_eq!(key_of(own.pid), Some(own));
        assert!(own.start_ticks > 0 && key_of(u32::MAX).is_none());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert_eq!(key_of(child.id()), None);
        assert_eq!(PidScope::here(), PidScope::here());
    }
}
