//! The tags of a pool: what each is, where its bytes are, and which calls work on it ([`crate::pool::tools::tag_lock`]).
//!
//! Tags are found by name in constant time, and forgotten when nothing is known of them. [`TagKey`] says how
//! to keep a key valid.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};

use slotmap::SlotMap;

use super::undefined_ranges::Undefined;
use crate::driver::DeviceRange;
use crate::pool::tools::error::{PoolError, Result};
use crate::pool::tools::keys::TagKey;
use crate::pool::tools::report::SleepRequest;
use crate::pool::tools::tag_lock::TagLock;
use crate::pool::tools::visits;
use crate::tag::{Changes, Dropped, SleepAction, StoredAs, Tag, TagPolicy, TagState};

/// Tags of this process that have fallen asleep, of any pool.
static SLEEPS: AtomicU64 = AtomicU64::new(0);

/// The fewest tags worth a sweep.
const SWEEP_MIN: usize = 64;

#[derive(Debug)]
pub(in crate::pool) struct Tags {
    entries: SlotMap<TagKey, TagEntry>,
    keys: HashMap<Tag, TagKey>,
    /// Found last, and likely to be looked up next.
    recent: TagKey,
    built_in: Vec<TagKey>,
    /// All [with leftovers](TagEntry::has_leftovers), and some that had some.
    left: BTreeSet<TagKey>,
    pins: usize,
    sweep_above: usize,
}

/// The tags that a request is about.
#[derive(Debug, Clone, Copy)]
pub(in crate::pool) struct Chosen<'a> {
    /// `None`: all.
    tags: Option<&'a [Tag]>,
    but: &'a [Tag],
}

impl<'a> Chosen<'a> {
    pub(in crate::pool) fn by(request: &'a SleepRequest) -> Self {
        Self { tags: request.tags.as_deref(), but: &request.kept_awake }
    }
}

impl<'a> From<Option<&'a [Tag]>> for Chosen<'a> {
    fn from(tags: Option<&'a [Tag]>) -> Self {
        Self { tags, but: &[] }
    }
}

#[derive(Debug)]
pub(in crate::pool) struct TagEntry {
    name: Tag,
    policy: TagPolicy,
    /// Whether the user chose the policy.
    is_declared: bool,
    residence: Residence,
    changes: Changes,
    stored_as: StoredAs,
    tag_lock: TagLock,
    /// Whether the exclusive access will release memory.
    falls_asleep: bool,
    /// How many calls wait for exclusive access.
    wanted: u32,
    /// Sleeps that have checked what was promised not to change.
    checks: u64,
    /// Wakes that have compared what was loaded.
    wakes: u64,
}

#[derive(Debug)]
enum Residence {
    /// On the device. `undefined` was dropped or lost, and not written since.
    Awake { undefined: Undefined },
    /// In its backups or nowhere, but for the bytes that were `kept` of dropped ones. A failed undo may have left
    /// `leftovers` of its memory mapped. Those that sleep longer have lower numbers.
    Asleep { how: SleepAction, kept: Vec<DeviceRange>, leftovers: bool, number: u64 },
    /// On the device, not wholly mapped.
    Stranded { undefined: Undefined },
}

impl Tags {
    pub(in crate::pool) fn new(built_in: impl IntoIterator<Item = Tag>) -> Self {
        let (entries, keys, recent, left, pins) = Default::default();
        let built_in_keys = Vec::new();
        let mut tags =
            Self { entries, keys, recent, built_in: built_in_keys, left, pins, sweep_above: SWEEP_MIN };
        tags.built_in = built_in.into_iter().map(|tag| tags.add(&tag)).collect();
        tags
    }

    #[inline]
    pub(in crate::pool) fn find_recent(&self, tag: &Tag) -> Option<TagKey> {
        self.entries.get(self.recent).is_some_and(|entry| entry.name == *tag).then_some(self.recent)
    }

    pub(in crate::pool) fn find(&self, tag: &Tag) -> Option<TagKey> {
        self.keys.get(tag).copied()
    }

    pub(in crate::pool) fn add(&mut self, tag: &Tag) -> TagKey {
        let key = self.entries.insert(TagEntry::new(tag.clone()));
        self.keys.insert(tag.clone(), key);
        key
    }

    pub(in crate::pool) fn set_recent(&mut self, key: TagKey) {
        self.recent = key;
    }

    /// Panics if the tag was forgotten, which the rules of [`TagKey`] prevent.
    pub(in crate::pool) fn get(&self, key: TagKey) -> &TagEntry {
        visits::count();
        &self.entries[key]
    }

