//! Memory of sleeping tags that stays with its only copy until others need it: its pool is asked then, backs it up and
//! releases it.
//!
//! Promise: resident memory leaves behind its backup, or stays.

use std::collections::BTreeSet;
use std::time::Duration;

use super::leaving::Leaving;
use super::save::{Saved, Saver};
use crate::driver::{BackingId, DeviceRange};
use crate::lend::BrokerError;
use crate::pool::parts::backups::{Extents, Save, saves};
use crate::pool::parts::lent_chunks::{LentChunk, Whereabouts};
use crate::pool::parts::physical::{MapTimes, PhysicalMemory};
use crate::pool::shared::Shared;
use crate::pool::state::PoolState;
use crate::pool::tools::deadline::Deadline;
use crate::pool::tools::error::{Phase, PoolError, Result};
use crate::pool::tools::keys::{Location, TagKey};
use crate::pool::tools::mapping::{Backing, Mapping};
use crate::pool::tools::report::{Level, SleepPhases, SleepReport};
use crate::tag::{Tag, TagState};

const GIVE_UP: &str = "back up and release resident memory";

impl Shared {
    /// The tags of a sleep whose memory stays. The broker knows of it by then.
    pub(super) fn may_stay(&self, level: Level, visited: &[TagKey]) -> Result<BTreeSet<TagKey>, BrokerError> {
        let Some(broker) = self.broker() else { return Ok(BTreeSet::new()) };
        let (tags, bytes) = {
            let state = self.lock_state();
            let tags = state.volatile_of(level, visited);
            let live_bytes: u64 = tags.iter().map(|tag| state.heap().live_of(*tag).live_bytes).sum();
            (tags, live_bytes + state.lent().resident_bytes())
        };
        if !tags.is_empty() {
            self.lock_state().lent_mut().set_announced(true);
            broker.announce(bytes)?;
        }
        Ok(tags)
    }

    /// What else a lending sleep has to do, and to say. Memory of which no broker knows does not stay.
    pub(super) fn after_lending(
        &self,
        mut report: SleepReport,
        refused: Option<BrokerError>,
        visited: &[TagKey],
    ) -> SleepReport {
        if let Some(error) = refused.or_else(|| self.announce_resident().err()) {
            report.lend_refused.get_or_insert(error.to_string());
            // What cannot be backed up stays, and the report says so.
            let given_bytes = self.evict(visited, u64::MAX).unwrap_or(0);
            let released_bytes = given_bytes.min(report.resident_bytes);
            report.planned_release_bytes += released_bytes;
            report.released_bytes += released_bytes;
            report.resident_bytes = report.resident_bytes.saturating_sub(given_bytes);
        }
        report
    }

    /// Says what is resident, if some is, or the broker may believe so.
    pub(super) fn announce_resident(&self) -> std::result::Result<(), BrokerError> {
        let Some(broker) = self.broker() else { return Ok(()) };
        let Some(bytes) = self.lock_state().lent_mut().news_for_broker() else { return Ok(()) };
        let announced = broker.announce(bytes);
        if announced.is_ok() && bytes == 0 {
            self.lock_state().lent_mut().set_announced(false);
        }
        announced
    }

    pub(in crate::pool) fn give_up(&self, bytes: u64, wait_max: Duration) -> Result<u64> {
        let (mut given_bytes, mut failed) = (0, None);
        let tags = self.open_state()?.resident_tags();
        for tag in tags {
            if given_bytes < bytes {
                match self.give_up_of(tag, bytes - given_bytes, wait_max) {
                    Ok(more_bytes) => given_bytes += more_bytes,
                    Err(error) => failed = failed.or(Some(error)),
                }
            }
        }
        // A broker that does not hear of it asks in vain.
        let _ = self.announce_resident();
        failed.filter(|_| given_bytes == 0).map_or(Ok(given_bytes), Err)
    }

    fn give_up_of(&self, tag: Tag, bytes: u64, wait_max: Duration) -> Result<u64> {
        let deadline = Deadline::begin(self.driver(), Some(wait_max));
        let tags = [tag];
        let (_, exclusive) = self.exclusive(GIVE_UP, Some(&tags[..]), TagState::is_asleep, true, deadline)?;
        self.evict(exclusive.tags(), bytes)
    }

