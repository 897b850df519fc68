//! Lanes: which stream's work may still touch the free pieces of a tag.
//!
//! A lane is one stream in one tag, found in constant time. It holds the stream's clock, which says when its pieces are
//! quiet. What is quiet, of streams that are gone, need not be told apart: their lanes are forgotten, and the pieces go to
//! the tag's *shared* lane, that of no stream, which is always quiet. Numbers are small, so that a block is; they are
//! given out again, so a lane may be forgotten only when no block has its number any more.

use std::collections::HashMap;

use slotmap::Key;

use super::super::clocks::{ClockKey, Clocks};
use super::super::keys::{LaneKey, TagKey};
use super::bins::Bins;
use crate::driver::StreamId;

/// The least number of lanes that is worth a look at what can be forgotten.
const SWEEP_MIN: usize = 64;

/// As many as there are numbers.
const LANES_MAX: usize = 1 << LaneKey::BITS;

/// Free pieces of one stream in one tag; with no stream, pieces that are quiet.
#[derive(Debug, Default)]
pub(super) struct Lane {
    tag: TagKey,
    stream: Option<StreamId>,
    clock: ClockKey,
    fine: Bins,
}

/// The lanes of a pool.
#[derive(Debug)]
pub(super) struct Lanes {
    /// By number. A vacant one is of no tag.
    lanes: Vec<Lane>,
    vacant: Vec<LaneKey>,
    keys: HashMap<(TagKey, Option<StreamId>), LaneKey>,
    /// The one that was found last is asked for again most often.
    recent: LaneKey,
    most: usize,
    /// More than so many, and it is time to forget some.
    sweep_above: usize,
}

impl Default for Lanes {
    fn default() -> Self {
        Self::with_most(LANES_MAX)
    }
}

impl Lane {
    pub(super) fn tag(&self) -> TagKey {
        self.tag
    }

    /// That of no stream is shared.
    pub(super) fn stream(&self) -> Option<StreamId> {
        self.stream
    }

    pub(super) fn clock(&self) -> ClockKey {
        self.clock
    }

    /// Its fine pieces.
    pub(super) fn fine(&self) -> &Bins {
        &self.fine
    }
}

impl Lanes {
    fn with_most(most: usize) -> Self {
        let (lanes, vacant, keys, recent) = Default::default();
        Self { lanes, vacant, keys, recent, most, sweep_above: SWEEP_MIN.min(most - 1) }
    }

    /// The lane of a block's number.
    pub(super) fn get(&self, key: LaneKey) -> &Lane {
        &self.lanes[usize::from(key)]
    }

    /// The fine pieces of a lane.
    pub(super) fn fine_mut(&mut self, key: LaneKey) -> &mut Bins {
        &mut self.lanes[usize::from(key)].fine
    }

    /// The lane of a stream in a tag; with no stream, the tag's shared one.
    #[inline]
    pub(super) fn find(&mut self, tag: TagKey, stream: Option<StreamId>) -> Option<LaneKey> {
        let recent = self.lanes.get(usize::from(self.recent));
        if recent.is_none_or(|lane| lane.tag != tag || lane.stream != stream) {
            self.recent = *self.keys.get(&(tag, stream))?;
        }
        Some(self.recent)
    }

    /// Makes a lane that there is not yet. `None` when all numbers are in use.
    pub(super) fn make(&mut self, tag: TagKey, stream: StreamId, clocks: &mut Clocks) -> Option<LaneKey> {
        if self.is_full() {
            return None;
        }
        let key = match self.vacant.pop() {
            Some(key) => key,
            None => LaneKey::try_from(self.lanes.len()).ok()?,
        };
        let lane = Lane { tag, stream: Some(stream), clock: clocks.acquire(stream), fine: Bins::default() };
        match self.lanes.get_mut(usize::from(key)) {
            Some(place) => *place = lane,
            None => self.lanes.push(lane),
        }
        self.keys.insert((tag, Some(stream)), key);
        Some(key)
    }

