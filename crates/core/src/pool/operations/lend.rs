//! Lending what a sleep has unmapped, taking it back for a wake, and asking for what others lend.
//!
//! Promise: whatever a broker answers, or if it does not, memory is in one place: lent, held, or released. What is
//! [resident](super::resident) stays held.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::lend::{AskedOf, Broker, BrokerError, Lent};
use crate::pool::parts::lent_chunks::{LentChunk, Whereabouts};
use crate::pool::parts::physical::PhysicalMemory;
use crate::pool::shared::{MemoryGuard, Shared};
use crate::pool::state::PoolState;
use crate::pool::tools::deadline::Deadline;
use crate::pool::tools::error::Result;
use crate::pool::tools::keys::{Location, TagKey};
use crate::pool::tools::mapping::{Backing, Mapping};
use crate::tag::TagState;

/// Chunks lent at most by a sleep, the largest first: each is an open file of the broker's.
const CHUNKS_MAX: usize = 512;

/// Longest wait for memory that others have to make backups of first.
const ASK_MAX: Duration = Duration::from_secs(10);

/// The same for memory that is to stay free. Calls of other threads wait for the answer, so it is shorter than their
/// own deadlines.
const LEAVE_FREE_MAX: Duration = Duration::from_millis(500);

/// What became of a sleep's memory that was to be lent.
#[derive(Debug, Default)]
pub(super) struct Lending {
    pub(super) lent_bytes: u64,
    pub(super) resident_bytes: u64,
    /// Why nothing was, if a broker refused.
    pub(super) refused: Option<BrokerError>,
}

