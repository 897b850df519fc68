//! Which granules change; the same in every run.

use poorwill::Block;

use super::fraction::Fraction;
use crate::blocks::Granule;

const SEED: u64 = 0x706F_6F72_7769_6C6C;

/// A part of the granules wholly inside blocks: at least one, unless the part is nothing.
pub(super) fn choose(blocks: &[Block], granule_bytes: u64, part: Fraction) -> Vec<Granule> {
    let mut granules: Vec<Granule> = (0..)
        .zip(blocks)
        .flat_map(|(block, range)| offsets(range, granule_bytes).map(move |offset| Granule { block, offset }))
        .collect();
    let count = part.of(granules.len());
    fastrand::Rng::with_seed(SEED).shuffle(&mut granules);
    granules.truncate(count);
    granules.sort_unstable();
    granules
}

/// Offsets of the granules that hold nothing else.
fn offsets(block: &Block, granule_bytes: u64) -> impl Iterator<Item = u64> + use<> {
    let (start, end) = (block.range.addr, block.range.addr + block.requested_bytes);
    let first = start.next_multiple_of(granule_bytes);
    let whole = end.saturating_sub(first) / granule_bytes;
    (0..whole).map(move |nth| first - start + nth * granule_bytes)
}

#[cfg(test)]
mod tests {
    use poorwill::{AllocRequest, Arena, Config, Tag};

    use super::*;

    #[test]
    fn granules_that_are_chosen_lie_wholly_inside_blocks() {
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
            let block = &blocks[granule.block];
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
