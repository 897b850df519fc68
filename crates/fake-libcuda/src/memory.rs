//! Backings, reservations, mappings and registered host memory.
//!
//! The host device checks most calls; this module adds CUDA's rules.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::{BorrowedFd, OwnedFd};

use poorwill_core::{BackingId, DeviceRange, Driver};

use crate::abi::{AccessDesc, AllocationProp, CallResult, Code, LOCATION_DEVICE, Location};
use crate::device::{self, Device};
use crate::handle::{Handle, HandleKind, new_handle};

/// What callers have made of memory, on all devices.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    backings: HashMap<Handle, Backing>,
    reservations: BTreeMap<u64, Reservation>,
    mappings: BTreeMap<u64, Mapping>,
    registered: BTreeMap<usize, Registered>,
}

/// How much there is of each on a device.
#[derive(Debug)]
pub(crate) struct MemoryObjects {
    pub(crate) backings: u64,
    pub(crate) reservations: u64,
    pub(crate) mappings: u64,
    pub(crate) registered: u64,
}

/// Its handle ends with its release, the memory with the last unmap.
#[derive(Debug)]
struct Backing {
    device: usize,
    id: BackingId,
    mappings: u64,
    released: bool,
}

#[derive(Debug)]
struct Reservation {
    device: usize,
    bytes: u64,
    /// The host device's reservation, larger if the caller requested an alignment above the granule.
    whole: DeviceRange,
}

#[derive(Debug)]
struct Mapping {
    device: usize,
    bytes: u64,
    backing: Handle,
    open_to: BTreeSet<usize>,
}

#[derive(Debug)]
struct Registered {
    device: usize,
    context: Handle,
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

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const FILE_DESCRIPTOR: i32 = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: i32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: i32 = 3;
/// `CU_MEMHOSTREGISTER_*`: portable, mapped, of a device's, read-only.
const REGISTER_FLAGS: u32 = 0xF;

fn ensure(condition: bool) -> CallResult {
    if condition { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

fn located<'w>(devices: &'w [Device], location: &Location) -> CallResult<&'w Device> {
    ensure(location.kind == LOCATION_DEVICE)?;
    device::at(devices, location.id).map_err(|_| Code::INVALID_VALUE)
}

pub(crate) fn device_of<'w>(devices: &'w [Device], prop: &AllocationProp) -> CallResult<&'w Device> {
    ensure(prop.kind == PINNED)?;
    ensure(
        matches!(prop.requested_handle_types, 0 | FILE_DESCRIPTOR) && prop.win32_handle_meta_data.is_null(),
    )?;
    ensure(prop.compression_type == 0 && prop.gpu_direct_rdma_capable <= 1)?;
    ensure(prop.usage == 0 && prop.reserved == [0; 4])?;
    located(devices, &prop.location)
}

impl Memory {
    pub(crate) fn count(&self, device: usize) -> MemoryObjects {
        let ours = |of: usize| u64::from(of == device);
        MemoryObjects {
            backings: self.backings.values().map(|b| ours(b.device)).sum(),
            reservations: self.reservations.values().map(|r| ours(r.device)).sum(),
            mappings: self.mappings.values().map(|m| ours(m.device)).sum(),
            registered: self.registered.values().map(|r| ours(r.device)).sum(),
        }
    }

    pub(crate) fn reserve(
        &mut self,
        device: &Device,
        bytes: usize,
        alignment: usize,
        flags: u64,
    ) -> CallResult<u64> {
        let (bytes, alignment) = (bytes as u64, alignment as u64);
        ensure(flags == 0 && (alignment == 0 || alignment.is_power_of_two()))?;
        ensure(bytes > 0 && bytes.is_multiple_of(device.granule()))?;
        let slack = if alignment > device.granule() { alignment } else { 0 };
        let whole = device.host.reserve(bytes.checked_add(slack).ok_or(Code::OUT_OF_MEMORY)?)?;
        let addr = whole.addr.next_multiple_of(alignment.max(1));
        let reservation = Reservation { device: device.ordinal, bytes, whole };
        self.reservations.insert(addr, reservation);
        Ok(addr)
    }

    pub(crate) fn unreserve(&mut self, devices: &[Device], range: DeviceRange) -> CallResult {
        let found = self.reservations.get(&range.addr).filter(|found| found.bytes == range.bytes);
        let found = found.ok_or(Code::INVALID_VALUE)?;
        devices[found.device].host.unreserve(found.whole)?;
        self.reservations.remove(&range.addr);
        Ok(())
    }

