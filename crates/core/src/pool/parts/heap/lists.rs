//! Free lists: which free block of a kind serves a request.
//!
//! Small blocks are listed per stream and tag ([`super::stream_lists`]), large and unmapped ones per tag, by size.

use std::collections::BTreeSet;

use slotmap::SecondaryMap;

use super::blocks::{Blocks, HeapBlockKind};
use super::stream_lists::{StreamList, StreamLists};
use crate::driver::StreamId;
use crate::pool::tools::clocks::Clocks;
use crate::pool::tools::keys::{BlockKey, ListKey, TagKey};

#[derive(Debug, Default)]
pub(super) struct FreeLists {
    stream_lists: StreamLists,
    tags: SecondaryMap<TagKey, TagLists>,
    /// Tags with free blocks that hold a granule.
    with_granules: BTreeSet<TagKey>,
    unmap_failed: Vec<BlockKey>,
    /// Whole granules in blocks of that kind.
    pinned_bytes: u64,
    /// First addresses of segments that may be wholly unmapped.
    emptied: Vec<u64>,
}

/// Free blocks of a tag, smallest first.
#[derive(Debug, Default)]
pub(super) struct TagLists {
    stream_lists: BTreeSet<ListKey>,
    large: BTreeSet<(u64, BlockKey)>,
    unmapped: BTreeSet<(u64, BlockKey)>,
    /// Small and large blocks that hold a granule.
    granule_blocks: usize,
    /// Whether a chunk larger than a granule may lie in several blocks, or in a small one.
    has_cut_chunks: bool,
    /// Whether its memory has to stay where it is.
    is_pinned: bool,
}

impl TagLists {
    pub(super) fn stream_lists(&self) -> &BTreeSet<ListKey> {
        &self.stream_lists
    }

    pub(super) fn large(&self) -> &BTreeSet<(u64, BlockKey)> {
        &self.large
    }

    pub(super) fn unmapped(&self) -> &BTreeSet<(u64, BlockKey)> {
        &self.unmapped
    }

    pub(super) fn has_cut_chunks(&self) -> bool {
        self.has_cut_chunks
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.is_pinned
    }
}

impl FreeLists {
    pub(super) fn add_tag(&mut self, tag: TagKey) {
        self.tags.insert(tag, TagLists::default());
    }

    /// For a tag without segments. Its stream lists go, too.
    pub(super) fn forget_tag(&mut self, tag: TagKey, clocks: &mut Clocks) {
        let stream_lists = self.tags.remove(tag).map(|lists| lists.stream_lists).unwrap_or_default();
        stream_lists.into_iter().for_each(|list| self.stream_lists.forget(list, clocks));
    }

    pub(super) fn tag(&self, tag: TagKey) -> &TagLists {
        &self.tags[tag]
    }

    pub(super) fn note_cut_chunks(&mut self, tag: TagKey) {
        self.tags[tag].has_cut_chunks = true;
    }

    pub(super) fn set_pinned(&mut self, tag: TagKey, is_pinned: bool) {
        self.tags[tag].is_pinned = is_pinned;
    }

    /// Those with free blocks that hold a granule, in order of their keys.
    pub(super) fn tags_with_granules(&self) -> impl Iterator<Item = (TagKey, &TagLists)> {
        self.with_granules.iter().map(|tag| (*tag, &self.tags[*tag]))
    }

    pub(super) fn list(&self, key: ListKey) -> &StreamList {
        self.stream_lists.get(key)
    }

    pub(super) fn stream_lists(&self) -> &StreamLists {
        &self.stream_lists
    }

    pub(super) fn stream_lists_mut(&mut self) -> &mut StreamLists {
        &mut self.stream_lists
    }

    pub(super) fn add_list(&mut self, tag: TagKey, stream: StreamId, clocks: &mut Clocks) -> Option<ListKey> {
        let key = self.stream_lists.make(tag, stream, clocks)?;
        self.tags[tag].stream_lists.insert(key);
        Some(key)
    }

    /// See [`StreamLists::forget`].
    pub(super) fn forget_list(&mut self, key: ListKey, clocks: &mut Clocks) {
        let tag = self.list(key).tag();
        self.tags[tag].stream_lists.remove(&key);
        self.stream_lists.forget(key, clocks);
    }

    pub(super) fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes
    }

    pub(super) fn unmap_failed(&self) -> &[BlockKey] {
        &self.unmap_failed
    }

    /// Each once.
    pub(super) fn take_emptied(&mut self) -> Vec<u64> {
        let mut emptied = std::mem::take(&mut self.emptied);
        emptied.sort_unstable();
        emptied.dedup();
        emptied
    }

    /// `whole_bytes`: in whole granules.
    pub(super) fn insert(&mut self, blocks: &mut Blocks, key: BlockKey, whole_bytes: u64) {
        let block = blocks[key];
        let (list, bytes) = (block.list, block.bytes());
        if whole_bytes > 0 && matches!(blocks.kind(key), HeapBlockKind::Small | HeapBlockKind::Large) {
            let tag = self.list(list).tag();
            let count = &mut self.tags[tag].granule_blocks;
            *count += 1;
            if *count == 1 {
                self.with_granules.insert(tag);
            }
        }
        match blocks.kind(key) {
            HeapBlockKind::Small => self.stream_lists.small_mut(list).insert(blocks, key),
            HeapBlockKind::Large => drop(self.of_list(list).large.insert((bytes, key))),
            HeapBlockKind::Unmapped => {
                self.of_list(list).unmapped.insert((bytes, key));
                if block.prev.is_none() && block.next.is_none() {
                    self.emptied.push(block.addr);
                }
            }
            HeapBlockKind::UnmapFailed => self.unmap_failed.push(key),
            HeapBlockKind::Pinned => self.pinned_bytes += whole_bytes,
            HeapBlockKind::Live | HeapBlockKind::Waiting | HeapBlockKind::Vacant => {}
        }
    }

    pub(super) fn remove(&mut self, blocks: &mut Blocks, key: BlockKey, whole_bytes: u64) {
        let (list, bytes) = (blocks[key].list, blocks[key].bytes());
        if whole_bytes > 0 && matches!(blocks.kind(key), HeapBlockKind::Small | HeapBlockKind::Large) {
            let tag = self.list(list).tag();
            let count = &mut self.tags[tag].granule_blocks;
            *count -= 1;
            if *count == 0 {
                self.with_granules.remove(&tag);
            }
        }
        match blocks.kind(key) {
            HeapBlockKind::Small => self.stream_lists.small_mut(list).remove(blocks, key),
            HeapBlockKind::Large => drop(self.of_list(list).large.remove(&(bytes, key))),
            HeapBlockKind::Unmapped => drop(self.of_list(list).unmapped.remove(&(bytes, key))),
            HeapBlockKind::UnmapFailed => self.unmap_failed.retain(|unmap_failed| *unmap_failed != key),
            HeapBlockKind::Pinned => self.pinned_bytes -= whole_bytes,
            HeapBlockKind::Live | HeapBlockKind::Waiting | HeapBlockKind::Vacant => {}
        }
    }

    fn of_list(&mut self, list: ListKey) -> &mut TagLists {
        let tag = self.list(list).tag();
        &mut self.tags[tag]
    }
}
