//! Reservations, backings and mappings; registered host memory.

use std::ffi::{c_int, c_uint, c_ulonglong};

use crate::abi::{AccessDesc, AllocationProp, Code, HostPointer, In, Out};
use crate::context::{current, current_even_if_failed};
use crate::entry::entries;
use crate::memory;
use crate::state::{self, Handle, range};

entries! {
    figure cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let device = current()?.device;
        let (total_bytes, free_bytes) = device.simulation.info(device.memory()?)?;
        free.set(usize::try_from(free_bytes).unwrap_or(usize::MAX))?;
        total.set(usize::try_from(total_bytes).unwrap_or(usize::MAX))
    }

    call cuMemGetAllocationGranularity(granule: Out<usize>, prop: In<AllocationProp>, option: c_int) {
        // The minimum, or the recommended granularity.
        if !(0..=1).contains(&option) {
            return Err(Code::INVALID_VALUE);
        }
        let device = memory::device_of(state::get()?, &prop.get()?)?;
        granule.set(usize::try_from(device.granule()).unwrap_or(usize::MAX))
    }

    call cuMemAddressReserve(
        addr: Out<u64>,
        bytes: usize,
        alignment: usize,
        _wish: u64,
        flags: c_ulonglong,
    ) {
        addr.check()?;
        addr.set(memory::reserve(&current()?, bytes, alignment, flags)?)
    }

    call cuMemAddressFree(addr: u64, bytes: usize) {
        memory::unreserve(current_even_if_failed()?.state, range(addr, bytes)?)
    }

    call cuMemCreate(handle: Out<Handle>, bytes: usize, prop: In<AllocationProp>, flags: c_ulonglong) {
        handle.check()?;
        handle.set(memory::create(current()?.state, bytes, &prop.get()?, flags)?)
    }

    call cuMemRelease(handle: Handle) {
        memory::release(current_even_if_failed()?.state, handle)
    }

    call cuMemMap(addr: u64, bytes: usize, offset: usize, handle: Handle, flags: c_ulonglong) {
        memory::map(current()?.state, range(addr, bytes)?, offset, handle, flags)
    }

    call cuMemUnmap(addr: u64, bytes: usize) {
        memory::unmap(current_even_if_failed()?.state, range(addr, bytes)?)
    }

    call cuMemSetAccess(addr: u64, bytes: usize, wanted: In<AccessDesc>, count: usize) {
        memory::set_access(current()?.state, range(addr, bytes)?, &wanted.list(count)?)
    }

    call cuMemHostRegister_v2(host: HostPointer, bytes: usize, flags: c_uint) {
        memory::register(&current()?, host.addr(), bytes, flags)
    }

    call cuMemHostGetDevicePointer_v2(pointer: Out<u64>, host: HostPointer, flags: c_uint) {
        pointer.check()?;
        pointer.set(memory::device_pointer(&current()?, host.addr(), flags)?)
    }

    call cuMemHostUnregister(host: HostPointer) {
        let context = current_even_if_failed()?;
        // Like the real call, which also blocks queuing meanwhile. A failure does not matter here.
        let _ = context.wait_for_device();
        memory::unregister(&context, host.addr())
    }
}
