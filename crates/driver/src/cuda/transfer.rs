//! Copies between memory of the device and host memory, each by the way that is open to it: a kernel, where the stream is
//! for that and the memory is page-locked; the stream's staging buffer, where the memory is pageable; the copy engines.

use std::ops::Range;

use poorwill_core::{CopyPart, HostBuffer};

use super::context::Context;
use super::copies::CopyKernel;
use super::staging::{self, Queued, Way};
use super::stream::Stream;
use crate::ledger::Result;

/// A buffer by address: what is written there belongs to the copy until the flight has landed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Writable {
    start: usize,
    len: usize,
    /// Whether copies go through staging.
    is_staged: bool,
}

impl Writable {
    pub(super) fn of(context: &Context, buffer: &mut HostBuffer) -> Self {
        let bytes: &mut [u8] = buffer;
        let start = bytes.as_mut_ptr().expose_provenance();
        Self { start, len: bytes.len(), is_staged: is_staged(context, bytes) }
    }
}

/// Queues copies of `bytes`, which a flight owns, to the device: the parts lie at these places of it.
pub(super) fn to_device(
    context: &Context,
    stream: &Stream,
    kernel: Option<&CopyKernel>,
    bytes: &[u8],
    parts: &[CopyPart],
    places: &[Range<usize>],
    queued: &Queued,
) -> Result<()> {
    let is_staged = is_staged(context, bytes);
    let kernel = kernel.filter(|_| stream.copies_by_kernel());
    let readable = kernel.and_then(|_| context.pinned_at(bytes.as_ptr().addr(), bytes.len()));
    parts.iter().zip(places).try_for_each(|(part, place)| {
        let Some(from) = bytes.get(place.clone()).filter(|from| !from.is_empty()) else {
            return Ok(());
        };
        let (to, len) = (part.device.addr, from.len());
        if let Some((kernel, readable)) = kernel.zip(readable)
            && kernel.copy(stream, to, readable + place.start as u64, len)?
        {
            return Ok(());
        }
        let at = from.as_ptr().expose_provenance();
        if is_staged && staging::copy(context, stream, Way::ToDevice, to, at, len, queued)? {
            return Ok(());
        }
        let (api, pointer) = (context.api(), from.as_ptr().cast());
        // SAFETY: C3 and C5: the flight holds the buffer, shared, until the copy has finished.
        api.check(unsafe { (api.memcpy_htod_async)(to, pointer, len, stream.raw()) })
    })
}

/// Queues copies to a buffer that a flight owns. The parts lie at these places of it.
pub(super) fn to_host(
    context: &Context,
    stream: &Stream,
    to: Writable,
    parts: &[CopyPart],
    places: &[Range<usize>],
    queued: &Queued,
) -> Result<()> {
    parts.iter().zip(places).try_for_each(|(part, place)| {
        if place.is_empty() || place.end > to.len {
            return Ok(());
        }
        let (from, at, len) = (part.device.addr, to.start + place.start, place.len());
        if to.is_staged && staging::copy(context, stream, Way::ToHost, from, at, len, queued)? {
            return Ok(());
        }
        let (api, pointer) = (context.api(), std::ptr::with_exposed_provenance_mut(at));
        // SAFETY: C3 and C5: the flight owns the buffer until the copy has finished.
        api.check(unsafe { (api.memcpy_dtoh_async)(pointer, from, len, stream.raw()) })
    })
}

/// Whether copies with this memory go through staging.
fn is_staged(context: &Context, bytes: &[u8]) -> bool {
    staging::is_worth_it(context, bytes.as_ptr().addr(), bytes.len())
}
