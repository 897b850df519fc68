//! The rule: which source a budget comes from.

use serde::Serialize;

use super::cap::Cap;
use super::source::{Figure, Reading, Source, SourceName};
use crate::bytes::ByteSize;

/// No device has that much, except the host device.
pub const PLAUSIBLE_BYTES_MAX: u64 = 1 << 50;

/// Most that stays with the operating system, the desktop and the engines' own processes where a device shares the
/// computer's memory. What is taken beyond it does not fail: such a machine swaps, and then hangs.
const SYSTEM_RESERVE_BYTES_MAX: u64 = 4 << 30;

/// The part of a small computer's memory that stays, up to that.
const SYSTEM_RESERVE_PART: u64 = 8;

/// From here on an unsigned figure has gone below zero.
const UNDERFLOW_BYTES_MIN: u64 = 1 << 63;

/// What stays with the system of a computer whose memory a device shares: 4 GiB, or an eighth where that is less.
///
/// ```
/// use poorwill::budget::system_reserve_bytes;
///
/// assert_eq!(system_reserve_bytes(121 << 30), 4 << 30);
/// assert_eq!(system_reserve_bytes(8 << 30), 1 << 30);
/// ```
#[must_use]
pub fn system_reserve_bytes(computer_bytes: u64) -> u64 {
    (computer_bytes / SYSTEM_RESERVE_PART).min(SYSTEM_RESERVE_BYTES_MAX)
}

/// How much of a device this process may use, and by which source.
///
/// ```
/// use poorwill::Budget;
/// use poorwill::budget::{Reading, SourceName};
///
/// let readings =
///     [Reading::bytes(SourceName::NvmlTotal, 24 << 30), Reading::bytes(SourceName::CudaTotal, 23 << 30)];
/// let budget = Budget::decide(&readings, None, Some("50%".parse()?));
/// assert_eq!((budget.total_bytes, budget.total_from), (Some(23 << 30), Some(SourceName::CudaTotal)));
/// assert_eq!(budget.budget_bytes, Some(23 << 29));
/// # Ok::<(), poorwill::budget::InvalidCap>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Budget {
    /// All sources, with their figures as given.
    pub sources: Vec<Source>,
    /// Source of the budget. `None` without a plausible figure.
    pub winner: Option<SourceName>,
    /// The smallest plausible total, before the user's cap.
    pub total_bytes: Option<u64>,
    /// Source of the total.
    #[serde(skip)]
    pub total_from: Option<SourceName>,
    /// What this process may use.
    pub budget_bytes: Option<u64>,
    /// Free on the device for this process.
    #[serde(skip)]
    pub free_bytes: Option<u64>,
    /// What this process can still get. `None` if free memory is unknown.
    pub headroom_bytes: Option<u64>,
    /// What this process uses, context included. `None` if unknown; the headroom then assumes nothing.
    pub process_used_bytes: Option<u64>,
    /// Lent by sleeping pools: in use, and to be had from the broker. `None` without a broker, or where memory cannot be
    /// lent.
    pub reclaimable_bytes: Option<u64>,
}

impl Budget {
    /// Decides from readings in any order; of equal totals the first wins. What is reclaimable is no reading.
    #[must_use]
    pub fn decide(readings: &[Reading], process_used_bytes: Option<u64>, cap: Option<Cap>) -> Self {
        let reserve_bytes = reserve_bytes(readings);
        let total = least(readings.iter().filter_map(|reading| {
            let bytes = plausible_total(reading)?;
            let is_computers = reading.source == SourceName::SystemTotal;
            Some((if is_computers { bytes.saturating_sub(reserve_bytes) } else { bytes }, reading.source))
        }));
        let total_bytes = total.map(|(bytes, _)| bytes);
        let user = cap.map(|cap| User::of(cap, total));
        let user_total = user.as_ref().and_then(|user| Some((user.bytes?, SourceName::User)));
        // The user comes last: a cap of the whole total leaves the total's source as the winner.
        let budget = least(total.into_iter().chain(user_total));
        let budget_bytes = budget.map(|(bytes, _)| bytes);
        let free_bytes = measured_free(readings, total_bytes, reserve_bytes);
        let unused_bytes =
            budget_bytes.map(|budget_bytes| budget_bytes.saturating_sub(process_used_bytes.unwrap_or(0)));
        let mut sources: Vec<Source> = readings.iter().map(|reading| report(reading, total_bytes)).collect();
        sources.extend(user.map(|user| user.source(total_bytes)));
        Self {
            sources,
            winner: budget.map(|(_, name)| name),
            total_bytes,
            total_from: total.map(|(_, name)| name),
            budget_bytes,
            free_bytes,
            headroom_bytes: free_bytes.zip(unused_bytes).map(|(free, unused)| free.min(unused)),
            process_used_bytes,
            reclaimable_bytes: None,
        }
    }

