//! A model of PyTorch's caching allocator on one device, with its settings, in a memory pool or not.
//!
//! It follows the rules of PyTorch 2.11 (`c10/cuda/CUDACachingAllocator.cpp`, BSD-3-Clause, read and not copied):
//!
//! - Blocks are multiples of 512 bytes. Those up to 1 MiB have segments of 2 MiB, and those below 10 MiB of 20 MiB. Larger
//!   ones have segments of their own size in multiples of 2 MiB.
//! - A request gets the smallest free block of its stream that is large enough, the lowest of equal ones, or a new
//!   segment. A rest above 1 MiB (512 bytes among the small) becomes a free block, and free neighbours join.
//! - With a split limit, a block of that size or more is never split. It serves no request below the limit, and none
//!   that it exceeds by 20 MiB or more.
//! - Where memory lacks, one free block beyond the limit goes back, or the largest ones until they suffice. Then all whole
//!   free segments do. Neither is so in a memory pool of a sleep mode.
//! - With expandable segments, each stream and size class has one segment that grows by 2 or 20 MiB. Free units go back.
//! - With a threshold, a new segment beyond it gives back whole free segments, the longest unused first. PyTorch does so
//!   only where a memory fraction is set, which may be all.
//!
//! Not modelled: other threads, uses by a second stream (a free counts when it completes), captures of graphs, memory
//! fractions, `roundup_power2_divisions`. A device chooses addresses as it likes; here each segment lies below the last
//! one, which decides between equal blocks.

use ::poorwill::PoolError;

use super::allocator::Allocator;
use super::lists::{Class, Lists};
use super::node::{NONE, Node, NodePlace};
use super::segment::{PartState, Segment, SegmentPart};
use super::setup::{AllocatorKind, Setup};
use crate::card::Card;
use crate::trace::{Block, BlockNumber};

const MIB: u64 = 1 << 20;
const GRAIN_BYTES: u64 = 512;
const SMALL_BYTES_MAX: u64 = MIB;
/// From here on, segments have their block's size.
const OWN_SIZE_BYTES: u64 = 10 * MIB;
const STEP_BYTES: u64 = 2 * MIB;
const ROUNDING_BYTES_MAX: u64 = 20 * MIB;
/// The first segment lies below it.
const TOP_ADDR: u64 = 1 << 47;
/// Between segments, so that no two touch.
const GAP_BYTES: u64 = 2 * MIB;

#[derive(Debug)]
pub(super) struct CachingAllocator {
    lists: Lists,
    /// Where each block of the trace is.
    places: Vec<NodePlace>,
    usable_bytes: u64,
    total_bytes: u64,
    mapped_bytes: u64,
    next_addr: u64,
    max_split_bytes: u64,
    is_expandable: bool,
    /// Beyond it, what was unused for long goes back.
    collect_at: Option<u64>,
    kind: AllocatorKind,
    /// Whether something became free since everything was given back.
    has_freed: bool,
    retries: u64,
}

impl CachingAllocator {
    pub(super) fn new(setup: &Setup, card: Card, blocks: usize) -> Self {
        let usable_bytes = card.usable_bytes();
        Self {
            lists: Lists::default(),
            places: vec![NONE; blocks],
            usable_bytes,
            total_bytes: card.total_bytes,
            mapped_bytes: 0,
            next_addr: TOP_ADDR,
            max_split_bytes: setup.max_split_bytes(),
            is_expandable: setup.is_expandable(),
            collect_at: setup.collect_at(card.total_bytes),
            kind: setup.kind(),
            has_freed: false,
            retries: 0,
        }
    }

    fn place(&self, number: BlockNumber) -> NodePlace {
        usize::try_from(number).ok().and_then(|number| self.places.get(number)).copied().unwrap_or(NONE)
    }

    /// Which list a block of so many bytes is of.
    fn class(&self, block: &Block, bytes: u64) -> Class {
        let is_pool = self.kind != AllocatorKind::PyTorch;
        Class {
            pool: if is_pool { block.pool.saturating_add(1) } else { block.pool },
            is_small: bytes <= SMALL_BYTES_MAX,
            stream: block.stream,
        }
    }

    /// The best fit, if it may serve. No other is looked at.
    fn cached(&mut self, list: u32, bytes: u64) -> Option<NodePlace> {
        self.lists.list_mut(list).asked += 1;
        let (best_bytes, _, place) = self.best(list, bytes)?;
        let limit = self.max_split_bytes;
        let is_too_large = if bytes < limit {
            best_bytes >= limit
        } else {
            best_bytes >= bytes.saturating_add(ROUNDING_BYTES_MAX)
        };
        if is_too_large {
            return None;
        }
        self.lists.take(place);
        Some(place)
    }

