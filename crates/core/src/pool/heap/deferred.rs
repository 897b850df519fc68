//! Blocks in use on further streams, and frees that wait for those.

use std::collections::HashMap;

use super::super::clocks::{ClockKey, Clocks};
use super::super::keys::BlockKey;
use crate::driver::StreamId;

/// Uses of live blocks on streams other than their own, and freed blocks that wait for such streams.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    uses: HashMap<BlockKey, Vec<StreamId>>,
    waiting: Vec<Waiting>,
}

/// A freed block that other streams may still use, and up to which tick of their clocks.
#[derive(Debug)]
struct Waiting {
    block: BlockKey,
    /// Its own stream's stamp.
    stamp: u64,
    until: Vec<(ClockKey, u64)>,
}

impl Deferred {
    /// Work on `stream` uses a live block of another stream.
    pub(super) fn record_use(&mut self, block: BlockKey, stream: StreamId) {
        let others = self.uses.entry(block).or_default();
        if !others.contains(&stream) {
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

    /// A freed block waits until the clocks have passed these ticks.
    pub(super) fn defer(&mut self, block: BlockKey, stamp: u64, until: Vec<(ClockKey, u64)>) {
        self.waiting.push(Waiting { block, stamp, until });
    }

    /// Blocks that have waited long enough, with their own streams' stamps.
    pub(super) fn take_passed(&mut self, clocks: &Clocks) -> Vec<(BlockKey, u64)> {
        let passed =
            |waiting: &mut Waiting| waiting.until.iter().all(|(clock, tick)| clocks.is_quiet(*clock, *tick));
        self.waiting.extract_if(.., passed).map(|waiting| (waiting.block, waiting.stamp)).collect()
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
