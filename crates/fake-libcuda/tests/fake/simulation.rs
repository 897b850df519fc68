//! Devices that simulate slices of GPUs, other kinds of GPUs, and false figures.

use std::ffi::c_int;

use crate::api::{
    Cuda, GRANULE, INVALID_VALUE, Mapped, OUT_OF_MEMORY, Turn, expect_success, in_a_child, is_child, prop,
    turn,
};

/// Two devices of 64 granules for each test.
const DEVICES: &str = "128MiB,128MiB/2MiB";
const CARD: usize = 64 * GRANULE;

/// Whether this is the child, with the simulation; otherwise the child has run successfully.
fn simulated(name: &str, simulation: &str) -> bool {
    if !is_child() {
        let name = format!("simulation::{name}");
        let variables =
            [("POORWILL_FAKE_CUDA_DEVICES", DEVICES), ("POORWILL_FAKE_CUDA_SIMULATE", simulation)];
        expect_success(&in_a_child(&name, &variables));
    }
    is_child()
}

/// Code, total and free, in granules.
fn info(cuda: &Cuda) -> (c_int, usize, usize) {
    let (mut free, mut total) = (0, 0);
    let code = cuda.cuMemGetInfo_v2(&raw mut free, &raw mut total);
    (code, total / GRANULE, free / GRANULE)
}

fn total(cuda: &Cuda, device: c_int) -> usize {
    let mut total = usize::MAX;
    assert_eq!(cuda.cuDeviceTotalMem_v2(&raw mut total, device), 0);
    total
}

fn create(cuda: &Cuda, granules: usize, device: c_int) -> (c_int, u64) {
    let mut handle = 0;
    (cuda.cuMemCreate(&raw mut handle, granules * GRANULE, &prop(device), 0), handle)
}

/// Checks that exactly `granules` can be created on a device, in two parts.
fn expect_available(cuda: &Turn, granules: usize, device: c_int) {
    assert_eq!(create(cuda, granules + 1, device).0, OUT_OF_MEMORY);
    let (code, first) = create(cuda, 1, device);
    assert_eq!(code, 0);
    assert_eq!(create(cuda, granules, device).0, OUT_OF_MEMORY);
    let (code, rest) = create(cuda, granules - 1, device);
    assert_eq!(code, 0);
    assert_eq!(create(cuda, 1, device).0, OUT_OF_MEMORY);
    assert_eq!(cuda.census(device).held_bytes, (granules * GRANULE) as u64);
    assert_eq!([cuda.cuMemRelease(first), cuda.cuMemRelease(rest)], [0, 0]);
}

/// As [`expect_available`], where the process holds memory already.
fn expect_available_beside(cuda: &Turn, granules: usize) {
    assert_eq!(create(cuda, granules + 1, 0).0, OUT_OF_MEMORY);
    let (code, all) = create(cuda, granules, 0);
    assert_eq!((code, info(cuda).2), (0, 0));
    assert_eq!(cuda.cuMemRelease(all), 0);
}

#[test]
fn a_limiter_leaves_the_rest_of_its_limit() {
    if !simulated("a_limiter_leaves_the_rest_of_its_limit", "0:hami=20MiB, 0:used=4MiB") {
        return;
    }
    let cuda = turn();
    assert_eq!(info(&cuda), (0, 10, 8));
    assert_eq!((total(&cuda, 0), total(&cuda, 1)), (0, CARD), "the other one is whole");
    let mapped = Mapped::new(&cuda, 3);
    assert_eq!(info(&cuda), (0, 10, 5));
    expect_available_beside(&cuda, 5);
    mapped.end();
    expect_available(&cuda, 8, 0);
    expect_available(&cuda, 64, 1);
    assert_eq!(info(&cuda), (0, 10, 8));
}

#[test]
fn a_limiter_reports_nothing_beyond_its_limit() {
    if !simulated("a_limiter_reports_nothing_beyond_its_limit", "0:hami=20MiB,0:used=22MiB") {
        return;
    }
    let cuda = turn();
    assert_eq!(info(&cuda), (INVALID_VALUE, 0, 0));
    assert_eq!(create(&cuda, 1, 0).0, OUT_OF_MEMORY);
    assert_eq!(total(&cuda, 0), 0);
}

#[test]
fn a_client_of_the_service_has_less_free_of_the_whole_card() {
    let simulation = "0:mps=20MiB,0:used=4MiB";
    if !simulated("a_client_of_the_service_has_less_free_of_the_whole_card", simulation) {
        return;
    }
    let cuda = turn();
    assert_eq!((info(&cuda), total(&cuda, 0)), ((0, 64, 10), CARD));
    let mapped = Mapped::new(&cuda, 3);
    assert_eq!(info(&cuda), (0, 64, 7));
    expect_available_beside(&cuda, 7);
    mapped.end();
    expect_available(&cuda, 10, 0);
}

#[test]
fn neighbours_on_a_card_take_their_share() {
    if !simulated("neighbours_on_a_card_take_their_share", "0:used=120MiB,1:used=999GiB") {
        return;
    }
    let cuda = turn();
    assert_eq!(info(&cuda), (0, 64, 4));
    expect_available(&cuda, 4, 0);
    assert_eq!(create(&cuda, 1, 1).0, OUT_OF_MEMORY);
}

#[test]
fn a_device_can_be_of_another_kind() {
    let simulation = "0:mig=1g.10gb,0:capability=12.0,1:integrated=1,1:capability=8.7,1:shared=101376";
    if !simulated("a_device_can_be_of_another_kind", simulation) {
        return;
    }
    let cuda = turn();
    let mut name = [1u8; 64];
    assert_eq!(cuda.cuDeviceGetName(name.as_mut_ptr(), 64, 0), 0);
    assert!(name.starts_with(b"Poorwill fake GPU 0 MIG 1g.10gb\0"));
    assert_eq!(info(&cuda), (0, 64, 64));
    let attributes = |device| {
        [18, 75, 76, 97, 111].map(|which| {
            let mut value = -1;
            assert_eq!(cuda.cuDeviceGetAttribute(&raw mut value, which, device), 0);
            value
        })
    };
    assert_eq!(attributes(0), [0, 12, 0, 99 << 10, 1024]);
    assert_eq!(attributes(1), [1, 8, 7, 101_376, 1024]);
}

#[test]
fn figures_can_be_false() {
    let simulation = "0:total=0,0:info_total=1GiB,0:info_free=2GiB,1:info_code=801";
    if !simulated("figures_can_be_false", simulation) {
        return;
    }
    let cuda = turn();
    assert_eq!((info(&cuda), total(&cuda, 0)), ((0, 512, 1024), 0));
    expect_available(&cuda, 64, 0);
    let mut context = 0;
    assert_eq!(cuda.cuDevicePrimaryCtxRetain(&raw mut context, 1), 0);
    assert_eq!(cuda.cuCtxPushCurrent_v2(context), 0);
    assert_eq!(info(&cuda), (801, 0, 0));
    assert_eq!(cuda.cuCtxPopCurrent_v2(&raw mut context), 0);
    assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(1), 0);
}

#[test]
fn uuids_are_those_of_the_devices() {
    let cuda = turn();
    for device in 0..2 {
        let mut uuid = [0; 16];
        assert_eq!(cuda.cuDeviceGetUuid_v2(&raw mut uuid, device), 0);
        let digits: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let text = poorwill_fake_libcuda::uuid_text(device.cast_unsigned());
        assert_eq!(text.replace('-', ""), digits);
    }
}
