//! The reaper: a thread that frees and unmaps what had to wait for the device.
//!
//! It is started by the first block whose free has to wait for other streams, or the first time the cache is
//! above its mark. It waits for events, and for the end of a capture, with nothing held, takes no lock but the pool's, and ends with the pool,
//! which joins it.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::commands::{next_command, pause};
use super::deadline::Deadline;
use super::events::Waited;
use super::shared::Shared;

/// Between two looks while a stream is being captured.
const LULL: Duration = Duration::from_millis(3);

/// How often it looks again in a row where there is nothing to wait for.
const LOOKS_IN_VAIN: u32 = 3;

/// The thread, once it was needed.
#[derive(Debug, Default)]
pub(super) struct Reaper(Option<JoinHandle<()>>);

impl Reaper {
    /// Starts the thread if there is none. A machine that has no more threads leaves the work to the next
    /// allocation that needs memory.
    pub(super) fn start(&mut self, shared: &Arc<Shared>) {
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

    /// Waits for the thread's end, after it was told to.
    pub(super) fn join(&mut self) {
        if let Some(thread) = self.0.take() {
            // A panic there has poisoned the pool, and is seen by whoever calls it next.
            let _ = thread.join();
        }
    }

    /// Lets go of a thread that does not exist in this process.
    pub(super) fn forget(&mut self) {
        std::mem::forget(self.0.take());
    }
}

impl Shared {
    /// Frees and unmaps until nothing is left to wait for.
    fn reap(&self) {
        let mut in_vain = 0;
        let forever = Deadline::begin(self.driver(), None);
        loop {
            let Ok(mut memory) = self.lock_memory() else { return };
            let seen = self.lock_state().heap().clocks().version();
            let refused = self.poll(&memory);
            let above_mark = self.reclaim_above_mark(&mut memory);
            drop(memory);
            let waiting = self.open_state().is_ok_and(|state| state.heap().is_waiting());
            // After an error the next order tries again.
            if refused.is_some() || !(waiting || above_mark) {
                return;
            }
            match self.wait_for_event(seen, forever) {
                Ok(Waited::Progress) => in_vain = 0,
                // Nobody tells when a capture ends.
                Ok(Waited::Captured) if pause(self.commands(), LULL) => {}
                // Somebody else may be recording the events just now.
                Ok(Waited::InVain) if in_vain < LOOKS_IN_VAIN && pause(self.commands(), LULL) => in_vain += 1,
                _ => return,
            }
        }
    }
}