    /// Makes a lane whose pieces are all quiet its tag's shared one, which there is not yet.
    pub(super) fn share(&mut self, key: LaneKey, clocks: &mut Clocks) {
        let lane = &mut self.lanes[usize::from(key)];
        self.keys.remove(&(lane.tag, lane.stream.take()));
        self.keys.insert((lane.tag, None), key);
        clocks.release(std::mem::take(&mut lane.clock));
    }

    /// Forgets a lane whose number no block has any more.
    pub(super) fn forget(&mut self, key: LaneKey, clocks: &mut Clocks) {
        let lane = std::mem::take(&mut self.lanes[usize::from(key)]);
        self.keys.remove(&(lane.tag, lane.stream));
        clocks.release(lane.clock);
        self.vacant.push(key);
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.lanes.len() - self.vacant.len()
    }

    fn is_full(&self) -> bool {
        self.count() >= self.most
    }

    /// Whether there are so many that a look at what can be forgotten pays.
    pub(super) fn is_crowded(&self) -> bool {
        self.count() > self.sweep_above
    }

    /// Whether numbers are so few that also streams which exist need not be told apart where nothing is in flight.
    pub(super) fn are_short(&self) -> bool {
        self.count() > self.most / 2
    }

    /// What can be forgotten was. The next look comes when there are twice as many, or `spare` more.
    pub(super) fn swept(&mut self, spare: usize) {
        let more = self.count().max(SWEEP_MIN).max(spare);
        self.sweep_above = (self.count() + more).min(self.most - 1);
    }

    /// A list with a place for each number.
    pub(super) fn table<T: Clone + Default>(&self) -> Vec<T> {
        vec![T::default(); self.lanes.len()]
    }

    /// All of them.
    pub(super) fn iter(&self) -> impl Iterator<Item = (LaneKey, &Lane)> {
        (0..=LaneKey::MAX).zip(&self.lanes).filter(|(_, lane)| !lane.tag.is_null())
    }
}

#[cfg(test)]
mod tests {
    use slotmap::SlotMap;

    use super::*;

    #[test]
    fn numbers_are_given_out_again() {
        let (mut lanes, mut clocks) = (Lanes::with_most(3), Clocks::default());
        let mut tags = SlotMap::<TagKey, ()>::with_key();
        let (a, b) = (tags.insert(()), tags.insert(()));
        let first = lanes.make(a, StreamId(0), &mut clocks).unwrap();
        for stream in (1..=70_000).map(StreamId) {
            assert_eq!(lanes.find(a, Some(stream)), None);
            let keys = [a, b].map(|tag| lanes.make(tag, stream, &mut clocks).unwrap());
            assert!(lanes.is_full() && lanes.make(a, StreamId(u64::MAX), &mut clocks).is_none());
            assert_eq!([a, b].map(|tag| lanes.find(tag, Some(stream)).unwrap()), keys);
            assert_eq!((lanes.count(), clocks.count()), (3, 2));
            keys.into_iter().for_each(|key| lanes.forget(key, &mut clocks));
            assert_eq!([a, b].map(|tag| lanes.find(tag, Some(stream))), [None, None]);
            assert_eq!((lanes.count(), clocks.count()), (1, 1));
        }
        assert_eq!(lanes.find(a, Some(StreamId(0))), Some(first));
        assert_eq!(lanes.find(b, Some(StreamId(0))), None, "the one that was found last is another tag's");
        let stamp = clocks.stamp(lanes.get(first).clock());
        lanes.share(first, &mut clocks);
        assert_eq!((lanes.find(a, None), lanes.find(a, Some(StreamId(0)))), (Some(first), None));
        assert!(clocks.is_quiet(lanes.get(first).clock(), stamp), "the shared lane is always quiet");
        assert_eq!((lanes.count(), clocks.count(), lanes.get(first).stream()), (1, 0, None));
        assert_eq!(lanes.iter().map(|(key, lane)| (key, lane.tag())).collect::<Vec<_>>(), [(first, a)]);
    }
}
