//! A model of PyTorch's caching allocator, to see what it maps for a load without a GPU.
//!
//! It has the rules for one stream on a device that is never full, so no segment is released:
//!
//! - Blocks are multiples of 512 bytes. Those up to 1 MiB have segments of 2 MiB. Those below 10 MiB have
//!   segments of 20 MiB. Larger ones have segments of their own size in multiples of 2 MiB.
//! - A request gets the smallest free block that is large enough, or a new segment. A rest above 1 MiB (512
//!   bytes among the small) becomes a free block and joins its free neighbours.
//! - With a split limit, a block of that size or more is never split. It serves no request below the limit, and
//!   none that it exceeds by 20 MiB or more.
//!
//! Without a limit, addresses decide between equal blocks, and a device chooses these freely. A load of varied
//! sizes then differs by some percent from the measurement.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use poorwill_bench::churn::{ChurnEvent, ChurnProgress};

const MIB: u64 = 1 << 20;
const SMALL_BYTES_MAX: u64 = MIB;
const ROUNDING_BYTES_MAX: u64 = 20 * MIB;

/// The pool of one stream.
#[derive(Debug)]
pub(super) struct CachingPool {
    split_limit_bytes: u64,
    /// All blocks, by address. Segments do not touch each other, so blocks that do are of one segment.
    blocks: BTreeMap<u64, Block>,
    /// Free blocks by size and address: those in segments of small ones, and all others.
    free: [BTreeSet<(u64, u64)>; 2],
    mapped_bytes: u64,
    next_addr: u64,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    bytes: u64,
    free: bool,
    small: bool,
}

impl CachingPool {
    pub(super) fn new(split_limit_bytes: Option<u64>) -> Self {
        Self {
            split_limit_bytes: split_limit_bytes.unwrap_or(u64::MAX),
            blocks: BTreeMap::new(),
            free: [BTreeSet::new(), BTreeSet::new()],
            mapped_bytes: 0,
            next_addr: 0,
        }
    }

    /// What it has mapped after each step of a load.
    pub(super) fn mapped_bytes_along(mut self, load: &[ChurnProgress]) -> Result<Vec<u64>, String> {
        let mut addrs = HashMap::new();
        let mut step = |line: &ChurnProgress| {
            match line.event {
                ChurnEvent::Alloc => {
                    let addr = self.alloc(line.bytes);
                    if addrs.insert(line.block, addr).is_some() {
                        return Err(format!("block {} is taken twice", line.block));
                    }
                }
                ChurnEvent::Free => {
                    let addr = addrs.remove(&line.block);
                    self.free(addr.ok_or_else(|| format!("block {} is given and not live", line.block))?);
                }
            }
            Ok(self.mapped_bytes)
        };
        load.iter().map(&mut step).collect()
    }

    fn alloc(&mut self, asked_bytes: u64) -> u64 {
        let bytes = asked_bytes.max(1).next_multiple_of(512);
        let small = bytes <= SMALL_BYTES_MAX;
        let addr = self.take_free(bytes, small).unwrap_or_else(|| self.grow(bytes, small));
        let whole_bytes = self.blocks.get(&addr).map_or(bytes, |block| block.bytes);
        let rest_bytes = whole_bytes - bytes;
        let splits = if small {
            rest_bytes >= 512
        } else {
            bytes < self.split_limit_bytes && rest_bytes > SMALL_BYTES_MAX
        };
        if splits {
            self.blocks.insert(addr, Block { bytes, free: false, small });
            self.insert_free(addr + bytes, rest_bytes, small);
        } else {
            self.blocks.insert(addr, Block { bytes: whole_bytes, free: false, small });
        }
        addr
    }

    /// The best free block, if it may serve. No other is looked at.
    fn take_free(&mut self, bytes: u64, small: bool) -> Option<u64> {
        let free = &mut self.free[usize::from(small)];
        let best = *free.range((bytes, 0)..).next()?;
        let limit_bytes = self.split_limit_bytes;
        let too_large = if bytes < limit_bytes {
            best.0 >= limit_bytes
        } else {
            best.0 >= bytes.saturating_add(ROUNDING_BYTES_MAX)
        };
        (!too_large && free.remove(&best)).then_some(best.1)
    }

    fn grow(&mut self, bytes: u64, small: bool) -> u64 {
        let segment_bytes = if small {
            2 * MIB
        } else if bytes < 10 * MIB {
            20 * MIB
        } else {
            bytes.next_multiple_of(2 * MIB)
        };
        let addr = self.next_addr;
        self.next_addr += segment_bytes + 2 * MIB;
        self.mapped_bytes += segment_bytes;
        self.blocks.insert(addr, Block { bytes: segment_bytes, free: false, small });
        addr
    }

    fn free(&mut self, addr: u64) {
        let Some(Block { mut bytes, small, .. }) = self.blocks.remove(&addr) else { return };
        let mut begin = addr;
        let behind = self.blocks.get(&(addr + bytes)).copied();
        if let Some(behind) = behind.filter(|block| block.free) {
            self.remove_free(addr + bytes, behind);
            bytes += behind.bytes;
        }
        let before = self.blocks.range(..addr).next_back().map(|(at, block)| (*at, *block));
        if let Some((at, before)) = before.filter(|(at, block)| block.free && at + block.bytes == addr) {
            self.remove_free(at, before);
            begin = at;
            bytes += before.bytes;
        }
        self.insert_free(begin, bytes, small);
    }

