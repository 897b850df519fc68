//! The plan of a sleep: what is copied, what is dropped, and what is given back. Pure.
//!
//! Planning looks at the state and changes nothing; [`super::sleep`] carries the plan out. Conflicts are
//! found here, before anything has happened.

use super::Result;
use super::error::PoolError;
use super::report::{Level, SleepRequest};
use super::segment::{Backing, Segment, SegmentKey};
use super::state::State;
use crate::tag::{SleepAction, Tag, TagState};

/// What a sleep will do.
#[derive(Debug)]
pub(super) struct SleepPlan {
    pub(super) level: Level,
    /// Tags that fall asleep, and how.
    pub(super) tags: Vec<(Tag, SleepAction)>,
    pub(super) already_asleep: Vec<Tag>,
    /// Slots to back up, with their live granules.
    pub(super) saves: Vec<Save>,
    /// Slots whose memory is given back, in order of segment and index.
    pub(super) leaving: Vec<(SegmentKey, usize)>,
    pub(super) release_bytes: u64,
    pub(super) discarded_bytes: u64,
}

/// One slot to back up.
#[derive(Debug)]
pub(super) struct Save {
    pub(super) segment: SegmentKey,
    pub(super) index: usize,
    /// Granules of the slot that hold a live byte, ascending.
    pub(super) granules: Vec<usize>,
}

impl State {
    pub(super) fn plan_sleep(&self, request: &SleepRequest) -> Result<SleepPlan> {
        let mut tags = Vec::new();
        let mut already_asleep = Vec::new();
        let visited = self.selected("sleep", request.tags.as_deref())?;
        for tag in &visited {
            if let Some(action) = self.sleep_action(tag, request.level)? {
                tags.push((tag.clone(), action));
            } else if self.tags.get(tag).is_some_and(|entry| entry.state.is_asleep()) {
                already_asleep.push(tag.clone());
            }
        }
        Ok(self.plan(request.level, tags, already_asleep, &visited))
    }

    /// The plan of dropping tags whatever their policy says, asleep or awake.
    pub(super) fn plan_discard(&self, discarded: &[Tag]) -> Result<SleepPlan> {
        let (mut tags, mut already_asleep) = (Vec::new(), Vec::new());
        let visited = self.selected("discard", Some(discarded))?;
        for tag in &visited {
            match self.tags.get(tag) {
                Some(entry) if entry.state == TagState::AsleepDropped => already_asleep.push(tag.clone()),
                Some(entry) if entry.live_blocks > 0 => tags.push((tag.clone(), SleepAction::Drop)),
                _ => {}
            }
        }
        Ok(self.plan(Level::Two, tags, already_asleep, &visited))
    }

    /// The tags a request means, each once; every tag of the pool when it names none.
    pub(super) fn selected(&self, op: &'static str, requested: Option<&[Tag]>) -> Result<Vec<Tag>> {
        let Some(requested) = requested else { return Ok(self.tags.keys().cloned().collect()) };
        if let Some(tag) = requested.iter().find(|tag| !self.tags.contains_key(tag)) {
            let known: Vec<&str> = self.tags.keys().map(Tag::as_str).collect();
            return Err(PoolError::UnknownTag { op, tag: tag.clone(), known: known.join(", ") });
        }
        let mut tags = requested.to_vec();
        tags.sort_unstable();
        tags.dedup();
        Ok(tags)
    }

    /// How a tag falls asleep at this level; `None` when it sleeps that way already, or has no blocks.
    fn sleep_action(&self, tag: &Tag, level: Level) -> Result<Option<SleepAction>> {
        let Some(entry) = self.tags.get(tag).filter(|entry| entry.live_blocks > 0) else { return Ok(None) };
        let (action, wanted) = match level {
            Level::One => entry.policy.level_1,
            Level::Two => entry.policy.level_2,
        }
        .named();
        match (entry.state, action) {
            (TagState::Awake, _) | (TagState::Undefined, SleepAction::Drop) => Ok(Some(action)),
            (TagState::AsleepBackedUp, SleepAction::Backup)
            | (TagState::AsleepDropped, SleepAction::Drop) => Ok(None),
            (TagState::Undefined, SleepAction::Backup) => {
                Err(PoolError::Undefined { op: "back up by sleeping", tag: tag.clone() })
            }
            (TagState::Stranded, _) => {
                Err(PoolError::Asleep { op: "sleep", tag: tag.clone(), state: entry.state })
            }
            _ => Err(PoolError::SleepConflict { level, tag: tag.clone(), state: entry.state, wanted }),
        }
    }

    fn plan(
        &self,
        level: Level,
        tags: Vec<(Tag, SleepAction)>,
        already_asleep: Vec<Tag>,
        visited: &[Tag],
    ) -> SleepPlan {
        let mut plan = SleepPlan {
            level,
            tags,
            already_asleep,
            saves: Vec::new(),
            leaving: Vec::new(),
            release_bytes: self.ledger.owed_bytes(),
            discarded_bytes: 0,
        };
        for (key, segment) in self.segments.iter().filter(|(_, segment)| visited.contains(&segment.tag)) {
            let action = plan.tags.iter().find(|(tag, _)| *tag == segment.tag).map(|(_, action)| *action);
            self.plan_segment(&mut plan, key, segment, action);
        }
        plan.leaving.sort_unstable();
        plan
    }

    fn plan_segment(
        &self,
        plan: &mut SleepPlan,
        key: SegmentKey,
        segment: &Segment,
        action: Option<SleepAction>,
    ) {
        let asleep = self.tags.get(&segment.tag).is_some_and(|entry| entry.state.is_asleep());
        let live = self.live_granules(segment);
        let mut first = 0;
        for (index, slot) in segment.slots.iter().enumerate() {
            let count = self.granules(slot.bytes);
            let granules: Vec<usize> = (0..count).filter(|granule| live[first + granule]).collect();
            first += count;
            let leaves = action.is_some() || segment.is_idle(index, asleep);
            if leaves && slot.backing != Backing::Absent {
                plan.leaving.push((key, index));
                plan.release_bytes += slot.bytes;
            }
            match action {
                Some(SleepAction::Backup) if !granules.is_empty() => {
                    plan.saves.push(Save { segment: key, index, granules });
                }
                Some(SleepAction::Drop) => plan.discarded_bytes += granules.len() as u64 * self.granule_bytes,
                _ => {}
            }
        }
    }

    /// For each granule of a segment, whether a live block touches it.
    fn live_granules(&self, segment: &Segment) -> Vec<bool> {
        let mut live = vec![false; self.granules(segment.range.bytes)];
        for block in self.blocks.walk(segment.first).filter(|block| block.requested_bytes.is_some()) {
            let touched = self.granules(block.offset)..self.granules(block.offset + block.bytes - 1) + 1;
            live[touched].fill(true);
        }
        live
    }

    /// Whole granules in `bytes`. A segment's granules are counted in memory, so their number fits.
    pub(super) fn granules(&self, bytes: u64) -> usize {
        usize::try_from(bytes / self.granule_bytes).unwrap_or(usize::MAX)
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
