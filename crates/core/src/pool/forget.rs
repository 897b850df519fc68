//! Forgetting what is over: streams that were destroyed, and tags of which nothing is left.
//!
//! A pool that lives long sees any number of streams and tags, and keeps a few. Lanes that need not be told apart become
//! one, and tags that hold nothing go. Looking for them costs a walk through all blocks or segments, so it is done when
//! their number has doubled since the last time, and only where a new one is about to be made.

use std::collections::HashSet;

use super::blocks::{Block, BlockKey, Kind};
use super::error::PoolError;
use super::lanes::{Lane, LaneKey};
use super::state::State;
use super::tags::TagKey;
use super::{AllocRequest, Result, Shared, StateGuard};
use crate::driver::{DriverErrorKind, StreamId};
use crate::tag::Tag;

/// So many blocks are looked at for each new lane, or segments for each new tag, at most.
const BLOCKS_A_LANE: usize = 256;
const SEGMENTS_A_TAG: usize = 16;

/// How much a pool has to remember.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remembered {
    /// Tags that it knows.
    pub tags: usize,
    /// Streams, by tag, that free memory is kept apart for.
    pub lanes: usize,
    /// Streams whose work is waited for.
    pub clocks: usize,
    /// Streams, by live block, whose work is to be waited for when it is freed.
    pub uses: usize,
}

impl Shared {
    /// The lane of a request whose tag is `tag`, made if need be.
    #[inline]
    pub(super) fn lane_of(&self, state: &mut State, tag: TagKey, request: &AllocRequest) -> Result<LaneKey> {
        match state.lanes.find(tag, Some(request.stream)) {
            Some(lane) => Ok(lane),
            None => self.new_lane(state, tag, request),
        }
    }

    #[cold]
    fn new_lane(&self, state: &mut State, tag: TagKey, request: &AllocRequest) -> Result<LaneKey> {
        if state.lanes.is_crowded() {
            state.forget_lanes(|stream| self.may_exist(stream));
        }
        let AllocRequest { bytes, align, tag: ref name, .. } = *request;
        state.make_lane(tag, request.stream).ok_or_else(|| {
            let count = state.lanes.count();
            let reason = format!(
                "{count} streams, by tag, use memory of the pool now: as many as it can count; free some of it, or trim"
            );
            PoolError::InvalidRequest { bytes, align, tag: name.clone(), reason }
        })
    }

    /// The tag of a request, once nobody works on it alone.
    #[cold]
    pub(super) fn open_tag<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        tag: &Tag,
    ) -> Result<(StateGuard<'a>, TagKey)> {
        loop {
            // Looked up each time: who waits does not keep it from being forgotten.
            let key = state.tag_key(tag);
            if !state.tag(key).gate.is_closed() {
                return Ok((state, key));
            }
            state = self.wait(state)?;
        }
    }

    /// Whether work on a stream may still be under way.
    pub(super) fn may_exist(&self, stream: StreamId) -> bool {
        let unknown = |kind| matches!(kind, DriverErrorKind::UnknownHandle { .. });
        !self.driver.check_stream(stream).is_err_and(|error| unknown(error.kind))
    }
}

impl State {
    pub(super) fn remembered(&self) -> Remembered {
        Remembered {
            tags: self.tags.count(),
            lanes: self.lanes.count(),
            clocks: self.clocks.count(),
            uses: self.uses.values().map(Vec::len).sum(),
        }
    }

    /// The tag of this name, made if need be.
    #[inline]
    pub(super) fn tag_key(&mut self, tag: &Tag) -> TagKey {
        self.tags.found_before(tag).unwrap_or_else(|| self.find_tag(tag))
    }

    fn find_tag(&mut self, tag: &Tag) -> TagKey {
        if self.tags.is_crowded() && self.tags.find(tag).is_none() {
            self.forget_tags();
        }
        self.tags.find_or_make(tag)
    }

