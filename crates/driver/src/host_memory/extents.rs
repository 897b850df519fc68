//! Free ranges of slabs, and how sizes are packed into new slabs. Pure: nothing here touches memory.

use std::collections::{BTreeMap, BTreeSet};

/// Older slabs have lower numbers.
pub(super) type SlabId = u64;

/// Alignment of buffers, in bytes; each loses less than this.
pub(super) const UNIT_BYTES: u64 = 512;

/// Bounds of a slab for several sizes. A large one holds the driver's locks for long while it is registered;
/// each small one costs calls.
const SLAB_BYTES_MIN: u64 = 64 << 20;
const SLAB_BYTES_MAX: u64 = 1 << 30;

const SLABS_AIM: u64 = 1024;

/// Size of a huge page on nearly every machine.
pub(super) const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Neighbours are merged.
#[derive(Debug, Default)]
pub(super) struct FreeExtents {
    by_position: BTreeMap<(SlabId, u64), u64>,
    by_size: BTreeSet<(u64, SlabId, u64)>,
}

impl FreeExtents {
    pub(super) fn insert(&mut self, slab: SlabId, offset: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let (mut start, mut len) = (offset, bytes);
        let before = self.by_position.range((slab, 0)..(slab, offset)).next_back();
        if let Some((&(_, other), &other_bytes)) = before {
            debug_assert!(other + other_bytes <= offset, "freed twice");
            if other + other_bytes == offset {
                self.forget(slab, other, other_bytes);
                (start, len) = (other, len + other_bytes);
            }
        }
        if let Some(&behind) = self.by_position.get(&(slab, offset + bytes)) {
            self.forget(slab, offset + bytes, behind);
            len += behind;
        }
        self.remember(slab, start, len);
    }

    /// Best fit; ties go to the oldest slab.
    pub(super) fn take(&mut self, bytes: u64) -> Option<(SlabId, u64)> {
        let &(len, slab, offset) = self.by_size.range((bytes, 0, 0)..).next()?;
        self.forget(slab, offset, len);
        if len > bytes {
            self.remember(slab, offset + bytes, len - bytes);
        }
        Some((slab, offset))
    }

    pub(super) fn remove(&mut self, slab: SlabId) {
        let gone: Vec<(u64, u64)> = self
            .by_position
            .range((slab, 0)..=(slab, u64::MAX))
            .map(|(position, bytes)| (position.1, *bytes))
            .collect();
        gone.into_iter().for_each(|(offset, bytes)| self.forget(slab, offset, bytes));
    }

    fn remember(&mut self, slab: SlabId, offset: u64, bytes: u64) {
        self.by_position.insert((slab, offset), bytes);
        self.by_size.insert((bytes, slab, offset));
    }