    fn insert_free(&mut self, addr: u64, bytes: u64, small: bool) {
        self.blocks.insert(addr, Block { bytes, free: true, small });
        self.free[usize::from(small)].insert((bytes, addr));
    }

    fn remove_free(&mut self, addr: u64, block: Block) {
        self.blocks.remove(&addr);
        self.free[usize::from(block.small)].remove(&(block.bytes, addr));
    }
}

/// The peak is within a percent of what was measured, in hundredths of a GiB.
#[cfg(test)]
pub(super) fn assert_peak(load: &[ChurnProgress], split_limit_bytes: Option<u64>, measured: u64) {
    let mapped_bytes = CachingPool::new(split_limit_bytes).mapped_bytes_along(load).unwrap();
    let peak = mapped_bytes.into_iter().max().unwrap() * 100 / (1024 * MIB);
    assert!(peak.abs_diff(measured) * 100 <= measured, "{peak} of {measured}, in hundredths of a GiB");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event_of(event: ChurnEvent, block: usize, bytes: u64) -> ChurnProgress {
        ChurnProgress { step: 0, event, block, bytes, live_bytes: 0 }
    }

    /// What is mapped after taking blocks of so many bytes (positive numbers) and giving back the n-th of them
    /// (those below one).
    fn mapped_mib(split_limit_mib: Option<u64>, steps: &[i64]) -> Vec<u64> {
        let mut taken = 0;
        let line = |step: &i64| {
            let (event, block, bytes) = match u64::try_from(*step) {
                Ok(bytes) if bytes > 0 => (ChurnEvent::Alloc, taken, bytes),
                _ => (ChurnEvent::Free, usize::try_from(step.unsigned_abs()).unwrap(), 0),
            };
            taken += usize::from(event == ChurnEvent::Alloc);
            event_of(event, block, bytes)
        };
        let load: Vec<ChurnProgress> = steps.iter().map(line).collect();
        let pool = CachingPool::new(split_limit_mib.map(|mib| mib * MIB));
        pool.mapped_bytes_along(&load).unwrap().into_iter().map(|bytes| bytes / MIB).collect()
    }

    const M: i64 = 1 << 20;

    #[test]
    fn segments_have_the_sizes_of_the_rules() {
        for (bytes, segment_mib) in [
            (1, 2),
            (M, 2),
            (M + 1, 20),
            (10 * M - 512, 20),
            (10 * M - 511, 10),
            (10 * M, 10),
            (11 * M, 12),
            (530 * M, 530),
        ] {
            assert_eq!(mapped_mib(None, &[bytes]), [segment_mib], "{bytes}");
        }
    }

    #[test]
    fn a_large_block_is_carved_without_a_limit_and_not_with_one() {
        // The place of 530 MiB is offered to 270, and then another 530 are needed.
        let steps = [530 * M, 0, 270 * M, 530 * M];
        assert_eq!(mapped_mib(None, &steps), [530, 530, 530, 1060]);
        assert_eq!(mapped_mib(Some(20), &steps), [530, 530, 800, 800]);
        // What is left over serves smaller ones, and all is one block again at the end.
        assert_eq!(mapped_mib(None, &[530 * M, 0, 270 * M, 260 * M, -1, -2, 530 * M]), [530; 7]);
    }

    #[test]
    fn a_block_above_the_limit_serves_what_is_little_smaller() {
        assert_eq!(mapped_mib(Some(20), &[100 * M, 0, 80 * M + 512]), [100, 100, 100]);
        assert_eq!(mapped_mib(Some(20), &[100 * M, 0, 80 * M]), [100, 100, 180]);
        assert_eq!(mapped_mib(Some(20), &[20 * M, 0, 12 * M]), [20, 20, 32], "no request below the limit");
    }

    #[test]
    fn small_blocks_share_segments_of_their_own() {
        assert_eq!(mapped_mib(None, &[M, M, M, -1, 512, 2 * M]), [2, 2, 4, 4, 4, 24]);
    }

    #[test]
    fn the_model_maps_what_was_measured_of_dense() {
        // 60 layers of four tensors, each converted to half its size.
        let mut lines = Vec::new();
        let mut line = |event, block, mib: u64| {
            lines.push(event_of(event, block, mib * MIB));
        };
        for (number, mib) in (0..).zip([96, 64, 530, 270].into_iter().cycle().take(240)) {
            line(ChurnEvent::Alloc, 2 * number, mib);
            line(ChurnEvent::Alloc, 2 * number + 1, mib / 2);
            line(ChurnEvent::Free, 2 * number, mib);
        }
        assert_peak(&lines, Some(20 * MIB), 3033);
        assert_peak(&lines, None, 3146);
    }

    #[test]
    fn a_trace_that_cannot_be_is_refused() {
        let line = |event, block| event_of(event, block, 512);
        for lines in [
            vec![line(ChurnEvent::Free, 0)],
            vec![line(ChurnEvent::Alloc, 0), line(ChurnEvent::Alloc, 0)],
            vec![line(ChurnEvent::Alloc, 0), line(ChurnEvent::Free, 0), line(ChurnEvent::Free, 0)],
        ] {
            assert!(CachingPool::new(None).mapped_bytes_along(&lines).is_err());
        }
    }
}
