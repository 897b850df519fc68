//! Digests, by a kernel where there is one, otherwise on the host.
//!
//! The kernel is loaded and both its entries are tried out when the device is opened. A driver that refuses it, a GPU on
//! which it computes something else, or granules that it is not made for leave the host's way, and the reason.

mod host;
mod kernel;

use std::sync::Arc;

use poorwill_core::{CopyPart, DeviceRange};

use super::context::Context;
use super::ffi::CuDeviceptr;
use super::slots::Slots;

pub(super) use host::{Digests, of_stored};
pub(super) use kernel::Job;
pub use kernel::{DIGEST_LEAVES_MAX, DIGEST_LEAVES_MIN, DIGEST_PTX};
use kernel::{DigestKernel, Memory};

/// What computes digests on a device.
#[derive(Debug, Clone)]
pub(super) struct Digester {
    kernel: Result<Arc<DigestKernel>, String>,
    granule_bytes: u64,
}

impl Digester {
    /// With page-locked memory, or why there is none. The caller has entered the context.
    pub(super) fn open(
        context: &Arc<Context>,
        slots: &Result<Arc<Slots>, String>,
        granule_bytes: u64,
    ) -> Self {
        Self { kernel: DigestKernel::open(context, slots, granule_bytes).map(Arc::new), granule_bytes }
    }

    /// One that has nothing, for a device that ends.
    pub(super) fn closed() -> Self {
        Self { kernel: Err("the device has been closed".into()), granule_bytes: 1 }
    }

    /// Why there is no kernel, if there is none.
    pub(super) fn kernel(&self) -> Result<(), &str> {
        self.kernel.as_ref().map(drop).map_err(String::as_str)
    }

    /// The kernel's work for ranges of the device, which begin and end on granules, if it can do it.
    pub(super) fn of_device(&self, ranges: &[DeviceRange]) -> Option<Job> {
        let kernel = self.kernel.as_ref().ok()?;
        let granules = ranges.iter().flat_map(|range| self.granules(range.addr, range.bytes));
        Job::new(kernel, Memory::Device, &granules.collect::<Vec<_>>())
    }

    /// The kernel's work for what the parts of a copy have stored in a buffer, if it can do it: the buffer is
    /// page-locked, and its granules begin where the kernel's loads can.
    pub(super) fn of_stored(&self, context: &Context, buffer: &[u8], parts: &[CopyPart]) -> Option<Job> {
        let kernel = self.kernel.as_ref().ok()?;
        let start = context.pinned_at(buffer.as_ptr().addr(), buffer.len())?;
        let granules =
            parts.iter().flat_map(|part| self.granules(start + part.host_offset, part.device.bytes));
        let granules: Vec<CuDeviceptr> = granules.collect();
        if !granules.iter().all(|granule| granule.is_multiple_of(kernel::ALIGNMENT)) {
            return None;
        }
        Job::new(kernel, Memory::Host, &granules)
    }

    fn granules(&self, start: CuDeviceptr, bytes: u64) -> impl Iterator<Item = CuDeviceptr> + use<> {
        let step = self.granule_bytes;
        (0..bytes / step).map(move |nth| start + nth * step)
    }
}
