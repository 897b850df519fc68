//! Allocating when no free block is ready: find a location, get memory, map it.
//!
//! The state is locked for decisions only, the [`PhysicalMemory`] for driver calls. Waits happen with no
//! lock. Under the limit, a request waits for `stream_wait_max` at most. At the limit, it waits for anything
//! that may release memory before it is refused.

use std::thread;
use std::time::Duration;

use crate::driver::{DriverError, DriverErrorKind, Op};
use crate::pool::means::pressure::{Lack, Next, Retry};
use crate::pool::means::supply::Supply;
use crate::pool::parts::heap::{Candidate, Placement};
use crate::pool::parts::physical::{MapTimes, PhysicalMemory};
use crate::pool::shared::{Shared, SharedAccess, StateGuard};
use crate::pool::state::{PoolState, invalid};
use crate::pool::tools::deadline::{Deadline, Wait};
use crate::pool::tools::error::{PoolError, Result};
use crate::pool::tools::handle::{AllocRequest, Block};
use crate::pool::tools::keys::{ListKey, TagKey};

const NEVER_FITS: &str = "it never fits: raise the limit, or the budget that it comes from";

/// Pauses between two attempts while work on freed memory is awaited.
const BACKOFF_MAX: Duration = Duration::from_millis(1);
const BACKOFF_MIN: Duration = Duration::from_micros(20);
const SPIN_MAX: Duration = Duration::from_micros(100);

/// Waits for a part of the time waited so far. Most awaited work ends at once, and a sleeping thread wakes up
/// late.
fn back_off(waited: Duration) {
    if waited < SPIN_MAX {
        thread::yield_now();
    } else {
        thread::sleep(BACKOFF_MIN.max(waited / 8).min(BACKOFF_MAX));
    }
}

struct Wanted<'a> {
    request: &'a AllocRequest,
    tag: TagKey,
    list: ListKey,
    bytes: u64,
    /// The largest chunk to create for it.
    largest_bytes: u64,
}

enum Attempt {
    Done(Block),
    TagBusy,
    /// Too little is free; this many bytes would have to be created.
    Short(u64),
    /// Reusable memory will be complete soon.
    Pending,
    /// Addresses were added: try again.
    Grown,
    /// The device is full. `needed_bytes` would have to be created, and `absent_bytes` are missing in all.
    DeviceShort {
        needed_bytes: u64,
        absent_bytes: u64,
        source: DriverError,
    },
}

impl Shared {
    pub(in crate::pool) fn alloc(&self, request: &AllocRequest) -> Result<Block> {
        self.check_stream("allocate on", request.stream)?;
        let state = self.open_state()?;
        let bytes = state.checked_size(request)?;
        // A request that finds a free block at once needs no deadline.
        let mut deadline = None;
        let begin = || {
            let deadline = *deadline.insert(Deadline::begin(self.driver(), request.wait_max));
            Wait { deadline, op: request, needed_bytes: 0 }
        };
        let (mut state, tag) = self.open_tag(state, &request.tag, begin)?;
        state.tags().check_awake("allocate", tag)?;
        let list = self.list_of(&mut state, tag, request)?;
        let wanted = Wanted { request, tag, list, bytes, largest_bytes: state.largest_chunk(tag, request) };
        if let Some(block) = state.take_ready(&wanted)? {
            return Ok(block);
        }
        drop(state);
        let begin = || Deadline::begin(self.driver(), request.wait_max);
        let block = self.alloc_slowly(wanted, deadline.unwrap_or_else(begin))?;
        self.leave_free_if_due();
        Ok(block)
    }

