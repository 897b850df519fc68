//! The plan of a sleep: what is copied, what is dropped, and which chunks leave. Pure.
//!
//! Conflicts are found here, before anything has happened.

use std::collections::{BTreeMap, BTreeSet};

use crate::driver::DeviceRange;
use crate::pool::parts::backups::{BACK_UP, Extents, Save, runs, saves};
use crate::pool::parts::heap::{Segment, Use};
use crate::pool::state::PoolState;
use crate::pool::tools::byte_ranges::ByteRanges;
use crate::pool::tools::error::{PoolError, Result};
use crate::pool::tools::keys::{Location, SegmentKey, TagKey};
use crate::pool::tools::mapping::Backing;
use crate::pool::tools::report::{Level, SleepRequest};
use crate::tag::{Changes, SleepAction, TagState};

#[derive(Debug)]
pub(in crate::pool) struct SleepPlan {
    pub(in crate::pool) level: Level,
    pub(in crate::pool) tags: Vec<(TagKey, SleepAction)>,
    pub(in crate::pool) already_asleep: Vec<TagKey>,
    pub(in crate::pool) saves: Vec<Save>,
    /// Chunks whose memory is released, by segment and address.
    pub(in crate::pool) leaving: Vec<Location>,
    /// Tags whose memory stays with its bytes: none of it is backed up.
    pub(in crate::pool) resident: BTreeSet<TagKey>,
    /// Live granules that are not backed up, beside others that are.
    pub(in crate::pool) unsaved: Vec<(TagKey, SegmentKey, DeviceRange)>,
    /// Bytes of dropped tags that come back defined, by address.
    pub(in crate::pool) kept: Vec<(TagKey, DeviceRange)>,
    pub(in crate::pool) discarded_bytes: u64,
    /// In whole granules, as the next one.
    pub(in crate::pool) unused_bytes: u64,
    pub(in crate::pool) kept_bytes: u64,
}

impl SleepPlan {
    /// Tags all of whose bytes have backups.
    pub(super) fn backed_up(&self) -> BTreeSet<TagKey> {
        let is_backed_up = |(tag, action): &&(TagKey, SleepAction)| {
            *action == SleepAction::Backup && !self.resident.contains(tag)
        };
        self.tags.iter().filter(is_backed_up).map(|(tag, _)| *tag).collect()
    }
}

/// What a request says of bytes by their addresses.
#[derive(Debug, Default)]
pub(in crate::pool) struct NamedBytes {
    /// Not backed up, although their tag is.
    unused: ByteRanges,
    /// Backed up, although their tag is dropped.
    kept: ByteRanges,
}

impl NamedBytes {
    pub(in crate::pool) fn of(request: &SleepRequest) -> Result<Self> {
        let unused = ByteRanges::new("unused", &request.unused)?;
        Ok(Self { unused, kept: ByteRanges::new("kept", &request.kept)? })
    }
}

impl PoolState {
    pub(in crate::pool) fn plan_sleep(
        &self,
        level: Level,
        visited: &[TagKey],
        named: &NamedBytes,
        resident: &BTreeSet<TagKey>,
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
        Ok(self.plan(level, (tags, already_asleep), visited, (named, resident)))
    }

    /// The tags that fall asleep at this level and whose bytes change all the time. A backup would be of no use at the next
    /// sleep, so they can stay resident.
    pub(in crate::pool) fn volatile_of(&self, level: Level, visited: &[TagKey]) -> BTreeSet<TagKey> {
        let is_volatile = |tag: &TagKey| {
            self.tags().get(*tag).changes() == Changes::Volatile
                && self.sleep_action(*tag, level).is_ok_and(|action| action == Some(SleepAction::Backup))
        };
        visited.iter().copied().filter(is_volatile).collect()
    }

    /// Fails where [`Self::plan_sleep`] would.
    pub(in crate::pool) fn check_sleep(&self, level: Level, visited: &[TagKey]) -> Result<()> {
        visited.iter().try_for_each(|tag| self.sleep_action(*tag, level).map(drop))
    }

