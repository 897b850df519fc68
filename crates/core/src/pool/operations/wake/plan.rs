//! The plan of a wake: what is mapped, and what is written there. Pure.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use super::filling::{Filling, With};
use crate::driver::DeviceRange;
use crate::pool::parts::backups::Stored;
use crate::pool::parts::heap::Use;
use crate::pool::state::PoolState;
use crate::pool::tools::keys::{SegmentKey, TagKey};
use crate::pool::tools::mapping::Mapping;
use crate::pool::tools::shape::Shape;
use crate::tag::{Changes, Dropped, Tag, TagState};

#[derive(Debug)]
pub(in crate::pool) struct WakePlan {
    pub(super) tags: Vec<TagKey>,
    pub(super) names: Vec<Tag>,
    pub(super) already_awake: Vec<Tag>,
    /// Every chunk that holds a block, by segment and address. Chunks with backups come first: copying into them hides
    /// the mapping of the rest.
    pub(super) mappings: Vec<Mapping>,
    pub(super) fillings: Vec<Filling>,
    /// Wakes of each tag so far, for the sample that is compared.
    pub(super) turns: BTreeMap<Tag, u64>,
}

impl PoolState {
    /// Wakes the visited tags that sleep and are `held` exclusively. Others were awake when the wake began, and stay as
    /// they are, even if they fell asleep while it waited.
    pub(in crate::pool) fn plan_wake(&self, visited: &[TagKey], held: &[TagKey], named: bool) -> WakePlan {
        let held: HashSet<TagKey> = held.iter().copied().collect();
        let (mut tags, mut already_awake) = (Vec::new(), Vec::new());
        for tag in visited.iter().copied() {
            let (entry, live) = (self.tags().get(tag), self.heap().live_of(tag));
            if entry.state().is_asleep() && !held.contains(&tag) {
                continue;
            }
            if !entry.state().is_asleep() {
                // A tag without blocks is reported only where the caller named it.
                if live.live_blocks > 0 || named {
                    already_awake.push(entry.name().clone());
                }
                continue;
            }
            tags.push(tag);
        }
        let (mut mappings, mut fillings) = (Vec::new(), Vec::new());
        for tag in tags.iter().copied() {
            self.plan_tag(tag, &mut mappings, &mut fillings);
        }
        let is_dropped = |key: SegmentKey| {
            let tag = self.heap().segments().tag_of(key);
            tag.is_none_or(|tag| self.tags().get(tag).state() != TagState::AsleepBackedUp)
        };
        mappings.sort_by_cached_key(|mapping: &Mapping| {
            (is_dropped(mapping.segment), mapping.segment, mapping.range.addr)
        });
        fillings.sort_by_cached_key(|(key, filling): &(SegmentKey, Filling)| {
            (is_dropped(*key), *key, filling.range.addr)
        });
        let mut mapping = 0;
        let fillings = fillings.into_iter().map(|(key, mut filling)| {
            let last_byte = filling.end(self.heap().shape().granule_bytes) - 1;
            let holds = |mapping: &Mapping| {
                mapping.segment == key && mapping.range.contains(&DeviceRange::new(last_byte, 1))
            };
            while mappings.get(mapping).is_some_and(|mapping| !holds(mapping)) {
                mapping += 1;
            }
            filling.mapping = mapping;
            filling
        });
        let fillings = fillings.collect();
        let names = self.tags().names(&tags);
        let turns = tags
            .iter()
            .map(|tag| (self.tags().get(*tag).name().clone(), self.tags().get(*tag).wakes()))
            .collect();
        WakePlan { tags, names, already_awake, mappings, fillings, turns }
    }

    /// Whether the next sleep finds the backups of a tag that sleeps. Of a dropped one, bytes beside the kept ones are
    /// written in the same granules, whatever was promised of its changes. So they have to be compared.
    pub(super) fn serves_on(&self, tag: TagKey) -> bool {
        let entry = self.tags().get(tag);
        let changes = entry.changes();
        let is_found = match entry.state() {
            TagState::AsleepDropped => changes == Changes::Compared,
            _ => changes != Changes::Volatile,
        };
        self.heap().shape().keep_backups && is_found
    }

    fn plan_tag(&self, tag: TagKey, mappings: &mut Vec<Mapping>, fillings: &mut Vec<(SegmentKey, Filling)>) {
        let (shape, entry) = (self.heap().shape(), self.tags().get(tag));
        for (key, segment) in self.heap().segments().of_tag(tag) {
            let uses = self.heap().uses_of_granules(segment);
            let mut fill = |range, with| {
                fillings.push((key, Filling { mapping: 0, tag: entry.name().clone(), range, with }));
            };
            let mut returned: Vec<DeviceRange> = Vec::new();
            for (at, chunk) in segment.chunks() {
                let first = shape.granules(at - segment.range().addr);
                let of_chunk = &uses[first..first + shape.granules(chunk.bytes)];
                if of_chunk.iter().all(|granule| *granule == Use::Free) {
                    continue;
                }
                let range = DeviceRange::new(at, chunk.bytes);
                if self.lent().has_come_back((key, at)) {
                    returned.push(range);
                }
                mappings.push(Mapping { segment: key, range, backing: chunk.backing });
                if entry.state() == TagState::AsleepDropped && entry.policy().dropped == Dropped::Zeros {
                    let gaps = self.backups().gaps(tag, key, range);
                    gaps.into_iter().for_each(|gap| fill(gap, With::Zeros));
                }
            }
            if matches!(entry.state(), TagState::AsleepBackedUp | TagState::AsleepDropped) {
                let is_last = !self.serves_on(tag);
                for (extent, backup) in self.backups().of_segment(tag, key) {
                    let first = shape.granules(extent.addr - segment.range().addr);
                    let of_extent = uses[first..].iter().zip(&backup.granules);
                    // Granules that are no longer live may have no memory.
                    let live = of_extent.map(|(is, stored)| stored.filter(|_| is.is_live()));
                    let granules: Vec<Option<Stored>> = live.collect();
                    // Longer extents than a chunk are copied in parts, and from disk as they are fetched.
                    let is_on_disk = backup.buffer.disk_bytes() > 0;
                    let most_bytes =
                        if is_on_disk { backup.buffer.fetch_bytes_max() } else { shape.chunk_bytes };
                    let most = shape.granules(most_bytes).clamp(1, granules.len().max(1));
                    for (nth, part) in granules.chunks(most).enumerate() {
                        if part.iter().any(Option::is_some) {
                            let (first, granules) = (nth * most, part.to_vec());
                            let range = shape.granule_range(extent.addr, first, part.len());
                            let in_place = in_place(shape, range, &returned);
                            let buffer = Arc::clone(&backup.buffer);
                            fill(range, With::Backup { buffer, first, granules, in_place, is_last });
                        }
                    }
                }
            }
        }
    }
}

/// Of each granule of `range`, whether it lies in one of `returned`, which are ordered by address.
fn in_place(shape: Shape, range: DeviceRange, returned: &[DeviceRange]) -> Vec<bool> {
    let granules = (0..shape.granules(range.bytes)).map(|nth| shape.granule_range(range.addr, nth, 1));
    let is_in_place = |granule: DeviceRange| {
        let after = returned.partition_point(|returned| returned.addr <= granule.addr);
        after > 0 && returned[after - 1].contains(&granule)
    };
    granules.map(is_in_place).collect()
}
