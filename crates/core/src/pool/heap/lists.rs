//! The lists of free pieces: which piece of a kind serves a request.
//!
//! Fine pieces are listed by lane ([`super::lanes`]), coarse and bare ones by tag, in the order of their sizes.

use std::collections::BTreeSet;

use slotmap::SecondaryMap;

use super::super::clocks::Clocks;
use super::super::keys::{BlockKey, LaneKey, TagKey};
use super::blocks::{Blocks, Kind};
use super::lanes::{Lane, Lanes};
use crate::driver::StreamId;

/// Free pieces by kind, and the lanes that they belong to.
#[derive(Debug, Default)]
pub(super) struct FreeLists {
    lanes: Lanes,
    tags: SecondaryMap<TagKey, TagLists>,
    stuck: Vec<BlockKey>,
    /// First addresses of segments that may be bare from end to end.
    emptied: Vec<u64>,
}

/// Free pieces of a tag, smallest first.
#[derive(Debug, Default)]
pub(super) struct TagLists {
    lanes: BTreeSet<LaneKey>,
    coarse: BTreeSet<(u64, BlockKey)>,
    bare: BTreeSet<(u64, BlockKey)>,
    /// Whether any chunk larger than a granule may lie in several blocks, or in a small one.
    has_cut_chunks: bool,
    /// Whether its memory has to stay where it is.
    is_pinned: bool,
}

impl TagLists {
    pub(super) fn lanes(&self) -> &BTreeSet<LaneKey> {
        &self.lanes
    }

    pub(super) fn coarse(&self) -> &BTreeSet<(u64, BlockKey)> {
        &self.coarse
    }

    pub(super) fn bare(&self) -> &BTreeSet<(u64, BlockKey)> {
        &self.bare
    }

    pub(super) fn has_cut_chunks(&self) -> bool {
        self.has_cut_chunks
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.is_pinned
    }
}

impl FreeLists {
    /// Lists for one more tag.
    pub(super) fn add_tag(&mut self, tag: TagKey) {
        self.tags.insert(tag, TagLists::default());
    }

    /// A tag that has no segments is gone, and so are its lanes.
    pub(super) fn forget_tag(&mut self, tag: TagKey, clocks: &mut Clocks) {
        let lanes = self.tags.remove(tag).map(|lists| lists.lanes).unwrap_or_default();
        lanes.into_iter().for_each(|lane| self.lanes.forget(lane, clocks));
    }

    pub(super) fn tag(&self, tag: TagKey) -> &TagLists {
        &self.tags[tag]
    }

    /// From now on a chunk larger than a granule may lie in several of the tag's blocks, or in a small one.
    pub(super) fn note_cut_chunks(&mut self, tag: TagKey) {
        self.tags[tag].has_cut_chunks = true;
    }

    pub(super) fn set_pinned(&mut self, tag: TagKey, is_pinned: bool) {
        self.tags[tag].is_pinned = is_pinned;
    }

    pub(super) fn tags(&self) -> impl Iterator<Item = (TagKey, &TagLists)> {
        self.tags.iter()
    }

    pub(super) fn lane(&self, key: LaneKey) -> &Lane {
        self.lanes.get(key)
    }

    /// All lanes.
    pub(super) fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    pub(super) fn lanes_mut(&mut self) -> &mut Lanes {
        &mut self.lanes
    }

    /// A further lane; `None` when no more can be counted.
    pub(super) fn add_lane(&mut self, tag: TagKey, stream: StreamId, clocks: &mut Clocks) -> Option<LaneKey> {
        let key = self.lanes.make(tag, stream, clocks)?;
        self.tags[tag].lanes.insert(key);
        Some(key)
    }

    /// Forgets a lane whose number no block has any more.
    pub(super) fn forget_lane(&mut self, key: LaneKey, clocks: &mut Clocks) {
        let tag = self.lane(key).tag();
        self.tags[tag].lanes.remove(&key);
        self.lanes.forget(key, clocks);
    }

    pub(super) fn stuck(&self) -> &[BlockKey] {
        &self.stuck
    }

    /// First addresses of segments that may be bare from end to end, each once.
    pub(super) fn take_emptied(&mut self) -> Vec<u64> {
        let mut emptied = std::mem::take(&mut self.emptied);
        emptied.sort_unstable();
        emptied.dedup();
        emptied
    }

    /// Puts a free piece on the list of its kind.
    pub(super) fn list(&mut self, blocks: &mut Blocks, key: BlockKey) {
        let block = blocks[key];
        let (lane, bytes) = (block.lane, block.bytes());
        match blocks.kind(key) {
            Kind::Fine => self.lanes.fine_mut(lane).insert(blocks, key),
            Kind::Coarse => drop(self.of_lane(lane).coarse.insert((bytes, key))),
            Kind::Bare => {
                self.of_lane(lane).bare.insert((bytes, key));
                if block.prev.is_none() && block.next.is_none() {
                    self.emptied.push(block.addr);
                }
            }
            Kind::Stuck => self.stuck.push(key),
            Kind::Bound | Kind::Live | Kind::Waiting | Kind::Vacant => {}
        }
    }

    /// Takes a free piece off its list.
    pub(super) fn unlist(&mut self, blocks: &mut Blocks, key: BlockKey) {
        let (lane, bytes) = (blocks[key].lane, blocks[key].bytes());
        match blocks.kind(key) {
            Kind::Fine => self.lanes.fine_mut(lane).remove(blocks, key),
            Kind::Coarse => drop(self.of_lane(lane).coarse.remove(&(bytes, key))),
            Kind::Bare => drop(self.of_lane(lane).bare.remove(&(bytes, key))),
            Kind::Stuck => self.stuck.retain(|stuck| *stuck != key),
            Kind::Bound | Kind::Live | Kind::Waiting | Kind::Vacant => {}
        }
    }

    fn of_lane(&mut self, lane: LaneKey) -> &mut TagLists {
        let tag = self.lane(lane).tag();
        &mut self.tags[tag]
    }
}
