//! Driver calls on addresses and physical memory of one GPU.
//!
//! [`super::state`] ensures their preconditions.

use std::sync::Arc;

use poorwill_core::{DeviceRange, DriverErrorKind};

use super::context::Context;
use super::ffi::{AllocationProp, CuResult};
use super::gpu::memory_of;
use super::peers::Access;
use super::primary::CudaMemory;
use crate::ledger::{Result, invalid};

/// The context is entered for all calls.
#[derive(Debug)]
pub(super) struct Vm {
    context: Arc<Context>,
    memory: AllocationProp,
    access: Access,
}

impl Vm {
    pub(super) fn new(context: &Arc<Context>, access: Access) -> Self {
        let memory = memory_of(context.api(), context.device());
        Self { context: Arc::clone(context), memory, access }
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
        let (mut handle, len) = (0, to_usize(bytes)?);
        let memory = &raw const self.memory;
        // SAFETY: C2.
        let code = unsafe { (self.context.api().mem_create)(&raw mut handle, len, memory, 0) };
        self.check_memory(code, bytes).map(|()| handle)
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

    /// For the GPU and its peers. Parts already open stay open.
    pub(super) fn open(&self, range: DeviceRange) -> Result<()> {
        let (bytes, descs) = (to_usize(range.bytes)?, self.access.descs());
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

pub(super) fn to_usize(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| invalid(format!("{bytes} bytes do not fit this machine's addresses")))
}