    pub(in crate::pool) fn get_mut(&mut self, key: TagKey) -> &mut TagEntry {
        visits::count();
        &mut self.entries[key]
    }

    pub(in crate::pool) fn iter(&self) -> impl Iterator<Item = (TagKey, &TagEntry)> {
        self.entries.iter().inspect(|_| visits::count())
    }

    /// Whether it is known, and sleeps.
    pub(in crate::pool) fn sleeps(&self, key: TagKey) -> bool {
        self.entries.get(key).is_some_and(|entry| entry.sleep_number().is_some())
    }

    pub(in crate::pool) fn count(&self) -> usize {
        self.entries.len()
    }

    /// Keeps every tag until [`Tags::unpin`].
    pub(in crate::pool) fn pin(&mut self) {
        self.pins += 1;
    }

    pub(in crate::pool) fn unpin(&mut self) {
        self.pins = self.pins.saturating_sub(1);
    }

    /// Whether a sweep pays.
    pub(in crate::pool) fn is_crowded(&self) -> bool {
        self.entries.len() > self.sweep_above && self.pins == 0
    }

    /// Forgets tags without settings that `is_empty`, and returns them. The next sweep comes at twice as many
    /// tags.
    pub(in crate::pool) fn forget(&mut self, is_empty: impl Fn(TagKey) -> bool) -> Vec<TagKey> {
        let built_in = &self.built_in;
        let is_unused = |key, entry: &TagEntry| !built_in.contains(&key) && entry.is_plain() && is_empty(key);
        let unused = self.entries.iter().filter(|(key, entry)| is_unused(*key, entry)).map(|(key, _)| key);
        let unused: Vec<TagKey> = unused.collect();
        for entry in unused.iter().filter_map(|key| self.entries.remove(*key)) {
            self.keys.remove(&entry.name);
        }
        self.sweep_above = self.entries.len() + self.entries.len().max(SWEEP_MIN);
        unused
    }

    /// Memory of these tags, which sleep, may be mapped though nothing uses it.
    pub(in crate::pool) fn note_leftovers(&mut self, keys: &[TagKey]) {
        for key in keys {
            if let Residence::Asleep { leftovers, .. } = &mut self.entries[*key].residence {
                *leftovers = true;
            }
        }
        self.left.extend(keys);
        let entries = &self.entries;
        self.left.retain(|key| entries.get(*key).is_some_and(TagEntry::may_have_leftovers));
    }

