//! Backings, reservations, mappings and registered host memory.
//!
//! The host device checks most calls; this module adds CUDA's rules.

use std::collections::BTreeSet;

use poorwill_core::{BackingId, DeviceRange, Driver};

use crate::abi::{AccessDesc, AllocationProp, CallResult, Code, LOCATION_DEVICE, Location};
use crate::context::Current;
use crate::state::{Device, Handle, HandleKind, SimulatorState, Tables};

/// Its handle ends with its release, the memory with the last unmap.
#[derive(Debug)]
pub(crate) struct Backing {
    pub(crate) device: usize,
    id: BackingId,
    mappings: u64,
    released: bool,
}

#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) device: usize,
    bytes: u64,
    /// The host device's reservation, larger if the caller requested an alignment above the granule.
    whole: DeviceRange,
}

#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) device: usize,
    bytes: u64,
    backing: Handle,
    open_to: BTreeSet<usize>,
}

#[derive(Debug)]
pub(crate) struct Registered {
    pub(crate) device: usize,
    pub(crate) context: Handle,
    bytes: usize,
    /// Whether kernels may access it.
    is_mapped: bool,
    /// Whether kernels of all contexts may.
    is_portable: bool,
}

/// Set in the addresses by which kernels access host memory, so that passing a host address is detected.
pub(crate) const HOST_WINDOW: u64 = 1 << 56;

