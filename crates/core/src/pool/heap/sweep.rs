//! Forgetting stream_lists: those of streams that were destroyed need not be told apart.
//!
//! A pool that lives long sees any number of streams, and has stream_lists for those that are there. Looking for what can be
//! forgotten costs a walk through all blocks, so it is done when the number of stream_lists has doubled since the last time, and
//! only where a new one is about to be made.

use super::super::keys::{BlockKey, ListKey, TagKey};
use super::Heap;
use super::blocks::{HeapBlock, Kind};
use super::stream_lists::StreamList;
use crate::driver::StreamId;

/// So many blocks are looked at for each new list, at most.
const BLOCKS_PER_LIST: usize = 256;

impl Heap {
    /// Forgets the stream_lists of streams that do not exist any more, as far as nothing of them is in use; where numbers run
    /// short, those of others, too, of which nothing is in use or in flight. Their mappings go to the shared list of their
    /// tag.
    pub(in crate::pool) fn forget_lists(&mut self, exists: impl Fn(StreamId) -> bool) {
        let all = self.lists.stream_lists().are_short();
        let heirs = self.heirs(|stream| all || !exists(stream));
        let firsts: Vec<BlockKey> = self.segments.iter().map(|(_, segment)| segment.first()).collect();
        for first in firsts {
            let mut next = first.some();
            while let Some(key) = next {
                let key = match heirs[usize::from(self.blocks[key].list)] {
                    Some(heir) => self.bequeath(key, heir),
                    None => key,
                };
                next = self.blocks[key].next.some();
            }
        }
        let used = self.lists_where(|_, _| true);
        let stream_lists = self.lists.stream_lists().iter().map(|(key, _)| key);
        let unused: Vec<ListKey> = stream_lists.filter(|key| !used[usize::from(*key)]).collect();
        unused.into_iter().for_each(|key| self.lists.forget_list(key, &mut self.clocks));
        let spare = self.blocks.count() / BLOCKS_PER_LIST;
        self.lists.stream_lists_mut().swept(spare);
    }

    /// Gives a complete mapping to another list of its tag. Returns the mapping that it is a part of then.
    fn bequeath(&mut self, key: BlockKey, heir: ListKey) -> BlockKey {
        let kind = self.blocks.kind(key);
        if !matches!(kind, Kind::Small | Kind::Large | Kind::Pinned) {
            // Listed without its list.
            (self.blocks[key].list, self.blocks[key].freed_epoch) = (heir, 0);
            return key;
        }
        self.unlink(key);
        self.blocks[key].list = heir;
        self.put(key, kind, 0)
    }

    /// Which stream_lists have a block of which `wanted` holds, by number.
    fn lists_where(&self, wanted: impl Fn(Kind, &HeapBlock) -> bool) -> Vec<bool> {
        let mut stream_lists = self.lists.stream_lists().table();
        for (kind, block) in self.blocks.iter() {
            stream_lists[usize::from(block.list)] |= wanted(kind, block);
        }
        stream_lists
    }

    /// For each list of such streams that has mappings, all of them complete, where they go: to the shared list of its tag,
    /// which one of them becomes where there is none.
    fn heirs(&mut self, over: impl Fn(StreamId) -> bool) -> Vec<Option<ListKey>> {
        let mut heirs = self.lists.stream_lists().table();
        let is_busy = |kind: Kind, block: &HeapBlock| {
            kind.is_used() || !self.clocks.is_complete(self.lists.list(block.list).clock(), block.freed_epoch)
        };
        let (busy, used) = (self.lists_where(is_busy), self.lists_where(|_, _| true));
        let is_idle = |(key, list): &(ListKey, &StreamList)| {
            used[usize::from(*key)] && !busy[usize::from(*key)] && list.stream().is_some_and(&over)
        };
        let idle = self.lists.stream_lists().iter().filter(is_idle).map(|(key, list)| (key, list.tag()));
        for (key, tag) in idle.collect::<Vec<(ListKey, TagKey)>>() {
            let stream_lists = self.lists.stream_lists_mut();
            let shared = stream_lists.find(tag, None);
            if shared.is_none() {
                stream_lists.share(key, &mut self.clocks);
            }
            heirs[usize::from(key)] = Some(shared.unwrap_or(key));
        }
        heirs
    }
}
