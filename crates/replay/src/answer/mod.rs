//! Whether a load fits, in words: which setups fit, where the others fail, what each needs, and what to do.

mod holders;
mod needs;
mod recorded;
mod recorded_card;
mod sentence;
mod verdict;

use ::poorwill::ByteSize;

use crate::claim;
use crate::replay::{ReplayError, Run};
use crate::trace::Trace;

pub use self::holders::{Holder, holders};
pub use self::verdict::{Answer, Row, Verdict};

/// What these runs of a trace say.
///
/// # Errors
/// Of replays that look for the smallest card.
pub fn answer(trace: &Trace, runs: &[Run]) -> Result<Answer, ReplayError> {
    let needs = needs::needs(trace, runs)?;
    let mut rows: Vec<Row> =
        runs.iter().zip(&needs).map(|(run, needs_bytes)| Row::of(trace, run, *needs_bytes)).collect();
    rows.sort_by_key(|row| (!row.fits(), row.needs_bytes.unwrap_or(row.peak_bytes)));
    let recorded = trace.recorded.as_ref();
    let recorded_peak_bytes = recorded.and_then(|recorded| recorded.mapped_bytes.iter().copied().max());
    let first = runs.first();
    let seen_steps = |run: &Run| run.failure.map_or(run.peak.step + 1, |failure| failure.step);
    let mut answer = Answer {
        verdict: first.map_or(Verdict::DoesNotFit, |run| Verdict::of(trace, run)),
        sentence: String::new(),
        advice: Vec::new(),
        setup: first.map(|run| run.setup.to_string()).unwrap_or_default(),
        live_peak_bytes: claim::peak_with(&trace.claims, &trace.live_bytes()).1,
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
    if let Some((run, card)) = first.zip(trace.card) {
        answer.notes.extend(recorded_card::note(trace, run, card)?);
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
