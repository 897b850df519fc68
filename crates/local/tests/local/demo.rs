//! `poorwill demo`: the whole of it once, and where it cannot start.

use std::fs;

use poorwill_bench::churn::{Load, peak_live_bytes};
use poorwill_bench::synthetic::SyntheticMoe;
use serde_json::Value;

use crate::churn::assert_churn_report;
use crate::report::{Expected, assert_fields, assert_seconds};
use crate::support::{Folder, Ran, command};

#[test]
#[ignore = "long: the whole demo"]
fn the_demo_verifies_every_cycle_and_leaves_nothing_behind() {
    let folder = Folder::new();
    let output = command(folder.path(), ["demo", "--json"]).env("TMPDIR", folder.path()).output().unwrap();
    let ran = Ran::from(output);
    let report = ran.json();
    ran.succeeded();
    assert_fields(&report, &[&["verify", "verified", "churn"], &["write_s"]]);
    assert_eq!(report["verified"], true);
    assert_seconds(&report["write_s"]);
    let synthetic = SyntheticMoe::default();
    let expected = Expected {
        device: "host:4GiB",
        capacity_bytes: 4 << 30,
        files: usize::try_from(synthetic.shards).unwrap(),
        tensors: usize::try_from(report["verify"]["tensors"].as_u64().unwrap()).unwrap(),
        bytes: synthetic.total_bytes(),
        kv_cache_bytes: 256 << 20,
        level: 1,
        cycles: 3,
        prepare: false,
    };
    assert!(expected.tensors > 1000 && (500 << 20..1 << 30).contains(&expected.bytes));
    expected.check(&report["verify"]);
    assert_churn(&report["churn"], 1, 64 << 30);
    assert!(is_empty(&folder));
}

#[test]
#[ignore = "long: the whole demo"]
fn the_demo_on_a_device_of_the_users_makes_the_loads_fit() {
    let folder = Folder::new();
    let args = ["demo", "--device", "host:2GiB"];
    let run = |args: &[&str]| {
        Ran::from(command(folder.path(), args).env("TMPDIR", folder.path()).output().unwrap())
    };
    let report = run(&[&args[..], &["--json"]].concat()).json();
    assert_eq!((&report["verified"], &report["verify"]["device"]), (&true.into(), &"host:2GiB".into()));
    // 29.01 GiB live at full size; a quarter of the device is left free.
    assert_churn(&report["churn"], 32, 2 << 30);
    let text = run(&args).succeeded();
    assert!(text.contains("all sizes divided by 32") && text.contains("every wake"), "{text}");
    for load in ["moe", "swizzle"] {
        assert!(text.lines().any(|line| line.starts_with(&format!("│ {load} "))), "{text}");
    }
    assert!(is_empty(&folder));
}

/// Two loads with their sizes divided, on devices of this capacity.
fn assert_churn(churn: &Value, divisor: u64, limit_bytes: u64) {
    let [moe, swizzle] = churn.as_array().unwrap().as_slice() else { panic!("{churn}") };
    for (load, report) in [(Load::Moe, moe), (Load::Swizzle, swizzle)] {
        assert_churn_report(report);
        assert_eq!((&report["load"], &report["seed"]), (&load.name().into(), &0.into()));
        assert!(
            report["failed"].is_null() && report["limit_bytes"].as_u64() == Some(limit_bytes),
            "{report}"
        );
        let live_bytes = peak_live_bytes(&load.steps(0)) / divisor;
        assert_eq!(report["peak_live_bytes"].as_u64().unwrap(), live_bytes);
    }
}

#[test]
fn without_a_temporary_folder_there_is_no_demo() {
    let folder = Folder::new();
    folder.write("a file", "");
    for place in ["absent", "a file"] {
        for json in [false, true] {
            let args = ["demo", "--json"];
            let mut command = command(folder.path(), &args[..=usize::from(json)]);
            let ran = Ran::from(command.env("TMPDIR", folder.join(place)).output().unwrap());
            let message = ran.failed(&["temporary folder", place, "TMPDIR"]);
            if json {
                assert_eq!(ran.json(), serde_json::json!({ "error": message }));
            } else {
                assert_eq!(ran.stdout, "");
            }
        }
    }
}

#[test]
fn a_demo_that_fails_leaves_nothing_behind() {
    let folder = Folder::new();
    let mut command = command(folder.path(), ["demo", "--device", "cuda:4096"]);
    let ran = Ran::from(command.env("TMPDIR", folder.path()).output().unwrap());
    ran.failed(&["cuda:4096", "driver"]);
    assert!(is_empty(&folder));
}

fn is_empty(folder: &Folder) -> bool {
    fs::read_dir(folder.path()).unwrap().next().is_none()
}
