//! Whether a load fits, in words: which setups fit, where the others fail, and what would make them fit.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use ::poorwill::ByteSize;
use serde::Serialize;

use crate::card::Card;
use crate::replay::{ReplayError, Run, replay};
use crate::trace::{Recorded, Step, Trace};

/// A search for the smallest card ends when it is this exact.
const EXACT_BYTES: u64 = 64 << 20;
const HOLDERS_MAX: usize = 20;
/// Mapped memory is the same that differs by this part of the peak at most.
const SAME: u64 = 50;
/// More than any device has.
const UNBOUNDED_BYTES: u64 = 1 << 42;
/// So many replays at most, and none for traces of more steps.
const SEARCHES: u32 = 24;
const SEARCHED_STEPS_MAX: usize = 200_000;

/// What the runs of one trace say together. The first run is the one that is asked about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Answer {
    /// Whether the first run fits.
    pub fits: bool,
    /// The answer.
    pub sentence: String,
    /// Most that was live at a time.
    pub live_peak_bytes: u64,
    /// The smallest memory that the first setup fits in; `None` if that was not looked for.
    pub needs_bytes: Option<u64>,
    /// Most that the recorder's own allocator had mapped; `None` if that is not known.
    pub recorded_peak_bytes: Option<u64>,
    /// Each run.
    pub rows: Vec<Row>,
    /// Who had most at the first run's end or peak, the largest first.
    pub holders: Vec<Holder>,
    /// What is not exact.
    pub notes: Vec<String>,
}

/// What one caller has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Holder {
    /// Its frames, the innermost first; empty if they are not known.
    pub frames: Vec<String>,
    /// Its live bytes.
    pub bytes: u64,
    /// Its live blocks.
    pub blocks: u64,
}

/// Who has what after so many steps, the largest first.
#[must_use]
pub fn holders(trace: &Trace, steps: usize) -> Vec<Holder> {
    let mut is_live = vec![false; trace.blocks.len()];
    for step in trace.steps.iter().take(steps) {
        let (number, lives) = match step {
            Step::Alloc(number) => (number, true),
            Step::Free(number) => (number, false),
            Step::EmptyCache => continue,
        };
        if let Some(live) = usize::try_from(*number).ok().and_then(|number| is_live.get_mut(number)) {
            *live = lives;
        }
    }
    let mut by_stack: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    for (block, _) in trace.blocks.iter().zip(&is_live).filter(|(_, live)| **live) {
        let (bytes, blocks) = by_stack.entry(block.stack).or_default();
        (*bytes, *blocks) = (*bytes + block.bytes, *blocks + 1);
    }
    let frames = |stack: u32| usize::try_from(stack).ok().and_then(|stack| trace.stacks.get(stack)).cloned();
    let holder =
        |(stack, (bytes, blocks))| Holder { frames: frames(stack).unwrap_or_default(), bytes, blocks };
    let mut all: Vec<Holder> = by_stack.into_iter().map(holder).collect();
    all.sort_by(|one, other| (other.bytes, &one.frames).cmp(&(one.bytes, &other.frames)));
    all
}

/// One run, in a line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The allocator, as it is said on the command line.
    pub setup: String,
    /// Whether it fits.
    pub fits: bool,
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

/// What these runs of a trace say.
///
/// # Errors
/// Of replays that look for the smallest card.
pub fn answer(trace: &Trace, runs: &[Run]) -> Result<Answer, ReplayError> {
    let live = trace.live_bytes();
    let (live_peak_step, live_peak_bytes) = live
        .iter()
        .copied()
        .enumerate()
        .max_by_key(|(step, bytes)| (*bytes, usize::MAX - step))
        .unwrap_or_default();
    let rows: Vec<Row> = runs.iter().map(|run| row(trace, run)).collect();
    let needs_bytes = match runs.first() {
        Some(run) if trace.steps.len() <= SEARCHED_STEPS_MAX => smallest(trace, run, live_peak_bytes)?,
        Some(run) if run.fits() => Some(run.peak.mapped_bytes),
        _ => None,
    };
    let recorded = trace.recorded.as_ref();
    let recorded_peak_bytes = recorded.and_then(|recorded| recorded.mapped_bytes.iter().copied().max());
    let mut answer = Answer {
        fits: runs.first().is_some_and(Run::fits),
        sentence: String::new(),
        live_peak_bytes,
        needs_bytes,
        recorded_peak_bytes,
        rows,
        holders: runs
            .first()
            .map(|run| holders(trace, run.failure.map_or(run.peak.step + 1, |failure| failure.step)))
            .unwrap_or_default()
            .into_iter()
            .take(HOLDERS_MAX)
            .collect(),
        notes: trace.notes.clone(),
    };
    if let (Some(recorded), Some(peak_bytes)) = (recorded, recorded_peak_bytes) {
        answer.notes.push(as_recorded(recorded, peak_bytes, runs));
    }
    if let (true, Some((_, bytes))) = (answer.fits, recorded.and_then(|recorded| recorded.failed)) {
        let bytes = ByteSize(bytes);
        answer
            .notes
            .push(format!("What was recorded had no {bytes} left. If a limit was the reason, say --budget."));
    }
    answer.sentence = sentence(trace, runs, &answer, live_peak_step);
    Ok(answer)
}