    fn alloc_slowly(&self, mut wanted: Wanted<'_>, deadline: Deadline) -> Result<Block> {
        let elapsed = || deadline.elapsed(self.driver());
        let stream_wait_max =
            wanted.request.wait_max.unwrap_or(Duration::MAX).min(wanted.request.stream_wait_max);
        let (mut retry, mut waits, mut has_waited) = (Retry::default(), true, false);
        loop {
            let mut memory = self.lock_memory()?;
            retry.look(self);
            let refused = self.poll(&memory).or(self.recover(&mut memory));
            let in_time = elapsed() < stream_wait_max;
            if has_waited && !in_time {
                self.note_stalled();
                has_waited = false;
            }
            let mut attempt = self.attempt(&mut memory, &wanted, waits && in_time);
            if let Ok(Attempt::Grown) = attempt {
                attempt = self.attempt(&mut memory, &wanted, false);
            }
            // If the driver refuses, the segments stay and serve the next request.
            let _ = self.drop_emptied(&memory);
            let (needed_bytes, lack, full) = match attempt? {
                Attempt::Done(block) => return Ok(block),
                Attempt::Grown => continue,
                Attempt::TagBusy => {
                    drop(memory);
                    let wait = || Wait { deadline, op: wanted.request, needed_bytes: 0 };
                    drop(self.open_tag(self.open_state()?, &wanted.request.tag, wait)?);
                    continue;
                }
                Attempt::Pending => {
                    drop(memory);
                    // The end of a capture cannot be foreseen.
                    waits = !self.may_be_captured();
                    if waits {
                        back_off(elapsed());
                        has_waited = wanted.request.has_stream_wait();
                    }
                    continue;
                }
                Attempt::Short(needed_bytes) => (needed_bytes, Lack::Limit, None),
                Attempt::DeviceShort { needed_bytes, absent_bytes, source } => {
                    let has_spans = wanted.largest_bytes > self.shape().chunk_bytes;
                    (needed_bytes, Lack::Device { absent_bytes, has_spans }, Some(source))
                }
            };
            let wait = Wait { deadline, op: wanted.request, needed_bytes };
            match retry.after(self, memory, lack, wait)? {
                Next::Again => {}
                Next::InChunks if wanted.bytes < self.shape().chunk_bytes => {
                    wanted.largest_bytes = self.shape().granule_bytes;
                }
                Next::InChunks => wanted.largest_bytes = self.shape().chunk_bytes,
                Next::Refuse => {
                    return Err(self.refusal(wanted.request.to_string(), needed_bytes, full, refused));
                }
            }
        }
    }

    /// The error of a request that could never fit.
    fn hopeless(&self, wanted: &Wanted<'_>) -> PoolError {
        let needed_bytes = wanted.bytes.next_multiple_of(self.shape().granule_bytes);
        let op = wanted.request.to_string();
        if needed_bytes > self.shape().limit_bytes() {
            return PoolError::OverLimit { op, needed_bytes, usage: self.usage(), hint: NEVER_FITS };
        }
        let free_bytes = self.driver().memory_info().map_or(0, |info| info.free_bytes);
        let kind = DriverErrorKind::OutOfMemory { asked_bytes: needed_bytes, free_bytes };
        self.device_full(op, needed_bytes, DriverError::new(Op::Create, kind))
    }

    fn attempt(&self, memory: &mut PhysicalMemory, wanted: &Wanted<'_>, waits: bool) -> Result<Attempt> {
        let mut state = self.open_state()?;
        let wanted = &self.refresh_keys(&mut state, wanted)?;
        let Wanted { request, tag, list, bytes, largest_bytes } = *wanted;
        if state.tags().get(tag).is_taken() {
            return Ok(Attempt::TagBusy);
        }
        state.tags().check_awake("allocate", tag)?;
        // Another thread may have freed a block meanwhile.
        if let Some(block) = state.take_ready(wanted)? {
            return Ok(Attempt::Done(block));
        }
        let whole_bytes = bytes.next_multiple_of(self.shape().granule_bytes);
        if whole_bytes > self.shape().total_bytes.min(self.shape().limit_bytes()) {
            drop(state);
            return Err(self.hopeless(wanted));
        }
        let candidate = state.heap().cheapest_candidate(tag, list, (bytes, request.align), largest_bytes);
        let Some(candidate) = candidate.filter(|candidate| candidate.absent_bytes <= whole_bytes) else {
            if let Some(short) = self.shortage(&state, memory, request, whole_bytes, waits) {
                return Ok(state.take_granules(wanted, short));
            }
            drop(state);
            self.grow(memory, wanted)?;
            return Ok(Attempt::Grown);
        };
        self.fill_candidate(memory, state, wanted, &candidate, waits)
    }

