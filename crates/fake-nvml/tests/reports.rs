//! What the fake NVML reports.
//!
//! The settings are per process, so each test runs in its own child.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, clippy::unwrap_used)]

use std::process::{Command, Output};

use poorwill_fake_libcuda::uuid_text;

use library::{
    Answer, INVALID_ARGUMENT, Memory, NO_PERMISSION, NOT_FOUND, NOT_SUPPORTED, Nvml, UNINITIALIZED,
};

mod library;

const VARIABLE: &str = "POORWILL_FAKE_NVML_DEVICES";
const GIB: u64 = 1 << 30;

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
        return Some(Nvml::open().unwrap());
    }
    let output = in_a_child(name, &devices.join(","));
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (said(&output.stdout), said(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{}\n{out}\n{err}", output.status);
    None
}

fn memory(nvml: &Nvml, uuid: &str) -> Answer<Memory> {
    nvml.by_uuid(uuid)?.memory()
}

fn of(total: u64, free: u64, used: u64) -> Answer<Memory> {
    Ok(Memory { total, free, used })
}

#[test]
fn without_settings_there_are_no_devices() {
    let Some(nvml) = with("without_settings_there_are_no_devices", &[]) else { return };
    assert_eq!(nvml.count().unwrap(), 0);
    assert_eq!(nvml.driver_version(), "580.65.06");
    for uuid in [gpu(0), mig(0), uuid_text(0), String::new()] {
        assert!(matches!(nvml.by_uuid(&uuid), Err(NOT_FOUND)));
    }
    assert!(matches!(nvml.by_index(0), Err(INVALID_ARGUMENT)));
    nvml.shut().unwrap();
}

#[test]
fn cards_are_found_by_number_uuid_and_bus() {
    let devices = [gpu(7), mig(1), format!("{}:name=Card:capability=12.1", gpu(3))];
    let Some(nvml) = with("cards_are_found_by_number_uuid_and_bus", &devices) else { return };
    assert_eq!(nvml.count().unwrap(), 2, "the instance is no card");
    let first = nvml.by_index(0).unwrap();
    assert_eq!((first.uuid(), first.name()), (gpu(7), "Poorwill fake GPU 0".into()));
    let second = nvml.by_bus("0000:02:00.0").unwrap();
    assert_eq!((second.uuid(), second.name()), (gpu(3), "Card".into()));
    assert_eq!(second.capability(), (12, 1));
    let shouted = nvml.by_uuid(&gpu(3).replace("706f", "706F")).unwrap();
    assert_eq!(shouted.uuid(), gpu(3));
    assert!(matches!(nvml.by_index(2), Err(INVALID_ARGUMENT)));
    assert!(matches!(nvml.by_bus("0000:03:00.0"), Err(NOT_FOUND)));
    assert!(matches!(nvml.by_bus("here"), Err(INVALID_ARGUMENT)));
    assert!(matches!(nvml.by_uuid(&mig(3)), Err(NOT_FOUND)));
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
    assert_eq!(memory(&nvml, &gpu(0)), of(24 * GIB, 23 * GIB, GIB));
    assert_eq!(memory(&nvml, &gpu(1)), of(4 * GIB, GIB.wrapping_neg(), 5 * GIB), "below nothing");
    assert_eq!(memory(&nvml, &gpu(2)), of(4 * GIB, 9 * GIB, 0));
    assert!(matches!(memory(&nvml, &gpu(3)), Err(NO_PERMISSION)));
    assert!(matches!(memory(&nvml, &gpu(4)), Err(NOT_SUPPORTED)));
    assert!(matches!(memory(&nvml, &gpu(5)), Err(NOT_SUPPORTED)));
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
    assert_eq!(memory(&nvml, &mig(0)).unwrap().total, 39 * GIB / 4);
    assert!(matches!(memory(&nvml, &gpu(9)), Err(NO_PERMISSION)));
    let card = nvml.by_uuid(&gpu(9)).unwrap();
    assert_eq!((card.mig_mode(), card.instances()), (Ok((1, 1)), 2));
    let instance = card.instance(1).unwrap();
    assert_eq!(instance.uuid(), mig(1));
    assert_eq!(instance.name(), "Poorwill fake MIG instance");
    assert!(matches!(card.instance(2), Err(NOT_FOUND)));
    assert!(instance.is_instance() && !card.is_instance());
    assert_eq!(instance.parent().unwrap().uuid(), gpu(9));
    assert!(matches!(instance.mig_mode(), Err(NOT_SUPPORTED)));
    assert!(matches!(card.parent(), Err(INVALID_ARGUMENT)));
    let orphan = nvml.by_uuid(&mig(2)).unwrap();
    assert!(matches!(orphan.parent(), Err(NOT_FOUND)), "its card is not shown");
    assert_eq!(nvml.by_uuid(&gpu(8)).unwrap().mig_mode(), Ok((0, 0)));
    let whole = nvml.by_uuid(&gpu(7)).unwrap();
    assert!(matches!(whole.mig_mode(), Err(NOT_SUPPORTED)));
    assert_eq!(whole.instances(), 0);
}

#[test]
fn processes_are_listed() {
    let devices = [format!("{}:process=self/1GiB:process=4711/2MiB:process=self/1", gpu(0)), gpu(1)];
    let Some(nvml) = with("processes_are_listed", &devices) else { return };
    let list = |number| nvml.by_uuid(&gpu(number)).unwrap().processes();
    let own = std::process::id();
    assert_eq!(list(0), [(own, GIB), (4711, 2 << 20), (own, 1)]);
    assert!(list(1).is_empty());
}

#[test]
fn links_are_as_they_are_set() {
    let link = "link_gen=1:link_gen_max=5:link_width=8:link_width_max=16";
    let devices = [format!("{}:{link}", gpu(0)), format!("{}:link_gen=3", gpu(1))];
    let Some(nvml) = with("links_are_as_they_are_set", &devices) else { return };
    let device = nvml.by_index(0).unwrap();
    assert_eq!(device.number("nvmlDeviceGetCurrPcieLinkGeneration").unwrap(), 1);
    assert_eq!(device.number("nvmlDeviceGetMaxPcieLinkGeneration").unwrap(), 5);
    assert_eq!(device.number("nvmlDeviceGetCurrPcieLinkWidth").unwrap(), 8);
    assert_eq!(device.number("nvmlDeviceGetMaxPcieLinkWidth").unwrap(), 16);
    let device = nvml.by_index(1).unwrap();
    assert_eq!(device.number("nvmlDeviceGetCurrPcieLinkGeneration").unwrap(), 3);
    for unknown in [
        "nvmlDeviceGetMaxPcieLinkGeneration",
        "nvmlDeviceGetCurrPcieLinkWidth",
        "nvmlDeviceGetMaxPcieLinkWidth",
    ] {
        assert_eq!(device.number(unknown), Err(NOT_SUPPORTED), "{unknown}");
    }
}

#[test]
fn malformed_settings_fail_the_init() {
    if std::env::var_os("CHILD").is_some() {
        assert!(matches!(Nvml::open(), Err(INVALID_ARGUMENT)));
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
    let second = Nvml::open().unwrap();
    first.shut().unwrap();
    assert_eq!(second.count().unwrap(), 1);
    assert_eq!([second.shut(), second.shut()], [Ok(()), Err(UNINITIALIZED)]);
    assert_eq!(second.count(), Err(UNINITIALIZED));
    drop(second);
    assert_eq!(Nvml::open().unwrap().count().unwrap(), 1, "and can be opened again");
}
