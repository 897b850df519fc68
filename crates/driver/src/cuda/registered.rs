//! Host memory of somebody else's that kernels read and write where it is.
//!
//! Memory that is page-locked already, by this device, by PyTorch or by whoever else, is found by its address. Other
//! memory is registered in place, in whole pages, for as long as a view of it is left: a book counts the views of each
//! registration, so that two views of one tensor, or of parts of it, share it. Memory that has some of its pages in a
//! registration and others not is refused: the driver copies nothing that lies in two registrations (measured: a copy of
//! such a view ends with CUDA's "invalid argument", while kernels read it). What the driver does not
//! let go of stays in the book, and nothing that overlaps it is seen until it has gone: other memory may have come to
//! its addresses.

use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::fmt;
use std::ops::Range;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{ByteSize, DriverErrorKind, HostBuffer, Op};

use super::context::{Context, Primary};
use super::device::CudaDevice;
use super::ffi::{CuDeviceptr, CuResult};
use crate::host_memory::{BufferMade, BufferPin, Region, Wish};
use crate::ledger::{Result, invalid, of};

/// `CU_MEMHOSTREGISTER_PORTABLE` and `_DEVICEMAP`: for every context, and with an address for kernels.
pub(super) const REGISTER_FLAGS: c_uint = 1 | 2;

/// The registrations of one device, by where they begin.
#[derive(Debug, Default)]
pub(super) struct Registrations(Mutex<Book>);

#[derive(Debug)]
struct Registration {
    end: usize,
    /// Where the device sees its beginning.
    device: u64,
    views: usize,
}

/// Host memory as a GPU sees it, at [`HostView::device_addr`], as long as this lives and the memory does: whoever made
/// it keeps the memory. Dropping the last view of memory that was registered for it waits for the work of the GPU.
pub struct HostView {
    context: Arc<Context>,
    registrations: Arc<Registrations>,
    device_addr: u64,
    /// Where the registration begins that was made for it, or for another view.
    registered: Option<usize>,
}

impl fmt::Debug for HostView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device_addr, registered, .. } = self;
        f.debug_struct("HostView")
            .field("device_addr", device_addr)
            .field("registered", registered)
            .finish_non_exhaustive()
    }
}

impl CudaDevice {
    /// Host memory of exactly `bytes` bytes, as [`host_alloc`](poorwill_core::Driver::host_alloc) gives it, page-locked or not; and, where it is
    /// not and was to be if possible, why.
    ///
    /// # Errors
    /// `OutOfHostMemory`; `Unsupported` where it was to be page-locked in any case and is not.
    pub fn host_buffer(&self, bytes: u64, pin: BufferPin) -> DriverResult<(HostBuffer, Option<String>)> {
        let _entered = self.enter(Op::HostAlloc)?;
        let (piece, because) = self.context().host_memory.alloc_as(bytes, pin)?;
        Ok((HostBuffer::new(piece), because))
    }