    fn fill_candidate(
        &self,
        memory: &mut PhysicalMemory,
        mut state: StateGuard<'_>,
        wanted: &Wanted<'_>,
        candidate: &Candidate,
        waits: bool,
    ) -> Result<Attempt> {
        let Wanted { request, tag, list, bytes, largest_bytes } = *wanted;
        // The tag's policy may have been declared meanwhile.
        let largest_bytes = largest_bytes.min(state.largest_chunk(tag, request));
        let mut placement = state.heap_mut().occupy(candidate, list, bytes, largest_bytes);
        let supplied_bytes: u64 = placement.leaving.iter().map(|mapping| mapping.range.bytes).sum();
        let needed_bytes = candidate.absent_bytes.saturating_sub(supplied_bytes);
        if let Some(short) = self.shortage(&state, memory, request, needed_bytes, waits) {
            state.abandon(&placement);
            let attempt = state.take_granules(wanted, short);
            drop(state);
            self.dispose(memory, placement.leaving);
            return Ok(attempt);
        }
        let reclaimable = state.reclaimable();
        let reclaimable_bytes = reclaimable.stream_safe_bytes
            + reclaimable.pending_bytes
            + supplied_bytes
            + memory.counters().spare_bytes();
        let used_bytes =
            memory.counters().committed_bytes().saturating_sub(reclaimable_bytes) + candidate.absent_bytes;
        let allowed_bytes = state.allowed_bytes(used_bytes);
        let mut supply = state.supply(memory, &placement.lacking, &placement.leaving, allowed_bytes);
        supply.ahead = state.granules_ahead(memory, &supply, used_bytes, allowed_bytes);
        let _access = SharedAccess::enter(self, &mut state, tag);
        drop(state);
        let built = self.build(memory, &mut placement, supply);
        let mut state = self.lock_state();
        let Err((needed_bytes, source)) = built else {
            let block = state.finish(&placement, list, request);
            state.note_used(used_bytes.saturating_sub(self.scratch().mapped_bytes()));
            drop(state); // The access ends after it.
            return Ok(Attempt::Done(block));
        };
        state.abandon(&placement);
        drop(state);
        let lacking = placement.lacking.into_iter().filter(|mapping| !mapping.is_absent()).collect();
        self.dispose(memory, lacking);
        if source.is_out_of_memory() {
            Ok(Attempt::DeviceShort { needed_bytes, absent_bytes: candidate.absent_bytes, source })
        } else {
            Err(PoolError::AllocFailed { bytes: request.bytes, tag: request.tag.clone(), source })
        }
    }

    /// Why `needed_bytes` cannot be had now from reclaimable memory and under the limit, if so.
    fn shortage(
        &self,
        state: &PoolState,
        memory: &PhysicalMemory,
        request: &AllocRequest,
        needed_bytes: u64,
        waits: bool,
    ) -> Option<Attempt> {
        let reclaimable = state.reclaimable();
        let create_bytes =
            needed_bytes.saturating_sub(reclaimable.stream_safe_bytes + memory.counters().spare_bytes());
        if create_bytes == 0 {
            return None;
        }
        let obtainable_bytes =
            self.shape().limit_bytes.map(|limit| limit.saturating_sub(memory.counters().committed_bytes()));
        if obtainable_bytes.is_some_and(|obtainable_bytes| create_bytes > obtainable_bytes) {
            return Some(Attempt::Short(create_bytes));
        }
        let promising_bytes = if request.has_stream_wait() {
            self.promising_bytes(reclaimable.pending_bytes)
        } else {
            reclaimable.pending_bytes
        };
        (waits && request.would_wait(promising_bytes, create_bytes)).then_some(Attempt::Pending)
    }

