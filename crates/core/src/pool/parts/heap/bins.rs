//! Free blocks by size: finds one for a request in constant time.
//!
//! There are 32 bins to each power of two, and two levels of bitmaps of the bins in use. The design is that of TLSF
//! (Masmano, Ripoll, Crespo, Real: *TLSF: a new dynamic memory allocator for real-time systems*, 2004). A request
//! takes one of the first few blocks of its own bin if large enough. Else it takes the first of the next bin in use,
//! which always is. So a block is at most 1/32 larger than the best fit. The lists run through the blocks themselves.

use super::blocks::Blocks;
use crate::pool::tools::keys::BlockKey;
use crate::pool::tools::units::UNIT_BYTES;

/// log2 of the bins to a power of two.
const STEP_BITS: u32 = 5;
const STEPS: usize = 1 << STEP_BITS;
/// Powers of two of units that a `u64` of bytes can hold. Those below [`STEPS`] count as one.
const SCALES: usize = (64 - UNIT_BYTES.trailing_zeros() - STEP_BITS + 1) as usize;

/// How many blocks of its own bin a request looks at.
const LOOKS: usize = 2;

#[derive(Debug)]
pub(super) struct Bins {
    scales: u64,
    steps: [u32; SCALES],
    heads: Vec<[BlockKey; STEPS]>,
}

/// The bin of a size of at least 1 unit.
const fn bin(units: u64) -> (usize, usize) {
    let log = units.ilog2();
    if log < STEP_BITS {
        return (0, to_index(units));
    }
    let step = (units >> (log - STEP_BITS)) - STEPS as u64;
    ((log - STEP_BITS + 1) as usize, to_index(step))
}

/// A number below [`STEPS`] as an index.
#[allow(clippy::cast_possible_truncation)]
const fn to_index(small: u64) -> usize {
    small as usize
}

impl Default for Bins {
    fn default() -> Self {
        Self { scales: 0, steps: [0; SCALES], heads: Vec::new() }
    }
}

impl Bins {
    pub(super) fn insert(&mut self, blocks: &mut Blocks, key: BlockKey) {
        let (scale, step) = bin(u64::from(blocks[key].units));
        if self.heads.len() <= scale {
            self.heads.resize(scale + 1, [BlockKey::NONE; STEPS]);
        }
        let head = std::mem::replace(&mut self.heads[scale][step], key);
        blocks[key].bin_next = head;
        if head.is_some() {
            blocks[head].bin_prev = key;
        }
        self.scales |= 1 << scale;
        self.steps[scale] |= 1 << step;
    }

    pub(super) fn remove(&mut self, blocks: &mut Blocks, key: BlockKey) {
        let (scale, step) = bin(u64::from(blocks[key].units));
        let (before, behind) = (blocks[key].bin_prev, blocks[key].bin_next);
        if self.heads[scale][step] != key {
            blocks[before].bin_next = behind;
            if behind.is_some() {
                blocks[behind].bin_prev = before;
            }
            return;
        }
        // `bin_prev` of a head is never read.
        self.heads[scale][step] = behind;
        if behind.is_none() {
            self.steps[scale] &= !(1 << step);
            if self.steps[scale] == 0 {
                self.scales &= !(1 << scale);
            }
        }
    }

    /// A block of at least `bytes`, a multiple of [`UNIT_BYTES`].
    pub(super) fn find(&self, blocks: &Blocks, bytes: u64) -> Option<BlockKey> {
        let (scale, step) = bin(bytes / UNIT_BYTES);
        let mut own = self.heads.get(scale).map_or(BlockKey::NONE, |bins| bins[step]);
        for _ in 0..LOOKS {
            if own.is_none() {
                break;
            }
            if blocks[own].bytes() >= bytes {
                return Some(own);
            }
            own = blocks[own].bin_next;
        }
        self.head_after(scale, step)
    }

    fn head_after(&self, scale: usize, step: usize) -> Option<BlockKey> {
        let later = self.steps.get(scale)? & (u32::MAX << step << 1);
        if later != 0 {
            return Some(self.heads[scale][later.trailing_zeros() as usize]);
        }
        let larger = self.scales & (u64::MAX << scale << 1);
        if larger == 0 {
            return None;
        }
        let scale = larger.trailing_zeros() as usize;
        Some(self.heads[scale][self.steps[scale].trailing_zeros() as usize])
    }

