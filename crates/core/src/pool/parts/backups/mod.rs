//! Backups: what is stored of a pool's bytes ([`index`]), and what has to be ([`saves`]).
//!
//! [`crate::pool::operations::save`] updates backups in a sleep, [`crate::pool::operations::prepare`] before it, in the background.
//! [`crate::pool::operations::spoiled_backups`] never lets a spoiled backup pass for changed device memory.

mod index;
pub(in crate::pool) mod sample;

use std::collections::BTreeSet;
use std::ops::Range;

pub(in crate::pool) use self::index::{Backup, BackupIndex, Stored, Suspect};
use super::heap::{Heap, Segment, Use};
use crate::backup::Extent;
use crate::driver::DeviceRange;
use crate::pool::tools::keys::{Location, SegmentKey, TagKey};
use crate::tag::StoredAs;

#[derive(Debug, Clone)]
pub(in crate::pool) struct Save {
    pub(in crate::pool) tag: TagKey,
    pub(in crate::pool) location: Location,
    pub(in crate::pool) bytes: u64,
    /// Not as codes: viewable, or kept of a tag that the sleep drops. A cache changes from sleep to sleep, and codes that
    /// outgrow their slots would take a new buffer each time.
    pub(in crate::pool) is_raw: bool,
    /// Whether it is kept of a tag that the sleep drops.
    pub(in crate::pool) is_kept: bool,
    /// Granules of the extent that hold a live byte, ascending.
    pub(in crate::pool) granules: Vec<usize>,
}

impl Save {
    pub(in crate::pool) fn extent(&self) -> Extent<'_> {
        Extent { range: DeviceRange::new(self.location.1, self.bytes), live: &self.granules }
    }

    /// Its granules but those of `kept`, which is ascending.
    pub(in crate::pool) fn without(&self, kept: &[usize]) -> Vec<usize> {
        self.granules.iter().copied().filter(|granule| kept.binary_search(granule).is_err()).collect()
    }
}

/// The operation's name in errors.
pub(in crate::pool) const BACK_UP: &str = "back up by sleeping";

pub(in crate::pool) fn tags_of(saves: &[Save]) -> Vec<TagKey> {
    let tags: BTreeSet<TagKey> = saves.iter().map(|save| save.tag).collect();
    tags.into_iter().collect()
}

/// How the bytes of a segment are cut, and stored.
#[derive(Debug, Clone, Copy)]
pub(in crate::pool) struct Extents {
    /// The most of a new extent, unless it is viewable.
    pub(in crate::pool) most_bytes: u64,
    pub(in crate::pool) stored_as: StoredAs,
    /// Whether they are kept of a tag that the sleep drops. Callers count these, so all of an extent is live.
    pub(in crate::pool) are_kept: bool,
}

/// The saves that store every live granule of a segment but the `unused`: existing extents, and new ones for the rest. A
/// new extent covers one live block, or granules that several share: freeing a block frees its backup. It has at most
/// `most_bytes`, unless it is viewable: then blocks are cut at unused granules only. Extents less than half live are
/// replaced, kept ones that are not all live, and those that are cut otherwise than the tag's are now.
pub(in crate::pool) fn saves(
    heap: &Heap,
    index: &BackupIndex,
    (key, segment): (SegmentKey, &Segment),
    Extents { most_bytes, stored_as, are_kept }: Extents,
    unused: &[usize],
) -> Vec<Save> {
    let (shape, tag, base) = (heap.shape(), segment.tag(), segment.range().addr);
    let mut uses = heap.uses_of_granules(segment);
    unused.iter().for_each(|granule| uses[*granule] = Use::Free);
    let live_in = |range: Range<usize>| -> Vec<usize> {
        range.clone().filter(|nth| uses[*nth].is_live()).map(|nth| nth - range.start).collect()
    };
    let most = shape.granules(most_bytes).max(1);
    // Borders between granules at which no extent may be cut, by the granule behind.
    let mut uncut = match stored_as {
        StoredAs::Compact => vec![false; uses.len()],
        StoredAs::Viewable => heap.borders_in_blocks(segment),
    };
    for granule in unused {
        let behind = (granule + 1).min(uncut.len() - 1);
        [uncut[*granule], uncut[behind]] = [false; 2];
    }
    let is_cut = |nth: usize| !uncut.get(nth).copied().unwrap_or(false);
    let (is_raw, is_kept) = (are_kept || stored_as == StoredAs::Viewable, are_kept);
    let mut saves = Vec::new();
    let mut uncovered: Vec<bool> = uses.iter().map(|is| is.is_live()).collect();
    for (range, _) in index.of_segment(tag, key) {
        let first = shape.granules(range.addr - base);
        let extent = first..first + shape.granules(range.bytes);
        let granules = live_in(extent.clone());
        let fits = match stored_as {
            StoredAs::Compact => extent.len() <= most,
            StoredAs::Viewable => is_cut(extent.start) && is_cut(extent.end),
        };
        let least = if are_kept { extent.len() } else { extent.len().div_ceil(2) };
        if granules.len() < least || !fits {
            continue;
        }
        uncovered[extent].fill(false);
        saves.push(Save { tag, location: (key, range.addr), bytes: range.bytes, is_raw, is_kept, granules });
    }
    for extent in new_extents(&uses, &uncovered, is_cut, most) {
        let range = shape.granule_range(base, extent.start, extent.len());
        let granules = (0..extent.len()).collect();
        saves.push(Save { tag, location: (key, range.addr), bytes: range.bytes, is_raw, is_kept, granules });
    }
    saves.sort_unstable_by_key(|save| save.location);
    saves
}

/// The extents of uncovered granules, of at most `most` granules unless they may not be cut there.
fn new_extents(
    uses: &[Use],
    uncovered: &[bool],
    is_cut: impl Fn(usize) -> bool,
    most: usize,
) -> Vec<Range<usize>> {
    let mut extents = Vec::new();
    let mut nth = 0;
    while nth < uses.len() {
        let start = nth;
        let belongs = |nth: usize| {
            let is_next = nth == start || uses[nth] == uses[nth - 1] && nth - start < most;
            uncovered[nth] && (is_next || !is_cut(nth))
        };
        while nth < uses.len() && belongs(nth) {
            nth += 1;
        }
        if nth > start {
            extents.push(start..nth);
        } else {
            nth += 1;
        }
    }
    extents
}

/// Maximal runs of consecutive numbers.
pub(in crate::pool) fn runs(ascending: &[usize]) -> Vec<Range<usize>> {
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