fn row(trace: &Trace, run: &Run) -> Row {
    Row {
        setup: run.setup.to_string(),
        fits: run.fits(),
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

/// What the recorder's allocator had mapped, and which setups do the same, step by step. It may have had other settings
/// meanwhile than those that are known.
fn as_recorded(recorded: &Recorded, peak_bytes: u64, runs: &[Run]) -> String {
    let mut text = format!("What was recorded had {} mapped at most", ByteSize(peak_bytes));
    let near: Vec<(u64, String)> = runs
        .iter()
        .filter_map(|run| Some((farthest(recorded, peak_bytes, run)?, format!("`{}`", run.setup))))
        .filter(|(bytes, _)| bytes.saturating_mul(SAME) <= peak_bytes)
        .collect();
    if let Some(nearest) = near.iter().map(|(bytes, _)| *bytes).min() {
        let setups: Vec<&str> =
            near.iter().filter(|(bytes, _)| *bytes == nearest).map(|(_, setup)| &**setup).collect();
        let _ = write!(text, ", step by step as {}", setups.join(" and "));
    }
    text + "."
}

/// How far a run is from what was recorded, where that is most. `None` if it ended before most of that was mapped.
fn farthest(recorded: &Recorded, peak_bytes: u64, run: &Run) -> Option<u64> {
    let first = recorded.mapped_bytes.first()?;
    // What lived before the recording was mapped before its first step.
    let both = recorded.mapped_bytes.iter().zip(&run.mapped_bytes).skip_while(|(had, _)| *had == first);
    let bytes = both.clone().map(|(had, has)| had.abs_diff(*has)).max()?;
    (both.map(|(had, _)| *had).max()? > peak_bytes / 2).then_some(bytes)
}

/// The least memory in which the setup of a run fits, to [`EXACT_BYTES`], as far as that rises with memory. `None` if it
/// does not fit in any.
fn smallest(trace: &Trace, run: &Run, live_peak_bytes: u64) -> Result<Option<u64>, ReplayError> {
    // Address space and thresholds follow the card, so that only a budget is tried.
    let fits = |budget_bytes: u64| {
        let total_bytes = run.card.total_bytes.max(UNBOUNDED_BYTES);
        let card = Card { total_bytes, taken_bytes: 0, budget_bytes: Some(budget_bytes) };
        replay(trace, &run.setup, card).map(|run| run.fits())
    };
    let (mut least, mut most) = if run.fits() {
        (live_peak_bytes, run.card.usable_bytes().min(run.peak.mapped_bytes.max(live_peak_bytes)))
    } else {
        (run.card.usable_bytes().max(live_peak_bytes), UNBOUNDED_BYTES)
    };
    if !fits(most)? {
        return Ok(run.fits().then(|| run.card.usable_bytes()));
    }
    for _ in 0..SEARCHES {
        if most.saturating_sub(least) <= EXACT_BYTES {
            break;
        }
        // Sizes far apart are halved by their ratio.
        let half = least + (most - least) / 2;
        let middle = if most / 4 > least { half.min(least.max(EXACT_BYTES) * 2) } else { half };
        if fits(middle)? {
            most = middle;
        } else {
            least = middle;
        }
    }
    Ok(Some(most))
}

fn sentence(trace: &Trace, runs: &[Run], answer: &Answer, live_peak_step: usize) -> String {
    let Some(run) = runs.first() else { return "There is nothing to replay with.".to_owned() };
    let usable = run.card.usable_bytes();
    let at = |step: usize| {
        let phase = trace.phase_at(step).map(|phase| format!(" of `{phase}`")).unwrap_or_default();
        format!("step {}{phase}", step + 1)
    };
    let size = ByteSize;
    let mut text = String::new();
    // Writing to a text cannot fail.
    let _ = match run.failure {
        None => write!(
            text,
            "It fits: `{}` maps {} at most, at {}, of {}.",
            run.setup,
            size(run.peak.mapped_bytes),
            at(run.peak.step),
            size(usable)
        ),
        Some(failure) => write!(
            text,
            "It does not fit: at {} `{}` has no {} left of {}; {} are mapped, and {} of that live.",
            at(failure.step),
            run.setup,
            size(failure.asked_bytes),
            size(usable),
            size(failure.at.mapped_bytes),
            size(failure.at.live_bytes)
        ),
    };
    if run.fits() {
        return text;
    }
    let others: Vec<String> = runs[1..]
        .iter()
        .filter(|other| other.fits())
        .map(|other| format!("`{}` ({})", other.setup, size(other.peak.mapped_bytes)))
        .collect();
    let _ = match (others.is_empty(), answer.live_peak_bytes > usable) {
        (false, _) => write!(text, " These fit, with their peaks: {}.", others.join(", ")),
        (true, true) => write!(
            text,
            " No allocator can help: {} are live at {}, {} more than there are.",
            size(answer.live_peak_bytes),
            at(live_peak_step),
            size(answer.live_peak_bytes - usable)
        ),
        (true, false) => write!(text, " None of the setups that were tried fits."),
    };
    if let Some(needs) = answer.needs_bytes {
        let _ = write!(
            text,
            " With `{}` it needs {}, {} more.",
            run.setup,
            size(needs),
            size(needs.saturating_sub(usable))
        );
    }
    text
}
