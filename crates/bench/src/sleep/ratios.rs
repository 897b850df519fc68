//! Each figure beside its limit.

use serde::Serialize;

use super::report::SleepBenchReport;
use crate::figures::as_float;

/// Share of the digest rate that comparing must reach.
const COMPARING_PART: f64 = 0.7;

/// Allowance for a sleep that copies little.
const SLACK_S: f64 = 0.005;

/// Share of the limit that the first sleep should reach.
const FIRST_SLEEP_PART: f64 = 0.85;

/// Share of the link that a wake should reach.
const WAKE_PART: f64 = 0.97;

/// Allowed multiple of the calls for the fewest handles; the pool has at least one per tensor.
const DRIVER_CALLS_MAX: f64 = 3.0;

/// Figures beside their limits; `None` without either.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Ratios {
    /// The load over the slower of the link and host allocation.
    pub first_sleep: Option<LimitRatio>,
    /// As for a clean sleep.
    pub prepared_sleep: Option<LimitRatio>,
    /// A drop, a digest of the load at 0.7 times the rate, and 5 ms.
    pub clean_sleep: Option<LimitRatio>,
    /// A clean sleep, the changed granules over the link, and 5 ms.
    pub changed_sleep: Option<LimitRatio>,
    /// The load over the link.
    pub wake: Option<LimitRatio>,
    /// Driver calls that unmap.
    pub drop: Option<LimitRatio>,
    /// Driver calls that map.
    pub wake_empty: Option<LimitRatio>,
}

/// A figure beside its limit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LimitRatio {
    /// The limit.
    pub limit_s: f64,
    /// The figure over the limit.
    pub ratio: f64,
    /// Highest acceptable ratio.
    pub ratio_aim: f64,
}

impl LimitRatio {
    fn of(figure_s: Option<f64>, limit_s: Option<f64>, ratio_aim: f64) -> Option<Self> {
        let limit_s = limit_s.filter(|limit_s| limit_s.is_finite() && *limit_s > 0.0)?;
        Some(Self { limit_s, ratio: figure_s? / limit_s, ratio_aim })
    }

    /// Whether the ratio is acceptable.
    #[must_use]
    pub fn is_met(&self) -> bool {
        self.ratio <= self.ratio_aim
    }
}

impl Ratios {
    pub(super) fn of(report: &SleepBenchReport) -> Self {
        let (limits, bytes) = (&report.limits, as_float(report.bytes));
        let first_s = bytes / limits.pin_bytes_per_s.min(limits.to_host_bytes_per_s);
        let comparing_s = bytes / (COMPARING_PART * limits.digest_bytes_per_s);
        // Slow digests compare nothing.
        let drop_s = report.drop_s.filter(|_| report.fast_digests);
        let clean_s = drop_s.map(|drop_s| drop_s + comparing_s + SLACK_S);
        let changed_bytes = as_float(report.changed_granules * limits.granule_bytes);
        let changed_s = report
            .clean_sleep_s
            .filter(|_| report.fast_digests)
            .map(|clean_s| clean_s + changed_bytes / limits.to_host_bytes_per_s + SLACK_S);
        let wake_s = bytes / limits.to_device_bytes_per_s;
        Self {
            first_sleep: LimitRatio::of(report.first_sleep_s, Some(first_s), 1.0 / FIRST_SLEEP_PART),
            prepared_sleep: LimitRatio::of(report.prepared_sleep_s, clean_s, 1.0),
            clean_sleep: LimitRatio::of(report.clean_sleep_s, clean_s, 1.0),
            changed_sleep: LimitRatio::of(report.changed_sleep_s, changed_s, 1.0),
            wake: LimitRatio::of(report.wake_s, Some(wake_s), 1.0 / WAKE_PART),
            drop: LimitRatio::of(report.drop_s, Some(limits.unmap_s), DRIVER_CALLS_MAX),
            wake_empty: LimitRatio::of(report.wake_empty_s, Some(limits.map_s), DRIVER_CALLS_MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_without_a_limit_has_no_ratio() {
        let ratio_of = LimitRatio::of(Some(3.0), Some(2.0), 1.5);
        assert_eq!(ratio_of, Some(LimitRatio { limit_s: 2.0, ratio: 1.5, ratio_aim: 1.5 }));
        assert!(ratio_of.is_some_and(|ratio_of| ratio_of.is_met()));
        assert!(LimitRatio::of(Some(3.1), Some(2.0), 1.5).is_some_and(|ratio_of| !ratio_of.is_met()));
        for limit_s in [None, Some(0.0), Some(f64::INFINITY), Some(f64::NAN)] {
            assert_eq!(LimitRatio::of(Some(3.0), limit_s, 1.5), None);
        }
        assert_eq!(LimitRatio::of(None, Some(2.0), 1.5), None);
    }
}
