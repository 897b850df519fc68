//! Memory of another GPU, which this one can map. It needs no context there.

use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::peer::PeerMemory;
use poorwill_core::{DriverError, DriverErrorKind, Op};

use super::context::Context;
use super::ffi::{AllocationProp, CuResult, FILE_DESCRIPTOR};
use super::gpu::{find, has_descriptors, memory_of};
use super::peers::can_reach;
use super::vm::to_usize;
use crate::ledger::{Result, invalid, of};
use crate::nvml::Nvml;
use crate::peer_memory::idle_of;

/// Memory of another GPU of the same host.
#[derive(Debug)]
pub struct PeerGpu {
    context: Arc<Context>,
    number: u32,
    uuid: String,
    name: String,
    memory: AllocationProp,
}

impl PeerGpu {
    pub(super) fn of(context: &Arc<Context>, own: u32, number: u32) -> Result<Self> {
        let api = context.api();
        let (device, gpu) = find(api, number)?;
        if number == own || !can_reach(api, context.device(), device) {
            return Err(invalid(format!(
                "cuda:{number} can have no copies of cuda:{own}: that GPU does not reach its memory \
                 (cuDeviceCanAccessPeer); leave it out of `peer_copies`"
            )));
        }
        if !has_descriptors(api, device) {
            return Err(invalid(format!(
                "cuda:{number} has no descriptors of its memory: no copies fit there"
            )));
        }
        let memory = AllocationProp { requested_handle_types: FILE_DESCRIPTOR, ..memory_of(api, device) };
        let name = format!("GPU-{}", gpu.uuid);
        Ok(Self { context: Arc::clone(context), number, uuid: gpu.uuid, name, memory })
    }
}

impl PeerMemory for PeerGpu {
    fn memory_name(&self) -> &str {
        &self.name
    }

    fn idle_bytes(&self) -> DriverResult<u64> {
        let memory = Nvml::load().ok().and_then(|nvml| nvml.memory(&self.uuid));
        let memory = memory.ok_or_else(|| {
            let reason = format!("NVML does not say how much memory of cuda:{} is free", self.number);
            DriverError::new(Op::MemoryInfo, DriverErrorKind::Unsupported { reason })
        })?;
        Ok(idle_of(memory.free_bytes, memory.total_bytes))
    }

    fn create(&self, bytes: u64) -> DriverResult<OwnedFd> {
        let _entered = self.context.enter(Op::Create)?;
        self.created(bytes).map_err(of(Op::Create))
    }
}

impl PeerGpu {
    /// The context is entered.
    fn created(&self, bytes: u64) -> Result<OwnedFd> {
        let (api, len, mut handle) = (self.context.api(), to_usize(bytes)?, 0);
        // SAFETY: C2.
        let code = unsafe { (api.mem_create)(&raw mut handle, len, &raw const self.memory, 0) };
        if code == CuResult::OUT_OF_MEMORY {
            return Err(DriverErrorKind::OutOfMemory { asked_bytes: bytes, free_bytes: 0 });
        }
        api.check(code)?;
        let mut descriptor = -1;
        // SAFETY: C2 and C3: a handle of ours; the call writes one descriptor.
        let exported =
            api.check(unsafe { (api.mem_export)(&raw mut descriptor, handle, FILE_DESCRIPTOR, 0) });
        // SAFETY: C3, created above and released once. The descriptor keeps the memory.
        let released = api.check(unsafe { (api.mem_release)(handle) });
        exported?;
        // SAFETY: C2, the driver has opened it for us.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        released?;
        rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC)
            .map_err(|error| invalid(format!("the driver gave no descriptor: {error}")))?;
        Ok(descriptor)
    }
}
