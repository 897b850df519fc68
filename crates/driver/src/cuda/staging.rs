//! Copies of pageable host memory, through a page-locked buffer.
//!
//! The driver would copy such memory while the caller waits. Here the copy is queued: host functions move the
//! bytes, block by block, between the stream's staging buffer and the host memory. Stream order keeps the
//! blocks apart, also from digests, which share the buffer.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use super::context::Context;
use super::job::HostJob;
use super::stream::Stream;
use crate::host_memory::{ArenaBuffer, MemoryKind};
use crate::ledger::Result;

pub(super) type Staging = ArenaBuffer;

/// Bytes of one block: enough for the link's full speed, and for several threads to move.
pub(super) const BLOCK_BYTES: u64 = 32 << 20;

const BUFFER_BYTES_MIN: u64 = 64 << 10;

const MOVERS_MAX: usize = 4;

/// Kept by the flight until the stream has passed, since the driver may not be called where a job ends.
pub(super) type Queued = Mutex<Vec<(Arc<HostJob>, Arc<Staging>)>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    ToDevice,
    ToHost,
}

pub(super) fn is_needed(context: &Context, addr: usize, len: usize) -> bool {
    context.host_memory().memory_kind(addr, len) == MemoryKind::Pageable
}

/// Replaced if too small. Work in flight keeps the old one, which stays page-locked. With powers of two, all
/// old ones together are no larger than the new one.
pub(super) fn buffer(slot: &mut Option<Arc<Staging>>, context: &Context, bytes: u64) -> Result<Arc<Staging>> {
    if let Some(staging) = slot.as_ref().filter(|staging| staging.len() as u64 >= bytes) {
        return Ok(Arc::clone(staging));
    }
    let bytes = if bytes < BLOCK_BYTES { bytes.next_power_of_two().max(BUFFER_BYTES_MIN) } else { bytes };
    let staging = Arc::new(context.staging().alloc(bytes).map_err(|error| error.kind)?);
    *slot = Some(Arc::clone(&staging));
    Ok(staging)
}

/// Returns `false`, with nothing queued, without a page-locked staging buffer. The context is entered. The
/// caller keeps the host memory and `queued` until the stream has passed.
pub(super) fn copy(
    context: &Context,
    stream: &Stream,
    direction: Direction,
    device: u64,
    host: usize,
    len: usize,
    queued: &Queued,
) -> Result<bool> {
    let mut slot = stream.staging();
    let Ok(staging) = buffer(&mut slot, context, BLOCK_BYTES.min(len as u64)) else { return Ok(false) };
    if !staging.is_pinned() {
        return Ok(false);
    }
    let (api, through) = (context.api(), staging.start().expose_provenance());
    for offset in (0..len).step_by(staging.len()) {
        let bytes = staging.len().min(len - offset);
        let (from, to) = match direction {
            Direction::ToDevice => (host + offset, through),
            Direction::ToHost => (through, host + offset),
        };
        let job = HostJob::new(Box::new(move || move_bytes(from, to, bytes)));
        let kept = (Arc::clone(&job), Arc::clone(&staging));
        queued.lock().unwrap_or_else(PoisonError::into_inner).push(kept);
        let (at, through) = (device + offset as u64, staging.start().cast::<c_void>());
        match direction {
            Direction::ToDevice => {
                job.launch(context, stream)?;
                // SAFETY: C3 and C5: the staging buffer lives as long as what was just queued. It is written and
                // read in the order of this stream only.
                let copied =
                    unsafe { (api.memcpy_htod_async)(at, through.cast_const(), bytes, stream.raw()) };
                api.check(copied)?;
            }
            Direction::ToHost => {
                // SAFETY: C3 and C5, as above.
                let copied = unsafe { (api.memcpy_dtoh_async)(through, at, bytes, stream.raw()) };
                api.check(copied)?;
                job.launch(context, stream)?;
            }
        }
    }
    Ok(true)
}

/// Call it once the stream has passed.
pub(super) fn outcome(queued: &Queued) -> Result<()> {
    let queued = queued.lock().unwrap_or_else(PoisonError::into_inner);
    queued.iter().try_for_each(|(job, _)| job.outcome())
}

fn move_bytes(from: usize, to: usize, len: usize) {
    // A thread costs more than moving a small block.
    let movers = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(MOVERS_MAX);
    let movers = movers.min(len >> 20).max(1);
    let share = len.div_ceil(movers);
    let work = |offset: usize| {
        let bytes = share.min(len - offset);
        let from: *const u8 = ptr::with_exposed_provenance(from + offset);
        let to: *mut u8 = ptr::with_exposed_provenance_mut(to + offset);
        // SAFETY: C5: the flight keeps both. The stream calls this when no other code touches these bytes of the
        // staging buffer, and a copy's buffer is its own. They are different memory.
        unsafe { ptr::copy_nonoverlapping(from, to, bytes) };
    };
    thread::scope(|scope| {
        for offset in (share..len).step_by(share) {
            let spawned = thread::Builder::new().spawn_scoped(scope, move || work(offset));
            if spawned.is_err() {
                work(offset); // No thread can be started: this one does its share.
            }
        }
        work(0);
    });
}
