//! The smallest memory that a setup fits in.

use crate::card::Card;
use crate::claim;
use crate::replay::{ReplayError, Run, replay};
use crate::side_by_side::side_by_side;
use crate::trace::Trace;

/// A search ends when it is this exact: a small trace costs little.
const EXACT_BYTES: [(usize, u64); 2] = [(20_000, 2 << 20), (STEPS_MAX, 64 << 20)];
/// Traces of more steps are not searched, and nothing is halved more often.
const STEPS_MAX: usize = 200_000;
const REPLAYS_MAX: u32 = 24;
/// Where what fits need not rise with memory, so many parts of what was found are tried.
const SMALLER: u64 = 8;
/// More than any device has.
const UNBOUNDED_BYTES: u64 = 1 << 42;

/// For each run, the smallest memory that its setup fits in with all claims. `None` if it fits in none, or if the trace
/// is too long to search.
pub(super) fn needs(trace: &Trace, runs: &[Run]) -> Result<Vec<Option<u64>>, ReplayError> {
    let exact = EXACT_BYTES.iter().find(|(steps, _)| trace.steps.len() <= *steps);
    let Some((_, exact_bytes)) = exact else {
        return Ok(vec![None; runs.len()]);
    };
    let live_bytes = claim::peak_with(&trace.claims, &trace.live_bytes()).1;
    side_by_side(runs, |run| &run.setup, |run| smallest(trace, run, live_bytes, *exact_bytes))
}

/// What suffices for certain.
fn enough(trace: &Trace, run: &Run) -> Option<u64> {
    if run.setup.collects() {
        // A smaller card collects earlier, and maps otherwise.
        return run.fits().then(|| run.card.usable_bytes());
    }
    run.fits().then(|| claim::peak_with(&trace.claims, &run.mapped_bytes).1.min(run.card.usable_bytes()))
}

/// As far as what fits rises with memory. With a threshold of the card, with claims and where PyTorch retries it need not:
/// then smaller sizes are tried, too. What is found fits, though one between those may. It is never less than what did not
/// suffice.
fn smallest(trace: &Trace, run: &Run, live_bytes: u64, exact_bytes: u64) -> Result<Option<u64>, ReplayError> {
    let fits = |usable: u64| replay(trace, &run.setup, card_of(run, usable)).map(|run| run.fits());
    let usable = run.card.usable_bytes();
    let (least, most) = match enough(trace, run) {
        Some(enough) => (live_bytes, usable.min(enough.max(live_bytes))),
        None => (usable.max(live_bytes), UNBOUNDED_BYTES),
    };
    if fits(least)? {
        return Ok(Some(least));
    }
    if !fits(most)? {
        return Ok(run.fits().then_some(usable));
    }
    let found = halve(&fits, least, most, exact_bytes)?;
    let is_regular = !run.setup.collects() && trace.claims.is_empty() && run.retries.unwrap_or(0) == 0;
    if is_regular {
        return Ok(Some(found));
    }
    let mut below = least;
    for part in 1..SMALLER {
        let size = least + found.saturating_sub(least) / SMALLER * part;
        if size <= below {
            continue;
        }
        if fits(size)? {
            return halve(&fits, below, size, exact_bytes).map(Some);
        }
        below = size;
    }
    Ok(Some(found))
}

/// A card of which so much is usable. Address space follows the card, so that only a budget is tried. A threshold is a
/// part of the card, so that its size is; what is not usable of it stays.
fn card_of(run: &Run, usable_bytes: u64) -> Card {
    if run.setup.collects() {
        let taken_bytes = run.card.total_bytes.saturating_sub(run.card.usable_bytes());
        let total_bytes = usable_bytes.saturating_add(taken_bytes);
        return Card { total_bytes, taken_bytes, budget_bytes: None };
    }
    let total_bytes = run.card.total_bytes.max(UNBOUNDED_BYTES);
    Card { total_bytes, taken_bytes: 0, budget_bytes: Some(usable_bytes) }
}