    /// The smallest free block that is large enough. In segments that grow, the one that could grow least: the open end is
    /// used last.
    fn best(&self, list: u32, bytes: u64) -> Option<(u64, u64, NodePlace)> {
        let mut open = self.lists.list(list).free.range((bytes, 0, 0)..).copied();
        let mut best = open.next()?;
        if self.is_expandable {
            for next in open {
                if self.could_be(next.2) >= self.could_be(best.2) {
                    break;
                }
                best = next;
            }
        }
        Some(best)
    }

    /// How large a block would be with the unmapped addresses behind it.
    fn could_be(&self, place: NodePlace) -> u64 {
        let Node { bytes, behind, .. } = *self.lists.node(place);
        let unmapped = (behind != NONE).then(|| self.lists.node(behind));
        unmapped
            .filter(|node| node.state == PartState::Unmapped)
            .map_or(bytes, |node| bytes.saturating_add(node.bytes))
    }

    /// A segment of its own, or more of the one that grows.
    fn new_memory(&mut self, list: u32, bytes: u64) -> Option<NodePlace> {
        if self.is_expandable {
            return self.grown(list, bytes);
        }
        let class = self.lists.list(list).class;
        let segment = if class.is_small || bytes < OWN_SIZE_BYTES {
            class.unit_bytes()
        } else {
            bytes.checked_next_multiple_of(STEP_BYTES)?
        };
        self.map(segment)?;
        Some(self.reserve(list, segment, PartState::Cached))
    }

    fn map(&mut self, bytes: u64) -> Option<()> {
        let mapped = self.mapped_bytes.checked_add(bytes).filter(|mapped| *mapped <= self.usable_bytes)?;
        self.mapped_bytes = mapped;
        Some(())
    }

    /// New addresses, in no set.
    fn reserve(&mut self, list: u32, bytes: u64, state: PartState) -> NodePlace {
        // Units of growing segments count from zero.
        let unit = if self.is_expandable { self.unit_bytes(list) } else { GAP_BYTES };
        let addr = self.next_addr.saturating_sub(bytes.saturating_add(GAP_BYTES)) / unit * unit;
        self.next_addr = addr;
        let is_expandable = self.is_expandable;
        self.lists.add(Node {
            addr,
            bytes,
            before: NONE,
            behind: NONE,
            list,
            state,
            is_filed: false,
            is_expandable,
            asked: 0,
        })
    }

    fn unit_bytes(&self, list: u32) -> u64 {
        self.lists.list(list).class.unit_bytes()
    }

    /// Maps more of a segment that grows, behind a free block at its end if there is one.
    fn grown(&mut self, list: u32, bytes: u64) -> Option<NodePlace> {
        // The first block from which free and unmapped addresses go on for so many bytes.
        let mut place = self.lists.list(list).runs.first(bytes).unwrap_or_else(|| {
            let unit = self.unit_bytes(list);
            // As much as all memory and an eighth, so that one is enough.
            let all = self.total_bytes.saturating_add(self.total_bytes / 8).max(bytes);
            let place = self.reserve(list, all.div_ceil(unit).saturating_mul(unit), PartState::Unmapped);
            self.lists.file(place);
            place
        });
        if self.lists.node(place).state == PartState::Unmapped {
            place = self.map_begin(place, bytes)?;
        }
        while self.lists.node(place).bytes < bytes {
            let Node { bytes: has, behind, .. } = *self.lists.node(place);
            place = self.map_begin(behind, bytes - has)?;
        }
        self.lists.take(place);
        Some(place)
    }

    /// Maps units at the beginning of an unmapped block. Returns the free block that has them, with its neighbours.
    fn map_begin(&mut self, place: NodePlace, bytes: u64) -> Option<NodePlace> {
        let Node { list, bytes: has, .. } = *self.lists.node(place);
        let unit = self.unit_bytes(list);
        let bytes = bytes.min(has).div_ceil(unit) * unit;
        self.map(bytes)?;
        self.lists.take(place);
        if bytes < has {
            let rest = self.lists.cut(place, bytes);
            self.lists.file(rest);
        }
        self.lists.node_mut(place).state = PartState::Cached;
        self.lists.join(place);
        self.lists.file(place);
        Some(place)
    }

