//! Allocating when no free piece is ready: find a place, get memory, map it.
//!
//! The pool's lock is held to decide and to note; the driver is called with the [`PhysicalMemory`] alone, and what has to
//! be waited for is waited for with nothing held. Under the limit nothing is waited for beyond the request's
//! patience; at the limit, whatever may give memory back is, before the request is refused.

use std::thread;
use std::time::Duration;

use super::deadline::{Deadline, Wait};
use super::error::{PoolError, Result};
use super::handle::{AllocRequest, Block};
use super::heap::{Site, Spot};
use super::keys::{LaneKey, TagKey};
use super::physical::{MapTimes, PhysicalMemory};
use super::pressure::{Lack, Next, Retry};
use super::shared::{Guest, Shared, StateGuard};
use super::state::{State, invalid};
use super::supply::Supply;
use crate::driver::{DriverError, DriverErrorKind, Op};

const NEVER_FITS: &str = "it never fits: raise the limit, or the budget that it comes from";

/// Between two looks while a sleep is under way.
const LULL: Duration = Duration::from_millis(1);
const BLINK: Duration = Duration::from_micros(20);
const SPIN: Duration = Duration::from_micros(100);

/// Passes a moment, a part of the time that has been waited already: most work that is waited for ends at once, and a
/// thread that sleeps wakes up late.
fn rest(waited: Duration) {
    if waited < SPIN {
        thread::yield_now();
    } else {
        thread::sleep(BLINK.max(waited / 8).min(LULL));
    }
}

/// A request with what follows from it.
struct Wanted<'a> {
    request: &'a AllocRequest,
    tag: TagKey,
    lane: LaneKey,
    bytes: u64,
    /// Of the memory that is created for it.
    largest_bytes: u64,
}

/// How an attempt ended.
enum Attempt {
    Done(Block),
    /// The tag is being put to sleep or woken.
    TagBusy,
    /// Less is free than needed; this much would have to be created.
    Short(u64),
    /// Memory that could be reused will be quiet soon.
    Pending,
    /// Addresses were added: look again.
    Grown,
    /// The device has no more: this much would have to be created, of so much that is lacking.
    DeviceShort {
        needed_bytes: u64,
        absent_bytes: u64,
        source: DriverError,
    },
}

impl Shared {
    pub(super) fn alloc(&self, request: &AllocRequest) -> Result<Block> {
        self.check_stream("allocate on", request.stream)?;
        let state = self.open_state()?;
        let bytes = state.checked_size(request)?;
        // Who finds a free piece at once has no use for the time.
        let mut deadline = None;
        let begin = || {
            let deadline = *deadline.insert(Deadline::begin(self.driver(), request.wait_max));
            Wait { deadline, op: request, needed_bytes: 0 }
        };
        let (mut state, tag) = self.open_tag(state, &request.tag, begin)?;
        state.tags().check_awake("allocate", tag)?;
        let lane = self.lane_of(&mut state, tag, request)?;
        let wanted = Wanted { request, tag, lane, bytes, largest_bytes: state.largest_chunk(tag, request) };
        if let Some(block) = state.take_ready(&wanted)? {
            return Ok(block);
        }
        drop(state);
        let begin = || Deadline::begin(self.driver(), request.wait_max);
        self.alloc_slowly(wanted, deadline.unwrap_or_else(begin))
    }

    fn alloc_slowly(&self, mut wanted: Wanted<'_>, deadline: Deadline) -> Result<Block> {
        let elapsed = || deadline.elapsed(self.driver());
        let patience = wanted.request.wait_max.unwrap_or(Duration::MAX).min(wanted.request.patience);
        let (mut retry, mut patient, mut has_waited) = (Retry::default(), true, false);
        loop {
            let mut memory = self.lock_memory()?;
            retry.look(self);
            let refused = self.poll(&memory).or(self.recover(&mut memory));
            let in_time = elapsed() < patience;
            if has_waited && !in_time {
                self.note_stuck();
                has_waited = false;
            }
            let mut attempt = self.attempt(&mut memory, &wanted, patient && in_time);
            if let Ok(Attempt::Grown) = attempt {
                attempt = self.attempt(&mut memory, &wanted, false);
            }
            // If the driver refuses, the segments stay, and serve the next request.
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
                    // Of a capture nobody knows when it ends.
                    patient = !self.may_be_captured();
                    if patient {
                        rest(elapsed());
                        has_waited = wanted.request.is_patient();
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
                Next::InChunks => wanted.largest_bytes = self.shape().chunk_bytes,
                Next::Refuse => {
                    return Err(self.refusal(wanted.request.to_string(), needed_bytes, full, refused));
                }
            }
        }
    }