impl Shared {
    /// Lends unmapped chunks. What is not lent stays held.
    pub(super) fn lend<'a>(
        &'a self,
        mut memory: MemoryGuard<'a>,
        mappings: &mut [Mapping],
        resident: &BTreeSet<TagKey>,
    ) -> (MemoryGuard<'a>, Lending) {
        let mut lending = Lending::default();
        let Some(broker) = self.broker() else { return (memory, lending) };
        lending.resident_bytes = self.lock_state().keep_resident(mappings, resident);
        // What has no chunk any more could never come back.
        let chunks = self.lock_state().are_dropped(mappings);
        let mut order: Vec<(usize, bool)> =
            chunks.into_iter().enumerate().filter_map(|(nth, chunk)| Some((nth, chunk?))).collect();
        order.sort_by_key(|(nth, _)| std::cmp::Reverse(mappings[*nth].range.bytes));
        let (mut lent, mut chosen) = (Vec::new(), Vec::new());
        for (nth, is_dropped) in order {
            let Mapping { range, backing, .. } = mappings[nth];
            if lent.len() == CHUNKS_MAX {
                break;
            }
            // What cannot be exported is released, as without a broker.
            if let Backing::Held(id) = backing
                && let Some(descriptor) = memory.descriptor(id)
            {
                lent.push(Lent { id: range.addr, bytes: range.bytes, is_dropped, descriptor });
                chosen.push(nth);
            }
        }
        if lent.is_empty() {
            return (memory, lending);
        }
        // A broker's answer takes its time, and nothing else knows these chunks.
        drop(memory);
        self.withdraw_orphans(&**broker);
        let answer = broker.lend(lent);
        memory = self.lock_memory_anyway();
        match answer {
            Ok(()) => {
                let mut released: Vec<Mapping> = Vec::with_capacity(chosen.len());
                for nth in chosen {
                    lending.lent_bytes += mappings[nth].range.bytes;
                    // A release that the driver refuses is deferred: the memory stays until then.
                    let _ = memory.release(&mut mappings[nth]);
                    released.push(mappings[nth]);
                }
                let mut state = self.lock_state();
                for mapping in released {
                    state.lent_mut().lend((mapping.segment, mapping.range.addr), mapping.range.bytes);
                }
            }
            Err(error) => lending.refused = Some(error),
        }
        (memory, lending)
    }

    /// Takes back what is lent of these tags, which the caller has locked exclusively. It is held then, where it was, as
    /// what is resident. Returns the bytes of that, which need no look.
    pub(super) fn bring_back(&self, tags: &[TagKey]) -> Result<u64> {
        let lent = self.open_state()?.lent_of(tags);
        let Some(broker) = self.broker().filter(|_| !lent.is_empty()) else { return Ok(0) };
        self.withdraw_orphans(&**broker);
        let mut returned = taken_back(&**broker, &lent);
        let mut memory = self.lock_memory()?;
        let mut held: Vec<Mapping> = Vec::new();
        for ((segment, addr), LentChunk { bytes, .. }) in &lent {
            let back = returned.remove(addr).filter(|back| back.bytes == *bytes);
            // What cannot be imported is gone with its descriptor.
            let back = back.filter(|_| self.has_place(&mut memory, *bytes));
            if let Some(id) = back.and_then(|back| memory.import(&back.descriptor, *bytes).ok()) {
                let mut mapping = Mapping::absent(*segment, *addr, *bytes);
                mapping.backing = Backing::Held(id);
                held.push(mapping);
            }
        }
        let mut state = self.lock_state();
        let unfit = state.note_back(&lent, &held);
        state.put_in_place(lent.iter().map(|(location, _)| *location));
        let resident = state.lent_of(tags).into_iter().filter(|(_, chunk)| chunk.whereabouts.is_only_copy());
        let resident_bytes = resident.map(|(_, chunk)| chunk.bytes).sum();
        drop(state);
        self.cache_left(&mut memory);
        // Their blocks were freed while they slept. A refused release is deferred.
        for mut mapping in unfit {
            let _ = memory.release(&mut mapping);
        }
        Ok(resident_bytes)
    }

    /// Whether so much more may be held, once what is cached has made way.
    fn has_place(&self, memory: &mut PhysicalMemory, bytes: u64) -> bool {
        let excess_bytes = |memory: &PhysicalMemory| {
            let committed_bytes = memory.counters().committed_bytes().saturating_add(bytes);
            committed_bytes.saturating_sub(self.shape().limit_bytes.unwrap_or(u64::MAX))
        };
        let excess = excess_bytes(memory);
        if excess > 0 {
            // What is refused stays.
            let _ = self.reclaim(memory, excess);
        }
        excess_bytes(memory) == 0
    }

    /// Lends again what came back for a wake that failed, and releases what cannot be.
    pub(super) fn lend_again(&self, tags: &[TagKey]) {
        let memory = self.lock_memory_anyway();
        let mut mappings = self.lock_state().take_back_of(tags);
        if mappings.is_empty() {
            return;
        }
        let (mut memory, _) = self.lend(memory, &mut mappings, &BTreeSet::new());
        for mapping in &mut mappings {
            // A refused release is deferred.
            let _ = memory.release(mapping);
        }
    }

    /// Has what these tags lend given up, all of which has backups or was dropped. Returns the bytes.
    pub(super) fn withdraw(&self, tags: &[TagKey]) -> Result<u64> {
        let lent = self.open_state()?.lent_of(tags);
        let Some(broker) = self.broker() else { return Ok(0) };
        self.withdraw_orphans(&**broker);
        if lent.is_empty() {
            return Ok(0);
        }
        let bytes = taken_back(&**broker, &lent).values().map(|back| back.bytes).sum::<u64>();
        self.lock_state().note_back(&lent, &[]);
        Ok(bytes)
    }

    /// Makes memory spare that was resident and is of no more use.
    pub(in crate::pool) fn cache_left(&self, memory: &mut PhysicalMemory) {
        let left = self.lock_state().lent_mut().take_left();
        left.into_iter().for_each(|(id, bytes)| memory.put_spare(id, bytes));
    }

    /// After addresses were given back; without locks.
    pub(in crate::pool) fn withdraw_left(&self) {
        self.give_up_left_copies();
        if let Some(broker) = self.broker() {
            self.withdraw_orphans(&**broker);
            // A broker that does not hear of it asks in vain.
            let _ = self.announce_resident();
        }
    }

    /// What was lent at addresses that were given back since: they may be had again.
    fn withdraw_orphans(&self, broker: &dyn Broker) {
        let orphans = self.lock_state().lent_mut().take_orphans();
        if !orphans.is_empty() {
            // A broker that fails has nothing any more.
            drop(broker.take_back(&orphans));
        }
    }

    /// After an allocation, as [`Self::leave_free`] after a wake.
    pub(in crate::pool) fn leave_free_if_due(&self) {
        let created_bytes = self.counters().created_bytes();
        if self.broker().is_some() && self.free_memory().is_due(created_bytes) && !self.leave_free() {
            self.free_memory().rest(created_bytes);
        }
    }

    /// Without locks: what asks no broker needs memory as well, such as kernels that are loaded late. What others lend
    /// would leave it none. Returns false where it has less than it should.
    pub(super) fn leave_free(&self) -> bool {
        let min_bytes = self.free_memory().min_bytes();
        let Some(broker) = self.broker().filter(|_| min_bytes > 0) else { return true };
        // A device that does not say refuses when it is full.
        let free_bytes = self.driver().memory_info().map_or(min_bytes, |info| info.free_bytes);
        let lacking_bytes = min_bytes.saturating_sub(free_bytes);
        // What called this has what it needs. This pool's own memory would only be copied again.
        let asked = || broker.ask(lacking_bytes, AskedOf::Others, LEAVE_FREE_MAX);
        lacking_bytes == 0 || asked().is_ok_and(|given_bytes| given_bytes >= lacking_bytes)
    }

    /// Has others give up what they lend, then this pool what is resident. Returns the bytes; without locks.
    pub(in crate::pool) fn ask(&self, bytes: u64, deadline: Deadline) -> u64 {
        let Some(broker) = self.broker() else { return 0 };
        // At first what needs no waiting: that shows whether the broker answers at all.
        let Ok(mut given_bytes) = broker.ask(bytes, AskedOf::All, Duration::ZERO) else {
            return self.give_up_own(bytes);
        };
        if given_bytes < bytes
            && let Some(wait_max) = deadline.left(self.driver(), ASK_MAX)
        {
            given_bytes += broker.ask(bytes - given_bytes, AskedOf::All, wait_max).unwrap_or(0);
        }
        given_bytes + self.give_up_own(bytes.saturating_sub(given_bytes))
    }
}

