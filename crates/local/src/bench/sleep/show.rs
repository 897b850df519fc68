//! Report of `bench sleep`: a row for each limit and each step, with its ratio to the limit.

use comfy_table::{CellAlignment, Table};
use poorwill_bench::Spread;
use poorwill_bench::sleep::DiskCycle;
use poorwill_bench::sleep::{CycleKind, LimitRatio, Limits, SleepBenchReport};

use crate::text::{count, lines, rate, rate_of, size, table};

pub(crate) fn sleep(report: &SleepBenchReport) -> String {
    let mut table = table(["step", "seconds", "÷ limit", "aim", "what happened"]);
    limits(&mut table, report);
    steps(&mut table, report);
    for column in table.column_iter_mut().skip(1).take(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    [
        format!("{} on {} ({})\n{table}\n", size(report.bytes), report.device, report.device_name),
        explained(report),
        spreads(report),
        backups(report),
        disk(report),
        memory(report),
        verdict(report),
    ]
    .concat()
}

fn limits(table: &mut Table, report: &SleepBenchReport) {
    let Limits { link_bytes, digest_bytes, pin_bytes, .. } = report.limits;
    let limits = &report.limits;
    let to = |what: &str, bytes_per_s: f64, how: String| {
        [
            what.to_owned(),
            String::new(),
            String::new(),
            String::new(),
            format!("{} {how}", rate_of(bytes_per_s)),
        ]
    };
    let kind = if limits.pinned { "pinned" } else { "pageable" };
    let pinned = format!("with {} of {kind} memory", size(link_bytes));
    table.add_row(to("link to device", limits.to_device_bytes_per_s, pinned.clone()));
    table.add_row(to("link to host", limits.to_host_bytes_per_s, pinned));
    let compared = format!("of device memory, by digests of {}", size(digest_bytes));
    table.add_row(to("reading", limits.digest_bytes_per_s, compared));
    table.add_row(to(
        "host memory",
        limits.pin_bytes_per_s,
        format!("allocated, {} at once", size(pin_bytes)),
    ));
    let handles = format!("the same in {}, driver alone", count(limits.handles, "handle"));
    row(table, "driver map", limits.map_s, None, &format!("create, map and set access: {handles}"));
    row(table, "driver unmap", limits.unmap_s, None, &format!("unmap and release: {handles}"));
}

fn steps(table: &mut Table, report: &SleepBenchReport) {
    let load = [count(report.tensors, "tensor")].into_iter().chain(rate(report.bytes, report.load_s));
    row(table, "load", report.load_s, None, &load.collect::<Vec<_>>().join("; "));
    let (ratios, copied) = (&report.ratios, &report.copied_bytes);
    let mut sleep = |step: &str, seconds: Option<f64>, copied: Option<u64>, ratio, what: &str| {
        let Some(seconds) = seconds else { return };
        let copied = copied.map(|bytes| format!("{} copied; ", size(bytes))).unwrap_or_default();
        row(table, step, seconds, ratio, &format!("{copied}{what}"));
    };
    let slower = "limit: allocating host memory, or the link";
    sleep("first sleep", report.first_sleep_s, copied.first, ratios.first_sleep, slower);
    let prepare_s = report.prepare.as_ref().map(|prepare| prepare.seconds);
    let prepared = report.prepare.as_ref().map(|prepare| prepare.copied_bytes);
    sleep("prepare", prepare_s, prepared, None, "in the background");
    let as_clean = "limit: as for a clean sleep";
    sleep("prepared sleep", report.prepared_sleep_s, copied.prepared, ratios.prepared_sleep, as_clean);
    let clean = format!(
        "median of {}; limit: a drop, reading all at 0.7 of its speed, 5\u{a0}ms",
        report.clean_cycles
    );
    sleep("clean sleep", report.clean_sleep_s, copied.clean, ratios.clean_sleep, &clean);
    let part = report.cycle(CycleKind::Clean).map(|cycle| cycle.wake.verified_bytes).unwrap_or_default();
    // Only a GPU rests.
    let rested = if report.device == "host" { "" } else { ", a moment after the sleep" };
    let wake = format!(
        "median of {}{rested}; {} verified by digest; limit: the link",
        report.rested_cycles(),
        size(part)
    );
    sleep("wake", report.wake_s, copied.wake, ratios.wake, &wake);
    let granules = count(usize::try_from(report.changed_granules).unwrap_or(usize::MAX), "granule");
    let changed = format!(
        "{} written before: {granules}; limit: a clean sleep, these over the link, 5\u{a0}ms",
        report.changed_fraction
    );
    sleep("changed sleep", report.changed_sleep_s, copied.changed, ratios.changed_sleep, &changed);
    let whole = report.cycle(CycleKind::Changed).map(|cycle| (cycle.wake_s, &cycle.wake));
    let all = whole.map(|(_, wake)| format!("{} verified by digest", size(wake.verified_bytes)));
    let (whole_s, whole_copied) = (whole.map(|(wake_s, _)| wake_s), whole.map(|(_, wake)| wake.copied_bytes));
    sleep("wake, all verified", whole_s, whole_copied, None, &all.unwrap_or_default());
    let best = report.dropping.as_ref().map_or(0, |dropping| dropping.cycles.len());
    let best = |limit: &str| format!("fastest of {best}; limit: {limit}");
    sleep("drop", report.drop_s, None, ratios.drop, &best("driver unmap"));
    sleep("wake empty", report.wake_empty_s, None, ratios.wake_empty, &best("driver map"));
}

fn row(table: &mut Table, step: &str, seconds: f64, ratio: Option<LimitRatio>, what: &str) {
    let times = |ratio: f64| format!("{ratio:.2}×");
    let (ratio, aim) = ratio
        .map(|ratio| (times(ratio.ratio), format!("≤\u{a0}{}", times(ratio.ratio_aim))))
        .unwrap_or_default();
    // Driver calls take less than a millisecond on some devices.
    table.add_row([step, &format!("{seconds:.4}"), &ratio, &aim, what]);
}

fn explained(report: &SleepBenchReport) -> String {
    if report.fast_digests {
        return String::new();
    }
    lines(
        "This device has no fast digests: nothing is compared before a sleep, and everything is copied each time.",
    )
}

fn spreads(report: &SleepBenchReport) -> String {
    let Some(spreads) = report.spreads else { return String::new() };
    let spread = |what: &str, spread: Spread| {
        let Spread { min, median, max } = spread;
        format!("{what}: {min:.4} to {max:.4} s, median {median:.4} s.\n")
    };
    let cycles = |number: u32| count(usize::try_from(number).unwrap_or(usize::MAX), "clean cycle");
    [
        spread(&format!("Sleep over {}", cycles(report.clean_cycles)), spreads.sleep_s),
        spread(&format!("Wake over {}", cycles(report.rested_cycles())), spreads.wake_s),
        spread("Wake without verifying", spreads.wake_without_verify_s),
        spread("Other wakes, right after the sleep", spreads.wake_at_once_s),
    ]
    .concat()
}

fn backups(report: &SleepBenchReport) -> String {
    let (Some(raw), Some(stored), Some(ratio)) =
        (report.copied_bytes.first, report.stored_bytes, report.stored_ratio)
    else {
        return String::new();
    };
    let read = report.read_bytes.map(|bytes| format!("; a wake reads {}", size(bytes))).unwrap_or_default();
    let contents = report.contents;
    lines(&format!("Backups: {} of {contents} stored in {} ({ratio:.3}×){read}.", size(raw), size(stored)))
}

fn disk(report: &SleepBenchReport) -> String {
    let Some(on_disk) = &report.on_disk else { return String::new() };
    let best =
        |figure: fn(&DiskCycle) -> f64| on_disk.cycles.iter().map(figure).fold(f64::INFINITY, f64::min);
    let (wake_s, plain_s) = (best(|cycle| cycle.wake_s), best(|cycle| cycle.plain_read_s));
    let read_bytes = on_disk.cycles.last().map_or(0, |cycle| cycle.read_bytes);
    let because = |what: &str, because: &Option<String>| {
        because.as_ref().map(|because| format!("; not {what}: {because}")).unwrap_or_default()
    };
    let info = &on_disk.disk;
    lines(&format!(
        "From disk: a wake reads {} in {wake_s:.3} s, by {}{}{}. A plain reader of the file takes {plain_s:.3} s; the \
         wake has {:.2}× its rate.",
        size(read_bytes),
        info.io,
        because("io_uring", &info.io_because),
        because("past the page cache", &info.direct_because),
        on_disk.read_ratio,
    ))
}

fn memory(report: &SleepBenchReport) -> String {
    let (first, last) = (report.memory.after_first, report.memory.after);
    let change = |what: &str, from: Option<u64>, to: Option<u64>| {
        let known = |bytes: Option<u64>| bytes.map_or_else(|| "–".into(), size);
        format!("{what} {} → {}", known(from), known(to))
    };
    let memory = [
        change(
            "Held from the first clean cycle to the last: device free",
            Some(first.device_free_bytes),
            Some(last.device_free_bytes),
        ),
        change("process", first.process_resident_bytes, last.process_resident_bytes),
        change("backups", Some(first.backup_bytes), Some(last.backup_bytes)),
    ]
    .join(", ");
    let host = report.host_bytes.filter(|bytes| *bytes > 0);
    let host = host.map(|bytes| format!("; host memory for them {}", size(bytes))).unwrap_or_default();
    lines(&format!("{memory}{host}."))
}

fn verdict(report: &SleepBenchReport) -> String {
    match &report.mismatch {
        None => format!("Verified: {}, same addresses, same bytes.\n", count(report.tensors, "tensor")),
        Some(mismatch) => format!("FAILED: {mismatch}.\n"),
    }
}
