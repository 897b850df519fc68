//! What a replay says, as text.

use comfy_table::{ColumnConstraint, Table};
use poorwill_replay::answer::{Holder, Row, Verdict};

use poorwill_local::failure::CommandOutput;
use poorwill_local::text::{lines, size, table};

use super::report::{ReplayReport, Replayed};

const HOLDERS_MAX: usize = 5;

/// All of one trace, the answer first.
fn one(replayed: &Replayed) -> String {
    let answer = &replayed.answer;
    let of = if replayed.usable_bytes == replayed.total_bytes {
        String::new()
    } else {
        format!(" of {}", size(replayed.total_bytes))
    };
    let claimed = if answer.is_claimed { " or claimed" } else { "" };
    let mut text = format!(
        "{}: {} steps, {} live{claimed} at most, on {}{of}\n",
        replayed.name,
        replayed.steps,
        size(answer.live_peak_bytes),
        size(replayed.usable_bytes),
    );
    text.push_str(&lines(&answer.sentence));
    answer.advice.iter().for_each(|advice| text.push_str(&lines(advice)));
    text.push_str(&format!("{}\n", setups(&answer.rows)));
    text.push_str("what to type:\n");
    answer.rows.iter().for_each(|row| text.push_str(&format!("  {}\n    {}\n", row.setup, row.typed)));
    if answer.holders.iter().any(|holder| !holder.frames.is_empty()) {
        text.push_str("most memory then:\n");
        answer.holders.iter().take(HOLDERS_MAX).for_each(|holder| text.push_str(&held(holder)));
    }
    answer.notes.iter().for_each(|note| text.push_str(&lines(&format!("note: {note}"))));
    text
}

/// A setup per line, with its settings below it, so that none breaks.
fn setups(rows: &[Row]) -> Table {
    let mut table = table(["setup", "fits", "needs", "retries", "peak", "failed"]);
    for row in rows {
        let (kind, settings) = row.setup.split_once(':').unwrap_or((&*row.setup, ""));
        let settings = settings.split(',').filter(|setting| !setting.is_empty());
        let setup: String = settings.fold(kind.to_owned(), |text, setting| format!("{text}\n  {setting}"));
        let failed = row.failed_step.zip(row.asked_bytes);
        let failed = failed.map(|(step, bytes)| format!("{}\nstep {step}", size(bytes)));
        table.add_row([
            setup,
            verdict(row.verdict).to_owned(),
            row.needs_bytes.map_or_else(|| "–".to_owned(), size),
            row.retries.map_or_else(|| "–".to_owned(), |retries| retries.to_string()),
            format!("{}\n{}", size(row.peak_bytes), at(row)),
            failed.unwrap_or_default(),
        ]);
    }
    table.set_constraints([ColumnConstraint::ContentWidth; 6]);
    table
}

const fn verdict(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Fits => "yes",
        Verdict::FitsSoFar => "so far",
        Verdict::DoesNotFit => "no",
    }
}

fn at(row: &Row) -> String {
    match &row.peak_phase {
        Some(phase) => format!("{phase}, step {}", row.peak_step),
        None => format!("step {}", row.peak_step),
    }
}

fn held(holder: &Holder) -> String {
    let frames = if holder.shown.is_empty() { "not recorded".to_owned() } else { holder.shown.join(" < ") };
    format!("  {:>10}  {:>6}x  {frames}\n", size(holder.bytes), holder.blocks)
}

/// A line of each, then all of the worst.
fn several(traces: &[Replayed], worst: &Replayed) -> String {
    let mut table = table(["device", "fits", "needs", "live at most", "usable"]);
    for one in traces {
        let answer = &one.answer;
        table.add_row([
            one.name.clone(),
            verdict(answer.verdict).to_owned(),
            answer.needs_bytes.map_or_else(|| "–".to_owned(), size),
            size(answer.live_peak_bytes),
            size(one.usable_bytes),
        ]);
    }
    format!("{} devices, worst is {}:\n{}\n{table}\n", traces.len(), worst.name, one(worst))
}

impl CommandOutput for ReplayReport {
    const MISMATCH: &'static str = "it does not fit";
    const FAILED: u8 = 2;

    fn mismatch(&self) -> Option<&str> {
        self.mismatch()
    }

    fn code(&self) -> u8 {
        self.code()
    }

    fn text(&self) -> String {
        match (self.traces(), self.worst()) {
            ([_, _, ..], Some(worst)) => several(self.traces(), worst),
            (_, Some(worst)) => one(worst),
            (_, None) => String::new(),
        }
    }
}
