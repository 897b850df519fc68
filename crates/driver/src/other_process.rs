//! Another process, as `/proc` shows it, before anything is asked of it.
//!
//! Promise: what passes [`expect`] was alive, is a process and no thread, and belongs to a user that the caller may act
//! for. It may end at any time.

use std::fs;
use std::time::{Duration, Instant};

use poorwill_core::hibernation::{CheckpointError, CheckpointErrorKind, CheckpointStep};

/// What `/proc/PID/status` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Status {
    /// The process that it is a thread of; its own number for a process.
    process: u32,
    /// `R`, `S`, `T` and so on.
    letter: char,
    effective_uid: u32,
}

/// Fails unless `pid` is another process, which lives and may be acted upon.
pub(crate) fn expect(step: CheckpointStep, pid: u32) -> Result<(), CheckpointError> {
    let failed = |kind| Err(CheckpointError::new(step, pid, kind));
    if pid == std::process::id() {
        return failed(CheckpointErrorKind::OwnProcess);
    }
    match status(pid) {
        Some(status) => match refused(rustix::process::geteuid().as_raw(), status.effective_uid) {
            Some(reason) => failed(CheckpointErrorKind::NotPermitted { reason }),
            None => Ok(()),
        },
        None => failed(CheckpointErrorKind::NoSuchProcess),
    }
}

/// Whether it has ended, or was never there.
pub(crate) fn has_ended(pid: u32) -> bool {
    status(pid).is_none()
}

/// Waits until it has ended, for `wait_max` at most. Its sockets close before it is gone.
pub(crate) fn ends_within(pid: u32, wait_max: Duration) -> bool {
    let started = Instant::now();
    while !has_ended(pid) {
        if started.elapsed() > wait_max {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Whether it has been killed, or has begun to end otherwise.
pub(crate) fn is_ending(pid: u32) -> bool {
    const SIGKILL: u64 = 1 << 8;
    /// `PF_EXITING`.
    const EXITING: u64 = 1 << 2;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let signals =
        status.lines().filter_map(|line| line.strip_prefix("SigPnd:").or(line.strip_prefix("ShdPnd:")));
    let is_killed =
        signals.filter_map(|mask| u64::from_str_radix(mask.trim(), 16).ok()).any(|mask| mask & SIGKILL != 0);
    is_killed || stat(pid, 9).is_none_or(|flags| flags & EXITING != 0)
}

/// When it was started, in the system's ticks. Another process with its number has another start.
pub(crate) fn started(pid: u32) -> Option<u64> {
    stat(pid, 22)
}

/// A field of `/proc/PID/stat`, counted from 1. The name, which is the second, may have spaces.
fn stat(pid: u32, field: usize) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = text.rsplit_once(')')?;
    fields.split_whitespace().nth(field.checked_sub(3)?)?.parse().ok()
}

/// Whether a signal or a debugger has stopped it.
pub(crate) fn is_stopped(pid: u32) -> bool {
    status(pid).is_some_and(|status| matches!(status.letter, 'T' | 't'))
}

/// `None` without such a process, for a thread, and for one that has ended and whose parent has not looked yet.
fn status(pid: u32) -> Option<Status> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    parse(&text).filter(|status| status.process == pid && !matches!(status.letter, 'Z' | 'X'))
}

fn parse(text: &str) -> Option<Status> {
    let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
    Some(Status {
        process: value("Tgid:")?.trim().parse().ok()?,
        letter: value("State:")?.trim().chars().next()?,
        effective_uid: value("Uid:")?.split_whitespace().nth(1)?.parse().ok()?,
    })
}

/// Why a user may not act on another one's process; root may.
fn refused(own_uid: u32, uid: u32) -> Option<String> {
    (own_uid != 0 && own_uid != uid).then(|| {
        format!("it belongs to user {uid}, and this process to user {own_uid}: ask as that user, or as root")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_read() {
        let text = "Name:\tpython3\nUmask:\t0022\nState:\tT (stopped)\nTgid:\t41\nPid:\t42\nUid:\t1000\t1001\t0\t0\n";
        assert_eq!(parse(text), Some(Status { process: 41, letter: 'T', effective_uid: 1001 }));
        for malformed in
            ["", "Name:\tx\n", "State:\tR\nTgid:\t1\nUid:\t1\n", "State:\t\nTgid:\t1\nUid:\t1\t2\n"]
        {
            assert_eq!(parse(malformed), None, "{malformed:?}");
        }
    }

    #[test]
    fn another_users_process_is_refused_and_root_may() {
        assert_eq!((refused(0, 1000), refused(1000, 1000)), (None, None));
        let reason = refused(1000, 0).unwrap();
        assert!(reason.contains("user 0") && reason.contains("user 1000"), "{reason}");
    }

    #[test]
    fn what_is_no_other_process_is_refused() {
        let kind = |pid| expect(CheckpointStep::Lock, pid).unwrap_err().kind;
        assert_eq!(kind(std::process::id()), CheckpointErrorKind::OwnProcess);
        for pid in [0, 1 << 30, u32::MAX] {
            assert_eq!(kind(pid), CheckpointErrorKind::NoSuchProcess);
            assert!(has_ended(pid) && !is_stopped(pid));
        }
        assert!(started(std::process::id()).is_some() && !is_ending(std::process::id()));
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || ended.recv().unwrap_err());
        let threads = fs::read_dir("/proc/self/task").unwrap();
        let numbers = threads.map(|thread| thread.unwrap().file_name().to_str().unwrap().parse().unwrap());
        let mut others = numbers.filter(|number: &u32| *number != std::process::id());
        let thread = others.next().expect("there is at least the one that waits");
        assert_eq!(kind(thread), CheckpointErrorKind::NoSuchProcess, "a thread is no process");
        drop(end);
        other.join().unwrap();
    }
}
