//! `poorwill bench churn`: its report, what fails, and its trace.

use std::fs;

use poorwill_bench::churn::{Load, peak_live_bytes};
use serde_json::Value;

use crate::report::assert_seconds;
use crate::support::{Folder, Ran, assert_clean, run};

/// The fields of a report, in their order.
const FIELDS: [&str; 13] = [
    "load",
    "seed",
    "rounds",
    "limit_bytes",
    "failed",
    "peak_live_bytes",
    "peak_mapped_bytes",
    "peak_ratio",
    "live_bytes",
    "held_bytes",
    "held_ratio",
    "created_bytes",
    "seconds",
];

fn bench(folder: &Folder, args: &[&str]) -> Ran {
    run(folder, &[&["bench", "churn"], args].concat())
}

/// Holds the figures of a report against each other.
pub(crate) fn assert_churn_report(report: &Value) {
    let mut fields: Vec<&String> = report.as_object().unwrap().keys().collect();
    let mut expected = FIELDS.to_vec();
    fields.sort_unstable();
    expected.sort_unstable();
    assert_eq!(fields, expected);
    let int = |field: &str| report[field].as_u64().unwrap_or_else(|| panic!("{field} of {report}"));
    for (ratio, part, whole) in
        [("peak_ratio", "peak_mapped_bytes", "peak_live_bytes"), ("held_ratio", "held_bytes", "live_bytes")]
    {
        let [part, whole] = [part, whole].map(|field| f64::from(u32::try_from(int(field) >> 12).unwrap()));
        assert!((report[ratio].as_f64().unwrap() - part / whole).abs() < 1e-3, "{report}");
        assert!(part >= whole, "{report}");
    }
    assert!(int("held_bytes") <= int("peak_mapped_bytes") && int("live_bytes") <= int("peak_live_bytes"));
    let created: Vec<u64> =
        report["created_bytes"].as_array().unwrap().iter().map(|bytes| bytes.as_u64().unwrap()).collect();
    assert!(created.iter().sum::<u64>() >= int("peak_mapped_bytes"), "{report}");
    assert!(created.len() as u64 <= int("rounds"), "{report}");
    assert_seconds(&report["seconds"]);
}

#[test]
fn every_load_at_full_size() {
    let folder = Folder::new();
    for load in Load::ALL {
        for (seed, rounds) in [(0, 1), (u64::MAX, 2)] {
            let (seed_text, rounds_text) = (seed.to_string(), rounds.to_string());
            let args = ["--load", load.name(), "--seed", &seed_text, "--rounds", &rounds_text, "--json"];
            let ran = bench(&folder, &args);
            let report = ran.json();
            let line = ran.succeeded();
            assert_churn_report(&report);
            assert_eq!((&report["load"], &report["failed"]), (&load.name().into(), &Value::Null));
            assert_eq!((report["seed"].as_u64(), report["rounds"].as_u64()), (Some(seed), Some(rounds)));
            assert_eq!(report["limit_bytes"], 64_u64 << 30);
            assert_eq!(report["created_bytes"].as_array().unwrap().len() as u64, rounds);
            assert_eq!(report["peak_live_bytes"], peak_live_bytes(&load.steps(seed)));
            let places = FIELDS.map(|field| line.find(&format!("\"{field}\":")).unwrap());
            assert!(places.is_sorted(), "{line}");
        }
    }
    let report = bench(&folder, &["--load", "moe", "--json"]).json();
    assert_eq!((&report["seed"], &report["rounds"]), (&0.into(), &1.into()));
    // 23.68 GiB.
    assert_eq!(report["peak_live_bytes"], 24_251_u64 << 20);
}

#[test]
fn a_limit_is_reported() {
    let args = ["--load", "dense", "--limit", "40GiB", "--device", "host:48GiB", "--json"];
    let ran = bench(&Folder::new(), &args);
    let report = ran.json();
    ran.succeeded();
    assert_churn_report(&report);
    assert_eq!(report["limit_bytes"], 40_u64 << 30);
}

