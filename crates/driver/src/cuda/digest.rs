//! Digests of device memory, computed on the host in the order of the stream.
//!
//! Bytes pass piece by piece through one staging buffer per stream: a copy, then a host function that hashes what
//! has arrived, then the next copy. The stream itself keeps them apart, so any number of digests can be queued
//! with one buffer, and what is queued behind them waits for them, as the contract says.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use poorwill_core::driver::HostWork;
use poorwill_core::{DeviceRange, Digest, DriverErrorKind};

use super::context::Context;
use super::queue::Stream;
use super::staging::{self, PIECE_BYTES, Queued, Staging};
use crate::ledger::Result;

/// Threads that hash one piece at most.
const HASHERS_MAX: usize = 4;

/// Work for the host with its outcome.
#[derive(Default)]
pub(super) struct HostJob {
    work: Mutex<Option<HostWork>>,
    outcome: Mutex<Option<Outcome>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Returned,
    Panicked,
}

impl HostJob {
    pub(super) fn new(work: HostWork) -> Arc<Self> {
        Arc::new(Self { work: Mutex::new(Some(work)), outcome: Mutex::new(None) })
    }

    /// Queues it. The caller has entered the context.
    pub(super) fn launch(self: &Arc<Self>, context: &Context, stream: &Stream) -> Result<()> {
        let user = Arc::into_raw(Arc::clone(self)).cast_mut().cast::<c_void>();
        // SAFETY: C3 for the stream; `run` takes the count back that `user` stands for.
        let launched = unsafe { (context.api.launch_host_func)(stream.raw, run, user) };
        context.api.check(launched).inspect_err(|_| {
            // SAFETY: refused, so `run` will not be called with it.
            drop(unsafe { Arc::from_raw(user.cast_const().cast::<Self>()) });
        })
    }

    /// What became of it, once the stream is past it.
    pub(super) fn outcome(&self) -> Result<()> {
        let (name, text) = match *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Outcome::Returned) => return Ok(()),
            Some(Outcome::Panicked) => {
                ("work panicked", "a function of the host that the stream called panicked")
            }
            None => ("work lost", "the driver did not call a function of the host that was queued"),
        };
        Err(DriverErrorKind::Device { code: 0, name: name.into(), text: text.into() })
    }

    fn run(&self) {
        let work = self.work.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(work) = work else { return };
        let outcome = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(()) => Outcome::Returned,
            Err(payload) => {
                // Dropping what was thrown may throw again, and nobody is left to catch it.
                std::mem::forget(payload);
                Outcome::Panicked
            }
        };
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
    }
}

/// What the driver calls.
extern "C" fn run(user: *mut c_void) {
    // SAFETY: `launch` made it of an `Arc` for this one call.
    let job = unsafe { Arc::from_raw(user.cast_const().cast::<HostJob>()) };
    job.run();
    // The last reference may drop code of the caller's: its panic must not cross into the driver either.
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(job))) {
        std::mem::forget(payload);
    }
}

/// The digests of a range, as they come in.
#[derive(Debug)]
pub(super) struct Digests {
    found: Mutex<Vec<Option<Digest>>>,
    granule_bytes: usize,
}

impl Digests {
    pub(super) fn of(range: DeviceRange, granule_bytes: u64) -> Result<Arc<Self>> {
        let count = to_usize(range.bytes / granule_bytes)?;
        Ok(Arc::new(Self { found: Mutex::new(vec![None; count]), granule_bytes: to_usize(granule_bytes)? }))
    }

    /// All of them, once the stream is past them.
    pub(super) fn take(&self) -> Result<Vec<Digest>> {
        let found = std::mem::take(&mut *self.found.lock().unwrap_or_else(PoisonError::into_inner));
        let lost = || {
            let text = "a digest was not computed".to_owned();
            DriverErrorKind::Device { code: 0, name: "work lost".into(), text }
        };
        found.into_iter().collect::<Option<Vec<_>>>().ok_or_else(lost)
    }

    /// Queues the digests of `range`. The caller has entered the context, and keeps `self` and what is put into
    /// `queued` alive until the stream is past them: the driver may not be called where a job ends.
    pub(super) fn queue(
        self: &Arc<Self>,
        context: &Arc<Context>,
        stream: &Stream,
        range: DeviceRange,
        queued: &Queued,
    ) -> Result<()> {
        if range.bytes == 0 {
            return Ok(());
        }
        let granule_bytes = self.granule_bytes as u64;
        let piece_bytes = (PIECE_BYTES / granule_bytes).max(1) * granule_bytes;
        let mut slot = stream.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let staging = staging::buffer(&mut slot, context, piece_bytes.min(range.bytes))?;
        let mut done_bytes = 0;
        while done_bytes < range.bytes {
            let bytes = (staging.len() as u64).min(range.bytes - done_bytes) / granule_bytes * granule_bytes;
            let (len, first) = (to_usize(bytes)?, to_usize(done_bytes / granule_bytes)?);
            let to = staging.start().cast::<c_void>();
            let (digests, staged) = (Arc::clone(self), Arc::clone(&staging));
            let job = HostJob::new(Box::new(move || digests.hash(first, &staged, len)));
            let kept = (Arc::clone(&job), Arc::clone(&staging));
            queued.lock().unwrap_or_else(PoisonError::into_inner).push(kept);
            // SAFETY: C3 and C5: the staging buffer has room, lives as long as what was just queued, and is
            // written and read in the order of this stream only.
            let copied =
                unsafe { (context.api.memcpy_dtoh_async)(to, range.addr + done_bytes, len, stream.raw) };
            context.api.check(copied)?;
            job.launch(context, stream)?;
            done_bytes += bytes;
        }
        Ok(())
    }

    fn hash(&self, first: usize, staging: &Staging, len: usize) {
        // SAFETY: C5, the stream calls this between the copy into these bytes and the next one.
        let bytes = unsafe { std::slice::from_raw_parts(staging.start().cast_const(), len) };
        let granules: Vec<&[u8]> = bytes.chunks(self.granule_bytes).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some((nth, granule)) =
                Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|nth| Some((nth, *granules.get(nth)?)))
            {
                let digest = Digest::of(granule);
                self.found.lock().unwrap_or_else(PoisonError::into_inner)[first + nth] = Some(digest);
            }
        };
        let hashers = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(HASHERS_MAX);
        // A thread costs more than the hash of little.
        let hashers = hashers.min(len >> 20);
        thread::scope(|scope| {
            for _ in 1..hashers {
                // Where no thread is to be had, this one does its share.
                let _ = thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
    }
}

fn to_usize(bytes: u64) -> Result<usize> {
    usize::try_from(bytes)
        .map_err(|_| crate::ledger::invalid(format!("{bytes} is more than this machine counts")))
}