/// A size that fits, between one that does not and one that does.
fn halve(
    fits: &impl Fn(u64) -> Result<bool, ReplayError>,
    mut least: u64,
    mut most: u64,
    exact_bytes: u64,
) -> Result<u64, ReplayError> {
    for _ in 0..REPLAYS_MAX {
        if most.saturating_sub(least) <= exact_bytes {
            break;
        }
        // Sizes far apart are halved by their ratio.
        let half = least + (most - least) / 2;
        let middle = if most / 4 > least { half.min(least.max(exact_bytes) * 2) } else { half };
        if fits(middle)? {
            most = middle;
        } else {
            least = middle;
        }
    }
    Ok(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Block, TraceBuilder};

    const MIB: u64 = 1 << 20;
    const THRESHOLD: &str = "pytorch:garbage_collection_threshold:0.4";

    /// What is cached when the second block comes is cut up by the third, unless the threshold gives it back.
    fn cut_up(last_mib: u64) -> Trace {
        let mut trace = TraceBuilder::new("a");
        let mut alloc = |key: u64, mib: u64| {
            trace.alloc(key, Block { bytes: mib * MIB, stream: 0, pool: 0, stack: 0 }).unwrap();
            if key == 1 {
                trace.free(1).unwrap();
            }
        };
        [(1, 600), (2, 700), (3, 100), (4, last_mib)].into_iter().for_each(|(key, mib)| alloc(key, mib));
        trace.finish(None)
    }

    fn needs_mib(trace: &Trace, setup: &str, total_mib: u64, budget_mib: Option<u64>) -> (bool, Option<u64>) {
        let budget_bytes = budget_mib.map(|mib| mib * MIB);
        let card = Card { total_bytes: total_mib * MIB, taken_bytes: 0, budget_bytes };
        let run = replay(trace, &setup.parse().unwrap(), card).unwrap();
        let [needs] = needs(trace, std::slice::from_ref(&run)).unwrap().try_into().unwrap();
        (run.fits(), needs.map(|bytes| bytes.div_ceil(MIB)))
    }

    #[test]
    fn a_threshold_is_of_the_size_that_is_tried() {
        let trace = cut_up(600);
        assert_eq!(needs_mib(&trace, "pytorch", 2000, None), (true, Some(1900)));
        // 0.4 of 1400 is less than the 600 that are cached.
        assert_eq!(needs_mib(&trace, THRESHOLD, 1400, None), (true, Some(1400)));
        assert_eq!(needs_mib(&trace, THRESHOLD, 2000, None), (true, Some(1400)));
        // And 0.4 of 1600 is not. What is needed is more than what does not suffice.
        let (fits, needs) = needs_mib(&trace, THRESHOLD, 1600, None);
        assert!(!fits && needs.is_some_and(|mib| (1900..1904).contains(&mib)), "{needs:?}");
        // With a budget, the rest of the card stays.
        let (fits, needs) = needs_mib(&trace, THRESHOLD, 3000, Some(2000));
        assert!(fits && needs.is_some_and(|mib| (1900..1904).contains(&mib)), "{needs:?}");
    }

    /// From 1402 to 1499 MiB it fits, and from 1902 on.
    #[test]
    fn smaller_sizes_are_tried_where_what_fits_does_not_rise_with_memory() {
        let trace = cut_up(601);
        for (total_mib, fits) in [(1401, false), (1402, true), (1499, true), (1501, false), (1901, false)] {
            assert_eq!(needs_mib(&trace, THRESHOLD, total_mib, None).0, fits, "{total_mib}");
        }
        let (fits, needs) = needs_mib(&trace, THRESHOLD, 2000, None);
        assert!(fits && needs.is_some_and(|mib| (1402..1405).contains(&mib)), "{needs:?}");
    }
}
