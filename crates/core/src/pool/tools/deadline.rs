//! How long a call waits, by the driver's clock: for streams, other calls, or memory. A cancelled call has waited
//! enough.

use std::fmt;
use std::time::{Duration, Instant};

use super::cancel;
use crate::driver::Driver;

/// When a call began, and until when it waits.
#[derive(Debug, Clone, Copy)]
pub(in crate::pool) struct Deadline {
    began: Instant,
    /// `None`: forever, also where the time would overflow.
    until: Option<Instant>,
}

/// A call that may wait, described for its timeout error.
#[derive(Clone, Copy)]
pub(in crate::pool) struct Wait<'a> {
    pub(in crate::pool) deadline: Deadline,
    pub(in crate::pool) op: &'a dyn fmt::Display,
    /// 0 if it waits for no memory.
    pub(in crate::pool) needed_bytes: u64,
}

impl<'a> Wait<'a> {
    /// For a call without a deadline that waits for no memory.
    pub(in crate::pool) fn for_ever(driver: &dyn Driver, op: &'a dyn fmt::Display) -> Self {
        Self { deadline: Deadline::begin(driver, None), op, needed_bytes: 0 }
    }
}

impl Deadline {
    pub(in crate::pool) fn begin(driver: &dyn Driver, wait_max: Option<Duration>) -> Self {
        let began = driver.now();
        Self { began, until: wait_max.and_then(|most| began.checked_add(most)) }
    }

    pub(in crate::pool) fn is_never(self) -> bool {
        self.until.is_none()
    }

    /// Whether the call need not look up while it waits.
    pub(in crate::pool) fn may_block(self) -> bool {
        self.is_never() && !cancel::is_cancellable()
    }

    pub(in crate::pool) fn elapsed(self, driver: &dyn Driver) -> Duration {
        driver.now().saturating_duration_since(self.began)
    }

    /// `None` when the deadline has passed, or the call is cancelled.
    pub(in crate::pool) fn left(self, driver: &dyn Driver, most: Duration) -> Option<Duration> {
        if cancel::is_cancelled() {
            return None;
        }
        let Some(until) = self.until else { return Some(most) };
        let left = until.saturating_duration_since(driver.now());
        (left > Duration::ZERO).then_some(left.min(most))
    }

    pub(in crate::pool) fn has_passed(self, driver: &dyn Driver) -> bool {
        self.left(driver, Duration::MAX).is_none()
    }
}
