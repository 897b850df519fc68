//! `poorwill bench sleep`: the shape of its report, sums in it, and what it refuses.

use serde_json::Value;

use crate::report::{assert_fields, assert_seconds};
use crate::support::{Folder, Ran, assert_clean, run};

/// Fields that every consumer may count on, in their order.
const REPORT: &[&str] = &[
    "device",
    "bytes",
    "link_gib_per_s",
    "first_sleep_s",
    "prepared_sleep_s",
    "clean_sleep_s",
    "changed_fraction",
    "changed_sleep_s",
    "wake_s",
    "drop_s",
    "wake_empty_s",
    "copied_bytes",
    "host_bytes",
    "verified",
];
/// Ours besides.
const REPORT_BESIDES: &[&str] = &[
    "moved",
    "contents",
    "stored_bytes",
    "read_bytes",
    "stored_ratio",
    "device_name",
    "fast_digests",
    "tensors",
    "load_s",
    "limits",
    "ratios",
    "prepare",
    "changed_granules",
    "clean_cycles",
    "cycles",
    "spreads",
    "on_disk",
    "dropping",
    "memory",
];
const COPIED: &[&str] = &["first", "prepared", "clean", "changed", "wake"];
const LIMITS: &[&str] = &[
    "link_bytes",
    "to_device_bytes_per_s",
    "to_host_bytes_per_s",
    "digest_bytes",
    "digest_bytes_per_s",
    "pin_bytes",
    "pin_bytes_per_s",
    "pinned",
    "chunks",
    "chunk_bytes",
    "granules",
    "granule_bytes",
    "handles",
    "map_s",
    "unmap_s",
];
const RATIOS: &[&str] =
    &["first_sleep", "prepared_sleep", "clean_sleep", "changed_sleep", "wake", "drop", "wake_empty"];
