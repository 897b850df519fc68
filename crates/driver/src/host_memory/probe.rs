//! Measures whether huge pages are faster. Usually they are, by far; in fragmented memory, finding them costs
//! more than they save.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::backend::Backend;
use super::region::RegionOptions;

const PROBE_BYTES: usize = 16 << 20;

/// Rounds for each kind; the fastest counts.
const ROUNDS: usize = 2;

/// Whether this machine uses huge pages, and why.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct HugePages {
    /// Whether they are used.
    pub used: bool,
    /// Why.
    pub because: &'static str,
    /// Time to populate 16 MiB without them, in seconds, if measured.
    pub small_s: Option<f64>,
    /// The same with them.
    pub huge_s: Option<f64>,
}

/// Whether the system's setting leaves a choice.
pub(super) fn is_allowed(setting: Option<&str>) -> bool {
    matches!(setting, Some("always" | "madvise"))
}

pub(super) fn unmeasured(is_allowed: bool) -> HugePages {
    let because = if is_allowed { "not measured" } else { "the system's setting is `never`, or it has none" };
    HugePages { used: is_allowed, because, small_s: None, huge_s: None }
}

pub(super) fn measure(backend: &dyn Backend, node: Option<u32>) -> HugePages {
    let (mut small, mut huge) = (None, None);
    for _ in 0..ROUNDS {
        for (best, is_huge) in [(&mut small, false), (&mut huge, true)] {
            let options = RegionOptions { bytes: PROBE_BYTES, huge: is_huge, node };
            // The next allocation reports the shortage.
            let Some(took) = time(backend, &options) else { return unmeasured(true) };
            *best = Some(best.map_or(took, |before: Duration| before.min(took)));
        }
    }
    let [small_s, huge_s] = [small, huge].map(|took| took.map(|took| took.as_secs_f64()));
    // On a tie, prefer fewer pages.
    let used = huge_s.zip(small_s).is_none_or(|(huge, small)| huge <= small * 1.1);
    let because = if used { "they are no slower here" } else { "they are slower here" };
    HugePages { used, because, small_s, huge_s }
}

fn time(backend: &dyn Backend, options: &RegionOptions) -> Option<Duration> {
    let region = backend.map(options).ok()?;
    let start = Instant::now();
    let populated = backend.populate(&region, 1, &|_| {});
    let took = start.elapsed();
    backend.unmap(region);
    populated.ok().map(|()| took)
}
