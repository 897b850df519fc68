//! Host memory that the GPU copies from and to at the speed of the link: exactly sized and page-locked.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use memmap2::{Advice, MmapMut};
use poorwill_core::{DriverErrorKind, HostBuffer, HostMemory, Op};

use super::context::Context;
use crate::ledger::{Result, invalid};

/// Anonymous pages, faulted in, registered with the driver, and kept from forked children, whose copy-on-write
/// would otherwise move a page away from under a copy.
#[derive(Debug)]
pub(super) struct Pinned {
    context: Arc<Context>,
    pages: ManuallyDrop<MmapMut>,
}

impl Pinned {
    /// `bytes` of zeroed memory. The caller has entered the context.
    pub(super) fn new(context: &Arc<Context>, bytes: u64) -> Result<Self> {
        if bytes == 0 {
            return Err(invalid("0 bytes of host memory were asked for".into()));
        }
        let fail = |reason: String| DriverErrorKind::OutOfHostMemory { asked_bytes: bytes, reason };
        let len = usize::try_from(bytes).map_err(|error| fail(error.to_string()))?;
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
        // SAFETY: C4, the pages belong to this object, which unregisters them before they go.
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
        // In a forked child the pages are not there, and something else may be.
        let Ok(entered) = self.context.enter(Op::HostAlloc) else { return };
        // SAFETY: C4, registered by `new`. A refusal means that the context is gone, and the registration with it.
        let _ = unsafe { (self.context.api.mem_host_unregister)(self.pages.as_mut_ptr().cast()) };
        drop(entered);
        // SAFETY: dropped once, here, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.pages) };
    }
}
