//! Host memory for the device's callers: buffers, and views of memory of theirs.

use std::ops::Range;

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{HostBuffer, Op};

use super::device::CudaDevice;
use super::registered::{HostView, wait_for_all_work};
use crate::host_memory::{BufferMade, BufferPin};
use crate::ledger::{invalid, of};

impl CudaDevice {
    /// Host memory of exactly `bytes` bytes, as [`host_alloc`](poorwill_core::Driver::host_alloc) gives it, page-locked or not; and, where it is
    /// not and was to be if possible, why.
    ///
    /// # Errors
    /// `OutOfHostMemory`; `Unsupported` where it was to be page-locked in any case and is not.
    pub fn host_buffer(&self, bytes: u64, pin: BufferPin) -> DriverResult<(HostBuffer, Option<String>)> {
        let _entered = self.enter(Op::HostAlloc)?;
        let (piece, because) = self.context().host_memory().alloc_as(bytes, pin)?;
        Ok((HostBuffer::new(piece), because))
    }

    /// Gives host memory back that nobody uses, `bytes` at most, where more than 1 GiB lies unused. Called with the size
    /// of a buffer that has been dropped for good. Waits for the work of the GPU if any of it is page-locked.
    pub fn give_surplus_back(&self, bytes: u64) {
        self.context().host_memory().give_surplus_back(bytes);
    }

    /// Several such buffers at once, made meanwhile by other threads.
    ///
    /// # Errors
    /// At the call, before anything is made: `OutOfHostMemory` when not all of it is to be had. At `wait` as for
    /// [`CudaDevice::host_buffer`].
    pub fn host_buffers(&self, sizes: &[u64], pin: BufferPin) -> DriverResult<Vec<BufferMade>> {
        let _entered = self.enter(Op::HostAlloc)?;
        self.context().host_memory().alloc_all_as(sizes, pin)
    }

    /// Host memory of the caller's, seen by the GPU where it is: as it is where somebody has page-locked it, else
    /// page-locked in place as long as a view of it is left, or not at all unless that is allowed. The caller keeps
    /// the memory at least as long; what kernels do with it is as with any pointer.
    ///
    /// # Errors
    /// `InvalidArgument` for no bytes, and for memory that shares a page with such as is page-locked by somebody;
    /// `Unsupported` where the driver does not page-lock it.
    pub fn host_view(&self, memory: Range<usize>, may_lock: bool) -> DriverResult<Option<HostView>> {
        if memory.is_empty() {
            let words = "a view of no bytes of host memory was asked for".to_owned();
            return Err(of(Op::HostRegister)(invalid(words)));
        }
        HostView::of(self.context(), self.registrations(), &memory, may_lock)
    }

    /// Waits for all work on the GPU, whoever queued it, as [`synchronize`](poorwill_core::Driver::synchronize) does; and
    /// unlike that does not disturb captures on streams that the device was never told of. It has the driver let go of
    /// a page, which it does when the GPU is done.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wait_for_all_work(&self) -> DriverResult<()> {
        let _entered = self.enter(Op::Synchronize)?;
        wait_for_all_work(self.context()).map_err(of(Op::Synchronize))
    }
}
