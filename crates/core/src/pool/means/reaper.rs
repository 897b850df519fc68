//! The reaper: it frees and unmaps what had to wait for the device.
//!
//! It begins with a free that waits for other streams, or when the cache exceeds its mark. It ends when nothing is left
//! to wait for. It waits without locks, and takes only the pool's. The pool ends and joins it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::events::Waited;
use crate::pool::shared::Shared;
use crate::pool::tools::commands::{next_command, not_started, pause, request_work, stop};
use crate::pool::tools::deadline::Deadline;

/// Between two checks during a capture.
const CHECK_INTERVAL: Duration = Duration::from_millis(3);

/// Checks in a row without anything to wait for.
const IDLE_CHECKS_MAX: u32 = 3;

impl Shared {
    /// If the system refuses the thread, the next allocation that needs memory does the work.
    pub(in crate::pool) fn wake_reaper(&self) {
        if request_work(self.commands()) && !self.start_reaper() {
            not_started(self.commands());
        }
    }

    fn start_reaper(&self) -> bool {
        let Some(shared) = self.counted() else { return false };
        let work = move || {
            while next_command(shared.commands()) {
                // A panic has poisoned the pool, which the next call reports.
                let _ = catch_unwind(AssertUnwindSafe(|| shared.reap())).map_err(std::mem::forget);
            }
        };
        self.reaper_thread().start(work).is_ok()
    }

    /// For good.
    pub(in crate::pool) fn end_reaper(&self) {
        stop(self.commands());
        self.reaper_thread().join();
    }

    fn reap(&self) {
        let mut idle_checks = 0;
        let forever = Deadline::begin(self.driver(), None);
        loop {
            let Ok(mut memory) = self.lock_memory() else { return };
            let seen = self.lock_state().heap().clocks().version();
            let refused = self.poll(&memory);
            let above_mark = self.reclaim_above_mark(&mut memory);
            drop(memory);
            let waiting = self.open_state().is_ok_and(|state| state.heap().is_waiting());
            // After an error the next command tries again.
            if refused.is_some() || !(waiting || above_mark) {
                return;
            }
            match self.wait_for_event(seen, forever) {
                Ok(Waited::Progress) => idle_checks = 0,
                // The end of a capture sends no notification.
                Ok(Waited::Captured) if pause(self.commands(), CHECK_INTERVAL) => {}
                // Another thread may be recording the events just now.
                Ok(Waited::NothingPending)
                    if idle_checks < IDLE_CHECKS_MAX && pause(self.commands(), CHECK_INTERVAL) =>
                {
                    idle_checks += 1;
                }
                _ => return,
            }
        }
    }
}
