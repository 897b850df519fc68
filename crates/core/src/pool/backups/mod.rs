//! Backups: what is stored of a pool's bytes ([`index`]), and what is to be ([`saves`]).
//!
//! [`super::save`] brings backups up to date in a sleep, [`super::prepare`] does so before, in the background; [`sample`]
//! chooses what a candidate check looks at, and [`super::spoiled`] sees to it that what has spoiled is never taken for a change.

mod index;
pub(super) mod sample;

use std::collections::BTreeSet;
use std::ops::Range;

pub(super) use self::index::{Backup, BackupIndex, Stored, Suspect};
use super::heap::{Heap, Segment};
use super::keys::{Location, SegmentKey, TagKey};

/// One extent to back up.
#[derive(Debug, Clone)]
pub(super) struct Save {
    pub(super) tag: TagKey,
    pub(super) location: Location,
    pub(super) bytes: u64,
    /// Granules of the extent that hold a live byte, ascending.
    pub(super) granules: Vec<usize>,
}

/// What errors call it.
pub(super) const BACK_UP: &str = "back up by sleeping";

/// The tags of saves, each once.
pub(super) fn tags_of(saves: &[Save]) -> Vec<TagKey> {
    let tags: BTreeSet<TagKey> = saves.iter().map(|save| save.tag).collect();
    tags.into_iter().collect()
}

/// What has to be saved of a segment so that every live granule is stored: extents that are stored already, and new ones
/// where none is. A new extent is of one live block, or of granules that several share, and at most `extent_bytes` long:
/// when a block is freed, what is stored of it goes. One that holds mostly what is not live any more is made anew.
pub(super) fn saves(
    heap: &Heap,
    index: &BackupIndex,
    (key, segment): (SegmentKey, &Segment),
    extent_bytes: u64,
) -> Vec<Save> {
    let (shape, tag, base) = (heap.shape(), segment.tag(), segment.range().addr);
    let uses = heap.uses_of_granules(segment);
    let live_in = |range: Range<usize>| -> Vec<usize> {
        range.clone().filter(|nth| uses[*nth].is_live()).map(|nth| nth - range.start).collect()
    };
    let mut saves = Vec::new();
    let mut unaccounted: Vec<bool> = uses.iter().map(|is| is.is_live()).collect();
    for (range, _) in index.of_segment(tag, key) {
        let first = shape.granules(range.addr - base);
        let extent = first..first + shape.granules(range.bytes);
        let granules = live_in(extent.clone());
        if granules.len() * 2 < extent.len() {
            continue;
        }
        unaccounted[extent].fill(false);
        saves.push(Save { tag, location: (key, range.addr), bytes: range.bytes, granules });
    }
    let most = shape.granules(extent_bytes).max(1);
    let mut nth = 0;
    while nth < uses.len() {
        let start = nth;
        let belongs = |nth: usize| unaccounted[nth] && uses[nth] == uses[start] && nth - start < most;
        while nth < uses.len() && belongs(nth) {
            nth += 1;
        }
        if nth > start {
            let range = shape.granule_range(base, start, nth - start);
            let granules = (0..nth - start).collect();
            saves.push(Save { tag, location: (key, range.addr), bytes: range.bytes, granules });
        } else {
            nth += 1;
        }
    }
    saves.sort_unstable_by_key(|save| save.location);
    saves
}

/// Maximal runs of consecutive numbers in an ascending list.
pub(super) fn runs(ascending: &[usize]) -> Vec<Range<usize>> {
    ascending.chunk_by(|a, b| a + 1 == *b).map(|run| run[0]..run[run.len() - 1] + 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_join_neighbours_only() {
        assert_eq!(runs(&[]), []);
        assert_eq!(runs(&[3, 5]), [3..4, 5..6]);
        assert_eq!(runs(&[0, 1, 2, 5, 7, 8]), [0..3, 5..6, 7..9]);
    }
}
