//! Where memory comes from.
//!
//! Unused memory is spare memory (mapped nowhere), and whole chunks in complete free blocks of ready tags
//! that are not held ([`crate::pool::operations::hold_guard`]). A need takes spare memory of its size, then reclaimable chunks of its
//! size; the rest is created.
//!
//! Free memory may have the wrong size. The pool keeps up to 1/1024 more than its peak use. Above that, or at the
//! limit, it releases free memory for every byte it creates. Releasing and creating a large chunk costs less than moving
//! many small ones.

use std::cmp::Reverse;

use crate::pool::parts::physical::PhysicalMemory;
use crate::pool::state::PoolState;
use crate::pool::tools::mapping::Mapping;

const SPARE_PART: u64 = 1024;

#[derive(Debug, Default)]
pub(in crate::pool) struct Supply {
    /// Chunks to unmap, which become spare memory.
    pub(in crate::pool) leaving: Vec<Mapping>,
    pub(in crate::pool) create_bytes: u64,
    /// To release first, from spare memory.
    pub(in crate::pool) release_bytes: u64,
    /// Spare memory that the need takes: size and count.
    pub(in crate::pool) reserved: Vec<(u64, usize)>,
    /// See [`PoolState::granules_ahead`].
    pub(in crate::pool) ahead: usize,
}

impl PoolState {
    /// Takes reclaimable memory that `needs` can use; the caller's `supplied` will be spare by then. Above
    /// `allowed_bytes`, memory of the wrong size is released. The caller has checked that enough is available
    /// ([`PoolState::reclaimable`]).
    pub(in crate::pool) fn supply(
        &mut self,
        memory: &PhysicalMemory,
        needs: &[Mapping],
        supplied: &[Mapping],
        allowed_bytes: u64,
    ) -> Supply {
        let committed_bytes = memory.counters().committed_bytes();
        let mut supply = Supply::default();
        for bytes in sizes(needs) {
            let available = memory.spare_count(bytes) + count(supplied, bytes);
            let taken = available.min(count(needs, bytes));
            let found = self.steal(bytes, count(needs, bytes) - taken, &mut supply.leaving);
            supply.reserved.push((bytes, taken + found));
        }
        let of = |mappings: &[Mapping]| mappings.iter().map(|mapping| mapping.range.bytes).sum::<u64>();
        let reserved: u64 = supply.reserved.iter().map(|(bytes, count)| bytes * *count as u64).sum();
        supply.create_bytes = of(needs) - reserved;
        supply.release_bytes = (committed_bytes + supply.create_bytes).saturating_sub(allowed_bytes);
        let free_bytes = memory.counters().spare_bytes() + of(supplied) + of(&supply.leaving);
        let spare_bytes = free_bytes.saturating_sub(reserved);
        if supply.release_bytes > spare_bytes {
            self.take_reclaimable(supply.release_bytes - spare_bytes, &mut supply.leaving);
        }
        supply
    }

    pub(in crate::pool) fn allowed_bytes(&self, used_bytes: u64) -> u64 {
        let most = self.peak_used_bytes().max(used_bytes);
        let limit_bytes = self.heap().shape().limit_bytes.unwrap_or(u64::MAX);
        most.saturating_add(most / SPARE_PART).min(limit_bytes)
    }

    /// Granules to create beyond `supply` at a new peak. That is as many as the present blocks would need
    /// without sharing, and one chunk's. The same blocks may be packed less well the next time.
    pub(in crate::pool) fn granules_ahead(
        &self,
        memory: &PhysicalMemory,
        supply: &Supply,
        used_bytes: u64,
        allowed_bytes: u64,
    ) -> usize {
        if used_bytes <= self.peak_used_bytes() {
            return 0;
        }
        let shape = self.heap().shape();
        let granule = shape.granule_bytes;
        let committed_bytes =
            memory.counters().committed_bytes() + supply.create_bytes - supply.release_bytes;
        let headroom = allowed_bytes.saturating_sub(committed_bytes) / granule;
        let wanted = self.heap().small_demand_bytes().saturating_add(shape.chunk_bytes);
        let missing = wanted.saturating_sub(memory.held_of(granule)) / granule;
        usize::try_from(headroom.min(missing)).unwrap_or(0)
    }

    /// As [`PoolState::steal_bytes`], leftovers included.
    pub(super) fn take_reclaimable(&mut self, bytes: u64, leaving: &mut Vec<Mapping>) {
        let sum = |leaving: &[Mapping]| leaving.iter().map(|mapping| mapping.range.bytes).sum::<u64>();
        let wanted = sum(leaving).saturating_add(bytes);
        self.steal_bytes(bytes, leaving);
        for mapping in self.leftovers().collect::<Vec<_>>() {
            if sum(leaving) >= wanted {
                return;
            }
            self.heap_mut().segments_mut().set_absent((mapping.segment, mapping.range.addr));
            leaving.push(mapping);
        }
    }
}

fn count(mappings: &[Mapping], bytes: u64) -> usize {
    mappings.iter().filter(|mapping| mapping.range.bytes == bytes).count()
}

/// Each once, the largest first.
fn sizes(mappings: &[Mapping]) -> Vec<u64> {
    let mut sizes: Vec<u64> = mappings.iter().map(|mapping| mapping.range.bytes).collect();
    sizes.sort_unstable_by_key(|size| Reverse(*size));
    sizes.dedup();
    sizes
}
