//! Mistakes, and the errors that the library returns.

use std::ffi::CString;
use std::ptr;

use crate::api::{
    Access, Cuda, GRANULE, INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, Mapped,
    NOT_INITIALIZED, Prop, access, expect_success, in_a_child, is_child, prop, turn,
};

const ALREADY_REGISTERED: i32 = 712;
const NOT_REGISTERED: i32 = 713;
const NOT_SUPPORTED: i32 = 801;

#[test]
fn nothing_works_before_init() {
    if !is_child() {
        return expect_success(&in_a_child("strict::nothing_works_before_init", &[]));
    }
    let cuda = Cuda::loaded();
    let (mut number, mut handle) = (0, 0);
    assert_eq!(cuda.cuDriverGetVersion(&raw mut number), 0, "but this does");
    for refused in [
        cuda.cuDeviceGetCount(&raw mut number),
        cuda.cuDevicePrimaryCtxRetain(&raw mut handle, 0),
        cuda.cuCtxGetCurrent(&raw mut handle),
        cuda.cuMemCreate(&raw mut handle, GRANULE, &prop(0), 0),
        cuda.cuStreamSynchronize(0),
        cuda.poorwillFakeCensus(0, ptr::null_mut()),
    ] {
        assert_eq!(refused, NOT_INITIALIZED);
    }
    assert_eq!(cuda.cuInit(1), INVALID_VALUE);
    assert_eq!(cuda.cuDeviceGetCount(&raw mut number), NOT_INITIALIZED);
    assert_eq!([cuda.cuInit(0), cuda.cuInit(0)], [0, 0]);
    assert_eq!((cuda.cuDeviceGetCount(&raw mut number), number), (0, 2));
}

