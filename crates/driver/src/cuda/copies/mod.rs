//! Copies to the device by a kernel, which reads page-locked host memory itself and so needs no copy engine.
//!
//! The kernel is loaded and tried out when the device is opened. A driver that refuses it, a GPU on which it copies
//! something else, and memory that it cannot read leave the copy engines, and the reason.

use std::sync::Arc;

use poorwill_core::driver::Result as DriverResult;

use super::context::Context;
use super::ffi::CuDeviceptr;
use super::kernel::{Function, Grid, KernelArg, Module};
use super::slots::Slots;
use super::stream::Stream;
use crate::ledger::Result;

/// PTX of the kernel `poorwill_copy(u64 to, u64 from, u64 bytes)`. Its head says what it asks for.
pub const COPY_PTX: &str = include_str!("kernel.ptx");

/// What it copies multiples of.
pub const COPY_PAGE_BYTES: usize = 4096;

/// What addresses must be multiples of.
const ALIGNMENT: u64 = 16;

/// Threads of a block, as many as the kernel takes.
const THREADS: u32 = 512;

/// Blocks at most: enough to fill the link, and few enough to leave most of the GPU to others.
const BLOCKS_MAX: u32 = 32;

/// Pages that one block has on their way.
const BLOCK_PAGES: usize = THREADS as usize / 32;

/// Pages of what the kernel is tried out on: for a block and a part of another.
const SAMPLE_PAGES: usize = BLOCK_PAGES + 3;

/// The kernel. Whoever has queued a copy keeps it until the stream is past that.
#[derive(Debug)]
pub(super) struct CopyKernel {
    function: Function,
}

impl CopyKernel {
    /// Loads the kernel and tries it out, with page-locked memory, or why there is none. The caller has entered the
    /// context.
    pub(super) fn open(
        context: &Arc<Context>,
        slots: &std::result::Result<Arc<Slots>, String>,
    ) -> std::result::Result<Arc<Self>, String> {
        let load =
            || -> DriverResult<Function> { Module::load_in(context, COPY_PTX)?.function("poorwill_copy") };
        let function = load().map_err(|error| format!("the driver does not take it: {error}"))?;
        let kernel = Self { function };
        match kernel.is_right(context, slots.as_ref()?) {
            Ok(true) => Ok(Arc::new(kernel)),
            Ok(false) => Err("it copies something else than what is there".into()),
            Err(error) => Err(format!("trying it out failed: {error}")),
        }
    }

    /// Whether it copies a sample right, between two pieces of host memory. Loading may be put off by the driver until
    /// here.
    fn is_right(&self, context: &Arc<Context>, slots: &Arc<Slots>) -> Result<bool> {
        let len = SAMPLE_PAGES * COPY_PAGE_BYTES;
        // Any bytes do that are all different words.
        let words = (1..=len as u64 / 8).map(|nth| nth.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let (mut from, mut to) = (slots.take(len)?, slots.take(len)?);
        from.write(words.clone());
        to.write(words.map(|word| !word));
        let stream = Stream::ours(context)?;
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

    /// Queues a copy of `len` bytes, or does nothing and says so, where it cannot make this one. The caller has entered
    /// the context, and keeps the memory and this until the stream is past it.
    pub(super) fn copy(
        &self,
        stream: &Stream,
        to: CuDeviceptr,
        from: CuDeviceptr,
        len: usize,
    ) -> Result<bool> {
        let is_for_it = len.is_multiple_of(COPY_PAGE_BYTES)
            && [to, from].iter().all(|address| address.is_multiple_of(ALIGNMENT));
        if is_for_it {
            self.launch(stream, to, from, len)?;
        }
        Ok(is_for_it)
    }

    fn launch(&self, stream: &Stream, to: CuDeviceptr, from: CuDeviceptr, len: usize) -> Result<()> {
        let blocks = (len / COPY_PAGE_BYTES).div_ceil(BLOCK_PAGES);
        let blocks = u32::try_from(blocks).unwrap_or(BLOCKS_MAX).clamp(1, BLOCKS_MAX);
        let args = [KernelArg::U64(to), KernelArg::U64(from), KernelArg::U64(len as u64)];
        // SAFETY: C5: the parameters are the kernel's, it writes to memory that is mapped with access and reads memory
        // that is page-locked, and whoever queues this keeps both until the kernel has finished.
        unsafe { self.function.queue(stream, Grid::from((blocks, THREADS)), &args) }
    }
}
