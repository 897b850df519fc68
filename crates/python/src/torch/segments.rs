//! The segments that PyTorch has from us: where they are, and which blocks of an arena they are made of.
//!
//! PyTorch gives a segment back by the address and the size that it asked for, which only one segment has at a time.
//! Until then parts of it may be given back already ([`Book::carve`]): those whose addresses PyTorch has promised never
//! to hand out again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use poorwill::{Block, DeviceRange, DeviceSpec, PoolError};

use crate::arena::Opened;

/// A segment of PyTorch's.
#[derive(Debug)]
struct Segment {
    opened: Arc<Opened>,
    /// What is left of it, in ascending order.
    parts: Vec<Block>,
    /// Counts the segments: one that takes the place of another has a higher one.
    serial: u64,
}

impl Segment {
    fn is_on(&self, gpu: u32) -> bool {
        matches!(self.opened.device.spec(), DeviceSpec::Cuda { ordinal } if *ordinal == gpu)
    }
}

/// All segments of this process.
#[derive(Debug, Default)]
pub(super) struct Book {
    segments: Mutex<Segments>,
    /// Closed arenas that a segment was of. Whoever lets go of the last may have to wait for the device, which nobody
    /// can in PyTorch's locks.
    closed: Mutex<Vec<Arc<Opened>>>,
}

#[derive(Debug, Default)]
struct Segments {
    by_place: HashMap<DeviceRange, Segment>,
    last_serial: u64,
}

/// A moment: what was handed out by then can be told from what was handed out later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Moment(pub(super) u64);

impl Book {
    /// A block is a segment from now on. The place is what PyTorch has asked for, at the block's address.
    pub(super) fn add(&self, opened: Arc<Opened>, block: Block) {
        let mut book = self.lock();
        book.last_serial += 1;
        let serial = book.last_serial;
        let place = DeviceRange::new(block.range.addr, block.requested_bytes);
        book.by_place.insert(place, Segment { opened, parts: vec![block], serial });
    }

    /// Gives a segment back to its arena. Returns whether there was one at this place.
    pub(super) fn free(&self, place: DeviceRange) -> Result<bool, PoolError> {
        let Some(segment) = self.lock().by_place.remove(&place) else { return Ok(false) };
        let Segment { opened, parts, .. } = segment;
        let mut failed = None;
        for part in parts {
            failed = failed.or(opened.arena.free(part.id).err());
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

    /// The closed arenas that segments were of. To be let go of with no lock held.
    pub(super) fn take_closed(&self) -> Vec<Arc<Opened>> {
        std::mem::take(&mut *self.closed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Now.
    pub(super) fn moment(&self) -> Moment {
        Moment(self.lock().last_serial)
    }

    /// Gives whole granules of `holes` back, which lie in the segment at `place`, if that is still the one of this
    /// moment: all of them that are still there. Returns the bytes given back, or the first error when everything
    /// else was tried.
    ///
    /// The caller vouches that PyTorch never hands the holes out again: they belong to a pool that was retired before
    /// the moment, and were free then.
    pub(super) fn carve(
        &self,
        moment: Moment,
        place: DeviceRange,
        holes: &[DeviceRange],
    ) -> Result<u64, PoolError> {
        // Held until it is done, so that the segment cannot be given back under way.
        let mut book = self.lock();
        let Some(segment) = book.by_place.get_mut(&place) else { return Ok(0) };
        if segment.serial > moment.0 {
            return Ok(0);
        }
        let granule_bytes = segment.opened.arena.driver().info().granule_bytes;
        // The granule of its address stays: another segment there could have the same.
        let first_end = (place.addr - place.addr % granule_bytes).saturating_add(granule_bytes);
        let (mut carved_bytes, mut failed) = (0, None);
        for hole in holes.iter().filter_map(|hole| whole_granules(*hole, granule_bytes)) {
            let mut at = 0;
            // What was a hole before may lie within one that has grown.
            while let Some(part) = segment.parts.get(at) {
                let piece = common(&part.range, &hole, first_end);
                let carved = piece.map(|piece| (piece, segment.opened.arena.free_part(part.id, piece)));
                at += match carved {
                    None => 1,
                    Some((piece, Ok(rest))) => {
                        carved_bytes += piece.bytes;
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

    /// Whether a segment begins at this address.
    pub(super) fn begins_at(&self, addr: u64) -> bool {
        self.lock().by_place.keys().any(|place| place.addr == addr)
    }

    /// How many segments there are, and the bytes of them that are still held: on one GPU, or on all.
    pub(super) fn held(&self, ordinal: Option<u32>) -> (usize, u64) {
        let book = self.lock();
        let segments = book.by_place.values().filter(|segment| ordinal.is_none_or(|gpu| segment.is_on(gpu)));
        segments.fold((0, 0), |(count, bytes), segment| {
            (count + 1, bytes + segment.parts.iter().map(|part| part.range.bytes).sum::<u64>())
        })
    }

    fn lock(&self) -> MutexGuard<'_, Segments> {
        self.segments.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The granules that lie in a range as a whole.
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
