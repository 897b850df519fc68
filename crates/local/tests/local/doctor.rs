//! `poorwill doctor`: the shape of its report, on computers with GPUs and without.

use serde_json::Value;

use crate::report::assert_fields;
use crate::support::{Folder, assert_clean, run};

const HOST: &[&str] = &[
    "os",
    "kernel",
    "architecture",
    "cpus",
    "memory_total_bytes",
    "memory_available_bytes",
    "cgroup_memory_limit_bytes",
    "cgroup_memory_remaining_bytes",
    "memlock_bytes",
    "page_bytes",
    "transparent_huge_pages",
    "reserved_huge_pages_bytes",
    "numa_nodes",
    "numa_nodes_without_cpus",
    "max_map_count",
    "poorwill_version",
];
const DEVICE: &[&str] = &[
    "id",
    "name",
    "granule_bytes",
    "sources",
    "winner",
    "total_bytes",
    "budget_bytes",
    "headroom_bytes",
    "process_used_bytes",
    "slice",
    "reclaimable_bytes",
    "memory_name",
    "shared_memory_per_block_bytes",
    "engine",
];
const GPU: &[&str] = &[
    "compute_capability",
    "driver_version",
    "cuda_version",
    "uuid",
    "pci_bus_id",
    "integrated",
    "numa_node",
    "link",
    "links",
    "pin_bytes_per_s",
    "measured_bytes",
];
const LINK: &[&str] =
    &["width", "width_max", "generation", "generation_max", "to_device_bytes_per_s", "to_host_bytes_per_s"];
const OTHER_LINK: &[&str] = &["id", "together_bytes_per_s", "memory_bytes_per_s", "because"];
const ENGINE: &[&str] = &["gpu_memory_utilization", "memory_bytes", "claims", "kv_cache_bytes", "refused"];

fn int(object: &Value, field: &str) -> u64 {
    object[field].as_u64().unwrap_or_else(|| panic!("{field}: {object}"))
}

/// Every field is there, and the figures do not contradict each other.
pub(crate) fn assert_device(device: &Value) {
    match device["uuid"].is_null() {
        true => assert_fields(device, &[DEVICE]),
        false => {
            assert_fields(device, &[DEVICE, GPU]);
            assert_fields(&device["link"], &[LINK]);
            for other in device["links"].as_array().unwrap() {
                assert_fields(other, &[OTHER_LINK]);
            }
            // What was measured, was measured altogether.
            let measured = ["pin_bytes_per_s", "measured_bytes"].map(|field| device[field].is_null());
            let link =
                ["to_device_bytes_per_s", "to_host_bytes_per_s"].map(|field| device["link"][field].is_null());
            assert!(measured == link && measured[0] == measured[1], "{device}");
        }
    }
    assert_fields(&device["engine"], &[ENGINE]);
    let sources = device["sources"].as_array().unwrap();
    for source in sources {
        assert_fields(source, &[&["name", "bytes", "note"]]);
        assert!(
            source["name"].is_string() && (source["bytes"].is_u64() || source["note"].is_string()),
            "{source}"
        );
    }
    if let Some(winner) = device["winner"].as_str() {
        let source = sources.iter().find(|source| source["name"] == winner).unwrap();
        assert_eq!(source["bytes"], device["budget_bytes"]);
        assert!(int(device, "budget_bytes") <= int(device, "total_bytes"));
    }
    if !device["headroom_bytes"].is_null() {
        assert!(int(device, "headroom_bytes") <= int(device, "budget_bytes"), "{device}");
    }
}

#[test]
fn the_report() {
    let ran = run(&Folder::new(), &["doctor", "--json"]);
    let report = ran.json();
    ran.succeeded();
    assert_fields(&report, &[&["host", "devices", "hibernation", "warnings"]]);
    assert_fields(&report["hibernation"], &[&["reasons", "limits"]]);

    let host = &report["host"];
    assert_fields(host, &[HOST]);
    assert_eq!(host["os"], std::env::consts::OS);
    assert_eq!(host["architecture"], std::env::consts::ARCH);
    assert_eq!(host["poorwill_version"], env!("CARGO_PKG_VERSION"));
    assert!(int(host, "memory_available_bytes") <= int(host, "memory_total_bytes"));
    assert!(int(host, "page_bytes").is_power_of_two() && int(host, "cpus") > 0);
    let limit = &host["cgroup_memory_limit_bytes"];
    assert!(limit.is_null() || limit.is_u64(), "{limit}");

    let (last, gpus) = report["devices"].as_array().unwrap().split_last().unwrap();
    assert_device(last);
    assert_eq!((&last["id"], int(last, "budget_bytes")), (&"host".into(), 32 << 30));
    assert_eq!((&last["winner"], int(last, "headroom_bytes")), (&"capacity".into(), 32 << 30));
    assert!(int(last, "granule_bytes").is_power_of_two());
    assert!(last["slice"].is_null() && last["shared_memory_per_block_bytes"].is_null());
    for (ordinal, gpu) in gpus.iter().enumerate() {
        assert_device(gpu);
        assert_eq!(gpu["id"], format!("cuda:{ordinal}"));
    }

    let warnings = report["warnings"].as_array().unwrap();
    let warned = |word: &str| warnings.iter().any(|warning| warning.as_str().unwrap().contains(word));
    let reasons = report["hibernation"]["reasons"].as_array().unwrap();
    assert!(!gpus.is_empty() || !reasons.is_empty(), "{report}");
    assert_eq!(gpus.is_empty(), warned("GPU can be used") || warned("shows this process no GPU"));
}

