//! What is said of the runs of a trace.

use serde::Serialize;

use super::holders::Holder;
use crate::replay::Run;
use crate::trace::Trace;

/// Whether a load fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// All of it.
    Fits,
    /// What was recorded does, and that ends where memory lacked.
    FitsSoFar,
    /// It fails.
    DoesNotFit,
}

impl Verdict {
    pub(super) fn of(trace: &Trace, run: &Run) -> Self {
        match (run.fits(), trace.ended_by()) {
            (false, _) => Self::DoesNotFit,
            (true, Some(_)) => Self::FitsSoFar,
            (true, None) => Self::Fits,
        }
    }
}

/// What the runs of one trace say together. The first run is the one that is asked about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Answer {
    /// Whether the setup that is asked about fits.
    pub verdict: Verdict,
    /// The answer.
    pub sentence: String,
    /// What to change, in sentences.
    pub advice: Vec<String>,
    /// The setup that is asked about.
    pub setup: String,
    /// Most that was live or claimed at a time.
    pub live_peak_bytes: u64,
    /// Whether claims are counted in that.
    pub is_claimed: bool,
    /// The smallest memory that this setup fits in; `None` if it fits in none, or that was not looked for.
    pub needs_bytes: Option<u64>,
    /// Most that the recorder's own allocator had mapped; `None` if that is not known.
    pub recorded_peak_bytes: Option<u64>,
    /// Each run, those first that need least.
    pub rows: Vec<Row>,
    /// Who had most at the first run's end or peak, the largest first.
    pub holders: Vec<Holder>,
    /// What is not exact.
    pub notes: Vec<String>,
}

/// One run, in a line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The allocator, as it is said on the command line.
    pub setup: String,
    /// What to type for it.
    pub typed: String,
    /// Whether it fits.
    pub verdict: Verdict,
    /// The smallest memory that it fits in; `None` if it fits in none, or that was not looked for.
    pub needs_bytes: Option<u64>,
    /// How often PyTorch gave back all that was free, and tried again; `None` for other allocators.
    pub retries: Option<u64>,
    /// Most that was mapped.
    pub peak_bytes: u64,
    /// The step of that, from 1.
    pub peak_step: usize,
    /// Its phase, if it has one.
    pub peak_phase: Option<String>,
    /// What was live then.
    pub peak_live_bytes: u64,
    /// What stays mapped at the end.
    pub held_bytes: u64,
    /// What is live at the end.
    pub live_bytes: u64,
    /// The step that failed, from 1.
    pub failed_step: Option<usize>,
    /// What it asked for.
    pub asked_bytes: Option<u64>,
}

impl Row {
    pub(super) fn of(trace: &Trace, run: &Run, needs_bytes: Option<u64>) -> Self {
        Self {
            setup: run.setup.to_string(),
            typed: run.setup.typed(),
            verdict: Verdict::of(trace, run),
            needs_bytes,
            retries: run.retries,
            peak_bytes: run.peak.mapped_bytes,
            peak_step: run.peak.step + 1,
            peak_phase: trace.phase_at(run.peak.step).map(str::to_owned),
            peak_live_bytes: run.peak.live_bytes,
            held_bytes: run.held_bytes,
            live_bytes: run.live_bytes,
            failed_step: run.failure.map(|failure| failure.step + 1),
            asked_bytes: run.failure.map(|failure| failure.asked_bytes),
        }
    }

    /// Whether both are of one allocator, by its name before the settings.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.setup.split(':').next() == other.setup.split(':').next()
    }

    pub(super) fn fits(&self) -> bool {
        self.verdict != Verdict::DoesNotFit
    }
}
