//! Reports as text for people.

mod doctor;
#[cfg(target_os = "linux")]
pub(crate) mod fleet;
#[cfg(target_os = "linux")]
pub(crate) mod hibernate;
#[cfg(target_os = "linux")]
mod load;
#[cfg(target_os = "linux")]
mod offload;
mod replay;
#[cfg(target_os = "linux")]
pub(crate) mod rotate;
mod sleep;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, ContentArrangement, Table};
use poorwill::{ByteSize, Release, SleepReport, WakeReport};
use poorwill_bench::churn::ChurnReport;
use poorwill_bench::verify::{Hibernation, PoolMemory, Prepared, VerifyCycle, VerifyReport};

pub(crate) use self::doctor::doctor;
#[cfg(target_os = "linux")]
pub(crate) use self::load::load;
#[cfg(target_os = "linux")]
pub(crate) use self::offload::offload;
pub(crate) use self::replay::replay;
pub(crate) use self::sleep::sleep;

const GIB: f64 = 1_073_741_824.0;

/// With the memory after each step.
pub(crate) fn verify(report: &VerifyReport) -> String {
    let mut table = table(["step", "seconds", "on device", "on host", "what happened"]);
    let tensors = format!("{} in {}", count(report.tensors, "tensor"), count(report.files, "file"));
    let model = [tensors].into_iter().chain(rate(report.bytes, report.load_s)).collect::<Vec<_>>().join("; ");
    row(&mut table, "load", report.load_s, report.loaded, &model);
    if let Some(Prepared { report, held }) = &report.prepared {
        let mut what = Vec::new();
        push(&mut what, report.copied_bytes, "backed up in the background");
        if report.copied_bytes == 0 {
            what.push("nothing to back up ahead of the sleep".into());
        }
        row(&mut table, "prepare", report.seconds, *held, &what.join("; "));
    }
    for (number, cycle) in (1..).zip(&report.cycles) {
        row(&mut table, &format!("sleep {number}"), cycle.sleep.seconds, cycle.asleep, &slept(&cycle.sleep));
        if let Some(hibernation) = &cycle.hibernation {
            let seconds = hibernation.hibernate_s + hibernation.resume_s;
            row(&mut table, &format!("hibernate {number}"), seconds, cycle.asleep, &hibernated(hibernation));
        }
        row(&mut table, &format!("wake {number}"), cycle.wake.seconds, cycle.awake, &woke(cycle));
        if let Some(seconds) = cycle.reload_s {
            let what = format!("weights read from the files again; {}", compared(cycle));
            row(&mut table, &format!("reload {number}"), seconds, cycle.awake, &what);
        }
    }
    for column in table.column_iter_mut().skip(1).take(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let beside = match report.kv_cache_bytes {
        0 => String::new(),
        bytes => format!(" and a key-value cache of {}", ByteSize(bytes)),
    };
    format!(
        "{} of weights{beside} on {}\n{table}\n{}\n",
        ByteSize(report.bytes),
        report.device,
        verdict(report)
    )
}

/// Two rows for each load, at its peak and at its end; failures below.
pub(crate) fn churn(reports: &[ChurnReport]) -> String {
    let mut table = table(["load", "moment", "live", "mapped", "ratio", "what happened"]);
    for report in reports {
        let created: Vec<String> = report.created_bytes.iter().map(|bytes| size(*bytes)).collect();
        let what = format!(
            "seed {}: {} created in {:.3}\u{a0}s",
            report.seed,
            created.join(", then "),
            report.seconds
        );
        let [live, mapped] = [report.peak_live_bytes, report.peak_mapped_bytes].map(size);
        table.add_row([report.load.name(), "peak", &live, &mapped, &ratio(report.peak_ratio), &what]);
        let end = if report.failed.is_some() { "failed, then trimmed" } else { "loaded, then trimmed" };
        let [live, held] = [report.live_bytes, report.held_bytes].map(size);
        table.add_row(["", "end", &live, &held, &ratio(report.held_ratio), end]);
    }
    for column in table.column_iter_mut().skip(2).take(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let failed = reports.iter().filter_map(|report| Some((report.load, report.failed.as_ref()?)));
    let failed: String = failed.map(|(load, failed)| format!("FAILED: {load}: {failed}.\n")).collect();
    format!("{table}\n{failed}")
}

/// `1.028×`, or a dash.
fn ratio(ratio: Option<f64>) -> String {
    ratio.map_or("–".into(), |ratio| format!("{ratio:.3}×"))
}

/// An empty table, as wide as it may be.
fn table(header: impl IntoIterator<Item = impl Into<Cell>>) -> Table {
    let mut table = Table::new();
    table
        .load_style(UTF8_FULL_CONDENSED)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(width())
        .set_header(header.into_iter().map(Into::into).collect::<Vec<Cell>>());
    table
}

/// Width of the terminal, within readable bounds.
fn width() -> u16 {
    terminal_size::terminal_size().map_or(100, |(width, _)| width.0.clamp(60, 120))
}

/// A sentence wrapped for the terminal; one line without a terminal.
fn lines(sentence: &str) -> String {
    let Some((terminal_size::Width(width), _)) = terminal_size::terminal_size() else {
        return format!("{sentence}\n");
    };
    wrapped(sentence, usize::from(width.clamp(60, 120)))
}

fn wrapped(sentence: &str, width: usize) -> String {
    let (mut text, mut column) = (String::new(), 0);
    for word in sentence.split(' ') {
        let letters = word.chars().count();
        if column > 0 && column + 1 + letters > width {
            text.push('\n');
            column = 0;
        } else if column > 0 {
            text.push(' ');
            column += 1;
        }
        text.push_str(word);
        column += letters;
    }
    text.push('\n');
    text
}

fn row(table: &mut Table, step: &str, seconds: f64, after: PoolMemory, what: &str) {
    let (device, host) = (size(after.device_bytes), size(after.host_bytes));
    table.add_row([step, &format!("{seconds:.3}"), &device, &host, what]);
}

fn hibernated(hibernation: &Hibernation) -> String {
    let known = |bytes: Option<u64>| bytes.map_or_else(|| "an unknown size".to_owned(), size);
    format!(
        "the process left {} of {} on its devices; {:.3}\u{a0}s off, {:.3}\u{a0}s back",
        known(hibernation.left_bytes),
        known(hibernation.held_bytes),
        hibernation.hibernate_s,
        hibernation.resume_s
    )
}

fn slept(sleep: &SleepReport) -> String {
    let release = match sleep.release {
        Release::Confirmed => "confirmed",
        Release::Ledger => "by the ledger",
        Release::Shortfall => "less than planned",
        other => other.name(),
    };
    let mut what = vec![format!("{} released ({release})", size(sleep.released_bytes))];
    let copied = if sleep.fast_digests {
        "copied to the host"
    } else {
        "copied to the host, uncompared: no fast digests here"
    };
    push(&mut what, sleep.copied_bytes, copied);
    push(&mut what, sleep.unchanged_bytes, "unchanged, not copied again");
    push(&mut what, sleep.unchecked_bytes, "of it not compared");
    push(&mut what, sleep.discarded_bytes, "dropped");
    what.join("; ")
}

fn woke(cycle: &VerifyCycle) -> String {
    let wake: &WakeReport = &cycle.wake;
    let mut what = Vec::new();
    push(&mut what, wake.copied_bytes, "copied back");
    push(&mut what, wake.verified_bytes, "verified by digest");
    push(&mut what, wake.zeroed_bytes, "zeroed");
    if cycle.reload_s.is_none() {
        what.push(compared(cycle).into());
    } else {
        what.push("weights undefined".into());
    }
    what.join("; ")
}

fn compared(cycle: &VerifyCycle) -> &'static str {
    if cycle.verified { "same as the files" } else { "NOT the same as the files" }
}

/// A size with a space that does not break.
fn size(bytes: u64) -> String {
    ByteSize(bytes).to_string().replace(' ', "\u{a0}")
}

fn push(what: &mut Vec<String>, bytes: u64, verb: &str) {
    if bytes > 0 {
        what.push(format!("{} {verb}", size(bytes)));
    }
}

fn verdict(report: &VerifyReport) -> String {
    match &report.mismatch {
        None => {
            let when = if report.cycles.len() == 1 { "the wake" } else { "every wake" };
            let tensors = count(report.tensors, "tensor");
            format!("Verified after {when}: {tensors}, same addresses, same bytes as the files.")
        }
        Some(mismatch) => format!("FAILED: {mismatch}."),
    }
}

fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// `1.20 GiB/s`, if it rounds above zero.
#[allow(clippy::cast_precision_loss)]
fn rate(bytes: u64, seconds: f64) -> Option<String> {
    let bytes_per_s = bytes as f64 / seconds.max(1e-9);
    (bytes_per_s >= 0.01 * GIB).then(|| rate_of(bytes_per_s))
}

fn rate_of(bytes_per_s: f64) -> String {
    format!("{:.2}\u{a0}GiB/s", bytes_per_s / GIB)
}

#[test]
fn lines_are_wrapped_at_the_width() {
    assert_eq!(wrapped("Note: a b.", 60), "Note: a b.\n");
    assert_eq!(wrapped("one two three", 7), "one two\nthree\n");
    assert_eq!(wrapped("one two three", 6), "one\ntwo\nthree\n");
    assert_eq!(wrapped("incomprehensible a", 6), "incomprehensible\na\n");
}