    /// For a call of this pool that lacks memory. It waits for no other call.
    pub(in crate::pool) fn give_up_own(&self, bytes: u64) -> u64 {
        if bytes == 0 || self.lock_state().lent().resident_bytes() == 0 {
            return 0;
        }
        self.give_up(bytes, Duration::ZERO).unwrap_or(0)
    }

    /// Backs up what is resident of these tags, which the caller has locked exclusively, until so many bytes are released.
    pub(super) fn evict(&self, tags: &[TagKey], bytes: u64) -> Result<u64> {
        let chosen = self.open_state()?.chosen_residents(tags, bytes);
        if chosen.is_empty() {
            return Ok(0);
        }
        let evicted = self.evict_chunks(tags, &chosen);
        if evicted.is_err() {
            self.stay(tags);
            // The device has these bytes. Backups of a part would be in the way of later ones.
            self.lock_state().forget_backups_of(tags, &chosen);
        }
        evicted
    }

    fn evict_chunks(&self, tags: &[TagKey], chosen: &[Location]) -> Result<u64> {
        let at = |phase| move |source| PoolError::SleepFailed { phase, source };
        let mut memory = self.lock_memory()?;
        let mut state = self.lock_state();
        state.put_in_place(chosen.iter().copied());
        // Blocks were freed while they slept.
        let left = state.lent_mut().take_left();
        let of_chosen = chosen.iter().filter(|location| state.lent().is_only_copy(**location));
        let chosen: &[Location] = &of_chosen.copied().collect::<Vec<_>>();
        let mut mappings: Vec<Mapping> =
            chosen.iter().filter_map(|location| state.heap().segments().mapping(*location)).collect();
        drop(state);
        let left_bytes = release_all(&mut memory, left);
        if mappings.is_empty() {
            return Ok(left_bytes);
        }
        let mapped = memory.map(&mut mappings, &mut MapTimes::default());
        self.lock_state().heap_mut().segments_mut().store(&mappings);
        drop(memory);
        mapped.map_err(at(Phase::Copy))?;
        let saves = self.lock_state().saves_of(tags, &mappings);
        let (mut saved, mut phases) = (Saved::default(), SleepPhases::default());
        let saver = Saver { shared: self, saves: &saves, falling: tags };
        let mut leaving = Leaving::new(self, chosen, &[]);
        if let Err(error) = saver.save(&mut leaving, &mut saved) {
            return Err(leaving.undo(error));
        }
        let (mut memory, mut unmapped) = leaving.finish(&|| Ok(()), &mut phases)?;
        let mut state = self.lock_state();
        for location in chosen {
            state.heap_mut().segments_mut().set_absent(*location);
            state.lent_mut().forget(*location);
        }
        drop(state);
        let bytes = left_bytes + unmapped.iter().map(|mapping| mapping.range.bytes).sum::<u64>();
        for mapping in &mut unmapped {
            // A release that the driver refuses is deferred, and tried again.
            let _ = memory.release(mapping);
        }
        Ok(bytes)
    }

    /// After a failure: what was put in place is resident again. What cannot be unmapped is so in its place.
    fn stay(&self, tags: &[TagKey]) {
        let mut memory = self.lock_memory_anyway();
        let mut in_place = self.lock_state().residents_in_place(tags);
        let _ = memory.unmap_each(&mut in_place);
        let mut state = self.lock_state();
        state.heap_mut().segments_mut().store(&in_place);
        let lent = state.take_back_of(tags);
        debug_assert!(lent.is_empty(), "of sleeping tags only resident memory is in place");
    }
}

/// A release that the driver refuses is deferred, and tried again. Returns the bytes.
fn release_all(memory: &mut PhysicalMemory, left: Vec<(BackingId, u64)>) -> u64 {
    let mut released_bytes = 0;
    for (id, bytes) in left {
        released_bytes += memory.release_unmapped(id, bytes).map_or(0, |()| bytes);
    }
    released_bytes
}

impl PoolState {
    fn forget_backups_of(&mut self, tags: &[TagKey], chosen: &[Location]) {
        for (segment, addr) in chosen {
            let chunk = self.lent().get((*segment, *addr)).filter(|chunk| chunk.whereabouts.is_only_copy());
            let tag = self.heap().segments().tag_of(*segment).filter(|tag| tags.contains(tag));
            if let Some((chunk, tag)) = chunk.zip(tag) {
                let range = DeviceRange::new(*addr, chunk.bytes);
                self.backups_mut().forget_granules(tag, *segment, range);
            }
        }
    }