    /// Several such buffers at once, made meanwhile by other threads.
    ///
    /// # Errors
    /// At the call, before anything is made: `OutOfHostMemory` when not all of it is to be had. At `wait` as for
    /// [`CudaDevice::host_buffer`].
    pub fn host_buffers(&self, sizes: &[u64], pin: BufferPin) -> DriverResult<Vec<BufferMade>> {
        let _entered = self.enter(Op::HostAlloc)?;
        self.context().host_memory.alloc_all_as(sizes, pin)
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
        HostView::of(self.context(), &self.registrations, &memory, may_lock)
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

impl HostView {
    /// Where the GPU finds the first byte.
    #[must_use]
    pub fn device_addr(&self) -> u64 {
        self.device_addr
    }

    /// Whether the memory was page-locked for this view or one before it, and not by its owner.
    #[must_use]
    pub fn is_registered_here(&self) -> bool {
        self.registered.is_some()
    }

    pub(super) fn of(
        context: &Arc<Context>,
        registrations: &Arc<Registrations>,
        memory: &Range<usize>,
        may_lock: bool,
    ) -> DriverResult<Option<Self>> {
        let _entered = context.enter(Op::HostRegister)?;
        let found = registrations.find_or_register(context, memory, may_lock);
        let Some((device_addr, registered)) = found.map_err(of(Op::HostRegister))? else { return Ok(None) };
        let (context, registrations) = (Arc::clone(context), Arc::clone(registrations));
        Ok(Some(Self { context, registrations, device_addr, registered }))
    }
}

impl Drop for HostView {
    fn drop(&mut self) {
        let Some(start) = self.registered else { return };
        if self.context.owner.is_here() {
            self.registrations.leave(&self.context, start);
        }
    }
}

impl Registrations {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the device sees the memory, and the registration that it owes this to, which has one more view; nothing
    /// where it does not see it and it may not be locked. The context has been entered.
    fn find_or_register(
        &self,
        context: &Context,
        memory: &Range<usize>,
        may_lock: bool,
    ) -> Result<Option<(u64, Option<usize>)>> {
        if let Some(device) = context.pinned_at(memory.start, memory.len()) {
            return Ok(Some((device, None)));
        }
        let page = rustix::param::page_size();
        let end = memory.end.checked_next_multiple_of(page);
        let end = end.ok_or_else(|| invalid(format!("{memory:#x?} is no memory")))?;
        let pages = memory.start / page * page..end;
        let mut book = self.book();
        end_stuck(context, &mut book, &pages)?;
        let first = book.range_mut(..pages.end).next_back().filter(|(_, one)| one.end > pages.start);
        if let Some((start, registration)) = first {
            if *start > pages.start || registration.end < pages.end {
                return Err(shared(memory));
            }
            registration.views += 1;
            return Ok(Some((registration.device + (memory.start - start) as u64, Some(*start))));
        }
        if let Some(device) = seen_at(context, memory) {
            return Ok(Some((device, None)));
        }
        if !may_lock {
            return Ok(None);
        }
        let device = register(context, memory, &pages)?;
        book.insert(pages.start, Registration { end: pages.end, device, views: 1 });
        Ok(Some((device + (memory.start - pages.start) as u64, Some(pages.start))))
    }

    /// One view less; the last one ends it.
    fn leave(&self, context: &Primary, start: usize) {
        let mut book = self.book();
        let Some(registration) = book.get_mut(&start) else { return };
        registration.views -= 1;
        if registration.views == 0 && unregister(context, start) {
            book.remove(&start);
        }
    }
}

type Book = BTreeMap<usize, Registration>;

/// Memory that lies in a page with such as is locked, and not wholly in pages that are.
fn shared(memory: &Range<usize>) -> DriverErrorKind {
    invalid(format!(
        "{} at {:#x} share a page with memory that is page-locked already; take memory for them that is theirs alone, as \
         a HostBuffer is",
        ByteSize(memory.len() as u64),
        memory.start
    ))
}

/// Has registrations of these pages ended that nobody has a view of; an error where the driver does not let go of one.
fn end_stuck(context: &Primary, book: &mut Book, pages: &Range<usize>) -> Result<()> {
    let is_stuck = |(start, one): &(&usize, &Registration)| {
        one.views == 0 && **start < pages.end && one.end > pages.start
    };
    while let Some(start) = book.iter().find(is_stuck).map(|(start, _)| *start) {
        if !unregister(context, start) {
            let reason = format!(
                "memory at {start:#x} was page-locked for a view that is gone, and the driver does not let go of it"
            );
            return Err(DriverErrorKind::Unsupported { reason });
        }
        book.remove(&start);
    }
    Ok(())
}

/// Where the device sees memory that somebody has page-locked, all of it. The context has been entered.
fn seen_at(context: &Primary, memory: &Range<usize>) -> Option<u64> {
    let address = |at: usize| -> Option<u64> {
        let api = context.api;
        let at = ptr::with_exposed_provenance_mut(at);
        // SAFETY: C2; the driver looks the address up, and touches nothing there.
        let found: Result<CuDeviceptr> =
            api.get(|device| unsafe { (api.mem_host_get_device_pointer)(device, at, 0) });
        found.ok()
    };
    let first = address(memory.start)?;
    let last = address(memory.end - 1)?;
    (last.checked_sub(first)? == (memory.len() - 1) as u64).then_some(first)
}

/// See [`CudaDevice::wait_for_all_work`]. The context has been entered.
fn wait_for_all_work(context: &Primary) -> Result<()> {
    let bytes = rustix::param::page_size();
    let no_page = |reason| DriverErrorKind::OutOfHostMemory { asked_bytes: bytes as u64, reason };
    let page = Region::map(&Wish { bytes, huge: false, node: None }).map_err(no_page)?;
    let pages = page.start()..page.start() + bytes;
    let registered = register(context, &pages, &pages);
    if registered.is_ok() && !unregister(context, pages.start) {
        // The page stays mapped: the driver has it still.
        let reason = "the driver does not say when the device's work has ended".to_owned();
        return Err(DriverErrorKind::Unsupported { reason });
    }
    page.unmap();
    registered.map(drop)
}

fn register(context: &Primary, memory: &Range<usize>, pages: &Range<usize>) -> Result<u64> {
    let api = context.api;
    let start = ptr::with_exposed_provenance_mut(pages.start);
    // SAFETY: C6, whoever asks keeps the memory as long as the view.
    let registered = unsafe { (api.mem_host_register)(start, pages.len(), REGISTER_FLAGS) };
    let size = ByteSize(memory.len() as u64);
    if registered == CuResult::HOST_MEMORY_ALREADY_REGISTERED {
        return Err(shared(memory));
    }
    if registered != CuResult::SUCCESS {
        let words = api.error(registered);
        let reason = format!(
            "{size} at {:#x} cannot be page-locked in place: {words}; memory that can only be read, device memory and \
             a limit on locked memory (ulimit -l) are reasons; copy them into a HostBuffer",
            memory.start
        );
        return Err(DriverErrorKind::Unsupported { reason });
    }
    // SAFETY: C2; the memory is registered.
    let device: Result<CuDeviceptr> =
        api.get(|device| unsafe { (api.mem_host_get_device_pointer)(device, start, 0) });
    device.inspect_err(|_| {
        unregister(context, pages.start);
    })
}

/// Whether the driver lets go of it. Waits for the work of the device.
fn unregister(context: &Primary, start: usize) -> bool {
    let Ok(_entered) = context.enter(Op::HostRegister) else { return false };
    let start = ptr::with_exposed_provenance_mut(start);
    // SAFETY: C6, registered here, and no view of it is left.
    unsafe { (context.api.mem_host_unregister)(start) == CuResult::SUCCESS }
}
