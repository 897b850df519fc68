//! Tables of a rotation.

use comfy_table::CellAlignment;
use poorwill::ByteSize;
use poorwill_rotate::validate::{Validation, Verdict};
use serde_json::Value;

use super::table;

/// A status, as the service gives it.
pub(crate) fn status_text(status: &Value) -> String {
    let mut models =
        table(["model", "stage", "for, s", "running", "queued", "held", "failures", "last failure"]);
    for model in status["models"].as_array().into_iter().flatten() {
        let name = text(&model["name"]);
        let name = if model["is_pinned"] == true { format!("{name} (pinned)") } else { name };
        let held = model["held_bytes"].as_array().map(|held| {
            let held: Vec<String> = held.iter().filter_map(Value::as_u64).map(size).collect();
            held.join(" + ")
        });
        models.add_row([
            name,
            text(&model["stage"]),
            seconds(&model["stage_s"]),
            text(&model["running"]),
            text(&model["queued"]),
            held.unwrap_or_else(|| "not known".to_owned()),
            text(&model["failures"]),
            text(&model["last_failure"]),
        ]);
    }
    for column in models.column_iter_mut().skip(2).take(5) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut gpus = table(["GPU", "total", "free", "promised"]);
    for gpu in status["gpus"].as_array().into_iter().flatten() {
        let bytes = |key: &str| gpu[key].as_u64().map_or_else(|| "not known".to_owned(), size);
        gpus.add_row([text(&gpu["gpu"]), bytes("total_bytes"), bytes("free_bytes"), bytes("promised_bytes")]);
    }
    for column in gpus.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!("{models}\n{gpus}\n")
}

/// What came of a walk.
pub(crate) fn validation_text(validation: &Validation) -> String {
    let mut models = table(["model", "verdict", "right", "garbage", "sleep, s", "wake, s", "what was wrong"]);
    for walked in &validation.models {
        let seconds = |seconds: Option<f64>| seconds.map_or_else(String::new, |s| format!("{s:.3}"));
        models.add_row([
            walked.model.clone(),
            word_of(walked.verdict).to_owned(),
            walked.right.to_string(),
            walked.garbage.to_string(),
            seconds(walked.sleep_s),
            seconds(walked.wake_s),
            walked.because.clone().unwrap_or_default(),
        ]);
    }
    for column in models.column_iter_mut().skip(2).take(4) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let passed = if validation.is_passed() { "every model" } else { "NOT every model" };
    format!("{models}\n{passed} slept, woke, and answered {} questions as before\n", validation.requests)
}

/// A verdict in a word.
pub(crate) fn word_of(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "pass",
        Verdict::Garbage => "garbage",
        Verdict::Fail => "fail",
    }
}

fn size(bytes: u64) -> String {
    ByteSize(bytes).to_string()
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        // What engines said may have anything in it.
        Value::String(text) => text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect(),
        other => other.to_string(),
    }
}

fn seconds(value: &Value) -> String {
    value.as_f64().map(|seconds| format!("{seconds:.1}")).unwrap_or_default()
}