    /// Those that have slept longest first.
    fn resident_tags(&self) -> Vec<Tag> {
        let has_some =
            |tag: TagKey| self.lent_of(&[tag]).iter().any(|(_, chunk)| chunk.whereabouts.is_only_copy());
        let mut tags: Vec<(Option<u64>, Tag)> = self
            .tags()
            .iter()
            .filter(|(tag, entry)| entry.state().is_asleep() && has_some(*tag))
            .map(|(_, entry)| (entry.sleep_number(), entry.name().clone()))
            .collect();
        tags.sort_unstable();
        tags.into_iter().map(|(_, tag)| tag).collect()
    }

    fn chosen_residents(&self, tags: &[TagKey], bytes: u64) -> Vec<Location> {
        let mut left_bytes = bytes;
        let lent = self.lent_of(tags).into_iter();
        let resident = lent.filter(|(_, chunk)| chunk.whereabouts.is_only_copy());
        let mut chosen: Vec<Location> = resident
            .take_while(|(_, LentChunk { bytes, .. })| {
                let is_lacking = left_bytes > 0;
                left_bytes = left_bytes.saturating_sub(*bytes);
                is_lacking
            })
            .map(|(location, _)| location)
            .collect();
        chosen.sort_unstable();
        chosen
    }

    /// Puts resident memory into its chunks. What has none any more, as its blocks were freed, is of no more use.
    pub(super) fn put_in_place(&mut self, locations: impl IntoIterator<Item = Location>) {
        for location in locations {
            let Some(LentChunk { bytes, whereabouts: Whereabouts::Resident(id) }) = self.lent().get(location)
            else {
                continue;
            };
            let chunk = self.heap().segments().mapping(location);
            match chunk.filter(|chunk| chunk.is_absent() && chunk.range.bytes == bytes) {
                Some(chunk) => {
                    let mapping = Mapping { backing: Backing::Held(id), ..chunk };
                    self.heap_mut().segments_mut().store(&[mapping]);
                    self.lent_mut().note_back(location);
                }
                None => self.lent_mut().leave(location),
            }
        }
    }

    fn residents_in_place(&self, tags: &[TagKey]) -> Vec<Mapping> {
        let lent = self.lent_of(tags).into_iter();
        let back = lent.filter(|(_, chunk)| chunk.whereabouts == Whereabouts::Back { was_resident: true });
        back.filter_map(|(location, _)| self.heap().segments().mapping(location)).collect()
    }

    /// The saves of what is live in these chunks.
    fn saves_of(&self, tags: &[TagKey], chunks: &[Mapping]) -> Vec<Save> {
        let shape = self.heap().shape();
        let mut all = Vec::new();
        for tag in tags {
            for (key, segment) in self.heap().segments().of_tag(*tag) {
                let mut is_here = vec![false; shape.granules(segment.range().bytes)];
                for chunk in chunks.iter().filter(|chunk| chunk.segment == key) {
                    let first = shape.granules(chunk.range.addr - segment.range().addr);
                    is_here[first..first + shape.granules(chunk.range.bytes)].fill(true);
                }
                if !is_here.contains(&true) {
                    continue;
                }
                let elsewhere: Vec<usize> = (0..is_here.len()).filter(|nth| !is_here[*nth]).collect();
                let stored_as = self.tags().get(*tag).stored_as();
                let extents = Extents { most_bytes: shape.chunk_bytes, stored_as, are_kept: false };
                all.extend(saves(self.heap(), self.backups(), (key, segment), extents, &elsewhere));
            }
        }
        all.sort_unstable_by_key(|save| save.location);
        all
    }

    /// For the end of the pool.
    pub(in crate::pool) fn forget_resident(&mut self) {
        let segments: Vec<_> = self.heap().segments().iter().map(|(key, _)| key).collect();
        for key in segments {
            for (location, _) in self.lent().of_segment(key).collect::<Vec<_>>() {
                self.lent_mut().leave(location);
            }
        }
    }
}
