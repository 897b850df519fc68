//! Time as the policy knows it: what it is told, and nothing else.

use std::fmt;
use std::time::Duration;

/// A moment, counted from when the policy began. Whoever drives the policy has the clock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(Duration);

impl Time {
    /// The beginning.
    pub const ZERO: Self = Self(Duration::ZERO);

    /// So long after the beginning.
    #[must_use]
    pub const fn from_start(passed: Duration) -> Self {
        Self(passed)
    }

    /// How long after the beginning.
    #[must_use]
    pub const fn since_start(self) -> Duration {
        self.0
    }

    /// Later by so much, or the last moment there is.
    #[must_use]
    pub const fn after(self, wait: Duration) -> Self {
        Self(self.0.saturating_add(wait))
    }

    /// How long ago `earlier` was; nothing if it is yet to come.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3}s", self.0.as_secs_f64())
    }
}
