//! Whether huge pages are quicker here. Usually they are, by far; on a machine whose memory is cut up, looking for
//! them takes longer than it saves.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::backend::Backend;
use super::region::Wish;

/// How much memory is made to see.
const PROBE_BYTES: usize = 16 << 20;

/// How often, of each kind; the best counts.
const ROUNDS: usize = 2;

/// What is known of huge pages on this machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct HugePages {
    /// Whether they are used.
    pub used: bool,
    /// Why.
    pub because: &'static str,
    /// How long 16 MiB take without them, in seconds, if that was measured.
    pub small_s: Option<f64>,
    /// And with them.
    pub huge_s: Option<f64>,
}

/// Whether the system's setting leaves a choice.
pub(super) fn is_allowed(setting: Option<&str>) -> bool {
    matches!(setting, Some("always" | "madvise"))
}

pub(super) fn unasked(is_allowed: bool) -> HugePages {
    let because = if is_allowed { "not measured" } else { "the system's setting is `never`, or it has none" };
    HugePages { used: is_allowed, because, small_s: None, huge_s: None }
}

/// Makes a little of both kinds, and keeps nothing.
pub(super) fn measure(backend: &dyn Backend, node: Option<u32>) -> HugePages {
    let (mut small, mut huge) = (None, None);
    for _ in 0..ROUNDS {
        for (best, is_huge) in [(&mut small, false), (&mut huge, true)] {
            let wish = Wish { bytes: PROBE_BYTES, huge: is_huge, node };
            // Who has no memory even for that will hear it from what comes next.
            let Some(took) = time(backend, &wish) else { return unasked(true) };
            *best = Some(best.map_or(took, |before: Duration| before.min(took)));
        }
    }
    let [small_s, huge_s] = [small, huge].map(|took| took.map(|took| took.as_secs_f64()));
    // A choice that makes no difference is made for fewer pages.
    let used = huge_s.zip(small_s).is_none_or(|(huge, small)| huge <= small * 1.1);
    let because = if used { "they are no slower here" } else { "they are slower here" };
    HugePages { used, because, small_s, huge_s }
}

fn time(backend: &dyn Backend, wish: &Wish) -> Option<Duration> {
    let region = backend.map(wish).ok()?;
    let start = Instant::now();
    let populated = backend.populate(&region, 1, &|_| {});
    let took = start.elapsed();
    backend.unmap(region);
    populated.ok().map(|()| took)
}
