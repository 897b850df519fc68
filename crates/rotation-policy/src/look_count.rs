//! What looks at a model have found since it became ready, and how often they gave up its engine.

use std::time::Duration;

use super::time::Time;

/// A second time within it is no accident.
const AGAIN: Duration = Duration::from_secs(10 * 60);

#[derive(Debug, Default)]
pub(super) struct Looks {
    /// In sequence.
    pub(super) failed: u32,
    pub(super) counted_at: Option<Time>,
    /// The last sign that it works.
    pub(super) sign_at: Time,
}

impl Looks {
    pub(super) fn from(now: Time) -> Self {
        Self { failed: 0, counted_at: None, sign_at: now }
    }
}

/// Engines that looks gave up, over all that became ready.
#[derive(Debug, Default)]
pub(super) struct GivenUp {
    at: Option<Time>,
    /// How often in sequence, each soon after another.
    again: u32,
    /// Whether the engine that ends now is one of these.
    is_ending: bool,
}

impl GivenUp {
    pub(super) fn now(&mut self, now: Time) {
        let is_again = self.at.is_some_and(|at| now < at.after(AGAIN));
        self.again = if is_again { self.again.saturating_add(1) } else { 0 };
        (self.at, self.is_ending) = (Some(now), true);
    }

    /// The engine has ended: how often in sequence one was given up before it, 0 where its end has another cause.
    pub(super) fn take_ended(&mut self) -> u32 {
        if std::mem::take(&mut self.is_ending) { self.again } else { 0 }
    }
}
