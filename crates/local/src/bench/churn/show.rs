//! Report of `bench churn`.

use comfy_table::CellAlignment;
use poorwill_bench::churn::ChurnReport;

use crate::text::{size, table};

/// Two rows for each load, at its peak and at its end; failures below.
pub(crate) fn text(reports: &[ChurnReport]) -> String {
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
