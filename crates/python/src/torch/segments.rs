//! The segments that PyTorch has: their addresses, and the arena blocks that they consist of.
//!
//! PyTorch frees a segment by its address and requested size, which are unique among live segments. Before
//! that, [`SegmentTable::carve`] can free parts whose addresses PyTorch promised never to hand out again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use poorwill::{Block, DeviceRange, DeviceSpec, PoolError, Tag};

use crate::registry::Opened;

#[derive(Debug)]
struct Segment {
    opened: Arc<Opened>,
    tag: Tag,
    /// Remaining parts, in ascending order.
    parts: Vec<Block>,
    /// Higher than that of every earlier segment.
    serial: u64,
}

impl Segment {
    fn is_on(&self, gpu: u32) -> bool {
        matches!(self.opened.device().spec(), DeviceSpec::Cuda { ordinal } if *ordinal == gpu)
    }
}

#[derive(Debug, Default)]
pub(super) struct SegmentTable {
    segments: Mutex<Segments>,
    /// Closed arenas that had segments. Dropping the last reference may wait for the device, which must not
    /// happen in PyTorch's locks.
    closed: Mutex<Vec<Arc<Opened>>>,
}

#[derive(Debug, Default)]
struct Segments {
    by_range: HashMap<DeviceRange, Segment>,
    last_serial: u64,
}

/// A serial number that separates earlier segments from later ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SegmentSerial(pub(super) u64);

impl SegmentTable {
    /// Adds a block, at the range that PyTorch requested.
    pub(super) fn add(&self, opened: Arc<Opened>, tag: Tag, block: Block) {
        let mut table = self.lock();
        table.last_serial += 1;
        let serial = table.last_serial;
        let range = DeviceRange::new(block.range.addr, block.requested_bytes);
        table.by_range.insert(range, Segment { opened, tag, parts: vec![block], serial });
    }

    /// Frees a segment. Returns whether there was one at this range.
    pub(super) fn free(&self, range: DeviceRange) -> Result<bool, PoolError> {
        let Some(segment) = self.lock().by_range.remove(&range) else { return Ok(false) };
        let Segment { opened, parts, .. } = segment;
        let mut failed = None;
        for part in parts {
            failed = failed.or(opened.arena().free(part.id).err());
        }
        if opened.is_closed() {
            self.keep_closed(opened);
        }
        failed.map_or(Ok(true), Err)
    }

    fn keep_closed(&self, opened: Arc<Opened>) {
        let mut closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        if !closed.iter().any(|known| Arc::ptr_eq(known, &opened)) {
            closed.push(opened);
        }
    }

    /// Takes the closed arenas; drop them with no lock held.
    pub(super) fn take_closed(&self) -> Vec<Arc<Opened>> {
        std::mem::take(&mut *self.closed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn last_serial(&self) -> SegmentSerial {
        SegmentSerial(self.lock().last_serial)
    }

    /// Frees the whole granules of `holes` in the segment at `range`, unless that segment is later than
    /// `serial`. Returns the bytes freed, or the first error after trying all.
    ///
    /// The caller guarantees that PyTorch never hands the holes out again: they were free in a pool that was
    /// retired before `serial`.
    pub(super) fn carve(
        &self,
        serial: SegmentSerial,
        range: DeviceRange,
        holes: &[DeviceRange],
    ) -> Result<u64, PoolError> {
        // Locked throughout, so that the segment cannot be freed meanwhile.
        let mut table = self.lock();
        let Some(segment) = table.by_range.get_mut(&range) else { return Ok(0) };
        if segment.serial > serial.0 {
            return Ok(0);
        }
        let granule_bytes = segment.opened.arena().driver().info().granule_bytes;
        // The first granule stays: another segment could get its address.
        let first_end = (range.addr - range.addr % granule_bytes).saturating_add(granule_bytes);
        let (mut carved_bytes, mut failed) = (0, None);
        for hole in holes.iter().filter_map(|hole| whole_granules(*hole, granule_bytes)) {
            let mut at = 0;
            // An earlier hole may lie within one that has grown.
            while let Some(part) = segment.parts.get(at) {
                let overlap = common(&part.range, &hole, first_end);
                let carved =
                    overlap.map(|overlap| (overlap, segment.opened.arena().free_part(part.id, overlap)));
                at += match carved {
                    None => 1,
                    Some((overlap, Ok(rest))) => {
                        carved_bytes += overlap.bytes;
                        let left = rest.len();
                        segment.parts.splice(at..=at, rest);
                        left
                    }
                    Some((_, Err(error))) => {
                        failed = failed.or(Some(error));
                        1
                    }
                };
            }
        }
        failed.map_or(Ok(carved_bytes), Err)
    }

    pub(super) fn begins_at(&self, addr: u64) -> bool {
        self.lock().by_range.keys().any(|range| range.addr == addr)
    }

    /// The tag of the arena's segment that `addr` is in.
    pub(super) fn tag_at(&self, opened: &Arc<Opened>, addr: u64) -> Option<Tag> {
        let (table, byte) = (self.lock(), DeviceRange::new(addr, 1));
        let mut of_arena = table.by_range.iter().filter(|(_, segment)| Arc::ptr_eq(&segment.opened, opened));
        of_arena.find(|(range, _)| range.contains(&byte)).map(|(_, segment)| segment.tag.clone())
    }

    pub(super) fn held(&self, ordinal: Option<u32>) -> (usize, u64) {
        let table = self.lock();
        let segments = table.by_range.values().filter(|segment| ordinal.is_none_or(|gpu| segment.is_on(gpu)));
        segments.fold((0, 0), |(count, bytes), segment| {
            (count + 1, bytes + segment.parts.iter().map(|part| part.range.bytes).sum::<u64>())
        })
    }

    fn lock(&self) -> MutexGuard<'_, Segments> {
        self.segments.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn whole_granules(range: DeviceRange, granule_bytes: u64) -> Option<DeviceRange> {
    let start = range.addr.checked_next_multiple_of(granule_bytes)?;
    let end = range.end() - range.end() % granule_bytes;
    (start < end).then(|| DeviceRange::new(start, end - start))
}

/// What two ranges share from `addr` on.
fn common(one: &DeviceRange, other: &DeviceRange, addr: u64) -> Option<DeviceRange> {
    let (start, end) = (one.addr.max(other.addr).max(addr), one.end().min(other.end()));
    (start < end).then(|| DeviceRange::new(start, end - start))
}