#[test]
fn the_tables_for_people() {
    let text = run(&Folder::new(), &["doctor"]).succeeded();
    assert_clean(&text);
    for words in [
        "computer",
        "hibernation",
        std::env::consts::ARCH,
        "available of",
        "capacity",
        "applies",
        "32\u{a0}GiB",
    ] {
        assert!(text.contains(words), "`{words}` is not in:\n{text}");
    }
}

#[test]
fn one_device_within_a_budget() {
    let folder = Folder::new();
    let host = |args: &[&str]| {
        let ran = run(&folder, &[&["doctor", "--json", "--device", "host:8GiB"], args].concat());
        let devices = ran.json()["devices"].as_array().unwrap().clone();
        assert!(devices.len() == 1 && ran.json()["hibernation"].is_null());
        assert_device(&devices[0]);
        (ran, devices[0].clone())
    };
    let (_, all) = host(&[]);
    assert_eq!((int(&all, "budget_bytes"), &all["winner"]), (8 << 30, &"capacity".into()));
    for (budget, bytes) in [
        ("6GiB", 6 << 30),
        ("6g", 6 << 30),
        ("6144m", 6 << 30),
        ("0.75", 6 << 30),
        ("75%", 6 << 30),
        ("0.5,host=6GiB", 6 << 30),
        ("9GiB", 8 << 30),
    ] {
        let (ran, host) = host(&["--budget", budget]);
        ran.succeeded();
        assert_eq!(int(&host, "budget_bytes"), bytes, "{budget}");
    }
    let (ran, fits) = host(&["--budget", "0.75", "--claim", "weights=4GiB", "--claim=activations=1.5GiB"]);
    ran.succeeded();
    assert_eq!(int(&fits["engine"], "kv_cache_bytes"), 1 << 29);
    let claims = fits["engine"]["claims"].as_array().unwrap();
    assert_eq!((claims.len(), &claims[0]["name"]), (2, &"weights".into()));

    let (ran, refused) =
        host(&["--budget", "0.5", "--claim", "weights=3GiB", "--claim", "cudagraph=1.53GiB"]);
    let words =
        ["the claims do not fit", "1.53 GiB for `cudagraph`", "`weights` has 3 GiB", "a share of 0.57"];
    ran.failed(&words);
    assert!(refused["engine"]["kv_cache_bytes"].is_null());
    assert!(refused["engine"]["refused"].as_str().unwrap().contains("a share of 0.57"));
    let text = run(&folder, &["doctor", "--device", "host:1GiB", "--claim", "weights=2GiB"]);
    text.failed(&["weights", "1 GiB"]);
    assert!(text.stdout.contains("REFUSED"), "{}", text.stdout);
}

#[test]
fn a_device_that_is_not_here_and_claims_that_are_none() {
    let folder = Folder::new();
    let ran = run(&folder, &["doctor", "--device", "cuda:99", "--json"]);
    let message = ran.failed(&["there is no cuda:99 here"]);
    assert_eq!(ran.json(), serde_json::json!({ "error": message }));
    for args in [
        &["--claim", "weights"][..],
        &["--claim", "=1GiB"],
        &["--claim", "weights=x"],
        &["--claim", "weights=16"],
        &["--claim", "weights=0.5"],
        &["--budget", "-0.5"],
        &["--claim", "two words=1GiB"],
        &["--budget", "1.5"],
        &["--budget", "22"],
        &["--budget", "gpu=0.5"],
        &["--device", "gpu"],
    ] {
        let ran = run(&folder, &[&["doctor"], args].concat());
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{args:?}: {ran:?}");
        assert!(ran.stderr.contains(args[0]) && ran.stderr.contains(args[1]), "{ran:?}");
    }
    let ran = run(&folder, &["doctor", "--device", "host", "--budget", "cuda:7=0.5", "--json"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{ran:?}");
    assert!(ran.stderr.contains("--budget names cuda:7, and the device is host"), "{ran:?}");
    let ran = run(&folder, &["doctor", "--budget", "cuda:99=20GiB", "--json"]);
    let message = ran.failed(&["there is no cuda:99 here", "the budget names it, and the GPUs are"]);
    assert_eq!(ran.json(), serde_json::json!({ "error": message }));
}
