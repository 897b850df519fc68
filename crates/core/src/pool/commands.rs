//! What the reaper is told: to work, and to end. Commands that come while it works are one order.

use std::time::Duration;

use super::tag_lock::Monitor;

/// What the reaper is told.
#[derive(Debug, Default)]
pub(super) struct Commands {
    work: bool,
    stop: bool,
}

impl Commands {
    /// Asks for work.
    pub(super) fn give(&mut self) {
        self.work = true;
    }

    /// Asks for the end.
    pub(super) fn stop(&mut self) {
        self.stop = true;
    }
}

/// Takes the next order, or none after `most`; returns false when the thread is to end.
pub(super) fn pause(commands: &Monitor<Commands>, most: Duration) -> bool {
    let mut guard = commands.lock_anyway();
    if !guard.work && !guard.stop {
        match commands.wait_for(guard, most) {
            Some(woken) => guard = woken,
            None => return false,
        }
    }
    guard.work = false;
    !guard.stop
}

/// Takes the next order; returns false when the thread is to end.
pub(super) fn next_command(commands: &Monitor<Commands>) -> bool {
    let mut guard = commands.lock_anyway();
    loop {
        if guard.stop {
            return false;
        }
        if std::mem::take(&mut guard.work) {
            return true;
        }
        match commands.wait(guard) {
            Some(woken) => guard = woken,
            None => return false,
        }
    }
}
