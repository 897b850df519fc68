//! Digests on the host, where there is no kernel: of device memory, in stream order, and of saved bytes.
//!
//! Bytes pass in blocks through one staging buffer per stream: a copy, a host function that hashes the block,
//! the next copy. Stream order keeps them apart, so one buffer serves any number of queued digests.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use poorwill_core::{DeviceRange, Digest, DriverErrorKind};

use super::super::context::Context;
use super::super::job::HostJob;
use super::super::staging::{self, BLOCK_BYTES, Queued, Staging};
use super::super::stream::Stream;
use crate::ledger::Result;

const HASHERS_MAX: usize = 4;

#[derive(Debug)]
pub(in crate::cuda) struct Digests {
    found: Mutex<Vec<Option<Digest>>>,
    granule_bytes: usize,
}

impl Digests {
    pub(in crate::cuda) fn of(range: DeviceRange, granule_bytes: u64) -> Result<Arc<Self>> {
        let count = to_usize(range.bytes / granule_bytes)?;
        Ok(Arc::new(Self { found: Mutex::new(vec![None; count]), granule_bytes: to_usize(granule_bytes)? }))
    }

    /// Call it once the stream has passed them.
    pub(in crate::cuda) fn take(&self) -> Result<Vec<Digest>> {
        let found = std::mem::take(&mut *self.found.lock().unwrap_or_else(PoisonError::into_inner));
        let lost = || {
            let text = "a digest was not computed".to_owned();
            DriverErrorKind::Device { code: 0, name: "work lost".into(), text }
        };
        found.into_iter().collect::<Option<Vec<_>>>().ok_or_else(lost)
    }

    /// The context is entered. The caller keeps `self` and `queued` until the stream has passed: where a job
    /// ends, the driver may not be called.
    pub(in crate::cuda) fn queue(
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
        let block_bytes = (BLOCK_BYTES / granule_bytes).max(1) * granule_bytes;
        let mut slot = stream.staging();
        let staging = staging::buffer(&mut slot, context, block_bytes.min(range.bytes))?;
        let mut done_bytes = 0;
        while done_bytes < range.bytes {
            let bytes = (staging.len() as u64).min(range.bytes - done_bytes) / granule_bytes * granule_bytes;
            let (len, first) = (to_usize(bytes)?, to_usize(done_bytes / granule_bytes)?);
            let to = staging.start().cast::<c_void>();
            let (digests, staged) = (Arc::clone(self), Arc::clone(&staging));
            let job = HostJob::new(Box::new(move || digests.hash(first, &staged, len)));
            let kept = (Arc::clone(&job), Arc::clone(&staging));
            queued.lock().unwrap_or_else(PoisonError::into_inner).push(kept);
            // SAFETY: C3 and C5: the staging buffer is large enough, and lives as long as what was just
            // queued. It is written and read in the order of this stream only.
            let copied =
                unsafe { (context.api().memcpy_dtoh_async)(to, range.addr + done_bytes, len, stream.raw()) };
            context.api().check(copied)?;
            job.launch(context, stream)?;
            done_bytes += bytes;
        }
        Ok(())
    }

    fn hash(&self, first: usize, staging: &Staging, len: usize) {
        // SAFETY: C5, the stream calls this between the copy into these bytes and the next one.
        let bytes = unsafe { std::slice::from_raw_parts(staging.start().cast_const(), len) };
        let granules: Vec<&[u8]> = bytes.chunks(self.granule_bytes).collect();
        hash(&granules, |nth, digest| {
            self.found.lock().unwrap_or_else(PoisonError::into_inner)[first + nth] = Some(digest);
        });
    }
}

pub(in crate::cuda) fn of_stored(granules: &[&[u8]]) -> Vec<Digest> {
    let found = Mutex::new(vec![Digest(0); granules.len()]);
    hash(granules, |nth, digest| found.lock().unwrap_or_else(PoisonError::into_inner)[nth] = digest);
    found.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn hash(granules: &[&[u8]], found: impl Fn(usize, Digest) + Sync) {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some((nth, granule)) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|nth| Some((nth, *granules.get(nth)?)))
        {
            found(nth, Digest::of(granule));
        }
    };
    let hashers = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(HASHERS_MAX);
    // A thread costs more than hashing a small total.
    let bytes: usize = granules.iter().map(|granule| granule.len()).sum();
    let hashers = hashers.min(bytes >> 20);
    thread::scope(|scope| {
        for _ in 1..hashers {
            // If no thread can be started, this one does its share.
            let _ = thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
}

fn to_usize(bytes: u64) -> Result<usize> {
    usize::try_from(bytes)
        .map_err(|_| crate::ledger::invalid(format!("{bytes} is more than this machine counts")))
}
