//! The primary context of one GPU, retained, and made current for the length of a call.
//!
//! Promise: when a call returns, the calling thread has its former context and capture mode. PyTorch and the
//! CUDA runtime use the same context.

use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use poorwill_core::Op;
use poorwill_core::driver::Result as DriverResult;

use super::ffi::{Api, CAPTURE_MODE_RELAXED, CuDevice, CuResult, Raw};
use super::gpu::failed;
use crate::ledger::{Result, of};
use crate::process::Owner;

/// A retained primary context. Page-locked memory keeps it.
pub(super) struct Primary {
    api: &'static Api,
    device: CuDevice,
    raw: Raw,
    owner: Owner,
    /// Whether this process had no such context before.
    is_first: bool,
    /// Whether it is another context than the GPU's primary one, which nothing else uses.
    is_own: bool,
}

/// Held while a device is opened: the first opener measures its context before another takes memory.
#[derive(Debug)]
pub(super) struct Opening(&'static AtomicU64);

impl Opening {
    /// Waits for other openers of this GPU. An opener from before a fork does not count.
    pub(super) fn of(ordinal: u32, owner: Owner) -> Self {
        const FREE: u64 = 0;
        static BY: [AtomicU64; 64] = [const { AtomicU64::new(FREE) }; 64];
        let (by, us) = (&BY[ordinal as usize % BY.len()], u64::from(owner.forks()) + 1);
        let ours = |by: u64| (by != us).then_some(us);
        while by.fetch_update(Ordering::Acquire, Ordering::Relaxed, ours).is_err() {
            thread::sleep(Duration::from_millis(1));
        }
        Self(by)
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

/// The driver's figures for a GPU's memory (`cuMemGetInfo`), uncorrected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CudaMemory {
    /// The figures.
    Known {
        /// Free memory in bytes.
        free_bytes: u64,
        /// All memory in bytes.
        total_bytes: u64,
    },
    /// The call fails as invalid, though its arguments are valid. HAMi's limiter returns this when more is in
    /// use than it allows.
    OverLimit {
        /// The driver's error text.
        words: String,
    },
}

impl fmt::Debug for Primary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Primary").field("device", &self.device).finish_non_exhaustive()
    }
}

/// The context is current on this thread until this is dropped. Capture mode is relaxed, so that calls do not
/// invalidate a capture as potentially unsafe.
#[derive(Debug)]
pub(super) struct Entered<'a> {
    context: &'a Primary,
    pushed: bool,
    mode: Option<c_int>,
    _thread: PhantomData<*const ()>,
}

impl Primary {
    pub(super) fn api(&self) -> &'static Api {
        self.api
    }

    pub(super) fn device(&self) -> CuDevice {
        self.device
    }

    pub(super) fn raw(&self) -> Raw {
        self.raw
    }

    pub(super) fn owner(&self) -> Owner {
        self.owner
    }

    pub(super) fn is_first(&self) -> bool {
        self.is_first
    }

    pub(super) fn retain(api: &'static Api, device: CuDevice, owner: Owner) -> Result<Self> {
        let (mut flags, mut active): (_, c_int) = (0, 0);
        // SAFETY: C2.
        api.check(unsafe { (api.primary_ctx_get_state)(device, &raw mut flags, &raw mut active) })?;
        let mut raw: Raw = 0;
        // SAFETY: C2.
        let retained = unsafe { (api.primary_ctx_retain)(&raw mut raw, device) };
        api.check(retained).map_err(failed("cuDevicePrimaryCtxRetain", retained))?;
        Ok(Self { api, device, raw, owner, is_first: active == 0, is_own: false })
    }

    /// A context of its own, of which other code in the process knows nothing.
    pub(super) fn create(api: &'static Api, device: CuDevice, owner: Owner) -> Result<Self> {
        let (mut raw, mut popped): (Raw, Raw) = (0, 0);
        // SAFETY: C2.
        let created = unsafe { (api.ctx_create)(&raw mut raw, 0, device) };
        api.check(created).map_err(failed("cuCtxCreate", created))?;
        let made = Self { api, device, raw, owner, is_first: true, is_own: true };
        // SAFETY: C2; making it has pushed it.
        api.check(unsafe { (api.ctx_pop_current)(&raw mut popped) })?;
        Ok(made)
    }

    /// Fails in a fork of the process that retained the context.
    pub(super) fn enter(&self, op: Op) -> DriverResult<Entered<'_>> {
        self.owner.check(op)?;
        self.make_current().map_err(of(op))
    }

    fn make_current(&self) -> Result<Entered<'_>> {
        let api = self.api;
        // SAFETY: C2.
        let current: Raw = api.get(|raw| unsafe { (api.ctx_get_current)(raw) })?;
        let pushed = current != self.raw;
        if pushed {
            // SAFETY: C3, the context is retained.
            api.check(unsafe { (api.ctx_push_current)(self.raw) })?;
        }
        let mut entered = Entered { context: self, pushed, mode: None, _thread: PhantomData };
        entered.mode = Some(self.exchange_capture_mode(CAPTURE_MODE_RELAXED)?);
        Ok(entered)
    }

    /// Returns the previous mode.
    fn exchange_capture_mode(&self, mut mode: c_int) -> Result<c_int> {
        // SAFETY: C2.
        let exchanged = unsafe { (self.api.thread_exchange_stream_capture_mode)(&raw mut mode) };
        self.api.check(exchanged).map(|()| mode)
    }

    pub(super) fn synchronize(&self) -> Result<()> {
        // SAFETY: C3; the callers have entered.
        self.api.check(unsafe { (self.api.ctx_synchronize)() })
    }

    pub(super) fn memory(&self) -> Result<CudaMemory> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: C2; the callers have entered.
        let code = unsafe { (self.api.mem_get_info)(&raw mut free, &raw mut total) };
        if code == CuResult::INVALID_VALUE {
            return Ok(CudaMemory::OverLimit { words: self.api.error(code).to_string() });
        }
        self.api.check(code)?;
        Ok(CudaMemory::Known { free_bytes: free as u64, total_bytes: total as u64 })
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(mode) = self.mode {
            // A lost context accepts no mode, and has nothing to capture.
            let _ = self.context.exchange_capture_mode(mode);
        }
        if self.pushed {
            let mut popped: Raw = 0;
            // SAFETY: C2; what is popped is what `enter` pushed, since calls on one thread nest.
            let result = unsafe { (self.context.api.ctx_pop_current)(&raw mut popped) };
            debug_assert!(result != CuResult::SUCCESS || popped == self.context.raw, "contexts do not nest");
        }
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            return;
        }
        // A driver that is shutting down refuses, and has freed all by then.
        let _ = if self.is_own {
            // SAFETY: C3, destroyed once.
            unsafe { (self.api.ctx_destroy)(self.raw) }
        } else {
            // SAFETY: C3, released once.
            unsafe { (self.api.primary_ctx_release)(self.device) }
        };
    }
}
