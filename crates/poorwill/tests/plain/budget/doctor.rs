//! The doctor's report on such GPUs: slices, odd figures, and advice for an engine.

use poorwill::budget::{Caps, Slice};
use poorwill::doctor::{DeviceReport, DoctorReport, examine};
use poorwill::{ByteSize, Tag};

use super::scene::{GIB, Scene, gpu, in_scene, plan_with_time};

/// The report of everything; its last device is the host.
fn look() -> DoctorReport {
    let report = examine(&plan_with_time()).unwrap();
    assert_eq!(report.devices.last().map(|device| device.id.as_str()), Some("host"));
    report
}

fn warned(report: &DoctorReport, words: &str) -> bool {
    report.warnings.iter().any(|warning| warning.contains(words))
}

#[track_caller]
fn assert_warned(report: &DoctorReport, words: &[&str]) {
    for words in words {
        assert!(warned(report, words), "`{words}`: {:#?}", report.warnings);
    }
}

/// Slice, share for an engine, and what it may use.
fn advice(device: &DeviceReport) -> (Option<Slice>, Option<f64>, Option<u64>) {
    (device.slice, device.engine.gpu_memory_utilization, device.engine.memory_bytes)
}

#[test]
fn a_slice_of_hamis_is_named() {
    let scene = Scene::with("24GiB")
        .playing("0:hami=23GiB,0:used=3GiB")
        .variable("CUDA_DEVICE_MEMORY_LIMIT_0", "23g")
        .known_as("GPU", ":total=24GiB:used=4GiB:process=self/0");
    if !in_scene(&scene) {
        return;
    }
    let report = look();
    // 20 of 23 GiB, in hundredths and rounded down.
    assert_eq!(advice(&report.devices[0]), (Some(Slice::Hami), Some(0.86), Some(20 * GIB)));
    assert_eq!(report.devices[0].engine.kv_cache_bytes, Some(20 * GIB));
    assert_warned(
        &report,
        &[
            "cuda:0 is cut by hami: this process has 23 GiB of it",
            "device_properties of cuda:0 says 0 bytes: 0 is no total",
            "others use 3 GiB of what cuda:0 may give",
        ],
    );
    let gpu = report.devices[0].gpu.as_ref().unwrap();
    assert!(gpu.link.to_device_bytes_per_s.is_some(), "{:?}", report.warnings);
}

#[test]
fn a_slice_over_its_limit_is_reported() {
    let scene = Scene::with("24GiB")
        .playing("0:hami=23GiB,0:used=23.5GiB")
        .variable("CUDA_DEVICE_MEMORY_LIMIT", "23g")
        .known_as("GPU", ":total=23GiB:used=23.5GiB");
    if !in_scene(&scene) {
        return;
    }
    let report = look();
    assert_eq!(advice(&report.devices[0]), (Some(Slice::Hami), None, Some(0)));
    assert_warned(
        &report,
        &[
            "cuda_free of cuda:0: CUDA_ERROR_INVALID_VALUE",
            "nvml_free of cuda:0 says 18446744073172680704 bytes: went below zero",
            "the link of cuda:0 was not measured: it has 0 B left",
        ],
    );
    let plan = plan_with_time().on(gpu()).claiming([(Tag::weights(), 1)]);
    let report = examine(&plan).unwrap();
    let (device, words) = report.refused().unwrap();
    assert!(device == "cuda:0" && words.contains("`in_use` has 23 GiB"), "{words}");
}

#[test]
fn slices_by_other_means_are_named() {
    let scene = Scene::with("12GiB,24GiB,24GiB")
        .playing("0:mig=1g.12gb,1:mps=10GiB")
        .variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "1=10G");
    if !in_scene(&scene) {
        return;
    }
    let report = look();
    let ids: Vec<&str> = report.devices.iter().map(|device| device.id.as_str()).collect();
    assert_eq!(ids, ["cuda:0", "cuda:1", "cuda:2", "host"]);
    assert_eq!(advice(&report.devices[0]), (Some(Slice::Mig), Some(1.0), Some(12 * GIB)));
    // An engine takes its share of the whole card here: 10 of 24 GiB.
    assert_eq!(advice(&report.devices[1]), (Some(Slice::Mps), Some(0.41), Some(10 * GIB)));
    assert_eq!(advice(&report.devices[2]), (None, Some(1.0), Some(24 * GIB)));
    assert_eq!(report.devices[3].slice, None);
    assert_warned(&report, &["cuda:0 is cut by mig", "cuda:1 is cut by mps: this process has 10 GiB of it"]);
    assert!(!warned(&report, "cuda:2"), "{:?}", report.warnings);
}

