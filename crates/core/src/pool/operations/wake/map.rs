//! Mapping the memory of a wake, a few mappings at a time.
//!
//! Promise: when mapping fails, the mappings record what was mapped, for the wake to undo.

use super::woken::Woken;
use crate::bytes::ByteSize;
use crate::driver::DriverError;
use crate::pool::means::pressure::{Lack, Next, Retry};
use crate::pool::parts::physical::{MapTimes, PhysicalMemory};
use crate::pool::shared::{MemoryGuard, Shared};
use crate::pool::tools::cancel;
use crate::pool::tools::deadline::{Deadline, Wait};
use crate::pool::tools::error::{Phase, PoolError, Result};
use crate::pool::tools::mapping::{Batch, Mapping};
use crate::pool::tools::report::add;

/// Mappings of at most a chunk that are mapped at a time; few, so that copying begins at once.
const BATCH_MAPPINGS: usize = 8;

pub(super) struct Mapper<'a> {
    shared: &'a Shared,
    mappings: &'a mut [Mapping],
    done: usize,
    deadline: Deadline,
    retry: &'a mut Retry,
    next: Next,
    op: String,
    /// To create, and to map, at the start.
    absent_bytes: u64,
    mapped_bytes: u64,
    times: MapTimes,
}

impl<'a> Mapper<'a> {
    pub(super) fn new(
        shared: &'a Shared,
        names: &[&str],
        mappings: &'a mut [Mapping],
        deadline: Deadline,
        retry: &'a mut Retry,
    ) -> Self {
        let sum = |wanted: &dyn Fn(&Mapping) -> bool| -> u64 {
            mappings.iter().filter(|mapping| wanted(mapping)).map(|mapping| mapping.range.bytes).sum()
        };
        let absent_bytes = sum(&|mapping| mapping.is_absent());
        let mapped_bytes = sum(&|mapping| !mapping.is_mapped());
        let op = format!("wake {} ({} to map)", names.join(", "), ByteSize(mapped_bytes));
        let (times, next) = (MapTimes::default(), Next::Refuse);
        Self { shared, mappings, done: 0, deadline, retry, next, op, absent_bytes, mapped_bytes, times }
    }

    pub(super) fn mappings(&self) -> usize {
        self.mappings.len()
    }

    /// Whether it maps more than one batch.
    pub(super) fn takes_a_while(&self) -> bool {
        self.batch_end() < self.mappings.len()
    }

    /// What to do about the last shortage, after the undo.
    pub(super) fn next(&self) -> Next {
        self.next
    }

    pub(super) fn report(&self, woken: &mut Woken) {
        woken.mapped_bytes = self.mapped_bytes;
        add(&mut woken.phases.create_s, self.times.create);
        add(&mut woken.phases.map_s, self.times.map);
    }

    /// Reports how many are mapped. Ends early, without an error, when `on_progress` returns false, or when it is
    /// cancelled.
    pub(super) fn map(&mut self, on_progress: &mut dyn FnMut(usize) -> bool) -> Result<()> {
        loop {
            cancel::check(&self.op)?;
            let mut memory = self.shared.lock_memory()?;
            self.retry.look(self.shared);
            let refused = self.shared.poll(&memory).or(self.shared.recover(&mut memory));
            let (lack, full, refused) =
                if let Some(short) = self.shared.make_space(&mut memory, self.mappings) {
                    (Lack::Limit, None, refused.or(short))
                } else {
                    let mapped;
                    (memory, mapped) = self.map_batches(memory, on_progress);
                    match mapped {
                        Ok(()) => return Ok(()),
                        Err(source) if source.is_out_of_memory() => (self.lack(), Some(source), refused),
                        Err(source) => return Err(PoolError::WakeFailed { phase: Phase::Map, source }),
                    }
                };
            let wait = Wait { deadline: self.deadline, op: &self.op, needed_bytes: self.absent_bytes };
            self.next = self.retry.after(self.shared, memory, lack, wait)?;
            if self.next != Next::Again {
                return Err(self.shared.refusal(self.op.clone(), self.absent_bytes, full, refused));
            }
        }
    }

