//! The free lists of streams, by tag.
//!
//! A list is found in constant time. Its stream's clock says when its blocks are complete. Lists of gone streams are
//! forgotten; their complete blocks go to the tag's *shared* list, without a stream and always complete. List numbers
//! are small, to keep blocks small, and are reused: a list is forgotten only when no block has its number.

use std::collections::HashMap;

use slotmap::Key;

use super::bins::Bins;
use crate::driver::StreamId;
use crate::pool::tools::clocks::{ClockKey, Clocks};
use crate::pool::tools::keys::{ListKey, TagKey};

/// The fewest lists that are worth a sweep.
const SWEEP_MIN: usize = 64;

/// All numbers.
const LISTS_MAX: usize = 1 << ListKey::BITS;

/// Free blocks of one stream in one tag.
#[derive(Debug, Default)]
pub(super) struct StreamList {
    tag: TagKey,
    stream: Option<StreamId>,
    clock: ClockKey,
    small: Bins,
}

#[derive(Debug)]
pub(super) struct StreamLists {
    /// By number. A vacant one has no tag.
    stream_lists: Vec<StreamList>,
    vacant: Vec<ListKey>,
    keys: HashMap<(TagKey, Option<StreamId>), ListKey>,
    /// The last one found: most lookups want it again.
    recent: ListKey,
    most: usize,
    /// With more lists, a sweep is due.
    sweep_above: usize,
}

impl Default for StreamLists {
    fn default() -> Self {
        Self::with_most(LISTS_MAX)
    }
}

impl StreamList {
    pub(super) fn tag(&self) -> TagKey {
        self.tag
    }

    /// The shared list has none.
    pub(super) fn stream(&self) -> Option<StreamId> {
        self.stream
    }

    pub(super) fn clock(&self) -> ClockKey {
        self.clock
    }

    pub(super) fn small(&self) -> &Bins {
        &self.small
    }
}

impl StreamLists {
    fn with_most(most: usize) -> Self {
        let (stream_lists, vacant, keys, recent) = Default::default();
        Self { stream_lists, vacant, keys, recent, most, sweep_above: SWEEP_MIN.min(most - 1) }
    }

    pub(super) fn get(&self, key: ListKey) -> &StreamList {
        &self.stream_lists[usize::from(key)]
    }

    pub(super) fn small_mut(&mut self, key: ListKey) -> &mut Bins {
        &mut self.stream_lists[usize::from(key)].small
    }

    /// With no stream, the tag's shared list.
    #[inline]
    pub(super) fn find(&mut self, tag: TagKey, stream: Option<StreamId>) -> Option<ListKey> {
        let recent = self.stream_lists.get(usize::from(self.recent));
        if recent.is_none_or(|list| list.tag != tag || list.stream != stream) {
            self.recent = *self.keys.get(&(tag, stream))?;
        }
        Some(self.recent)
    }

    /// `None` when all numbers are in use.
    pub(super) fn make(&mut self, tag: TagKey, stream: StreamId, clocks: &mut Clocks) -> Option<ListKey> {
        if self.is_full() {
            return None;
        }
        let key = match self.vacant.pop() {
            Some(key) => key,
            None => ListKey::try_from(self.stream_lists.len()).ok()?,
        };
        let list =
            StreamList { tag, stream: Some(stream), clock: clocks.acquire(stream), small: Bins::default() };
        match self.stream_lists.get_mut(usize::from(key)) {
            Some(location) => *location = list,
            None => self.stream_lists.push(list),
        }
        self.keys.insert((tag, Some(stream)), key);
        Some(key)
    }

    /// For a list of complete blocks, and a tag without a shared list.
    pub(super) fn share(&mut self, key: ListKey, clocks: &mut Clocks) {
        let list = &mut self.stream_lists[usize::from(key)];
        self.keys.remove(&(list.tag, list.stream.take()));
        self.keys.insert((list.tag, None), key);
        clocks.release(std::mem::take(&mut list.clock));
    }

    /// Removes a list whose number no block has.
    pub(super) fn forget(&mut self, key: ListKey, clocks: &mut Clocks) {
        let list = std::mem::take(&mut self.stream_lists[usize::from(key)]);
        self.keys.remove(&(list.tag, list.stream));
        clocks.release(list.clock);
        self.vacant.push(key);
    }

    pub(super) fn count(&self) -> usize {
        self.stream_lists.len() - self.vacant.len()
    }

    fn is_full(&self) -> bool {
        self.count() >= self.most
    }

    pub(super) fn is_crowded(&self) -> bool {
        self.count() > self.sweep_above
    }

    /// Whether numbers are so few that complete blocks of existing streams are shared, too.
    pub(super) fn are_short(&self) -> bool {
        self.count() > self.most / 2
    }

    /// After a sweep. The next is due with twice as many lists, or `spare` more.
    pub(super) fn swept(&mut self, spare: usize) {
        let more = self.count().max(SWEEP_MIN).max(spare);
        self.sweep_above = (self.count() + more).min(self.most - 1);
    }

    /// A table with an entry for each number.
    pub(super) fn table<T: Clone + Default>(&self) -> Vec<T> {
        vec![T::default(); self.stream_lists.len()]
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ListKey, &StreamList)> {
        (0..=ListKey::MAX).zip(&self.stream_lists).filter(|(_, list)| !list.tag.is_null())
    }
}

#[cfg(test)]
mod tests {
    use slotmap::SlotMap;

    use super::*;

    #[test]
    fn numbers_are_given_out_again() {
        let (mut stream_lists, mut clocks) = (StreamLists::with_most(3), Clocks::default());
        let mut tags = SlotMap::<TagKey, ()>::with_key();
        let (a, b) = (tags.insert(()), tags.insert(()));
        let first = stream_lists.make(a, StreamId(0), &mut clocks).unwrap();
        for stream in (1..=70_000).map(StreamId) {
            assert_eq!(stream_lists.find(a, Some(stream)), None);
            let keys = [a, b].map(|tag| stream_lists.make(tag, stream, &mut clocks).unwrap());
            assert!(
                stream_lists.is_full() && stream_lists.make(a, StreamId(u64::MAX), &mut clocks).is_none()
            );
            assert_eq!([a, b].map(|tag| stream_lists.find(tag, Some(stream)).unwrap()), keys);
            assert_eq!((stream_lists.count(), clocks.count()), (3, 2));
            keys.into_iter().for_each(|key| stream_lists.forget(key, &mut clocks));
            assert_eq!([a, b].map(|tag| stream_lists.find(tag, Some(stream))), [None, None]);
            assert_eq!((stream_lists.count(), clocks.count()), (1, 1));
        }
        assert_eq!(stream_lists.find(a, Some(StreamId(0))), Some(first));
        assert_eq!(
            stream_lists.find(b, Some(StreamId(0))),
            None,
            "the one that was found last is another tag's"
        );
        let freed_epoch = clocks.freed_epoch(stream_lists.get(first).clock());
        stream_lists.share(first, &mut clocks);
        assert_eq!(
            (stream_lists.find(a, None), stream_lists.find(a, Some(StreamId(0)))),
            (Some(first), None)
        );
        assert!(
            clocks.is_complete(stream_lists.get(first).clock(), freed_epoch),
            "the shared list is always complete"
        );
        assert_eq!((stream_lists.count(), clocks.count(), stream_lists.get(first).stream()), (1, 0, None));
        assert_eq!(
            stream_lists.iter().map(|(key, list)| (key, list.tag())).collect::<Vec<_>>(),
            [(first, a)]
        );
    }
}