#[test]
fn a_limit_that_is_too_low_fails_with_a_report() {
    let folder = Folder::new();
    let args = ["--load", "moe", "--limit", "8GiB", "--rounds", "3"];
    let ran = bench(&folder, &[&args[..], &["--json"]].concat());
    let message = ran.failed(&["the load failed", "cannot allocate", "weights", "limit of 8 GiB"]);
    let report = ran.json();
    assert_churn_report(&report);
    assert_eq!(message, format!("the load failed: {}", report["failed"].as_str().unwrap()));
    assert_eq!((&report["limit_bytes"], &report["rounds"]), (&(8_u64 << 30).into(), &3.into()));
    assert_eq!(report["created_bytes"].as_array().unwrap().len(), 1);
    assert!(report["peak_mapped_bytes"].as_u64().unwrap() <= 8 << 30);

    let ran = bench(&folder, &args);
    ran.failed(&["the load failed", "limit of 8 GiB"]);
    assert!(ran.stdout.contains("FAILED: moe: cannot allocate"), "{}", ran.stdout);
}

#[test]
fn a_device_that_is_too_small_fails_with_a_report() {
    let ran = bench(&Folder::new(), &["--load", "swizzle", "--device", "host:400MiB", "--json"]);
    ran.failed(&["the load failed", "530 MiB", "400 MiB"]);
    let report = ran.json();
    assert_eq!((&report["peak_ratio"], &report["held_ratio"]), (&Value::Null, &Value::Null));
    assert_eq!([&report["peak_live_bytes"], &report["held_bytes"]], [0, 0]);
}

#[test]
fn what_cannot_be_opened_is_refused_without_a_report() {
    let folder = Folder::new();
    for (args, words) in [
        (["--limit", "0"], &["limit of 0 B", "2 MiB"][..]),
        (["--limit", "2MB"], &["limit of 1.91 MiB"]),
        (["--device", "host:1"], &["host:", "capacity"]),
        (["--device", "cuda:4096"], &["cuda:4096", "driver"]),
        (["--trace", "nowhere/trace.csv"], &["nowhere/trace.csv", "cannot write the trace"]),
        (["--trace", "."], &["cannot write the trace"]),
    ] {
        let args = [&["--load", "moe"], &args[..]].concat();
        let ran = bench(&folder, &args);
        let message = ran.failed(words);
        assert_eq!(ran.stdout, "");
        let ran = bench(&folder, &[&args[..], &["--json"]].concat());
        assert_eq!(ran.json(), serde_json::json!({ "error": message }));
    }
}

#[test]
fn the_table_for_people() {
    let table = bench(&Folder::new(), &["--load", "dense", "--seed", "7", "--rounds", "2"]).succeeded();
    assert_clean(&table);
    for words in ["dense", "peak", "28.51\u{a0}GiB", "end", "28.13\u{a0}GiB", "seed 7", ", then "] {
        assert!(table.contains(words), "`{words}` is not in:\n{table}");
    }
    assert!(table.lines().all(|line| line.chars().count() <= 120), "{table}");
}

#[test]
fn the_trace_has_a_line_for_each_step() {
    let folder = Folder::new();
    let args = ["--load", "moe", "--seed", "3", "--rounds", "2", "--trace", "trace.csv", "--json"];
    let report = bench(&folder, &args).json();
    let trace = fs::read_to_string(folder.join("trace.csv")).unwrap();
    let mut lines = trace.lines();
    assert_eq!(lines.next(), Some("step,event,block,bytes,live_bytes,mapped_bytes"));
    let (mut live_bytes, mut peak_mapped_bytes, mut taken) = (0, 0, 0);
    let mut count = 0;
    for (number, line) in (1_u64..).zip(lines) {
        let fields: Vec<&str> = line.split(',').collect();
        let [step, event, block, bytes, live, mapped] = fields[..] else { panic!("{line}") };
        let [step, block, bytes, live, mapped] =
            [step, block, bytes, live, mapped].map(|field| field.parse::<u64>().unwrap());
        match event {
            "take" => {
                assert_eq!(block, taken);
                (live_bytes, taken) = (live_bytes + bytes, taken + 1);
            }
            "give" => live_bytes -= bytes,
            _ => panic!("{line}"),
        }
        assert_eq!((step, live), (number, live_bytes));
        assert!(mapped >= live, "{line}");
        peak_mapped_bytes = peak_mapped_bytes.max(mapped);
        count += 1;
    }
    assert_eq!(count, 2 * 672 + 24 * 12);
    assert_eq!([&report["peak_mapped_bytes"], &report["live_bytes"]], [peak_mapped_bytes, live_bytes]);
}

#[test]
fn a_trace_that_cannot_be_written_is_an_error() {
    let ran = bench(&Folder::new(), &["--load", "dense", "--trace", "/dev/full", "--json"]);
    let message = ran.failed(&["/dev/full", "No space left"]);
    assert_eq!(ran.json(), serde_json::json!({ "error": message }));
}
