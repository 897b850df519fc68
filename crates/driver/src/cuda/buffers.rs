//! Host memory for the device's callers: buffers, and views of their own memory.

use std::ops::Range;

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{HostBuffer, Op};

use super::device::CudaDevice;
use super::registered::{HostView, wait_for_all_work};
use crate::host_memory::{BufferMade, BufferPin};
use crate::ledger::{invalid, of};

impl CudaDevice {
    /// A buffer of exactly `bytes` bytes, like [`host_alloc`](poorwill_core::Driver::host_alloc). The text
    /// says why it is not page-locked, if it should be where possible.
    ///
    /// # Errors
    /// `OutOfHostMemory`; `Unsupported` if it must be page-locked and cannot be.
    pub fn host_buffer(&self, bytes: u64, pin: BufferPin) -> DriverResult<(HostBuffer, Option<String>)> {
        let _entered = self.enter(Op::HostAlloc)?;
        let (buffer, because) = self.context().host_memory().alloc_as(bytes, pin)?;
        Ok((HostBuffer::new(buffer), because))
    }

    /// Like [`HostDevice::release_surplus`](crate::HostDevice::release_surplus). Waits for all work on the GPU
    /// if any of the memory is page-locked.
    pub fn release_surplus(&self, bytes: u64) {
        self.context().host_memory().release_surplus(bytes);
    }

    /// Several buffers like those of [`CudaDevice::host_buffer`], made in the background.
    ///
    /// # Errors
    /// `OutOfHostMemory` at the call, before anything is made, if not all of it is known to be available. At
    /// `wait` as for [`CudaDevice::host_buffer`].
    pub fn host_buffers(&self, sizes: &[u64], pin: BufferPin) -> DriverResult<Vec<BufferMade>> {
        let _entered = self.enter(Op::HostAlloc)?;
        self.context().host_memory().alloc_all_as(sizes, pin)
    }

    /// A view of the caller's host memory for the GPU. Memory that is already page-locked is used as it is.
    /// Other memory is page-locked in place until its last view goes, or gives `None` unless `may_lock`. The
    /// caller keeps the memory at least as long.
    ///
    /// # Errors
    /// `InvalidArgument` for no bytes, and for memory that shares a page with memory page-locked by other code;
    /// `Unsupported` where the driver cannot page-lock it.
    pub fn host_view(&self, memory: Range<usize>, may_lock: bool) -> DriverResult<Option<HostView>> {
        if memory.is_empty() {
            let words = "a view of no bytes of host memory was requested".to_owned();
            return Err(of(Op::HostRegister)(invalid(words)));
        }
        HostView::of(self.context(), self.registrations(), &memory, may_lock)
    }

    /// Waits for all work on the GPU, of any origin. Unlike
    /// [`synchronize`](poorwill_core::Driver::synchronize), it lets captures on streams unknown to the device
    /// continue. It unregisters a page, which the driver does when the GPU is done.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn wait_for_all_work(&self) -> DriverResult<()> {
        let _entered = self.enter(Op::Synchronize)?;
        wait_for_all_work(self.context()).map_err(of(Op::Synchronize))
    }
}
