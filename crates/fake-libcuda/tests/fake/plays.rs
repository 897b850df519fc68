//! Devices that play slices of GPUs, GPUs of other kinds, and GPUs that lie.

use std::ffi::c_int;

use crate::api::{
    Cuda, GRANULE, INVALID_VALUE, Mapped, OUT_OF_MEMORY, Turn, expect_success, in_a_child, is_child, prop,
    turn,
};

/// Two devices of 64 granules for each test.
const DEVICES: &str = "128MiB,128MiB/2MiB";
const CARD: usize = 64 * GRANULE;

/// Whether the caller is the child that plays; otherwise one has played, and done well.
fn played(name: &str, play: &str) -> bool {
    if !is_child() {
        let name = format!("plays::{name}");
        let variables = [("POORWILL_FAKE_CUDA_DEVICES", DEVICES), ("POORWILL_FAKE_CUDA_PLAY", play)];
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

/// Exactly `granules` can be created on a device, in two parts, and not one more.
fn expect_room(cuda: &Turn, granules: usize, device: c_int) {
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

/// As [`expect_room`], where the process holds something already.
fn expect_room_beside(cuda: &Turn, granules: usize) {
    assert_eq!(create(cuda, granules + 1, 0).0, OUT_OF_MEMORY);
    let (code, all) = create(cuda, granules, 0);
    assert_eq!((code, info(cuda).2), (0, 0));
    assert_eq!(cuda.cuMemRelease(all), 0);
}

#[test]
fn a_limiter_leaves_what_its_limit_leaves() {
    if !played("a_limiter_leaves_what_its_limit_leaves", "0:hami=20MiB, 0:used=4MiB") {
        return;
    }
    let cuda = turn();
    assert_eq!(info(&cuda), (0, 10, 8));
    assert_eq!((total(&cuda, 0), total(&cuda, 1)), (0, CARD), "the other one is whole");
    let mapped = Mapped::new(&cuda, 3);
    assert_eq!(info(&cuda), (0, 10, 5));
    expect_room_beside(&cuda, 5);
    mapped.end();
    expect_room(&cuda, 8, 0);
    expect_room(&cuda, 64, 1);
    assert_eq!(info(&cuda), (0, 10, 8));
}

#[test]
fn a_limiter_says_nothing_beyond_its_limit() {
    if !played("a_limiter_says_nothing_beyond_its_limit", "0:hami=20MiB,0:used=22MiB") {
        return;
    }
    let cuda = turn();
    assert_eq!(info(&cuda), (INVALID_VALUE, 0, 0));
    assert_eq!(create(&cuda, 1, 0).0, OUT_OF_MEMORY);
    assert_eq!(total(&cuda, 0), 0);
}

#[test]
fn a_client_of_the_service_has_less_free_of_the_whole_card() {
    let play = "0:mps=20MiB,0:used=4MiB";
    if !played("a_client_of_the_service_has_less_free_of_the_whole_card", play) {
        return;
    }
    let cuda = turn();
    assert_eq!((info(&cuda), total(&cuda, 0)), ((0, 64, 10), CARD));
    let mapped = Mapped::new(&cuda, 3);
    assert_eq!(info(&cuda), (0, 64, 7));
    expect_room_beside(&cuda, 7);
    mapped.end();
    expect_room(&cuda, 10, 0);
}

#[test]
fn neighbours_on_a_card_take_their_share() {
    if !played("neighbours_on_a_card_take_their_share", "0:used=120MiB,1:used=999GiB") {
        return;
    }
    let cuda = turn();
    assert_eq!(info(&cuda), (0, 64, 4));
    expect_room(&cuda, 4, 0);
    assert_eq!(create(&cuda, 1, 1).0, OUT_OF_MEMORY);
}

#[test]
fn a_device_can_be_of_another_kind() {
    let play = "0:mig=1g.10gb,0:capability=12.0,1:integrated=1,1:capability=8.7,1:shared=101376";
    if !played("a_device_can_be_of_another_kind", play) {
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
fn figures_can_be_lies() {
    let play = "0:total=0,0:info_total=1GiB,0:info_free=2GiB,1:info_code=801";
    if !played("figures_can_be_lies", play) {
        return;
    }
    let cuda = turn();
    assert_eq!((info(&cuda), total(&cuda, 0)), ((0, 512, 1024), 0));
    expect_room(&cuda, 64, 0);
    let mut context = 0;
    assert_eq!(cuda.cuDevicePrimaryCtxRetain(&raw mut context, 1), 0);
    assert_eq!(cuda.cuCtxPushCurrent_v2(context), 0);
    assert_eq!(info(&cuda), (801, 0, 0));
    assert_eq!(cuda.cuCtxPopCurrent_v2(&raw mut context), 0);
    assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(1), 0);
}

#[test]
fn uuids_are_written_as_they_are() {
    let cuda = turn();
    for device in 0..2 {
        let mut uuid = [0; 16];
        assert_eq!(cuda.cuDeviceGetUuid_v2(&raw mut uuid, device), 0);
        let digits: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let text = poorwill_fake_libcuda::uuid_text(device.cast_unsigned());
        assert_eq!(text.replace('-', ""), digits);
    }
}
