//! What was replayed.

use poorwill_replay::answer::{Answer, Verdict};
use serde::Serialize;

/// What was replayed.
#[derive(Debug, Serialize)]
pub(crate) struct ReplayReport {
    /// Each that was read.
    traces: Vec<Replayed>,
    /// The name of the one that lacks most, or has least left.
    worst: Option<String>,
    #[serde(skip)]
    mismatch: Option<String>,
}

/// One trace on one card.
#[derive(Debug, Serialize)]
pub(crate) struct Replayed {
    /// Its file, or the reported load.
    pub(super) name: String,
    /// Allocations, frees and other events.
    pub(super) steps: usize,
    /// All memory of the card; what was usable of it, where that alone is known.
    pub(super) total_bytes: u64,
    /// What others hold of it.
    pub(super) taken_bytes: u64,
    /// As `--budget` says; null without one.
    pub(super) budget_bytes: Option<u64>,
    /// What is left for the load.
    pub(super) usable_bytes: u64,
    /// The answer and its advice, for a page.
    #[serde(skip)]
    pub(super) said: String,
    #[serde(flatten)]
    pub(super) answer: Answer,
}

impl Replayed {
    /// What fails first, then what needs most of its card.
    pub(super) fn badness(&self) -> (u8, i128) {
        let verdict = match self.answer.verdict {
            Verdict::DoesNotFit => 2,
            Verdict::FitsSoFar => 1,
            Verdict::Fits => 0,
        };
        let needs = self.answer.needs_bytes.unwrap_or(u64::MAX);
        (verdict, i128::from(needs) - i128::from(self.usable_bytes))
    }
}

impl ReplayReport {
    pub(super) fn of(traces: Vec<Replayed>) -> Self {
        let failing = traces.iter().filter(|one| one.answer.verdict == Verdict::DoesNotFit);
        let failing: Vec<&str> = failing.map(|one| &*one.name).collect();
        let mismatch = (!failing.is_empty()).then(|| failing.join(", "));
        let mut report = Self { traces, worst: None, mismatch };
        report.worst = report.worst().map(|one| one.name.clone());
        report
    }

    pub(super) fn traces(&self) -> &[Replayed] {
        &self.traces
    }

    /// The first of equal ones.
    pub(super) fn worst(&self) -> Option<&Replayed> {
        self.traces.iter().rev().max_by_key(|one| one.badness())
    }

    pub(super) fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    /// As of grep and diff: 0 it fits, 1 it does not. 3: it fits as far as it was recorded, and what follows is not known.
    pub(super) fn code(&self) -> u8 {
        match self.worst().map(|one| one.answer.verdict) {
            Some(Verdict::DoesNotFit) => 1,
            Some(Verdict::FitsSoFar) => 3,
            Some(Verdict::Fits) | None => 0,
        }
    }
}
