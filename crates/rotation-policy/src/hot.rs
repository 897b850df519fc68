//! Whether a fleet wants a model awake.

use std::time::Duration;

use super::time::Time;

/// How often a hot model looks for memory while it is not awake.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// How often one that is held asks for memory.
const ASK_EVERY: Duration = Duration::from_secs(60);

/// After a start that made way for others, twice as long each time.
const REST: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(3600)];

#[derive(Debug, Default)]
pub(super) struct Hot {
    is_ordered: bool,
    is_held: bool,
    /// Whether a command put it to sleep, which holds until it is awake again.
    was_put_to_sleep: bool,
    looks_at: Time,
    /// Since it was awake, after starts that made way.
    rest: Duration,
    /// Whether it looks for memory, which is not reported.
    is_looking: bool,
}

impl Hot {
    pub(super) fn is_ordered(&self) -> bool {
        self.is_ordered
    }

    /// Whether it is to give way to nothing.
    pub(super) fn is_held(&self) -> bool {
        self.is_ordered && self.is_held
    }

    /// Returns whether this is a new order.
    pub(super) fn set(&mut self, is_hot: bool, now: Time) -> bool {
        let is_new = is_hot && !self.is_ordered;
        self.is_ordered = is_hot;
        self.is_held &= is_hot;
        if is_new {
            (self.was_put_to_sleep, self.looks_at) = (false, now);
        }
        is_new
    }

    pub(super) fn set_held(&mut self, is_held: bool) {
        self.is_held = is_held && self.is_ordered;
    }

    pub(super) fn was_put_to_sleep(&self) -> bool {
        self.was_put_to_sleep
    }

    pub(super) fn set_put_to_sleep(&mut self, was_put_to_sleep: bool) {
        (self.was_put_to_sleep, self.rest) = (was_put_to_sleep, Duration::ZERO);
    }

    /// Its start made way for others.
    pub(super) fn made_way(&mut self, now: Time) {
        let [least, most] = REST;
        self.rest = self.rest.saturating_mul(2).clamp(least, most);
        self.looks_at = now.after(self.rest);
    }

    /// When it looks for memory while it is not awake.
    pub(super) fn looks_at(&self) -> Option<Time> {
        (self.is_ordered && !self.was_put_to_sleep).then_some(self.looks_at)
    }

    pub(super) fn has_looked(&mut self, now: Time) {
        self.looks_at = now.after(if self.is_held() { ASK_EVERY } else { LOOK_EVERY });
    }

    /// Returns whether it was looking.
    pub(super) fn set_looking(&mut self, is_looking: bool) -> bool {
        std::mem::replace(&mut self.is_looking, is_looking)
    }
}
