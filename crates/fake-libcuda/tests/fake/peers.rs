//! Access to the memory of another device.

use std::ffi::c_int;

use crate::api::{
    Cuda, GRANULE, INVALID_DEVICE, INVALID_VALUE, Mapped, Turn, access, expect_success, in_a_child, is_child,
    turn,
};

/// Two devices alike.
const DEVICES: &str = "128MiB,128MiB";

/// Whether this is the child, with the simulation; otherwise the child has run successfully.
fn simulated(name: &str, simulation: &str) -> bool {
    if !is_child() {
        let name = format!("peers::{name}");
        let variables =
            [("POORWILL_FAKE_CUDA_DEVICES", DEVICES), ("POORWILL_FAKE_CUDA_SIMULATE", simulation)];
        expect_success(&in_a_child(&name, &variables));
    }
    is_child()
}

fn reaches(cuda: &Cuda, device: c_int, peer: c_int) -> bool {
    let mut can = -1;
    assert_eq!(cuda.cuDeviceCanAccessPeer(&raw mut can, device, peer), 0);
    can == 1
}

/// Retains the primary context of device 1.
fn retain(cuda: &Turn) -> u64 {
    let mut context = 0;
    assert_eq!(cuda.cuDevicePrimaryCtxRetain(&raw mut context, 1), 0);
    context
}

/// Copies the first granule of device 0's memory to the second, in the current context.
fn copy(cuda: &Turn, memory: &Mapped<'_>) -> c_int {
    cuda.cuMemcpyAsync(memory.addr + GRANULE as u64, memory.addr, GRANULE, 0)
}

#[test]
fn a_peer_copies_with_access_only() {
    if !simulated("a_peer_copies_with_access_only", "") {
        return;
    }
    let cuda = turn();
    let peer = retain(&cuda);
    let memory = Mapped::new(&cuda, 2);
    assert_eq!(cuda.cuMemsetD8Async(memory.addr, 7, GRANULE, 0), 0);
    assert_eq!(cuda.cuCtxSynchronize(), 0);
    let mut host = vec![0u8; GRANULE];

    assert_eq!(cuda.cuCtxPushCurrent_v2(peer), 0);
    assert_eq!(copy(&cuda, &memory), INVALID_VALUE);
    assert_eq!(cuda.cuMemcpyDtoHAsync_v2(host.as_mut_ptr().cast(), memory.addr, GRANULE, 0), INVALID_VALUE);
    assert_eq!(cuda.cuMemcpyHtoDAsync_v2(memory.addr, host.as_ptr().cast(), GRANULE, 0), INVALID_VALUE);

    let both = [access(0), access(1)];
    assert_eq!(cuda.cuMemSetAccess(memory.addr, memory.bytes, both.as_ptr(), 2), 0);
    assert_eq!(copy(&cuda, &memory), 0);
    assert_eq!(cuda.cuMemcpyDtoHAsync_v2(host.as_mut_ptr().cast(), memory.addr, GRANULE, 0), 0);
    assert_eq!(cuda.cuCtxSynchronize(), 0);
    assert!(host.iter().all(|byte| *byte == 7));
    host.fill(9);
    assert_eq!(cuda.cuMemcpyHtoDAsync_v2(memory.addr, host.as_ptr().cast(), GRANULE, 0), 0);
    assert_eq!(cuda.cuCtxSynchronize(), 0);
    assert_eq!(cuda.cuCtxPopCurrent_v2(std::ptr::null_mut()), 0);

    assert!(memory.read(0, GRANULE).iter().all(|byte| *byte == 9));
    assert!(memory.read(GRANULE as u64, GRANULE).iter().all(|byte| *byte == 7));
    memory.end();
    assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(1), 0);
}

#[test]
fn access_goes_with_the_mapping() {
    if !simulated("access_goes_with_the_mapping", "") {
        return;
    }
    let cuda = turn();
    let peer = retain(&cuda);
    let memory = Mapped::new(&cuda, 2);
    let both = [access(0), access(1)];
    assert_eq!(cuda.cuMemSetAccess(memory.addr, memory.bytes, both.as_ptr(), 2), 0);
    assert_eq!(cuda.cuMemUnmap(memory.addr, memory.bytes), 0);
    assert_eq!(cuda.cuMemMap(memory.addr, memory.bytes, 0, memory.handle, 0), 0);
    assert_eq!(cuda.cuMemSetAccess(memory.addr, memory.bytes, both.as_ptr(), 1), 0);
    assert_eq!(cuda.cuCtxPushCurrent_v2(peer), 0);
    assert_eq!(copy(&cuda, &memory), INVALID_VALUE);
    assert_eq!(cuda.cuCtxPopCurrent_v2(std::ptr::null_mut()), 0);
    memory.end();
    assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(1), 0);
}

#[test]
fn a_copy_between_contexts_needs_no_access() {
    if !simulated("a_copy_between_contexts_needs_no_access", "0:reaches=none,1:reaches=none") {
        return;
    }
    let cuda = turn();
    let peer = retain(&cuda);
    let mut own = 0;
    assert_eq!(cuda.cuCtxGetCurrent(&raw mut own), 0);
    let memory = Mapped::new(&cuda, 2);
    assert_eq!(cuda.cuMemsetD8Async(memory.addr, 7, GRANULE, 0), 0);
    assert_eq!(cuda.cuCtxSynchronize(), 0);
    let second = memory.addr + GRANULE as u64;
    assert_eq!(cuda.cuCtxPushCurrent_v2(peer), 0);
    assert_eq!(cuda.cuMemcpyPeerAsync(second, own, memory.addr, own, GRANULE, 0), 0);
    assert_eq!(cuda.cuCtxSynchronize(), 0);
    assert_eq!(cuda.cuMemcpyPeerAsync(second, own, memory.addr, peer, GRANULE, 0), INVALID_VALUE);
    assert_eq!(cuda.cuCtxPopCurrent_v2(std::ptr::null_mut()), 0);
    assert!(memory.read(GRANULE as u64, GRANULE).iter().all(|byte| *byte == 7));
    memory.end();
    assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(1), 0);
}

#[test]
fn access_between_devices_can_be_simulated() {
    if !simulated("access_between_devices_can_be_simulated", "1:reaches=none") {
        return;
    }
    let cuda = turn();
    assert_eq!([reaches(&cuda, 0, 1), reaches(&cuda, 1, 0), reaches(&cuda, 0, 0)], [true, false, false]);
    let mut can = 0;
    assert_eq!(cuda.cuDeviceCanAccessPeer(&raw mut can, 0, 2), INVALID_DEVICE);
    let memory = Mapped::new(&cuda, 1);
    let both = [access(0), access(1)];
    assert_eq!(cuda.cuMemSetAccess(memory.addr, memory.bytes, both.as_ptr(), 2), INVALID_DEVICE);
    memory.end();
}
