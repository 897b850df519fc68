//! Digests: by a kernel where possible, otherwise on the host.
//!
//! Opening the device loads the kernel and tests both its entries. If it cannot be used, the host computes
//! digests and the reason is kept.

mod host;
mod kernel;

use std::sync::Arc;

use poorwill_core::{CopyPart, DeviceRange};

use super::context::Context;
use super::ffi::CuDeviceptr;
use super::slots::PinnedSlots;

pub(super) use host::{Digests, of_stored};
pub(super) use kernel::DigestJob;
pub use kernel::{DIGEST_LEAVES_MAX, DIGEST_LEAVES_MIN, DIGEST_PTX};
use kernel::{DigestKernel, Memory};

#[derive(Debug, Clone)]
pub(super) struct Digester {
    kernel: Result<Arc<DigestKernel>, String>,
    granule_bytes: u64,
}

impl Digester {
    /// `slots` are page-locked memory, or why there is none. The context is entered.
    pub(super) fn open(
        context: &Arc<Context>,
        slots: &Result<Arc<PinnedSlots>, String>,
        granule_bytes: u64,
    ) -> Self {
        Self { kernel: DigestKernel::open(context, slots, granule_bytes).map(Arc::new), granule_bytes }
    }

    pub(super) fn closed() -> Self {
        Self { kernel: Err("the device has been closed".into()), granule_bytes: 1 }
    }

    pub(super) fn kernel(&self) -> Result<(), &str> {
        self.kernel.as_ref().map(drop).map_err(String::as_str)
    }

    /// `None` where the kernel cannot do it.
    pub(super) fn of_device(&self, ranges: &[DeviceRange]) -> Option<DigestJob> {
        let kernel = self.kernel.as_ref().ok()?;
        let granules = ranges.iter().flat_map(|range| self.granules(range.addr, range.bytes));
        DigestJob::new(kernel, Memory::Device, &granules.collect::<Vec<_>>())
    }

    /// The same for saved parts: the buffer must be page-locked and its granules aligned.
    pub(super) fn of_stored(
        &self,
        context: &Context,
        buffer: &[u8],
        parts: &[CopyPart],
    ) -> Option<DigestJob> {
        let kernel = self.kernel.as_ref().ok()?;
        let start = context.pinned_at(buffer.as_ptr().addr(), buffer.len())?;
        let granules =
            parts.iter().flat_map(|part| self.granules(start + part.host_offset, part.device.bytes));
        let granules: Vec<CuDeviceptr> = granules.collect();
        if !granules.iter().all(|granule| granule.is_multiple_of(kernel::ALIGNMENT)) {
            return None;
        }
        DigestJob::new(kernel, Memory::Host, &granules)
    }

    fn granules(&self, start: CuDeviceptr, bytes: u64) -> impl Iterator<Item = CuDeviceptr> + use<> {
        let step = self.granule_bytes;
        (0..bytes / step).map(move |nth| start + nth * step)
    }
}
