//! What sleeping and waking cost: a row for each limit and each step, with the part of its limit that it reached.

use comfy_table::{CellAlignment, Table};
use poorwill::cycle::{Cycle, CycleReport, Dropping, Limits, Spread};

use super::{count, rate, size, table};

/// The report as a table.
pub(crate) fn cycles(report: &CycleReport) -> String {
    let mut table = table(["step", "seconds", "beside its limit", "what happened"]);
    limits(&mut table, &report.limits);
    let load = [count(report.tensors, "tensor")].into_iter().chain(rate(report.bytes, report.load_s));
    row(&mut table, "load", report.load_s, "", &load.collect::<Vec<_>>().join("; "));
    let mut before = 0;
    for cycle in &report.cycles {
        if cycle.cycle > before + 1 {
            table.add_row(["…"]);
        }
        before = cycle.cycle;
        add_cycle(&mut table, cycle);
    }
    if let Some(dropping) = &report.dropping {
        add_dropping(&mut table, dropping);
    }
    for column in table.column_iter_mut().skip(1).take(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!(
        "{} on {} ({})\n{table}\n{}{}\n{}\n",
        size(report.bytes),
        report.device,
        report.device_name,
        spreads(report),
        held(report),
        verdict(report)
    )
}

fn limits(table: &mut Table, limits: &Limits) {
    let bytes = size(limits.link_bytes);
    for (step, bytes_per_s) in
        [("link to device", limits.to_device_bytes_per_s), ("link to host", limits.to_host_bytes_per_s)]
    {
        let gib_per_s = bytes_per_s / f64::from(1 << 30);
        table.add_row([step, "", "", &format!("{gib_per_s:.2}\u{a0}GiB/s with {bytes} of pinned memory")]);
    }
    let pieces = format!(
        "{} × {} and {} × {}, driver alone",
        limits.chunks,
        size(limits.chunk_bytes),
        limits.granules,
        size(limits.granule_bytes)
    );
    row(table, "bare bring-in", limits.bring_in_s, "", &format!("create, map and open {pieces}"));
    row(table, "bare give-back", limits.give_back_s, "", &format!("unmap and release {pieces}"));
}

fn add_cycle(table: &mut Table, cycle: &Cycle) {
    let Cycle { cycle: number, sleep, wake, .. } = cycle;
    let slept = format!("{} given back; {} copied", size(sleep.released_bytes), size(sleep.copied_bytes));
    row(table, &format!("sleep {number}"), cycle.sleep_s, "", &slept);
    let compared = match cycle.verified {
        Some(true) => "; every byte compared",
        Some(false) => "; NOT the same bytes",
        None => "",
    };
    let woke = format!(
        "{} copied back; {:.3}\u{a0}s without verifying{compared}",
        size(wake.copied_bytes),
        cycle.wake_without_verify_s
    );
    let reached = format!("{:.0}\u{a0}% of the link", cycle.wake_link_ratio * 100.0);
    row(table, &format!("wake {number}"), cycle.wake_s, &reached, &woke);
}

fn add_dropping(table: &mut Table, dropping: &Dropping) {
    let best = format!("quickest of {}, nothing copied", dropping.cycles.len());
    for (step, seconds, ratio) in [
        ("drop", dropping.drop_s, dropping.drop_ratio),
        ("wake empty", dropping.wake_empty_s, dropping.wake_empty_ratio),
    ] {
        row(table, step, seconds, &format!("{ratio:.2}× bare"), &best);
    }
}

fn row(table: &mut Table, step: &str, seconds: f64, beside: &str, what: &str) {
    // Calls of the driver alone take less than a millisecond on some devices.
    table.add_row([step, &format!("{seconds:.4}"), beside, what]);
}

fn spreads(report: &CycleReport) -> String {
    let spread = |what: &str, spread: Option<Spread>| {
        let Some(Spread { min, median, max }) = spread else { return String::new() };
        format!("{what}: {min:.4} to {max:.4} s, median {median:.4} s.\n")
    };
    let cycles = count(usize::try_from(report.cycle_count).unwrap_or(usize::MAX), "cycle");
    [
        spread(&format!("Sleep over {cycles}"), report.sleep_s),
        spread("Wake", report.wake_s),
        spread("Wake without verifying", report.wake_without_verify_s),
    ]
    .concat()
}

fn held(report: &CycleReport) -> String {
    let memory = &report.memory;
    let change = |what: &str, from: Option<u64>, to: Option<u64>| {
        let known = |bytes: Option<u64>| bytes.map_or_else(|| "–".into(), size);
        format!("{what} {} → {}", known(from), known(to))
    };
    let (first, last) = (memory.after_first, memory.after);
    [
        change(
            "Held from the first cycle to the last: device free",
            Some(first.device_free_bytes),
            Some(last.device_free_bytes),
        ),
        change("process", first.process_resident_bytes, last.process_resident_bytes),
        change("backups", Some(first.backup_bytes), Some(last.backup_bytes)),
    ]
    .join(", ")
        + "."
}

fn verdict(report: &CycleReport) -> String {
    match &report.mismatch {
        None => format!("Verified: {}, same addresses, same bytes.", count(report.tensors, "tensor")),
        Some(mismatch) => format!("FAILED: {mismatch}."),
    }
}