    /// Gives free blocks of this list back that are too large to be split. One that is large enough goes, or else the
    /// largest ones until they suffice.
    fn release_available(&mut self, list: u32, bytes: u64) -> bool {
        if self.max_split_bytes == u64::MAX {
            return false;
        }
        let wanted = bytes.max(self.max_split_bytes);
        let free = &self.lists.list(list).free;
        let may = |(_, _, place): &&(u64, u64, NodePlace)| !self.lists.node(*place).is_expandable;
        let enough = free.range((wanted, 0, 0)..).next().filter(may).map(|(_, _, place)| *place);
        let mut released = 0;
        let chosen: Vec<NodePlace> = match enough {
            Some(place) => {
                released = wanted;
                vec![place]
            }
            None => {
                let below = free.range((self.max_split_bytes, 0, 0)..(wanted, 0, 0)).rev().filter(may);
                let still_lacks = |(size, _, place): &(u64, u64, NodePlace)| {
                    let lacks = released < wanted;
                    released += if lacks { *size } else { 0 };
                    lacks.then_some(*place)
                };
                below.map_while(still_lacks).collect()
            }
        };
        chosen.into_iter().for_each(|place| self.release(place));
        released >= wanted
    }

    /// Gives everything back, so that what lacked memory can try again.
    fn retry(&mut self) {
        self.retries += 1;
        if std::mem::take(&mut self.has_freed) {
            self.release_cached(|class| class.pool == 0);
        }
    }

    /// Gives everything back that may be.
    fn release_cached(&mut self, may: impl Fn(Class) -> bool) {
        let found = self.lists.releasable().filter(|(list, _)| may(list.class));
        let places: Vec<NodePlace> = found.map(|(_, place)| place).collect();
        for place in places {
            if self.is_expandable {
                self.unmap_units(place);
            } else {
                self.release(place);
            }
        }
    }

    /// Whole free segments beyond the threshold, those first that were free for longer than others.
    fn collect(&mut self) {
        let Some(over) =
            self.collect_at.and_then(|at| self.mapped_bytes.checked_sub(at)).filter(|over| *over > 0)
        else {
            return;
        };
        let found = self.lists.releasable().filter(|(list, _)| !list.class.is_small && list.class.pool == 0);
        let found = found.map(|(list, place)| (list, place, self.lists.node(place)));
        let whole = found.filter(|(.., node)| node.is_whole());
        let mut open: Vec<(NodePlace, u64)> =
            whole.map(|(list, place, node)| (place, list.asked - node.asked)).collect();
        let mut released = 0_u64;
        while released < over && !open.is_empty() {
            let ages: u128 = open.iter().map(|(_, age)| u128::from(*age)).sum();
            let count = open.len() as u128;
            // As old as their mean, or older.
            let (old, rest): (Vec<_>, Vec<_>) =
                open.into_iter().partition(|(_, age)| u128::from(*age) * count >= ages);
            for (place, _) in old {
                released += self.lists.node(place).bytes;
                self.release(place);
            }
            open = rest;
        }
    }

    /// Gives a block back that is free and may be a segment.
    fn release(&mut self, place: NodePlace) {
        self.lists.take(place);
        let Node { bytes, before, behind, .. } = *self.lists.node(place);
        // PyTorch does not look whether it is split; the neighbours lose each other.
        if before != NONE {
            self.lists.take(before);
            self.lists.node_mut(before).behind = NONE;
            self.lists.file(before);
        }
        if behind != NONE {
            self.lists.take(behind);
            self.lists.node_mut(behind).before = NONE;
            self.lists.file(behind);
        }
        self.lists.remove(place);
        self.mapped_bytes -= bytes;
    }

    /// Gives the whole units of a free block in a growing segment back.
    fn unmap_units(&mut self, place: NodePlace) {
        let Node { addr, bytes, list, .. } = *self.lists.node(place);
        let unit = self.unit_bytes(list);
        let (from, to) = self.lists.node(place).whole_units(unit);
        if to <= from {
            return;
        }
        self.lists.take(place);
        let mut place = place;
        if from > addr {
            let first = place;
            place = self.lists.cut(first, from - addr);
            self.lists.file(first);
        }
        if addr + bytes > to {
            let rest = self.lists.cut(place, to - from);
            self.lists.file(rest);
        }
        self.lists.node_mut(place).state = PartState::Unmapped;
        self.lists.join(place);
        self.lists.file(place);
        self.mapped_bytes -= to - from;
    }

