//! Host memory of all wakes of the process that read from disk, so that one that lacks it waits for another.
//!
//! Promise: who waits holds none of it. It goes on without, when the others hold none or release none for long.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::per_process::{FORKS, PerProcess};

/// The longest wait without a release.
const STALL_MAX: Duration = Duration::from_secs(30);

static WINDOWS: PerProcess<Windows> = PerProcess::new([const { Windows::new() }; FORKS]);

pub(super) struct Windows {
    state: Mutex<Held>,
    changed: Condvar,
}

struct Held {
    held_bytes: u64,
    /// So many times, some was released.
    releases: u64,
}

impl Windows {
    const fn new() -> Self {
        Self { state: Mutex::new(Held { held_bytes: 0, releases: 0 }), changed: Condvar::new() }
    }

    pub(super) fn here() -> &'static Self {
        WINDOWS.here()
    }

    pub(super) fn releases(&self) -> u64 {
        self.lock().releases
    }

    /// Before it is requested.
    pub(super) fn hold(&self, bytes: u64) {
        self.lock().held_bytes += bytes;
    }

    /// It was refused, or not needed.
    pub(super) fn had_none(&self, bytes: u64) {
        self.lock().held_bytes -= bytes;
        self.changed.notify_all();
    }

    pub(super) fn release(&self, bytes: u64) {
        {
            let mut state = self.lock();
            state.held_bytes -= bytes;
            state.releases += 1;
        }
        self.changed.notify_all();
    }

    /// Returns whether some was released since `releases`. The caller holds none.
    pub(super) fn await_release(&self, releases: u64) -> bool {
        let others_hold = |state: &mut Held| state.releases == releases && state.held_bytes > 0;
        let waited = self.changed.wait_timeout_while(self.lock(), STALL_MAX, others_hold);
        waited.unwrap_or_else(PoisonError::into_inner).0.releases != releases
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
