//! The plan of a sleep: what is copied, what is dropped, and what is given back. Pure.
//!
//! Planning looks at the state and changes nothing; [`super::sleep`] carries the plan out. Conflicts are
//! found here, before anything has happened.

use super::Result;
use super::blocks::Kind;
use super::error::PoolError;
use super::report::Level;
use super::segment::{Place, Segment, SegmentKey};
use super::state::{State, TagKey};
use super::vm::{Backing, Counters};
use crate::tag::{SleepAction, Tag, TagState};

/// What errors call it.
pub(super) const BACK_UP: &str = "back up by sleeping";

/// What a sleep will do.
#[derive(Debug)]
pub(super) struct SleepPlan {
    pub(super) level: Level,
    /// Tags that fall asleep, and how.
    pub(super) tags: Vec<(TagKey, SleepAction)>,
    pub(super) already_asleep: Vec<TagKey>,
    /// What to back up, with the live granules.
    pub(super) saves: Vec<Save>,
    /// Chunks whose memory is given back, in order of segment and address.
    pub(super) leaving: Vec<Place>,
    pub(super) release_bytes: u64,
    pub(super) discarded_bytes: u64,
}

/// One [stretch](Segment::stretches) to back up.
#[derive(Debug)]
pub(super) struct Save {
    pub(super) place: Place,
    pub(super) bytes: u64,
    /// Granules of the stretch that hold a live byte, ascending.
    pub(super) granules: Vec<usize>,
}

impl State {
    pub(super) fn plan_sleep(
        &self,
        level: Level,
        visited: &[TagKey],
        counters: &Counters,
    ) -> Result<SleepPlan> {
        let mut tags = Vec::new();
        let mut already_asleep = Vec::new();
        for tag in visited.iter().copied() {
            if let Some(action) = self.sleep_action(tag, level)? {
                tags.push((tag, action));
            } else if self.tag(tag).state.is_asleep() {
                already_asleep.push(tag);
            }
        }
        Ok(self.plan(level, tags, already_asleep, visited, counters))
    }

    /// The plan of dropping tags whatever their policy says, asleep or awake.
    pub(super) fn plan_discard(&self, visited: &[TagKey], counters: &Counters) -> SleepPlan {
        let (mut tags, mut already_asleep) = (Vec::new(), Vec::new());
        for tag in visited.iter().copied() {
            let entry = self.tag(tag);
            if entry.state == TagState::AsleepDropped {
                already_asleep.push(tag);
            } else if entry.live_blocks > 0 {
                tags.push((tag, SleepAction::Drop));
            }
        }
        self.plan(Level::Two, tags, already_asleep, visited, counters)
    }

    /// The tags a request means, each once, by name; every tag of the pool when it names none.
    pub(super) fn selected(&self, op: &'static str, requested: Option<&[Tag]>) -> Result<Vec<TagKey>> {
        let mut keys: Vec<TagKey> = match requested {
            None => (0..self.tags.len()).map(TagKey).collect(),
            Some(tags) => tags
                .iter()
                .map(|tag| self.find_tag(tag).ok_or_else(|| self.unknown_tag(op, tag)))
                .collect::<Result<_>>()?,
        };
        keys.sort_unstable_by(|a, b| self.tag(*a).tag.cmp(&self.tag(*b).tag));
        keys.dedup();
        Ok(keys)
    }

    fn unknown_tag(&self, op: &'static str, tag: &Tag) -> PoolError {
        let mut known: Vec<&str> = self.tags.iter().map(|entry| entry.tag.as_str()).collect();
        known.sort_unstable();
        PoolError::UnknownTag { op, tag: tag.clone(), known: known.join(", ") }
    }

    /// Names of tags.
    pub(super) fn names(&self, tags: &[TagKey]) -> Vec<Tag> {
        tags.iter().map(|tag| self.tag(*tag).tag.clone()).collect()
    }

