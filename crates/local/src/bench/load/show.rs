//! Report of `bench load`: a row for each pass, and the fastest of each kind compared.

use comfy_table::CellAlignment;
use poorwill::offload::ReadMethod;
use poorwill_bench::load::{LoadBenchReport, PassKind};

use crate::text::{count, lines, size, table};

pub(crate) fn load(report: &LoadBenchReport) -> String {
    let mut table = table(["pass", "readers", "seconds", "GiB/s"]);
    for pass in &report.passes {
        let kind = if pass.kind == PassKind::Load { "load" } else { "direct reads" };
        table.add_row([
            kind,
            &pass.readers.to_string(),
            &format!("{:.3}", pass.seconds),
            &format!("{:.3}", pass.gib_per_s),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let load = &report.load;
    [
        format!(
            "{} in {} of {} for {} ({})\n{table}\n",
            size(report.bytes),
            count(load.tensors, "tensor"),
            count(load.files.len(), "file"),
            report.device,
            report.device_name
        ),
        lines(&rates(report)),
        lines(&memory(report)),
        lines(&how(report)),
        verdict(report),
    ]
    .concat()
}

fn rates(report: &LoadBenchReport) -> String {
    let loaded = format!("The fastest load took {:.3} s, {:.3} GiB/s", report.load_s, report.load_gib_per_s);
    match report.direct_gib_per_s.zip(report.ratio) {
        Some((direct, ratio)) => {
            format!(
                "{loaded}: {:.0}\u{a0}% of the {direct:.3} GiB/s of the fastest direct reads.",
                100.0 * ratio
            )
        }
        None => {
            format!("{loaded}; the files cannot be read directly here, so there is no rate to compare with.")
        }
    }
}

fn memory(report: &LoadBenchReport) -> String {
    let load = &report.load;
    let kind = if load.pinned { "page-locked" } else { "pageable" };
    let memory = format!("{} in {}, {kind}", size(load.host_bytes), count(load.buffers, "buffer"));
    let because = load.pageable_because.as_ref().map(|because| format!(" ({because})")).unwrap_or_default();
    match report.peak_bytes.zip(report.peak_ratio) {
        Some((peak, ratio)) => format!(
            "Host memory: {memory}{because}. The peak while loading was {}, {ratio:.4}\u{a0}× the checkpoint, by {}.",
            size(peak),
            report.peak_how
        ),
        None => format!(
            "Host memory: {memory}{because}. The peak while loading is not known: {}.",
            report.peak_how
        ),
    }
}

fn how(report: &LoadBenchReport) -> String {
    let load = &report.load;
    let mut methods = Vec::new();
    for (bytes, method) in [
        (load.direct_bytes, "read directly into place"),
        (load.staged_bytes, "read directly and copied into place"),
        (load.buffered_bytes, "read through the page cache, which was dropped afterwards"),
    ] {
        if bytes > 0 {
            methods.push(format!("{} {method}", size(bytes)));
        }
    }
    let buffered = load.files.iter().find(|file| file.how == ReadMethod::Buffered);
    let because = buffered.and_then(|file| file.because.as_ref());
    let because = because.map(|because| format!(" ({because})")).unwrap_or_default();
    format!("{}{because}.", methods.join("; "))
}

fn verdict(report: &LoadBenchReport) -> String {
    match &report.mismatch {
        None => format!("Verified: the bytes of {}.\n", count(report.load.tensors, "tensor")),
        Some(mismatch) => format!("FAILED: {mismatch}.\n"),
    }
}
