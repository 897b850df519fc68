//! Commands to the reaper: work, or stop. Several requests for work while it works count as one.
//!
//! It exists while there is work: who asks for it starts the reaper, unless it is under way. So no request is lost, and
//! there is one reaper at a time.

use std::time::Duration;

use super::tag_lock::Monitor;

#[derive(Debug, Default)]
pub(in crate::pool) struct Commands {
    work: bool,
    stop: bool,
    is_under_way: bool,
}

/// Asks for work. Returns true to a caller that has to start the reaper.
pub(in crate::pool) fn request_work(commands: &Monitor<Commands>) -> bool {
    let mut guard = commands.lock_anyway();
    let starts = !guard.is_under_way && !guard.stop;
    guard.work = true;
    guard.is_under_way |= starts;
    drop(guard);
    commands.notify();
    starts
}

/// The reaper could not be started. The next request tries again.
pub(in crate::pool) fn not_started(commands: &Monitor<Commands>) {
    commands.lock_anyway().is_under_way = false;
}

pub(in crate::pool) fn stop(commands: &Monitor<Commands>) {
    commands.lock_anyway().stop = true;
    commands.notify();
}

/// Takes the next command, or none after `most`. Returns false when the reaper should end.
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

/// Takes the next command. Without one it returns false, and the reaper is no longer under way.
pub(in crate::pool) fn next_command(commands: &Monitor<Commands>) -> bool {
    let mut guard = commands.lock_anyway();
    guard.is_under_way = std::mem::take(&mut guard.work) && !guard.stop;
    guard.is_under_way
}
