//! The policy's time, which comes from its caller.

/// Milliseconds since 1970, by a controller's clock.
///
/// ```
/// use poorwill_fleet::policy::Time;
///
/// assert_eq!(Time(5_000).age_ms(3_000), 2_000);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(pub u64);

/// How far the clocks of two controllers may be apart.
const SKEW_MAX_MS: u64 = 60_000;

impl Time {
    /// How long ago `at_ms` was. A little later than now counts as now, and much later as long ago.
    #[must_use]
    pub const fn age_ms(self, at_ms: u64) -> u64 {
        match self.0.checked_sub(at_ms) {
            Some(age_ms) => age_ms,
            None if at_ms - self.0 <= SKEW_MAX_MS => 0,
            None => u64::MAX,
        }
    }
}

#[test]
fn clocks_that_are_ahead_freeze_nothing_for_good() {
    let now = Time(1_000_000);
    assert_eq!(now.age_ms(1_000_001), 0);
    assert_eq!(now.age_ms(u64::MAX), u64::MAX);
}
