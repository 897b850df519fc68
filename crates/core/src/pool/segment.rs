//! Segments: reservations cut into slots, each of which has a backing or has none.
//!
//! This is the mechanism under everything the pool does. Allocating brings the slots in that a block
//! touches; reclaiming and sleeping take slots out; waking brings them in again; undoing either is the same
//! with the other sign. [`Segment::bring_in`] and [`Segment::take_out`] log each step, so that whoever fails
//! in the middle can go back ([`undo`]). Every state they can stop in is a state from which the next call
//! can go on: a step that cannot be undone is not lost, only left.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slotmap::SlotMap;

use super::blocks::BlockKey;
use super::ledger::Ledger;
use crate::digest::Digest;
use crate::driver::{BackingId, DeviceRange, Driver, DriverError, HostBuffer};
use crate::tag::Tag;

slotmap::new_key_type! {
    /// A segment of a pool.
    pub(super) struct SegmentKey;
}

pub(super) type Segments = SlotMap<SegmentKey, Segment>;

/// One reservation of one tag.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) tag: Tag,
    pub(super) range: DeviceRange,
    /// Size of every slot but the last, which may be shorter.
    pub(super) chunk_bytes: u64,
    pub(super) slots: Vec<Slot>,
    /// The block at the segment's first byte.
    pub(super) first: BlockKey,
    pub(super) live_blocks: usize,
}

/// A piece of a segment that is mapped as a whole.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) bytes: u64,
    pub(super) backing: Backing,
    /// Live blocks that touch it.
    pub(super) live_blocks: usize,
    pub(super) content: Content,
    /// A copy in host memory: what sleeps there, or what an earlier sleep left and may save the next copy.
    pub(super) backup: Option<Backup>,
}

/// Physical memory of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Backing {
    Absent,
    /// Held, not mapped.
    Held(BackingId),
    Mapped {
        id: BackingId,
        open: bool,
    },
}

/// Where the bytes of a slot's live blocks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    Device,
    Backup,
    Dropped,
}

/// Host copy of a slot's granules.
#[derive(Debug)]
pub(super) struct Backup {
    /// As long as the slot; only stored granules have been written.
    pub(super) buffer: Arc<HostBuffer>,
    /// Per granule, the digest of what is stored, computed from the stored bytes.
    pub(super) digests: Vec<Option<Digest>>,
}

/// What a slot was before a step, newest last.
pub(super) type UndoLog = Vec<(SegmentKey, usize, Backing)>;

/// Time spent getting memory, and mapping it.
#[derive(Debug, Default)]
pub(super) struct MapTimes {
    pub(super) create: Duration,
    pub(super) map: Duration,
}

impl Segment {
    pub(super) fn new(tag: Tag, range: DeviceRange, chunk_bytes: u64, first: BlockKey) -> Self {
        let slots = (0..range.bytes.div_ceil(chunk_bytes))
            .map(|i| Slot {
                bytes: chunk_bytes.min(range.bytes - i * chunk_bytes),
                backing: Backing::Absent,
                live_blocks: 0,
                content: Content::Device,
                backup: None,
            })
            .collect();
        Self { tag, range, chunk_bytes, slots, first, live_blocks: 0 }
    }

    pub(super) fn slot_range(&self, index: usize) -> DeviceRange {
        DeviceRange::new(self.range.addr + index as u64 * self.chunk_bytes, self.slots[index].bytes)
    }

    /// The slots that `bytes` at `offset` touch.
    pub(super) fn slots_touching(&self, offset: u64, bytes: u64) -> Range<usize> {
        // A segment's slots fit into memory, so their number fits a usize.
        let index = |at: u64| usize::try_from(at / self.chunk_bytes).unwrap_or(usize::MAX);
        index(offset)..index(offset + bytes.saturating_sub(1)) + 1
    }

    /// Bytes that would have to be created to open `slots`.
    pub(super) fn absent_bytes(&self, slots: Range<usize>) -> u64 {
        self.slots[slots].iter().filter(|slot| slot.backing == Backing::Absent).map(|slot| slot.bytes).sum()
    }

    /// Whether the slot's memory serves no byte that exists.
    pub(super) fn is_idle(&self, index: usize, tag_asleep: bool) -> bool {
        let slot = &self.slots[index];
        slot.live_blocks == 0 || (tag_asleep && slot.content != Content::Device)
    }

    /// Creates, maps and opens `slots` (ascending) as far as they are not. Stops at the first error; `log` has
    /// what to undo.
    pub(super) fn bring_in(
        &mut self,
        key: SegmentKey,
        slots: &[usize],
        driver: &dyn Driver,
        ledger: &mut Ledger,
        log: &mut UndoLog,
        times: &mut MapTimes,
    ) -> Result<(), DriverError> {
        let started = Instant::now();
        for index in
            slots.iter().copied().filter(|i| self.slots[*i].backing == Backing::Absent).collect::<Vec<_>>()
        {
            let slot = &mut self.slots[index];
            let id = ledger.create(slot.bytes)?;
            log.push((key, index, slot.backing));
            slot.backing = Backing::Held(id);
        }
        let created = Instant::now();
        times.create += created - started;
        let mapped = self.map_and_open(key, slots, driver, log);
        times.map += created.elapsed();
        mapped
    }

