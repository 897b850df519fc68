//! Which setups do what the recorder's allocator did.

use std::fmt::Write as _;

use ::poorwill::ByteSize;

use crate::replay::Run;
use crate::trace::Recorded;

/// Mapped memory is the same that differs by this part of the peak at most.
const SAME: u64 = 50;

/// What the recorder's allocator had mapped, and which setups do the same, step by step. It may have had other settings
/// meanwhile than those that are known.
pub(super) fn as_recorded(recorded: &Recorded, peak_bytes: u64, runs: &[Run]) -> String {
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

/// How far a run is from what was recorded, where that is most. `None` if it ended before most of that was mapped, or
/// failed where the recorder's allocator did not.
fn farthest(recorded: &Recorded, peak_bytes: u64, run: &Run) -> Option<u64> {
    let first = recorded.mapped_bytes.first()?;
    let refused = recorded.refused.filter(|refusal| refusal.asked_bytes > 0).map(|refusal| refusal.step);
    if run.failure.is_some_and(|failure| failure.is_claim || Some(failure.step) != refused) {
        return None;
    }
    // What was refused was never mapped. It is a block that is freed at once.
    let is_refused = |step: usize| refused.is_some_and(|refused| (refused..refused + 2).contains(&step));
    let both = recorded.mapped_bytes.iter().zip(&run.mapped_bytes).enumerate();
    let both = both.filter(|(step, _)| !is_refused(*step)).map(|(_, both)| both);
    // What lived before the recording was mapped before its first step.
    let both = both.skip_while(|(had, _)| *had == first);
    let bytes = both.clone().map(|(had, has)| had.abs_diff(*has)).max()?;
    (both.map(|(had, _)| *had).max()? > peak_bytes / 2).then_some(bytes)
}
