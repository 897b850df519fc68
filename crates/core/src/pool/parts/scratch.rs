//! Device memory that is left over, through which the codes of a wake pass.
//!
//! A wake may borrow it: one part for each of its streams. The memory counts as held like any other, so a limit
//! bounds it. A request that lacks memory meanwhile takes it from the wake ([`crate::pool::means::pressure`]). That waits for the work
//! queued there, never for the wake, which goes on without.
//!
//! Promise: it is unmapped only when no work of its wake is in flight there. What the driver refuses to unmap or
//! release is tried again.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::physical::{MapTimes, PhysicalMemory};
use crate::driver::{DeviceRange, DriverError, StreamId};
use crate::pool::tools::keys::SegmentKey;
use crate::pool::tools::mapping::Mapping;

/// Locked after physical memory, or alone.
#[derive(Debug, Default)]
pub(in crate::pool) struct ScratchMemory {
    place: Mutex<ScratchPlace>,
    mapped_bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct ScratchPlace {
    is_lent: bool,
    memory: Option<Parts>,
}

#[derive(Debug)]
struct Parts {
    /// Of no segment.
    mapping: Mapping,
    part_bytes: u64,
    /// Nothing is queued there any more.
    is_leaving: bool,
    /// Streams that may be at work there.
    streams: BTreeSet<StreamId>,
}

/// The right of one wake to use the memory, as long as there is any.
#[derive(Debug)]
pub(in crate::pool) struct Loan<'a>(&'a ScratchMemory);

impl ScratchMemory {
    /// `None` where another wake has it, or the driver refuses.
    pub(in crate::pool) fn lend(
        &self,
        memory: &mut PhysicalMemory,
        parts: usize,
        part_bytes: u64,
    ) -> Option<Loan<'_>> {
        let mut place = self.place();
        if place.is_lent || place.memory.is_some() {
            return None;
        }
        let range = memory.driver().reserve(part_bytes.checked_mul(parts as u64)?).ok()?;
        let mut mapping = Mapping::absent(SegmentKey::default(), range.addr, range.bytes);
        let mapped = memory.map(std::slice::from_mut(&mut mapping), &mut MapTimes::default());
        let is_leaving = mapped.is_err();
        place.memory = Some(Parts { mapping, part_bytes, is_leaving, streams: BTreeSet::new() });
        if is_leaving {
            // What is refused is tried again.
            let _ = place.release(memory);
            return None;
        }
        self.mapped_bytes.store(range.bytes, Ordering::Relaxed);
        place.is_lent = true;
        Some(Loan(self))
    }

    /// Bytes that no block has and that will be released soon.
    pub(in crate::pool) fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes.load(Ordering::Relaxed)
    }

    /// Takes the memory back, also from a wake, after the work that is queued there. Returns the bytes released, and a
    /// refusal.
    pub(in crate::pool) fn take(&self, memory: &mut PhysicalMemory) -> (u64, Option<DriverError>) {
        let mut place = self.place();
        let before = memory.counters().held_bytes();
        let refused = place.release(memory).err();
        if place.memory.is_none() {
            self.mapped_bytes.store(0, Ordering::Relaxed);
        }
        (before.saturating_sub(memory.counters().held_bytes()), refused)
    }

    /// Tries again what the driver has refused before.
    pub(in crate::pool) fn recover(&self, memory: &mut PhysicalMemory) -> Option<DriverError> {
        let is_left = {
            let place = self.place();
            place.memory.is_some() && !place.is_lent
        };
        if is_left { self.take(memory).1 } else { None }
    }

    fn place(&self) -> MutexGuard<'_, ScratchPlace> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ScratchPlace {
    /// After an error it continues there the next time.
    fn release(&mut self, memory: &mut PhysicalMemory) -> Result<(), DriverError> {
        let Some(Parts { mapping, is_leaving, streams, .. }) = &mut self.memory else { return Ok(()) };
        *is_leaving = true;
        while let Some(stream) = streams.first().copied() {
            memory.driver().stream_synchronize(stream)?;
            streams.remove(&stream);
        }
        memory.unmap(std::slice::from_mut(mapping))?;
        // A refused release is deferred; the addresses can go.
        let released = memory.release(mapping);
        memory.driver().unreserve(mapping.range)?;
        self.memory = None;
        released.map(drop)
    }
}

impl Loan<'_> {
    /// Queues work on `stream`, always the same for the part with this number, that may use the part. The memory stays
    /// until the work has ended. The part is `None` if the memory was taken.
    pub(in crate::pool) fn queue<T>(
        &self,
        number: usize,
        stream: StreamId,
        queue: impl FnOnce(Option<DeviceRange>) -> T,
    ) -> T {
        let mut place = self.0.place();
        let Some(parts) = place.memory.as_mut().filter(|parts| !parts.is_leaving) else {
            drop(place);
            return queue(None);
        };
        parts.streams.insert(stream);
        let at = parts.mapping.range.addr + number as u64 * parts.part_bytes;
        queue(Some(DeviceRange::new(at, parts.part_bytes)))
    }

    /// Nothing that was queued is in flight.
    pub(in crate::pool) fn settled(&self) {
        if let Some(parts) = &mut self.0.place().memory {
            parts.streams.clear();
        }
    }
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        self.0.place().is_lent = false;
    }
}
