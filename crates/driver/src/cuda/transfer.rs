//! Copies between device and host memory. Streams for kernel copies use the kernel, if the memory is
//! page-locked. Pageable memory goes through the stream's staging buffer. The rest uses the copy engines, as all does on
//! streams over another GPU's link.

use std::ops::Range;

use poorwill_core::driver::MovePart;
use poorwill_core::{CopyPart, HostBuffer, Op};

use super::context::Context;
use super::copies::CopyKernel;
use super::staging::{self, Direction, Queued};
use super::stream::Stream;
use super::vm::to_usize;
use crate::ledger::Result;

/// The copy may write to it until the flight has ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct Writable {
    start: usize,
    len: usize,
    is_staged: bool,
}

impl Writable {
    pub(super) fn of(context: &Context, buffer: &mut HostBuffer) -> Self {
        let bytes: &mut [u8] = buffer;
        let start = bytes.as_mut_ptr().expose_provenance();
        Self { start, len: bytes.len(), is_staged: is_staged(context, bytes) }
    }
}

/// The flight owns `bytes`; `ranges` are those of the parts.
pub(super) fn to_device(
    context: &Context,
    stream: &Stream,
    kernel: Option<&CopyKernel>,
    bytes: &[u8],
    parts: &[CopyPart],
    ranges: &[Range<usize>],
    queued: &Queued,
) -> Result<()> {
    let _entered = stream.enter_link(Op::CopyToDevice)?;
    let is_staged = is_staged(context, bytes) && !stream.is_over_link();
    let kernel = kernel.filter(|_| stream.copies_by_kernel());
    let readable = kernel.and_then(|_| context.pinned_at(bytes.as_ptr().addr(), bytes.len()));
    parts.iter().zip(ranges).try_for_each(|(part, range)| {
        let Some(from) = bytes.get(range.clone()).filter(|from| !from.is_empty()) else {
            return Ok(());
        };
        let (to, len) = (part.device.addr, from.len());
        if let Some((kernel, readable)) = kernel.zip(readable)
            && kernel.copy(stream, to, readable + range.start as u64, len)?
        {
            return Ok(());
        }
        let at = from.as_ptr().expose_provenance();
        if is_staged && staging::copy(context, stream, Direction::ToDevice, to, at, len, queued)? {
            return Ok(());
        }
        let (api, pointer) = (context.api(), from.as_ptr().cast());
        // SAFETY: C3 and C5: the flight holds the buffer, shared, until the copy has finished.
        api.check(unsafe { (api.memcpy_htod_async)(to, pointer, len, stream.raw()) })
    })
}

/// As for [`to_device`].
pub(super) fn to_host(
    context: &Context,
    stream: &Stream,
    to: Writable,
    parts: &[CopyPart],
    ranges: &[Range<usize>],
    queued: &Queued,
) -> Result<()> {
    let _entered = stream.enter_link(Op::CopyToHost)?;
    parts.iter().zip(ranges).try_for_each(|(part, range)| {
        if range.is_empty() || range.end > to.len {
            return Ok(());
        }
        let (from, at, len) = (part.device.addr, to.start + range.start, range.len());
        if to.is_staged
            && !stream.is_over_link()
            && staging::copy(context, stream, Direction::ToHost, from, at, len, queued)?
        {
            return Ok(());
        }
        let (api, pointer) = (context.api(), std::ptr::with_exposed_provenance_mut(at));
        // SAFETY: C3 and C5: the flight owns the buffer until the copy has finished.
        api.check(unsafe { (api.memcpy_dtoh_async)(pointer, from, len, stream.raw()) })
    })
}

/// Both sides are mapped with access.
pub(super) fn within(context: &Context, stream: &Stream, parts: &[MovePart]) -> Result<()> {
    parts.iter().filter(|part| part.to.bytes > 0).try_for_each(|part| {
        let (api, bytes) = (context.api(), to_usize(part.to.bytes)?);
        // SAFETY: C3, the ranges are mapped with access.
        api.check(unsafe { (api.memcpy_async)(part.to.addr, part.from, bytes, stream.raw()) })
    })
}

fn is_staged(context: &Context, bytes: &[u8]) -> bool {
    staging::is_needed(context, bytes.as_ptr().addr(), bytes.len())
}