/// By address. A broker that fails has nothing any more.
fn taken_back(broker: &dyn Broker, lent: &[(Location, LentChunk)]) -> BTreeMap<u64, Lent> {
    let at_broker = lent.iter().filter(|(_, chunk)| chunk.whereabouts == Whereabouts::Broker);
    let ids: Vec<u64> = at_broker.map(|((_, addr), _)| *addr).collect();
    let returned = if ids.is_empty() { Vec::new() } else { broker.take_back(&ids).unwrap_or_default() };
    returned.into_iter().map(|back| (back.id, back)).collect()
}

impl PoolState {
    pub(super) fn lent_of(&self, tags: &[TagKey]) -> Vec<(Location, LentChunk)> {
        let keys = tags.iter().flat_map(|tag| self.heap().segments().keys_of(*tag));
        keys.flat_map(|key| self.lent().of_segment(key).collect::<Vec<_>>()).collect()
    }

    /// Whether the tag of each that has a chunk still was dropped. Named bytes of it may be backed up all the same.
    fn are_dropped(&self, mappings: &[Mapping]) -> Vec<Option<bool>> {
        let segments = self.heap().segments();
        let is_dropped = |mapping: &Mapping| {
            segments.mapping((mapping.segment, mapping.range.addr))?;
            let tag = segments.tag_of(mapping.segment)?;
            Some(self.tags().get(tag).state() == TagState::AsleepDropped)
        };
        mappings.iter().map(is_dropped).collect()
    }

    /// Keeps the memory of tags that are resident, where it has a chunk still. Returns the bytes.
    fn keep_resident(&mut self, mappings: &mut [Mapping], resident: &BTreeSet<TagKey>) -> u64 {
        let mut bytes = 0;
        for mapping in mappings {
            let (location, tag) =
                ((mapping.segment, mapping.range.addr), self.heap().segments().tag_of(mapping.segment));
            if let Backing::Held(id) = mapping.backing
                && tag.is_some_and(|tag| resident.contains(&tag))
                && self.heap().segments().mapping(location).is_some()
            {
                self.lent_mut().keep(location, mapping.range.bytes, id);
                mapping.backing = Backing::Absent;
                bytes += mapping.range.bytes;
            }
        }
        bytes
    }

    /// What is resident of a tag that was dropped has no more use.
    pub(super) fn leave_all(&mut self, tag: TagKey) {
        for (location, _) in self.lent_of(&[tag]) {
            self.lent_mut().leave(location);
        }
    }

    /// Of what was lent, `held` is back, and the rest of it gone. Returns what has no chunk any more.
    fn note_back(&mut self, lent: &[(Location, LentChunk)], held: &[Mapping]) -> Vec<Mapping> {
        let back: BTreeMap<Location, Mapping> =
            held.iter().map(|mapping| ((mapping.segment, mapping.range.addr), *mapping)).collect();
        let mut unfit = Vec::new();
        let at_broker = lent.iter().filter(|(_, chunk)| chunk.whereabouts == Whereabouts::Broker);
        for (location, LentChunk { bytes, .. }) in at_broker {
            let chunk = self.heap().segments().mapping(*location);
            let fits = chunk.is_some_and(|chunk| chunk.is_absent() && chunk.range.bytes == *bytes);
            match back.get(location) {
                Some(mapping) if fits => {
                    self.heap_mut().segments_mut().store(&[*mapping]);
                    self.lent_mut().note_back(*location);
                }
                gone => {
                    unfit.extend(gone);
                    self.lent_mut().forget(*location);
                }
            }
        }
        unfit
    }

    /// What came back and is not mapped: it leaves its chunks. What was resident is so again, unless it is mapped.
    pub(super) fn take_back_of(&mut self, tags: &[TagKey]) -> Vec<Mapping> {
        let mut mappings = Vec::new();
        for (location, LentChunk { bytes, whereabouts }) in self.lent_of(tags) {
            let chunk = self.heap().segments().mapping(location);
            match (whereabouts, chunk.map(|chunk| chunk.backing)) {
                (Whereabouts::Back { was_resident: true }, Some(Backing::Held(id))) => {
                    self.heap_mut().segments_mut().set_absent(location);
                    self.lent_mut().keep(location, bytes, id);
                }
                (Whereabouts::Back { was_resident: true }, Some(Backing::Mapped { .. }))
                | (Whereabouts::Resident(_), _) => {}
                (Whereabouts::Back { .. }, Some(Backing::Held(_))) => {
                    self.heap_mut().segments_mut().set_absent(location);
                    mappings.extend(chunk);
                    self.lent_mut().forget(location);
                }
                _ => self.lent_mut().forget(location),
            }
        }
        mappings
    }

    /// These tags are awake: their memory is theirs.
    pub(super) fn forget_lent(&mut self, tags: &[TagKey]) {
        for (location, _) in self.lent_of(tags) {
            self.lent_mut().forget(location);
        }
    }
}
