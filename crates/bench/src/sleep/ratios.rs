//! Each figure beside what the limits of the machine make of it.

use serde::Serialize;

use super::report::Report;
use crate::figures::as_float;

/// Which part of its speed at reading device memory a sleep is given for comparing.
const COMPARING_PART: f64 = 0.7;

/// What a sleep that copies nothing, or little, may take beside what can be computed.
const SLACK_S: f64 = 0.005;

/// Which part of the limit the first sleep should reach.
const FIRST_SLEEP_PART: f64 = 0.85;

/// Which part of the link a wake should reach.
const WAKE_PART: f64 = 0.97;

/// How many times as long as bare calls of the driver, for as few handles as hold as much, what copies nothing may take:
/// the pool has at least a handle for each tensor.
const BARE_TIMES: f64 = 3.0;

/// The figures of a report beside their limits; absent where there is no figure, or no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Ratios {
    /// The load over the slower of the link to the host and the making of host memory.
    pub first_sleep: Option<Beside>,
    /// As for a clean sleep.
    pub prepared_sleep: Option<Beside>,
    /// A sleep that drops everything, reading the load at 0.7 times the measured speed, and 5 ms.
    pub clean_sleep: Option<Beside>,
    /// A clean sleep, what changed over the link, and 5 ms.
    pub changed_sleep: Option<Beside>,
    /// The load over the link.
    pub wake: Option<Beside>,
    /// The bare calls that give the memory back.
    pub drop: Option<Beside>,
    /// The bare calls that bring the memory in.
    pub wake_empty: Option<Beside>,
}

/// A figure beside its limit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Beside {
    /// What the limits make of it.
    pub limit_s: f64,
    /// The figure over that.
    pub ratio: f64,
    /// What the ratio should be at most.
    pub ratio_aim: f64,
}

impl Beside {
    /// Where there is a figure, and a limit that is one.
    fn of(figure_s: Option<f64>, limit_s: Option<f64>, ratio_aim: f64) -> Option<Self> {
        let limit_s = limit_s.filter(|limit_s| limit_s.is_finite() && *limit_s > 0.0)?;
        Some(Self { limit_s, ratio: figure_s? / limit_s, ratio_aim })
    }

    /// Whether it is as good as it should be.
    #[must_use]
    pub fn is_met(&self) -> bool {
        self.ratio <= self.ratio_aim
    }
}

impl Ratios {
    pub(super) fn of(report: &Report) -> Self {
        let (limits, bytes) = (&report.limits, as_float(report.bytes));
        let first_s = bytes / limits.pin_bytes_per_s.min(limits.to_host_bytes_per_s);
        let comparing_s = bytes / (COMPARING_PART * limits.digest_bytes_per_s);
        // Where digests are slow nothing is compared, and there is no such limit.
        let drop_s = report.drop_s.filter(|_| report.fast_digests);
        let clean_s = drop_s.map(|drop_s| drop_s + comparing_s + SLACK_S);
        let changed_bytes = as_float(report.changed_granules * limits.granule_bytes);
        let changed_s = report
            .clean_sleep_s
            .filter(|_| report.fast_digests)
            .map(|clean_s| clean_s + changed_bytes / limits.to_host_bytes_per_s + SLACK_S);
        let wake_s = bytes / limits.to_device_bytes_per_s;
        Self {
            first_sleep: Beside::of(report.first_sleep_s, Some(first_s), 1.0 / FIRST_SLEEP_PART),
            prepared_sleep: Beside::of(report.prepared_sleep_s, clean_s, 1.0),
            clean_sleep: Beside::of(report.clean_sleep_s, clean_s, 1.0),
            changed_sleep: Beside::of(report.changed_sleep_s, changed_s, 1.0),
            wake: Beside::of(report.wake_s, Some(wake_s), 1.0 / WAKE_PART),
            drop: Beside::of(report.drop_s, Some(limits.give_back_s), BARE_TIMES),
            wake_empty: Beside::of(report.wake_empty_s, Some(limits.bring_in_s), BARE_TIMES),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_without_a_limit_stands_beside_none() {
        let beside = Beside::of(Some(3.0), Some(2.0), 1.5);
        assert_eq!(beside, Some(Beside { limit_s: 2.0, ratio: 1.5, ratio_aim: 1.5 }));
        assert!(beside.is_some_and(|beside| beside.is_met()));
        assert!(Beside::of(Some(3.1), Some(2.0), 1.5).is_some_and(|beside| !beside.is_met()));
        for limit_s in [None, Some(0.0), Some(f64::INFINITY), Some(f64::NAN)] {
            assert_eq!(Beside::of(Some(3.0), limit_s, 1.5), None);
        }
        assert_eq!(Beside::of(None, Some(2.0), 1.5), None);
    }
}
