//! Copies to the device by a kernel that reads page-locked host memory, without a copy engine.
//!
//! Opening the device loads and tests the kernel. If it cannot be used, the copy engines copy, and the
//! reason is kept.

use std::sync::Arc;

use poorwill_core::driver::Result as DriverResult;

use super::context::Context;
use super::ffi::CuDeviceptr;
use super::kernel::{Function, Grid, KernelArg, Module};
use super::slots::PinnedSlots;
use super::stream::Stream;
use crate::ledger::Result;

/// PTX of the kernel `poorwill_copy(u64 to, u64 from, u64 bytes)`. Its header states its requirements.
pub const COPY_PTX: &str = include_str!("kernel.ptx");

/// The kernel copies multiples of this size.
pub const COPY_PAGE_BYTES: usize = 4096;

/// Required alignment of addresses.
const ALIGNMENT: u64 = 16;

const THREADS: u32 = 512;

/// Most blocks: enough to saturate the link, and few enough to leave most of the GPU to others.
const BLOCKS_MAX: u32 = 32;

/// Pages that one block copies at a time.
const BLOCK_PAGES: usize = THREADS as usize / 32;

/// Enough for one block and part of another.
const SAMPLE_PAGES: usize = BLOCK_PAGES + 3;

/// The caller of [`CopyKernel::copy`] keeps it until the stream has passed the copy.
#[derive(Debug)]
pub(super) struct CopyKernel {
    function: Function,
}

impl CopyKernel {
    /// Loads and tests the kernel, or returns why it cannot be used. The context is entered.
    pub(super) fn open(
        context: &Arc<Context>,
        slots: &std::result::Result<Arc<PinnedSlots>, String>,
    ) -> std::result::Result<Arc<Self>, String> {
        let load =
            || -> DriverResult<Function> { Module::load_in(context, COPY_PTX)?.function("poorwill_copy") };
        let function = load().map_err(|error| format!("the driver does not take it: {error}"))?;
        let kernel = Self { function };
        match kernel.is_correct(context, slots.as_ref()?) {
            Ok(true) => Ok(Arc::new(kernel)),
            Ok(false) => Err("it copies something else than what is there".into()),
            Err(error) => Err(format!("trying it out failed: {error}")),
        }
    }

    /// The driver may load the kernel only here.
    fn is_correct(&self, context: &Arc<Context>, slots: &Arc<PinnedSlots>) -> Result<bool> {
        let len = SAMPLE_PAGES * COPY_PAGE_BYTES;
        // Any bytes will do, as long as all words differ.
        let words = (1..=len as u64 / 8).map(|nth| nth.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let (mut from, mut to) = (slots.take(len)?, slots.take(len)?);
        from.write(words.clone());
        to.write(words.map(|word| !word));
        let stream = Stream::create(context.primary())?;
        let launched = self.launch(&stream, to.device(), from.device(), len);
        let finished = stream.synchronize().or_else(|_| context.synchronize());
        if finished.is_err() {
            // It may still be running.
            std::mem::forget((from, to, self.function.clone()));
            return finished.map(|()| false);
        }
        launched?;
        let count = len / 16;
        Ok(from.values(0, count).eq(to.values(0, count)))
    }

    /// Returns `false`, with nothing queued, if the kernel cannot make this copy. The context is entered. The
    /// caller keeps the memory and the kernel until the stream has passed the copy.
    pub(super) fn copy(
        &self,
        stream: &Stream,
        to: CuDeviceptr,
        from: CuDeviceptr,
        len: usize,
    ) -> Result<bool> {
        let is_supported = len.is_multiple_of(COPY_PAGE_BYTES)
            && [to, from].iter().all(|address| address.is_multiple_of(ALIGNMENT));
        if is_supported {
            self.launch(stream, to, from, len)?;
        }
        Ok(is_supported)
    }

    fn launch(&self, stream: &Stream, to: CuDeviceptr, from: CuDeviceptr, len: usize) -> Result<()> {
        let blocks = (len / COPY_PAGE_BYTES).div_ceil(BLOCK_PAGES);
        let blocks = u32::try_from(blocks).unwrap_or(BLOCKS_MAX).clamp(1, BLOCKS_MAX);
        let args = [KernelArg::U64(to), KernelArg::U64(from), KernelArg::U64(len as u64)];
        // SAFETY: C5: the parameters are the kernel's. It writes to memory that is mapped with access and reads
        // page-locked memory. The code that queues it keeps both until the kernel has finished.
        unsafe { self.function.queue(stream, Grid::from((blocks, THREADS)), &args) }
    }
}