    fn hand_out(&mut self, place: NodePlace, number: BlockNumber, bytes: u64) {
        let Node { bytes: has, list, .. } = *self.lists.node(place);
        let rest = has - bytes;
        let splits = if self.lists.list(list).class.is_small || self.is_expandable {
            rest >= GRAIN_BYTES
        } else {
            bytes < self.max_split_bytes && rest > SMALL_BYTES_MAX
        };
        if splits {
            let rest = self.lists.cut(place, bytes);
            self.lists.node_mut(rest).state = PartState::Cached;
            self.lists.file(rest);
        }
        self.lists.node_mut(place).state = PartState::Live(number);
        if let Some(known) = usize::try_from(number).ok().and_then(|number| self.places.get_mut(number)) {
            *known = place;
        }
    }
}

impl Allocator for CachingAllocator {
    fn alloc(&mut self, number: BlockNumber, block: &Block) -> Result<bool, PoolError> {
        let Some(bytes) = block.bytes.checked_next_multiple_of(GRAIN_BYTES) else { return Ok(false) };
        let class = self.class(block, bytes);
        let list = self.lists.number(class);
        let mut found = self.cached(list, bytes);
        if found.is_none() {
            self.collect();
            found = self.new_memory(list, bytes);
        }
        // Pools of sleep modes fail at once where memory lacks.
        let may_release = self.kind == AllocatorKind::PyTorch;
        if found.is_none() && may_release && self.release_available(list, bytes) {
            found = self.new_memory(list, bytes);
        }
        if found.is_none() && class.pool == 0 {
            self.retry();
            found = self.new_memory(list, bytes);
        }
        let Some(place) = found else { return Ok(false) };
        self.hand_out(place, number, bytes);
        Ok(true)
    }

    fn free(&mut self, number: BlockNumber) -> Result<(), PoolError> {
        let place = self.place(number);
        if place == NONE {
            return Ok(());
        }
        let asked = self.lists.list(self.lists.node(place).list).asked;
        let node = self.lists.node_mut(place);
        (node.state, node.asked) = (PartState::Cached, asked);
        self.has_freed = true;
        self.lists.join(place);
        self.lists.file(place);
        Ok(())
    }

    fn empty_cache(&mut self) -> Result<(), PoolError> {
        if std::mem::take(&mut self.has_freed) {
            self.release_cached(|class| class.pool == 0);
        }
        Ok(())
    }

    fn load_ends(&mut self) -> Result<(), PoolError> {
        if self.kind == AllocatorKind::Cumem {
            self.release_cached(|_| true);
        }
        Ok(())
    }

    fn limit(&mut self, usable_bytes: u64) -> Result<bool, PoolError> {
        self.usable_bytes = usable_bytes;
        Ok(self.mapped_bytes <= usable_bytes)
    }

    fn retries(&self) -> Option<u64> {
        (self.kind == AllocatorKind::PyTorch).then_some(self.retries)
    }

    fn mapped_bytes(&self) -> Result<u64, PoolError> {
        Ok(self.mapped_bytes)
    }

    fn layout(&self) -> Result<Vec<Segment>, PoolError> {
        let mut nodes: Vec<&Node> = self.lists.nodes().collect();
        nodes.sort_unstable_by_key(|node| node.addr);
        let mut segments: Vec<Segment> = Vec::new();
        for node in nodes {
            let pool = self.lists.list(node.list).class.pool;
            let part = SegmentPart { bytes: node.bytes, state: node.state };
            match segments.last_mut() {
                Some(segment) if node.before != NONE => segment.parts.push(part),
                _ => segments.push(Segment { addr: node.addr, pool, parts: vec![part] }),
            }
        }
        Ok(segments.into_iter().filter_map(Segment::trimmed).collect())
    }
}

#[test]
fn whole_segments_are_known_without_a_search() {
    let mut random = fastrand::Rng::with_seed(5);
    for text in [
        "pytorch",
        "pytorch:max_split_size_mb:20",
        "pytorch:garbage_collection_threshold:0.5",
        "pytorch:expandable_segments:True",
    ] {
        let card = Card { total_bytes: 250 * MIB, taken_bytes: 0, budget_bytes: None };
        let mut allocator = CachingAllocator::new(&text.parse().unwrap(), card, 3000);
        let (mut live, mut seen) = (Vec::new(), 0);
        for number in 0..3000 {
            let bytes = random.u64(1..if number % 2 == 0 { 40 * MIB } else { MIB });
            if allocator.alloc(number, &Block { bytes, stream: 0, pool: 0, stack: 0 }).unwrap() {
                live.push(number);
            }
            while live.len() > 20 || (!live.is_empty() && random.u8(0..3) == 0) {
                allocator.free(live.swap_remove(random.usize(0..live.len()))).unwrap();
            }
            let may_go = |place: &NodePlace| {
                let node = allocator.lists.node(*place);
                let unit = allocator.unit_bytes(node.list);
                let (first, last) = node.whole_units(unit);
                if node.is_expandable { first < last } else { node.is_whole() }
            };
            let free = allocator.lists.all().flat_map(|list| &list.free).map(|(_, _, place)| *place);
            let searched: std::collections::BTreeSet<_> = free.filter(may_go).collect();
            let known: std::collections::BTreeSet<_> =
                allocator.lists.releasable().map(|(_, place)| place).collect();
            assert_eq!(searched, known, "{text}: {number}");
            seen += known.len();
        }
        assert!(seen > 0 && allocator.retries > 0, "{text}: {seen}, {}", allocator.retries);
    }
}

