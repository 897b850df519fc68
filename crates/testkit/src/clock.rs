//! A clock that only a test moves.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The clock; it starts at the time of its creation.
#[derive(Debug)]
pub struct Clock {
    began: Instant,
    /// Nanoseconds since the start.
    passed: AtomicU64,
}

impl Default for Clock {
    fn default() -> Self {
        Self { began: Instant::now(), passed: AtomicU64::new(0) }
    }
}

impl Clock {
    /// The time it shows.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.began + Duration::from_nanos(self.passed.load(Ordering::Acquire))
    }

    /// Moves it forward.
    pub fn advance(&self, by: Duration) {
        let nanos = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
        self.passed.fetch_add(nanos, Ordering::AcqRel);
    }
}