    /// Those with leftovers, in order of their keys.
    pub(in crate::pool) fn with_leftovers(&self) -> impl Iterator<Item = TagKey> + '_ {
        let has_some = |key: &TagKey| self.entries.get(*key).is_some_and(TagEntry::has_leftovers);
        debug_assert!(
            self.iter().all(|(key, entry)| !entry.has_leftovers() || self.left.contains(&key)),
            "one is missing"
        );
        self.left.iter().copied().filter(has_some)
    }

    /// Each once, by name.
    pub(in crate::pool) fn selected<'a>(
        &self,
        op: &'static str,
        chosen: impl Into<Chosen<'a>>,
    ) -> Result<Vec<TagKey>> {
        let Chosen { tags, but } = chosen.into();
        let find = |tag| self.find(tag).ok_or_else(|| self.unknown(op, tag));
        let mut keys: Vec<TagKey> = match tags {
            None => self.iter().map(|(key, _)| key).collect(),
            Some(tags) => tags.iter().map(find).collect::<Result<_>>()?,
        };
        let but: HashSet<TagKey> = but.iter().map(find).collect::<Result<_>>()?;
        keys.retain(|key| !but.contains(key));
        keys.sort_unstable_by(|a, b| self.entries[*a].name.cmp(&self.entries[*b].name));
        keys.dedup();
        Ok(keys)
    }

    fn unknown(&self, op: &'static str, tag: &Tag) -> PoolError {
        let mut known: Vec<&str> = self.entries.values().map(|entry| entry.name.as_str()).collect();
        known.sort_unstable();
        PoolError::UnknownTag { op, tag: tag.clone(), known: known.join(", ") }
    }

    pub(in crate::pool) fn names(&self, keys: &[TagKey]) -> Vec<Tag> {
        keys.iter().map(|key| self.get(*key).name.clone()).collect()
    }

    pub(in crate::pool) fn check_awake(&self, op: &'static str, key: TagKey) -> Result<()> {
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
            stored_as: StoredAs::default(),
            tag_lock: TagLock::default(),
            falls_asleep: false,
            wanted: 0,
            checks: 0,
            wakes: 0,
        }
    }

    /// Whether a new tag of its name would be the same, and no call uses it or waits for it.
    fn is_plain(&self) -> bool {
        let is_idle = self.tag_lock.is_empty() && self.wanted == 0;
        let is_new = self.state() == TagState::Awake;
        let has_settings =
            self.is_declared || self.changes != Changes::default() || self.stored_as != StoredAs::default();
        is_idle && is_new && !has_settings
    }

    pub(in crate::pool) fn name(&self) -> &Tag {
        &self.name
    }

    pub(in crate::pool) fn policy(&self) -> TagPolicy {
        self.policy
    }

    /// Sets the policy, unless something relies on the present one.
    pub(in crate::pool) fn declare(&mut self, policy: TagPolicy, has_blocks: bool) -> Result<()> {
        if self.policy != policy && (has_blocks || self.is_declared) {
            return Err(PoolError::PolicyConflict { tag: self.name.clone() });
        }
        (self.policy, self.is_declared) = (policy, true);
        Ok(())
    }

    pub(in crate::pool) fn changes(&self) -> Changes {
        self.changes
    }

    pub(in crate::pool) fn set_changes(&mut self, changes: Changes) {
        self.changes = changes;
    }

    pub(in crate::pool) fn stored_as(&self) -> StoredAs {
        self.stored_as
    }

    pub(in crate::pool) fn set_stored_as(&mut self, stored_as: StoredAs) {
        self.stored_as = stored_as;
    }

    pub(in crate::pool) fn state(&self) -> TagState {
        match &self.residence {
            Residence::Awake { undefined } if undefined.is_nothing() => TagState::Awake,
            Residence::Awake { .. } => TagState::Undefined,
            Residence::Asleep { how: SleepAction::Backup, .. } => TagState::AsleepBackedUp,
            Residence::Asleep { how: SleepAction::Drop, .. } => TagState::AsleepDropped,
            Residence::Stranded { .. } => TagState::Stranded,
        }
    }

    /// Whether it is awake and under no exclusive access, so that its free blocks may be used.
    pub(in crate::pool) fn is_ready(&self) -> bool {
        !self.tag_lock.is_closed() && !self.state().is_asleep()
    }

    /// `kept`, of a tag that is dropped, ascends without overlaps.
    pub(in crate::pool) fn fall_asleep(&mut self, how: SleepAction, kept: Vec<DeviceRange>) {
        let number = SLEEPS.fetch_add(1, Ordering::Relaxed);
        self.residence = Residence::Asleep { how, kept, leftovers: false, number };
    }

    /// Its place among all tags of the process that sleep: the lowest has slept the longest.
    pub(in crate::pool) fn sleep_number(&self) -> Option<u64> {
        match self.residence {
            Residence::Asleep { number, .. } => Some(number),
            _ => None,
        }
    }

    /// Without blocks, nothing can be undefined.
    pub(in crate::pool) fn wake(&mut self, has_blocks: bool) {
        let undefined = match &self.residence {
            Residence::Asleep { how: SleepAction::Drop, kept, .. }
                if self.policy.dropped == Dropped::Undefined =>
            {
                Undefined::all_but(kept)
            }
            _ => self.undefined_mut().map(std::mem::take).unwrap_or_default(),
        };
        self.residence =
            Residence::Awake { undefined: if has_blocks { undefined } else { Undefined::default() } };
        self.wakes += 1;
    }

    pub(in crate::pool) fn strand(&mut self) {
        let undefined = self.undefined_mut().map(std::mem::take).unwrap_or_default();
        self.residence = Residence::Stranded { undefined };
    }

    /// `None` while it sleeps.
    pub(in crate::pool) fn undefined(&self) -> Option<&Undefined> {
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

    /// The bytes in `range` are lost, if its memory is held.
    pub(in crate::pool) fn lose(&mut self, range: DeviceRange) {
        self.undefined_mut().into_iter().for_each(|undefined| undefined.lose(range));
    }

    /// The bytes in `range` were rewritten, or freed.
    pub(in crate::pool) fn define(&mut self, range: DeviceRange) {
        self.undefined_mut().into_iter().for_each(|undefined| undefined.define(range));
    }

    /// Returns whether any bytes were undefined.
    pub(in crate::pool) fn restore(&mut self) -> bool {
        let undefined = self.undefined_mut().map(std::mem::take);
        undefined.is_some_and(|undefined| !undefined.is_nothing())
    }

    fn may_have_leftovers(&self) -> bool {
        matches!(self.residence, Residence::Asleep { leftovers: true, .. })
    }

    /// Whether memory may be mapped that nothing uses: it sleeps, under no exclusive access.
    fn has_leftovers(&self) -> bool {
        self.may_have_leftovers() && !self.tag_lock.is_closed()
    }

    pub(in crate::pool) fn is_taken(&self) -> bool {
        self.tag_lock.is_closed()
    }

    pub(in crate::pool) fn is_free(&self) -> bool {
        self.tag_lock.is_empty()
    }

    pub(in crate::pool) fn enter(&mut self) -> bool {
        self.tag_lock.enter()
    }

    pub(in crate::pool) fn leave(&mut self) {
        self.tag_lock.leave();
    }

    pub(in crate::pool) fn take(&mut self, falls_asleep: bool) {
        if self.tag_lock.close() {
            self.falls_asleep = falls_asleep;
        }
    }

    pub(in crate::pool) fn release(&mut self) {
        self.tag_lock.open();
        self.falls_asleep = false;
    }

    pub(in crate::pool) fn falls_asleep(&self) -> bool {
        self.falls_asleep
    }

    pub(in crate::pool) fn want(&mut self) {
        self.wanted += 1;
    }

    pub(in crate::pool) fn unwant(&mut self) {
        self.wanted -= 1;
    }

    pub(in crate::pool) fn wanted(&self) -> u32 {
        self.wanted
    }

    pub(in crate::pool) fn checks(&self) -> u64 {
        self.checks
    }

    pub(in crate::pool) fn note_check(&mut self) {
        self.checks += 1;
    }

    pub(in crate::pool) fn wakes(&self) -> u64 {
        self.wakes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find_or_add(tags: &mut Tags, name: &str) -> TagKey {
        let tag = Tag::new(name).unwrap();
        tags.find(&tag).unwrap_or_else(|| tags.add(&tag))
    }

    #[test]
    fn a_tag_that_comes_back_is_another_one() {
        let mut tags = Tags::new([Tag::weights()]);
        let weights = tags.find(&Tag::weights());
        assert!(weights.is_some());
        let lora = Tag::new("lora").unwrap();
        assert_eq!(tags.find(&lora), None);
        let key = tags.add(&lora);
        tags.set_recent(key);
        assert_eq!((tags.find_recent(&lora), tags.find_recent(&Tag::weights())), (Some(key), None));
        assert_eq!((tags.find(&lora), tags.count()), (Some(key), 2));
        assert!(tags.forget(|_| false).is_empty(), "it holds something");
        tags.get_mut(key).want();
        assert!(tags.forget(|_| true).is_empty(), "a call waits for it");
        tags.get_mut(key).unwant();
        tags.get_mut(key).enter();
        assert!(tags.forget(|_| true).is_empty(), "a call works on it");
        tags.get_mut(key).leave();
        assert_eq!(tags.forget(|_| true), [key]);
        assert_eq!((tags.find(&lora), tags.find_recent(&lora), tags.count()), (None, None, 1));
        assert_ne!(tags.add(&lora), key);
        assert_eq!(tags.find(&Tag::weights()), weights, "a built-in one stays");
    }

    #[test]
    fn settings_of_a_tag_are_not_forgotten() {
        let mut tags = Tags::new([]);
        let [policy, changes, stored, asleep] =
            ["policy", "changes", "stored", "asleep"].map(|name| find_or_add(&mut tags, name));
        tags.get_mut(policy).declare(TagPolicy::PRESERVED, false).unwrap();
        tags.get_mut(changes).set_changes(Changes::Immutable);
        tags.get_mut(stored).set_stored_as(StoredAs::Viewable);
        tags.get_mut(asleep).fall_asleep(SleepAction::Backup, Vec::new());
        assert!(tags.forget(|_| true).is_empty());
        tags.get_mut(asleep).wake(false);
        assert_eq!(tags.forget(|_| true), [asleep]);
    }

    #[test]
    fn sweeps_come_when_the_number_has_doubled_and_no_tag_is_pinned() {
        let mut tags = Tags::new([]);
        let mut sweeps = 0;
        for n in 0..1_000 {
            find_or_add(&mut tags, &format!("t{n}"));
            if tags.is_crowded() {
                sweeps += 1;
                assert!(tags.forget(|_| false).is_empty());
            }
        }
        assert_eq!((sweeps, tags.count()), (4, 1_000));
        assert_eq!(tags.forget(|_| true).len(), 1_000);
        tags.pin();
        for n in 0..=SWEEP_MIN {
            find_or_add(&mut tags, &format!("u{n}"));
        }
        assert!(!tags.is_crowded());
        tags.unpin();
        assert!(tags.is_crowded());
    }
}