    /// Reserves addresses for a block, without memory.
    fn grow(&self, memory: &PhysicalMemory, wanted: &Wanted<'_>) -> Result<()> {
        let whole_bytes = wanted.bytes.next_multiple_of(self.shape().granule_bytes);
        let bytes = if wanted.bytes < self.shape().chunk_bytes {
            whole_bytes.max(self.shape().segment_bytes)
        } else {
            whole_bytes
        };
        let AllocRequest { bytes: asked, ref tag, .. } = *wanted.request;
        let reserved = memory.driver().reserve(bytes);
        let range =
            reserved.map_err(|source| PoolError::AllocFailed { bytes: asked, tag: tag.clone(), source })?;
        let mut state = self.lock_state();
        let found = self.refresh_keys(&mut state, wanted);
        if let Ok(Wanted { tag, list, .. }) = found {
            state.heap_mut().add_segment(tag, list, range);
        } else {
            drop(state);
            // Addresses that the driver keeps hold no memory, and end with it.
            let _ = memory.driver().unreserve(range);
        }
        found.map(drop)
    }

    /// Tag and list may have been forgotten while the state was unlocked.
    fn refresh_keys<'a>(&self, state: &mut PoolState, wanted: &Wanted<'a>) -> Result<Wanted<'a>> {
        let tag = state.tag_key(&wanted.request.tag);
        let list = self.list_of(state, tag, wanted.request)?;
        Ok(Wanted { tag, list, ..*wanted })
    }

    /// An error carries the bytes that were to be created.
    fn build(
        &self,
        memory: &mut PhysicalMemory,
        placement: &mut Placement,
        supply: Supply,
    ) -> Result<(), (u64, DriverError)> {
        let Supply { leaving, create_bytes, release_bytes, reserved, ahead } = supply;
        let failed = |source| (create_bytes, source);
        placement.leaving.extend(leaving);
        let refused = self.dispose(memory, std::mem::take(&mut placement.leaving));
        refused.map_or(Ok(()), Err).map_err(failed)?;
        if release_bytes > 0 {
            let (_, refused) = memory.release_spare(release_bytes, &reserved);
            let committed = memory.counters().committed_bytes().saturating_add(create_bytes);
            if let Some(source) =
                refused.filter(|_| self.shape().limit_bytes.is_some_and(|limit| committed > limit))
            {
                return Err(failed(source));
            }
        }
        memory.map(&mut placement.lacking, &mut MapTimes::default()).map_err(failed)?;
        memory.stock(self.shape().granule_bytes, ahead);
        Ok(())
    }
}

impl PoolState {
    fn take_ready(&mut self, wanted: &Wanted<'_>) -> Result<Option<Block>> {
        let Wanted { request, tag, list, bytes, largest_bytes } = *wanted;
        if !self.heap().has_capacity(4) {
            return Err(invalid(request, "the pool has as many blocks as it can count; free some".into()));
        }
        let candidate = self.heap().ready_candidate(tag, list, (bytes, request.align), largest_bytes);
        Ok(candidate.map(|candidate| self.use_candidate(&candidate, wanted)))
    }

    /// Where memory is short, a large block may still fit into granules of its own stream.
    fn take_granules(&mut self, wanted: &Wanted<'_>, attempt: Attempt) -> Attempt {
        let short = matches!(attempt, Attempt::Short(_));
        let candidate = short.then(|| self.heap().granules_for_large(wanted.list, wanted.bytes)).flatten();
        candidate.map_or(attempt, |candidate| Attempt::Done(self.use_candidate(&candidate, wanted)))
    }

    fn use_candidate(&mut self, candidate: &Candidate, wanted: &Wanted<'_>) -> Block {
        self.take(candidate, wanted.list, wanted.bytes, wanted.request)
    }
}
