//! Runs of free and unmapped blocks that touch each other, in segments that grow. Some of each run is unmapped.
//!
//! Promises:
//!
//! - A run is as long as it can be. What is on both sides is live, in no set, or of another segment.
//! - The first one of a length is found without a walk.

use std::collections::BTreeMap;

use super::first_fit::FirstFit;
use super::node::NodePlace;

#[derive(Debug, Clone, Copy)]
pub(super) struct OpenRun {
    pub(super) start: u64,
    pub(super) end: u64,
    /// Its first block.
    pub(super) first: NodePlace,
}

/// Those of a list.
#[derive(Debug, Default)]
pub(super) struct Runs {
    by_start: BTreeMap<u64, OpenRun>,
    lengths: FirstFit,
}

impl Runs {
    /// One that touches no other.
    pub(super) fn insert(&mut self, run: OpenRun) {
        self.by_start.insert(run.start, run);
        self.lengths.set(run.start, run.end - run.start);
    }

    fn remove(&mut self, run: OpenRun) -> OpenRun {
        self.by_start.remove(&run.start);
        self.lengths.set(run.start, 0);
        run
    }

    /// Takes out the one that ends there.
    pub(super) fn take_below(&mut self, addr: u64) -> Option<OpenRun> {
        let (_, run) = self.by_start.range(..addr).next_back().filter(|(_, run)| run.end == addr)?;
        let run = *run;
        Some(self.remove(run))
    }

    /// Takes out the one that begins there.
    pub(super) fn take_above(&mut self, addr: u64) -> Option<OpenRun> {
        let run = *self.by_start.get(&addr)?;
        Some(self.remove(run))
    }

    /// Takes out the one that has an address.
    pub(super) fn take_around(&mut self, addr: u64) -> Option<OpenRun> {
        let (_, run) = self.by_start.range(..=addr).next_back().filter(|(_, run)| addr < run.end)?;
        let run = *run;
        Some(self.remove(run))
    }

    /// The first block of the first run that can grow to so many bytes.
    pub(super) fn first(&self, bytes: u64) -> Option<NodePlace> {
        self.by_start.get(&self.lengths.first(bytes)?).map(|run| run.first)
    }
}