    /// The refusal of what could never fit, before anything is tried.
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

    fn attempt(&self, memory: &mut PhysicalMemory, wanted: &Wanted<'_>, patient: bool) -> Result<Attempt> {
        let mut state = self.open_state()?;
        let wanted = &self.found_again(&mut state, wanted)?;
        let Wanted { request, tag, lane, bytes, .. } = *wanted;
        if state.tags().get(tag).is_taken() {
            return Ok(Attempt::TagBusy);
        }
        state.tags().check_awake("allocate", tag)?;
        // Somebody may have freed what is wanted meanwhile.
        if let Some(block) = state.take_ready(wanted)? {
            return Ok(Attempt::Done(block));
        }
        let whole_bytes = bytes.next_multiple_of(self.shape().granule_bytes);
        if whole_bytes > self.shape().total_bytes.min(self.shape().limit_bytes()) {
            drop(state);
            return Err(self.hopeless(wanted));
        }
        let spot = state.heap().cheapest_spot(tag, lane, bytes, request.align);
        let Some(spot) = spot.filter(|spot| spot.absent_bytes <= whole_bytes) else {
            if let Some(short) = self.shortage(&state, memory, request, whole_bytes, patient) {
                return Ok(state.take_granules(wanted, short));
            }
            drop(state);
            self.grow(memory, wanted)?;
            return Ok(Attempt::Grown);
        };
        self.fill_spot(memory, state, wanted, &spot, patient)
    }

    /// Cuts a block out of the spot, and brings in what it lacks.
    fn fill_spot(
        &self,
        memory: &mut PhysicalMemory,
        mut state: StateGuard<'_>,
        wanted: &Wanted<'_>,
        spot: &Spot,
        patient: bool,
    ) -> Result<Attempt> {
        let Wanted { request, tag, lane, bytes, largest_bytes } = *wanted;
        // The tag's policy may have been declared meanwhile.
        let largest_bytes = largest_bytes.min(state.largest_chunk(tag, request));
        let mut site = state.heap_mut().occupy(spot, lane, bytes, largest_bytes);
        let in_hand: u64 = site.leaving.iter().map(|piece| piece.range.bytes).sum();
        let needed_bytes = spot.absent_bytes.saturating_sub(in_hand);
        if let Some(short) = self.shortage(&state, memory, request, needed_bytes, patient) {
            state.abandon(&site);
            let attempt = state.take_granules(wanted, short);
            drop(state);
            self.dispose(memory, site.leaving);
            return Ok(attempt);
        }
        let idle = state.idle();
        let idle_bytes = idle.quiet_bytes + idle.pending_bytes + in_hand + memory.counters().loose_bytes();
        let used_bytes = memory.counters().committed_bytes().saturating_sub(idle_bytes) + spot.absent_bytes;
        let allowed_bytes = state.allowed_bytes(used_bytes);
        let mut supply = state.supply(memory, &mut site.lacking, &site.leaving, allowed_bytes, true);
        supply.ahead = state.granules_ahead(memory, &supply, used_bytes, allowed_bytes);
        let _guest = Guest::enter(self, &mut state, tag);
        drop(state);
        let built = self.build(memory, &mut site, supply);
        let mut state = self.lock_state();
        let Err((needed_bytes, source)) = built else {
            let block = state.finish(&site, lane, request);
            state.note_used(used_bytes);
            drop(state); // The guest leaves after it.
            return Ok(Attempt::Done(block));
        };
        state.abandon(&site);
        drop(state);
        let lacking = site.lacking.into_iter().filter(|piece| !piece.is_absent()).collect();
        self.dispose(memory, lacking);
        if source.is_out_of_memory() {
            Ok(Attempt::DeviceShort { needed_bytes, absent_bytes: spot.absent_bytes, source })
        } else {
            Err(PoolError::AllocFailed { bytes: request.bytes, tag: request.tag.clone(), source })
        }
    }