    /// How a tag falls asleep at this level; `None` when it sleeps that way already, or has no blocks.
    fn sleep_action(&self, tag: TagKey, level: Level) -> Result<Option<SleepAction>> {
        let entry = self.tag(tag);
        if entry.live_blocks == 0 {
            return Ok(None);
        }
        let (action, wanted) = match level {
            Level::One => entry.policy.level_1,
            Level::Two => entry.policy.level_2,
        }
        .named();
        match (entry.state, action) {
            (TagState::Awake, _) | (TagState::Undefined, SleepAction::Drop) => Ok(Some(action)),
            (TagState::AsleepBackedUp, SleepAction::Backup)
            | (TagState::AsleepDropped, SleepAction::Drop) => Ok(None),
            (TagState::Undefined, SleepAction::Backup) => Err(match self.lost_of(tag) {
                lost if lost.is_empty() => PoolError::Undefined { op: BACK_UP, tag: entry.tag.clone() },
                lost => PoolError::Lost { op: BACK_UP, lost },
            }),
            (TagState::Stranded, _) => {
                Err(PoolError::Asleep { op: "sleep", tag: entry.tag.clone(), state: entry.state })
            }
            _ => {
                let tag = entry.tag.clone();
                Err(PoolError::SleepConflict { level, tag, state: entry.state, wanted })
            }
        }
    }

    fn plan(
        &self,
        level: Level,
        tags: Vec<(TagKey, SleepAction)>,
        already_asleep: Vec<TagKey>,
        visited: &[TagKey],
        counters: &Counters,
    ) -> SleepPlan {
        let mut plan = SleepPlan {
            level,
            tags,
            already_asleep,
            saves: Vec::new(),
            leaving: Vec::new(),
            release_bytes: counters.owed_bytes() + counters.loose_bytes(),
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
        let asleep =
            matches!(self.tag(segment.tag).state, TagState::AsleepBackedUp | TagState::AsleepDropped);
        let uses = self.uses_of_granules(segment);
        for (at, chunk) in &segment.chunks {
            let first = self.granules(at - segment.range.addr);
            let of_chunk = &uses[first..first + self.granules(chunk.bytes)];
            let leaves = action.is_some() || asleep || of_chunk.iter().all(|granule| *granule == Use::Idle);
            if leaves && chunk.backing != Backing::Absent {
                plan.leaving.push((key, *at));
                plan.release_bytes += chunk.bytes;
            }
            match action {
                Some(SleepAction::Backup) => {
                    for stretch in segment.stretches(*at, at + chunk.bytes, self.shape.chunk_bytes) {
                        let first = self.granules(stretch.addr - at);
                        let uses = &of_chunk[first..first + self.granules(stretch.bytes)];
                        let granules: Vec<usize> = live_granules(uses).collect();
                        if !granules.is_empty() {
                            plan.saves.push(Save {
                                place: (key, stretch.addr),
                                bytes: stretch.bytes,
                                granules,
                            });
                        }
                    }
                }
                Some(SleepAction::Drop) => {
                    plan.discarded_bytes += live_granules(of_chunk).count() as u64 * self.shape.granule_bytes;
                }
                None => {}
            }
        }
    }

    /// For each granule of a segment, the most that any block does with it.
    pub(super) fn uses_of_granules(&self, segment: &Segment) -> Vec<Use> {
        let base = segment.range.addr;
        let mut uses = vec![Use::Idle; self.granules(segment.range.bytes)];
        for (kind, block) in self.blocks.walk(segment.first) {
            let is = match kind {
                Kind::Live => Use::Live,
                Kind::Waiting => Use::Pending,
                Kind::Fine | Kind::Coarse | Kind::Bound if !self.is_quiet(block) => Use::Pending,
                _ => continue,
            };
            let touched = self.granules(block.addr - base)..self.granules(block.end() - 1 - base) + 1;
            uses[touched].iter_mut().for_each(|granule| *granule = (*granule).max(is));
        }
        uses
    }
}

fn live_granules(uses: &[Use]) -> impl Iterator<Item = usize> {
    uses.iter().enumerate().filter(|(_, is)| **is == Use::Live).map(|(granule, _)| granule)
}

/// What a granule is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Use {
    /// Nothing.
    Idle,
    /// Work on freed memory may be in flight.
    Pending,
    /// A live block touches it.
    Live,
}

impl SleepAction {
    fn named(self) -> (Self, &'static str) {
        match self {
            Self::Backup => (self, "backed up"),
            Self::Drop => (self, "dropped"),
        }
    }
}
