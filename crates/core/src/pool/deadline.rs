//! How long a call waits, by the driver's clock: for work on streams, for other calls, for memory of others.

use std::fmt;
use std::time::{Duration, Instant};

use crate::driver::Driver;

/// When a call began, and until when it waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline {
    began: Instant,
    /// `None`: for ever. A time too far away to be told is none.
    until: Option<Instant>,
}

/// What may have to wait, for the words of its refusal.
#[derive(Clone, Copy)]
pub(super) struct Wait<'a> {
    pub(super) deadline: Deadline,
    /// What is to be done.
    pub(super) op: &'a dyn fmt::Display,
    /// What it lacks; 0 where it waits for no memory.
    pub(super) needed_bytes: u64,
}

impl<'a> Wait<'a> {
    /// Of a call that begins now and waits for as long as it takes, for no memory.
    pub(super) fn for_ever(driver: &dyn Driver, op: &'a dyn fmt::Display) -> Self {
        Self { deadline: Deadline::begin(driver, None), op, needed_bytes: 0 }
    }
}

impl Deadline {
    /// Of a call that begins now, and waits for `wait_max` at most.
    pub(super) fn begin(driver: &dyn Driver, wait_max: Option<Duration>) -> Self {
        let began = driver.now();
        Self { began, until: wait_max.and_then(|most| began.checked_add(most)) }
    }

    /// Whether the call waits for ever.
    pub(super) fn is_never(self) -> bool {
        self.until.is_none()
    }

    /// How long ago the call began.
    pub(super) fn elapsed(self, driver: &dyn Driver) -> Duration {
        driver.now().saturating_duration_since(self.began)
    }

    /// What is left of it, but no more than `most`; `None` when it has passed.
    pub(super) fn left(self, driver: &dyn Driver, most: Duration) -> Option<Duration> {
        let Some(until) = self.until else { return Some(most) };
        let left = until.saturating_duration_since(driver.now());
        (left > Duration::ZERO).then_some(left.min(most))
    }

    /// Whether it has passed.
    pub(super) fn has_passed(self, driver: &dyn Driver) -> bool {
        self.left(driver, Duration::MAX).is_none()
    }
}
