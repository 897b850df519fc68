//! Page-locks host memory with the GPU's driver.

use std::ptr;
use std::sync::Arc;

use poorwill_core::Op;

use super::ffi::{CuDeviceptr, CuResult, REGISTER_FLAGS};
use super::primary::Primary;
use crate::host_memory::{Backend, Refusal, Region};

/// Keeps the context.
#[derive(Debug)]
pub(super) struct Locked {
    primary: Arc<Primary>,
}

impl Locked {
    pub(super) fn new(primary: &Arc<Primary>) -> Self {
        Self { primary: Arc::clone(primary) }
    }
}

impl Backend for Locked {
    fn lock(&self, region: &Region) -> Result<Option<u64>, Refusal> {
        let failed =
            |error: &dyn std::fmt::Display| Refusal::Failed(format!("page-locking it failed: {error}"));
        let _entered = self.primary.enter(Op::HostAlloc).map_err(|error| failed(&error.kind))?;
        let api = self.primary.api();
        let start = ptr::with_exposed_provenance_mut(region.start());
        // SAFETY: C4, the region's owner unregisters it before unmapping it.
        let registered = unsafe { (api.mem_host_register)(start, region.bytes(), REGISTER_FLAGS) };
        if matches!(registered, CuResult::NOT_PERMITTED | CuResult::NOT_SUPPORTED) {
            let words = api.error(registered);
            return Err(Refusal::Unsupported(format!("the driver does not page-lock memory here: {words}")));
        }
        api.check(registered).map_err(|error| failed(&error))?;
        // SAFETY: C2; the memory is registered.
        let device: Result<CuDeviceptr, _> =
            api.get(|device| unsafe { (api.mem_host_get_device_pointer)(device, start, 0) });
        device.map(Some).map_err(|error| {
            let reason = format!("page-locked memory has no address for the device: {error}");
            if self.unlock(region) { Refusal::Failed(reason) } else { Refusal::HalfRegistered(reason) }
        })
    }

    fn unlock(&self, region: &Region) -> bool {
        let Ok(_entered) = self.primary.enter(Op::HostTrim) else { return false };
        let start = ptr::with_exposed_provenance_mut(region.start());
        // SAFETY: C4, registered when it was made, and no code uses it any more.
        unsafe { (self.primary.api().mem_host_unregister)(start) == CuResult::SUCCESS }
    }
}