    /// By name.
    #[must_use]
    pub fn source(&self, name: SourceName) -> Option<&Source> {
        self.sources.iter().find(|source| source.name == name)
    }
}

struct User {
    cap: Cap,
    bytes: Option<u64>,
    of: Option<SourceName>,
}

impl User {
    fn of(cap: Cap, total: Option<(u64, SourceName)>) -> Self {
        let bytes = match cap {
            Cap::Bytes(bytes) => Some(bytes),
            Cap::Share(share) => total.map(|(bytes, _)| share.of(bytes)),
        };
        Self { cap, bytes, of: total.map(|(_, name)| name) }
    }

    fn source(self, total_bytes: Option<u64>) -> Source {
        let Self { cap, bytes, of } = self;
        let note = match (cap, of, total_bytes) {
            (Cap::Share(share), Some(of), Some(total)) => {
                Some(format!("{share} of {}, from {of}", ByteSize(total)))
            }
            (Cap::Share(share), ..) => Some(format!("{share} of an unknown total")),
            (Cap::Bytes(bytes), _, Some(total)) if bytes > total => Some("more than there is".into()),
            (Cap::Bytes(_), ..) => None,
        };
        Source { name: SourceName::User, bytes, note, is_odd: false }
    }
}

fn least(totals: impl Iterator<Item = (u64, SourceName)>) -> Option<(u64, SourceName)> {
    totals.min_by_key(|(bytes, _)| *bytes)
}

fn plausible_total(reading: &Reading) -> Option<u64> {
    match reading.figure {
        Figure::Bytes(bytes)
            if !reading.source.is_about_free() && total_anomaly(reading.source, bytes).is_none() =>
        {
            Some(bytes)
        }
        _ => None,
    }
}

fn total_anomaly(source: SourceName, bytes: u64) -> Option<&'static str> {
    match bytes {
        0 => Some("0 is no total: not counted"),
        u64::MAX => Some("stands for \u{201c}not available\u{201d}: not counted"),
        // The host device has what it was opened with.
        PLAUSIBLE_BYTES_MAX.. if source != SourceName::Capacity => {
            Some("no device has that much: not counted")
        }
        _ => None,
    }
}

/// What stays with the system: 0 unless the device shares the computer's memory.
fn reserve_bytes(readings: &[Reading]) -> u64 {
    let computer = readings.iter().find(|reading| reading.source == SourceName::SystemTotal);
    computer.and_then(plausible_total).map_or(0, system_reserve_bytes)
}

/// The smallest free figure. A figure of the operating system means that the device shares the computer's
/// memory. What the system could make available then counts too, unless a source reports an exceeded limit. The
/// reserve is part of both.
fn measured_free(readings: &[Reading], total_bytes: Option<u64>, reserve_bytes: u64) -> Option<u64> {
    let of = |names: &'static [SourceName]| {
        let named = readings.iter().filter(move |reading| names.contains(&reading.source));
        named.filter(|reading| reading.source.is_about_free())
    };
    let least_of = |names| of(names).filter_map(|reading| free(reading, total_bytes, reserve_bytes)).min();
    const DEVICE: &[SourceName] = &[SourceName::CapacityFree, SourceName::CudaFree, SourceName::NvmlFree];
    if of(DEVICE).any(|reading| is_over_limit(&reading.figure)) {
        return Some(0);
    }
    let device = least_of(DEVICE).max(least_of(&[SourceName::SystemAvailable]));
    let group = least_of(&[SourceName::CgroupDmemFree]);
    device.into_iter().chain(group).min()
}

fn is_over_limit(figure: &Figure) -> bool {
    match figure {
        Figure::OverLimit(_) => true,
        Figure::Bytes(bytes) => (UNDERFLOW_BYTES_MIN..u64::MAX).contains(bytes),
        Figure::None(_) => false,
    }
}