    /// Forgets tags that hold nothing and of which nothing is known.
    fn forget_tags(&mut self) {
        let held: HashSet<TagKey> = self.segments.values().map(|segment| segment.tag).collect();
        let spare = self.segments.len() / SEGMENTS_A_TAG;
        for (_, entry) in self.tags.forget(|tag| !held.contains(&tag), spare) {
            // All of its blocks went with its segments.
            entry.lanes.into_iter().for_each(|lane| self.lanes.forget(lane, &mut self.clocks));
        }
    }

    fn make_lane(&mut self, tag: TagKey, stream: StreamId) -> Option<LaneKey> {
        let key = self.lanes.make(tag, stream, &mut self.clocks)?;
        self.tag_mut(tag).lanes.push(key);
        Some(key)
    }

    /// Forgets the lanes of streams that do not exist any more, after settling what was freed there, as far as nothing
    /// of them is in use; where numbers run short, those of others, too, of which nothing is in use or in flight. Their
    /// pieces go to the shared lane of their tag.
    fn forget_lanes(&mut self, exists: impl Fn(StreamId) -> bool) {
        self.clocks.end_streams(&exists);
        self.settle_waiting();
        let all = self.lanes.are_short();
        let heirs = self.heirs(|stream| all || !exists(stream));
        let firsts: Vec<_> = self.segments.values().map(|segment| segment.first).collect();
        for first in firsts {
            let mut next = first.some();
            while let Some(key) = next {
                let key = match heirs[usize::from(self.blocks[key].lane)] {
                    Some(heir) => self.bequeath(key, heir),
                    None => key,
                };
                next = self.blocks[key].next.some();
            }
        }
        let used = self.lanes_where(|_, _| true);
        let unused = |(key, lane): (LaneKey, &Lane)| (!used[usize::from(key)]).then(|| (key, lane.tag()));
        let unused: Vec<(LaneKey, TagKey)> = self.lanes.iter().filter_map(unused).collect();
        for (key, tag) in unused {
            self.tag_mut(tag).lanes.retain(|lane| *lane != key);
            self.lanes.forget(key, &mut self.clocks);
        }
        self.lanes.swept(self.blocks.count() / BLOCKS_A_LANE);
    }

    /// Gives a quiet piece to another lane of its tag. Returns the piece that it is a part of then.
    fn bequeath(&mut self, key: BlockKey, heir: LaneKey) -> BlockKey {
        let kind = self.blocks.kind(key);
        if !matches!(kind, Kind::Fine | Kind::Coarse) {
            // Listed without its lane, or not at all. The bound pieces of a chunk are of one lane, before and after.
            (self.blocks[key].lane, self.blocks[key].stamp) = (heir, 0);
            return key;
        }
        self.unlist(key);
        self.blocks[key].lane = heir;
        self.put(key, kind, 0)
    }

    /// Which lanes have a block of which `wanted` holds, by number.
    fn lanes_where(&self, wanted: impl Fn(Kind, &Block) -> bool) -> Vec<bool> {
        let mut lanes = self.lanes.table();
        for (kind, block) in self.blocks.iter() {
            lanes[usize::from(block.lane)] |= wanted(kind, block);
        }
        lanes
    }

    /// For each lane of such streams that has pieces, all of them quiet, where they go: to the shared lane of its tag,
    /// which one of them becomes where there is none.
    fn heirs(&mut self, over: impl Fn(StreamId) -> bool) -> Vec<Option<LaneKey>> {
        let mut heirs = self.lanes.table();
        let is_busy = |kind: Kind, block: &Block| {
            kind.is_used() || !self.clocks.is_quiet(self.lane(block.lane).clock(), block.stamp)
        };
        let (busy, used) = (self.lanes_where(is_busy), self.lanes_where(|_, _| true));
        let is_idle = |(key, lane): &(LaneKey, &Lane)| {
            used[usize::from(*key)] && !busy[usize::from(*key)] && lane.stream().is_some_and(&over)
        };
        let idle = self.lanes.iter().filter(is_idle).map(|(key, lane)| (key, lane.tag()));
        for (key, tag) in idle.collect::<Vec<_>>() {
            let shared = self.lanes.find(tag, None);
            if shared.is_none() {
                self.lanes.share(key, &mut self.clocks);
            }
            heirs[usize::from(key)] = Some(shared.unwrap_or(key));
        }
        heirs
    }
}