#[test]
fn an_instance_known_to_nvml_is_one() {
    let scene = Scene::with("12GiB").known_as("MIG", ":total=12GiB:memory_error=4");
    if !in_scene(&scene) {
        return;
    }
    assert_eq!(advice(&look().devices[0]), (Some(Slice::Mig), Some(1.0), Some(12 * GIB)));
}

#[test]
fn disagreement_is_kept_apart_from_slices() {
    let scene = Scene::with("24GiB").known_as("GPU", ":total=20GiB");
    if !in_scene(&scene) {
        return;
    }
    let report = look();
    // The share is of what an engine asks, which is CUDA's total.
    assert_eq!(advice(&report.devices[0]), (None, Some(0.83), Some(20 * GIB)));
    assert_warned(&report, &["disagree about the memory of cuda:0: from 20 GiB to 24 GiB"]);
}

#[test]
fn an_unreadable_environment_is_reported() {
    let scene = Scene::with("24GiB")
        .variable("CUDA_DEVICE_MEMORY_LIMIT", "23GiB")
        .variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "10G")
        .without_nvml();
    if !in_scene(&scene) {
        return;
    }
    assert_warned(
        &look(),
        &[
            "CUDA_DEVICE_MEMORY_LIMIT is set and cannot be read: `23GiB`",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT is set and cannot be read: `10G`",
            "NVML is not available: ",
        ],
    );
}

#[test]
fn a_gpu_that_does_not_open_has_the_others_word() {
    let scene =
        Scene::with("24GiB,16GiB").playing("0:info_code=801").known_as("GPU", ":total=24GiB:used=1GiB");
    if !in_scene(&scene) {
        return;
    }
    let report = look();
    let memory = &report.devices[0].memory;
    assert_eq!((memory.budget_bytes, memory.headroom_bytes), (Some(24 * GIB), Some(23 * GIB)));
    assert_eq!(advice(&report.devices[0]), (None, None, Some(23 * GIB)));
    assert_warned(&report, &["cuda:0 cannot be used: CUDA_ERROR_NOT_SUPPORTED (801)"]);
    assert!(!warned(&report, "cuda:1"), "{:?}", report.warnings);
}

#[test]
fn one_device_can_be_looked_at() {
    let scene = Scene::with("24GiB,16GiB").playing("1:capability=9.0");
    if !in_scene(&scene) {
        return;
    }
    let caps: Caps = "cuda:1=0.5,cuda:0=1GiB".parse().unwrap();
    let plan = plan_with_time().on(Some("cuda:1".parse().unwrap())).budgeted(caps);
    let report = examine(&plan).unwrap();
    assert_eq!(report.devices.len(), 2);
    assert_eq!(advice(&report.devices[0]), (None, Some(0.5), Some(8 * GIB)));
    assert_eq!(report.devices[0].shared_memory_per_block_bytes, Some(227 << 10));
    assert_eq!(report.devices[1].engine.gpu_memory_utilization, None);
    assert_warned(&report, &["the budget names cuda:0, which was not examined"]);
    let plan = plan_with_time().on(Some("cuda:2".parse().unwrap()));
    let words = examine(&plan).unwrap_err().to_string();
    assert!(words.contains("there is no cuda:2 here") && words.contains("this process 2"), "{words}");
    assert_eq!(poorwill::shared_memory_per_block_bytes(0).unwrap(), 163 << 10);
}

#[test]
fn without_a_driver_there_is_the_host() {
    let scene = Scene::with("24GiB").without_cuda();
    if !in_scene(&scene) {
        return;
    }
    let report = look();
    assert_eq!(report.devices.len(), 1);
    let ByteSize(capacity) = "32GiB".parse().unwrap();
    assert_eq!(advice(&report.devices[0]), (None, None, Some(capacity)));
    assert_warned(&report, &["no NVIDIA GPU can be used"]);
    assert!(examine(&plan_with_time().on(gpu())).is_err());
}
