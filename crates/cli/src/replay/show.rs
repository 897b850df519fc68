//! What a replay says, as text.

use poorwill_replay::answer::{Holder, Row};

use poorwill_local::failure::CommandOutput;
use poorwill_local::text::{lines, size, table};

use super::report::{ReplayReport, Replayed};

const HOLDERS_MAX: usize = 5;
const FRAMES_MAX: usize = 3;

fn one(replayed: &Replayed) -> String {
    let answer = &replayed.answer;
    let mut table = table(["setup", "fits", "peak", "live then", "at", "held at the end", "failed"]);
    for row in &answer.rows {
        let fits = if row.fits { "yes" } else { "no" };
        let cells = [&*row.setup, fits, &size(row.peak_bytes), &size(row.peak_live_bytes), &at(row)];
        let held = if row.fits { size(row.held_bytes) } else { String::new() };
        let failed = row.failed_step.zip(row.asked_bytes);
        let failed =
            failed.map(|(step, bytes)| format!("{} at step {step}", size(bytes))).unwrap_or_default();
        table.add_row(cells.into_iter().map(str::to_owned).chain([held, failed]));
    }
    let mut text = format!(
        "{}: {} steps, {} live at most, on {} of {}\n",
        replayed.name,
        replayed.steps,
        size(answer.live_peak_bytes),
        size(replayed.usable_bytes),
        size(replayed.total_bytes)
    );
    text.push_str(&lines(&answer.sentence));
    text.push_str(&format!("{table}\n"));
    if answer.holders.iter().any(|holder| !holder.frames.is_empty()) {
        text.push_str("most memory then:\n");
        answer.holders.iter().take(HOLDERS_MAX).for_each(|holder| text.push_str(&held(holder)));
    }
    answer.notes.iter().for_each(|note| text.push_str(&lines(&format!("note: {note}"))));
    text
}

fn at(row: &Row) -> String {
    match &row.peak_phase {
        Some(phase) => format!("{phase}, step {}", row.peak_step),
        None => format!("step {}", row.peak_step),
    }
}

fn held(holder: &Holder) -> String {
    let frames = match &*holder.frames {
        [] => "not recorded".to_owned(),
        frames => frames.iter().take(FRAMES_MAX).cloned().collect::<Vec<_>>().join(" < "),
    };
    format!("  {:>10}  {:>6}x  {frames}\n", size(holder.bytes), holder.blocks)
}

impl CommandOutput for ReplayReport {
    const MISMATCH: &'static str = "it does not fit";

    fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    fn text(&self) -> String {
        self.traces.iter().map(one).collect::<Vec<_>>().join("\n")
    }
}
