//! Blocks beside each other in segments, and those of them that are free, by size.
//!
//! Promises:
//!
//! - Neighbours are of one segment and touch each other. The two ends of a segment have none.
//! - Each free block is in the list of its pool, size class and stream, by its size.
//! - In segments that grow, each unmapped block is in a run of that list, with the free ones beside it.

use std::collections::{BTreeSet, HashMap};

use super::node::{NONE, Node, NodePlace};
use super::runs::{OpenRun, Runs};
use super::segment::PartState;

const SMALL_SEGMENT_BYTES: u64 = 2 << 20;
const LARGE_SEGMENT_BYTES: u64 = 20 << 20;

/// Of one private pool (0: the allocator's own), size class and stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Class {
    pub(super) pool: u32,
    pub(super) is_small: bool,
    pub(super) stream: u32,
}

impl Class {
    /// A segment, or what one that grows grows by, of blocks that have none of their own.
    pub(super) const fn unit_bytes(self) -> u64 {
        if self.is_small { SMALL_SEGMENT_BYTES } else { LARGE_SEGMENT_BYTES }
    }
}

#[derive(Debug)]
pub(super) struct List {
    pub(super) class: Class,
    /// By size, then address.
    pub(super) free: BTreeSet<(u64, u64, NodePlace)>,
    /// Of its segments that grow.
    pub(super) runs: Runs,
    pub(super) asked: u64,
}

#[derive(Debug, Default)]
pub(super) struct Lists {
    nodes: Vec<Node>,
    vacant: Vec<NodePlace>,
    lists: Vec<List>,
    /// Of all lists: free blocks that are all of their segment, or have whole units of one that grows.
    releasable: BTreeSet<(u32, NodePlace)>,
    numbers: HashMap<Class, u32>,
    /// How often a block was looked at.
    #[cfg(test)]
    reads: std::cell::Cell<u64>,
}

fn at(place: NodePlace) -> usize {
    usize::try_from(place).unwrap_or(usize::MAX)
}

impl Lists {
    /// The list of a class.
    pub(super) fn number(&mut self, class: Class) -> u32 {
        if let Some(number) = self.numbers.get(&class) {
            return *number;
        }
        let number = u32::try_from(self.lists.len()).unwrap_or(u32::MAX);
        self.lists.push(List { class, free: BTreeSet::new(), runs: Runs::default(), asked: 0 });
        self.numbers.insert(class, number);
        number
    }

    pub(super) fn list(&self, number: u32) -> &List {
        &self.lists[at(number)]
    }

    pub(super) fn list_mut(&mut self, number: u32) -> &mut List {
        &mut self.lists[at(number)]
    }

    /// Free blocks that are all of their segment, or have whole units of one that grows, list by list.
    pub(super) fn releasable(&self) -> impl Iterator<Item = (&List, NodePlace)> {
        self.releasable.iter().map(|(list, place)| (self.list(*list), *place))
    }

    #[cfg(test)]
    pub(super) fn all(&self) -> impl Iterator<Item = &List> {
        self.lists.iter()
    }

    pub(super) fn node(&self, place: NodePlace) -> &Node {
        #[cfg(test)]
        self.reads.set(self.reads.get() + 1);
        &self.nodes[at(place)]
    }

    pub(super) fn node_mut(&mut self, place: NodePlace) -> &mut Node {
        &mut self.nodes[at(place)]
    }

    #[cfg(test)]
    pub(super) const fn reads(&self) -> u64 {
        self.reads.get()
    }

