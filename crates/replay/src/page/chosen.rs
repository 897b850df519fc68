//! Which moments of a replay can be looked at.

use std::collections::BTreeMap;

use crate::replay::Run;
use crate::trace::Trace;

/// How many there are, unless there are more runs.
const MOST: usize = 48;
/// More phases than that begin without a moment of their own.
const PHASES_MAX: usize = 16;

/// Names of moments by their steps. One that only fills a gap has none.
pub(super) fn chosen(trace: &Trace, live: &[u64], runs: &[Run]) -> BTreeMap<usize, Vec<String>> {
    let mut found: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    let Some(last) = trace.steps.len().checked_sub(1) else { return found };
    let mut name = |step: usize, text: String| found.entry(step.min(last)).or_default().push(text);
    for run in runs {
        if !run.mapped_bytes.is_empty() {
            name(run.peak.step, format!("Peak of {}", run.setup));
        }
    }
    // The first of equal ones.
    let peak = live.iter().enumerate().rev().max_by_key(|(_, bytes)| **bytes);
    name(peak.map_or(0, |(step, _)| step), "Most live bytes".to_owned());
    for run in runs {
        if let Some(before) = run.failure.and_then(|failure| failure.step.checked_sub(1)) {
            name(before, format!("Before {} fails", run.setup));
        }
    }
    for phase in trace.phases.iter().filter(|phase| phase.from <= last).take(PHASES_MAX) {
        name(phase.from, format!("{} begins", phase.name));
    }
    name(last, "End".to_owned());
    let gaps = MOST.saturating_sub(found.len());
    for gap in 1..=gaps {
        // Whole numbers, so the same everywhere.
        let step = last / (gaps + 1) * gap + last % (gaps + 1) * gap / (gaps + 1);
        found.entry(step).or_default();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::card::Card;
    use crate::replay::replay;
    use crate::trace::{Block, TraceBuilder};

    #[test]
    fn peaks_failures_and_phases_are_among_the_moments() {
        let mut trace = TraceBuilder::new("a");
        for key in 0..600 {
            if key % 20 == 0 {
                trace.phase(&format!("p{key}"));
            }
            trace.alloc(key, Block { bytes: 1 << 20, stream: 0, pool: 0, stack: 0 }).unwrap();
            if key > 300 {
                trace.free(key).unwrap();
            }
        }
        let trace = trace.finish(None);
        let small = Card { total_bytes: 200 << 20, taken_bytes: 0, budget_bytes: None };
        let large = Card { total_bytes: 1 << 30, ..small };
        let setup = "pytorch".parse().unwrap();
        let runs = [small, large].map(|card| replay(&trace, &setup, card).unwrap());
        let found = chosen(&trace, &trace.live_bytes(), &runs);
        assert!((30..=MOST).contains(&found.len()), "{}", found.len());
        assert!(found.values().flatten().filter(|name| name.ends_with("begins")).count() == PHASES_MAX);
        let named = |text: &str| found.iter().find(|(_, names)| names.iter().any(|name| name == text));
        assert_eq!(*named("Before pytorch fails").unwrap().0, runs[0].failure.unwrap().step - 1);
        assert_eq!(*named("Most live bytes").unwrap().0, 301);
        assert_eq!(*named("End").unwrap().0, trace.steps.len() - 1);
        assert!(runs.iter().all(|run| found.contains_key(&run.peak.step)));
        assert!(chosen(&Trace::default(), &[], &runs).is_empty());
    }
}
