//! What is taken on trust: granules of tags that were declared immutable, which a sleep need not compare.
//!
//! A stored granule is *proven* when a sleep has seen, with nothing in flight, that the device holds the same bytes.
//! Only of what is proven a sleep believes that it has not changed. A block that is new in a granule ends that, and so does
//! every declaration. A backup may be out of the pool's hands just then, to be brought up to date: whoever puts
//! it back looks at the tag's count of doubts.

use super::blocks::Block;
use super::error::PoolError;
use super::plan::Save;
use super::state::State;
use super::tags::TagKey;
use super::{Shape, Shared};
use crate::digest::Digest;
use crate::driver::DeviceRange;
use crate::tag::{Changes, Tag};

impl Shared {
    /// A granule of a tag that was declared immutable has changed: the tag's granules are compared from now on.
    pub(super) fn end_trust(&self, save: &Save, granule: usize, digests: [Digest; 2]) -> PoolError {
        let [expected, found] = digests;
        let mut state = self.state.lock_anyway();
        let tag = state.segments.get(save.place.0).map(|segment| segment.tag);
        let name = tag.map(|tag| {
            state.tag_mut(tag).changes = Changes::Compared;
            state.tag(tag).tag.clone()
        });
        PoolError::TrustBroken {
            tag: name.unwrap_or_else(Tag::pool),
            range: self.granule_range(save, granule, 1),
            expected,
            found,
        }
    }
}

impl State {
    /// What is stored of a new block's granules is of what was there before.
    pub(super) fn doubt(&mut self, tag: TagKey, block: &Block) {
        // Also of what somebody has taken out to bring it up to date.
        self.tag_mut(tag).doubts += 1;
        if !self.tag(tag).has_backups {
            return;
        }
        let key = self.segment_of(block.addr);
        let Shape { granule_bytes, chunk_bytes, .. } = self.shape;
        let Some(segment) = self.segments.get_mut(key) else { return };
        let stretches = segment.stretches(block.addr, block.end(), chunk_bytes);
        let touched: Vec<u64> = stretches.map(|stretch| stretch.addr).collect();
        for at in touched {
            let backup = segment.backups.get_mut(&at);
            for (range, stored) in backup.into_iter().flat_map(|backup| {
                let starts = (0..).map(|nth| at + nth * granule_bytes);
                starts.map(|at| DeviceRange::new(at, granule_bytes)).zip(&mut backup.granules)
            }) {
                if range.addr < block.end() && block.addr < range.end() {
                    stored.iter_mut().for_each(|stored| stored.proven = false);
                }
            }
        }
    }

    /// Nothing of what is stored of a tag is taken on trust any more.
    pub(super) fn doubt_all(&mut self, tag: TagKey) {
        self.tag_mut(tag).doubts += 1;
        let segments = self.segments.values_mut().filter(|segment| segment.tag == tag);
        segments
            .flat_map(|segment| segment.backups.values_mut())
            .flat_map(|backup| backup.granules.iter_mut().flatten())
            .for_each(|stored| stored.proven = false);
    }
}