    /// Smaller bins first.
    pub(super) fn at_least<'a>(
        &'a self,
        blocks: &'a Blocks,
        bytes: u64,
    ) -> impl Iterator<Item = BlockKey> + 'a {
        self.lists_from(bytes)
            .flat_map(|head| chain(blocks, head))
            .filter(move |key| blocks[*key].bytes() >= bytes)
    }

    /// Larger bins first.
    pub(super) fn largest_first<'a>(
        &'a self,
        blocks: &'a Blocks,
        bytes: u64,
    ) -> impl Iterator<Item = BlockKey> + 'a {
        let lists = self.lists_from(bytes).rev();
        lists.flat_map(|head| chain(blocks, head)).filter(move |key| blocks[*key].bytes() >= bytes)
    }

    /// Heads of the lists that may hold blocks of at least `bytes`, ascending.
    fn lists_from(&self, bytes: u64) -> impl DoubleEndedIterator<Item = BlockKey> + '_ {
        let (scale, step) = bin((bytes / UNIT_BYTES).max(1));
        let first = (scale * STEPS + step).min(self.heads.len() * STEPS);
        self.heads.as_flattened()[first..].iter().copied().filter(|head| head.is_some())
    }
}

fn chain(blocks: &Blocks, head: BlockKey) -> impl Iterator<Item = BlockKey> + '_ {
    std::iter::successors(head.some(), |key| blocks[*key].bin_next.some())
}

#[cfg(test)]
mod tests {
    use super::super::blocks::{HeapBlock, HeapBlockKind};
    use super::*;

    #[test]
    fn bins_are_ordered_and_a_thirty_second_wide() {
        let mut last = (0, 0);
        for units in 1..100_000_u64 {
            let at = bin(units);
            assert!(at >= last, "{units}");
            if at != last {
                assert!(at > last);
            }
            last = at;
        }
        for log in STEP_BITS..55 {
            let low = 1_u64 << log;
            assert_eq!(bin(low).1, 0);
            assert_eq!(bin(low + (low >> STEP_BITS) - 1), bin(low));
            assert_ne!(bin(low + (low >> STEP_BITS)), bin(low));
        }
        assert!(bin(u64::MAX / UNIT_BYTES).0 < SCALES);
    }

    #[test]
    fn finds_what_fits_and_nothing_else() {
        let mut blocks = Blocks::default();
        let mut bins = Bins::default();
        let sizes = [1_u64, 2, 31, 32, 33, 100, 1000, 1001, 5000, 1 << 20, (1 << 20) + 7, 1 << 31];
        let keys: Vec<BlockKey> = sizes
            .iter()
            .map(|units| {
                let key = blocks.insert(HeapBlock::new(0, units * UNIT_BYTES), HeapBlockKind::Small);
                bins.insert(&mut blocks, key);
                key
            })
            .collect();
        for wanted in [1_u64, 3, 32, 34, 999, 1000, 1001, 1002, 5001, (1 << 20) + 1, 1 << 31] {
            let found = bins.find(&blocks, wanted * UNIT_BYTES).map(|key| blocks[key].bytes() / UNIT_BYTES);
            let best = sizes.iter().copied().find(|units| *units >= wanted).unwrap();
            let found = found.expect("something fits");
            assert!(found >= wanted, "{found} for {wanted}");
            assert!(found <= best.max(best + best / 16), "{found} for {wanted}, best {best}");
        }
        assert_eq!(bins.find(&blocks, (1 << 32) * UNIT_BYTES), None);
        assert_eq!(bins.at_least(&blocks, 1001 * UNIT_BYTES).count(), 5);
        for (nth, key) in keys.iter().enumerate() {
            bins.remove(&mut blocks, *key);
            assert_eq!(bins.at_least(&blocks, UNIT_BYTES).count(), sizes.len() - nth - 1);
        }
        assert_eq!(bins.find(&blocks, UNIT_BYTES), None);
    }
}
