//! Slots of page-locked memory for the arguments and results of kernels.
//!
//! Page-locking waits for all work on the GPU. So it is done in large blocks, at the start, and again only
//! when more slots are in flight than ever before. Returning a slot takes no driver call.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use poorwill_core::DriverErrorKind;

use super::context::Context;
use super::ffi::CuDeviceptr;
use super::staging::Staging;
use crate::host_memory::MemoryKind;
use crate::ledger::Result;

/// Smallest block: enough for the digests of 80 GiB.
const BLOCK_BYTES: usize = 1 << 20;

/// Unit of allocation: enough for the granules of a backup.
const UNIT_BYTES: usize = 1 << 10;

#[derive(Debug)]
pub(super) struct PinnedSlots {
    context: Arc<Context>,
    blocks: Mutex<Vec<PinnedBlock>>,
}

#[derive(Debug)]
struct PinnedBlock {
    memory: Arc<Staging>,
    device: CuDeviceptr,
    taken: Vec<bool>,
}

#[derive(Debug)]
pub(super) struct PinnedSlot {
    slots: Arc<PinnedSlots>,
    memory: Arc<Staging>,
    device: CuDeviceptr,
    block: usize,
    units: Range<usize>,
}

impl PinnedSlots {
    /// The context is entered.
    pub(super) fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        let blocks = Mutex::new(vec![PinnedBlock::new(context, BLOCK_BYTES)?]);
        Ok(Arc::new(Self { context: Arc::clone(context), blocks }))
    }

    fn blocks(&self) -> MutexGuard<'_, Vec<PinnedBlock>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The contents are arbitrary. The context is entered.
    pub(super) fn take(self: &Arc<Self>, bytes: usize) -> Result<PinnedSlot> {
        let units = bytes.div_ceil(UNIT_BYTES).max(1);
        if let Some(slot) = self.take_there_is(&mut self.blocks(), units) {
            return Ok(slot);
        }
        // No lock is held while the driver works.
        let block = PinnedBlock::new(&self.context, (units * UNIT_BYTES).next_multiple_of(BLOCK_BYTES))?;
        let mut blocks = self.blocks();
        blocks.push(block);
        self.take_there_is(&mut blocks, units).ok_or_else(|| DriverErrorKind::OutOfHostMemory {
            asked_bytes: bytes as u64,
            reason: "what was page-locked for it does not hold it".into(),
        })
    }

    fn take_there_is(self: &Arc<Self>, blocks: &mut [PinnedBlock], units: usize) -> Option<PinnedSlot> {
        blocks.iter_mut().enumerate().find_map(|(nth, block)| {
            let units = block.free_run(units)?;
            block.taken[units.clone()].fill(true);
            let device = block.device + (units.start * UNIT_BYTES) as u64;
            let (slots, memory) = (Arc::clone(self), Arc::clone(&block.memory));
            Some(PinnedSlot { slots, memory, device, block: nth, units })
        })
    }
}

impl PinnedBlock {
    fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let memory = Arc::new(context.staging().alloc(bytes as u64).map_err(|error| error.kind)?);
        let MemoryKind::Pinned(device) = context.staging().memory_kind(memory.start().addr(), bytes) else {
            let reason = "the driver gives kernels no access to host memory".into();
            return Err(DriverErrorKind::Unsupported { reason });
        };
        Ok(Self { memory, device, taken: vec![false; bytes / UNIT_BYTES] })
    }

    fn free_run(&self, count: usize) -> Option<Range<usize>> {
        let mut start = 0;
        for (unit, taken) in self.taken.iter().enumerate() {
            if *taken {
                start = unit + 1;
            } else if unit + 1 - start == count {
                return Some(start..unit + 1);
            }
        }
        None
    }
}

impl PinnedSlot {
    pub(super) fn device(&self) -> CuDeviceptr {
        self.device
    }

    fn bytes(&self) -> usize {
        self.units.len() * UNIT_BYTES
    }

    fn start(&self) -> *const u8 {
        self.memory.start().wrapping_add(self.units.start * UNIT_BYTES)
    }

    /// Writes as many words as fit.
    pub(super) fn write(&mut self, words: impl Iterator<Item = u64>) {
        let start = self.start().cast_mut();
        for (nth, word) in words.take(self.bytes() / 8).enumerate() {
            let to = start.wrapping_add(8 * nth).cast::<[u8; 8]>();
            // SAFETY: C5: the units belong to this slot alone, no kernel knows them yet, and the word lies inside.
            unsafe { to.write_volatile(word.to_le_bytes()) };
        }
    }

    /// Call it once the kernel has finished.
    pub(super) fn words(&self, at: usize, count: usize) -> impl Iterator<Item = u64> {
        assert!(at + 8 * count <= self.bytes(), "words lie inside of their slot");
        let first = self.start().wrapping_add(at);
        (0..count).map(move |nth| {
            let from = first.wrapping_add(8 * nth).cast::<[u8; 8]>();
            // SAFETY: C5: the units belong to this slot alone, and the kernel has finished.
            u64::from_le_bytes(unsafe { from.read_volatile() })
        })
    }

    /// As for [`Self::words`], of two each, the low one first.
    pub(super) fn values(&self, at: usize, count: usize) -> impl Iterator<Item = u128> {
        let mut words = self.words(at, 2 * count);
        (0..count).map_while(move |_| Some(u128::from(words.next()?) | u128::from(words.next()?) << 64))
    }
}

impl Drop for PinnedSlot {
    fn drop(&mut self) {
        // In a forked child the lock may be held for ever.
        if self.slots.context.owner().is_here()
            && let Some(block) = self.slots.blocks().get_mut(self.block)
        {
            block.taken[self.units.clone()].fill(false);
        }
    }
}
