//! Report of `verify`: a row for each step.

use comfy_table::{CellAlignment, Table};
use poorwill::{ByteSize, Release, SleepReport, WakeReport};
use poorwill_bench::verify::{Hibernation, PoolMemory, Prepared, VerifyCycle, VerifyReport};

use crate::text::{count, push, rate, size, table};

/// With the memory after each step.
pub(crate) fn text(report: &VerifyReport) -> String {
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
    push(&mut what, sleep.shared_backup_bytes, "taken by backups from the same memory");
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
