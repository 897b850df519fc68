//! Driver calls on addresses and physical memory of one GPU.
//!
//! [`super::state`] ensures their preconditions.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use poorwill_core::{DeviceRange, DriverErrorKind};

use super::context::Context;
use super::ffi::{AllocationProp, CuResult, FILE_DESCRIPTOR};
use super::gpu::{has_descriptors, memory_of};
use super::peers::{Access, Reach};
use super::primary::CudaMemory;
use crate::ledger::{Result, invalid};

/// The context is entered for all calls.
#[derive(Debug)]
pub(super) struct Vm {
    context: Arc<Context>,
    memory: AllocationProp,
    /// Of memory that other processes can have, if the device has such.
    shared: Option<AllocationProp>,
    access: Access,
}

impl Vm {
    pub(super) fn new(context: &Arc<Context>, access: Access) -> Self {
        let (api, device) = (context.api(), context.device());
        let memory = memory_of(api, device);
        let with_descriptors = AllocationProp { requested_handle_types: FILE_DESCRIPTOR, ..memory };
        let shared = has_descriptors(api, device).then_some(with_descriptors);
        Self { context: Arc::clone(context), memory, shared, access }
    }

    pub(super) fn shares_memory(&self) -> bool {
        self.shared.is_some()
    }

    pub(super) fn peers(&self) -> &[u32] {
        self.access.peers()
    }

    pub(super) fn reserve(&self, bytes: u64, align: u64) -> Result<DeviceRange> {
        let (api, len, align, mut addr) = (self.context.api(), to_usize(bytes)?, to_usize(align)?, 0);
        // SAFETY: C2.
        let reserved = unsafe { (api.mem_address_reserve)(&raw mut addr, len, align, 0, 0) };
        if matches!(reserved, CuResult::INVALID_VALUE | CuResult::OUT_OF_MEMORY) {
            let reason = api.error(reserved).to_string();
            return Err(DriverErrorKind::OutOfAddressSpace { asked_bytes: bytes, reason });
        }
        api.check(reserved)?;
        Ok(DeviceRange::new(addr, bytes))
    }

    pub(super) fn free(&self, range: DeviceRange) -> Result<()> {
        let (api, bytes) = (self.context.api(), to_usize(range.bytes)?);
        // SAFETY: C3, a reservation of ours in which nothing is mapped.
        api.check(unsafe { (api.mem_address_free)(range.addr, bytes) })
    }

    /// The driver may first have to clean what was just released.
    pub(super) fn create(&self, bytes: u64) -> Result<u64> {
        self.create_as(&self.memory, bytes)
    }

    pub(super) fn create_shared(&self, bytes: u64) -> Result<u64> {
        self.create_as(self.shared.as_ref().ok_or_else(unshared)?, bytes)
    }

    fn create_as(&self, memory: &AllocationProp, bytes: u64) -> Result<u64> {
        let (mut handle, len) = (0, to_usize(bytes)?);
        // SAFETY: C2.
        let code =
            unsafe { (self.context.api().mem_create)(&raw mut handle, len, std::ptr::from_ref(memory), 0) };
        self.check_memory(code, bytes).map(|()| handle)
    }

    pub(super) fn export(&self, handle: u64) -> Result<OwnedFd> {
        self.shared.as_ref().ok_or_else(unshared)?;
        let (api, mut descriptor) = (self.context.api(), -1);
        // SAFETY: C2 and C3: a handle of ours; the call writes one descriptor.
        let code = unsafe { (api.mem_export)(&raw mut descriptor, handle, FILE_DESCRIPTOR, 0) };
        if code == CuResult::INVALID_VALUE {
            return Err(invalid("it was imported, or not created as shared memory".into()));
        }
        api.check(code)?;
        // SAFETY: C2, the driver has opened it for us.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC)
            .map_err(|error| invalid(format!("the driver gave no descriptor: {error}")))?;
        Ok(descriptor)
    }

    pub(super) fn import(&self, memory: BorrowedFd<'_>) -> Result<u64> {
        self.shared.as_ref().ok_or_else(unshared)?;
        let (api, mut handle) = (self.context.api(), 0);
        let descriptor = usize::try_from(memory.as_raw_fd()).unwrap_or(usize::MAX);
        // SAFETY: C2; the driver takes a descriptor as a pointer's bits, and duplicates it.
        let code = unsafe { (api.mem_import)(&raw mut handle, descriptor, FILE_DESCRIPTOR) };
        if matches!(code, CuResult::INVALID_VALUE | CuResult::OPERATING_SYSTEM | CuResult::UNKNOWN) {
            let reason = api.error(code);
            return Err(invalid(format!(
                "the driver finds no memory of a device in the descriptor: {reason}"
            )));
        }
        api.check(code).map(|()| handle)
    }

    pub(super) fn release(&self, handle: u64) -> Result<()> {
        let api = self.context.api();
        // SAFETY: C3, created by us and released once.
        api.check(unsafe { (api.mem_release)(handle) })
    }

    pub(super) fn map(&self, range: DeviceRange, handle: u64) -> Result<()> {
        let bytes = to_usize(range.bytes)?;
        // SAFETY: C3, the range is ours and free, the handle alive and of this size.
        let mapped = unsafe { (self.context.api().mem_map)(range.addr, bytes, 0, handle, 0) };
        // The driver's own tables take memory, too.
        self.check_memory(mapped, range.bytes)
    }

    /// Parts already open stay open.
    pub(super) fn open(&self, range: DeviceRange, reach: Reach) -> Result<()> {
        let (bytes, descs) = (to_usize(range.bytes)?, self.access.descs(reach));
        let set_access = self.context.api().mem_set_access;
        // SAFETY: C3, all of the range is mapped.
        let opened = unsafe { set_access(range.addr, bytes, descs.as_ptr(), descs.len()) };
        self.check_memory(opened, range.bytes).map_err(|error| self.access.refused(error))
    }

    pub(super) fn unmap(&self, range: DeviceRange) -> Result<()> {
        let (api, bytes) = (self.context.api(), to_usize(range.bytes)?);
        // SAFETY: C3, the range is mapped by us, and by the contract nothing is in flight on it.
        api.check(unsafe { (api.mem_unmap)(range.addr, bytes) })
    }

    /// A full device is `OutOfMemory`.
    fn check_memory(&self, code: CuResult, asked_bytes: u64) -> Result<()> {
        if code == CuResult::OUT_OF_MEMORY {
            // If the driver does not report free memory, none is available.
            let free_bytes = match self.context.memory() {
                Ok(CudaMemory::Known { free_bytes, .. }) => free_bytes,
                _ => 0,
            };
            return Err(DriverErrorKind::OutOfMemory { asked_bytes, free_bytes });
        }
        self.context.api().check(code)
    }
}

fn unshared() -> DriverErrorKind {
    let reason = "this device has no descriptors of its memory, by which other processes could have it";
    DriverErrorKind::Unsupported { reason: reason.into() }
}

pub(super) fn to_usize(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| invalid(format!("{bytes} bytes do not fit this machine's addresses")))
}
