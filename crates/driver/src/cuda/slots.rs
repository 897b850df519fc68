//! Small pieces of page-locked memory, for what a kernel is told and tells.
//!
//! Page-locking waits for work on the GPU, so it is done for many pieces at once, at the start, and again only where
//! more are in flight than ever before. What was taken goes back without a call of the driver.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use poorwill_core::DriverErrorKind;

use super::context::Context;
use super::ffi::CuDeviceptr;
use super::staging::Staging;
use crate::host_memory::Place;
use crate::ledger::Result;

/// What is page-locked at a time, at least: for the digests of 80 GiB.
const PIECE_BYTES: usize = 1 << 20;

/// What is taken of it: enough for the granules of a backup.
const UNIT_BYTES: usize = 1 << 10;

/// Page-locked memory of one device.
#[derive(Debug)]
pub(super) struct Slots {
    context: Arc<Context>,
    pieces: Mutex<Vec<Piece>>,
}

#[derive(Debug)]
struct Piece {
    memory: Arc<Staging>,
    device: CuDeviceptr,
    /// By unit.
    taken: Vec<bool>,
}

/// A run of units that belongs to whoever has it.
#[derive(Debug)]
pub(super) struct Slot {
    slots: Arc<Slots>,
    memory: Arc<Staging>,
    device: CuDeviceptr,
    piece: usize,
    units: Range<usize>,
}

impl Slots {
    /// The caller has entered the context.
    pub(super) fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        let pieces = Mutex::new(vec![Piece::new(context, PIECE_BYTES)?]);
        Ok(Arc::new(Self { context: Arc::clone(context), pieces }))
    }

    fn pieces(&self) -> MutexGuard<'_, Vec<Piece>> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// At least `bytes`, with any contents. The caller has entered the context.
    pub(super) fn take(self: &Arc<Self>, bytes: usize) -> Result<Slot> {
        let units = bytes.div_ceil(UNIT_BYTES).max(1);
        if let Some(slot) = self.take_there_is(&mut self.pieces(), units) {
            return Ok(slot);
        }
        // With no lock held while the driver works.
        let piece = Piece::new(&self.context, (units * UNIT_BYTES).next_multiple_of(PIECE_BYTES))?;
        let mut pieces = self.pieces();
        pieces.push(piece);
        self.take_there_is(&mut pieces, units).ok_or_else(|| DriverErrorKind::OutOfHostMemory {
            asked_bytes: bytes as u64,
            reason: "what was page-locked for it does not hold it".into(),
        })
    }

    fn take_there_is(self: &Arc<Self>, pieces: &mut [Piece], units: usize) -> Option<Slot> {
        pieces.iter_mut().enumerate().find_map(|(nth, piece)| {
            let units = piece.free_run(units)?;
            piece.taken[units.clone()].fill(true);
            let device = piece.device + (units.start * UNIT_BYTES) as u64;
            let (slots, memory) = (Arc::clone(self), Arc::clone(&piece.memory));
            Some(Slot { slots, memory, device, piece: nth, units })
        })
    }
}

impl Piece {
    fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let memory = Arc::new(context.staging().alloc(bytes as u64).map_err(|error| error.kind)?);
        let Place::Pinned(device) = context.staging().place_of(memory.start().addr(), bytes) else {
            let reason = "the driver gives kernels no access to host memory".into();
            return Err(DriverErrorKind::Unsupported { reason });
        };
        Ok(Self { memory, device, taken: vec![false; bytes / UNIT_BYTES] })
    }

    /// The first units in a row that nobody has.
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

impl Slot {
    /// Where the GPU finds it.
    pub(super) fn device(&self) -> CuDeviceptr {
        self.device
    }

    fn bytes(&self) -> usize {
        self.units.len() * UNIT_BYTES
    }

    fn start(&self) -> *const u8 {
        self.memory.start().wrapping_add(self.units.start * UNIT_BYTES)
    }

    /// Writes words from the start on, as many as it holds.
    pub(super) fn write(&mut self, words: impl Iterator<Item = u64>) {
        let start = self.start().cast_mut();
        for (nth, word) in words.take(self.bytes() / 8).enumerate() {
            let to = start.wrapping_add(8 * nth).cast::<[u8; 8]>();
            // SAFETY: C5: the units belong to this slot alone, no kernel knows them yet, and the word lies inside.
            unsafe { to.write_volatile(word.to_le_bytes()) };
        }
    }

    /// Values of 16 bytes that a kernel wrote, once it has finished.
    pub(super) fn values(&self, at: usize, count: usize) -> impl Iterator<Item = u128> {
        assert!(at + 16 * count <= self.bytes(), "values lie inside of their slot");
        let first = self.start().wrapping_add(at);
        (0..count).map(move |nth| {
            let from = first.wrapping_add(16 * nth).cast::<[u8; 16]>();
            // SAFETY: C5: the units belong to this slot alone, and the kernel has finished.
            u128::from_le_bytes(unsafe { from.read_volatile() })
        })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // In a forked child the lock may be held for ever.
        if self.slots.context.owner().is_here()
            && let Some(piece) = self.slots.pieces().get_mut(self.piece)
        {
            piece.taken[self.units.clone()].fill(false);
        }
    }
}
