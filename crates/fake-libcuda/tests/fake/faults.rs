//! Injected failures and delays.

use std::time::{Duration, Instant};

use crate::api::{
    Cuda, GRANULE, INVALID_VALUE, Mapped, OUT_OF_MEMORY, UNKNOWN, expect_success, in_a_child, is_child, prop,
    turn,
};

#[test]
fn armed_calls_fail_and_do_nothing() {
    let cuda = turn();
    let mut handle = 0;
    cuda.poorwillFakeArm(1, 2);
    let (mut context, mut name) = (0, std::ptr::null());
    assert_eq!(cuda.cuCtxSynchronize(), 0);
    assert_eq!(cuda.cuCtxGetCurrent(&raw mut context), 0, "does not count");
    assert_eq!(cuda.cuGetErrorName(2, &raw mut name), 0, "neither does this");
    assert_eq!(cuda.cuMemCreate(&raw mut handle, GRANULE, &prop(0), 0), UNKNOWN);
    assert_eq!((handle, cuda.census(0).backings), (0, 0));
    assert_eq!(cuda.cuMemCreate(&raw mut handle, GRANULE, &prop(0), 0), UNKNOWN);
    assert_eq!(cuda.cuMemCreate(&raw mut handle, GRANULE, &prop(0), 0), 0);
    assert_eq!(cuda.cuMemRelease(handle), 0);
    assert_eq!(cuda.poorwillFakeDisarm(), 5);
    assert_eq!(cuda.poorwillFakeDisarm(), 0);
}

#[test]
fn every_call_can_fail() {
    let cuda = turn();
    cuda.poorwillFakeArm(u64::MAX, 0);
    Mapped::new(&cuda, 1).end();
    let calls = cuda.poorwillFakeDisarm();
    assert_eq!(calls, 8, "reserve, create, map, access, synchronize, unmap, release, free");
    cuda.poorwillFakeArm(0, u64::MAX);
    assert_eq!(cuda.cuInit(0), UNKNOWN);
    assert_eq!(cuda.cuDriverGetVersion(std::ptr::null_mut()), UNKNOWN);
    assert_eq!(cuda.poorwillFakeDisarm(), 2);
}

#[test]
fn the_environment_makes_calls_fail() {
    if !is_child() {
        let fail = "cuMemCreate:2:2:2, cuEventCreate:1,*:8:1:700,cuCtxGetCurrent:1:1:4";
        let name = "faults::the_environment_makes_calls_fail";
        return expect_success(&in_a_child(name, &[("POORWILL_FAKE_CUDA_FAIL", fail)]));
    }
    let cuda = turn(); // cuInit and cuDevicePrimaryCtxRetain: two calls.
    let mut handle = 0;
    let mut create = || (cuda.cuMemCreate(&raw mut handle, GRANULE, &prop(0), 0), handle);
    let (first, handle) = create();
    assert_eq!([first, create().0, create().0], [0, 2, 2]);
    let mut event = 0;
    assert_eq!(cuda.cuEventCreate(&raw mut event, 2), UNKNOWN);
    assert_eq!(cuda.cuCtxGetCurrent(&raw mut event), 4, "one that does not count can be named");
    assert_eq!(cuda.cuMemRelease(handle), 0);
    assert_eq!(cuda.cuCtxSynchronize(), 700, "call number eight");
    assert_eq!(cuda.cuCtxSynchronize(), 0);
}

#[test]
fn the_environment_makes_calls_slow() {
    if !is_child() {
        let name = "faults::the_environment_makes_calls_slow";
        return expect_success(&in_a_child(name, &[("POORWILL_FAKE_CUDA_DELAY", "cuCtxSynchronize:50000")]));
    }
    let cuda = turn();
    let began = Instant::now();
    assert_eq!(cuda.cuCtxSynchronize(), 0);
    assert!(began.elapsed() >= Duration::from_millis(50));
}

#[test]
fn the_environment_sets_the_devices() {
    if !is_child() {
        let name = "faults::the_environment_sets_the_devices";
        let devices = "64MiB,1GiB/4MiB,1MiB/PAGE";
        return expect_success(&in_a_child(name, &[("POORWILL_FAKE_CUDA_DEVICES", devices)]));
    }
    let cuda = turn();
    let (mut count, mut total, mut granule) = (0, 0, 0);
    assert_eq!((cuda.cuDeviceGetCount(&raw mut count), count), (0, 3));
    for (device, bytes, expected) in [(0, 64 << 20, GRANULE), (1, 1 << 30, 2 * GRANULE), (2, 1 << 20, 0)] {
        assert_eq!((cuda.cuDeviceTotalMem_v2(&raw mut total, device), total), (0, bytes));
        assert_eq!(cuda.cuMemGetAllocationGranularity(&raw mut granule, &prop(device), 0), 0);
        assert!(granule == expected || device == 2);
    }
}

#[test]
fn malformed_settings_fail_the_init() {
    let name = "faults::malformed_settings_fail_the_init";
    if is_child() {
        return assert_eq!(Cuda::loaded().cuInit(0), INVALID_VALUE);
    }
    for (variable, value) in [
        ("POORWILL_FAKE_CUDA_DEVICES", "much"),
        ("POORWILL_FAKE_CUDA_DEVICES", "1MiB/3"),
        ("POORWILL_FAKE_CUDA_FAIL", "cuMemCreat:1"),
        ("POORWILL_FAKE_CUDA_DELAY", "cuMemCreate"),
        ("POORWILL_FAKE_CUDA_SIMULATE", "0:hami"),
        ("POORWILL_FAKE_CUDA_SIMULATE", "0:used=1GiB,2:hami=1GiB"),
    ] {
        let output = in_a_child(name, &[(variable, value)]);
        expect_success(&output);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(variable), "{variable}={value}: {said}");
    }
}

#[test]
fn wild_arguments_are_errors() {
    let cuda = turn();
    let mut addr = 0;
    assert_eq!(cuda.cuMemUnmap(u64::MAX - 4095, usize::MAX), INVALID_VALUE);
    let all = usize::MAX / GRANULE * GRANULE;
    assert_eq!(cuda.cuMemAddressReserve(&raw mut addr, all, 1 << 63, 0, 0), OUT_OF_MEMORY);
    assert_eq!(cuda.cuMemCreate(&raw mut addr, all, &prop(0), 0), OUT_OF_MEMORY);
}