    fn forget(&mut self, slab: SlabId, offset: u64, bytes: u64) {
        self.by_position.remove(&(slab, offset));
        self.by_size.remove(&(bytes, slab, offset));
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) slabs: Vec<PlannedSlab>,
    /// For each size: the index of its slab, and the offset in it.
    pub(super) positions: Vec<(usize, u64)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PlannedSlab {
    pub(super) bytes: u64,
    pub(super) used_bytes: u64,
}

/// Packs in order, so that the first slabs contain the first sizes. Sizes are multiples of [`UNIT_BYTES`]
/// with a sum below 2^63.
pub(super) fn pack(sizes: &[u64], page_bytes: u64) -> Plan {
    let total: u64 = sizes.iter().sum();
    let target = (total / SLABS_AIM).next_multiple_of(HUGE_PAGE_BYTES).clamp(SLAB_BYTES_MIN, SLAB_BYTES_MAX);
    let mut plan = Plan::default();
    let mut open_bytes = 0;
    for &bytes in sizes {
        if open_bytes > 0 && open_bytes + bytes > target {
            plan.slabs.push(PlannedSlab::of(open_bytes, page_bytes));
            open_bytes = 0;
        }
        plan.positions.push((plan.slabs.len(), open_bytes));
        open_bytes += bytes;
    }
    if open_bytes > 0 {
        plan.slabs.push(PlannedSlab::of(open_bytes, page_bytes));
    }
    plan
}

impl PlannedSlab {
    fn of(used_bytes: u64, page_bytes: u64) -> Self {
        Self { bytes: used_bytes.next_multiple_of(page_bytes), used_bytes }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use fastrand::Rng;

    use super::*;

    #[test]
    fn neighbours_are_one() {
        let mut free = FreeExtents::default();
        for (offset, bytes) in [(0, 10), (20, 10), (40, 10), (10, 10), (30, 10)] {
            free.insert(1, offset, bytes);
        }
        free.insert(2, 50, 10);
        assert_eq!(free.by_position.into_iter().collect::<Vec<_>>(), [((1, 0), 50), ((2, 50), 10)]);
    }

    #[test]
    fn the_smallest_that_is_enough_is_taken() {
        let mut free = FreeExtents::default();
        free.insert(1, 0, 100);
        free.insert(2, 0, 30);
        free.insert(3, 0, 30);
        assert_eq!((free.take(20), free.take(30)), (Some((2, 0)), Some((3, 0))));
        assert_eq!((free.take(11), free.take(10), free.take(100)), (Some((1, 0)), Some((2, 20)), None));
        free.remove(1);
        assert_eq!(free.take(1), None);
    }

    /// Compared with a model: a set of single units.
    #[test]
    fn random_taking_and_giving_back() {
        for seed in 0..200 {
            let mut random = Rng::with_seed(seed);
            let (mut free, mut model) = (FreeExtents::default(), BTreeSet::new());
            let mut taken: Vec<(SlabId, u64, u64)> = Vec::new();
            for slab in 0..3 {
                free.insert(slab, 0, 64);
                model.extend((0..64).map(|unit| (slab, unit)));
            }
            for _ in 0..300 {
                if random.bool() && !taken.is_empty() {
                    let nth = random.usize(..taken.len());
                    let (slab, offset, bytes) = taken.swap_remove(nth);
                    free.insert(slab, offset, bytes);
                    model.extend((offset..offset + bytes).map(|unit| (slab, unit)));
                } else {
                    let bytes = 1 + random.u64(..20);
                    let found = free.take(bytes);
                    let longest = longest_run(&model);
                    assert_eq!(found.is_some(), longest >= bytes, "{bytes} of {longest}");
                    if let Some((slab, offset)) = found {
                        for unit in offset..offset + bytes {
                            assert!(model.remove(&(slab, unit)), "given twice");
                        }
                        taken.push((slab, offset, bytes));
                    }
                }
                let listed: u64 = free.by_position.values().sum();
                assert_eq!((listed, free.by_position.len()), (model.len() as u64, free.by_size.len()));
            }
        }
    }

    fn longest_run(model: &BTreeSet<(SlabId, u64)>) -> u64 {
        let (mut longest, mut run, mut last) = (0, 0, None);
        for &(slab, unit) in model {
            run = if unit > 0 && last == Some((slab, unit - 1)) { run + 1 } else { 1 };
            longest = longest.max(run);
            last = Some((slab, unit));
        }
        longest
    }

    #[test]
    fn plans_are_exact_and_in_order() {
        for seed in 0..300 {
            let mut random = Rng::with_seed(seed);
            let count = 1 + random.u64(..200);
            let sizes: Vec<u64> = (0..count)
                .map(|_| {
                    UNIT_BYTES * (1 + random.u64(..[8, 4096, 400_000][usize::try_from(seed % 3).unwrap()]))
                })
                .collect();
            let plan = pack(&sizes, 4096);
            let mut ends = vec![0; plan.slabs.len()];
            let mut last = 0;
            for (&(slab, offset), bytes) in plan.positions.iter().zip(&sizes) {
                assert!(slab >= last && offset == ends[slab], "in their order, one behind the other");
                (last, ends[slab]) = (slab, offset + bytes);
            }
            for (slab, end) in plan.slabs.iter().zip(ends) {
                assert_eq!((slab.used_bytes, slab.bytes), (end, end.next_multiple_of(4096)));
            }
        }
    }

    #[test]
    fn slabs_grow_with_the_total() {
        let chunks = |count| pack(&vec![32 << 20; count], 4096);
        assert_eq!(chunks(1).slabs.len(), 1);
        assert!(chunks(100).slabs[..50].iter().all(|slab| slab.bytes == 64 << 20));
        let large = chunks(257 << 5);
        assert!(large.slabs.iter().rev().skip(1).all(|slab| slab.bytes == 256 << 20), "{:?}", large.slabs[0]);
        assert_eq!(large.slabs.iter().map(|slab| slab.bytes).sum::<u64>(), 257 << 30);
        let own = pack(&[512, 3 << 30, 512], 4096);
        assert_eq!(own.slabs.iter().map(|slab| slab.bytes).collect::<Vec<_>>(), [4096, 3 << 30, 4096]);
        assert_eq!(pack(&[], 4096), Plan::default());
    }
}