    /// Drops tags, asleep or awake, whatever their policy.
    pub(in crate::pool) fn plan_discard(&self, visited: &[TagKey]) -> SleepPlan {
        let (mut tags, mut already_asleep) = (Vec::new(), Vec::new());
        for tag in visited.iter().copied() {
            if self.tags().get(tag).state() == TagState::AsleepDropped && !self.backups().has(tag) {
                already_asleep.push(tag);
            } else if self.heap().live_of(tag).live_blocks > 0 {
                tags.push((tag, SleepAction::Drop));
            }
        }
        self.plan(Level::Two, (tags, already_asleep), visited, (&NamedBytes::default(), &BTreeSet::new()))
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
        (named, resident): (&NamedBytes, &BTreeSet<TagKey>),
    ) -> SleepPlan {
        let mut plan = SleepPlan {
            level,
            tags,
            already_asleep,
            saves: Vec::new(),
            leaving: Vec::new(),
            resident: resident.clone(),
            unsaved: Vec::new(),
            kept: Vec::new(),
            discarded_bytes: 0,
            unused_bytes: 0,
            kept_bytes: 0,
        };
        let actions: BTreeMap<TagKey, SleepAction> = plan.tags.iter().copied().collect();
        for tag in visited.iter().copied() {
            let action = actions.get(&tag).copied();
            for (key, segment) in self.heap().segments().of_tag(tag) {
                self.plan_segment(&mut plan, (key, segment), action, named);
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
        named: &NamedBytes,
    ) {
        let shape = self.heap().shape();
        let state = self.tags().get(segment.tag()).state();
        let asleep = matches!(state, TagState::AsleepBackedUp | TagState::AsleepDropped);
        let uses = self.heap().uses_of_granules(segment);
        for (at, chunk) in segment.chunks() {
            let first = shape.granules(at - segment.range().addr);
            let of_chunk = &uses[first..first + shape.granules(chunk.bytes)];
            let leaves = action.is_some() || asleep || of_chunk.iter().all(|granule| *granule == Use::Free);
            if leaves && chunk.backing != Backing::Absent && !self.lent().is_only_copy((key, at)) {
                plan.leaving.push((key, at));
            }
        }
        let Some(action) = action else { return };
        let (tag, range) = (segment.tag(), segment.range());
        let is_live = |granule: &usize| uses[*granule].is_live();
        let in_bytes = |granules: usize| granules as u64 * shape.granule_bytes;
        let unsaved: Vec<usize> = match action {
            SleepAction::Backup if plan.resident.contains(&tag) => (0..uses.len()).filter(is_live).collect(),
            SleepAction::Backup => {
                let unused = named.unused.whole_granules(range, &shape).into_iter();
                let unused: Vec<usize> = unused.filter(is_live).collect();
                plan.unused_bytes += in_bytes(unused.len());
                unused
            }
            SleepAction::Drop => {
                let kept = named.kept.touched_granules(range, &shape);
                let live = (0..uses.len()).filter(is_live);
                let (kept, dropped): (Vec<usize>, Vec<usize>) =
                    live.partition(|granule| kept.binary_search(granule).is_ok());
                plan.discarded_bytes += in_bytes(dropped.len());
                if kept.is_empty() {
                    // Its backups are dropped once it sleeps.
                    return;
                }
                plan.kept_bytes += in_bytes(kept.len());
                let undefined = self.tags().get(tag).undefined();
                let defined = named.kept.parts(range).flat_map(|part| match undefined {
                    Some(undefined) => undefined.defined_within(part),
                    None => vec![part],
                });
                plan.kept.extend(defined.map(|part| (tag, part)));
                dropped
            }
        };
        let ranges = runs(&unsaved).into_iter();
        let ranges = ranges.map(|run| shape.granule_range(range.addr, run.start, run.len()));
        plan.unsaved.extend(ranges.map(|range| (tag, key, range)));
        let stored_as = self.tags().get(tag).stored_as();
        let are_kept = action == SleepAction::Drop;
        let extents = Extents { most_bytes: shape.chunk_bytes, stored_as, are_kept };
        plan.saves.extend(saves(self.heap(), self.backups(), (key, segment), extents, &unsaved));
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
