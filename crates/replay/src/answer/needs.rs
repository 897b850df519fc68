//! The smallest memory that a setup fits in.

use std::thread;

use crate::card::Card;
use crate::claim;
use crate::replay::{ReplayError, Run, replay};
use crate::trace::Trace;

/// A search ends when it is this exact: a small trace costs little.
const EXACT_BYTES: [(usize, u64); 2] = [(20_000, 2 << 20), (STEPS_MAX, 64 << 20)];
/// Traces of more steps are not searched, and no search has more replays.
const STEPS_MAX: usize = 200_000;
const REPLAYS_MAX: u32 = 24;
/// More than any device has.
const UNBOUNDED_BYTES: u64 = 1 << 42;

/// For each run, the smallest memory that its setup fits in with all claims. `None` if it fits in none, or if the trace
/// is too long to search.
pub(super) fn needs(trace: &Trace, runs: &[Run]) -> Result<Vec<Option<u64>>, ReplayError> {
    let exact = EXACT_BYTES.iter().find(|(steps, _)| trace.steps.len() <= *steps);
    let Some((_, exact_bytes)) = exact else {
        return Ok(runs.iter().map(|run| enough(trace, run)).collect());
    };
    let live_bytes = claim::peak_with(&trace.claims, &trace.live_bytes()).1;
    thread::scope(|scope| {
        let search = |run| scope.spawn(move || smallest(trace, run, live_bytes, *exact_bytes));
        let searches: Vec<_> = runs.iter().map(search).collect();
        let ended = |search: thread::ScopedJoinHandle<'_, _>| {
            search.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        searches.into_iter().map(ended).collect()
    })
}

/// What suffices for certain.
fn enough(trace: &Trace, run: &Run) -> Option<u64> {
    run.fits().then(|| claim::peak_with(&trace.claims, &run.mapped_bytes).1)
}

/// As far as what fits rises with memory.
fn smallest(trace: &Trace, run: &Run, live_bytes: u64, exact_bytes: u64) -> Result<Option<u64>, ReplayError> {
    // Address space and thresholds follow the card, so that only a budget is tried.
    let fits = |budget_bytes: u64| {
        let total_bytes = run.card.total_bytes.max(UNBOUNDED_BYTES);
        let card = Card { total_bytes, taken_bytes: 0, budget_bytes: Some(budget_bytes) };
        replay(trace, &run.setup, card).map(|run| run.fits())
    };
    let usable = run.card.usable_bytes();
    let (mut least, mut most) = match enough(trace, run) {
        Some(enough) => (live_bytes, usable.min(enough.max(live_bytes))),
        None => (usable.max(live_bytes), UNBOUNDED_BYTES),
    };
    if fits(least)? {
        return Ok(Some(least));
    }
    if !fits(most)? {
        return Ok(run.fits().then_some(usable));
    }
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
    Ok(Some(most))
}
