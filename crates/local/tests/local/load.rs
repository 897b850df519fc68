//! `poorwill bench load`: the shape of its report, sums in it, and what it refuses.

use std::fs;

use poorwill_bench::synthetic::SyntheticMoe;
use serde_json::Value;

use crate::report::{assert_fields, assert_seconds};
use crate::support::{Folder, Ran, assert_clean, command};

/// Fields that every consumer may count on, in their order.
const REPORT: &[&str] = &[
    "bytes",
    "load_s",
    "load_gib_per_s",
    "direct_gib_per_s",
    "ratio",
    "peak_bytes",
    "peak_ratio",
    "peak_how",
    "peak_resident_bytes",
    "how_read",
    "verified",
];
/// Ours besides.
const REPORT_BESIDES: &[&str] = &["device", "device_name", "passes", "load"];
const LOAD: &[&str] = &[
    "bytes",
    "tensors",
    "host_bytes",
    "buffers",
    "alignment_bytes",
    "seconds",
    "memory_s",
    "readers",
    "piece_bytes",
    "direct_bytes",
    "staged_bytes",
    "buffered_bytes",
    "staging_bytes",
    "pinned",
    "pageable_because",
    "files",
];

/// A folder with a checkpoint of a few MiB in three shards, and its size.
fn model() -> (Folder, u64) {
    let folder = Folder::new();
    let model = SyntheticMoe {
        layers: 2,
        experts: 8,
        hidden: 256,
        moe_intermediate: 128,
        vocab: 2000,
        shards: 3,
        seed: 3,
    };
    model.write(&folder.join("moe"), |_| {}).unwrap();
    (folder, model.total_bytes())
}

fn bench(folder: &Folder, args: &[&str]) -> Ran {
    let mut command = command(folder.path(), [&["bench", "load", "--device", "host:64MiB"], args].concat());
    for name in ["POORWILL_DISABLE_PIN", "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY"] {
        command.env_remove(name);
    }
    Ran::from(command.output().unwrap())
}

#[test]
fn the_report() {
    let (folder, bytes) = model();
    let ran = bench(&folder, &["moe", "--rounds", "3", "--readers", "3", "--json"]);
    let report = ran.json();
    assert_fields(&report, &[REPORT, REPORT_BESIDES]);
    assert_fields(&report["load"], &[LOAD]);
    assert_eq!((&report["verified"], &report["bytes"]), (&true.into(), &bytes.into()));
    let load = &report["load"];
    let int = |field: &str| load[field].as_u64().unwrap_or_else(|| panic!("{field} of {report}"));
    let read_bytes = int("direct_bytes") + int("staged_bytes") + int("buffered_bytes");
    assert_eq!((read_bytes, int("readers"), load["files"].as_array().unwrap().len()), (bytes, 3, 3));
    assert!(int("host_bytes") >= bytes && int("host_bytes") <= bytes + (bytes / 1000).max(4096));
    let passes = report["passes"].as_array().unwrap();
    let loads = passes.iter().filter(|pass| pass["kind"] == "load");
    let seconds: Vec<f64> = loads.map(|pass| pass["seconds"].as_f64().unwrap()).collect();
    let quickest = seconds.iter().copied().fold(f64::INFINITY, f64::min);
    assert_eq!((seconds.len(), report["load_s"].as_f64()), (3, Some(quickest)));
    for pass in passes {
        assert_fields(pass, &[&["kind", "readers", "seconds", "gib_per_s"]]);
        assert_seconds(&pass["seconds"]);
    }
    // Where the files are read directly, both are there, and else neither.
    let is_direct = report["how_read"] == "direct";
    assert_eq!((is_direct, is_direct), (report["ratio"].is_f64(), report["direct_gib_per_s"].is_f64()));
    let is_whole = |field: &str| report[field].is_u64();
    assert!(is_whole("peak_bytes") && is_whole("peak_resident_bytes") && report["peak_ratio"].is_f64());
    let stdout = ran.succeeded();
    let places = REPORT.iter().map(|field| stdout.find(&format!("\"{field}\":")).unwrap());
    assert!(places.is_sorted(), "{stdout}");
}

#[test]
fn the_table_for_people() {
    let (folder, _) = model();
    let table = bench(&folder, &["moe", "--rounds", "1"]).succeeded();
    assert_clean(&table);
    for words in ["3 files for host", "│ load", "fastest load took", "Host memory:", "Verified: the bytes of"]
    {
        let words = words.replace(' ', "\u{a0}");
        assert!(table.replace(' ', "\u{a0}").contains(&words), "`{words}` is not in:\n{table}");
    }
}

#[test]
fn what_is_refused() {
    let (folder, _) = model();
    bench(&folder, &["none"]).failed(&["none", "no such file or folder"]);
    bench(&folder, &["moe", "--host-budget", "1MiB"]).failed(&["no host memory", "1 MiB", "raise the limit"]);
    let shard = folder.join("moe/model-00002-of-00003.safetensors");
    let whole = fs::read(&shard).unwrap();
    fs::write(&shard, &whole[..whole.len() - 1]).unwrap();
    let ran = bench(&folder, &["moe", "--json"]);
    let error = ran.json();
    assert!(matches!(&error["error"], Value::String(words) if words.contains("00002")), "{error}");
    for readers in ["0", "257", "many", "-1"] {
        let ran = bench(&folder, &["moe", &format!("--readers={readers}")]);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.stderr.contains("1..=256"), "{ran:?}");
    }
    assert_eq!(bench(&folder, &[]).code, 2);
}