const CYCLE: &[&str] = &[
    "kind",
    "number",
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
const MEMORY: &[&str] = &["before", "after_first", "after"];
const HELD: &[&str] =
    &["device_free_bytes", "process_resident_bytes", "backup_bytes", "backup_raw_bytes", "host"];

fn bench(args: &[&str]) -> Ran {
    run(&Folder::new(), &[&["bench", "sleep"], args].concat())
}

/// A report of a run that was verified: its fields, and what was copied when.
pub(crate) fn assert_bench_report(report: &Value) {
    assert_fields(report, &[REPORT, REPORT_BESIDES]);
    assert_eq!((&report["moved"], &report["verified"]), (&false.into(), &true.into()));
    for figure in REPORT.iter().filter(|field| field.ends_with("_s")) {
        assert_seconds(&report[figure]);
    }
    assert_fields(&report["limits"], &[LIMITS]);
    assert_fields(&report["memory"], &[MEMORY]);
    MEMORY.iter().for_each(|moment| assert_fields(&report["memory"][moment], &[HELD]));
    assert_fields(&report["spreads"], &[&["sleep_s", "wake_s", "wake_without_verify_s", "wake_at_once_s"]]);
    for spread in report["spreads"].as_object().unwrap().values() {
        assert_fields(spread, &[&["min", "median", "max"]]);
    }
    assert_fields(&report["dropping"], &[&["cycles"]]);
    for drop in report["dropping"]["cycles"].as_array().unwrap() {
        assert_fields(drop, &[&["drop_s", "wake_empty_s"]]);
    }
    let compares = report["fast_digests"] == true;
    assert_fields(&report["ratios"], &[RATIOS]);
    for (figure, beside) in report["ratios"].as_object().unwrap() {
        if compares || !["prepared_sleep", "clean_sleep", "changed_sleep"].contains(&figure.as_str()) {
            assert_fields(beside, &[&["limit_s", "ratio", "ratio_aim"]]);
            assert_seconds(&beside["limit_s"]);
        } else {
            assert!(beside.is_null(), "{figure}: {beside}");
        }
    }

    let int = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{value} in {report}"));
    assert_fields(&report["copied_bytes"], &[COPIED]);
    let [first, prepared, clean, changed, wake] = copied(report);
    assert!(first >= int(&report["bytes"]) && wake == first, "{report}");
    let changed_bytes = int(&report["changed_granules"]) * int(&report["limits"]["granule_bytes"]);
    let expected = if compares { [0, 0, changed_bytes] } else { [first; 3] };
    assert_eq!([prepared, clean, changed], expected);
    let held = int(&report["host_bytes"]);
    let stored = int(&report["stored_bytes"]);
    assert!(held == 0 || held >= stored, "{held} of {stored}");
    for cycle in report["cycles"].as_array().unwrap() {
        assert_fields(cycle, &[CYCLE]);
        let (sleep, wake) = (&cycle["sleep"], &cycle["wake"]);
        // What was idle went with the rest, and does not come back.
        assert!(int(&wake["mapped_bytes"]) <= int(&sleep["released_bytes"]));
        assert_ne!(cycle["verified"], false);
    }
}

fn copied(report: &Value) -> [u64; 5] {
    ["first", "prepared", "clean", "changed", "wake"]
        .map(|which| report["copied_bytes"][which].as_u64().unwrap())
}

#[test]
fn the_report() {
    for (cycles, reported) in [("1", &[1][..]), ("2", &[1, 2]), ("7", &[1, 2, 3, 7])] {
        let ran = bench(&["--device", "host:64MiB", "--size", "8MiB", "--cycles", cycles, "--json"]);
        let report = ran.json();
        assert_bench_report(&report);
        assert_eq!((&report["device"], &report["tensors"]), (&"host".into(), &6.into()));
        assert_eq!((&report["fast_digests"], &report["changed_fraction"]), (&true.into(), &0.01.into()));
        assert_eq!(report["clean_cycles"].to_string(), cycles);
        let bytes = report["bytes"].as_u64().unwrap();
        assert!(bytes <= 8 << 20 && bytes > (8 << 20) - 6);

        let cycles = report["cycles"].as_array().unwrap();
        let of_kind = |kind: &str| -> Vec<u64> {
            let of_kind = cycles.iter().filter(|cycle| cycle["kind"] == kind);
            of_kind.map(|cycle| cycle["number"].as_u64().unwrap()).collect()
        };
        assert_eq!(of_kind("clean"), reported);
        assert_eq!(["first", "prepared", "changed"].map(of_kind), [[1], [1], [1]]);
        assert!(
            cycles.iter().all(|cycle| cycle["device_released_bytes"] == cycle["sleep"]["released_bytes"])
        );
        assert_eq!(cycles.last().unwrap()["wake"]["verified_bytes"], report["copied_bytes"]["wake"]);

        // What the fields are called is promised, and that these come first.
        let stdout = ran.succeeded();
        let places = REPORT.iter().map(|field| stdout.find(&format!("\"{field}\":")).unwrap());
        assert!(places.is_sorted(), "{stdout}");
    }
}

#[test]
fn a_part_of_the_load_changes() {
    let granules_of = |part: &str| {
        let ran =
            bench(&["--device", "host:64MiB", "--size", "24MiB", "--changed", part, "--cycles=1", "--json"]);
        let report = ran.json();
        ran.succeeded();
        assert_bench_report(&report);
        let [.., changed, _] = copied(&report);
        changed / (2 << 20)
    };
    let [nothing, hundredth, half, all] = ["0", "1%", "0.5", "100%"].map(granules_of);
    assert_eq!((nothing, hundredth), (0, 1));
    assert!(half > 1 && half < all && all <= 12, "{half} of {all}");
}

#[test]
fn wakes_from_disk_are_measured_beside_a_plain_reader() {
    let folder = Folder::new();
    let args = ["--device", "host:64MiB", "--size", "24MiB", "--cycles=1", "--json", "--disk"];
    let ran = bench(&[&args[..], &[folder.path().to_str().unwrap()]].concat());
    let report = ran.json();
    ran.succeeded();
    assert_eq!(report["verified"], true);
    let on_disk = &report["on_disk"];
    assert_eq!(on_disk["disk"]["used_bytes"], report["stored_bytes"]);
    let cycles = on_disk["cycles"].as_array().unwrap();
    assert_eq!(cycles.len(), 4);
    for cycle in cycles {
        assert_eq!(
            (&cycle["read_bytes"], &cycle["plain_read_bytes"]),
            (&report["stored_bytes"], &report["stored_bytes"])
        );
    }
    let refused = bench(&["--device", "host:64MiB", "--size", "24MiB", "--disk", "/nonexistent/folder"]);
    assert!(refused.code == 1 && refused.stderr.contains("/nonexistent/folder"), "{refused:?}");
}

#[test]
#[ignore = "long: six benchmarks, codes among them"]
fn contents_and_codes_are_chosen() {
    let stored = |content: &str, compress: &str| {
        let args = ["--device", "host:64MiB", "--size", "24MiB", "--cycles=1", "--json"];
        let ran = bench(&[&args[..], &["--content", content, "--compress", compress]].concat());
        let report = ran.json();
        ran.succeeded();
        assert_eq!((&report["verified"], &report["contents"]), (&true.into(), &content.into()));
        let [raw, stored, read] =
            [&report["copied_bytes"]["first"], &report["stored_bytes"], &report["read_bytes"]]
                .map(|bytes| bytes.as_u64().unwrap());
        assert_eq!(stored, read);
        let ratio = f64::from(u32::try_from(stored).unwrap()) / f64::from(u32::try_from(raw).unwrap());
        assert!((report["stored_ratio"].as_f64().unwrap() - ratio).abs() < 1e-9);
        1000 * stored / raw
    };
    for content in ["noise", "weights", "zeros"] {
        assert_eq!(stored(content, "off"), 1000, "{content}");
    }
    // What no tensor holds of a shared granule is zeros.
    let noise = stored("noise", "always");
    assert!((900..=1000).contains(&noise), "{noise} thousandths");
    let weights = stored("weights", "always");
    assert!((600..720).contains(&weights), "{weights} thousandths");
    assert!(stored("zeros", "always") < 10);
    for (option, wrong, known) in
        [("--content", "ones", "noise, weights, zeros"), ("--compress", "on", "auto, off, always")]
    {
        let refused = bench(&[option, wrong]);
        assert!(refused.code == 2 && refused.stderr.contains(known), "{refused:?}");
    }
}

#[test]
fn the_table_for_people() {
    let table = bench(&["--device", "host:64MiB", "--size", "8MiB", "--cycles", "6"]).succeeded();
    assert_clean(&table);
    let step = |line: &str| Some(line.strip_prefix('│')?.split('┆').next()?.trim().to_owned());
    let steps: Vec<String> = table.lines().filter_map(step).collect();
    for step in [
        "link to device",
        "link to host",
        "reading",
        "host memory",
        "driver map",
        "driver unmap",
        "load",
        "first sleep",
        "prepare",
        "prepared sleep",
        "clean sleep",
        "wake",
        "changed sleep",
        "wake, all verified",
        "drop",
        "wake empty",
    ] {
        assert_eq!(steps.iter().filter(|found| *found == step).count(), 1, "{step}: {table}");
    }
    for words in [
        "÷ limit",
        "≤ 3.00×",
        "median of 6",
        // Later wakes are right after the sleep, and stand apart.
        "median of 5",
        "Wake over 5 clean cycles",
        "of pageable memory",
        "fastest of 3",
        "1 % written before",
        "of noise stored in",
        "a wake reads",
        "Verified",
        "6 clean cycles",
    ] {
        let words = words.replace(' ', "\u{a0}");
        assert!(table.replace(' ', "\u{a0}").contains(&words), "`{words}` is not in:\n{table}");
    }
    assert!(
        table.lines().take_while(|line| !line.starts_with("Sleep")).all(|line| line.chars().count() <= 120)
    );
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
    // So much is loaded unless it is said how much.
    bench(&["--device", "host:1000MiB"]).failed(&["cannot load 1 GiB", "1000 MiB free"]);
}

#[test]
fn host_memory_that_does_not_do_is_refused_before_anything_is_measured() {
    let args = ["--device", "host:64MiB", "--size", "8MiB", "--cycles=1", "--host-budget"];
    for low in ["0", "1KiB", "8MiB", "11MiB"] {
        let ran = bench(&[&args[..], &[low]].concat());
        ran.failed(&["cannot load 8 MiB", "host memory", "the limit", "raise"]);
    }
    bench(&[&args[..], &["16MiB"]].concat()).succeeded();
}

#[test]
fn a_load_of_too_many_tensors_is_refused() {
    let args = ["--device", "host:4EiB", "--size", "2EiB"];
    let ran = bench(&args);
    let message = ran.failed(&["cannot load 2 EiB", "tensors", "1000000", "load less"]).to_owned();
    assert_eq!(ran.stdout, "");
    assert_eq!(bench(&[&args[..], &["--json"]].concat()).json(), serde_json::json!({ "error": message }));
}