    fn map_and_open(
        &mut self,
        key: SegmentKey,
        slots: &[usize],
        driver: &dyn Driver,
        log: &mut UndoLog,
    ) -> Result<(), DriverError> {
        for index in slots.iter().copied() {
            if let Backing::Held(id) = self.slots[index].backing {
                driver.map(self.slot_range(index), id)?;
                log.push((key, index, self.slots[index].backing));
                self.slots[index].backing = Backing::Mapped { id, open: false };
            }
        }
        let closed = |slot: &Slot| matches!(slot.backing, Backing::Mapped { open: false, .. });
        let shut: Vec<usize> = slots.iter().copied().filter(|i| closed(&self.slots[*i])).collect();
        for run in runs(&shut) {
            driver.set_access(self.run_range(&run))?;
            for slot in &mut self.slots[run] {
                if let Backing::Mapped { open, .. } = &mut slot.backing {
                    *open = true;
                }
            }
        }
        Ok(())
    }

    /// Unmaps `slots` (ascending) as far as they are mapped, keeping their memory. Stops at the first error.
    pub(super) fn take_out(
        &mut self,
        key: SegmentKey,
        slots: &[usize],
        driver: &dyn Driver,
        log: &mut UndoLog,
    ) -> Result<(), DriverError> {
        let is_mapped = |i: &usize| matches!(self.slots[*i].backing, Backing::Mapped { .. });
        let mapped: Vec<usize> = slots.iter().copied().filter(is_mapped).collect();
        for run in runs(&mapped) {
            driver.unmap(self.run_range(&run))?;
            for index in run {
                let slot = &mut self.slots[index];
                log.push((key, index, slot.backing));
                if let Backing::Mapped { id, .. } = slot.backing {
                    slot.backing = Backing::Held(id);
                }
            }
        }
        Ok(())
    }

    /// Gives the memory of an unmapped slot up. After an error the ledger goes on trying.
    pub(super) fn let_go(&mut self, index: usize, ledger: &mut Ledger) -> Result<u64, DriverError> {
        let slot = &mut self.slots[index];
        let Backing::Held(id) = slot.backing else { return Ok(0) };
        slot.backing = Backing::Absent;
        ledger.release(id, slot.bytes).map(|()| slot.bytes)
    }

    fn run_range(&self, run: &Range<usize>) -> DeviceRange {
        let start = self.slot_range(run.start);
        let end = self.slot_range(run.end - 1).end();
        DeviceRange::new(start.addr, end - start.addr)
    }
}

/// Goes back through `log`, newest first, as far as the driver lets it; returns its first refusal. A slot
/// whose step could not be undone keeps the state it has.
pub(super) fn undo(
    segments: &mut Segments,
    log: UndoLog,
    driver: &dyn Driver,
    ledger: &mut Ledger,
) -> Option<DriverError> {
    let mut refused = None;
    let mut redo: Vec<(SegmentKey, usize)> = Vec::new();
    for (key, index, before) in log.into_iter().rev() {
        let Some(segment) = segments.get_mut(key) else { continue };
        let result = match (segment.slots[index].backing, before) {
            (Backing::Mapped { .. }, Backing::Held(_)) => {
                segment.take_out(key, &[index], driver, &mut UndoLog::new())
            }
            (Backing::Held(_), Backing::Absent) => segment.let_go(index, ledger).map(drop),
            (Backing::Held(_), Backing::Mapped { .. }) => {
                redo.push((key, index));
                Ok(())
            }
            _ => Ok(()),
        };
        refused = refused.or(result.err());
    }
    redo.sort_unstable();
    for (key, slots) in by_segment(&redo) {
        let Some(segment) = segments.get_mut(key) else { continue };
        let result =
            segment.bring_in(key, &slots, driver, ledger, &mut UndoLog::new(), &mut MapTimes::default());
        refused = refused.or(result.err());
    }
    refused
}

/// Groups sorted places by segment.
pub(super) fn by_segment(places: &[(SegmentKey, usize)]) -> Vec<(SegmentKey, Vec<usize>)> {
    places
        .chunk_by(|a, b| a.0 == b.0)
        .map(|group| (group[0].0, group.iter().map(|(_, index)| *index).collect()))
        .collect()
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

    #[test]
    fn slots_of_a_segment() {
        let segment = Segment::new(Tag::weights(), DeviceRange::new(4096, 25), 10, BlockKey::default());
        assert_eq!(segment.slots.iter().map(|s| s.bytes).collect::<Vec<_>>(), [10, 10, 5]);
        assert_eq!(segment.slot_range(2), DeviceRange::new(4116, 5));
        assert_eq!(segment.slots_touching(0, 10), 0..1);
        assert_eq!(segment.slots_touching(9, 2), 0..2);
        assert_eq!(segment.slots_touching(20, 5), 2..3);
        assert_eq!(segment.absent_bytes(0..3), 25);
    }
}
