//! The life of memory, from its reservation to its release.

use std::ptr;

use poorwill_fake_libcuda::Census;

use crate::api::{GRANULE, INVALID_VALUE, Mapped, OUT_OF_MEMORY, Turn, access, prop, turn};

fn free(cuda: &Turn) -> usize {
    let (mut free, mut total) = (0, 0);
    assert_eq!(cuda.cuMemGetInfo_v2(&raw mut free, &raw mut total), 0);
    assert_eq!(total, 256 << 30);
    free
}

#[test]
fn devices_report_their_properties() {
    let cuda = turn();
    let (mut count, mut version, mut device) = (0, 0, -1);
    assert_eq!((cuda.cuDeviceGetCount(&raw mut count), count), (0, 2));
    assert_eq!((cuda.cuDriverGetVersion(&raw mut version), version), (0, 13000));
    assert_eq!((cuda.cuDeviceGet(&raw mut device, 1), device), (0, 1));
    let mut name = [1u8; 64];
    assert_eq!(cuda.cuDeviceGetName(name.as_mut_ptr(), 64, 1), 0);
    assert!(name.starts_with(b"Poorwill fake GPU 1\0"));
    assert_eq!(cuda.cuDeviceGetName(name.as_mut_ptr(), 4, 1), 0);
    assert_eq!((name[3], name[4]), (0, b'w'), "cut off to what fits");
    let attribute = |which| {
        let mut value = -1;
        (cuda.cuDeviceGetAttribute(&raw mut value, which, 0), value)
    };
    assert_eq!([75, 76, 18, 102].map(attribute), [(0, 8), (0, 0), (0, 0), (0, 1)]);
    assert_eq!([97, 111].map(attribute), [(0, 163 << 10), (0, 1024)]);
    assert_eq!(attribute(9999), (INVALID_VALUE, -1));
    let mut uuids = [[0; 16]; 2];
    assert_eq!(cuda.cuDeviceGetUuid_v2(&raw mut uuids[0], 0), 0);
    assert_eq!(cuda.cuDeviceGetUuid_v2(&raw mut uuids[1], 1), 0);
    assert_ne!(uuids[0], uuids[1]);
    let mut id = [1u8; 13];
    assert_eq!(cuda.cuDeviceGetPCIBusId(id.as_mut_ptr(), 12, 1), INVALID_VALUE);
    assert_eq!(cuda.cuDeviceGetPCIBusId(id.as_mut_ptr(), 13, 1), 0);
    assert_eq!(id, *b"0000:02:00.0\0");
    let mut total = 0;
    assert_eq!((cuda.cuDeviceTotalMem_v2(&raw mut total, 1), total), (0, 16 << 30));
    let granule = |device, option| {
        let mut granule = 0;
        assert_eq!(cuda.cuMemGetAllocationGranularity(&raw mut granule, &prop(device), option), 0);
        granule
    };
    assert_eq!((granule(0, 0), granule(0, 1)), (GRANULE, GRANULE));
    assert!(granule(1, 0) < GRANULE);
}

#[test]
fn memory_comes_and_goes() {
    let cuda = turn();
    let before = free(&cuda);
    let mapped = Mapped::new(&cuda, 2);
    assert_eq!(free(&cuda), before - 2 * GRANULE);
    let expected = Census {
        reservations: 1,
        backings: 1,
        mappings: 1,
        contexts_retained: 1,
        held_bytes: 2 * GRANULE as u64,
        ..Census::default()
    };
    assert_eq!(cuda.census(0), expected);
    let bytes: Vec<u8> = (0..=255).cycle().take(5000).collect();
    let at = mapped.addr + GRANULE as u64 - 1234;
    assert_eq!(cuda.cuMemcpyHtoDAsync_v2(at, bytes.as_ptr().cast(), bytes.len(), 0), 0);
    assert_eq!(mapped.read(GRANULE as u64 - 1234, 5000), bytes);
    assert_eq!(cuda.cuMemsetD8Async(at + 1000, 7, 1000, 0), 0);
    assert_eq!(cuda.cuMemsetD8Async(at + 2000, 0, 1000, 0), 0);
    let read = mapped.read(GRANULE as u64 - 1234, 5000);
    assert_eq!(read[..1000], bytes[..1000]);
    assert_eq!((&read[1000..2000], &read[2000..3000]), (&[7; 1000][..], &[0; 1000][..]));
    assert_eq!(read[3000..], bytes[3000..]);
    assert_eq!(cuda.cuMemsetD8Async(mapped.addr, 9, mapped.bytes, 0), 0);
    assert_eq!(mapped.read(0, mapped.bytes), vec![9; mapped.bytes], "longer than one window");
    mapped.end();
    assert_eq!(free(&cuda), before);
}

