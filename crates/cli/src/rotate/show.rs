//! Reports of `rotate`.

use comfy_table::CellAlignment;
use poorwill::ByteSize;
use poorwill_rotate::validate::Validation;
use serde_json::Value;

use poorwill_local::text::table;

pub(crate) fn status_text(status: &Value) -> String {
    let mut models = table([
        "model",
        "stage",
        "for, s",
        "running",
        "queued",
        "oldest, s",
        "wake, s",
        "leave, s",
        "held",
        "failures",
        "last failure",
    ]);
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
            seconds(&model["oldest_wait_s"]),
            // An engine that does not sleep is started.
            seconds(if model["wake_s"].is_null() { &model["start_s"] } else { &model["wake_s"] }),
            seconds(&model["leave_s"]),
            held.unwrap_or_else(|| "not known".to_owned()),
            text(&model["failures"]),
            text(&model["last_failure"]),
        ]);
    }
    for column in models.column_iter_mut().skip(2).take(8) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut gpus = table(["GPU", "total", "free", "lent", "promised"]);
    for gpu in status["gpus"].as_array().into_iter().flatten() {
        let bytes = |key: &str| gpu[key].as_u64().map_or_else(|| "not known".to_owned(), size);
        let declared = if gpu["is_measured"] == false { " (declared, not measured)" } else { "" };
        gpus.add_row([
            format!("{}{declared}", text(&gpu["gpu"])),
            bytes("total_bytes"),
            bytes("free_bytes"),
            bytes("reclaimable_bytes"),
            bytes("promised_bytes"),
        ]);
    }
    for column in gpus.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let profile = status["profile"].as_str().map(|name| format!("profile: {name}\n"));
    format!("{models}\n{gpus}\n{}", profile.unwrap_or_default())
}

pub(crate) fn validation_text(validation: &Validation) -> String {
    let mut models = table(["model", "verdict", "right", "garbage", "sleep, s", "wake, s", "reason"]);
    for model in &validation.models {
        let seconds = |seconds: Option<f64>| seconds.map_or_else(String::new, |s| format!("{s:.3}"));
        models.add_row([
            model.model.clone(),
            model.verdict.as_str().to_owned(),
            model.right.to_string(),
            model.garbage.to_string(),
            seconds(model.sleep_s),
            seconds(model.wake_s),
            model.because.clone().unwrap_or_default(),
        ]);
    }
    for column in models.column_iter_mut().skip(2).take(4) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let passed = if validation.is_passed() { "every model" } else { "NOT every model" };
    let cycles = cycles_text(validation);
    format!(
        "{models}\n{cycles}{passed} slept, woke, and answered {} prompts as before\n",
        validation.requests
    )
}

/// Each sleep, where there was more than one.
fn cycles_text(validation: &Validation) -> String {
    let mut cycles = table(["model", "cycle", "sleep, s", "wake, s", "in use asleep"]);
    let mut count = 0;
    for model in validation.models.iter().filter(|model| model.cycles.len() > 1) {
        for (nth, cycle) in model.cycles.iter().enumerate() {
            let used = cycle.asleep_bytes.as_ref().map(|used| {
                let used: Vec<String> = used.iter().map(|bytes| size(*bytes)).collect();
                used.join(" + ")
            });
            count += 1;
            cycles.add_row([
                model.model.clone(),
                (nth + 1).to_string(),
                format!("{:.3}", cycle.sleep_s),
                format!("{:.3}", cycle.wake_s),
                used.unwrap_or_else(|| "not measured".to_owned()),
            ]);
        }
    }
    for column in cycles.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    if count > 0 { format!("{cycles}\n") } else { String::new() }
}

fn size(bytes: u64) -> String {
    ByteSize(bytes).to_string()
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        // Text from engines may contain anything.
        Value::String(text) => text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect(),
        other => other.to_string(),
    }
}

fn seconds(value: &Value) -> String {
    value.as_f64().map(|seconds| format!("{seconds:.1}")).unwrap_or_default()
}