fn free(reading: &Reading, total_bytes: Option<u64>, reserve_bytes: u64) -> Option<u64> {
    match reading.figure {
        Figure::Bytes(u64::MAX) | Figure::None(_) => None,
        Figure::OverLimit(_) | Figure::Bytes(UNDERFLOW_BYTES_MIN..) => Some(0),
        Figure::Bytes(bytes) => {
            let left_bytes = bytes.saturating_sub(reserve_bytes);
            Some(total_bytes.map_or(left_bytes, |total_bytes| left_bytes.min(total_bytes)))
        }
    }
}

/// The note is the anomaly, then the source's own.
fn report(reading: &Reading, total_bytes: Option<u64>) -> Source {
    let (bytes, remark, is_odd) = match &reading.figure {
        Figure::Bytes(bytes) => {
            let anomaly = anomaly(reading.source, *bytes, total_bytes);
            let is_odd = anomaly.is_some();
            (Some(*bytes), anomaly, is_odd)
        }
        Figure::None(reason) => (None, Some(reason.clone()), false),
        Figure::OverLimit(reason) => {
            (None, Some(format!("{reason}: more is in use than the limit allows, so nothing is free")), true)
        }
    };
    let reserve = (reading.source == SourceName::SystemTotal).then(|| plausible_total(reading)).flatten();
    let reserve =
        reserve.map(|bytes| format!("less {} for the system", ByteSize(system_reserve_bytes(bytes))));
    let notes: Vec<String> = remark.into_iter().chain(reserve).chain(reading.note.clone()).collect();
    let note = (!notes.is_empty()).then(|| notes.join("; "));
    Source { name: reading.source, bytes, note, is_odd }
}