#[test]
fn released_memory_stays_until_the_last_unmap() {
    let cuda = turn();
    let before = free(&cuda);
    let mapped = Mapped::new(&cuda, 1);
    let (mut second, addr) = (0, mapped.addr);
    assert_eq!(cuda.cuMemAddressReserve(&raw mut second, GRANULE, 0, 0, 0), 0);
    assert_eq!(cuda.cuMemMap(second, GRANULE, 0, mapped.handle, 0), 0);
    assert_eq!(cuda.cuMemsetD8Async(addr, 5, GRANULE, 0), 0);
    assert_eq!(cuda.cuMemRelease(mapped.handle), 0);
    assert_eq!(cuda.cuMemRelease(mapped.handle), INVALID_VALUE, "the handle is dead");
    assert_eq!(mapped.read(0, 3), [5; 3]);
    assert_eq!(cuda.cuMemUnmap(addr, GRANULE), 0);
    assert_eq!(cuda.cuMemMap(addr, GRANULE, 0, mapped.handle, 0), INVALID_VALUE);
    assert_eq!((free(&cuda), cuda.census(0).backings), (before - GRANULE, 1));
    assert_eq!(cuda.cuMemUnmap(second, GRANULE), 0);
    assert_eq!((free(&cuda), cuda.census(0).backings), (before, 0));
    assert_eq!(cuda.cuMemAddressFree(addr, GRANULE), 0);
    assert_eq!(cuda.cuMemAddressFree(second, GRANULE), 0);
}

#[test]
fn unmap_takes_whole_mappings() {
    let cuda = turn();
    let mut addr = 0;
    assert_eq!(cuda.cuMemAddressReserve(&raw mut addr, 4 * GRANULE, 0, 0, 0), 0);
    let mut handles = [0; 2];
    for (nth, handle) in handles.iter_mut().enumerate() {
        assert_eq!(cuda.cuMemCreate(handle, 2 * GRANULE, &prop(0), 0), 0);
        let at = addr + (nth * 2 * GRANULE) as u64;
        assert_eq!(cuda.cuMemMap(at, 2 * GRANULE, 0, *handle, 0), 0);
        assert_eq!(cuda.cuMemMap(at, 2 * GRANULE, 0, *handle, 0), INVALID_VALUE, "something is there");
    }
    let granule = GRANULE as u64;
    for (at, bytes) in [(addr, GRANULE), (addr + granule, 2 * GRANULE), (addr, 3 * GRANULE)] {
        assert_eq!(cuda.cuMemUnmap(at, bytes), INVALID_VALUE);
    }
    assert_eq!(cuda.cuMemAddressFree(addr, 4 * GRANULE), INVALID_VALUE, "something is mapped there");
    assert_eq!(cuda.cuMemUnmap(addr, 4 * GRANULE), 0, "a run of mappings in one call");
    assert_eq!(cuda.cuMemUnmap(addr, 4 * GRANULE), INVALID_VALUE);
    assert_eq!(handles.map(|handle| cuda.cuMemRelease(handle)), [0, 0]);
    assert_eq!(cuda.cuMemAddressFree(addr, 4 * GRANULE), 0);
}

