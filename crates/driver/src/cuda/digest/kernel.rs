//! The digest kernel: loading, testing, and queuing its work.

use std::sync::Arc;

use poorwill_core::Digest;
use poorwill_core::digest::LEAF_BYTES;
use poorwill_core::driver::Result as DriverResult;

use super::super::context::Context;
use super::super::ffi::CuDeviceptr;
use super::super::kernel::{Function, Grid, KernelArg, Module};
use super::super::slots::{PinnedSlot, PinnedSlots};
use super::super::stream::Stream;
use crate::ledger::{Result, invalid};

/// PTX of the kernel `poorwill_digest(u64 granules, u64 digests, u32 leaves)`: digests of granules, by their
/// addresses. `poorwill_digest_host` is the same for host memory. `kernel.cu` states the requirements.
pub const DIGEST_PTX: &str = include_str!("kernel.ptx");

/// Fewest leaves of a granule that the kernel supports.
pub const DIGEST_LEAVES_MIN: u64 = 15;

/// Most leaves: their digests must fit the shared memory that every block has.
pub const DIGEST_LEAVES_MAX: u64 = 2048;

/// Required alignment of a granule's address.
pub(super) const ALIGNMENT: u64 = 16;

const SAMPLE_LEAVES: u32 = 16;

#[derive(Debug, Clone, Copy)]
pub(super) enum Memory {
    Device,
    Host,
}

#[derive(Debug)]
struct Entry {
    function: Function,
    threads: u32,
}

#[derive(Debug)]
pub(super) struct DigestKernel {
    of_device: Entry,
    of_host: Entry,
    slots: Arc<PinnedSlots>,
    leaves: u32,
}

/// The code that queues it keeps it until the stream has passed it.
#[derive(Debug)]
pub(in crate::cuda) struct DigestJob {
    kernel: Arc<DigestKernel>,
    slot: Option<PinnedSlot>,
    count: usize,
    memory: Memory,
}

impl Memory {
    fn entry(self, module: &Module) -> DriverResult<Entry> {
        // What the entries expect. Device memory needs few: most blocks of a multiprocessor read while a warp
        // of one computes a root. Host memory needs many: even a lone block, for one changed granule, has
        // enough loads in flight.
        let (name, threads) = match self {
            Self::Device => ("poorwill_digest", 64),
            Self::Host => ("poorwill_digest_host", 512),
        };
        Ok(Entry { function: module.function(name)?, threads })
    }
}

impl DigestKernel {
    /// The context is entered.
    pub(super) fn open(
        context: &Arc<Context>,
        slots: &std::result::Result<Arc<PinnedSlots>, String>,
        granule_bytes: u64,
    ) -> std::result::Result<Self, String> {
        let leaves = granule_bytes / LEAF_BYTES as u64;
        let leaves = u32::try_from(leaves)
            .ok()
            .filter(|leaves| (DIGEST_LEAVES_MIN..=DIGEST_LEAVES_MAX).contains(&u64::from(*leaves)))
            .filter(|_| granule_bytes.is_multiple_of(LEAF_BYTES as u64))
            .ok_or_else(|| {
                let (min, max) = (DIGEST_LEAVES_MIN, DIGEST_LEAVES_MAX);
                format!("it is made for granules of {min} to {max} times {LEAF_BYTES} bytes, not for {granule_bytes}")
            })?;
        let load = || -> DriverResult<[Entry; 2]> {
            let module = Module::load_in(context, DIGEST_PTX)?;
            Ok([Memory::Device.entry(&module)?, Memory::Host.entry(&module)?])
        };
        let [of_device, of_host] = load().map_err(|error| format!("the driver does not take it: {error}"))?;
        let failed = |error| format!("trying it out failed: {error}");
        let kernel = Self { of_device, of_host, slots: slots.clone()?, leaves };
        if kernel.is_correct(context).map_err(failed)? {
            Ok(kernel)
        } else {
            Err("it computes other digests than the host".into())
        }
    }

    /// The driver may load the kernel only here.
    fn is_correct(&self, context: &Arc<Context>) -> Result<bool> {
        // Any bytes will do, as long as all words differ.
        let len = SAMPLE_LEAVES as usize * LEAF_BYTES;
        let words = (1..=len as u64 / 8).map(|nth| nth.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let bytes: Vec<u8> = words.clone().flat_map(u64::to_le_bytes).collect();
        let mut sample = self.slots.take(len)?;
        sample.write(words);
        let slots = [self.slot(&[sample.device()])?, self.slot(&[sample.device()])?];
        let stream = Stream::create(context.primary())?;
        let mut entries = [Memory::Device, Memory::Host].into_iter().zip(&slots);
        let launched =
            entries.try_for_each(|(memory, slot)| self.launch(memory, &stream, slot, 1, SAMPLE_LEAVES));
        let finished = stream.synchronize().or_else(|_| context.synchronize());
        if finished.is_err() {
            // It may still be running.
            std::mem::forget((sample, slots));
            return finished.map(|()| false);
        }
        launched?;
        let expected = [Digest::of(&bytes)];
        Ok(slots.iter().all(|slot| digests_in(slot, 1) == expected))
    }

    fn slot(&self, granules: &[CuDeviceptr]) -> Result<PinnedSlot> {
        let mut slot = self.slots.take(digests_at(granules.len()) + 16 * granules.len())?;
        slot.write(granules.iter().copied());
        Ok(slot)
    }

    fn launch(
        &self,
        memory: Memory,
        stream: &Stream,
        slot: &PinnedSlot,
        count: usize,
        leaves: u32,
    ) -> Result<()> {
        let Entry { function, threads } = match memory {
            Memory::Device => &self.of_device,
            Memory::Host => &self.of_host,
        };
        let blocks = u32::try_from(count)
            .ok()
            .filter(|blocks| i32::try_from(*blocks).is_ok())
            .ok_or_else(|| invalid(format!("{count} granules are more than a grid has")))?;
        let digests = slot.device() + digests_at(count) as u64;
        let args = [KernelArg::U64(slot.device()), KernelArg::U64(digests), KernelArg::U32(leaves)];
        let grid = Grid { blocks, threads: *threads, shared_bytes: 16 * leaves + 16 };
        // SAFETY: C5: the parameters are the kernel's, and the granules are mapped with access or in page-locked
        // memory. The code that queues it keeps the slot and that memory until the kernel has finished.
        unsafe { function.queue(stream, grid, &args) }
    }
}

impl DigestJob {
    /// `None` where no slot can be allocated. The kernel can read the granules, all in the same memory.
    pub(super) fn new(kernel: &Arc<DigestKernel>, memory: Memory, granules: &[CuDeviceptr]) -> Option<Self> {
        let slot = if granules.is_empty() { None } else { Some(kernel.slot(granules).ok()?) };
        Some(Self { kernel: Arc::clone(kernel), slot, count: granules.len(), memory })
    }

    /// The context is entered. The caller keeps this and the granules until the stream has passed it.
    pub(in crate::cuda) fn queue(&self, stream: &Stream) -> Result<()> {
        match &self.slot {
            Some(slot) => self.kernel.launch(self.memory, stream, slot, self.count, self.kernel.leaves),
            None => Ok(()),
        }
    }

    pub(in crate::cuda) fn digests(&self) -> Vec<Digest> {
        self.slot.as_ref().map_or_else(Vec::new, |slot| digests_in(slot, self.count))
    }
}

fn digests_in(slot: &PinnedSlot, count: usize) -> Vec<Digest> {
    slot.values(digests_at(count), count).map(Digest).collect()
}

fn digests_at(count: usize) -> usize {
    (8 * count).next_multiple_of(16)
}
