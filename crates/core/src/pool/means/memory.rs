//! Releasing memory: under pressure, above the high-water mark, and on request.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::driver::{DriverError, DriverErrorKind};
use crate::pool::parts::physical::PhysicalMemory;
use crate::pool::shared::Shared;
use crate::pool::state::PoolState;
use crate::pool::tools::deadline::{Deadline, Wait};
use crate::pool::tools::error::{Awaited, PoolError, Result, Shortage, Usage};
use crate::pool::tools::keys::{SegmentKey, TagKey};
use crate::pool::tools::mapping::Mapping;

const TRIM: &str = "give cached memory back";

impl Shared {
    /// Retries what the driver has refused before.
    pub(in crate::pool) fn recover(&self, memory: &mut PhysicalMemory) -> Option<DriverError> {
        let mut refused = memory.settle().1.or(self.scratch().recover(memory));
        let unmap_failed = {
            let state = self.lock_state();
            let mut unmap_failed = state.heap().unmap_failed_to_leave();
            // A sleep is unmapping its own mappings.
            unmap_failed.retain(|mapping| !state.is_falling_asleep(mapping.segment));
            unmap_failed
        };
        for mut mapping in unmap_failed {
            refused = refused.or(memory.unmap(std::slice::from_mut(&mut mapping)).err());
            if mapping.is_mapped() {
                continue;
            }
            memory.cache(&mut mapping);
            self.lock_state().heap_mut().remove_chunks(&mapping);
        }
        refused
    }

    /// Unmaps mappings that nothing uses; their memory becomes spare.
    pub(in crate::pool) fn dispose(
        &self,
        memory: &mut PhysicalMemory,
        mut mappings: Vec<Mapping>,
    ) -> Option<DriverError> {
        mappings.sort_unstable_by_key(|mapping| (mapping.segment, mapping.range.addr));
        let refused = memory.unmap_each(&mut mappings);
        for mapping in &mut mappings {
            memory.cache(mapping);
            if !mapping.is_absent() {
                self.lock_state().take_back(mapping);
            }
        }
        refused
    }

    /// Releases `bytes` of reclaimable memory, or all there is. Returns the bytes released.
    pub(in crate::pool) fn reclaim(
        &self,
        memory: &mut PhysicalMemory,
        bytes: u64,
    ) -> (u64, Option<DriverError>) {
        let refused = self.poll(memory).or(self.recover(memory));
        let mut leaving = Vec::new();
        let wanted = bytes.saturating_sub(memory.counters().spare_bytes());
        self.lock_state().take_reclaimable(wanted, &mut leaving);
        let refused = refused.or(self.dispose(memory, leaving));
        let (mut freed_bytes, release_refused) = memory.release_spare(bytes, &[]);
        let refused = refused.or(release_refused).or(self.drop_emptied(memory));
        // Of segments that are gone.
        for (id, bytes) in self.lock_state().lent_mut().take_left() {
            // A refused release is deferred.
            freed_bytes += memory.release_unmapped(id, bytes).map_or(0, |()| bytes);
        }
        (freed_bytes, refused)
    }

    pub(in crate::pool) fn trim(&self, wait_max: Option<Duration>) -> Result<u64> {
        drop(self.open_state()?);
        let deadline = Deadline::begin(self.driver(), wait_max);
        let (mut late, mut refused) = self.wait_for_freed(deadline)?;
        let mut state = self.open_state()?;
        while state.heap().is_copying_freed() {
            if deadline.has_passed(self.driver()) {
                let tags: BTreeSet<TagKey> = state.heap().copying_freed().collect();
                late = late.or(Some(Awaited::Calls(state.tags().names(&Vec::from_iter(tags)))));
                break;
            }
            state = self.wait_by(state, deadline)?;
        }
        drop(state);
        let mut memory = self.lock_memory()?;
        refused = refused.or(self.poll(&memory));
        self.open_state()?.heap_mut().join_lists();
        let before = memory.counters().held_bytes();
        refused = refused.or(self.reclaim(&mut memory, u64::MAX).1);
        let released_bytes = before.saturating_sub(memory.counters().held_bytes());
        drop(memory);
        self.withdraw_left();
        if let Some(source) = refused {
            return Err(PoolError::Driver { op: TRIM, source });
        }
        let needed_bytes = self.open_state()?.reclaimable().pending_bytes;
        match late.filter(|_| needed_bytes > 0) {
            None => Ok(released_bytes),
            Some(awaited) => Err(self.timed_out(Wait { deadline, op: &TRIM, needed_bytes }, awaited)),
        }
    }