#[test]
fn the_device_can_be_full() {
    let cuda = turn();
    let (mut all, mut more) = (0, 0);
    assert_eq!(cuda.cuMemCreate(&raw mut more, (256 << 30) + GRANULE, &prop(0), 0), OUT_OF_MEMORY);
    assert_eq!(cuda.cuMemCreate(&raw mut all, 256 << 30, &prop(0), 0), 0);
    assert_eq!(cuda.cuMemCreate(&raw mut more, GRANULE, &prop(0), 0), OUT_OF_MEMORY);
    assert_eq!(free(&cuda), 0);
    assert_eq!(cuda.cuMemCreate(&raw mut more, GRANULE, &prop(1), 0), 0, "the other device is not");
    assert_eq!(cuda.census(1).held_bytes, GRANULE as u64);
    assert_eq!([cuda.cuMemRelease(all), cuda.cuMemRelease(more)], [0, 0]);
}

#[test]
fn reservations_can_be_aligned_beyond_the_granule() {
    let cuda = turn();
    for alignment in [4096, GRANULE, 64 * GRANULE] {
        let mut addr = 0;
        assert_eq!(cuda.cuMemAddressReserve(&raw mut addr, GRANULE, alignment, 0, 0), 0);
        assert_eq!(addr % alignment.max(GRANULE) as u64, 0);
        let mut handle = 0;
        assert_eq!(cuda.cuMemCreate(&raw mut handle, GRANULE, &prop(0), 0), 0);
        let beyond = addr + GRANULE as u64;
        assert_eq!(cuda.cuMemMap(beyond, GRANULE, 0, handle, 0), INVALID_VALUE, "that is nobody's");
        assert_eq!(cuda.cuMemMap(addr, GRANULE, 0, handle, 0), 0);
        assert_eq!(cuda.cuMemSetAccess(addr, GRANULE, &access(0), 1), 0);
        assert_eq!([cuda.cuMemUnmap(addr, GRANULE), cuda.cuMemRelease(handle)], [0, 0]);
        assert_eq!(cuda.cuMemAddressFree(addr, GRANULE), 0);
    }
}

#[test]
fn small_granules_work_as_well() {
    let cuda = turn();
    let (mut context, mut granule) = (0, 0);
    assert_eq!(cuda.cuDevicePrimaryCtxRetain(&raw mut context, 1), 0);
    assert_eq!(cuda.cuCtxPushCurrent_v2(context), 0);
    assert_eq!(cuda.cuMemGetAllocationGranularity(&raw mut granule, &prop(1), 0), 0);
    let (mut addr, mut handle) = (0, 0);
    assert_eq!(cuda.cuMemAddressReserve(&raw mut addr, granule, 0, 0, 0), 0);
    assert_eq!(cuda.cuMemCreate(&raw mut handle, granule, &prop(1), 0), 0);
    assert_eq!(cuda.cuMemMap(addr, granule, 0, handle, 0), 0);
    assert_eq!(cuda.cuMemSetAccess(addr, granule, &access(0), 1), INVALID_VALUE, "of the other device");
    assert_eq!(cuda.cuMemSetAccess(addr, granule, &access(1), 1), 0);
    assert_eq!(cuda.cuMemsetD8Async(addr, 1, granule, 0), 0);
    assert_eq!(cuda.cuCtxSynchronize(), 0);
    assert_eq!(cuda.census(0).mappings, 0);
    assert_eq!(cuda.census(1).mappings, 1);
    assert_eq!([cuda.cuMemUnmap(addr, granule), cuda.cuMemRelease(handle)], [0, 0]);
    assert_eq!(cuda.cuMemAddressFree(addr, granule), 0);
    assert_eq!(cuda.cuCtxPopCurrent_v2(ptr::null_mut()), 0);
    assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(1), 0);
}
