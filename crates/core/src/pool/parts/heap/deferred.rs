//! Uses of blocks on other streams, and freed blocks that wait for them.

use std::collections::HashMap;

use crate::driver::StreamId;
use crate::pool::tools::clocks::{ClockKey, Clocks};
use crate::pool::tools::keys::BlockKey;

/// With so many streams to a block, dropping destroyed ones pays.
const USES_MANY: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Deferred {
    uses: HashMap<BlockKey, Vec<StreamId>>,
    waiting: Vec<Waiting>,
}

/// A freed block, and the epochs of other streams' clocks that it waits for.
#[derive(Debug)]
struct Waiting {
    block: BlockKey,
    /// The epoch of its own stream.
    freed_epoch: u64,
    until: Vec<(ClockKey, u64)>,
}

impl Deferred {
    /// Of many streams that use a block, destroyed ones are dropped.
    pub(super) fn record_use(
        &mut self,
        block: BlockKey,
        stream: StreamId,
        exists: impl Fn(StreamId) -> bool,
    ) {
        let others = self.uses.entry(block).or_default();
        if !others.contains(&stream) {
            if others.len() >= USES_MANY && others.len() == others.capacity() {
                others.retain(|other| exists(*other));
            }
            others.push(stream);
        }
    }

    /// Streams that use live blocks of others.
    pub(super) fn streams(&self) -> impl Iterator<Item = StreamId> {
        self.uses.values().flatten().copied()
    }

    pub(super) fn take_uses(&mut self, block: BlockKey) -> Option<Vec<StreamId>> {
        if self.uses.is_empty() { None } else { self.uses.remove(&block) }
    }

    /// For a part of a block, used as the whole.
    pub(super) fn set_uses(&mut self, block: BlockKey, streams: Vec<StreamId>) {
        self.uses.insert(block, streams);
    }

    /// Pairs of a live block and another stream that uses it.
    pub(super) fn uses(&self) -> usize {
        self.uses.values().map(Vec::len).sum()
    }

    /// The caller has acquired the clocks.
    pub(super) fn defer(&mut self, block: BlockKey, freed_epoch: u64, until: Vec<(ClockKey, u64)>) {
        self.waiting.push(Waiting { block, freed_epoch, until });
    }

    /// Blocks whose other streams have passed, with the epochs of their own streams.
    pub(super) fn take_passed(&mut self, clocks: &mut Clocks) -> Vec<(BlockKey, u64)> {
        let passed = |waiting: &mut Waiting| {
            waiting.until.iter().all(|(clock, epoch)| clocks.is_complete(*clock, *epoch))
        };
        let done: Vec<Waiting> = self.waiting.extract_if(.., passed).collect();
        done.iter().flat_map(|waiting| &waiting.until).for_each(|(clock, _)| clocks.release(*clock));
        done.into_iter().map(|waiting| (waiting.block, waiting.freed_epoch)).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = BlockKey> {
        self.waiting.iter().map(|waiting| waiting.block)
    }
}
