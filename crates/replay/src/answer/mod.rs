//! Whether a load fits, in words: which setups fit, where the others fail, what each needs, and what to do.

mod holders;
mod needs;
mod recorded;
mod sentence;

use ::poorwill::ByteSize;
use serde::Serialize;

use crate::claim;
use crate::replay::{ReplayError, Run};
use crate::trace::Trace;

pub use self::holders::{Holder, holders};

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
    fn of(trace: &Trace, run: &Run) -> Self {
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
    fn of(trace: &Trace, run: &Run, needs_bytes: Option<u64>) -> Self {
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

    fn fits(&self) -> bool {
        self.verdict != Verdict::DoesNotFit
    }
}

/// What these runs of a trace say.
///
/// # Errors
/// Of replays that look for the smallest card.
pub fn answer(trace: &Trace, runs: &[Run]) -> Result<Answer, ReplayError> {
    let needs = needs::needs(trace, runs)?;
    let mut rows: Vec<Row> =
        runs.iter().zip(&needs).map(|(run, needs_bytes)| Row::of(trace, run, *needs_bytes)).collect();
    rows.sort_by_key(|row| (!row.fits(), row.needs_bytes.unwrap_or(u64::MAX)));
    let recorded = trace.recorded.as_ref();
    let recorded_peak_bytes = recorded.and_then(|recorded| recorded.mapped_bytes.iter().copied().max());
    let first = runs.first();
    let seen_steps = |run: &Run| run.failure.map_or(run.peak.step + 1, |failure| failure.step);
    let mut answer = Answer {
        verdict: first.map_or(Verdict::DoesNotFit, |run| Verdict::of(trace, run)),
        sentence: String::new(),
        advice: Vec::new(),
        setup: first.map(|run| run.setup.to_string()).unwrap_or_default(),
        live_peak_bytes: claim::most_with(&trace.claims, &trace.live_bytes()),
        needs_bytes: needs.first().copied().flatten(),
        is_claimed: !trace.claims.is_empty(),
        recorded_peak_bytes,
        rows,
        holders: first.map(|run| holders(trace, seen_steps(run))).unwrap_or_default(),
        notes: trace.notes.clone(),
    };
    if let (Some(recorded), Some(peak_bytes)) = (recorded, recorded_peak_bytes) {
        answer.notes.push(recorded::as_recorded(recorded, peak_bytes, runs));
    }
    let refused = recorded.and_then(|recorded| recorded.refused);
    if let Some(refusal) = refused.filter(|_| answer.verdict != Verdict::DoesNotFit) {
        let bytes = ByteSize(refusal.asked_bytes);
        answer
            .notes
            .push(format!("What was recorded had no {bytes} left. If a limit was the reason, say --budget."));
    }
    answer.sentence = sentence::sentence(trace, runs, &answer);
    answer.advice = sentence::advice(trace, runs, &answer);
    Ok(answer)
}
