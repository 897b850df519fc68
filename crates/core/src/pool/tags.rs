//! The tags of a pool: found by name in constant time, and forgotten when nothing is known of them any more.
//!
//! Keys are never those of another tag. Whoever keeps some without the tag's gate being closed or a guest being inside
//! [holds](Tags::hold) all tags meanwhile.

use std::collections::HashMap;

use slotmap::SlotMap;

use super::state::TagEntry;
use crate::tag::Tag;

slotmap::new_key_type! {
    /// A tag of a pool.
    pub(super) struct TagKey;
}

/// The least number of tags that is worth a look at what can be forgotten.
const SWEEP_MIN: usize = 64;

/// All tags that a pool knows.
#[derive(Debug)]
pub(super) struct Tags {
    entries: SlotMap<TagKey, TagEntry>,
    keys: HashMap<Tag, TagKey>,
    /// The one that was found last is asked for again most often.
    recent: TagKey,
    /// Which stay whatever is known of them.
    built_in: Vec<TagKey>,
    /// How many want none to be forgotten.
    holds: usize,
    /// More than so many, and it is time to forget some.
    sweep_above: usize,
}

impl Tags {
    /// A pool's tags in the beginning, which stay.
    pub(super) fn new(built_in: impl IntoIterator<Item = Tag>) -> Self {
        let (entries, keys, recent, holds) = Default::default();
        let mut tags = Self { entries, keys, recent, built_in: Vec::new(), holds, sweep_above: SWEEP_MIN };
        tags.built_in = built_in.into_iter().map(|tag| tags.insert(&tag)).collect();
        tags
    }

    fn insert(&mut self, tag: &Tag) -> TagKey {
        let key = self.entries.insert(TagEntry::new(tag.clone()));
        self.keys.insert(tag.clone(), key);
        key
    }

    /// The tag of this name, if it is known.
    pub(super) fn find(&self, tag: &Tag) -> Option<TagKey> {
        self.keys.get(tag).copied()
    }

    /// The tag of this name, if it is the one that was found last.
    #[inline]
    pub(super) fn found_before(&self, tag: &Tag) -> Option<TagKey> {
        self.entries.get(self.recent).is_some_and(|entry| entry.tag == *tag).then_some(self.recent)
    }

    /// The tag of this name, made if need be.
    pub(super) fn find_or_make(&mut self, tag: &Tag) -> TagKey {
        self.recent = self.find(tag).unwrap_or_else(|| self.insert(tag));
        self.recent
    }

    /// A tag that is known: nobody who has a key in hand lets it be forgotten.
    pub(super) fn get(&self, key: TagKey) -> &TagEntry {
        &self.entries[key]
    }

    pub(super) fn get_mut(&mut self, key: TagKey) -> &mut TagEntry {
        &mut self.entries[key]
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = TagKey> {
        self.entries.keys()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &TagEntry> {
        self.entries.values()
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.entries.len()
    }

    /// None is forgotten before this was taken back.
    pub(super) fn hold(&mut self) {
        self.holds += 1;
    }

    /// Takes a hold back.
    pub(super) fn let_go(&mut self) {
        self.holds = self.holds.saturating_sub(1);
    }

    /// Whether there are so many that a look at what can be forgotten pays.
    pub(super) fn is_crowded(&self) -> bool {
        self.entries.len() > self.sweep_above && self.holds == 0
    }

    /// Forgets those of which nothing is known and that `is_empty`, and returns them. The next look comes when there are
    /// twice as many, or `spare` more.
    pub(super) fn forget(
        &mut self,
        is_empty: impl Fn(TagKey) -> bool,
        spare: usize,
    ) -> Vec<(TagKey, TagEntry)> {
        let built_in = &self.built_in;
        let idle = |(key, entry): &(TagKey, &TagEntry)| {
            !built_in.contains(key) && entry.is_plain() && is_empty(*key)
        };
        let idle: Vec<TagKey> = self.entries.iter().filter(idle).map(|(key, _)| key).collect();
        let forgotten: Vec<_> =
            idle.into_iter().filter_map(|key| Some((key, self.entries.remove(key)?))).collect();
        for (_, entry) in &forgotten {
            self.keys.remove(&entry.tag);
        }
        self.sweep_above = self.entries.len() + self.entries.len().max(SWEEP_MIN).max(spare);
        forgotten
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_that_comes_back_is_another_one() {
        let mut tags = Tags::new([Tag::weights()]);
        let weights = tags.find_or_make(&Tag::weights());
        let lora = Tag::new("lora").unwrap();
        assert_eq!(tags.find(&lora), None);
        let key = tags.find_or_make(&lora);
        assert_eq!((tags.find_or_make(&lora), tags.find(&lora), tags.count()), (key, Some(key), 2));
        tags.get_mut(key).declared = true;
        assert!(tags.forget(|_| true, 0).is_empty(), "a policy was declared");
        tags.get_mut(key).declared = false;
        assert!(tags.forget(|_| false, 0).is_empty(), "it holds something");
        let forgotten: Vec<TagKey> = tags.forget(|_| true, 0).into_iter().map(|(key, _)| key).collect();
        assert_eq!((forgotten, tags.find(&lora), tags.count()), (vec![key], None, 1));
        assert_ne!(tags.find_or_make(&lora), key);
        assert_eq!(tags.find(&Tag::weights()), Some(weights), "a built-in one stays");
    }

    #[test]
    fn looks_come_when_the_number_has_doubled_and_nobody_holds() {
        let mut tags = Tags::new([]);
        let mut looks = 0;
        for n in 0..1_000 {
            tags.find_or_make(&Tag::new(&format!("t{n}")).unwrap());
            if tags.is_crowded() {
                looks += 1;
                assert!(tags.forget(|_| false, 0).is_empty());
            }
        }
        assert_eq!((looks, tags.count()), (4, 1_000));
        assert_eq!(tags.forget(|_| true, 100).len(), 1_000);
        tags.hold();
        for n in 0..101 {
            tags.find_or_make(&Tag::new(&format!("u{n}")).unwrap());
        }
        assert!(!tags.is_crowded());
        tags.let_go();
        assert!(tags.is_crowded());
    }
}
