//! Forgetting the lists of destroyed streams.
//!
//! A sweep walks all blocks. So it runs only when a new list is needed and the count has doubled since the last one.

use super::Heap;
use super::blocks::{HeapBlock, HeapBlockKind};
use super::stream_lists::StreamList;
use crate::driver::StreamId;
use crate::pool::tools::keys::{BlockKey, ListKey, TagKey};

/// A sweep visits at most so many blocks for each new list.
const BLOCKS_PER_LIST: usize = 256;

impl Heap {
    /// Forgets the lists of destroyed streams with nothing in use; when numbers are short, also of other
    /// streams with nothing in use or in flight.
    pub(in crate::pool) fn forget_lists(&mut self, exists: impl Fn(StreamId) -> bool) {
        let all = self.lists.stream_lists().are_short();
        let targets = self.targets(|stream| all || !exists(stream));
        let firsts: Vec<BlockKey> = self.segments.iter().map(|(_, segment)| segment.first()).collect();
        for first in firsts {
            let mut next = first.some();
            while let Some(key) = next {
                let key = match targets[usize::from(self.blocks[key].list)] {
                    Some(target) => self.move_to_list(key, target),
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

    /// Moves a complete block to another list. Returns the joined block.
    fn move_to_list(&mut self, key: BlockKey, target: ListKey) -> BlockKey {
        let kind = self.blocks.kind(key);
        if !matches!(kind, HeapBlockKind::Small | HeapBlockKind::Large | HeapBlockKind::Pinned) {
            // Not linked in a stream list.
            (self.blocks[key].list, self.blocks[key].freed_epoch) = (target, 0);
            return key;
        }
        self.unlink(key);
        self.blocks[key].list = target;
        self.insert_free(key, kind, 0)
    }

    /// By number: the lists that have a `wanted` block.
    fn lists_where(&self, wanted: impl Fn(HeapBlockKind, &HeapBlock) -> bool) -> Vec<bool> {
        let mut stream_lists = self.lists.stream_lists().table();
        for (kind, block) in self.blocks.iter() {
            stream_lists[usize::from(block.list)] |= wanted(kind, block);
        }
        stream_lists
    }

    /// By number: the shared list for the blocks of a list, if its stream is `over` and all are complete. A tag
    /// without one makes one of these lists it.
    fn targets(&mut self, over: impl Fn(StreamId) -> bool) -> Vec<Option<ListKey>> {
        let mut targets = self.lists.stream_lists().table();
        let is_busy = |kind: HeapBlockKind, block: &HeapBlock| {
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
            targets[usize::from(key)] = Some(shared.unwrap_or(key));
        }
        targets
    }
}