    /// Continues where it stopped, and hands the lock over between batches.
    fn map_batches(
        &mut self,
        mut memory: MemoryGuard<'a>,
        on_progress: &mut dyn FnMut(usize) -> bool,
    ) -> (MemoryGuard<'a>, Result<(), DriverError>) {
        while !cancel::is_cancelled() && on_progress(self.done) && self.done < self.mappings.len() {
            let end = self.batch_end();
            if let Err(error) = memory.map(&mut self.mappings[self.done..end], &mut self.times) {
                return (memory, Err(error));
            }
            self.done = end;
            memory = self.shared.yield_to_others(memory, &mut self.mappings[end..]);
        }
        (memory, Ok(()))
    }

    /// Where the next batch ends: no more bytes than in [`BATCH_MAPPINGS`] chunks, or one larger mapping.
    fn batch_end(&self) -> usize {
        let bytes = BATCH_MAPPINGS as u64 * self.shared.shape().chunk_bytes;
        Batch { mappings: BATCH_MAPPINGS, bytes }.end(self.mappings, self.done)
    }

    fn lack(&self) -> Lack {
        let chunk_bytes = self.shared.shape().chunk_bytes;
        let absent =
            || self.mappings.iter().filter(|mapping| mapping.is_absent()).map(|mapping| mapping.range.bytes);
        Lack::Device { absent_bytes: absent().sum(), has_spans: absent().any(|bytes| bytes > chunk_bytes) }
    }
}

impl Shared {
    /// Hands the lock over if another thread waits. The memory for `mappings` stays reserved meanwhile.
    fn yield_to_others<'a>(
        &'a self,
        mut memory: MemoryGuard<'a>,
        mappings: &mut [Mapping],
    ) -> MemoryGuard<'a> {
        if self.waiting_for_memory() == 0 {
            return memory;
        }
        let reservation = memory.set_aside(mappings);
        let memory = self.hand_over_memory(memory);
        drop(reservation);
        memory
    }

    /// Reclaims free memory for the mappings, so that the rest may be created under the limit. Returns `Some` where the
    /// limit does not allow it, with the driver's refusal of a release, if any.
    fn make_space(&self, memory: &mut PhysicalMemory, mappings: &[Mapping]) -> Option<Option<DriverError>> {
        let needs: Vec<Mapping> = mappings.iter().filter(|mapping| mapping.is_absent()).copied().collect();
        let needed_bytes: u64 = needs.iter().map(|mapping| mapping.range.bytes).sum();
        let limit_bytes = self.shape().limit_bytes.unwrap_or(u64::MAX);
        let supply = {
            let mut state = self.lock_state();
            let free_bytes = state.reclaimable().stream_safe_bytes + memory.counters().spare_bytes();
            let left_bytes = limit_bytes.saturating_sub(memory.counters().committed_bytes());
            if needed_bytes > free_bytes.saturating_add(left_bytes) {
                return Some(None);
            }
            // Sizes other than the free ones are no reason to hold more than the peak.
            let used_bytes = memory.counters().committed_bytes().saturating_sub(free_bytes) + needed_bytes;
            let allowed_bytes = state.allowed_bytes(used_bytes);
            state.supply(memory, &needs, &[], allowed_bytes)
        };
        let mut refused = self.dispose(memory, supply.leaving);
        if supply.release_bytes > 0 {
            refused = refused.or(memory.release_spare(supply.release_bytes, &supply.reserved).1);
        }
        let missing: u64 = needed_bytes.saturating_sub(memory.usable_spare_bytes(&needs));
        (memory.counters().committed_bytes().saturating_add(missing) > limit_bytes).then_some(refused)
    }
}
