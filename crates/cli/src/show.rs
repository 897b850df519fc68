//! Reports for people.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use poorwill::{ByteSize, Release, SleepReport, WakeReport};

use crate::nap::{Cycle, Holding, NapReport};

/// A nap as a table: a row per step, what the device and the host hold after it, and what happened.
pub(crate) fn nap(report: &NapReport) -> String {
    let mut table = Table::new();
    table
        .load_style(UTF8_FULL_CONDENSED)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(width());
    table.set_header(["step", "seconds", "on device", "on host", "what happened"]);
    let model = format!(
        "{} in {}; {}",
        count(report.tensors, "tensor"),
        count(report.files, "file"),
        rate(report.bytes, report.load_s)
    );
    row(&mut table, "load", report.load_s, report.loaded, &model);
    for (number, cycle) in (1..).zip(&report.cycles) {
        row(&mut table, &format!("sleep {number}"), cycle.sleep.seconds, cycle.asleep, &slept(&cycle.sleep));
        row(&mut table, &format!("wake {number}"), cycle.wake.seconds, cycle.awake, &woke(cycle));
    }
    for column in table.column_iter_mut().skip(1).take(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!("{} on {}\n{table}\n{}\n", ByteSize(report.bytes), report.device, verdict(report))
}

/// That of the terminal, within what reads well.
fn width() -> u16 {
    terminal_size::terminal_size().map_or(100, |(width, _)| width.0.clamp(60, 120))
}

fn row(table: &mut Table, step: &str, seconds: f64, after: Holding, what: &str) {
    let device = ByteSize(after.device_bytes).to_string();
    let host = ByteSize(after.host_bytes).to_string();
    table.add_row([step, &format!("{seconds:.3}"), &device, &host, what]);
}

fn slept(sleep: &SleepReport) -> String {
    let known = match sleep.release {
        Release::Confirmed => "confirmed",
        Release::Ledger => "by our ledger",
        Release::Shortfall => "not all that was planned",
    };
    let mut what = vec![format!("{} given back ({known})", ByteSize(sleep.released_bytes))];
    push(&mut what, sleep.copied_bytes, "copied to the host");
    push(&mut what, sleep.unchanged_bytes, "unchanged, not copied again");
    push(&mut what, sleep.discarded_bytes, "dropped");
    what.join("; ")
}

fn woke(cycle: &Cycle) -> String {
    let wake: &WakeReport = &cycle.wake;
    let mut what = Vec::new();
    push(&mut what, wake.copied_bytes, "copied back");
    push(&mut what, wake.verified_bytes, "verified by digest");
    push(&mut what, wake.zeroed_bytes, "zeroed");
    what.extend(cycle.reload_s.map(|seconds| format!("weights read again in {seconds:.2} s")));
    what.push(if cycle.verified { "same as the files" } else { "NOT the same as the files" }.into());
    what.join("; ")
}

fn push(what: &mut Vec<String>, bytes: u64, verb: &str) {
    if bytes > 0 {
        what.push(format!("{} {verb}", ByteSize(bytes)));
    }
}

fn verdict(report: &NapReport) -> String {
    match &report.mismatch {
        None => {
            let when = if report.cycles.len() == 1 { "the wake" } else { "every wake" };
            let what = if report.tensors == 1 {
                "the tensor is where it was loaded, with the bytes of its file".to_owned()
            } else {
                format!(
                    "all {} tensors are where they were loaded, with the bytes of their files",
                    report.tensors
                )
            };
            format!("Verified after {when}: {what}.")
        }
        Some(mismatch) => format!("FAILED: {mismatch}."),
    }
}

fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// `1.20 GiB/s`. Rounding a figure for display is what floats are for.
#[allow(clippy::cast_precision_loss)]
fn rate(bytes: u64, seconds: f64) -> String {
    format!("{:.2} GiB/s", bytes as f64 / f64::from(1 << 30) / seconds.max(1e-9))
}
