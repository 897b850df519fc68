//! Which process has a number, since when, and in which system.

use std::fs;

use poorwill_core::hibernation::plan::ProcessKey;
use serde::{Deserialize, Serialize};

/// Where a number means the same process: one start of the system, and one container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    pub(super) boot: String,
    /// The namespace of process numbers.
    pub(super) namespace: String,
}

impl Place {
    /// `None` values of the system are empty, and equal.
    pub(super) fn here() -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        Self { boot: boot.trim().to_owned(), namespace: namespace.to_string_lossy().into_owned() }
    }
}

/// The process that has this number now. `None` also for one that has ended and whose parent has not looked yet.
pub(super) fn key_of(pid: u32) -> Option<ProcessKey> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(ProcessKey { pid, start_ticks: start_ticks(&stat)? })
}

/// The 22nd field. The second is a name in parentheses, which may hold any letters.
fn start_ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?;
    let start = fields.nth(18)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(start)
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
        assert_eq!(Place::here(), Place::here());
    }

    #[test]
    fn names_with_parentheses_hide_nothing() {
        let rest = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21";
        assert_eq!(start_ticks(&format!("7 (a) b) {rest}")), Some(4711));
        assert_eq!(start_ticks(&format!("7 (a) {}", rest.replace('S', "Z"))), None);
        for malformed in ["", "7 (a)", "7 (a) S 1 2", "7 a S"] {
            assert_eq!(start_ticks(malformed), None, "{malformed}");
        }
    }
}
