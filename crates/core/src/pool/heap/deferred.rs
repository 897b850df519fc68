//! Blocks in use on further streams, and frees that wait for those.

use std::collections::HashMap;

use super::super::clocks::{ClockKey, Clocks};
use super::super::keys::BlockKey;
use crate::driver::StreamId;

/// Streams that use one block, of which it pays to look whether they exist.
const USES_MANY: usize = 16;

/// Uses of live blocks on streams other than their own, and freed blocks that wait for such streams.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    uses: HashMap<BlockKey, Vec<StreamId>>,
    waiting: Vec<Waiting>,
}

/// A freed block that other streams may still use, and up to which epoch of their clocks.
#[derive(Debug)]
struct Waiting {
    block: BlockKey,
    /// Its own stream's freed_epoch.
    freed_epoch: u64,
    until: Vec<(ClockKey, u64)>,
}

impl Deferred {
    /// Work on `stream` uses a live block of another stream. Of many streams, those that do not exist any more need not be
    /// waited for.
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

    /// Streams on which live blocks of others are in use.
    pub(super) fn streams(&self) -> impl Iterator<Item = StreamId> {
        self.uses.values().flatten().copied()
    }

    /// The streams that use a block which is not live any more.
    pub(super) fn take_uses(&mut self, block: BlockKey) -> Option<Vec<StreamId>> {
        // Mostly there are none of any block.
        if self.uses.is_empty() { None } else { self.uses.remove(&block) }
    }

    /// A part of a block is used as the whole was.
    pub(super) fn set_uses(&mut self, block: BlockKey, streams: Vec<StreamId>) {
        self.uses.insert(block, streams);
    }

    /// How many streams use live blocks of others, by block.
    pub(super) fn uses(&self) -> usize {
        self.uses.values().map(Vec::len).sum()
    }

    /// A freed block waits until the clocks, which were acquired for it, have passed these ticks.
    pub(super) fn defer(&mut self, block: BlockKey, freed_epoch: u64, until: Vec<(ClockKey, u64)>) {
        self.waiting.push(Waiting { block, freed_epoch, until });
    }

    /// Blocks that have waited long enough, with their own streams' stamps.
    pub(super) fn take_passed(&mut self, clocks: &mut Clocks) -> Vec<(BlockKey, u64)> {
        let passed = |waiting: &mut Waiting| {
            waiting.until.iter().all(|(clock, epoch)| clocks.is_complete(*clock, *epoch))
        };
        let done: Vec<Waiting> = self.waiting.extract_if(.., passed).collect();
        done.iter().flat_map(|waiting| &waiting.until).for_each(|(clock, _)| clocks.release(*clock));
        done.into_iter().map(|waiting| (waiting.block, waiting.freed_epoch)).collect()
    }

    /// Whether no block waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Blocks that wait.
    pub(super) fn blocks(&self) -> impl Iterator<Item = BlockKey> {
        self.waiting.iter().map(|waiting| waiting.block)
    }
}
