//! What the fake NVML reports through the driver's wrapper.
//!
//! The settings are per process, so each test runs in its own child.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, clippy::unwrap_used)]

use std::process::{Command, Output};

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use poorwill_fake_libcuda::uuid_text;

const VARIABLE: &str = "POORWILL_FAKE_NVML_DEVICES";
const GIB: u64 = 1 << 30;

fn load() -> Result<Nvml, NvmlError> {
    Nvml::builder().lib_path(poorwill_fake_nvml::path().as_os_str()).init()
}

fn gpu(number: u32) -> String {
    format!("GPU-{}", uuid_text(number))
}

fn mig(number: u32) -> String {
    format!("MIG-{}", uuid_text(number))
}

/// Runs the test `name` of this file again in its own process with these devices.
fn in_a_child(name: &str, devices: &str) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env("CHILD", name)
        .env(VARIABLE, devices)
        .output()
        .unwrap()
}

/// The library with these devices, in the child; `None` in the parent, once the child has passed.
fn with(name: &str, devices: &[String]) -> Option<Nvml> {
    if std::env::var_os("CHILD").is_some() {
        return Some(load().unwrap());
    }
    let output = in_a_child(name, &devices.join(","));
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (said(&output.stdout), said(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{}\n{out}\n{err}", output.status);
    None
}

/// Total, free and used.
fn memory(nvml: &Nvml, uuid: &str) -> Result<(u64, u64, u64), NvmlError> {
    let memory = nvml.device_by_uuid(uuid)?.memory_info()?;
    Ok((memory.total, memory.free, memory.used))
}

#[test]
fn without_settings_there_are_no_devices() {
    let Some(nvml) = with("without_settings_there_are_no_devices", &[]) else { return };
    assert_eq!(nvml.device_count().unwrap(), 0);
    assert_eq!(nvml.sys_driver_version().unwrap(), "580.65.06");
    for uuid in [gpu(0), mig(0), uuid_text(0), String::new()] {
        assert!(matches!(nvml.device_by_uuid(uuid), Err(NvmlError::NotFound)));
    }
    assert!(matches!(nvml.device_by_index(0), Err(NvmlError::InvalidArg)));
    nvml.shutdown().unwrap();
}

#[test]
fn cards_are_found_by_number_uuid_and_bus() {
    let devices = [gpu(7), mig(1), format!("{}:name=Card:capability=12.1", gpu(3))];
    let Some(nvml) = with("cards_are_found_by_number_uuid_and_bus", &devices) else { return };
    assert_eq!(nvml.device_count().unwrap(), 2, "the instance is no card");
    let first = nvml.device_by_index(0).unwrap();
    assert_eq!((first.uuid().unwrap(), first.name().unwrap()), (gpu(7), "Poorwill fake GPU 0".into()));
    let second = nvml.device_by_pci_bus_id("0000:02:00.0").unwrap();
    assert_eq!((second.uuid().unwrap(), second.name().unwrap()), (gpu(3), "Card".into()));
    let capability = second.cuda_compute_capability().unwrap();
    assert_eq!((capability.major, capability.minor), (12, 1));
    let shouted = nvml.device_by_uuid(gpu(3).replace("706f", "706F")).unwrap();
    assert_eq!(shouted.uuid().unwrap(), gpu(3));
    assert!(matches!(nvml.device_by_index(2), Err(NvmlError::InvalidArg)));
    assert!(matches!(nvml.device_by_pci_bus_id("0000:03:00.0"), Err(NvmlError::NotFound)));
    assert!(matches!(nvml.device_by_pci_bus_id("here"), Err(NvmlError::InvalidArg)));
    assert!(matches!(nvml.device_by_uuid(mig(3)), Err(NvmlError::NotFound)));
}

#[test]
fn memory_is_as_it_is_set_true_or_not() {
    let devices = [
        format!("{}:total=24GiB:used=1GiB", gpu(0)),
        format!("{}:total=4GiB:used=5GiB", gpu(1)),
        format!("{}:total=4GiB:free=9GiB", gpu(2)),
        format!("{}:total=4GiB:memory_error=4", gpu(3)),
        format!("{}:memory_error=3", gpu(4)),
        gpu(5),
    ];
    let Some(nvml) = with("memory_is_as_it_is_set_true_or_not", &devices) else { return };
    assert_eq!(memory(&nvml, &gpu(0)).unwrap(), (24 * GIB, 23 * GIB, GIB));
    assert_eq!(memory(&nvml, &gpu(1)).unwrap(), (4 * GIB, GIB.wrapping_neg(), 5 * GIB), "below nothing");
    assert_eq!(memory(&nvml, &gpu(2)).unwrap(), (4 * GIB, 9 * GIB, 0));
    assert!(matches!(memory(&nvml, &gpu(3)), Err(NvmlError::NoPermission)));
    assert!(matches!(memory(&nvml, &gpu(4)), Err(NvmlError::NotSupported)));
    assert!(matches!(memory(&nvml, &gpu(5)), Err(NvmlError::NotSupported)));
}

#[test]
fn instances_know_their_card() {
    let devices = [
        format!("{}:total=80GiB:memory_error=4", gpu(9)),
        format!("{}:total=9.75GiB:parent={}", mig(0), gpu(9)),
        format!("{}:total=19.5GiB:parent={}", mig(1), gpu(9)),
        format!("{}:parent={}", mig(2), gpu(4)),
        format!("{}:mig_mode=0", gpu(8)),
        gpu(7),
    ];
    let Some(nvml) = with("instances_know_their_card", &devices) else { return };
    assert_eq!(memory(&nvml, &mig(0)).unwrap().0, 39 * GIB / 4);
    assert!(matches!(memory(&nvml, &gpu(9)), Err(NvmlError::NoPermission)));
    let card = nvml.device_by_uuid(gpu(9)).unwrap();
    let mode = card.mig_mode().unwrap();
    assert_eq!((mode.current, mode.pending, card.mig_device_count().unwrap()), (1, 1, 2));
    let instance = card.mig_device_by_index(1).unwrap();
    assert_eq!(instance.uuid().unwrap(), mig(1));
    assert_eq!(instance.name().unwrap(), "Poorwill fake MIG instance");
    assert!(matches!(card.mig_device_by_index(2), Err(NvmlError::NotFound)));
    assert!(instance.mig_is_mig_device_handle().unwrap() && !card.mig_is_mig_device_handle().unwrap());
    assert_eq!(instance.mig_parent_device().unwrap().uuid().unwrap(), gpu(9));
    assert!(matches!(instance.mig_mode(), Err(NvmlError::NotSupported)));
    assert!(matches!(card.mig_parent_device(), Err(NvmlError::InvalidArg)));
    let orphan = nvml.device_by_uuid(mig(2)).unwrap();
    assert!(matches!(orphan.mig_parent_device(), Err(NvmlError::NotFound)), "its card is not shown");
    assert_eq!(nvml.device_by_uuid(gpu(8)).unwrap().mig_mode().unwrap().current, 0);
    let whole = nvml.device_by_uuid(gpu(7)).unwrap();
    assert!(matches!(whole.mig_mode(), Err(NvmlError::NotSupported)));
    assert_eq!(whole.mig_device_count().unwrap(), 0);
}

#[test]
fn processes_are_listed() {
    let devices = [format!("{}:process=self/1GiB:process=4711/2MiB:process=self/1", gpu(0)), gpu(1)];
    let Some(nvml) = with("processes_are_listed", &devices) else { return };
    let list = |number| nvml.device_by_uuid(gpu(number)).unwrap().running_compute_processes().unwrap();
    let own = std::process::id();
    let listed: Vec<_> = list(0).into_iter().map(|process| (process.pid, process.used_gpu_memory)).collect();
    let expected = [(own, GIB), (4711, 2 << 20), (own, 1)];
    assert_eq!(listed, expected.map(|(pid, bytes)| (pid, UsedGpuMemory::Used(bytes))));
    assert!(list(1).is_empty());
}

#[test]
fn links_are_as_they_are_set() {
    let link = "link_gen=1:link_gen_max=5:link_width=8:link_width_max=16";
    let devices = [format!("{}:{link}", gpu(0)), format!("{}:link_gen=3", gpu(1))];
    let Some(nvml) = with("links_are_as_they_are_set", &devices) else { return };
    let device = nvml.device_by_index(0).unwrap();
    assert_eq!(device.current_pcie_link_gen().unwrap(), 1);
    assert_eq!(device.max_pcie_link_gen().unwrap(), 5);
    assert_eq!(device.current_pcie_link_width().unwrap(), 8);
    assert_eq!(device.max_pcie_link_width().unwrap(), 16);
    let device = nvml.device_by_index(1).unwrap();
    assert_eq!(device.current_pcie_link_gen().unwrap(), 3);
    for unknown in
        [device.max_pcie_link_gen(), device.current_pcie_link_width(), device.max_pcie_link_width()]
    {
        assert!(matches!(unknown, Err(NvmlError::NotSupported)));
    }
}

#[test]
fn malformed_settings_fail_the_init() {
    if std::env::var_os("CHILD").is_some() {
        assert!(matches!(load(), Err(NvmlError::InvalidArg)));
        return;
    }
    let output = in_a_child("malformed_settings_fail_the_init", "GPU-1:total=1GiB");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.contains(VARIABLE), "{said}");
}

#[test]
fn the_library_is_open_until_the_last_has_shut_it() {
    let devices = [format!("{}:total=1GiB", gpu(0))];
    let name = "the_library_is_open_until_the_last_has_shut_it";
    let Some(first) = with(name, &devices) else { return };
    let second = load().unwrap();
    first.shutdown().unwrap();
    assert_eq!(second.device_count().unwrap(), 1);
    let shut = *second.lib().nvmlShutdown.as_ref().unwrap();
    // SAFETY: it takes nothing.
    let codes = [unsafe { shut() }, unsafe { shut() }];
    assert_eq!(codes, [0, 1]);
    assert!(matches!(second.device_count(), Err(NvmlError::Uninitialized)));
    drop(second);
    assert_eq!(load().unwrap().device_count().unwrap(), 1, "and can be opened again");
}