    /// The tables are locked meanwhile, so that no other call takes the available memory.
    pub(crate) fn create(
        &mut self,
        devices: &[Device],
        bytes: usize,
        prop: &AllocationProp,
        flags: u64,
    ) -> CallResult<Handle> {
        let device = device_of(devices, prop)?;
        let bytes = bytes as u64;
        ensure(flags == 0 && bytes > 0 && bytes.is_multiple_of(device.granule()))?;
        if bytes > device.simulation.available_bytes(device.memory()?) {
            return Err(Code::OUT_OF_MEMORY);
        }
        let is_shared = prop.requested_handle_types == FILE_DESCRIPTOR;
        let id = if is_shared { device.host.create_shared(bytes) } else { device.host.create(bytes) }?;
        Ok(self.created(device, id))
    }

    fn created(&mut self, device: &Device, id: BackingId) -> Handle {
        let handle = new_handle(HandleKind::Backing);
        let backing = Backing { device: device.ordinal, id, mappings: 0, released: false };
        self.backings.insert(handle, backing);
        handle
    }

    pub(crate) fn export(
        &mut self,
        devices: &[Device],
        handle: Handle,
        kind: i32,
        flags: u64,
    ) -> CallResult<OwnedFd> {
        ensure(kind == FILE_DESCRIPTOR && flags == 0)?;
        let backing = live(&mut self.backings, handle)?;
        Ok(devices[backing.device].host.export(backing.id)?)
    }

    pub(crate) fn import(
        &mut self,
        device: &Device,
        memory: BorrowedFd<'_>,
        kind: i32,
    ) -> CallResult<Handle> {
        ensure(kind == FILE_DESCRIPTOR)?;
        let found = rustix::fs::fstat(memory).map_err(|_| Code::INVALID_VALUE)?;
        let bytes = u64::try_from(found.st_size).map_err(|_| Code::INVALID_VALUE)?;
        let id = device.host.import(memory, bytes)?;
        Ok(self.created(device, id))
    }

    pub(crate) fn release(&mut self, devices: &[Device], handle: Handle) -> CallResult {
        let backing = live(&mut self.backings, handle)?;
        devices[backing.device].host.release(backing.id)?;
        if backing.mappings == 0 {
            self.backings.remove(&handle);
        } else {
            backing.released = true;
        }
        Ok(())
    }

    pub(crate) fn map(
        &mut self,
        devices: &[Device],
        range: DeviceRange,
        offset: usize,
        handle: Handle,
        flags: u64,
    ) -> CallResult {
        ensure(offset == 0 && flags == 0)?;
        let device = self.reserved(range)?;
        let backing = live(&mut self.backings, handle)?;
        if backing.device != device {
            eprintln!(
                "fake libcuda: {range} was reserved with a context of device {device} current and takes no memory of \
                 device {}; CUDA would",
                backing.device
            );
            return Err(Code::INVALID_VALUE);
        }
        devices[device].host.map(range, backing.id)?;
        backing.mappings += 1;
        let mapping = Mapping { device, bytes: range.bytes, backing: handle, open_to: BTreeSet::new() };
        self.mappings.insert(range.addr, mapping);
        Ok(())
    }

    pub(crate) fn unmap(&mut self, devices: &[Device], range: DeviceRange) -> CallResult {
        let device = self.reserved(range)?;
        devices[device].host.unmap(range)?;
        let gone: Vec<u64> = self.mappings.range(range.addr..range.end()).map(|(addr, _)| *addr).collect();
        for mapping in gone.iter().filter_map(|addr| self.mappings.remove(addr)).collect::<Vec<_>>() {
            let Some(backing) = self.backings.get_mut(&mapping.backing) else { continue };
            backing.mappings -= 1;
            if backing.mappings == 0 && backing.released {
                self.backings.remove(&mapping.backing);
            }
        }
        Ok(())
    }

    pub(crate) fn set_access(
        &mut self,
        devices: &[Device],
        range: DeviceRange,
        wanted: &[AccessDesc],
    ) -> CallResult {
        let owner = &devices[self.reserved(range)?];
        let mut users = BTreeSet::new();
        for desc in wanted {
            ensure(desc.flags == READ_WRITE)?;
            let device = located(devices, &desc.location)?;
            if device.ordinal != owner.ordinal && !device.reaches(owner) {
                return Err(Code::INVALID_DEVICE);
            }
            users.insert(device.ordinal);
        }
        ensure(users.contains(&owner.ordinal))?;
        owner.host.set_access(range)?;
        for (_, mapping) in self.mappings.range_mut(range.addr..range.end()) {
            mapping.open_to.extend(&users);
        }
        Ok(())
    }

