//! Host memory that the GPU copies from and to at the speed of the link: exactly sized and page-locked.
//!
//! Giving page-locked memory back to the driver waits for all work on the GPU, and holds up whoever queues more
//! meanwhile. So a buffer that is dropped costs no call of the driver: its pages are kept for the next buffer of
//! their size, and go when the whole device was waited for anyway, unless they were used since the time before.
//! A thread sees to that, since it takes a second for some 60 GiB.

use std::collections::HashMap;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use memmap2::{Advice, MmapMut};
use poorwill_core::{DriverErrorKind, HostBuffer, HostMemory, Op};

use super::context::Context;
use super::ffi::CuResult;
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
    /// Gives pages back, the last time that there were any.
    worker: Mutex<Option<JoinHandle<()>>>,
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

    /// The device of `context` was just waited for: begins to give back what nobody has used since the last time.
    pub(super) fn age(context: &Arc<Context>) {
        let spare = &context.spare;
        let mut worker = spare.worker.lock().unwrap_or_else(PoisonError::into_inner);
        if worker.as_ref().is_some_and(|worker| !worker.is_finished()) {
            return; // The next time will do.
        }
        let gone = {
            let mut kept = spare.kept();
            let fresh = std::mem::take(&mut kept.fresh);
            std::mem::replace(&mut kept.aged, fresh)
        };
        let gone: Vec<MmapMut> = gone.into_values().flatten().collect();
        if gone.is_empty() {
            return;
        }
        let (gone, theirs) = (Arc::new(Mutex::new(gone)), Arc::clone(context));
        let left = Arc::clone(&gone);
        let name = "poorwill-unpin".to_owned();
        let started = thread::Builder::new().name(name).spawn(move || theirs.spare.give_back(&theirs, &left));
        match started {
            Ok(started) => *worker = Some(started),
            // Where no thread is to be had, it is done here.
            Err(_) => spare.give_back(context, &gone),
        }
    }

    /// Unregisters and unmaps. What the driver refuses is kept: at its addresses nothing else could be registered.
    fn give_back(&self, context: &Context, gone: &Mutex<Vec<MmapMut>>) {
        let entered = context.enter(Op::HostAlloc);
        loop {
            let pages = gone.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(mut pages) = pages else { return };
            let start = pages.as_mut_ptr().cast();
            // SAFETY: C4, registered when they were made.
            let unregister = || unsafe { (context.api.mem_host_unregister)(start) };
            if entered.is_err() || unregister() != CuResult::SUCCESS {
                self.give(pages);
            }
        }
    }

    /// Waits until what is being given back has been.
    pub(super) fn settle(&self) {
        let worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner).take();
        // It does not panic; if it did, there is nobody to tell.
        worker.into_iter().for_each(|worker| drop(worker.join()));
    }

    /// At the very end: gives everything back. The caller is the last to have the context.
    pub(super) fn clear(&self, context: &Context) {
        let Kept { fresh, aged } = std::mem::take(&mut *self.kept());
        let gone = fresh.into_values().chain(aged.into_values()).flatten().collect();
        self.give_back(context, &Mutex::new(gone));
    }

    /// Leaves the pages alone, in a forked child.
    pub(super) fn forget(&mut self) {
        let kept = std::mem::take(self.kept.get_mut().unwrap_or_else(PoisonError::into_inner));
        std::mem::forget(kept);
        std::mem::forget(self.worker.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}
