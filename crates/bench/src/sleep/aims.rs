//! What each figure should reach.

use super::ratios::{LimitRatio, Ratios};
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

/// Of what a report has so far.
pub(super) fn ratios(report: &SleepBenchReport) -> Ratios {
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
    Ratios {
        first_sleep: LimitRatio::of(report.first_sleep_s, Some(first_s), 1.0 / FIRST_SLEEP_PART),
        prepared_sleep: LimitRatio::of(report.prepared_sleep_s, clean_s, 1.0),
        clean_sleep: LimitRatio::of(report.clean_sleep_s, clean_s, 1.0),
        changed_sleep: LimitRatio::of(report.changed_sleep_s, changed_s, 1.0),
        wake: LimitRatio::of(report.wake_s, Some(wake_s), 1.0 / WAKE_PART),
        drop: LimitRatio::of(report.drop_s, Some(limits.unmap_s), DRIVER_CALLS_MAX),
        wake_empty: LimitRatio::of(report.wake_empty_s, Some(limits.map_s), DRIVER_CALLS_MAX),
    }
}
