//! Codes of granules: by kernels where possible, otherwise on the host.
//!
//! Opening the device loads the kernels and tests both. If they cannot be used, the host encodes and decodes, and
//! the reason is kept.

mod kernel;

use std::sync::{Arc, OnceLock};

use poorwill_core::{CodePart, DeviceRange, Digest, HostBuffer, Op};

use super::context::Context;
use super::ffi::CuDeviceptr;
use super::slots::PinnedSlots;
use super::stream::{Event, Stream};
use crate::ledger::Result;

pub use kernel::CODEC_PTX;
use kernel::{CodecKernels, Codes};
pub(super) use kernel::{DecodeJob, EncodeJob};

/// Alignment of codes, slots and granules; codes are multiples of it.
const ALIGNMENT: u64 = 16;

/// Gaps between codes that are copied along with them, in bytes.
const GAP_BYTES_MAX: u64 = 4096;

#[derive(Debug, Clone)]
pub(super) struct Codec {
    kernels: std::result::Result<Arc<CodecKernels>, String>,
    granule_bytes: u64,
}

/// A copy of codes to scratch memory: offset in the buffer, bytes, address.
type Staged = (usize, usize, CuDeviceptr);

/// Codes that a kernel decodes where they lie, or that a copy engine brings to scratch memory first.
#[derive(Debug)]
pub(super) struct Decoding {
    job: DecodeJob,
    copies: Vec<Staged>,
    /// Behind copies over another GPU's link, whose failure the decoding stream does not see.
    copied: OnceLock<Event>,
}

impl Codec {
    /// `slots` are page-locked memory, or why there is none. The context is entered.
    pub(super) fn open(
        context: &Arc<Context>,
        slots: &std::result::Result<Arc<PinnedSlots>, String>,
        granule_bytes: u64,
    ) -> Self {
        Self { kernels: CodecKernels::open(context, slots, granule_bytes).map(Arc::new), granule_bytes }
    }

    pub(super) fn closed() -> Self {
        Self { kernels: Err("the device has been closed".into()), granule_bytes: 1 }
    }

    pub(super) fn kernels(&self) -> std::result::Result<(), &str> {
        self.kernels.as_ref().map(drop).map_err(String::as_str)
    }

    /// `None` where the kernels cannot do it.
    pub(super) fn measuring(&self, ranges: &[DeviceRange]) -> Option<EncodeJob> {
        let kernels = self.kernels.as_ref().ok()?;
        let granules = ranges.iter().flat_map(|range| {
            let count = range.bytes / self.granule_bytes;
            (0..count).map(|nth| [range.addr + nth * self.granule_bytes, 0, 0])
        });
        EncodeJob::new(kernels, &granules.collect::<Vec<_>>())
    }

    /// The same for codes into their slots, and their digests once more: the buffer must be page-locked.
    pub(super) fn encoding(&self, context: &Context, buffer: &[u8], parts: &[CodePart]) -> Option<EncodeJob> {
        let kernels = self.kernels.as_ref().ok()?;
        let start = context.pinned_at(buffer.as_ptr().addr(), buffer.len())?;
        let slot = |part: &CodePart| [part.granule, start + part.host_offset, part.slot_bytes];
        let slots: Vec<[u64; 3]> = parts.iter().map(slot).collect();
        slots.iter().all(|[_, slot, _]| slot.is_multiple_of(ALIGNMENT)).then_some(())?;
        EncodeJob::new(kernels, &slots)
    }

    /// Decodes the stored codes for their digests alone.
    pub(super) fn digesting(
        &self,
        context: &Context,
        buffer: &[u8],
        parts: &[CodePart],
    ) -> Option<DecodeJob> {
        let start = context.pinned_at(buffer.as_ptr().addr(), buffer.len())?;
        let code = |part: &CodePart| [start + part.host_offset, part.slot_bytes / ALIGNMENT * ALIGNMENT, 0];
        DecodeJob::new(self.kernels.as_ref().ok()?, Codes::Host, &parts.iter().map(code).collect::<Vec<_>>())
    }

    /// `None` where the kernels cannot do it. With `scratch`, the codes go there by a copy engine first, if they fit.
    pub(super) fn decoding(
        &self,
        context: &Context,
        buffer: &HostBuffer,
        parts: &[CodePart],
        scratch: Option<DeviceRange>,
    ) -> Option<Decoding> {
        let kernels = self.kernels.as_ref().ok()?;
        parts.iter().all(|part| part.slot_bytes.is_multiple_of(ALIGNMENT)).then_some(())?;
        if let Some((copies, codes)) = scratch.and_then(|scratch| staged(parts, scratch)) {
            let job = DecodeJob::new(kernels, Codes::Device, &codes)?;
            return Some(Decoding { job, copies, copied: OnceLock::new() });
        }
        let start = context.pinned_at(buffer.as_ptr().addr(), buffer.len())?;
        let code = |part: &CodePart| [start + part.host_offset, part.slot_bytes, part.granule];
        let codes: Vec<[u64; 3]> = parts.iter().map(code).collect();
        codes.iter().all(|[code, ..]| code.is_multiple_of(ALIGNMENT)).then_some(())?;
        let job = DecodeJob::new(kernels, Codes::Host, &codes)?;
        Some(Decoding { job, copies: Vec::new(), copied: OnceLock::new() })
    }
}

