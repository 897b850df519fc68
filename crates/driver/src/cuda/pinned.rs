//! Host memory that the GPU copies from and to at the speed of the link: exactly sized and page-locked.
//!
//! Giving page-locked memory back to the driver waits for all work on the GPU, and holds up whoever queues more
//! meanwhile. So a buffer that is dropped costs no call of the driver: its pages are kept for the next buffer of
//! their size. They go when they are asked for, when the device does, or, where more than [`SPARE_BYTES`] lie
//! unused, little by little when a buffer of another size is made, which takes its time anyway.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memmap2::{Advice, MmapMut};
use poorwill_core::{DriverErrorKind, HostBuffer, HostMemory};

use super::context::Context;
use super::ffi::{CuResult, HOST_REGISTER_DEVICEMAP};
use crate::ledger::{Result, invalid};

/// Anonymous pages, faulted in, registered with the driver, and kept from forked children, whose copy-on-write
/// would otherwise move a page away from under a copy.
#[derive(Debug)]
pub(super) struct Pinned {
    context: Arc<Context>,
    pages: ManuallyDrop<MmapMut>,
}

/// What page-locked memory is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// For the caller of a call that may wait for work.
    Buffer,
    /// For work that is being queued, which waits only where there is no memory otherwise.
    Staging,
}

/// How much is kept for sizes that may come again.
const SPARE_BYTES: usize = 1 << 30;

/// Pages that are registered and in nobody's use.
#[derive(Debug, Default)]
pub(super) struct Spare(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    /// By length.
    pages: BTreeMap<usize, Vec<MmapMut>>,
    bytes: usize,
}

impl Pinned {
    /// `bytes` of memory with any contents. The caller has entered the context.
    pub(super) fn new(context: &Arc<Context>, bytes: u64, purpose: Purpose) -> Result<Self> {
        if bytes == 0 {
            return Err(invalid("0 bytes of host memory were asked for".into()));
        }
        let len = usize::try_from(bytes).map_err(|error| DriverErrorKind::OutOfHostMemory {
            asked_bytes: bytes,
            reason: error.to_string(),
        })?;
        if let Some(pages) = context.spare.take(len) {
            return Ok(Self { context: Arc::clone(context), pages: ManuallyDrop::new(pages) });
        }
        if purpose == Purpose::Buffer {
            context.spare.make_room(context, len);
        }
        let pages = Self::pages(context, len).or_else(|reason| {
            // What lies unused must not be what is lacking.
            if context.spare.clear(context) { Self::pages(context, len) } else { Err(reason) }
        });
        let pages =
            pages.map_err(|reason| DriverErrorKind::OutOfHostMemory { asked_bytes: bytes, reason })?;
        Ok(Self { context: Arc::clone(context), pages: ManuallyDrop::new(pages) })
    }

    /// New pages, registered; or why not.
    fn pages(context: &Context, len: usize) -> std::result::Result<MmapMut, String> {
        let mut pages = MmapMut::map_anon(len).map_err(|error| error.to_string())?;
        // Faster where the system grants it; without it nothing changes.
        let _ = pages.advise(Advice::HugePage);
        pages.advise(Advice::DontFork).map_err(|error| format!("madvise(DONTFORK): {error}"))?;
        match pages.advise(Advice::PopulateWrite) {
            // Linux before 5.14 does not know it; then registering faults the pages in.
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(error.to_string()),
            _ => {}
        }
        let api = context.api;
        // SAFETY: C4, whoever has the pages unregisters them before they go.
        let registered =
            unsafe { (api.mem_host_register)(pages.as_mut_ptr().cast(), len, HOST_REGISTER_DEVICEMAP) };
        api.check(registered).map_err(|error| format!("page-locking it failed: {error}"))?;
        context.registered.add(context, pages.as_mut_ptr(), len);
        Ok(pages)
    }

    /// The same, for copies to own.
    pub(super) fn buffer(context: &Arc<Context>, bytes: u64) -> Result<HostBuffer> {
        Self::new(context, bytes, Purpose::Buffer).map(HostBuffer::new)
    }

    pub(super) fn len(&self) -> usize {
        self.pages.len()
    }

    /// The first byte. Whoever writes through it follows rule C5: the order of one stream.
    pub(super) fn start(&self) -> *const u8 {
        self.pages.as_ptr()
    }
}

impl HostMemory for Pinned {
    fn as_slice(&self) -> &[u8] {
        &self.pages
    }
    fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.pages
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // In a forked child the pages are not there, and something else may be; and the lock may be held for ever.
        if self.context.owner.is_here() {
            // SAFETY: taken once, here, and not used afterwards.
            self.context.spare.give(unsafe { ManuallyDrop::take(&mut self.pages) });
        }
    }
}

impl Spare {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, len: usize) -> Option<MmapMut> {
        self.kept().take(len)
    }

    fn give(&self, pages: MmapMut) {
        let mut kept = self.kept();
        kept.bytes += pages.len();
        kept.pages.entry(pages.len()).or_default().push(pages);
    }

    /// Before `len` bytes more are registered: gives twice as much of the surplus back, so that it shrinks
    /// whatever sizes are asked for.
    fn make_room(&self, context: &Context, len: usize) {
        let mut gone = Vec::new();
        {
            let mut kept = self.kept();
            let mut surplus = kept.bytes.saturating_sub(SPARE_BYTES).min(len.saturating_mul(2));
            while surplus > 0
                && let Some(pages) = kept.near(surplus).and_then(|len| kept.take(len))
            {
                surplus = surplus.saturating_sub(pages.len());
                gone.push(pages);
            }
        }
        self.give_back(context, gone);
    }

    /// Unregisters and unmaps. What the driver refuses is kept: at its addresses nothing else could be registered.
    fn give_back(&self, context: &Context, gone: Vec<MmapMut>) {
        for mut pages in gone {
            let start = pages.as_mut_ptr().cast();
            // SAFETY: C4, registered when they were made.
            if unsafe { (context.api.mem_host_unregister)(start) } == CuResult::SUCCESS {
                context.registered.remove(pages.as_ptr());
            } else {
                self.give(pages);
            }
        }
    }

    /// Gives everything back that the driver takes; whether there was anything. The caller has entered the context.
    pub(super) fn clear(&self, context: &Context) -> bool {
        let kept = std::mem::take(&mut *self.kept());
        let any = kept.bytes > 0;
        self.give_back(context, kept.pages.into_values().flatten().collect());
        any
    }

    /// Leaves the pages alone, in a forked child.
    pub(super) fn forget(&mut self) {
        std::mem::forget(std::mem::take(self.0.get_mut().unwrap_or_else(PoisonError::into_inner)));
    }
}

impl Kept {
    fn take(&mut self, len: usize) -> Option<MmapMut> {
        let of_len = self.pages.get_mut(&len)?;
        let pages = of_len.pop();
        if of_len.is_empty() {
            self.pages.remove(&len);
        }
        self.bytes -= pages.as_ref().map_or(0, |pages| pages.len());
        pages
    }

    /// The largest length of up to `bytes`, or else the smallest there is.
    fn near(&self, bytes: usize) -> Option<usize> {
        let below = self.pages.range(..=bytes).next_back();
        below.or_else(|| self.pages.iter().next()).map(|(len, _)| *len)
    }
}