/// `CU_MEMHOSTREGISTER_PORTABLE`.
const PORTABLE: u32 = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`.
const MAPPED: u32 = 2;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: i32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: i32 = 3;
/// `CU_MEMHOSTREGISTER_*`: portable, mapped, of a device's, read-only.
const REGISTER_FLAGS: u32 = 0xF;

fn ensure(condition: bool) -> CallResult {
    if condition { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

fn located<'w>(state: &'w SimulatorState, location: &Location) -> CallResult<&'w Device> {
    ensure(location.kind == LOCATION_DEVICE)?;
    state.device(location.id).map_err(|_| Code::INVALID_VALUE)
}

pub(crate) fn device_of<'w>(state: &'w SimulatorState, prop: &AllocationProp) -> CallResult<&'w Device> {
    ensure(prop.kind == PINNED)?;
    ensure(prop.requested_handle_types == 0 && prop.win32_handle_meta_data.is_null())?;
    ensure(prop.compression_type == 0 && prop.gpu_direct_rdma_capable <= 1)?;
    ensure(prop.usage == 0 && prop.reserved == [0; 4])?;
    located(state, &prop.location)
}

pub(crate) fn reserve(current: &Current, bytes: usize, alignment: usize, flags: u64) -> CallResult<u64> {
    let (device, bytes, alignment) = (current.device, bytes as u64, alignment as u64);
    ensure(flags == 0 && (alignment == 0 || alignment.is_power_of_two()))?;
    ensure(bytes > 0 && bytes.is_multiple_of(device.granule()))?;
    let slack = if alignment > device.granule() { alignment } else { 0 };
    let whole = device.host.reserve(bytes.checked_add(slack).ok_or(Code::OUT_OF_MEMORY)?)?;
    let addr = whole.addr.next_multiple_of(alignment.max(1));
    let reservation = Reservation { device: device.ordinal, bytes, whole };
    current.state.tables().reservations.insert(addr, reservation);
    Ok(addr)
}

pub(crate) fn unreserve(state: &SimulatorState, range: DeviceRange) -> CallResult {
    let mut tables = state.tables();
    let found = tables.reservations.get(&range.addr).filter(|found| found.bytes == range.bytes);
    let found = found.ok_or(Code::INVALID_VALUE)?;
    state.devices[found.device].host.unreserve(found.whole)?;
    tables.reservations.remove(&range.addr);
    Ok(())
}

pub(crate) fn create(
    state: &SimulatorState,
    bytes: usize,
    prop: &AllocationProp,
    flags: u64,
) -> CallResult<Handle> {
    let device = device_of(state, prop)?;
    let bytes = bytes as u64;
    ensure(flags == 0 && bytes > 0 && bytes.is_multiple_of(device.granule()))?;
    // Locked from here on, so that no other call takes the available memory.
    let mut tables = state.tables();
    if bytes > device.simulation.available_bytes(device.memory()?) {
        return Err(Code::OUT_OF_MEMORY);
    }
    let id = device.host.create(bytes)?;
    let handle = tables.new_handle(HandleKind::Backing);
    let backing = Backing { device: device.ordinal, id, mappings: 0, released: false };
    tables.backings.insert(handle, backing);
    Ok(handle)
}

pub(crate) fn release(state: &SimulatorState, handle: Handle) -> CallResult {
    let mut tables = state.tables();
    let backing = tables.live(handle)?;
    state.devices[backing.device].host.release(backing.id)?;
    if backing.mappings == 0 {
        tables.backings.remove(&handle);
    } else {
        backing.released = true;
    }
    Ok(())
}

pub(crate) fn map(
    state: &SimulatorState,
    range: DeviceRange,
    offset: usize,
    handle: Handle,
    flags: u64,
) -> CallResult {
    ensure(offset == 0 && flags == 0)?;
    let mut tables = state.tables();
    let device = tables.reserved(range)?;
    let backing = tables.live(handle)?;
    if backing.device != device {
        eprintln!(
            "fake libcuda: {range} was reserved with a context of device {device} current and takes no memory of \
             device {}; CUDA would",
            backing.device
        );
        return Err(Code::INVALID_VALUE);
    }
    state.devices[device].host.map(range, backing.id)?;
    backing.mappings += 1;
    let mapping = Mapping { device, bytes: range.bytes, backing: handle, open_to: BTreeSet::new() };
    tables.mappings.insert(range.addr, mapping);
    Ok(())
}

pub(crate) fn unmap(state: &SimulatorState, range: DeviceRange) -> CallResult {
    let mut tables = state.tables();
    let device = tables.reserved(range)?;
    state.devices[device].host.unmap(range)?;
    let gone: Vec<u64> = tables.mappings.range(range.addr..range.end()).map(|(addr, _)| *addr).collect();
    for mapping in gone.iter().filter_map(|addr| tables.mappings.remove(addr)).collect::<Vec<_>>() {
        let Some(backing) = tables.backings.get_mut(&mapping.backing) else { continue };
        backing.mappings -= 1;
        if backing.mappings == 0 && backing.released {
            tables.backings.remove(&mapping.backing);
        }
    }
    Ok(())
}

pub(crate) fn set_access(state: &SimulatorState, range: DeviceRange, wanted: &[AccessDesc]) -> CallResult {
    let mut tables = state.tables();
    let owner = &state.devices[tables.reserved(range)?];
    let mut devices = BTreeSet::new();
    for desc in wanted {
        ensure(desc.flags == READ_WRITE)?;
        let device = located(state, &desc.location)?;
        if device.ordinal != owner.ordinal && !device.reaches(owner) {
            return Err(Code::INVALID_DEVICE);
        }
        devices.insert(device.ordinal);
    }
    ensure(devices.contains(&owner.ordinal))?;
    owner.host.set_access(range)?;
    for (_, mapping) in tables.mappings.range_mut(range.addr..range.end()) {
        mapping.open_to.extend(&devices);
    }
    Ok(())
}

/// The device of the reservation that contains a range.
pub(crate) fn device_at(state: &SimulatorState, range: DeviceRange) -> Option<usize> {
    state.tables().reserved(range).ok()
}

/// The device that owns a range, if all of it is mapped with access for `user`.
pub(crate) fn owner_of<'w>(
    state: &'w SimulatorState,
    user: &Device,
    range: DeviceRange,
) -> CallResult<&'w Device> {
    let tables = state.tables();
    let owner = tables.reserved(range)?;
    let mut addr = range.addr;
    while addr < range.end() {
        let (start, mapping) = tables.mappings.range(..=addr).next_back().ok_or(Code::INVALID_VALUE)?;
        ensure(addr < start + mapping.bytes && mapping.open_to.contains(&user.ordinal))?;
        addr = start + mapping.bytes;
    }
    Ok(&state.devices[owner])
}

pub(crate) fn register(current: &Current, addr: usize, bytes: usize, flags: u32) -> CallResult {
    let end = addr.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
    ensure(addr != 0 && bytes > 0 && flags & !REGISTER_FLAGS == 0)?;
    let mut tables = current.state.tables();
    let before = tables.registered.range(..end).next_back();
    if before.is_some_and(|(start, other)| start + other.bytes > addr) {
        return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
    }
    let (device, context) = (current.device.ordinal, current.context);
    let (is_mapped, is_portable) = (flags & MAPPED != 0, flags & PORTABLE != 0);
    let registered = Registered { device, context, bytes, is_mapped, is_portable };
    tables.registered.insert(addr, registered);
    Ok(())
}

pub(crate) fn unregister(current: &Current, addr: usize) -> CallResult {
    ensure(addr != 0)?;
    let gone = current.state.tables().registered.remove(&addr);
    gone.map(drop).ok_or(Code::HOST_MEMORY_NOT_REGISTERED)
}

/// The address by which kernels access registered memory.
pub(crate) fn device_pointer(current: &Current, addr: usize, flags: u32) -> CallResult<u64> {
    ensure(flags == 0)?;
    let tables = current.state.tables();
    let registered = tables.registered_at(addr, 1)?;
    ensure(registered.is_mapped && (registered.is_portable || registered.context == current.context))?;
    Ok(addr as u64 | HOST_WINDOW)
}

/// The host address behind a kernel's address, if all of it is registered.
pub(crate) fn host_address(state: &SimulatorState, addr: u64, bytes: usize) -> CallResult<usize> {
    let host = usize::try_from(addr & !HOST_WINDOW).map_err(|_| Code::ILLEGAL_ADDRESS)?;
    let tables = state.tables();
    let registered = tables.registered_at(host, bytes).map_err(|_| Code::ILLEGAL_ADDRESS)?;
    if addr & HOST_WINDOW != 0 && registered.is_mapped { Ok(host) } else { Err(Code::ILLEGAL_ADDRESS) }
}

impl Tables {
    fn registered_at(&self, addr: usize, bytes: usize) -> CallResult<&Registered> {
        let (start, found) = self.registered.range(..=addr).next_back().ok_or(Code::INVALID_VALUE)?;
        let inside = (addr - start).checked_add(bytes).is_some_and(|end| end <= found.bytes);
        ensure(inside)?;
        Ok(found)
    }

    /// A backing whose handle is not released.
    fn live(&mut self, handle: Handle) -> CallResult<&mut Backing> {
        self.backings.get_mut(&handle).filter(|backing| !backing.released).ok_or(Code::INVALID_VALUE)
    }

    fn reserved(&self, range: DeviceRange) -> CallResult<usize> {
        let (addr, found) = self.reservations.range(..=range.addr).next_back().ok_or(Code::INVALID_VALUE)?;
        ensure(DeviceRange::new(*addr, found.bytes).contains(&range))?;
        Ok(found.device)
    }
}
