//! One stream, and one event of the driver's.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use poorwill_core::Op;
use poorwill_core::driver::Result as DriverResult;

use super::ffi::{CuResult, EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING, Raw, STREAM_NON_BLOCKING};
use super::primary::{Entered, Primary};
use crate::host_memory::ArenaBuffer;
use crate::ledger::Result;

#[derive(Debug)]
pub(super) struct Stream {
    context: Arc<Primary>,
    raw: Raw,
    is_owned: bool,
    copies_by_kernel: bool,
    /// Whether it lies in another GPU's context, and carries copies over that GPU's link.
    is_over_link: bool,
    /// Whether other code has its handle: only then can it be captured.
    is_known: AtomicBool,
    queued: AtomicU64,
    /// For digests and copies of pageable memory. Locked while an operation is queued, so that operations do
    /// not mix.
    staging: Mutex<Option<Arc<ArenaBuffer>>>,
}

#[derive(Debug)]
pub(super) struct Event {
    context: Arc<Primary>,
    raw: Raw,
    is_over_link: bool,
}

impl Event {
    pub(super) fn create(context: &Arc<Primary>) -> Result<Self> {
        let flags = EVENT_DISABLE_TIMING | EVENT_BLOCKING_SYNC;
        // SAFETY: C2.
        let raw = context.api().get(|raw| unsafe { (context.api().event_create)(raw, flags) })?;
        Ok(Self { context: Arc::clone(context), raw, is_over_link: false })
    }

    pub(super) fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: C3, both handles are alive.
        self.context.api().check(unsafe { (self.context.api().event_record)(self.raw, stream.raw) })
    }

    /// The context that it lies in is current until the result is dropped.
    pub(super) fn enter(&self, op: Op) -> DriverResult<Entered<'_>> {
        self.context.enter(op)
    }

    pub(super) fn has_passed(&self) -> Result<bool> {
        // SAFETY: C3.
        match unsafe { (self.context.api().event_query)(self.raw) } {
            CuResult::NOT_READY => Ok(false),
            // A context that fails has ended its work.
            _ if self.is_over_link => Ok(true),
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
    pub(super) fn create(context: &Arc<Primary>) -> Result<Self> {
        // SAFETY: C2.
        let raw =
            context.api().get(|raw| unsafe { (context.api().stream_create)(raw, STREAM_NON_BLOCKING) })?;
        Ok(Self::of(context, raw, true))
    }

    /// The GPU prefers the work of other streams.
    pub(super) fn low_priority(context: &Arc<Primary>) -> Result<Self> {
        let api = context.api();
        let (mut lowest, mut highest) = (0, 0);
        // SAFETY: C2.
        api.check(unsafe { (api.ctx_get_stream_priority_range)(&raw mut lowest, &raw mut highest) })?;
        let create = api.stream_create_with_priority;
        // SAFETY: C2.
        let raw = api.get(|raw| unsafe { create(raw, STREAM_NON_BLOCKING, lowest) })?;
        Ok(Self::of(context, raw, true))
    }

    pub(super) fn of(context: &Arc<Primary>, raw: Raw, is_owned: bool) -> Self {
        let (queued, staging, copies_by_kernel, is_over_link) = Default::default();
        let (context, is_known) = (Arc::clone(context), AtomicBool::new(!is_owned));
        Self { context, raw, is_owned, copies_by_kernel, is_over_link, is_known, queued, staging }
    }

    pub(super) fn copied_by_kernel(mut self) -> Self {
        self.copies_by_kernel = true;
        self
    }

    pub(super) fn over_link(mut self) -> Self {
        self.is_over_link = true;
        self
    }

    pub(super) fn is_over_link(&self) -> bool {
        self.is_over_link
    }

    /// Makes another GPU's context current, where it lies in one: the callers have entered their own.
    pub(super) fn enter_link(&self, op: Op) -> Result<Option<Entered<'_>>> {
        let entered = self.is_over_link.then(|| self.context.enter(op)).transpose();
        entered.map_err(|error| error.kind)
    }

    /// An event of its context.
    pub(super) fn event(&self) -> Result<Event> {
        let _entered = self.enter_link(Op::EventRecord)?;
        let mut event = Event::create(&self.context)?;
        event.is_over_link = self.is_over_link;
        Ok(event)
    }

    /// An event after the work queued so far.
    pub(super) fn mark(&self) -> Result<Event> {
        let event = self.event()?;
        event.record(self).map(|()| event)
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
        let _entered = self.enter_link(Op::StreamWaitEvent)?;
        // SAFETY: C3.
        self.context.api().check(unsafe { (self.context.api().stream_wait_event)(self.raw, event.raw, 0) })
    }

    pub(super) fn synchronize(&self) -> Result<()> {
        let entered = self.enter_link(Op::StreamSynchronize);
        // SAFETY: C3.
        let settled = unsafe { (self.context.api().stream_synchronize)(self.raw) };
        drop(entered);
        // Another GPU's context that fails has ended its work, and is of no more use.
        if self.is_over_link { Ok(()) } else { self.context.api().check(settled) }
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
