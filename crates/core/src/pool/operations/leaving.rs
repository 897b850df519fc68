//! Unmapping what leaves in a sleep, in the order of addresses, while copies from behind run.
//!
//! Every handle is kept, so that an undo only maps again. The tags' exclusive locks keep others from these mappings.
//!
//! Promise: unless it is [finished](Leaving::finish), everything is mapped again, after a panic, too. If the driver
//! refuses that, the tags are stranded.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::stage::ReadyStep;
use crate::driver::{DriverError, Op};
use crate::pool::shared::{MemoryGuard, Shared};
use crate::pool::state::PoolState;
use crate::pool::tools::error::{Phase, PoolError, Result};
use crate::pool::tools::keys::{Location, TagKey};
use crate::pool::tools::mapping::{Backing, Batch, Mapping};
use crate::pool::tools::report::{SleepPhases, add};
use crate::tag::Tag;

/// Mappings that are unmapped or released before the lock is handed over: no more bytes than in as many chunks.
const BATCH_MAPPINGS: usize = 32;

pub(in crate::pool) struct Leaving<'a> {
    shared: &'a Shared,
    /// The chunks, in order.
    locations: &'a [Location],
    /// The tags that fall asleep.
    falling: &'a [TagKey],
    /// How many locations have been visited.
    visited: usize,
    /// What they had mapped.
    mappings: Vec<Mapping>,
    before: Vec<Backing>,
    /// Whether nothing is unmapped before the end.
    stays: bool,
    elapsed: Duration,
}

impl<'a> Leaving<'a> {
    pub(in crate::pool) fn new(shared: &'a Shared, locations: &'a [Location], falling: &'a [TagKey]) -> Self {
        let (mappings, before, elapsed) = Default::default();
        Self { shared, locations, falling, visited: 0, mappings, before, stays: false, elapsed }
    }

    /// All of it stays mapped until the end.
    pub(super) fn staying(mut self, stays: bool) -> Self {
        self.stays = stays;
        self
    }

    /// Unmaps what ends before `next`, where the next copy begins.
    pub(super) fn unmap_before(&mut self, next: Location) -> Result<()> {
        let ends_before = |mapping: &Mapping| (mapping.segment, mapping.range.end()) <= next;
        let is_due = self.locations.get(self.visited).is_some_and(|location| *location < next);
        if is_due && !self.stays { self.unmap(&ends_before).map(drop) } else { Ok(()) }
    }

    /// Maps everything again, and begins anew.
    pub(super) fn put_back(&mut self) -> Result<()> {
        self.visited = 0;
        match self.restore() {
            None => Ok(()),
            Some(undo) => {
                let source = DriverError::invalid(Op::Unmap, "what had been unmapped is needed once more");
                let error = PoolError::SleepFailed { phase: Phase::Unmap, source };
                Err(self.shared.lock_state().stranded(self.falling, error, undo))
            }
        }
    }

    /// Unmaps the rest, and waits for the verdict, if there is to be one. Returns the lock and all that was unmapped,
    /// whose release is up to the caller.
    pub(in crate::pool) fn finish(
        mut self,
        when_ready: ReadyStep<'_>,
        phases: &mut SleepPhases,
    ) -> Result<(MemoryGuard<'a>, Vec<Mapping>)> {
        let unmapped = self.unmap(&|_| true).map(drop).and_then(|()| when_ready());
        if let Err(error) = unmapped {
            return Err(self.undo(error));
        }
        // Also after a panic elsewhere, since the group may have committed.
        let memory = self.shared.lock_memory_anyway();
        add(&mut phases.unmap_s, self.elapsed);
        self.shared.lock_state().heap_mut().segments_mut().store(&self.mappings);
        self.before.clear();
        Ok((memory, std::mem::take(&mut self.mappings)))
    }

