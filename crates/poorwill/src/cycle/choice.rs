//! Which granules of a load are written again: chosen at random, the same ones in every run.

use poorwill_core::Block;

use super::fraction::Fraction;

/// Where the choice comes from.
const SEED: u64 = 0x706F_6F72_7769_6C6C;

/// A granule inside a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Granule {
    pub(super) tensor: usize,
    /// From the beginning of the tensor, in bytes.
    pub(super) offset: u64,
}

/// A part of the granules that lie wholly inside tensors; at least one if the part is not nothing and there is one.
pub(super) fn choose(blocks: &[Block], granule_bytes: u64, part: Fraction) -> Vec<Granule> {
    let mut granules: Vec<Granule> = (0..)
        .zip(blocks)
        .flat_map(|(tensor, block)| {
            offsets(block, granule_bytes).map(move |offset| Granule { tensor, offset })
        })
        .collect();
    let count = part.of(granules.len());
    granules.sort_by_cached_key(|granule| mixed(SEED ^ mixed(granule.tensor as u64) ^ granule.offset));
    granules.truncate(count);
    granules.sort_unstable();
    granules
}

/// Where in a tensor granules begin that hold nothing else.
fn offsets(block: &Block, granule_bytes: u64) -> impl Iterator<Item = u64> + use<> {
    let (start, end) = (block.range.addr, block.range.addr + block.requested_bytes);
    let first = start.next_multiple_of(granule_bytes);
    let whole = end.saturating_sub(first) / granule_bytes;
    (0..whole).map(move |nth| first - start + nth * granule_bytes)
}

/// A number that looks like any other: the finisher of SplitMix64.
fn mixed(number: u64) -> u64 {
    let number = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use poorwill_core::{AllocRequest, Tag};

    use super::*;
    use crate::{Arena, Config};

    #[test]
    fn granules_that_are_chosen_lie_wholly_inside_tensors() {
        let arena = Arena::open(Config::on("host:128MiB".parse().unwrap())).unwrap();
        let granule_bytes = arena.driver().info().granule_bytes;
        let sizes =
            [1, granule_bytes - 1, 5 * granule_bytes + 700, 512, 9 * granule_bytes, 3 * granule_bytes];
        let blocks: Vec<Block> = sizes
            .iter()
            .map(|bytes| arena.alloc(&AllocRequest::new(*bytes, Tag::weights())).unwrap())
            .collect();
        let all = choose(&blocks, granule_bytes, Fraction::ALL);
        assert!(all.is_sorted_by(|a, b| a < b) && (13..=17).contains(&all.len()), "{all:?}");
        for granule in &all {
            let block = &blocks[granule.tensor];
            assert_eq!((block.range.addr + granule.offset) % granule_bytes, 0);
            assert!(granule.offset + granule_bytes <= block.requested_bytes);
        }
        assert!(choose(&blocks, granule_bytes, Fraction::NONE).is_empty());
        assert_eq!(choose(&blocks, granule_bytes, Fraction::HUNDREDTH).len(), 1);
        assert!(choose(&blocks[..2], granule_bytes, Fraction::ALL).is_empty());
        let half = choose(&blocks, granule_bytes, "50%".parse().unwrap());
        assert!(half.len() >= 6 && half.iter().all(|granule| all.contains(granule)));
        assert_eq!(half, choose(&blocks, granule_bytes, "0.5".parse().unwrap()));
    }
}
