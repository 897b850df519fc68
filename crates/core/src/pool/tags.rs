//! The tags of a pool: what each is, where its bytes are, and who works on it.
//!
//! A tag's bytes are in one place at a time ([`Residence`]), and every change of it is a call here. Whoever sleeps or
//! wakes a tag has it alone; others are its guests ([`super::gate`]).

use super::error::{PoolError, Result};
use super::gate::Gate;
use super::keys::TagKey;
use super::undefined::Undefined;
use crate::driver::DeviceRange;
use crate::tag::{Changes, Dropped, SleepAction, Tag, TagPolicy, TagState};

/// All tags of a pool.
#[derive(Debug, Default)]
pub(super) struct Tags {
    entries: Vec<TagEntry>,
}

/// One tag.
#[derive(Debug)]
pub(super) struct TagEntry {
    name: Tag,
    policy: TagPolicy,
    /// Whether the policy was chosen by the user.
    is_declared: bool,
    residence: Residence,
    changes: Changes,
    gate: Gate,
    /// Whether who has the tag alone will give memory back.
    falls_asleep: bool,
    /// How many wait to have it alone.
    wanted: u32,
    /// How many sleeps have checked what was promised not to change.
    checks: u64,
    /// How many wakes have compared what has arrived.
    wakes: u64,
}

/// Where the bytes of a tag are.
#[derive(Debug)]
enum Residence {
    /// On the device; what is `undefined` was dropped or lost before, and not written since.
    Awake { undefined: Undefined },
    /// In host memory or nowhere. A failed undo may have left `leftovers` of its memory mapped.
    Asleep { how: SleepAction, leftovers: bool },
    /// On the device, not wholly mapped.
    Stranded { undefined: Undefined },
}

impl Tags {
    pub(super) fn find(&self, tag: &Tag) -> Option<TagKey> {
        self.entries.iter().position(|entry| entry.name == *tag).map(TagKey)
    }

    /// A tag that is not there yet.
    pub(super) fn add(&mut self, tag: &Tag) -> TagKey {
        self.entries.push(TagEntry::new(tag.clone()));
        TagKey(self.entries.len() - 1)
    }

    pub(super) fn get(&self, key: TagKey) -> &TagEntry {
        &self.entries[key.0]
    }

    pub(super) fn get_mut(&mut self, key: TagKey) -> &mut TagEntry {
        &mut self.entries[key.0]
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (TagKey, &TagEntry)> {
        self.entries.iter().enumerate().map(|(nth, entry)| (TagKey(nth), entry))
    }

    /// The tags a request means, each once, by name; every tag of the pool when it names none.
    pub(super) fn selected(&self, op: &'static str, requested: Option<&[Tag]>) -> Result<Vec<TagKey>> {
        let mut keys: Vec<TagKey> = match requested {
            None => self.iter().map(|(key, _)| key).collect(),
            Some(tags) => tags
                .iter()
                .map(|tag| self.find(tag).ok_or_else(|| self.unknown(op, tag)))
                .collect::<Result<_>>()?,
        };
        keys.sort_unstable_by(|a, b| self.get(*a).name.cmp(&self.get(*b).name));
        keys.dedup();
        Ok(keys)
    }

    fn unknown(&self, op: &'static str, tag: &Tag) -> PoolError {
        let mut known: Vec<&str> = self.entries.iter().map(|entry| entry.name.as_str()).collect();
        known.sort_unstable();
        PoolError::UnknownTag { op, tag: tag.clone(), known: known.join(", ") }
    }

    pub(super) fn names(&self, keys: &[TagKey]) -> Vec<Tag> {
        keys.iter().map(|key| self.get(*key).name.clone()).collect()
    }

    /// Refuses what needs the tag's memory while it sleeps.
    pub(super) fn check_awake(&self, op: &'static str, key: TagKey) -> Result<()> {
        let entry = self.get(key);
        if entry.state().is_asleep() {
            return Err(PoolError::Asleep { op, tag: entry.name.clone(), state: entry.state() });
        }
        Ok(())
    }
}

impl TagEntry {
    fn new(name: Tag) -> Self {
        Self {
            policy: TagPolicy::built_in(&name),
            name,
            is_declared: false,
            residence: Residence::Awake { undefined: Undefined::default() },
            changes: Changes::default(),
            gate: Gate::default(),
            falls_asleep: false,
            wanted: 0,
            checks: 0,
            wakes: 0,
        }
    }

    pub(super) fn name(&self) -> &Tag {
        &self.name
    }

    pub(super) fn policy(&self) -> TagPolicy {
        self.policy
    }

    /// Gives it another policy, unless it has one that something relies on.
    pub(super) fn declare(&mut self, policy: TagPolicy, has_blocks: bool) -> Result<()> {
        if self.policy != policy && (has_blocks || self.is_declared) {
            return Err(PoolError::PolicyConflict { tag: self.name.clone() });
        }
        (self.policy, self.is_declared) = (policy, true);
        Ok(())
    }

    /// What is known about changes to its bytes.
    pub(super) fn changes(&self) -> Changes {
        self.changes
    }

    pub(super) fn set_changes(&mut self, changes: Changes) {
        self.changes = changes;
    }

