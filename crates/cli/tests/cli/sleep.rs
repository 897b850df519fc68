//! `poorwill bench sleep`: the shape of its report, sums in it, and what it refuses.

use serde_json::Value;

use crate::report::{assert_fields, assert_seconds};
use crate::support::{Folder, Ran, assert_clean, run};

const REPORT: &[&str] = &[
    "device",
    "device_name",
    "bytes",
    "tensors",
    "load_s",
    "limits",
    "cycle_count",
    "cycles",
    "sleep_s",
    "wake_s",
    "wake_without_verify_s",
    "wake_link_ratio",
    "dropping",
    "memory",
    "moved",
    "verified",
];
const LIMITS: &[&str] = &[
    "link_bytes",
    "to_device_bytes_per_s",
    "to_host_bytes_per_s",
    "chunks",
    "chunk_bytes",
    "granules",
    "granule_bytes",
    "bring_in_s",
    "give_back_s",
];
const CYCLE: &[&str] = &[
    "cycle",
    "sleep",
    "wake",
    "sleep_s",
    "wake_s",
    "device_released_bytes",
    "moved",
    "verified",
    "wake_without_verify_s",
    "wake_link_ratio",
];
const DROPPING: &[&str] = &["cycles", "drop_s", "wake_empty_s", "drop_ratio", "wake_empty_ratio"];
const MEMORY: &[&str] = &["before", "after_first", "after"];
const HELD: &[&str] = &["device_free_bytes", "process_resident_bytes", "backup_bytes"];

fn bench(args: &[&str]) -> Ran {
    run(&Folder::new(), &[&["bench", "sleep"], args].concat())
}

#[test]
fn the_report() {
    for (cycles, reported) in [("1", &[1][..]), ("2", &[1, 2]), ("7", &[1, 2, 3, 7])] {
        let ran = bench(&["--device", "host:64MiB", "--size", "8MiB", "--cycles", cycles, "--json"]);
        let report = ran.json();
        ran.succeeded();
        assert_fields(&report, &[REPORT]);
        assert_eq!((&report["device"], &report["tensors"]), (&"host".into(), &6.into()));
        assert_eq!(report["cycle_count"].to_string(), cycles);
        assert_eq!((&report["moved"], &report["verified"]), (&false.into(), &true.into()));
        let bytes = report["bytes"].as_u64().unwrap();
        assert!(bytes <= 8 << 20 && bytes > (8 << 20) - 6);

        assert_fields(&report["limits"], &[LIMITS]);
        assert_fields(&report["dropping"], &[DROPPING]);
        assert_fields(&report["memory"], &[MEMORY]);
        MEMORY.iter().for_each(|moment| assert_fields(&report["memory"][moment], &[HELD]));
        for figure in ["sleep_s", "wake_s", "wake_without_verify_s"] {
            assert_fields(&report[figure], &[&["min", "median", "max"]]);
            assert_seconds(&report[figure]["median"]);
        }
        for drop in report["dropping"]["cycles"].as_array().unwrap() {
            assert_fields(drop, &[&["drop_s", "wake_empty_s"]]);
        }

        let cycles = report["cycles"].as_array().unwrap();
        let numbers: Vec<u64> = cycles.iter().map(|cycle| cycle["cycle"].as_u64().unwrap()).collect();
        assert_eq!(numbers, reported);
        for cycle in cycles {
            assert_fields(cycle, &[CYCLE]);
            let (sleep, wake) = (&cycle["sleep"], &cycle["wake"]);
            assert_eq!(cycle["device_released_bytes"], sleep["released_bytes"]);
            assert_eq!(wake["mapped_bytes"], sleep["released_bytes"]);
            assert_ne!(cycle["verified"], Value::Bool(false));
        }
        assert_eq!(cycles.last().unwrap()["verified"], true);
    }
}

#[test]
fn the_table_for_people() {
    let table = bench(&["--device", "host:64MiB", "--size", "8MiB", "--cycles", "6"]).succeeded();
    assert_clean(&table);
    for words in [
        "link to device",
        "bare bring-in",
        "wake 3",
        "…",
        "wake 6",
        "× bare",
        "% of the link",
        "Verified",
        "6 cycles",
    ] {
        assert!(table.contains(words), "`{words}` is not in:\n{table}");
    }
    assert!(
        table.lines().take_while(|line| !line.starts_with("Sleep")).all(|line| line.chars().count() <= 120)
    );
    assert!(!table.contains("wake 4"), "{table}");
}

#[test]
fn a_load_that_does_not_fit_is_refused() {
    for size in ["65MiB", "1TiB", "15EiB"] {
        let args = ["--device", "host:64MiB", "--size", size];
        let ran = bench(&args);
        let message = ran.failed(&["cannot load", "64 MiB free"]).to_owned();
        assert_eq!(ran.stdout, "");
        assert_eq!(bench(&[&args[..], &["--json"]].concat()).json(), serde_json::json!({ "error": message }));
    }
    bench(&["--device", "host:1"]).failed(&["host:", "capacity"]);
}

#[test]
fn a_load_of_too_many_tensors_is_refused() {
    let args = ["--device", "host:4EiB", "--size", "2EiB"];
    let ran = bench(&args);
    let message = ran.failed(&["cannot load 2 EiB", "tensors", "1000000", "load less"]).to_owned();
    assert_eq!(ran.stdout, "");
    assert_eq!(bench(&[&args[..], &["--json"]].concat()).json(), serde_json::json!({ "error": message }));
}
