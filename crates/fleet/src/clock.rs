//! A clock that goes on while the process is stopped and while the machine sleeps, and the clock on the wall.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// A moment of this machine's, since it was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Moment(Duration);

impl Moment {
    /// Now, by `CLOCK_BOOTTIME`.
    #[must_use]
    pub fn now() -> Self {
        let now = clock_gettime(ClockId::Boottime);
        let part = |part: i64| u64::try_from(part).unwrap_or_default();
        Self(Duration::from_secs(part(now.tv_sec)) + Duration::from_nanos(part(now.tv_nsec)))
    }

    /// So much later.
    #[must_use]
    pub fn after(self, wait: Duration) -> Self {
        Self(self.0.saturating_add(wait))
    }

    /// How long it is until then; zero if that has passed.
    #[must_use]
    pub fn until(self, then: Self) -> Duration {
        then.0.saturating_sub(self.0)
    }

    /// Whole nanoseconds, for an atomic.
    pub(crate) fn as_nanos(self) -> u64 {
        u64::try_from(self.0.as_nanos()).unwrap_or(u64::MAX)
    }

    /// The reverse of [`as_nanos`](Self::as_nanos).
    pub(crate) fn from_nanos(nanos: u64) -> Self {
        Self(Duration::from_nanos(nanos))
    }
}

/// Milliseconds since 1970, by the clock on the wall.
#[must_use]
pub fn now_unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[test]
fn the_clock_goes_on() {
    let before = Moment::now();
    assert!(Moment::now() >= before);
    assert!(before > Moment::default());
    let wait = Duration::from_secs(3);
    assert_eq!(before.until(before.after(wait)), wait);
    assert_eq!(before.after(wait).until(before), Duration::ZERO);
    assert_eq!(Moment::from_nanos(before.as_nanos()), before);
}
