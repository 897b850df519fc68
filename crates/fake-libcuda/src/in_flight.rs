//! Work whose outcome is unknown.
//!
//! The host device returns an outcome to the caller that waits. A CUDA caller learns of a failure from its
//! next call. [`InFlight`] keeps outcomes until the work is complete.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use poorwill_core::{DriverError, Pending};

/// A queue is looked at when it has as many outcomes as this, and then at twice its length.
const CHECK_AT_MIN: usize = 256;

#[derive(Default)]
pub(crate) struct InFlight(Mutex<Outcomes>);

#[derive(Default)]
struct Outcomes {
    recorded: u64,
    pending: VecDeque<Pending<()>>,
    /// How many may be pending before the next check.
    check_at: usize,
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("queued", &self.queued()).finish()
    }
}

impl InFlight {
    fn lock(&self) -> MutexGuard<'_, Outcomes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn queued(&self) -> u64 {
        let outcomes = self.lock();
        outcomes.recorded + outcomes.pending.len() as u64
    }

    /// Ends the first `upto` operations, which are complete, and hands out their failures.
    pub(crate) fn end(&self, upto: u64, mut failed: impl FnMut(DriverError)) {
        let mut outcomes = self.lock();
        while outcomes.recorded < upto
            && let Some(done) = outcomes.pending.pop_front()
        {
            outcomes.recorded += 1;
            if let Err(error) = done.wait() {
                failed(error);
            }
        }
    }

    /// Keeps the outcome of work that was just queued. Returns whether to look at what is complete, so that the
    /// outcomes of a caller that never waits do not pile up.
    pub(crate) fn keep(&self, queued: Pending<()>) -> bool {
        let mut outcomes = self.lock();
        outcomes.pending.push_back(queued);
        let pending = outcomes.pending.len();
        let is_due = pending >= outcomes.check_at.max(CHECK_AT_MIN);
        if is_due {
            outcomes.check_at = 2 * pending;
        }
        is_due
    }

    /// What was queued has passed.
    pub(crate) fn has_passed(&self) {
        self.lock().check_at = 0;
    }
}