    /// The device of the reservation that contains a range.
    pub(crate) fn device_at(&self, range: DeviceRange) -> Option<usize> {
        self.reserved(range).ok()
    }

    /// The device that owns a range, if all of it is mapped with access for `user`.
    pub(crate) fn owner_of<'w>(
        &self,
        devices: &'w [Device],
        user: &Device,
        range: DeviceRange,
    ) -> CallResult<&'w Device> {
        let owner = self.reserved(range)?;
        let mut addr = range.addr;
        while addr < range.end() {
            let (start, mapping) = self.mappings.range(..=addr).next_back().ok_or(Code::INVALID_VALUE)?;
            ensure(addr < start + mapping.bytes && mapping.open_to.contains(&user.ordinal))?;
            addr = start + mapping.bytes;
        }
        Ok(&devices[owner])
    }

    pub(crate) fn register(
        &mut self,
        (device, context): (&Device, Handle),
        addr: usize,
        bytes: usize,
        flags: u32,
    ) -> CallResult {
        let end = addr.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
        ensure(addr != 0 && bytes > 0 && flags & !REGISTER_FLAGS == 0)?;
        let before = self.registered.range(..end).next_back();
        if before.is_some_and(|(start, other)| start + other.bytes > addr) {
            return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        let device = device.ordinal;
        let (is_mapped, is_portable) = (flags & MAPPED != 0, flags & PORTABLE != 0);
        let registered = Registered { device, context, bytes, is_mapped, is_portable };
        self.registered.insert(addr, registered);
        Ok(())
    }

    pub(crate) fn unregister(&mut self, addr: usize) -> CallResult {
        ensure(addr != 0)?;
        self.registered.remove(&addr).map(drop).ok_or(Code::HOST_MEMORY_NOT_REGISTERED)
    }

    /// Unregisters all of a context's.
    pub(crate) fn unregister_all(&mut self, context: Handle) {
        self.registered.retain(|_, registered| registered.context != context);
    }

    /// The address by which kernels of a context access registered memory.
    pub(crate) fn device_pointer(&self, context: Handle, addr: usize, flags: u32) -> CallResult<u64> {
        ensure(flags == 0)?;
        let registered = self.registered_at(addr, 1)?;
        ensure(registered.is_mapped && (registered.is_portable || registered.context == context))?;
        Ok(addr as u64 | HOST_WINDOW)
    }

    /// The host address behind a kernel's address, if all of it is registered.
    pub(crate) fn host_address(&self, addr: u64, bytes: usize) -> CallResult<usize> {
        let host = usize::try_from(addr & !HOST_WINDOW).map_err(|_| Code::ILLEGAL_ADDRESS)?;
        let registered = self.registered_at(host, bytes).map_err(|_| Code::ILLEGAL_ADDRESS)?;
        if addr & HOST_WINDOW != 0 && registered.is_mapped { Ok(host) } else { Err(Code::ILLEGAL_ADDRESS) }
    }

    fn registered_at(&self, addr: usize, bytes: usize) -> CallResult<&Registered> {
        let (start, found) = self.registered.range(..=addr).next_back().ok_or(Code::INVALID_VALUE)?;
        let inside = (addr - start).checked_add(bytes).is_some_and(|end| end <= found.bytes);
        ensure(inside)?;
        Ok(found)
    }

    fn reserved(&self, range: DeviceRange) -> CallResult<usize> {
        let (addr, found) = self.reservations.range(..=range.addr).next_back().ok_or(Code::INVALID_VALUE)?;
        ensure(DeviceRange::new(*addr, found.bytes).contains(&range))?;
        Ok(found.device)
    }
}

/// A backing whose handle is not released.
fn live(backings: &mut HashMap<Handle, Backing>, handle: Handle) -> CallResult<&mut Backing> {
    backings.get_mut(&handle).filter(|backing| !backing.released).ok_or(Code::INVALID_VALUE)
}

pub(crate) fn range(addr: u64, bytes: usize) -> CallResult<DeviceRange> {
    let bytes = bytes as u64;
    addr.checked_add(bytes).map(|_| DeviceRange::new(addr, bytes)).ok_or(Code::INVALID_VALUE)
}
