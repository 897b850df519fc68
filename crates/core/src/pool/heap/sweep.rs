//! Forgetting lanes: those of streams that were destroyed need not be told apart.
//!
//! A pool that lives long sees any number of streams, and has lanes for those that are there. Looking for what can be
//! forgotten costs a walk through all blocks, so it is done when the number of lanes has doubled since the last time, and
//! only where a new one is about to be made.

use super::super::keys::{BlockKey, LaneKey, TagKey};
use super::Heap;
use super::blocks::{Block, Kind};
use super::lanes::Lane;
use crate::driver::StreamId;

/// So many blocks are looked at for each new lane, at most.
const BLOCKS_A_LANE: usize = 256;

impl Heap {
    /// Forgets the lanes of streams that do not exist any more, as far as nothing of them is in use; where numbers run
    /// short, those of others, too, of which nothing is in use or in flight. Their pieces go to the shared lane of their
    /// tag.
    pub(in crate::pool) fn forget_lanes(&mut self, exists: impl Fn(StreamId) -> bool) {
        let all = self.lists.lanes().are_short();
        let heirs = self.heirs(|stream| all || !exists(stream));
        let firsts: Vec<BlockKey> = self.segments.iter().map(|(_, segment)| segment.first()).collect();
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
        let lanes = self.lists.lanes().iter().map(|(key, _)| key);
        let unused: Vec<LaneKey> = lanes.filter(|key| !used[usize::from(*key)]).collect();
        unused.into_iter().for_each(|key| self.lists.forget_lane(key, &mut self.clocks));
        let spare = self.blocks.count() / BLOCKS_A_LANE;
        self.lists.lanes_mut().swept(spare);
    }

    /// Gives a quiet piece to another lane of its tag. Returns the piece that it is a part of then.
    fn bequeath(&mut self, key: BlockKey, heir: LaneKey) -> BlockKey {
        let kind = self.blocks.kind(key);
        if !matches!(kind, Kind::Fine | Kind::Coarse | Kind::Bound) {
            // Listed without its lane.
            (self.blocks[key].lane, self.blocks[key].stamp) = (heir, 0);
            return key;
        }
        self.unlist(key);
        self.blocks[key].lane = heir;
        self.put(key, kind, 0)
    }

    /// Which lanes have a block of which `wanted` holds, by number.
    fn lanes_where(&self, wanted: impl Fn(Kind, &Block) -> bool) -> Vec<bool> {
        let mut lanes = self.lists.lanes().table();
        for (kind, block) in self.blocks.iter() {
            lanes[usize::from(block.lane)] |= wanted(kind, block);
        }
        lanes
    }

    /// For each lane of such streams that has pieces, all of them quiet, where they go: to the shared lane of its tag,
    /// which one of them becomes where there is none.
    fn heirs(&mut self, over: impl Fn(StreamId) -> bool) -> Vec<Option<LaneKey>> {
        let mut heirs = self.lists.lanes().table();
        let is_busy = |kind: Kind, block: &Block| {
            kind.is_used() || !self.clocks.is_quiet(self.lists.lane(block.lane).clock(), block.stamp)
        };
        let (busy, used) = (self.lanes_where(is_busy), self.lanes_where(|_, _| true));
        let is_idle = |(key, lane): &(LaneKey, &Lane)| {
            used[usize::from(*key)] && !busy[usize::from(*key)] && lane.stream().is_some_and(&over)
        };
        let idle = self.lists.lanes().iter().filter(is_idle).map(|(key, lane)| (key, lane.tag()));
        for (key, tag) in idle.collect::<Vec<(LaneKey, TagKey)>>() {
            let lanes = self.lists.lanes_mut();
            let shared = lanes.find(tag, None);
            if shared.is_none() {
                lanes.share(key, &mut self.clocks);
            }
            heirs[usize::from(key)] = Some(shared.unwrap_or(key));
        }
        heirs
    }
}
