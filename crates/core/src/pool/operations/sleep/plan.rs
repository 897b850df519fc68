//! The plan of a sleep: what is copied, what is dropped, and what is released. Pure.
//!
//! Conflicts are found here, before anything has happened.

use crate::driver::DeviceRange;
use crate::pool::parts::backups::{BACK_UP, Save, runs, saves};
use crate::pool::parts::heap::{Segment, Use};
use crate::pool::parts::physical::Counters;
use crate::pool::state::PoolState;
use crate::pool::tools::error::{PoolError, Result};
use crate::pool::tools::keys::{Location, SegmentKey, TagKey};
use crate::pool::tools::mapping::Backing;
use crate::pool::tools::report::Level;
use crate::pool::tools::unused_ranges::Unused;
use crate::tag::{SleepAction, TagState};

#[derive(Debug)]
pub(in crate::pool) struct SleepPlan {
    pub(in crate::pool) level: Level,
    pub(in crate::pool) tags: Vec<(TagKey, SleepAction)>,
    pub(in crate::pool) already_asleep: Vec<TagKey>,
    pub(in crate::pool) saves: Vec<Save>,
    /// Chunks whose memory is released, by segment and address.
    pub(in crate::pool) leaving: Vec<Location>,
    /// Live granules that are not backed up, because their bytes are unused.
    pub(in crate::pool) unused: Vec<(TagKey, SegmentKey, DeviceRange)>,
    pub(in crate::pool) release_bytes: u64,
    pub(in crate::pool) discarded_bytes: u64,
}

impl PoolState {
    pub(in crate::pool) fn plan_sleep(
        &self,
        level: Level,
        visited: &[TagKey],
        unused: &Unused,
        counters: &Counters,
    ) -> Result<SleepPlan> {
        let mut tags = Vec::new();
        let mut already_asleep = Vec::new();
        for tag in visited.iter().copied() {
            if let Some(action) = self.sleep_action(tag, level)? {
                tags.push((tag, action));
            } else if self.tags().get(tag).state().is_asleep() {
                already_asleep.push(tag);
            }
        }
        Ok(self.plan(level, (tags, already_asleep), visited, unused, counters))
    }

    /// Drops tags, asleep or awake, whatever their policy.
    pub(in crate::pool) fn plan_discard(&self, visited: &[TagKey], counters: &Counters) -> SleepPlan {
        let (mut tags, mut already_asleep) = (Vec::new(), Vec::new());
        for tag in visited.iter().copied() {
            if self.tags().get(tag).state() == TagState::AsleepDropped {
                already_asleep.push(tag);
            } else if self.heap().live_of(tag).live_blocks > 0 {
                tags.push((tag, SleepAction::Drop));
            }
        }
        self.plan(Level::Two, (tags, already_asleep), visited, &Unused::default(), counters)
    }

    /// How a tag falls asleep at this level; `None` when it already sleeps so, or has no blocks.
    fn sleep_action(&self, tag: TagKey, level: Level) -> Result<Option<SleepAction>> {
        let entry = self.tags().get(tag);
        if self.heap().live_of(tag).live_blocks == 0 {
            return Ok(None);
        }
        let (name, state) = (entry.name().clone(), entry.state());
        let (action, wanted) = match level {
            Level::One => entry.policy().level_1,
            Level::Two => entry.policy().level_2,
        }
        .named();
        match (state, action) {
            (TagState::Awake, _) | (TagState::Undefined, SleepAction::Drop) => Ok(Some(action)),
            (TagState::AsleepBackedUp, SleepAction::Backup)
            | (TagState::AsleepDropped, SleepAction::Drop) => Ok(None),
            (TagState::Undefined, SleepAction::Backup) => Err(self.undefined_error(BACK_UP, tag)),
            (TagState::Stranded, _) => Err(PoolError::Asleep { op: "sleep", tag: name, state }),
            _ => Err(PoolError::SleepConflict { level, tag: name, state, wanted }),
        }
    }

    fn plan(
        &self,
        level: Level,
        (tags, already_asleep): (Vec<(TagKey, SleepAction)>, Vec<TagKey>),
        visited: &[TagKey],
        unused: &Unused,
        counters: &Counters,
    ) -> SleepPlan {
        let mut plan = SleepPlan {
            level,
            tags,
            already_asleep,
            saves: Vec::new(),
            leaving: Vec::new(),
            unused: Vec::new(),
            release_bytes: counters.deferred_release_bytes() + counters.spare_bytes(),
            discarded_bytes: 0,
        };
        for tag in visited.iter().copied() {
            let action = plan.tags.iter().find(|(other, _)| *other == tag).map(|(_, action)| *action);
            for (key, segment) in self.heap().segments().of_tag(tag) {
                self.plan_segment(&mut plan, (key, segment), action, unused);
            }
        }
        plan.leaving.sort_unstable();
        // In the same order, so that what leaves can be unmapped behind the copies.
        plan.saves.sort_unstable_by_key(|save| save.location);
        plan
    }

    fn plan_segment(
        &self,
        plan: &mut SleepPlan,
        (key, segment): (SegmentKey, &Segment),
        action: Option<SleepAction>,
        unused: &Unused,
    ) {
        let shape = self.heap().shape();
        let state = self.tags().get(segment.tag()).state();
        let asleep = matches!(state, TagState::AsleepBackedUp | TagState::AsleepDropped);
        let uses = self.heap().uses_of_granules(segment);
        for (at, chunk) in segment.chunks() {
            let first = shape.granules(at - segment.range().addr);
            let of_chunk = &uses[first..first + shape.granules(chunk.bytes)];
            let leaves = action.is_some() || asleep || of_chunk.iter().all(|granule| *granule == Use::Free);
            if leaves && chunk.backing != Backing::Absent {
                plan.leaving.push((key, at));
                plan.release_bytes += chunk.bytes;
            }
        }
        match action {
            Some(SleepAction::Backup) => {
                let (tag, range) = (segment.tag(), segment.range());
                let mut unused = unused.granules(range, &shape);
                unused.retain(|granule| uses[*granule].is_live());
                let ranges = runs(&unused).into_iter();
                let ranges = ranges.map(|run| shape.granule_range(range.addr, run.start, run.len()));
                plan.unused.extend(ranges.map(|range| (tag, key, range)));
                let extents = (shape.chunk_bytes, self.tags().get(tag).stored_as());
                plan.saves.extend(saves(self.heap(), self.backups(), (key, segment), extents, &unused));
            }
            Some(SleepAction::Drop) => {
                let live = uses.iter().filter(|granule| granule.is_live()).count();
                plan.discarded_bytes += live as u64 * shape.granule_bytes;
            }
            None => {}
        }
    }
}

impl SleepAction {
    fn named(self) -> (Self, &'static str) {
        match self {
            Self::Backup => (self, "backed up"),
            Self::Drop => (self, "dropped"),
        }
    }
}