    /// All of them that are somewhere.
    pub(super) fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| node.bytes > 0)
    }

    /// A block that is in no set yet.
    pub(super) fn add(&mut self, node: Node) -> NodePlace {
        if let Some(place) = self.vacant.pop() {
            self.nodes[at(place)] = node;
            return place;
        }
        self.nodes.push(node);
        u32::try_from(self.nodes.len() - 1).unwrap_or(NONE)
    }

    /// Forgets a block that is in no set.
    pub(super) fn remove(&mut self, place: NodePlace) {
        self.nodes[at(place)].bytes = 0;
        self.vacant.push(place);
    }

    /// Into the sets of its state; a live block is in none. Its neighbours come and go only while it is in none.
    pub(super) fn file(&mut self, place: NodePlace) {
        let node = *self.node(place);
        let Node { addr, bytes, list, state, is_expandable, .. } = node;
        if state == PartState::Cached {
            let own = self.list_mut(list);
            own.free.insert((bytes, addr, place));
            let (first, last) = node.whole_units(own.class.unit_bytes());
            let may_go = if is_expandable { first < last } else { node.is_whole() };
            if may_go {
                self.releasable.insert((list, place));
            }
        }
        self.node_mut(place).is_filed = true;
        if is_expandable && state.is_open() {
            self.join_runs(place);
        }
    }

    /// Out of the sets of its state.
    pub(super) fn take(&mut self, place: NodePlace) {
        let Node { addr, bytes, list, state, is_expandable, .. } = *self.node(place);
        if state == PartState::Cached {
            self.list_mut(list).free.remove(&(bytes, addr, place));
            self.releasable.remove(&(list, place));
        }
        if is_expandable && state.is_open() {
            self.part_run(place);
        }
        self.node_mut(place).is_filed = false;
    }

    /// A block comes between the runs beside it. Those of a free block alone are not kept.
    fn join_runs(&mut self, place: NodePlace) {
        let Node { list, before, behind, .. } = *self.node(place);
        let mut run = self.alone(place);
        if before != NONE && self.node(before).is_in_run() {
            let below = self.list_mut(list).runs.take_below(run.start);
            let below = below.unwrap_or_else(|| self.alone(before));
            run = OpenRun { end: run.end, ..below };
        }
        if behind != NONE && self.node(behind).is_in_run() {
            let above = self.list_mut(list).runs.take_above(run.end);
            run.end = above.unwrap_or_else(|| self.alone(behind)).end;
        }
        self.insert_run(list, run);
    }

    fn alone(&self, place: NodePlace) -> OpenRun {
        let Node { addr, bytes, .. } = *self.node(place);
        OpenRun { start: addr, end: addr.saturating_add(bytes), first: place }
    }

    /// A block leaves its run.
    fn part_run(&mut self, place: NodePlace) {
        let Node { list, before, behind, state, .. } = *self.node(place);
        let in_run = |place| place != NONE && self.node(place).is_in_run();
        if state == PartState::Cached && !in_run(before) && !in_run(behind) {
            return;
        }
        let OpenRun { start, end, .. } = self.alone(place);
        let Some(run) = self.list_mut(list).runs.take_around(start) else { return };
        self.insert_run(list, OpenRun { end: start, ..run });
        self.insert_run(list, OpenRun { start: end, first: behind, ..run });
    }

    fn insert_run(&mut self, list: u32, run: OpenRun) {
        if run.start >= run.end {
            return;
        }
        // No two free blocks touch, so a second one is unmapped.
        let Node { bytes, state, .. } = *self.node(run.first);
        if state == PartState::Unmapped || bytes < run.end - run.start {
            self.list_mut(list).runs.insert(run);
        }
    }

    /// Cuts a block that is in no set. What is behind the first `bytes` is another one of the same state, in no set.
    pub(super) fn cut(&mut self, place: NodePlace, bytes: u64) -> NodePlace {
        let node = *self.node(place);
        let rest = Node { addr: node.addr + bytes, bytes: node.bytes - bytes, before: place, ..node };
        let behind = self.add(rest);
        if node.behind != NONE {
            self.node_mut(node.behind).before = behind;
        }
        let first = self.node_mut(place);
        (first.bytes, first.behind) = (bytes, behind);
        behind
    }

    /// Makes its neighbours that have its state a part of a block, which is in no set.
    pub(super) fn join(&mut self, place: NodePlace) {
        let Node { before, behind, state, .. } = *self.node(place);
        if before != NONE && self.node(before).state == state {
            self.take(before);
            let other = *self.node(before);
            self.remove(before);
            let node = self.node_mut(place);
            (node.addr, node.bytes, node.before) = (other.addr, node.bytes + other.bytes, other.before);
            if other.before != NONE {
                self.node_mut(other.before).behind = place;
            }
        }
        if behind != NONE && self.node(behind).state == state {
            self.take(behind);
            let other = *self.node(behind);
            self.remove(behind);
            let node = self.node_mut(place);
            (node.bytes, node.behind) = (node.bytes + other.bytes, other.behind);
            if other.behind != NONE {
                self.node_mut(other.behind).before = place;
            }
        }
    }
}