    // ---- where its bytes are ----

    pub(super) fn state(&self) -> TagState {
        match &self.residence {
            Residence::Awake { undefined } if undefined.is_nothing() => TagState::Awake,
            Residence::Awake { .. } => TagState::Undefined,
            Residence::Asleep { how: SleepAction::Backup, .. } => TagState::AsleepBackedUp,
            Residence::Asleep { how: SleepAction::Drop, .. } => TagState::AsleepDropped,
            Residence::Stranded { .. } => TagState::Stranded,
        }
    }

    /// Whether it is awake, and nobody has it alone: its free pieces are free for use.
    pub(super) fn is_ready(&self) -> bool {
        !self.gate.is_closed() && !self.state().is_asleep()
    }

    /// Its memory was given up.
    pub(super) fn fall_asleep(&mut self, how: SleepAction) {
        self.residence = Residence::Asleep { how, leftovers: false };
    }

    /// All of its memory is there again. A tag without blocks has nothing that could be undefined.
    pub(super) fn wake(&mut self, has_blocks: bool) {
        let undefined = match self.residence {
            Residence::Asleep { how: SleepAction::Drop, .. } if self.policy.dropped == Dropped::Undefined => {
                Undefined::all()
            }
            _ => self.undefined_mut().map(std::mem::take).unwrap_or_default(),
        };
        self.residence =
            Residence::Awake { undefined: if has_blocks { undefined } else { Undefined::default() } };
        self.wakes += 1;
    }

    /// Its memory is held, but not wholly mapped.
    pub(super) fn strand(&mut self) {
        let undefined = self.undefined_mut().map(std::mem::take).unwrap_or_default();
        self.residence = Residence::Stranded { undefined };
    }

    /// What is undefined of it, while its memory is held.
    pub(super) fn undefined(&self) -> Option<&Undefined> {
        match &self.residence {
            Residence::Awake { undefined } | Residence::Stranded { undefined } => Some(undefined),
            Residence::Asleep { .. } => None,
        }
    }

    fn undefined_mut(&mut self) -> Option<&mut Undefined> {
        match &mut self.residence {
            Residence::Awake { undefined } | Residence::Stranded { undefined } => Some(undefined),
            Residence::Asleep { .. } => None,
        }
    }

    /// What is in `range` was lost, if its memory is held.
    pub(super) fn lose(&mut self, range: DeviceRange) {
        self.undefined_mut().into_iter().for_each(|undefined| undefined.lose(range));
    }

    /// What was lost of `range` was written again, or is nobody's any more.
    pub(super) fn define(&mut self, range: DeviceRange) {
        self.undefined_mut().into_iter().for_each(|undefined| undefined.define(range));
    }

    /// Its bytes were written again, or none are left. Returns whether any were undefined.
    pub(super) fn restore(&mut self) -> bool {
        let undefined = self.undefined_mut().map(std::mem::take);
        undefined.is_some_and(|undefined| !undefined.is_nothing())
    }

    /// A failed undo may have left memory mapped while it sleeps.
    pub(super) fn note_leftovers(&mut self) {
        if let Residence::Asleep { leftovers, .. } = &mut self.residence {
            *leftovers = true;
        }
    }

    /// Whether memory may be mapped that nobody has use for: it sleeps, and nobody has it alone.
    pub(super) fn has_leftovers(&self) -> bool {
        matches!(self.residence, Residence::Asleep { leftovers: true, .. }) && !self.gate.is_closed()
    }

    // ---- who works on it ----

    pub(super) fn is_taken(&self) -> bool {
        self.gate.is_closed()
    }

    /// Whether nobody works on it.
    pub(super) fn is_free(&self) -> bool {
        self.gate.is_empty()
    }

    /// Keeps it from being taken, if nobody has it alone.
    pub(super) fn enter(&mut self) -> bool {
        self.gate.enter()
    }

    pub(super) fn leave(&mut self) {
        self.gate.leave();
    }

    /// Has it alone, if nobody works on it. Whoever `falls_asleep` with it will give memory back.
    pub(super) fn take(&mut self, falls_asleep: bool) {
        if self.gate.close() {
            self.falls_asleep = falls_asleep;
        }
    }

    pub(super) fn give_back(&mut self) {
        self.gate.open();
        self.falls_asleep = false;
    }

    /// Whether a sleep is under way that will give memory back.
    pub(super) fn falls_asleep(&self) -> bool {
        self.falls_asleep
    }

    /// One more waits to have it alone.
    pub(super) fn want(&mut self) {
        self.wanted += 1;
    }

    pub(super) fn unwant(&mut self) {
        self.wanted -= 1;
    }

    pub(super) fn wanted(&self) -> u32 {
        self.wanted
    }

    // ---- whose turn it is in a spot check ----

    /// How many sleeps have checked what was promised not to change.
    pub(super) fn checks(&self) -> u64 {
        self.checks
    }

    pub(super) fn note_check(&mut self) {
        self.checks += 1;
    }

    /// How many wakes have compared what has arrived.
    pub(super) fn wakes(&self) -> u64 {
        self.wakes
    }
}
