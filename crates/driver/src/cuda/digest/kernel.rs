//! The kernel that computes digests: loading it, trying it out, and queuing its work.

use std::sync::Arc;

use poorwill_core::Digest;
use poorwill_core::digest::LEAF_BYTES;

use super::super::context::Context;
use super::super::ffi::CuDeviceptr;
use super::super::kernel::{Function, Grid, KernelArg, Module};
use super::super::queue::Stream;
use super::slots::{Slot, Slots};
use crate::ledger::{Result, invalid};

/// PTX of the kernel `poorwill_digest(u64 granules, u64 digests, u32 leaves)`: the digests of granules, by their
/// addresses. Its head says what it asks for.
pub const DIGEST_PTX: &str = include_str!("kernel.ptx");

/// Fewest leaves of a granule that the kernel computes digests of.
pub const DIGEST_LEAVES_MIN: u64 = 15;

/// Most leaves: their digests have to find room in the shared memory that every block has.
pub const DIGEST_LEAVES_MAX: u64 = 2048;

/// What a granule's address must be a multiple of.
pub(super) const ALIGNMENT: u64 = 16;

/// Threads of a block, as many as the kernel takes. They are few, so that of the blocks that share a multiprocessor most
/// read while one warp of another computes a root.
const THREADS: u32 = 128;

/// Leaves of what the kernel is tried out on.
const SAMPLE_LEAVES: u32 = 16;

/// The kernel, for granules of one size.
#[derive(Debug)]
pub(super) struct DigestKernel {
    function: Function,
    slots: Arc<Slots>,
    leaves: u32,
}

/// Digests on their way. Whoever has queued it keeps it until the stream is past it.
#[derive(Debug)]
pub(in crate::cuda) struct Job {
    kernel: Arc<DigestKernel>,
    /// The addresses of the granules, then their digests.
    slot: Option<Slot>,
    count: usize,
}

impl DigestKernel {
    /// Loads the kernel and tries it out. The caller has entered the context.
    pub(super) fn open(context: &Arc<Context>, granule_bytes: u64) -> std::result::Result<Self, String> {
        let leaves = granule_bytes / LEAF_BYTES as u64;
        let leaves = u32::try_from(leaves)
            .ok()
            .filter(|leaves| (DIGEST_LEAVES_MIN..=DIGEST_LEAVES_MAX).contains(&u64::from(*leaves)))
            .filter(|_| granule_bytes.is_multiple_of(LEAF_BYTES as u64))
            .ok_or_else(|| {
                let (min, max) = (DIGEST_LEAVES_MIN, DIGEST_LEAVES_MAX);
                format!("it is made for granules of {min} to {max} times {LEAF_BYTES} bytes, not for {granule_bytes}")
            })?;
        let load = || Module::load_in(context, DIGEST_PTX)?.function("poorwill_digest");
        let function = load().map_err(|error| format!("the driver does not take it: {error}"))?;
        let failed = |error| format!("trying it out failed: {error}");
        let slots = Slots::new(context).map_err(failed)?;
        let kernel = Self { function, slots, leaves };
        if kernel.is_right(context).map_err(failed)? {
            Ok(kernel)
        } else {
            Err("it computes other digests than the host".into())
        }
    }

    /// Whether it computes the digest of a sample right. Loading may be put off by the driver until here.
    fn is_right(&self, context: &Arc<Context>) -> Result<bool> {
        // Any bytes do that are all different words.
        let len = SAMPLE_LEAVES as usize * LEAF_BYTES;
        let words = (1..=len as u64 / 8).map(|nth| nth.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let bytes: Vec<u8> = words.clone().flat_map(u64::to_le_bytes).collect();
        let mut sample = self.slots.take(len)?;
        sample.write(words);
        let slot = self.slot(&[sample.device()])?;
        let stream = Stream::ours(context)?;
        let launched = self.launch(&stream, &slot, 1, SAMPLE_LEAVES);
        let finished = stream.synchronize().or_else(|_| context.synchronize());
        if finished.is_err() {
            // It may still be running.
            std::mem::forget((sample, slot));
            return finished.map(|()| false);
        }
        launched?;
        Ok(slot.digests(digests_at(1), 1) == [Digest::of(&bytes)])
    }

    fn slot(&self, granules: &[CuDeviceptr]) -> Result<Slot> {
        let mut slot = self.slots.take(digests_at(granules.len()) + 16 * granules.len())?;
        slot.write(granules.iter().copied());
        Ok(slot)
    }

    fn launch(&self, stream: &Stream, slot: &Slot, count: usize, leaves: u32) -> Result<()> {
        let blocks = u32::try_from(count)
            .ok()
            .filter(|blocks| i32::try_from(*blocks).is_ok())
            .ok_or_else(|| invalid(format!("{count} granules are more than a grid has")))?;
        let digests = slot.device() + digests_at(count) as u64;
        let args = [KernelArg::U64(slot.device()), KernelArg::U64(digests), KernelArg::U32(leaves)];
        let grid = Grid { blocks, threads: THREADS, shared_bytes: 16 * leaves + 16 };
        // SAFETY: C5: the parameters are the kernel's, the granules are mapped with access or in page-locked memory,
        // and whoever queues this keeps the slot and that memory until the kernel has finished.
        unsafe { self.function.queue(stream, grid, &args) }
    }
}

impl Job {
    /// Of granules at addresses that the kernel can read, in order. `None` where there is no memory for it.
    pub(super) fn new(kernel: &Arc<DigestKernel>, granules: &[CuDeviceptr]) -> Option<Self> {
        let slot = if granules.is_empty() { None } else { Some(kernel.slot(granules).ok()?) };
        Some(Self { kernel: Arc::clone(kernel), slot, count: granules.len() })
    }

    /// Queues it. The caller has entered the context, and keeps it and the granules until the stream is past it.
    pub(in crate::cuda) fn queue(&self, stream: &Stream) -> Result<()> {
        match &self.slot {
            Some(slot) => self.kernel.launch(stream, slot, self.count, self.kernel.leaves),
            None => Ok(()),
        }
    }

    /// The digests, once the stream is past it.
    pub(in crate::cuda) fn digests(&self) -> Vec<Digest> {
        self.slot.as_ref().map_or_else(Vec::new, |slot| slot.digests(digests_at(self.count), self.count))
    }
}

/// Where the digests of so many granules begin in their slot.
fn digests_at(count: usize) -> usize {
    (8 * count).next_multiple_of(16)
}
