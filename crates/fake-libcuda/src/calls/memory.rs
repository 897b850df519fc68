//! Reservations, backings and mappings; registered host memory.

use std::ffi::{c_int, c_uint, c_ulonglong};
use std::os::fd::IntoRawFd;

use crate::abi::{AccessDesc, AllocationProp, Code, Descriptor, HostPointer, In, Out};
use crate::current::{Current, current, current_even_if_failed};
use crate::entry::entries;
use crate::handle::Handle;
use crate::memory::{self, range};
use crate::state;

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
        let device = memory::device_of(state::get()?.devices(), &prop.get()?)?;
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
        let Current { state, device, .. } = current()?;
        addr.set(state.tables().memory.reserve(device, bytes, alignment, flags)?)
    }

    call cuMemAddressFree(addr: u64, bytes: usize) {
        let state = current_even_if_failed()?.state;
        state.tables().memory.unreserve(state.devices(), range(addr, bytes)?)
    }

    call cuMemCreate(handle: Out<Handle>, bytes: usize, prop: In<AllocationProp>, flags: c_ulonglong) {
        handle.check()?;
        let state = current()?.state;
        handle.set(state.tables().memory.create(state.devices(), bytes, &prop.get()?, flags)?)
    }

    call cuMemExportToShareableHandle(descriptor: Out<c_int>, handle: Handle, kind: c_int, flags: c_ulonglong) {
        descriptor.check()?;
        let state = current()?.state;
        let exported = state.tables().memory.export(state.devices(), handle, kind, flags)?;
        descriptor.set(exported.into_raw_fd())
    }

    call cuMemImportFromShareableHandle(handle: Out<Handle>, descriptor: Descriptor, kind: c_int) {
        handle.check()?;
        let Current { state, device, .. } = current()?;
        handle.set(state.tables().memory.import(device, descriptor.get()?, kind)?)
    }

    call cuMemRelease(handle: Handle) {
        let state = current_even_if_failed()?.state;
        state.tables().memory.release(state.devices(), handle)
    }

    call cuMemMap(addr: u64, bytes: usize, offset: usize, handle: Handle, flags: c_ulonglong) {
        let state = current()?.state;
        state.tables().memory.map(state.devices(), range(addr, bytes)?, offset, handle, flags)
    }

    call cuMemUnmap(addr: u64, bytes: usize) {
        let state = current_even_if_failed()?.state;
        state.tables().memory.unmap(state.devices(), range(addr, bytes)?)
    }

    call cuMemSetAccess(addr: u64, bytes: usize, wanted: In<AccessDesc>, count: usize) {
        let state = current()?.state;
        state.tables().memory.set_access(state.devices(), range(addr, bytes)?, &wanted.list(count)?)
    }

    call cuMemHostRegister_v2(host: HostPointer, bytes: usize, flags: c_uint) {
        let Current { state, device, context } = current()?;
        state.tables().memory.register((device, context), host.addr(), bytes, flags)
    }

    call cuMemHostGetDevicePointer_v2(pointer: Out<u64>, host: HostPointer, flags: c_uint) {
        pointer.check()?;
        let Current { state, context, .. } = current()?;
        pointer.set(state.tables().memory.device_pointer(context, host.addr(), flags)?)
    }

    call cuMemHostUnregister(host: HostPointer) {
        let context = current_even_if_failed()?;
        // Like the real call, which also blocks queuing meanwhile. A failure does not matter here.
        let _ = context.wait_for_device();
        context.state.tables().memory.unregister(host.addr())
    }
}
