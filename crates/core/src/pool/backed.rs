//! What is stored of a pool's bytes, by place: finding, keeping and letting go of backups.
//!
//! A backup is of a [stretch](super::segment::Segment::stretches), a chunk's length at most, however large the piece is
//! that is mapped there. So nothing that is stored has to be moved or cut when a wake brings memory in pieces of other
//! sizes ([`super::layout`]).

use std::collections::BTreeSet;

use super::plan::Save;
use super::segment::{Backup, Place, SegmentKey};
use super::state::{State, TagKey};
use crate::driver::DeviceRange;

impl State {
    pub(super) fn backup(&self, (segment, addr): Place) -> Option<&Backup> {
        self.segments.get(segment)?.backups.get(&addr)
    }

    pub(super) fn backup_mut(&mut self, (segment, addr): Place) -> Option<&mut Backup> {
        self.segments.get_mut(segment)?.backups.get_mut(&addr)
    }

    /// Whether chunks still lie so that a save is of one stretch.
    pub(super) fn is_stretch(&self, save: &Save) -> bool {
        let (segment, range) = (self.segments.get(save.place.0), DeviceRange::new(save.place.1, save.bytes));
        segment.is_some_and(|segment| segment.chunk_of(range, self.shape.chunk_bytes).is_some())
    }

    pub(super) fn take_backup(&mut self, save: &Save) -> Option<Backup> {
        self.segments.get_mut(save.place.0)?.backups.remove(&save.place.1)
    }

    pub(super) fn keep_backup(&mut self, save: &Save, backup: Backup) {
        if !self.is_stretch(save) {
            return;
        }
        let Some(segment) = self.segments.get_mut(save.place.0) else { return };
        segment.backups.insert(save.place.1, backup);
        let tag = segment.tag;
        self.tag_mut(tag).has_backups = true;
    }

    pub(super) fn forget_backup(&mut self, (segment, addr): Place) {
        if let Some(segment) = self.segments.get_mut(segment) {
            segment.backups.remove(&addr);
        }
    }

    /// Lets go of what is stored of stretches that nobody uses.
    pub(super) fn forget_idle_backups(&mut self, key: SegmentKey) {
        let Some(segment) = self.segments.get_mut(key).filter(|segment| !segment.backups.is_empty()) else {
            return;
        };
        let used = self.blocks.walk(segment.first).filter(|(kind, _)| kind.is_used());
        let chunk_bytes = self.shape.chunk_bytes;
        let touched = used.flat_map(|(_, block)| segment.stretches(block.addr, block.end(), chunk_bytes));
        let touched: BTreeSet<u64> = touched.map(|stretch| stretch.addr).collect();
        segment.backups.retain(|addr, _| touched.contains(addr));
    }

    /// Returns how much room they had, in bytes.
    pub(super) fn forget_backups(&mut self, tag: TagKey) -> u64 {
        self.tag_mut(tag).has_backups = false;
        let segments = self.segments.values_mut().filter(|segment| segment.tag == tag);
        let gone = segments.flat_map(|segment| std::mem::take(&mut segment.backups));
        gone.map(|(_, backup)| backup.room.bytes()).sum()
    }
}