    /// Waits for the work that may touch what was freed until now, unless a stream is being captured. Returns
    /// what is late at the deadline, and the driver's first error.
    fn wait_for_freed(&self, deadline: Deadline) -> Result<(Option<Awaited>, Option<DriverError>)> {
        let memory = self.lock_memory()?;
        let mut refused = self.poll(&memory);
        let awaited = self.lock_state().heap().clocks().in_flight();
        drop(memory);
        let mut late = BTreeSet::new();
        for (clock, epoch, event) in awaited {
            match self.captured() {
                Ok(None) => match self.wait_for_one(clock, epoch, event, deadline) {
                    Ok(true) => {}
                    Ok(false) => late.extend(self.lock_state().heap().clocks().stream(clock)),
                    Err(error) => refused = refused.or(Some(error)),
                },
                Ok(Some(_)) => break,
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        // Blocks that other streams have used are free from now on, and may be under a background copy.
        self.lock_state().settle_waiting();
        let late = (!late.is_empty()).then(|| Awaited::Work(late.into_iter().collect()));
        Ok((late, refused))
    }

    /// Returns whether more could follow later.
    pub(super) fn reclaim_above_mark(&self, memory: &mut PhysicalMemory) -> bool {
        let excess_bytes = self.lock_state().above_mark_bytes(memory.counters());
        if excess_bytes > 0 {
            // What is refused stays, and is tried again.
            let _ = self.reclaim(memory, excess_bytes);
        }
        let state = self.lock_state();
        state.above_mark_bytes(memory.counters()) > 0 && state.reclaimable().pending_bytes > 0
    }

    /// Releases the addresses of empty segments. A refusal leaves them for the next time.
    pub(in crate::pool) fn drop_emptied(&self, memory: &PhysicalMemory) -> Option<DriverError> {
        let mut refused = None;
        let emptied = self.lock_state().heap_mut().take_emptied();
        for (key, range) in emptied {
            let dropped = memory.driver().unreserve(range);
            let mut state = self.lock_state();
            match dropped {
                Ok(()) => state.remove_emptied(key),
                Err(error) => {
                    state.heap_mut().return_emptied(key);
                    refused = refused.or(Some(error));
                }
            }
        }
        refused
    }

    /// Releases everything, live or not, as far as the driver lets it. Returns the first refusal.
    pub(in crate::pool) fn sweep(&self, memory: &mut PhysicalMemory) -> Result<(), DriverError> {
        let keys: Vec<SegmentKey> = self.lock_state().heap().segments().iter().map(|(key, _)| key).collect();
        let mut refused = self.scratch().take(memory).1;
        self.lock_state().forget_resident();
        self.cache_left(memory);
        for key in keys {
            let (range, mut mappings) = {
                let state = self.lock_state();
                let segments = state.heap().segments();
                let Some(segment) = segments.get(key) else { continue };
                let mappings = segment.chunks().filter_map(|(at, _)| segments.mapping((key, at)));
                (segment.range(), mappings.collect::<Vec<_>>())
            };
            let mut swept = memory.unmap_each(&mut mappings);
            mappings.iter_mut().for_each(|mapping| swept = swept.take().or(memory.release(mapping).err()));
            self.lock_state().heap_mut().segments_mut().store(&mappings);
            if mappings.iter().all(Mapping::is_absent) {
                match memory.driver().unreserve(range) {
                    Ok(()) => self.lock_state().remove_swept(key),
                    Err(error) => swept = swept.or(Some(error)),
                }
            }
            refused = refused.or(swept);
        }
        refused.or(memory.release_spare(u64::MAX, &[]).1).or(memory.settle().1).map_or(Ok(()), Err)
    }

    /// What the device could give by its own figure, and what this pool could reclaim.
    pub(in crate::pool) fn obtainable_bytes(&self) -> Result<u64, DriverError> {
        let ours = self.lock_state().reclaimable().stream_safe_bytes + self.counters().spare_bytes();
        Ok(self.driver().memory_info()?.free_bytes.saturating_add(ours))
    }

    pub(in crate::pool) fn usage(&self) -> Usage {
        let state = self.lock_state();
        let counters = self.counters();
        let reclaimable = state.reclaimable();
        let unmap_failed: u64 = state.heap().unmap_failed().iter().map(|mapping| mapping.range.bytes).sum();
        Usage {
            limit_bytes: self.shape().limit_bytes(),
            live_bytes: state.heap().live_bytes(),
            mapped_bytes: counters.committed_bytes(),
            reclaimable_bytes: reclaimable.stream_safe_bytes
                + reclaimable.pending_bytes
                + reclaimable.pinned_bytes
                + unmap_failed
                + counters.spare_bytes()
                + counters.deferred_release_bytes(),
        }
    }

    fn limit_hint(&self) -> &'static str {
        if self.lock_state().reclaimable().pinned_bytes > 0 {
            "end the hold of a tag, whose freed memory stays where it is, free or put to sleep what is live, or raise the \
             limit, or the budget that it comes from"
        } else {
            "free or put to sleep what is live, or raise the limit, or the budget that it comes from"
        }
    }

    /// The error when everything was tried.
    pub(in crate::pool) fn refusal(
        &self,
        op: String,
        needed_bytes: u64,
        full: Option<DriverError>,
        refused: Option<DriverError>,
    ) -> PoolError {
        if let Some(held) = self.held_by_capture(&op, needed_bytes) {
            return held;
        }
        if let Some(source) = full {
            return self.device_full(op, needed_bytes, source);
        }
        if let Some(source) = refused {
            return PoolError::Driver { op: "make space by releasing reclaimable memory", source };
        }
        let (usage, hint) = (self.usage(), self.limit_hint());
        PoolError::OverLimit { op, needed_bytes, usage, hint }
    }

    /// With current figures: memory mapped for the failed request is gone again.
    pub(in crate::pool) fn device_full(
        &self,
        op: String,
        needed_bytes: u64,
        source: DriverError,
    ) -> PoolError {
        let info = self.driver().memory_info().ok();
        let free_bytes = info.map(|info| info.free_bytes).or(match source.kind {
            DriverErrorKind::OutOfMemory { free_bytes, .. } => Some(free_bytes),
            _ => None,
        });
        let total_bytes = self.shape().total_bytes;
        let shortage = Shortage { needed_bytes, free_bytes: free_bytes.unwrap_or(0), total_bytes };
        PoolError::DeviceFull { op, shortage, usage: self.usage(), source: source.into() }
    }
}

impl PoolState {
    fn is_falling_asleep(&self, segment: SegmentKey) -> bool {
        self.heap().segments().tag_of(segment).is_some_and(|tag| self.tags().get(tag).falls_asleep())
    }
}
