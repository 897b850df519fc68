//! Another process, before anything is asked of it.
//!
//! Promise: what passes [`expect`] was alive, is a process and no thread, and belongs to a user that the caller may act
//! for. It may end at any time.

use std::time::{Duration, Instant};

use poorwill_core::hibernation::{CheckpointError, CheckpointErrorKind, CheckpointStep};

use crate::system::proc::{self, ProcessStatus};

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
    let is_killed = proc::status(pid).ok().flatten().is_some_and(|status| status.is_killed);
    is_killed || proc::stat(pid).ok().flatten().is_none_or(|stat| stat.is_exiting)
}

/// When it was started, in the system's ticks. Another process with its number has another start.
pub(crate) fn started(pid: u32) -> Option<u64> {
    proc::key(pid).ok().flatten().map(|key| key.start_ticks)
}

/// Whether a signal or a debugger has stopped it.
pub(crate) fn is_stopped(pid: u32) -> bool {
    status(pid).is_some_and(|status| matches!(status.letter, 'T' | 't'))
}

/// `None` without such a process, for a thread, and for one that has ended and whose parent has not looked yet.
fn status(pid: u32) -> Option<ProcessStatus> {
    let status = proc::status(pid).ok().flatten();
    status.filter(|status| status.process == pid && !matches!(status.letter, 'Z' | 'X'))
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
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let numbers = threads.map(|thread| thread.unwrap().file_name().to_str().unwrap().parse().unwrap());
        let mut others = numbers.filter(|number: &u32| *number != std::process::id());
        let thread = others.next().expect("there is at least the one that waits");
        assert_eq!(kind(thread), CheckpointErrorKind::NoSuchProcess, "a thread is no process");
        drop(end);
        other.join().unwrap();
    }
}
