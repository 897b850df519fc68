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
const HOST_DEVICE: &[&str] = &["id", "name", "granule_bytes", "total_bytes", "free_bytes"];
const GPU: &[&str] = &[
    "compute_capability",
    "free_source",
    "free_error",
    "driver_version",
    "cuda_version",
    "uuid",
    "pci_bus_id",
    "integrated",
];

#[test]
fn the_report() {
    let ran = run(&Folder::new(), &["doctor", "--json"]);
    let report = ran.json();
    ran.succeeded();
    assert_fields(&report, &[&["host", "devices", "warnings"]]);

    let host = &report["host"];
    assert_fields(host, &[HOST]);
    assert_eq!(host["os"], std::env::consts::OS);
    assert_eq!(host["architecture"], std::env::consts::ARCH);
    assert_eq!(host["poorwill_version"], env!("CARGO_PKG_VERSION"));
    let int = |object: &Value, field: &str| object[field].as_u64().unwrap_or_else(|| panic!("{field}"));
    assert!(int(host, "memory_available_bytes") <= int(host, "memory_total_bytes"));
    assert!(int(host, "page_bytes").is_power_of_two() && int(host, "cpus") > 0);
    for field in ["cgroup_memory_limit_bytes", "cgroup_memory_remaining_bytes", "memlock_bytes", "numa_nodes"]
    {
        assert!(host[field].is_null() || host[field].is_u64(), "{field}: {}", host[field]);
    }
    assert!(host["numa_nodes_without_cpus"].is_array());

    let (last, gpus) = report["devices"].as_array().unwrap().split_last().unwrap();
    assert_fields(last, &[HOST_DEVICE]);
    assert_eq!((&last["id"], int(last, "total_bytes")), (&"host".into(), 32 << 30));
    assert_eq!(int(last, "free_bytes"), int(last, "total_bytes"));
    assert!(int(last, "granule_bytes").is_power_of_two());
    for (ordinal, gpu) in gpus.iter().enumerate() {
        assert_fields(gpu, &[HOST_DEVICE, GPU]);
        assert_eq!(gpu["id"], format!("cuda:{ordinal}"));
        // What is free comes from somewhere, or there is a reason.
        assert_ne!(gpu["free_source"].is_null(), gpu["free_error"].is_null(), "{gpu}");
        assert_eq!(gpu["free_source"].is_null(), gpu["free_bytes"].is_null(), "{gpu}");
    }

    let warnings = report["warnings"].as_array().unwrap();
    let warned = |word: &str| warnings.iter().any(|warning| warning.as_str().unwrap().contains(word));
    assert_eq!(gpus.is_empty(), warned("GPU can be used") || warned("shows this process no GPU"));
}

#[test]
fn the_tables_for_people() {
    let text = run(&Folder::new(), &["doctor"]).succeeded();
    assert_clean(&text);
    for words in ["computer", std::env::consts::ARCH, "available of", "device", "host", "32\u{a0}GiB"] {
        assert!(text.contains(words), "`{words}` is not in:\n{text}");
    }
}
