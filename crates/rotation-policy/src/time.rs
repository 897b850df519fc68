//! The policy's time, which comes from its inputs only.

use std::fmt;
use std::time::Duration;

/// Time since the start of the policy.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(Duration);

impl Time {
    /// The start.
    pub const ZERO: Self = Self(Duration::ZERO);

    /// This long after the start.
    #[must_use]
    pub const fn from_start(passed: Duration) -> Self {
        Self(passed)
    }

    /// The time since the start.
    #[must_use]
    pub const fn since_start(self) -> Duration {
        self.0
    }

    /// Later by `wait`, saturating.
    #[must_use]
    pub const fn after(self, wait: Duration) -> Self {
        Self(self.0.saturating_add(wait))
    }

    /// The time since `earlier`; zero if that is later.
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
