//! What the page and the chart have in common: lines, the axis, and text.

use crate::replay::Run;

/// Text between tags, or in an attribute.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Which colour and dash the lines of these runs have. 0 is Poorwill's own.
pub(super) fn looks(runs: &[Run]) -> Vec<usize> {
    let mut others = (1..LOOKS).cycle();
    let is_ours = |run: &Run| run.setup.kind() == crate::allocators::AllocatorKind::Poorwill;
    runs.iter().map(|run| if is_ours(run) { 0 } else { others.next().unwrap_or(1) }).collect()
}

/// How many kinds of lines there are.
const LOOKS: usize = 8;

/// The end of the vertical axis, and whether the card's usable bytes are on it. They are not if curves would be flat.
pub(super) fn ceiling(highest_bytes: u64, usable_bytes: u64) -> (u64, bool) {
    const FLAT: u64 = 3;
    let is_shown = usable_bytes <= highest_bytes.saturating_mul(FLAT);
    let highest = if is_shown { highest_bytes.max(usable_bytes) } else { highest_bytes };
    (highest.max(1), is_shown)
}
