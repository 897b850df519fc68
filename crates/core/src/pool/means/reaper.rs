//! The reaper: a thread that frees and unmaps what had to wait for the device.
//!
//! It starts with the first free that waits for other streams, or when the cache first exceeds its mark. It
//! waits without locks, and takes only the pool's. The pool ends and joins it.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::events::Waited;
use crate::pool::shared::Shared;
use crate::pool::tools::commands::{next_command, pause};
use crate::pool::tools::deadline::Deadline;

/// Between two checks during a capture.
const CHECK_INTERVAL: Duration = Duration::from_millis(3);

/// Checks in a row without anything to wait for.
const IDLE_CHECKS_MAX: u32 = 3;

#[derive(Debug, Default)]
pub(in crate::pool) struct Reaper(Option<JoinHandle<()>>);

impl Reaper {
    /// If the system refuses the thread, the next allocation that needs memory does the work.
    pub(in crate::pool) fn start(&mut self, shared: &Arc<Shared>) {
        if self.0.is_some() {
            return;
        }
        let shared = Arc::clone(shared);
        let work = move || {
            while next_command(shared.commands()) {
                shared.reap();
            }
        };
        self.0 = thread::Builder::new().name("poorwill-reaper".into()).spawn(work).ok();
    }

    pub(in crate::pool) fn join(&mut self) {
        if let Some(thread) = self.0.take() {
            // A panic there has poisoned the pool, which the next call reports.
            let _ = thread.join();
        }
    }

    /// Drops a thread that does not exist in this process.
    pub(in crate::pool) fn forget(&mut self) {
        std::mem::forget(self.0.take());
    }
}

impl Shared {
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
