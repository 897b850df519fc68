//! A reference model of the pool: blocks in a map, bytes as seeds of patterns, tag states by the table.
//!
//! It predicts the result of each operation and what every block must read as afterwards. It knows nothing of
//! segments, chunks or backings, so that comparing with it means something.

use std::collections::BTreeMap;

use poorwill_core::{Dropped, Level, SleepAction, Tag, TagPolicy, TagState};

/// What a block must read as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reads {
    /// A pattern.
    Pattern {
        /// Its seed.
        seed: u64,
        /// Offset of the block in the pattern, in bytes.
        offset: u64,
    },
    /// Zeros.
    Zeros,
    /// Anything, but reading succeeds.
    Anything,
    /// Reading is refused.
    Refused,
}

#[derive(Debug, Clone)]
struct ModelBlock {
    tag: Tag,
    bytes: u64,
    reads: Reads,
}

/// The model; the caller numbers the blocks.
#[derive(Debug, Clone, Default)]
pub struct Model {
    blocks: BTreeMap<u64, ModelBlock>,
    tags: BTreeMap<Tag, (TagPolicy, TagState)>,
}

impl Model {
    /// Gives a tag a policy before its first block.
    pub fn declare(&mut self, tag: Tag, policy: TagPolicy) {
        self.tags.insert(tag, (policy, TagState::Awake));
    }

    /// The state of a tag.
    #[must_use]
    pub fn state(&self, tag: &Tag) -> TagState {
        self.tags.get(tag).map_or(TagState::Awake, |(_, state)| *state)
    }

    /// Allocates a block, if its tag is awake.
    pub fn alloc(&mut self, id: u64, tag: &Tag, bytes: u64) -> bool {
        let entry =
            self.tags.entry(tag.clone()).or_insert_with(|| (TagPolicy::built_in(tag), TagState::Awake));
        if entry.1.is_asleep() {
            return false;
        }
        self.blocks.insert(id, ModelBlock { tag: tag.clone(), bytes, reads: Reads::Anything });
        true
    }

    /// Frees a block.
    pub fn free(&mut self, id: u64) {
        let Some(gone) = self.blocks.remove(&id) else { return };
        if self.used(Some(std::slice::from_ref(&gone.tag))).is_empty() {
            let entry = self.tags.get_mut(&gone.tag).filter(|(_, state)| *state == TagState::Undefined);
            entry.into_iter().for_each(|(_, state)| *state = TagState::Awake);
        }
    }

    /// `rest` are the remaining blocks: number, offset in the old block, and requested bytes.
    pub fn free_part(&mut self, id: u64, rest: &[(u64, u64, u64)]) {
        let Some(whole) = self.blocks.get(&id).cloned() else { return };
        for (id, at, bytes) in rest.iter().copied() {
            let reads = match whole.reads {
                Reads::Pattern { seed, offset } => Reads::Pattern { seed, offset: offset + at },
                reads => reads,
            };
            self.blocks.insert(id, ModelBlock { tag: whole.tag.clone(), bytes, reads });
        }
        self.free(id);
    }

    /// Fills the block with a pattern, if its tag is awake.
    pub fn fill(&mut self, id: u64, seed: u64) -> bool {
        let Some(block) = self.blocks.get_mut(&id) else { return false };
        if self.tags.get(&block.tag).is_some_and(|(_, state)| state.is_asleep()) {
            return false;
        }
        block.reads = Reads::Pattern { seed, offset: 0 };
        true
    }

    /// The live blocks: number, tag, requested bytes, and what they must read as now.
    pub fn blocks(&self) -> impl Iterator<Item = (u64, &Tag, u64, Reads)> {
        self.blocks.iter().map(|(id, block)| {
            let reads = if self.state(&block.tag) == TagState::Awake { block.reads } else { Reads::Refused };
            (*id, &block.tag, block.bytes, reads)
        })
    }

    /// Returns the tags that fall asleep, or `None` if the pool must refuse.
    pub fn sleep(&mut self, level: Level, tags: Option<&[Tag]>) -> Option<Vec<Tag>> {
        let mut falling = Vec::new();
        for tag in self.used(tags) {
            let (policy, state) = self.tags[&tag];
            let action = if level == Level::One { policy.level_1 } else { policy.level_2 };
            match (state, action) {
                (TagState::Awake, _) | (TagState::Undefined, SleepAction::Drop) => {
                    falling.push((tag, action));
                }
                (TagState::AsleepBackedUp, SleepAction::Backup)
                | (TagState::AsleepDropped, SleepAction::Drop) => {}
                _ => return None,
            }
        }
        Some(falling.into_iter().map(|(tag, action)| self.fall(tag, action)).collect())
    }

    /// Drops tags, and returns those that were not dropped before.
    pub fn discard(&mut self, tags: &[Tag]) -> Vec<Tag> {
        let falling: Vec<Tag> = self
            .used(Some(tags))
            .into_iter()
            .filter(|tag| self.state(tag) != TagState::AsleepDropped)
            .collect();
        falling.into_iter().map(|tag| self.fall(tag, SleepAction::Drop)).collect()
    }

    /// Wakes tags, and returns those that wake.
    pub fn wake(&mut self, tags: Option<&[Tag]>) -> Vec<Tag> {
        let waking: Vec<Tag> = self
            .tags
            .iter()
            .filter(|(tag, (_, state))| state.is_asleep() && tags.is_none_or(|tags| tags.contains(tag)))
            .map(|(tag, _)| tag.clone())
            .collect();
        for tag in &waking {
            let used = self.blocks.values().any(|block| block.tag == *tag);
            let (policy, state) = self.tags[tag];
            let undefined = state == TagState::AsleepDropped && policy.dropped == Dropped::Undefined && used;
            let after = if undefined { TagState::Undefined } else { TagState::Awake };
            self.tags.insert(tag.clone(), (policy, after));
        }
        waking
    }

    /// Ends *undefined*; `None` if the pool must refuse.
    pub fn mark_restored(&mut self, tag: &Tag) -> Option<()> {
        let (_, state) = self.tags.get_mut(tag)?;
        if state.is_asleep() {
            return None;
        }
        *state = TagState::Awake;
        Some(())
    }

    fn used(&self, tags: Option<&[Tag]>) -> Vec<Tag> {
        let named = |tag: &&Tag| tags.is_none_or(|tags| tags.contains(tag));
        let used = |tag: &&Tag| self.blocks.values().any(|block| block.tag == **tag);
        self.tags.keys().filter(named).filter(used).cloned().collect()
    }

    fn fall(&mut self, tag: Tag, action: SleepAction) -> Tag {
        let (policy, _) = self.tags[&tag];
        let is_dropped = action == SleepAction::Drop;
        let state = if is_dropped { TagState::AsleepDropped } else { TagState::AsleepBackedUp };
        if is_dropped {
            let reads = if policy.dropped == Dropped::Zeros { Reads::Zeros } else { Reads::Anything };
            self.blocks.values_mut().filter(|block| block.tag == tag).for_each(|block| block.reads = reads);
        }
        self.tags.insert(tag.clone(), (policy, state));
        tag
    }
}
