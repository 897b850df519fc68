//! Report of `bench offload`: a row for each kind of pass.

use comfy_table::{CellAlignment, Table};
use poorwill_bench::offload::OffloadReport;

use crate::text::{count, lines, size, table};

pub(crate) fn offload(report: &OffloadReport) -> String {
    let mut table = table(["step", "seconds", "GiB/s", "what happened"]);
    rows(&mut table, report);
    for column in table.column_iter_mut().skip(1).take(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let layers = whole(report.layers);
    [
        format!(
            "{} in {} of {} on {} ({})\n{table}\n",
            size(report.host_bytes_asked),
            count(layers, "layer"),
            size(report.layer_bytes),
            report.device,
            report.device_name
        ),
        lines(&format!("Read in place: {}.", report.uva_how)),
        explained(report),
        verdict(report),
    ]
    .concat()
}

fn rows(table: &mut Table, report: &OffloadReport) {
    let bytes_per_s = |gib_per_s: f64| format!("{gib_per_s:.2}");
    let kind = if report.pinned { "page-locked" } else { "pageable" };
    let memory = format!("{} held by the driver, {kind}", size(report.host_bytes_used));
    table.add_row(["host memory", "", &bytes_per_s(report.pin_gib_per_s), &memory]);
    let mut row = |step: &str, seconds: Option<f64>, gib_per_s: Option<f64>, what: &str| {
        let seconds = seconds.map(|seconds| format!("{seconds:.4}")).unwrap_or_default();
        table.add_row([step, &seconds, &gib_per_s.map(bytes_per_s).unwrap_or_default(), what]);
    };
    let one_stream = "all layers in turn on one stream";
    row("copies", Some(report.transfer_s), Some(report.explicit_gib_per_s), one_stream);
    if report.uva_gib_per_s.is_some() {
        row("in place, alone", None, report.uva_gib_per_s, "the same, reading host memory where it is");
    }
    let again = match report.repeats {
        0 => String::new(),
        repeats => format!(", and of {} {} more", size(report.part_bytes), count(whole(repeats), "time")),
    };
    let computed = format!(
        "layers on the device; digests of all of it{again}: {:.2}× the copies",
        report.compute_transfer_ratio
    );
    row("pass, resident", Some(report.compute_s), None, &computed);
    if report.uva_s.is_some() {
        row("pass, in place", report.uva_s, None, "each layer read right before it is computed");
    }
    let independent = "copies on one stream, computing on another, without dependencies";
    row("side by side", Some(report.side_by_side_s), None, independent);
    let prefetched = format!(
        "{}; overlap {:.2}; {:.2}× as fast as copies and computing in turn, {:.0}\u{a0}% of the ideal",
        count(report.slots, "slot"),
        report.overlap,
        report.speedup(),
        100.0 * report.of_ideal()
    );
    row("pass, prefetched", Some(report.prefetch_s), Some(report.prefetch_gib_per_s), &prefetched);
}

fn explained(report: &OffloadReport) -> String {
    let spread = report.prefetch_spread_s;
    let mut text = lines(&format!(
        "Medians of {} passes; with prefetching {:.4} to {:.4} s.",
        report.passes, spread.min, spread.max
    ));
    if let Some(because) = &report.pageable_because {
        text += &lines(&format!("The host memory is pageable: {because}."));
    }
    if !report.fast_digests {
        text += &lines("This device has no fast digests: computing a layer uses the link, too.");
    }
    text
}

fn verdict(report: &OffloadReport) -> String {
    match &report.mismatch {
        None => {
            format!("Verified: every digest of {} in every pass.\n", count(whole(report.layers), "layer"))
        }
        Some(mismatch) => format!("FAILED: {mismatch}.\n"),
    }
}

fn whole(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
