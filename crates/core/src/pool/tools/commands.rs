//! Commands to the reaper: work, or stop. Several requests for work while it works count as one.

use std::time::Duration;

use super::tag_lock::Monitor;

#[derive(Debug, Default)]
pub(in crate::pool) struct Commands {
    work: bool,
    stop: bool,
}

impl Commands {
    pub(in crate::pool) fn request_work(&mut self) {
        self.work = true;
    }

    pub(in crate::pool) fn stop(&mut self) {
        self.stop = true;
    }
}

/// Takes the next command, or none after `most`. Returns false when the thread should end.
pub(in crate::pool) fn pause(commands: &Monitor<Commands>, most: Duration) -> bool {
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

/// As [`pause`], with no time limit.
pub(in crate::pool) fn next_command(commands: &Monitor<Commands>) -> bool {
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