#[test]
fn codes_have_names() {
    let cuda = Cuda::loaded();
    for (code, name) in [
        (0, "CUDA_SUCCESS"),
        (1, "CUDA_ERROR_INVALID_VALUE"),
        (2, "CUDA_ERROR_OUT_OF_MEMORY"),
        (201, "CUDA_ERROR_INVALID_CONTEXT"),
        (600, "CUDA_ERROR_NOT_READY"),
        (700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        (999, "CUDA_ERROR_UNKNOWN"),
    ] {
        assert_eq!(cuda.name_of(code).as_deref(), Some(name));
        let mut text = ptr::null();
        assert_eq!(cuda.cuGetErrorString(code, &raw mut text), 0);
        assert!(!text.is_null());
    }
    assert_eq!(cuda.name_of(12345), None);
    assert_eq!(cuda.cuGetErrorName(0, ptr::null_mut()), INVALID_VALUE);
}

#[test]
fn calls_need_a_current_context() {
    let cuda = turn();
    let mut context = 0;
    assert_eq!(cuda.cuCtxPopCurrent_v2(&raw mut context), 0);
    let (mut size, mut handle, mut number) = (0, 0, 0);
    for refused in [
        cuda.cuCtxPopCurrent_v2(ptr::null_mut()),
        cuda.cuCtxGetDevice(&raw mut number),
        cuda.cuCtxSynchronize(),
        cuda.cuMemGetInfo_v2(&raw mut size, &raw mut size),
        cuda.cuMemAddressReserve(&raw mut handle, GRANULE, 0, 0, 0),
        cuda.cuMemCreate(&raw mut handle, GRANULE, &prop(0), 0),
        cuda.cuMemUnmap(0, GRANULE),
        cuda.cuMemHostUnregister((&raw mut number).cast()),
        cuda.cuMemcpyDtoHAsync_v2((&raw mut number).cast(), 0, 4, 0),
        cuda.cuStreamCreate(&raw mut handle, 1),
        cuda.cuStreamSynchronize(0),
        cuda.cuEventCreate(&raw mut handle, 2),
        cuda.cuLaunchHostFunc(0, None, ptr::null_mut()),
        cuda.cuModuleLoadData(&raw mut handle, c"".as_ptr().cast()),
    ] {
        assert_eq!(refused, INVALID_CONTEXT);
    }
    assert_eq!(cuda.cuMemGetAllocationGranularity(&raw mut size, &prop(0), 0), 0, "this one does not");
    assert_eq!(cuda.cuCtxPushCurrent_v2(context), 0);
}

#[test]
fn properties_and_sizes_are_checked() {
    let cuda = turn();
    let (mut handle, mut size) = (0, 0);
    let good = prop(0);
    for wrong in [
        Prop { kind: 0, ..good },
        Prop { kind: 2, ..good },
        Prop { location_kind: 0, ..good },
        Prop { location_kind: 2, ..good },
        Prop { device: 2, ..good },
        Prop { device: -1, ..good },
        Prop { handle_types: 2, ..good },
        Prop { flags: [0, 0, 0, 0, 1, 0, 0, 0], ..good },
    ] {
        assert_eq!(cuda.cuMemCreate(&raw mut handle, GRANULE, &wrong, 0), INVALID_VALUE, "{wrong:?}");
        assert_eq!(cuda.cuMemGetAllocationGranularity(&raw mut size, &wrong, 0), INVALID_VALUE, "{wrong:?}");
    }
    for wrong in [0, 1, GRANULE - 1, GRANULE + 4096] {
        assert_eq!(cuda.cuMemCreate(&raw mut handle, wrong, &good, 0), INVALID_VALUE, "{wrong}");
        assert_eq!(cuda.cuMemAddressReserve(&raw mut handle, wrong, 0, 0, 0), INVALID_VALUE, "{wrong}");
    }
    for refused in [
        cuda.cuMemCreate(&raw mut handle, GRANULE, &good, 1),
        cuda.cuMemCreate(&raw mut handle, GRANULE, ptr::null(), 0),
        cuda.cuMemCreate(ptr::null_mut(), GRANULE, &good, 0),
        cuda.cuMemAddressReserve(&raw mut handle, GRANULE, 0, 0, 1),
        cuda.cuMemAddressReserve(&raw mut handle, GRANULE, 3, 0, 0),
        cuda.cuMemAddressReserve(ptr::null_mut(), GRANULE, 0, 0, 0),
        cuda.cuMemGetAllocationGranularity(&raw mut size, &good, 2),
        cuda.cuStreamCreate(&raw mut handle, 2),
        cuda.cuEventCreate(&raw mut handle, 8),
        cuda.cuEventCreate(&raw mut handle, 4),
    ] {
        assert_eq!(refused, INVALID_VALUE);
    }
    let mut number = 0;
    for refused in [
        cuda.cuDeviceGet(&raw mut number, 2),
        cuda.cuDeviceGetAttribute(&raw mut number, 18, -1),
        cuda.cuDevicePrimaryCtxRetain(&raw mut handle, 2),
        cuda.cuCtxCreate_v2(&raw mut handle, 0, 2),
    ] {
        assert_eq!(refused, INVALID_DEVICE);
    }
}

#[test]
fn ranges_and_access_are_checked() {
    let cuda = turn();
    let (mut addr, mut handle, mut number) = (0, 0, 0u32);
    assert_eq!(cuda.cuMemAddressReserve(&raw mut addr, 2 * GRANULE, 0, 0, 0), 0);
    assert_eq!(cuda.cuMemCreate(&raw mut handle, GRANULE, &prop(0), 0), 0);
    let host = (&raw mut number).cast();
    for (place, refused) in [
        cuda.cuMemMap(addr, 2 * GRANULE, 0, handle, 0),
        cuda.cuMemMap(addr + 4096, GRANULE, 0, handle, 0),
        cuda.cuMemMap(addr, GRANULE, GRANULE, handle, 0),
        cuda.cuMemMap(addr, GRANULE, 0, handle, 1),
        cuda.cuMemMap(addr, GRANULE, 0, handle + 16, 0),
        cuda.cuMemMap(addr, GRANULE, 0, addr, 0),
        cuda.cuMemMap(addr + 2 * GRANULE as u64, GRANULE, 0, handle, 0),
        cuda.cuMemSetAccess(addr, GRANULE, &access(0), 1),
        cuda.cuMemUnmap(addr, GRANULE),
        cuda.cuMemUnmap(u64::MAX, GRANULE),
        cuda.cuMemRelease(0),
        cuda.cuMemRelease(addr),
        cuda.cuMemAddressFree(addr, GRANULE),
        cuda.cuMemAddressFree(addr + GRANULE as u64, GRANULE),
        cuda.cuMemcpyHtoDAsync_v2(addr, host, 4, 0),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(refused, INVALID_VALUE, "number {place}");
    }
    assert_eq!(cuda.cuMemMap(addr, GRANULE, 0, handle, 0), 0);
    assert_eq!(cuda.cuMemcpyHtoDAsync_v2(addr, host, 4, 0), INVALID_VALUE, "mapped without access");
    let good = access(0);
    for wrong in [
        Access { flags: 1, ..good },
        Access { flags: 0, ..good },
        Access { flags: 2, ..good },
        Access { location_kind: 2, ..good },
        Access { device: 7, ..good },
    ] {
        assert_eq!(cuda.cuMemSetAccess(addr, GRANULE, &wrong, 1), INVALID_VALUE, "{wrong:?}");
    }
    assert_eq!(cuda.cuMemSetAccess(addr, GRANULE, &good, 0), INVALID_VALUE);
    assert_eq!(cuda.cuMemSetAccess(addr, GRANULE, ptr::null(), 1), INVALID_VALUE);
    assert_eq!(cuda.cuMemSetAccess(addr, 2 * GRANULE, &good, 1), INVALID_VALUE, "half of it is not mapped");
    assert_eq!(cuda.cuMemSetAccess(addr, GRANULE, &good, 1), 0);
    assert_eq!(cuda.cuMemcpyHtoDAsync_v2(addr + GRANULE as u64 - 2, host, 4, 0), INVALID_VALUE);
    assert_eq!(cuda.cuMemcpyHtoDAsync_v2(addr, ptr::null(), 4, 0), INVALID_VALUE);
    assert_eq!(cuda.cuMemcpyHtoDAsync_v2(addr, host, 4, 0), 0);
    assert_eq!(cuda.cuStreamSynchronize(0), 0);
    assert_eq!([cuda.cuMemUnmap(addr, GRANULE), cuda.cuMemRelease(handle)], [0, 0]);
    assert_eq!(cuda.cuMemAddressFree(addr, 2 * GRANULE), 0);
    assert_eq!(cuda.cuMemAddressFree(addr, 2 * GRANULE), INVALID_VALUE);
}

#[test]
fn unknown_handles_are_refused() {
    let cuda = turn();
    let (mut stream, mut event, mut handle) = (0, 0, 0);
    assert_eq!(cuda.cuStreamCreate(&raw mut stream, 1), 0);
    assert_eq!(cuda.cuEventCreate(&raw mut event, 2), 0);
    assert_eq!([cuda.cuStreamDestroy_v2(stream), cuda.cuEventDestroy_v2(event)], [0, 0]);
    let mapped = Mapped::new(&cuda, 1);
    let name = CString::new("poorwill_test_fill").unwrap();
    for wrong in [stream, event, 0x1000, u64::MAX] {
        for (place, refused) in [
            cuda.cuStreamDestroy_v2(wrong),
            cuda.cuStreamSynchronize(wrong),
            cuda.cuStreamGetCtx(wrong, &raw mut handle),
            cuda.cuMemsetD8Async(mapped.addr, 0, 4, wrong),
            cuda.cuEventDestroy_v2(wrong),
            cuda.cuEventQuery(wrong),
            cuda.cuEventSynchronize(wrong),
            cuda.cuEventRecord(wrong, 0),
            cuda.cuStreamWaitEvent(0, wrong, 0),
            cuda.cuModuleUnload(wrong),
            cuda.cuModuleGetFunction(&raw mut handle, wrong, name.as_ptr()),
            cuda.cuLaunchKernel(wrong, 1, 1, 1, 1, 1, 1, 0, 0, ptr::null_mut(), ptr::null_mut()),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(refused, INVALID_HANDLE, "number {place} of {wrong:#x}");
        }
        assert_eq!(cuda.cuCtxPushCurrent_v2(wrong), INVALID_CONTEXT);
        assert_eq!(cuda.cuCtxSetCurrent(wrong), INVALID_CONTEXT);
        assert_eq!(cuda.cuCtxDestroy_v2(wrong), INVALID_CONTEXT);
    }
    assert_eq!(cuda.cuStreamDestroy_v2(0), INVALID_HANDLE);
    assert_eq!(cuda.cuStreamSynchronize(2), NOT_SUPPORTED);
    assert_eq!(cuda.cuStreamSynchronize(1), 0, "the default stream by its other name");
    mapped.end();
}

#[test]
fn host_memory_is_registered_once() {
    let cuda = turn();
    let mut memory = vec![0u8; 8192];
    let at = |offset: usize| memory.as_ptr().wrapping_add(offset).cast_mut().cast();
    assert_eq!(cuda.cuMemHostRegister_v2(at(1000), 4000, 0), 0);
    for (offset, bytes) in [(1000, 4000), (0, 1001), (4999, 1), (0, 8192), (2000, 10)] {
        assert_eq!(cuda.cuMemHostRegister_v2(at(offset), bytes, 0), ALREADY_REGISTERED);
    }
    assert_eq!(cuda.cuMemHostRegister_v2(at(0), 1000, 1), 0);
    assert_eq!(cuda.cuMemHostRegister_v2(at(5000), 8192 - 5000, 3), 0);
    assert_eq!(cuda.census(0).registered_host_ranges, 3);
    let pointer = |offset, flags| {
        let mut pointer = 0;
        (cuda.cuMemHostGetDevicePointer_v2(&raw mut pointer, at(offset), flags), pointer & 0xFFF)
    };
    assert_eq!(pointer(6000, 0), (0, at(6000) as u64 & 0xFFF));
    for (offset, flags) in [(6000, 1), (0, 0), (1000, 0), (8192, 0)] {
        assert_eq!(pointer(offset, flags).0, INVALID_VALUE, "{offset}: only what was registered as mapped");
    }
    // Portable memory is available to every context.
    let mut context = 0;
    assert_eq!(cuda.cuCtxCreate_v2(&raw mut context, 0, 0), 0);
    assert_eq!(pointer(6000, 0), (0, at(6000) as u64 & 0xFFF));
    assert_eq!(cuda.cuCtxDestroy_v2(context), 0);
    for refused in [
        cuda.cuMemHostRegister_v2(ptr::null_mut(), 1, 0),
        cuda.cuMemHostRegister_v2(at(0), 0, 0),
        cuda.cuMemHostRegister_v2(at(0), usize::MAX, 0),
        cuda.cuMemHostRegister_v2(at(0), 1, 16),
    ] {
        assert_eq!(refused, INVALID_VALUE);
    }
    assert_eq!(cuda.cuMemHostGetDevicePointer_v2(ptr::null_mut(), at(6000), 0), INVALID_VALUE);
    assert_eq!(cuda.cuMemHostUnregister(at(1)), NOT_REGISTERED);
    assert_eq!([0, 1000, 5000].map(|offset| cuda.cuMemHostUnregister(at(offset))), [0; 3]);
    assert_eq!(cuda.cuMemHostUnregister(at(0)), NOT_REGISTERED);
    memory.clear();
}
