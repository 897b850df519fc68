//! One stream, and one event of the driver's.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use poorwill_core::Op;

use super::context::Context;
use super::ffi::{CuResult, EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING, Raw, STREAM_NON_BLOCKING};
use crate::host_memory::ArenaBuffer;
use crate::ledger::Result;

#[derive(Debug)]
pub(super) struct Stream {
    context: Arc<Context>,
    raw: Raw,
    is_owned: bool,
    copies_by_kernel: bool,
    /// Whether other code has its handle: only then can it be captured.
    is_known: AtomicBool,
    queued: AtomicU64,
    /// For digests and copies of pageable memory. Locked while an operation is queued, so that operations do
    /// not mix.
    staging: Mutex<Option<Arc<ArenaBuffer>>>,
}

#[derive(Debug)]
pub(super) struct Event {
    context: Arc<Context>,
    raw: Raw,
}

impl Event {
    pub(super) fn create(context: &Arc<Context>) -> Result<Self> {
        let flags = EVENT_DISABLE_TIMING | EVENT_BLOCKING_SYNC;
        // SAFETY: C2.
        let raw = context.api().get(|raw| unsafe { (context.api().event_create)(raw, flags) })?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    pub(super) fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: C3, both handles are alive.
        self.context.api().check(unsafe { (self.context.api().event_record)(self.raw, stream.raw) })
    }

    pub(super) fn has_passed(&self) -> Result<bool> {
        // SAFETY: C3.
        match unsafe { (self.context.api().event_query)(self.raw) } {
            CuResult::NOT_READY => Ok(false),
            code => self.context.api().check(code).map(|()| true),
        }
    }

    pub(super) fn wait(&self) -> Result<()> {
        // SAFETY: C3.
        self.context.api().check(unsafe { (self.context.api().event_synchronize)(self.raw) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter(Op::EventDestroy) else { return };
        // SAFETY: C3, destroyed once; the driver frees it when it has passed.
        let _ = unsafe { (self.context.api().event_destroy)(self.raw) };
    }
}

impl Stream {
    pub(super) fn create(context: &Arc<Context>) -> Result<Self> {
        // SAFETY: C2.
        let raw =
            context.api().get(|raw| unsafe { (context.api().stream_create)(raw, STREAM_NON_BLOCKING) })?;
        Ok(Self::of(context, raw, true))
    }

    /// The GPU prefers the work of other streams.
    pub(super) fn low_priority(context: &Arc<Context>) -> Result<Self> {
        let api = context.api();
        let (mut lowest, mut highest) = (0, 0);
        // SAFETY: C2.
        api.check(unsafe { (api.ctx_get_stream_priority_range)(&raw mut lowest, &raw mut highest) })?;
        let create = api.stream_create_with_priority;
        // SAFETY: C2.
        let raw = api.get(|raw| unsafe { create(raw, STREAM_NON_BLOCKING, lowest) })?;
        Ok(Self::of(context, raw, true))
    }

    pub(super) fn of(context: &Arc<Context>, raw: Raw, is_owned: bool) -> Self {
        let (queued, staging, copies_by_kernel) = Default::default();
        let is_known = AtomicBool::new(!is_owned);
        Self { context: Arc::clone(context), raw, is_owned, copies_by_kernel, is_known, queued, staging }
    }

    pub(super) fn copied_by_kernel(mut self) -> Self {
        self.copies_by_kernel = true;
        self
    }

    pub(super) fn raw(&self) -> Raw {
        self.raw
    }

    pub(super) fn is_owned(&self) -> bool {
        self.is_owned
    }

    pub(super) fn copies_by_kernel(&self) -> bool {
        self.copies_by_kernel
    }

    /// Lock it as long as an operation is queued.
    pub(super) fn staging(&self) -> MutexGuard<'_, Option<Arc<ArenaBuffer>>> {
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn queued(&self) -> u64 {
        self.queued.load(Ordering::Acquire)
    }

    /// Call it before an operation is queued.
    pub(super) fn count(&self) {
        self.queued.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn wait_for(&self, event: &Event) -> Result<()> {
        self.count();
        // SAFETY: C3.
        self.context.api().check(unsafe { (self.context.api().stream_wait_event)(self.raw, event.raw, 0) })
    }

    pub(super) fn synchronize(&self) -> Result<()> {
        // SAFETY: C3.
        self.context.api().check(unsafe { (self.context.api().stream_synchronize)(self.raw) })
    }

    /// For other code, which may capture the stream.
    pub(super) fn share(&self) -> Raw {
        self.is_known.store(true, Ordering::Release);
        self.raw
    }

    pub(super) fn is_captured(&self) -> Result<bool> {
        if !self.is_known.load(Ordering::Acquire) {
            return Ok(false);
        }
        let mut status: c_int = 0;
        // SAFETY: C2 and C3.
        let queried = unsafe { (self.context.api().stream_is_capturing)(self.raw, &raw mut status) };
        if queried == CuResult::STREAM_CAPTURE_IMPLICIT {
            return Ok(true);
        }
        self.context.api().check(queried).map(|()| status != 0)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.is_owned {
            return;
        }
        let Ok(_entered) = self.context.enter(Op::StreamDestroy) else { return };
        // SAFETY: C3, destroyed once; work still queued on it is finished first.
        let _ = unsafe { (self.context.api().stream_destroy)(self.raw) };
    }
}
