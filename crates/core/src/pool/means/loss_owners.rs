//! Bytes lost with their backup: which blocks they belong to, and how their owner restores them.
//!
//! Their tag is [`crate::TagState::Undefined`] until none is left ([`crate::pool::parts::undefined_ranges`]). Meanwhile reading
//! them is refused, and so is a sleep that would back them up. Freeing the block, dropping the tag's bytes,
//! or writing them again and marking that ends it.

use crate::digest::Digest;
use crate::driver::DeviceRange;
use crate::pool::parts::undefined_ranges::Undefined;
use crate::pool::state::PoolState;
use crate::pool::tools::error::{PoolError, Result};
use crate::pool::tools::handle::BlockId;
use crate::pool::tools::keys::{Location, SegmentKey, TagKey};
use crate::pool::tools::loss_ranges::LostRange;

const RESTORE: &str = "mark as restored";

impl PoolState {
    /// The parts of live blocks in `ranges`, by address; adjacent parts of one block are merged.
    pub(in crate::pool) fn lost_in(&self, ranges: impl IntoIterator<Item = DeviceRange>) -> Vec<LostRange> {
        let mut ranges: Vec<DeviceRange> = ranges.into_iter().collect();
        ranges.sort_unstable();
        let mut lost: Vec<LostRange> = Vec::new();
        for range in ranges {
            let Some((tag, _)) = self.location_of(range.addr) else { continue };
            for (block, offset_bytes, range) in self.heap().live_parts(range) {
                match lost.last_mut() {
                    Some(last) if last.block == block && last.range.end() == range.addr => {
                        last.range.bytes += range.bytes;
                    }
                    _ => {
                        let tag = self.tags().get(tag).name().clone();
                        lost.push(LostRange { tag, block, offset_bytes, range });
                    }
                }
            }
        }
        lost
    }

    pub(in crate::pool) fn lost_of(&self, tags: impl Iterator<Item = TagKey>) -> Vec<LostRange> {
        let undefined = tags.filter_map(|tag| self.tags().get(tag).undefined());
        self.lost_in(undefined.flat_map(Undefined::ranges))
    }

    /// The error of an operation that needs all bytes of an undefined tag.
    pub(in crate::pool) fn undefined_error(&self, op: &'static str, tag: TagKey) -> PoolError {
        match self.lost_of(std::iter::once(tag)) {
            lost if lost.is_empty() => PoolError::Undefined { op, tag: self.tags().get(tag).name().clone() },
            lost => PoolError::Lost { op, lost },
        }
    }

    pub(in crate::pool) fn check_defined(
        &self,
        op: &'static str,
        tag: TagKey,
        range: DeviceRange,
    ) -> Result<()> {
        let Some(undefined) = self.tags().get(tag).undefined().filter(|undefined| !undefined.is_nothing())
        else {
            return Ok(());
        };
        let lost = self.lost_in(undefined.within(range));
        match lost.is_empty() {
            true => Ok(()),
            false if undefined.is_all() => {
                Err(PoolError::Undefined { op, tag: self.tags().get(tag).name().clone() })
            }
            false => Err(PoolError::Lost { op, lost }),
        }
    }

    /// Returns the parts of live blocks in `granules`.
    pub(in crate::pool) fn lose(&mut self, granules: &[DeviceRange]) -> Vec<LostRange> {
        self.forget_stored(granules);
        let lost = self.lost_in(granules.iter().copied());
        for LostRange { range, .. } in &lost {
            if let Some((tag, _)) = self.location_of(range.addr) {
                self.tags_mut().get_mut(tag).lose(*range);
            }
        }
        lost
    }

    /// See [`crate::Pool::mark_block_restored`].
    pub(in crate::pool) fn restore_block(&mut self, block: BlockId) -> Result<Vec<LostRange>> {
        let entry = self.heap().live_block(RESTORE, block)?;
        let tag = self.heap().tag_of_list(entry.list);
        self.tags().check_awake(RESTORE, tag)?;
        let range = DeviceRange::new(entry.addr, entry.bytes());
        let Some(undefined) = self.tags().get(tag).undefined() else { return Ok(Vec::new()) };
        if undefined.is_all() {
            // After a dropping sleep, undefined bytes are not tracked by block.
            return Err(self.undefined_error(RESTORE, tag));
        }
        let lost = self.lost_in(undefined.within(range));
        self.tags_mut().get_mut(tag).define(range);
        Ok(lost)
    }

    /// Whether the backup of the granule at `addr` was loaded without comparing it, with this digest.
    pub(in crate::pool) fn is_suspect(&self, addr: u64, expected: Digest) -> bool {
        self.location_of(addr)
            .is_some_and(|(tag, location)| self.backups().is_suspect(tag, location, expected))
    }

    pub(in crate::pool) fn forget_stored(&mut self, granules: &[DeviceRange]) {
        for granule in granules {
            if let Some((tag, location)) = self.location_of(granule.addr) {
                self.backups_mut().forget_granule(tag, location);
            }
        }
    }

    /// These granules match their digests, on the device or in their backups.
    pub(in crate::pool) fn note_seen(&mut self, granules: impl IntoIterator<Item = DeviceRange>) {
        self.note_loaded(granules, false);
    }

    pub(in crate::pool) fn note_unseen(&mut self, granules: impl IntoIterator<Item = DeviceRange>) {
        self.note_loaded(granules, true);
    }

    fn note_loaded(&mut self, granules: impl IntoIterator<Item = DeviceRange>, unseen: bool) {
        // Nearly all granules are adjacent: each run is looked up once per segment.
        let mut granules = granules.into_iter().peekable();
        while let Some(mut run) = granules.next() {
            while let Some(next) = granules.next_if(|next| next.addr == run.end()) {
                run.bytes += next.bytes;
            }
            while let Some((tag, segment, part)) = self.first_part(run) {
                self.backups_mut().note_loaded(tag, segment, part, unseen);
                run = DeviceRange::new(part.end(), run.bytes - part.bytes);
            }
        }
    }

    /// The part of a range in the segment where it begins.
    fn first_part(&self, range: DeviceRange) -> Option<(TagKey, SegmentKey, DeviceRange)> {
        let key = self.heap().segments().of_addr(range.addr);
        let segment = self.heap().segments().get(key)?;
        let bytes = range.bytes.min(segment.range().end().saturating_sub(range.addr));
        (bytes > 0).then(|| (segment.tag(), key, DeviceRange::new(range.addr, bytes)))
    }

    fn location_of(&self, addr: u64) -> Option<(TagKey, Location)> {
        let segment = self.heap().segments().of_addr(addr);
        Some((self.heap().segments().tag_of(segment)?, (segment, addr)))
    }
}