impl Decoding {
    /// Queues the copies on `copies`, once the work before this on `stream` has ended, and the kernel on `stream`. The
    /// context is entered. The caller keeps this, the buffer, the granules and the scratch memory until `stream` has
    /// passed it.
    pub(super) fn queue(
        &self,
        context: &Arc<Context>,
        stream: &Stream,
        copies: Option<&Stream>,
        buffer: &HostBuffer,
    ) -> Result<()> {
        if let Some(copies) = copies.filter(|_| !self.copies.is_empty()) {
            let copied = self.copy(context, stream, copies, buffer);
            if copied.is_err() {
                // The caller waits for `stream` only. If this fails, too, so does that.
                let _ = copies.synchronize();
            }
            copied?;
        }
        self.job.queue(stream)
    }

    fn copy(
        &self,
        context: &Arc<Context>,
        stream: &Stream,
        copies: &Stream,
        buffer: &HostBuffer,
    ) -> Result<()> {
        let api = context.api();
        // The scratch memory may be in use until here.
        copies.wait_for(&stream.mark()?)?;
        let entered = copies.enter_link(Op::CopyToDevice)?;
        for (offset, bytes, to) in &self.copies {
            let from = buffer[*offset..offset + bytes].as_ptr().cast();
            // SAFETY: C3 and C5: the flight holds the buffer, shared, until `stream` has passed it, which waits for the
            // copy. The scratch memory is mapped with access, and nothing else uses it meanwhile.
            api.check(unsafe { (api.memcpy_htod_async)(*to, from, *bytes, copies.raw()) })?;
        }
        drop(entered);
        let copied = copies.mark()?;
        stream.wait_for(&copied)?;
        if copies.is_over_link() {
            let _ = self.copied.set(copied);
        }
        Ok(())
    }

    /// What the granules have, once the decoding stream has passed it.
    pub(super) fn digests(&self) -> Result<Vec<Digest>> {
        if let Some(copied) = self.copied.get() {
            let _entered = copied.enter(Op::Decode).map_err(|error| error.kind)?;
            copied.wait()?;
        }
        Ok(self.job.digests())
    }
}

/// Copies of codes to scratch memory, and where each code is then. `None` where they do not fit.
fn staged(parts: &[CodePart], scratch: DeviceRange) -> Option<(Vec<Staged>, Vec<[u64; 3]>)> {
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_unstable_by_key(|nth| parts[*nth].host_offset);
    // Begin and end in the buffer, and the address.
    let mut runs: Vec<(u64, u64, CuDeviceptr)> = Vec::new();
    let mut codes = vec![[0; 3]; parts.len()];
    for nth in order {
        let CodePart { granule, host_offset, slot_bytes } = parts[nth];
        let end = host_offset + slot_bytes;
        match runs.last_mut().filter(|run| host_offset <= run.1 + GAP_BYTES_MAX) {
            Some(run) => run.1 = run.1.max(end),
            None => {
                let to = runs.last().map_or(scratch.addr, |(begin, end, at)| at + (end - begin));
                runs.push((host_offset, end, to));
            }
        }
        let (begin, _, at) = *runs.last()?;
        codes[nth] = [at + (host_offset - begin), slot_bytes, granule];
    }
    let end = runs.last().map_or(scratch.addr, |(begin, end, at)| at + (end - begin));
    if end > scratch.end() {
        return None;
    }
    let copy = |(begin, end, at): (u64, u64, CuDeviceptr)| {
        Some((usize::try_from(begin).ok()?, usize::try_from(end - begin).ok()?, at))
    };
    Some((runs.into_iter().map(copy).collect::<Option<_>>()?, codes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(host_offset: u64, slot_bytes: u64) -> CodePart {
        CodePart { granule: 0x7000, host_offset, slot_bytes }
    }

    #[test]
    fn codes_that_lie_together_are_one_copy() {
        let parts = [part(0x2_0000, 64), part(128, 1024), part(1152, 512)];
        let (copies, codes) = staged(&parts, DeviceRange::new(0x1000_0000, 4096)).unwrap();
        assert_eq!(copies, [(128, 1536, 0x1000_0000), (0x2_0000, 64, 0x1000_0600)]);
        assert_eq!(
            codes,
            [[0x1000_0600, 64, 0x7000], [0x1000_0000, 1024, 0x7000], [0x1000_0400, 512, 0x7000]]
        );
        assert_eq!(staged(&parts, DeviceRange::new(0x1000_0000, 1599)), None);
        assert_eq!(staged(&[], DeviceRange::new(0x1000_0000, 0)), Some((vec![], vec![])));
    }
}