#[cfg(test)]
mod grown {
    use super::*;

    const EXPANDABLE: &str = "pytorch:expandable_segments:True";

    fn opened(blocks: usize) -> CachingAllocator {
        let card = Card { total_bytes: 1 << 42, taken_bytes: 0, budget_bytes: None };
        CachingAllocator::new(&EXPANDABLE.parse().unwrap(), card, blocks)
    }

    /// Node reads of each growth beyond so many holes, none of which is large enough.
    fn reads_of_a_growth(holes: u32) -> u64 {
        const GROWTHS: u32 = 10;
        let mut allocator = opened(10_000);
        let block = |bytes| Block { bytes, stream: 0, pool: 0, stack: 0 };
        for number in 0..2 * holes {
            assert!(allocator.alloc(number, &block(20 * MIB)).unwrap());
        }
        (0..holes).for_each(|hole| allocator.free(2 * hole).unwrap());
        allocator.empty_cache().unwrap();
        let before = allocator.lists.reads();
        for number in 2 * holes..2 * holes + GROWTHS {
            assert!(allocator.alloc(number, &block(40 * MIB)).unwrap());
        }
        (allocator.lists.reads() - before) / u64::from(GROWTHS)
    }

    #[test]
    fn a_growth_reads_as_much_with_many_holes_as_with_few() {
        let [few, many] = [10, 1000].map(reads_of_a_growth);
        assert!(few > 0 && many <= 2 * few, "{few}, {many}");
    }

    /// As PyTorch looks for it: from each unmapped block on, or the free one before it.
    fn walked(allocator: &CachingAllocator, list: u32, bytes: u64) -> Option<NodePlace> {
        let node = |place: NodePlace| allocator.lists.node(place);
        let is_open = |place: NodePlace| place != NONE && node(place).state.is_open();
        let unmapped = |node: &&Node| node.list == list && node.state == PartState::Unmapped;
        let mut addrs: Vec<&Node> = allocator.lists.nodes().filter(unmapped).collect();
        addrs.sort_unstable_by_key(|node| node.addr);
        addrs.into_iter().find_map(|unmapped| {
            let own = || (0..).find(|place| node(*place).bytes > 0 && node(*place).addr == unmapped.addr);
            let first = if is_open(unmapped.before) { unmapped.before } else { own()? };
            let (mut at, mut found) = (first, 0_u64);
            while found < bytes && is_open(at) {
                found += node(at).bytes;
                at = node(at).behind;
            }
            (found >= bytes).then_some(first)
        })
    }

    #[test]
    fn a_growth_begins_where_a_walk_over_all_holes_does() {
        let mut random = fastrand::Rng::with_seed(7);
        let (mut found, mut lacking) = (0, 0);
        for _ in 0..20 {
            let mut allocator = opened(1000);
            let mut live = Vec::new();
            for number in 0..400 {
                let most = if random.bool() { 90 * MIB } else { MIB };
                let bytes = random.u64(1..most);
                let block = Block { bytes, stream: random.u32(0..2), pool: random.u32(0..2), stack: 0 };
                if allocator.alloc(number, &block).unwrap() {
                    live.push(number);
                }
                while live.len() > 40 || (!live.is_empty() && random.u8(0..3) == 0) {
                    allocator.free(live.swap_remove(random.usize(0..live.len()))).unwrap();
                }
                if random.u8(0..20) == 0 {
                    allocator.empty_cache().unwrap();
                }
                for list in 0..u32::try_from(allocator.lists.all().count()).unwrap() {
                    let bytes = random.u64(1..200 * MIB).next_multiple_of(GRAIN_BYTES);
                    let first = allocator.lists.list(list).runs.first(bytes);
                    assert_eq!(first, walked(&allocator, list, bytes), "{number}, {list}: {bytes}");
                    found += u64::from(first.is_some());
                    lacking += u64::from(first.is_none());
                }
            }
        }
        assert!(found > 1000 && lacking == 0, "{found}, {lacking}");
    }
}
