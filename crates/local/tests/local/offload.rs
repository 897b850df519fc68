//! `poorwill bench offload`: the shape of its report, sums in it, and what it refuses.

use serde_json::Value;

use crate::report::{assert_fields, assert_seconds};
use crate::support::{Folder, Ran, assert_clean, command};

/// Fields that every consumer may count on, in their order.
const REPORT: &[&str] = &[
    "host_bytes_asked",
    "host_bytes_used",
    "pin_gib_per_s",
    "uva_gib_per_s",
    "explicit_gib_per_s",
    "prefetch_gib_per_s",
    "compute_s",
    "uva_s",
    "prefetch_s",
    "overlap",
    "verified",
];
/// Ours besides.
const REPORT_BESIDES: &[&str] = &[
    "device",
    "device_name",
    "fast_digests",
    "layers",
    "layer_bytes",
    "slots",
    "part_bytes",
    "repeats",
    "compute_transfer_ratio",
    "transfer_s",
    "side_by_side_s",
    "passes",
    "prefetch_spread_s",
    "pinned",
    "uva_how",
];
/// Variables of the caller that are removed.
const SWITCHES: [&str; 3] = [
    "POORWILL_DISABLE_PIN",
    "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY",
    "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA",
];

fn bench_with(switches: &[(&str, &str)], args: &[&str]) -> Ran {
    let folder = Folder::new();
    let mut command = command(folder.path(), [&["bench", "offload"], args].concat());
    for name in SWITCHES {
        command.env_remove(name);
    }
    command.envs(switches.iter().copied());
    Ran::from(command.output().unwrap())
}

fn bench(args: &[&str]) -> Ran {
    bench_with(&[], args)
}

/// A report of a run that was verified: its fields, and that its figures agree.
pub(crate) fn assert_offload_report(report: &Value) {
    let because: &[&str] = if report["pinned"] == true { &[] } else { &["pageable_because"] };
    assert_fields(report, &[REPORT, REPORT_BESIDES, because]);
    assert_eq!(report["verified"], true);
    assert_fields(&report["prefetch_spread_s"], &[&["min", "median", "max"]]);
    assert_eq!(report["prefetch_spread_s"]["median"], report["prefetch_s"]);
    let in_place = !report["uva_s"].is_null();
    assert_eq!(in_place, !report["uva_gib_per_s"].is_null());
    let figures = REPORT.iter().chain(REPORT_BESIDES).filter(|field| {
        let is_figure = field.ends_with("gib_per_s") || (field.ends_with("_s") && !field.contains("spread"));
        is_figure && (in_place || !field.starts_with("uva"))
    });
    figures.for_each(|figure| assert_seconds(&report[figure]));
    let overlap = report["overlap"].as_f64().unwrap();
    assert!((0.0..=1.0).contains(&overlap), "{overlap}");
    let int = |field: &str| report[field].as_u64().unwrap_or_else(|| panic!("{field} of {report}"));
    assert_eq!(int("host_bytes_asked"), int("layers") * int("layer_bytes"));
    assert!(int("host_bytes_used") >= int("host_bytes_asked"), "{report}");
    assert!((2..=8).contains(&int("slots")) && int("part_bytes") <= int("layer_bytes"));
    assert!(report["uva_how"].as_str().unwrap().contains(' '));
}

#[test]
fn the_report() {
    for (size, layers, layer_bytes) in
        [("8MiB", "4", 2 << 20), ("23MiB", "3", 6 << 20), ("2MiB", "1", 2 << 20)]
    {
        let ran = bench(&["--device", "host:64MiB", "--size", size, "--layers", layers, "--json"]);
        let report = ran.json();
        assert_offload_report(&report);
        assert_eq!((&report["device"], report["layers"].to_string()), (&"host".into(), layers.into()));
        assert_eq!((&report["layer_bytes"], &report["pinned"]), (&layer_bytes.into(), &false.into()));
        assert!(report["uva_how"].as_str().unwrap().contains("an ordinary copy is the same thing"));
        // What the fields are called is promised, and that these come first.
        let stdout = ran.succeeded();
        let places = REPORT.iter().map(|field| stdout.find(&format!("\"{field}\":")).unwrap());
        assert!(places.is_sorted(), "{stdout}");
    }
}

#[test]
fn what_the_environment_turns_off_is_not_measured() {
    let args = ["--device", "host:64MiB", "--size", "8MiB", "--layers", "2", "--json"];
    let ran = bench_with(&[("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", "1")], &args);
    let report = ran.json();
    assert_offload_report(&report);
    assert!(report["uva_s"].is_null() && report["uva_gib_per_s"].is_null());
    assert!(report["uva_how"].as_str().unwrap().contains("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA=1"));
    let ran = bench_with(&[("POORWILL_DISABLE_PIN", "1")], &args);
    assert_eq!(ran.json()["pageable_because"], "POORWILL_DISABLE_PIN=1 is set");
    bench_with(&[("POORWILL_DISABLE_PIN", "yes")], &args[..6]).failed(&["POORWILL_DISABLE_PIN", "0 nor 1"]);
}

#[test]
fn the_table_for_people() {
    let table = bench(&["--device", "host:64MiB", "--size", "16MiB", "--layers", "8"]).succeeded();
    assert_clean(&table);
    let step = |line: &str| Some(line.strip_prefix('│')?.split('┆').next()?.trim().to_owned());
    let steps: Vec<String> = table.lines().filter_map(step).collect();
    for step in
        ["host memory", "copies", "in place, alone", "pass, resident", "pass, in place", "pass, prefetched"]
    {
        assert_eq!(steps.iter().filter(|found| *found == step).count(), 1, "{step}: {table}");
    }
    for words in [
        "16 MiB in 8 layers of 2 MiB on host",
        "overlap",
        "of the ideal",
        "Medians of 5 passes",
        "Verified: every",
    ] {
        let words = words.replace(' ', "\u{a0}");
        assert!(table.replace(' ', "\u{a0}").contains(&words), "`{words}` is not in:\n{table}");
    }
}

#[test]
fn what_does_not_fit_is_refused_with_sizes_and_what_to_change() {
    for (args, words) in [
        (
            &["--size", "8MiB", "--layers", "5"][..],
            &["8 MiB in 5 layers", "a granule of the device, 2 MiB", "10 MiB or more", "4 layers"][..],
        ),
        (&["--size", "1"], &["1 B", "2 MiB"]),
        (
            &["--size", "80MiB", "--layers", "2"],
            &["layers of 40 MiB", "80 MiB", "64 MiB free", "more layers"],
        ),
        (&["--size=15EiB", "--layers=1"], &["layers of 15 EiB", "64 MiB free"]),
        (
            &["--size", "32MiB", "--layers", "4", "--budget", "8MiB"],
            &["layers of 8 MiB", "16 MiB", "the budget allows 8 MiB", "raise the budget"],
        ),
        (
            &["--size", "16MiB", "--layers", "4", "--host-budget", "15MiB"],
            &["cannot measure 16 MiB", "the limit for that is 15 MiB", "--host-budget"],
        ),
    ] {
        let args = [&["--device", "host:64MiB"], args].concat();
        let ran = bench(&args);
        let message = ran.failed(words).to_owned();
        assert_eq!(ran.stdout, "");
        assert_eq!(bench(&[&args[..], &["--json"]].concat()).json(), serde_json::json!({ "error": message }));
    }
    // So much is kept unless it is said how much.
    bench(&["--host-budget", "1000MiB"]).failed(&["cannot measure 1 GiB", "1000 MiB"]);
}