    /// Whether `needed_bytes` cannot be had now, from idle memory and under the limit.
    fn shortage(
        &self,
        state: &State,
        memory: &PhysicalMemory,
        request: &AllocRequest,
        needed_bytes: u64,
        patient: bool,
    ) -> Option<Attempt> {
        let idle = state.idle();
        let create_bytes = needed_bytes.saturating_sub(idle.quiet_bytes + memory.counters().loose_bytes());
        if create_bytes == 0 {
            return None;
        }
        let room =
            self.shape().limit_bytes.map(|limit| limit.saturating_sub(memory.counters().committed_bytes()));
        if room.is_some_and(|room| create_bytes > room) {
            return Some(Attempt::Short(create_bytes));
        }
        let promising_bytes =
            if request.is_patient() { self.promising_bytes(idle.pending_bytes) } else { idle.pending_bytes };
        (patient && request.would_wait(promising_bytes, create_bytes)).then_some(Attempt::Pending)
    }

    /// New addresses for a block; no memory yet.
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
        let found = self.found_again(&mut state, wanted);
        if let Ok(Wanted { tag, lane, .. }) = found {
            state.heap_mut().add_segment(tag, lane, range);
        } else {
            drop(state);
            // Already failing; addresses that the driver does not take back hold no memory, and end with it.
            let _ = memory.driver().unreserve(range);
        }
        found.map(drop)
    }

    /// A request whose tag and lane may have been forgotten while the state was given up.
    fn found_again<'a>(&self, state: &mut State, wanted: &Wanted<'a>) -> Result<Wanted<'a>> {
        let tag = state.tag_key(&wanted.request.tag);
        let lane = self.lane_of(state, tag, wanted.request)?;
        Ok(Wanted { tag, lane, ..*wanted })
    }

    /// Brings in what the site lacks. An error says how much would have had to be created.
    fn build(
        &self,
        memory: &mut PhysicalMemory,
        site: &mut Site,
        supply: Supply,
    ) -> Result<(), (u64, DriverError)> {
        let Supply { leaving, create_bytes, release_bytes, reserved, ahead } = supply;
        let failed = |source| (create_bytes, source);
        site.leaving.extend(leaving);
        let refused = self.dispose(memory, std::mem::take(&mut site.leaving));
        refused.map_or(Ok(()), Err).map_err(failed)?;
        if release_bytes > 0 {
            let (_, refused) = memory.let_go_of_loose(release_bytes, &reserved);
            let committed = memory.counters().committed_bytes().saturating_add(create_bytes);
            if let Some(source) =
                refused.filter(|_| self.shape().limit_bytes.is_some_and(|limit| committed > limit))
            {
                return Err(failed(source));
            }
        }
        memory.bring_in(&mut site.lacking, &mut MapTimes::default()).map_err(failed)?;
        memory.stock(self.shape().granule_bytes, ahead);
        Ok(())
    }
}

impl State {
    /// A block that needs no memory, if there is one.
    fn take_ready(&mut self, wanted: &Wanted<'_>) -> Result<Option<Block>> {
        let Wanted { request, tag, lane, bytes, .. } = *wanted;
        if !self.heap().has_room(4) {
            return Err(invalid(request, "the pool has as many blocks as it can count; free some".into()));
        }
        let spot = self.heap().ready_spot(tag, lane, bytes, request.align);
        Ok(spot.map(|spot| self.take_spot(&spot, wanted)))
    }

    /// Memory is short, but a large block may lie in granules of its own stream.
    fn take_granules(&mut self, wanted: &Wanted<'_>, attempt: Attempt) -> Attempt {
        let short = matches!(attempt, Attempt::Short(_));
        let spot = short.then(|| self.heap().granules_for_large(wanted.lane, wanted.bytes)).flatten();
        spot.map_or(attempt, |spot| Attempt::Done(self.take_spot(&spot, wanted)))
    }

    fn take_spot(&mut self, spot: &Spot, wanted: &Wanted<'_>) -> Block {
        self.take(spot, wanted.lane, wanted.bytes, wanted.request)
    }
}
