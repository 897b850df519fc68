//! Host memory that the GPU copies from and to at the speed of the link: exactly sized and page-locked.
//!
//! Giving page-locked memory back to the driver waits for all work on the GPU, and holds up whoever queues more
//! meanwhile. So a buffer that is dropped costs no call of the driver: its pages are kept for the next buffer of
//! their size, and go when the whole device was waited for anyway, unless they were used since the time before.

use std::collections::HashMap;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memmap2::{Advice, MmapMut};
use poorwill_core::{DriverErrorKind, HostBuffer, HostMemory};

use super::context::Context;
use super::ffi::{Api, CuResult};
use crate::ledger::{Result, invalid};

/// Anonymous pages, faulted in, registered with the driver, and kept from forked children, whose copy-on-write
/// would otherwise move a page away from under a copy.
#[derive(Debug)]
pub(super) struct Pinned {
    context: Arc<Context>,
    pages: ManuallyDrop<MmapMut>,
}

/// Pages that are registered and in nobody's use.
#[derive(Default)]
pub(super) struct Spare {
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    /// By length; dropped since the device was last waited for.
    fresh: HashMap<usize, Vec<MmapMut>>,
    /// Dropped before that.
    aged: HashMap<usize, Vec<MmapMut>>,
}

impl fmt::Debug for Spare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Spare")
    }
}

impl Pinned {
    /// `bytes` of memory with any contents. The caller has entered the context.
    pub(super) fn new(context: &Arc<Context>, bytes: u64) -> Result<Self> {
        if bytes == 0 {
            return Err(invalid("0 bytes of host memory were asked for".into()));
        }
        let fail = |reason: String| DriverErrorKind::OutOfHostMemory { asked_bytes: bytes, reason };
        let len = usize::try_from(bytes).map_err(|error| fail(error.to_string()))?;
        if let Some(pages) = context.spare.take(len) {
            return Ok(Self { context: Arc::clone(context), pages: ManuallyDrop::new(pages) });
        }
        let mut pages = MmapMut::map_anon(len).map_err(|error| fail(error.to_string()))?;
        // Faster where the system grants it; without it nothing changes.
        let _ = pages.advise(Advice::HugePage);
        pages.advise(Advice::DontFork).map_err(|error| fail(format!("madvise(DONTFORK): {error}")))?;
        match pages.advise(Advice::PopulateWrite) {
            // Linux before 5.14 does not know it; then registering faults the pages in.
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(fail(error.to_string())),
            _ => {}
        }
        let api = context.api;
        // SAFETY: C4, the pages belong to this object, and after it to the spare ones, which unregister them.
        let registered = unsafe { (api.mem_host_register)(pages.as_mut_ptr().cast(), len, 0) };
        api.check(registered).map_err(|error| fail(format!("page-locking it failed: {error}")))?;
        Ok(Self { context: Arc::clone(context), pages: ManuallyDrop::new(pages) })
    }

    /// The same, for copies to own.
    pub(super) fn buffer(context: &Arc<Context>, bytes: u64) -> Result<HostBuffer> {
        Self::new(context, bytes).map(HostBuffer::new)
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
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, len: usize) -> Option<MmapMut> {
        let Kept { fresh, aged } = &mut *self.kept();
        fresh.get_mut(&len).and_then(Vec::pop).or_else(|| aged.get_mut(&len).and_then(Vec::pop))
    }

    fn give(&self, pages: MmapMut) {
        self.kept().fresh.entry(pages.len()).or_default().push(pages);
    }

    /// The device was just waited for: gives back what nobody has used since the last time. The caller has
    /// entered the context.
    pub(super) fn age(&self, api: &Api) {
        let gone = {
            let mut kept = self.kept();
            let fresh = std::mem::take(&mut kept.fresh);
            std::mem::replace(&mut kept.aged, fresh)
        };
        for pages in gone.into_values().flatten() {
            // SAFETY: C4, registered when they were made.
            if unsafe { (api.mem_host_unregister)(pages.as_ptr().cast_mut().cast()) } != CuResult::SUCCESS {
                // Still registered: at these addresses nothing else could be, so they are kept.
                self.give(pages);
            }
        }
    }

    /// Leaves the pages alone, in a forked child.
    pub(super) fn forget(&mut self) {
        let kept = std::mem::take(self.kept.get_mut().unwrap_or_else(PoisonError::into_inner));
        std::mem::forget(kept);
    }
}