    /// Hands the lock over between batches.
    fn unmap(&mut self, leaves: &dyn Fn(&Mapping) -> bool) -> Result<MemoryGuard<'a>> {
        let started = Instant::now();
        let mut memory = self.shared.lock_memory()?;
        let unmapped = loop {
            let begin = self.mappings.len();
            self.visit(leaves);
            if begin == self.mappings.len() {
                break Ok(());
            }
            if let Err(source) = memory.unmap(&mut self.mappings[begin..]) {
                break Err(PoolError::SleepFailed { phase: Phase::Unmap, source });
            }
            memory = self.shared.hand_over_memory(memory);
        };
        self.elapsed += started.elapsed();
        unmapped.map(|()| memory)
    }

    /// Adds the next batch.
    fn visit(&mut self, leaves: &dyn Fn(&Mapping) -> bool) {
        let state = self.shared.lock_state();
        let Batch { mappings, bytes } = self.shared.leaving_batch();
        let (mut count, mut left_bytes) = (0, bytes);
        while count < mappings
            && let Some(location) = self.locations.get(self.visited)
        {
            if let Some(mapping) = state.heap().segments().mapping(*location) {
                if !leaves(&mapping) || count > 0 && left_bytes < mapping.range.bytes {
                    break;
                }
                left_bytes = left_bytes.saturating_sub(mapping.range.bytes);
                count += 1;
                self.before.push(mapping.backing);
                self.mappings.push(mapping);
            }
            self.visited += 1;
        }
    }

    /// Maps everything again. Returns `error`, or what has become of it.
    pub(in crate::pool) fn undo(mut self, error: PoolError) -> PoolError {
        match self.restore() {
            Some(undo) => self.shared.lock_state().stranded(self.falling, error, undo),
            None => error,
        }
    }

    fn restore(&mut self) -> Option<DriverError> {
        let (mut mappings, before) = (std::mem::take(&mut self.mappings), std::mem::take(&mut self.before));
        if before.is_empty() {
            return None;
        }
        // Also after a panic elsewhere, since the state must know what is mapped.
        let mut memory = self.shared.lock_memory_anyway();
        let refused = memory.restore(&mut mappings, &before);
        let mut state = self.shared.lock_state();
        state.heap_mut().segments_mut().store(&mappings);
        let unfit = state.tidy_held(self.locations);
        drop(state);
        // No allocation may find free memory that could not be mapped again.
        let _ = self.shared.dispose(&mut memory, unfit);
        refused
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if let Some(undo) = self.restore() {
            let panicked = DriverError::invalid(Op::Unmap, "the sleep was given up before it was finished");
            let error = PoolError::SleepFailed { phase: Phase::Unmap, source: panicked };
            self.shared.lock_state().stranded(self.falling, error, undo);
        }
    }
}

impl PoolState {
    /// After an undo that failed.
    fn stranded(&mut self, falling: &[TagKey], error: PoolError, undo: DriverError) -> PoolError {
        // A discard may concern tags that slept before: they go on sleeping.
        let is_stranded = |tag: &TagKey| self.tags().get(*tag).state().is_held() && !self.is_whole(*tag);
        let stranded: Vec<TagKey> = falling.iter().copied().filter(is_stranded).collect();
        if stranded.is_empty() {
            return error;
        }
        let (phase, source) = match error {
            PoolError::SleepFailed { phase, source } => (phase, source),
            other => (Phase::Copy, DriverError::invalid(Op::Save, other.to_string())),
        };
        stranded.iter().for_each(|tag| self.tags_mut().get_mut(*tag).strand());
        let names = self.tags().names(&stranded);
        let names: Vec<&str> = names.iter().map(Tag::as_str).collect();
        PoolError::Stranded { phase, tags: names.join(", "), source: source.into(), undo: undo.into() }
    }

    /// Tidies the awake tags of `locations`, where an undo may have left free memory unmapped.
    fn tidy_held(&mut self, locations: &[Location]) -> Vec<Mapping> {
        let tags = self.tags_of(locations).into_iter();
        let awake: Vec<TagKey> = tags.filter(|tag| !self.tags().get(*tag).state().is_asleep()).collect();
        awake.into_iter().flat_map(|tag| self.tidy(tag)).collect()
    }

    pub(in crate::pool) fn tags_of(&self, locations: &[Location]) -> BTreeSet<TagKey> {
        locations.iter().filter_map(|(segment, _)| self.heap().segments().tag_of(*segment)).collect()
    }
}

impl Shared {
    pub(super) fn leaving_batch(&self) -> Batch {
        Batch { mappings: BATCH_MAPPINGS, bytes: BATCH_MAPPINGS as u64 * self.shape().chunk_bytes }
    }
}