fn anomaly(source: SourceName, bytes: u64, total_bytes: Option<u64>) -> Option<String> {
    if !source.is_about_free() {
        return total_anomaly(source, bytes).map(str::to_owned);
    }
    match (bytes, total_bytes) {
        (u64::MAX, _) => Some("stands for \u{201c}not available\u{201d}: not counted".into()),
        (UNDERFLOW_BYTES_MIN.., _) => {
            Some("went below zero: more is in use than the limit allows, so nothing is free".into())
        }
        // The operating system may well have more than the device may use.
        (_, Some(total)) if bytes > total && source != SourceName::SystemAvailable => {
            Some(format!("more than the total of {}, which counts", ByteSize(total)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use SourceName::{
        CgroupDmem, CgroupDmemFree, CudaFree, CudaTotal, DeviceProperties, MemoryLimit, MpsLimit, NvmlFree,
        NvmlTotal, SystemAvailable, SystemTotal, User,
    };

    const GIB: u64 = 1 << 30;

    fn decide(readings: &[(SourceName, u64)], used_bytes: u64, cap: &str) -> Budget {
        let readings: Vec<Reading> =
            readings.iter().map(|(source, bytes)| Reading::bytes(*source, *bytes)).collect();
        let cap = (!cap.is_empty()).then(|| cap.parse().unwrap());
        Budget::decide(&readings, Some(used_bytes), cap)
    }

    fn figures(budget: &Budget) -> (Option<SourceName>, Option<u64>, Option<u64>) {
        (budget.winner, budget.budget_bytes, budget.headroom_bytes)
    }

    fn note(budget: &Budget, name: SourceName) -> &str {
        budget.source(name).unwrap().note.as_deref().unwrap_or_default()
    }

    #[test]
    fn the_smallest_plausible_total_wins() {
        let card = [
            (DeviceProperties, 24 * GIB),
            (CudaTotal, 23 * GIB),
            (CudaFree, 22 * GIB),
            (NvmlTotal, 24 * GIB),
        ];
        let budget = decide(&card, GIB, "");
        assert_eq!(figures(&budget), (Some(CudaTotal), Some(23 * GIB), Some(22 * GIB)));
        let limited = [&card[..], &[(MemoryLimit, 10 * GIB)]].concat();
        assert_eq!(figures(&decide(&limited, GIB, "")), (Some(MemoryLimit), Some(10 * GIB), Some(9 * GIB)));
        let limited =
            [&limited[..], &[(MpsLimit, 9 * GIB), (CgroupDmem, 8 * GIB), (CgroupDmemFree, 2 * GIB)]].concat();
        assert_eq!(figures(&decide(&limited, GIB, "")), (Some(CgroupDmem), Some(8 * GIB), Some(2 * GIB)));
        let same = [(CudaTotal, GIB), (NvmlTotal, GIB)];
        assert_eq!(figures(&decide(&same, 0, "1.0")), (Some(CudaTotal), Some(GIB), None));
    }

    #[test]
    fn a_cap_is_a_source_and_a_share_is_of_the_total() {
        let slice = [(CudaTotal, 23 * GIB), (CudaFree, 23 * GIB), (NvmlTotal, 24 * GIB)];
        let budget = decide(&slice, 0, "0.5");
        assert_eq!(figures(&budget), (Some(User), Some(23 * GIB / 2), Some(23 * GIB / 2)));
        assert_eq!(note(&budget, User), "0.5 of 23 GiB, from cuda_total");
        assert_eq!(budget.total_bytes, Some(23 * GIB));
        assert_eq!(figures(&decide(&slice, 3 * GIB, "20GiB")), (Some(User), Some(20 * GIB), Some(17 * GIB)));
        let budget = decide(&slice, 0, "30GiB");
        assert_eq!(figures(&budget), (Some(CudaTotal), Some(23 * GIB), Some(23 * GIB)));
        assert_eq!(note(&budget, User), "more than there is");
        let limits = ["0.95", "0.92", "0.88"].map(|cap| decide(&slice, 0, cap).budget_bytes.unwrap());
        assert!(limits.is_sorted_by(|a, b| a > b), "{limits:?}");
    }

    #[test]
    fn odd_totals_are_named_and_do_not_count() {
        for (bytes, words) in [(0, "no total"), (u64::MAX, "not available"), (1 << 60, "no device has")] {
            let budget = decide(&[(DeviceProperties, bytes), (CudaTotal, 8 * GIB)], 0, "");
            assert_eq!(budget.budget_bytes, Some(8 * GIB));
            assert!(note(&budget, DeviceProperties).contains(words), "{budget:?}");
            assert_eq!(
                budget.source(DeviceProperties).unwrap().bytes,
                Some(bytes),
                "figures stay as they were"
            );
        }
    }

    #[test]
    fn the_host_device_has_what_it_was_opened_with() {
        let budget = decide(&[(SourceName::Capacity, 1 << 62), (SourceName::CapacityFree, 1 << 62)], 0, "");
        assert_eq!(figures(&budget), (Some(SourceName::Capacity), Some(1 << 62), Some(1 << 62)));
        assert_eq!(note(&budget, SourceName::Capacity), "");
    }

    #[test]
    fn odd_free_figures_are_named() {
        let of = |free| decide(&[(CudaTotal, 8 * GIB), (CudaFree, 6 * GIB), (NvmlFree, free)], 0, "");
        for (free, headroom, words) in [
            (5 * GIB, 5 * GIB, ""),
            (u64::MAX, 6 * GIB, "not available"),
            (u64::MAX - GIB + 1, 0, "below zero"),
            (9 * GIB, 6 * GIB, "more than the total of 8 GiB"),
        ] {
            let budget = of(free);
            assert_eq!(budget.headroom_bytes, Some(headroom), "{free}");
            assert!(note(&budget, NvmlFree).contains(words), "{budget:?}");
        }
        let readings = [
            Reading::bytes(CudaTotal, 8 * GIB),
            Reading::new(CudaFree, Figure::OverLimit("CUDA_ERROR_INVALID_VALUE".into())),
            Reading::bytes(NvmlFree, 8 * GIB),
        ];
        let budget = Budget::decide(&readings, None, None);
        assert_eq!(figures(&budget), (Some(CudaTotal), Some(8 * GIB), Some(0)));
        assert!(
            note(&budget, CudaFree).starts_with("CUDA_ERROR_INVALID_VALUE: more is in use"),
            "{budget:?}"
        );
        // More used than the budget: nothing is left, and nothing wraps.
        assert_eq!(decide(&[(CudaTotal, GIB), (CudaFree, GIB)], 2 * GIB, "").headroom_bytes, Some(0));
    }

    #[test]
    fn the_system_of_shared_memory_keeps_a_reserve() {
        // As on a machine of 121 GiB that has 21.7 available: its GPU may have no more than 17.7 of them.
        let computer = |free: u64, available: u64| {
            [(CudaTotal, 121 * GIB), (CudaFree, free), (SystemTotal, 121 * GIB), (SystemAvailable, available)]
        };
        let whole = decide(&computer(100 * GIB, 110 * GIB), 0, "");
        assert_eq!(figures(&whole), (Some(SystemTotal), Some(117 * GIB), Some(106 * GIB)));
        assert_eq!(note(&whole, SystemTotal), "less 4 GiB for the system");
        assert_eq!(whole.source(SystemTotal).unwrap().bytes, Some(121 * GIB), "figures stay as they were");
        for (free, available, headroom) in
            [(20, 21, 17), (21, 20, 17), (3, 2, 0), (0, 0, 0), (121, 121, 117), (500, 500, 117)]
        {
            let budget = decide(&computer(free * GIB, available * GIB), 0, "");
            assert_eq!(budget.headroom_bytes, Some(headroom * GIB), "{free} and {available}");
        }
        let small =
            decide(&[(CudaTotal, 8 * GIB), (SystemTotal, 8 * GIB), (SystemAvailable, 6 * GIB)], 0, "");
        assert_eq!((small.budget_bytes, small.headroom_bytes), (Some(7 * GIB), Some(5 * GIB)));
    }

    #[test]
    fn shared_memory_of_the_computer_counts_as_free() {
        let readings = [(CudaTotal, 64 * GIB), (CudaFree, 2 * GIB), (SystemAvailable, 40 * GIB)];
        assert_eq!(decide(&readings, 0, "").headroom_bytes, Some(40 * GIB));
        let readings = [(CudaTotal, 64 * GIB), (CudaFree, 2 * GIB), (SystemAvailable, GIB)];
        assert_eq!(decide(&readings, 0, "").headroom_bytes, Some(2 * GIB));
        let readings = [(CudaTotal, 64 * GIB), (CudaFree, 2 * GIB), (SystemAvailable, 99 * GIB)];
        let budget = decide(&readings, 0, "");
        assert_eq!((budget.headroom_bytes, note(&budget, SystemAvailable)), (Some(64 * GIB), ""));
        let over = [
            Reading::bytes(CudaTotal, 64 * GIB),
            Reading::new(CudaFree, Figure::OverLimit("invalid".into())),
            Reading::bytes(SystemAvailable, 40 * GIB),
        ];
        assert_eq!(Budget::decide(&over, None, None).headroom_bytes, Some(0));
        let readings = [(CudaTotal, 64 * GIB), (NvmlFree, u64::MAX - 5), (SystemAvailable, 40 * GIB)];
        assert_eq!(decide(&readings, 0, "").headroom_bytes, Some(0));
    }

    #[test]
    fn unknown_figures_stay_unknown() {
        let none = [
            Reading::none(CudaTotal, "no driver"),
            Reading::none(NvmlTotal, "no NVML").with_note("looked twice"),
        ];
        let budget = Budget::decide(&none, None, None);
        assert_eq!((figures(&budget), budget.total_bytes), ((None, None, None), None));
        assert_eq!(note(&budget, NvmlTotal), "no NVML; looked twice");
        let budget = Budget::decide(&none, None, Some("0.5".parse().unwrap()));
        assert_eq!(figures(&budget), (None, None, None));
        assert!(note(&budget, User).contains("unknown total"));
        let budget = Budget::decide(&none, None, Some(Cap::Bytes(GIB)));
        assert_eq!(figures(&budget), (Some(User), Some(GIB), None));
        assert_eq!(Budget::decide(&[], None, None).sources, []);
    }

    #[test]
    fn a_budget_in_json() {
        let budget = decide(&[(CudaTotal, 8), (CudaFree, 6)], 1, "0.5");
        assert_eq!(
            serde_json::to_value(budget).unwrap(),
            serde_json::json!({
                "sources": [
                    {"name": "cuda_total", "bytes": 8, "note": null},
                    {"name": "cuda_free", "bytes": 6, "note": null},
                    {"name": "user", "bytes": 4, "note": "0.5 of 8 B, from cuda_total"},
                ],
                "winner": "user",
                "total_bytes": 8,
                "budget_bytes": 4,
                "headroom_bytes": 3,
                "process_used_bytes": 1,
                "reclaimable_bytes": null,
            })
        );
    }
}
