//! The state of a pool and what it does while awake: allocate, free, reclaim.
//!
//! Invariants, which the property tests check from outside:
//! - a live block of a tag that is awake lies in slots that are mapped and open;
//! - no two blocks overlap, and free neighbours are one block;
//! - `ledger.held_bytes()` is the sum over slots that have a backing, plus what is owed;
//! - a call that fails has changed nothing but, at most, memory that no live block uses.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::blocks::{BlockEntry, BlockKey, Blocks, FreeIndex};
use super::error::{PoolError, Shortage, Usage};
use super::ledger::Ledger;
use super::segment::{Backing, Content, MapTimes, Segment, SegmentKey, Segments, UndoLog, by_segment, undo};
use super::{AllocRequest, Block, BlockId, PoolConfig, Result};
use crate::driver::{DeviceRange, Driver, DriverError, DriverErrorKind, Op, StreamId};
use crate::tag::{Tag, TagPolicy, TagState};

/// Every block begins and ends on a multiple of this, as PyTorch's do.
pub(super) const ALIGN_BYTES: u64 = 512;

const NEVER_FITS: &str = "it never fits: raise the limit";

/// How many free blocks are looked at to find one that needs no memory.
const CANDIDATES_MAX: usize = 16;

#[derive(Debug)]
pub(super) struct State {
    pub(super) pool: u32,
    pub(super) driver: Arc<dyn Driver>,
    pub(super) config: PoolConfig,
    pub(super) granule_bytes: u64,
    pub(super) total_bytes: u64,
    pub(super) streams: Vec<StreamId>,
    pub(super) tags: BTreeMap<Tag, TagEntry>,
    pub(super) segments: Segments,
    pub(super) blocks: Blocks,
    pub(super) ledger: Ledger,
    pub(super) live_bytes: u64,
    pub(super) peak_live_bytes: u64,
    pub(super) next_serial: u64,
    pub(super) closed: bool,
}

#[derive(Debug)]
pub(super) struct TagEntry {
    pub(super) policy: TagPolicy,
    /// Whether the policy was chosen by the user.
    pub(super) declared: bool,
    pub(super) state: TagState,
    /// Whether a stranded tag was undefined, and will be again.
    pub(super) undefined: bool,
    pub(super) free: FreeIndex,
    pub(super) live_bytes: u64,
    pub(super) live_blocks: usize,
}

impl TagEntry {
    pub(super) fn new(policy: TagPolicy) -> Self {
        let (free, state) = (FreeIndex::default(), TagState::Awake);
        Self { policy, declared: false, state, undefined: false, free, live_bytes: 0, live_blocks: 0 }
    }
}

/// Slots that must not be reclaimed, because the caller is about to use them.
pub(super) type Keep<'a> = &'a dyn Fn(SegmentKey, usize) -> bool;

/// A place for a request: in which free block, at which address, and the slots it touches.
#[derive(Debug, Clone)]
struct Fit {
    block: BlockKey,
    segment: SegmentKey,
    offset: u64,
    slots: Range<usize>,
    /// Bytes to create before it can be used.
    absent_bytes: u64,
    /// Bytes of its slots that serve no live block yet, held or not: what it costs when everything idle is
    /// reclaimed.
    fresh_bytes: u64,
}

impl State {
    pub(super) fn alloc(&mut self, request: &AllocRequest) -> Result<Block> {
        let bytes = self.checked_size(request)?;
        let state = self.tag_entry(&request.tag).state;
        if state.is_asleep() {
            return Err(PoolError::Asleep { op: "allocate", tag: request.tag.clone(), state });
        }
        let fit = match self.best_fit(&request.tag, bytes, request.align) {
            Some(fit) => fit,
            None if bytes > self.total_bytes.min(self.limit_bytes()) => {
                return Err(self.hopeless(bytes, request));
            }
            None => self.grow(&request.tag, bytes)?,
        };
        match self.back(&fit, request) {
            Ok(()) => Ok(self.take(&fit, bytes, request)),
            Err(error @ (PoolError::OverLimit { .. } | PoolError::DeviceFull { .. })) => {
                self.drop_if_empty(fit.segment);
                self.alloc_tightly(fit.fresh_bytes, error, bytes, request)
            }
            Err(error) => {
                self.drop_if_empty(fit.segment);
                Err(error)
            }
        }
    }

    /// The place that best fit chose costs `fresh_bytes`, which was refused with `refusal`. Another may cost
    /// less: one that shares its slots with live blocks, or a new segment that wastes nothing at its ends.
    fn alloc_tightly(
        &mut self,
        fresh_bytes: u64,
        refusal: PoolError,
        bytes: u64,
        request: &AllocRequest,
    ) -> Result<Block> {
        let alone_bytes = bytes.next_multiple_of(self.granule_bytes);
        let fit = match self.tightest_fit(&request.tag, bytes, request.align) {
            Some(fit) if fit.fresh_bytes < fresh_bytes && fit.fresh_bytes <= alone_bytes => fit,
            _ if alone_bytes < fresh_bytes => self.grow(&request.tag, bytes)?,
            _ => return Err(refusal),
        };
        let backed = self.back(&fit, request);
        if let Err(error) = backed {
            self.drop_if_empty(fit.segment);
            return Err(error);
        }
        Ok(self.take(&fit, bytes, request))
    }

    pub(super) fn free(&mut self, id: BlockId) -> Result<()> {
        let (key, entry) = self.live_block("free", id)?;
        let Some(segment) = self.segments.get_mut(entry.segment) else { return Err(stale("free", id)) };
        for index in segment.slots_touching(entry.offset, entry.bytes) {
            let slot = &mut segment.slots[index];
            slot.live_blocks -= 1;
            if slot.live_blocks == 0 {
                slot.backup = None;
                slot.content = Content::Device;
            }
        }
        segment.live_blocks -= 1;
        let base = segment.range.addr;
        let tag = segment.tag.clone();
        let Some((gone, free)) = self.blocks.release(key) else { return Err(stale("free", id)) };
        let Some(joined) = self.blocks.get(free).cloned() else { return Err(stale("free", id)) };
        if joined.offset == 0 {
            segment.first = free;
        }
        self.live_bytes -= entry.bytes;
        let tag = self.tag_entry(&tag);
        tag.live_bytes -= entry.bytes;
        tag.live_blocks -= 1;
        if tag.live_blocks == 0 && tag.state == TagState::Undefined {
            tag.state = TagState::Awake; // Nothing is left that could be undefined.
        }
        gone.iter().for_each(|block| tag.free.remove(block.bytes, base + block.offset));
        tag.free.insert(joined.bytes, base + joined.offset, free);
        Ok(())
    }

    /// The live block behind a handle.
    pub(super) fn live_block(&self, op: &'static str, id: BlockId) -> Result<(BlockKey, BlockEntry)> {
        let entry = self.blocks.get(id.key).filter(|block| {
            id.pool == self.pool && block.requested_bytes.is_some() && block.serial == id.serial
        });
        entry.map(|entry| (id.key, entry.clone())).ok_or_else(|| stale(op, id))
    }

    /// Gives back memory that serves no byte until `needed_bytes` are free of it, except in `keep`. Waits for
    /// the device first, if anything is mapped there. Returns the bytes given back.
    pub(super) fn reclaim(&mut self, needed_bytes: u64, keep: Keep<'_>) -> (u64, Option<DriverError>) {
        let (mut freed_bytes, mut refused) = self.ledger.settle();
        let mut idle: Vec<(SegmentKey, usize)> = Vec::new();
        let mut planned_bytes = freed_bytes;
        for (key, segment) in &self.segments {
            let asleep = self.tags.get(&segment.tag).is_some_and(|tag| tag.state.is_asleep());
            for index in 0..segment.slots.len() {
                let held = segment.slots[index].backing != Backing::Absent;
                if planned_bytes < needed_bytes && held && segment.is_idle(index, asleep) && !keep(key, index)
                {
                    idle.push((key, index));
                    planned_bytes += segment.slots[index].bytes;
                }
            }
        }
        if idle.is_empty() {
            return (freed_bytes, refused);
        }
        if let Err(error) = self.driver.synchronize() {
            return (freed_bytes, refused.or(Some(error)));
        }
        idle.sort_unstable();
        for (key, slots) in by_segment(&idle) {
            let Some(segment) = self.segments.get_mut(key) else { continue };
            let unmapped = segment.take_out(key, &slots, &*self.driver, &mut UndoLog::new());
            refused = refused.or(unmapped.err());
            for index in slots {
                match segment.let_go(index, &mut self.ledger) {
                    Ok(bytes) => freed_bytes += bytes,
                    Err(error) => refused = refused.or(Some(error)),
                }
            }
        }
        (freed_bytes, refused)
    }

    /// Gives back all memory and all addresses that serve no byte.
    pub(super) fn trim(&mut self) -> Result<u64> {
        let (freed_bytes, refused) = self.reclaim(u64::MAX, &|_, _| false);
        let empty: Vec<SegmentKey> = self
            .segments
            .iter()
            .filter(|(_, segment)| segment.live_blocks == 0)
            .map(|(key, _)| key)
            .collect();
        let kept: Vec<DriverError> = empty.into_iter().filter_map(|key| self.drop_if_empty(key)).collect();
        match refused.or(kept.into_iter().next()) {
            None => Ok(freed_bytes),
            Some(source) => Err(PoolError::Driver { op: "give cached memory back", source }),
        }
    }

    /// Makes sure that `needed_bytes` more may be created, reclaiming if need be, but never in `keep`.
    pub(super) fn make_room(
        &mut self,
        op: impl FnOnce() -> String,
        needed_bytes: u64,
        keep: Keep<'_>,
    ) -> Result<()> {
        // Without a limit the device is the judge, and says so itself.
        let Some(limit_bytes) = self.config.limit_bytes else { return Ok(()) };
        let wanted = |held: u64| held.saturating_add(needed_bytes);
        let over = wanted(self.ledger.held_bytes()).saturating_sub(limit_bytes);
        if over == 0 {
            return Ok(());
        }
        let (_, refused) = self.reclaim(over, keep);
        if wanted(self.ledger.held_bytes()) <= limit_bytes {
            return Ok(());
        }
        if let Some(source) = refused {
            return Err(PoolError::Driver { op: "make room by giving idle memory back", source });
        }
        let hint = if needed_bytes > limit_bytes {
            NEVER_FITS
        } else {
            "free or put to sleep what is live, or raise the limit"
        };
        Err(PoolError::OverLimit { op: op(), needed_bytes, usage: self.usage(), hint })
    }

    /// Gives back everything, whatever lives in it. Stops at the first refusal; what is done stays done.
    pub(super) fn sweep(&mut self) -> std::result::Result<(), DriverError> {
        let keys: Vec<SegmentKey> = self.segments.keys().collect();
        for key in keys {
            let Some(segment) = self.segments.get_mut(key) else { continue };
            let slots: Vec<usize> = (0..segment.slots.len()).collect();
            segment.take_out(key, &slots, &*self.driver, &mut UndoLog::new())?;
            slots.into_iter().try_for_each(|index| segment.let_go(index, &mut self.ledger).map(drop))?;
            self.driver.unreserve(segment.range)?;
            self.segments.remove(key);
        }
        self.ledger.settle().1.map_or(Ok(()), Err)
    }

    pub(super) fn limit_bytes(&self) -> u64 {
        self.config.limit_bytes.unwrap_or(self.total_bytes)
    }

    pub(super) fn usage(&self) -> Usage {
        let idle = |segment: &Segment| {
            let asleep = self.tags.get(&segment.tag).is_some_and(|tag| tag.state.is_asleep());
            let held =
                |i: &usize| segment.slots[*i].backing != Backing::Absent && segment.is_idle(*i, asleep);
            (0..segment.slots.len()).filter(held).map(|i| segment.slots[i].bytes).sum::<u64>()
        };
        Usage {
            limit_bytes: self.limit_bytes(),
            live_bytes: self.live_bytes,
            mapped_bytes: self.ledger.held_bytes(),
            idle_bytes: self.segments.values().map(idle).sum::<u64>() + self.ledger.owed_bytes(),
        }
    }

    pub(super) fn tag_entry(&mut self, tag: &Tag) -> &mut TagEntry {
        self.tags.entry(tag.clone()).or_insert_with(|| TagEntry::new(TagPolicy::built_in(tag)))
    }

    /// Gives a segment's addresses back when nothing lives in it and nothing is held. An error leaves it as it
    /// is: an empty segment that serves the next request.
    fn drop_if_empty(&mut self, key: SegmentKey) -> Option<DriverError> {
        let segment = self.segments.get(key)?;
        let held = segment.slots.iter().any(|slot| slot.backing != Backing::Absent);
        if held || segment.live_blocks > 0 {
            return None;
        }
        if let Err(error) = self.driver.unreserve(segment.range) {
            return Some(error);
        }
        let segment = self.segments.remove(key)?;
        self.blocks.remove(segment.first);
        self.tag_entry(&segment.tag).free.remove(segment.range.bytes, segment.range.addr);
        None
    }

    fn checked_size(&self, request: &AllocRequest) -> Result<u64> {
        let AllocRequest { bytes, align, ref tag, .. } = *request;
        let invalid = |reason: String| PoolError::InvalidRequest { bytes, align, tag: tag.clone(), reason };
        if bytes == 0 {
            return Err(invalid("a block has at least one byte".into()));
        }
        if !align.is_power_of_two() || align > self.granule_bytes {
            let granule = self.granule_bytes;
            return Err(invalid(format!(
                "the alignment must be a power of two up to the granule of {granule}"
            )));
        }
        let rounded = bytes.checked_next_multiple_of(ALIGN_BYTES);
        rounded
            .filter(|size| *size <= i64::MAX as u64)
            .ok_or_else(|| invalid("no address space is that large".into()))
    }

    /// The smallest free block that fits, preferring, among the first few, one that is backed already.
    fn best_fit(&self, tag: &Tag, bytes: u64, align: u64) -> Option<Fit> {
        let mut best: Option<Fit> = None;
        for (block, addr) in
            self.tags.get(tag)?.free.fitting(bytes, align.max(ALIGN_BYTES)).take(CANDIDATES_MAX)
        {
            let fit = self.fit(block, addr, bytes)?;
            if fit.absent_bytes == 0 {
                return Some(fit);
            }
            if best.as_ref().is_none_or(|best| fit.absent_bytes < best.absent_bytes) {
                best = Some(fit);
            }
        }
        best
    }

    /// Of all free blocks that fit, the one that costs least when everything idle is reclaimed.
    fn tightest_fit(&self, tag: &Tag, bytes: u64, align: u64) -> Option<Fit> {
        let fitting = self.tags.get(tag)?.free.fitting(bytes, align.max(ALIGN_BYTES));
        fitting.filter_map(|(block, addr)| self.fit(block, addr, bytes)).min_by_key(|fit| fit.fresh_bytes)
    }

    fn fit(&self, block: BlockKey, addr: u64, bytes: u64) -> Option<Fit> {
        let key = self.blocks.get(block)?.segment;
        let segment = self.segments.get(key)?;
        let offset = addr - segment.range.addr;
        let slots = segment.slots_touching(offset, bytes);
        let absent_bytes = segment.absent_bytes(slots.clone());
        let fresh = segment.slots[slots.clone()].iter().filter(|slot| slot.live_blocks == 0);
        let fresh_bytes = fresh.map(|slot| slot.bytes).sum();
        Some(Fit { block, segment: key, offset, slots, absent_bytes, fresh_bytes })
    }

    /// A new segment that holds `bytes` at its first byte, a granule's beginning: addresses only.
    fn grow(&mut self, tag: &Tag, bytes: u64) -> Result<Fit> {
        let granule = self.granule_bytes;
        let chunk_bytes = granule * self.config.chunk_granules;
        let (segment_bytes, chunk_bytes) = if bytes < chunk_bytes {
            ((granule * self.config.segment_granules).max(bytes.next_multiple_of(granule)), granule)
        } else {
            (bytes.next_multiple_of(granule), chunk_bytes)
        };
        let reserved = self.driver.reserve(segment_bytes);
        let range = reserved.map_err(|source| PoolError::AllocFailed { bytes, tag: tag.clone(), source })?;
        let block = self.blocks.insert_whole(range.bytes);
        let key = self.segments.insert(Segment::new(tag.clone(), range, chunk_bytes, block));
        self.blocks.set_segment(block, key);
        self.tag_entry(tag).free.insert(range.bytes, range.addr, block);
        self.fit(block, range.addr, bytes).ok_or(PoolError::Poisoned)
    }

    /// Brings in the memory that `fit` needs.
    fn back(&mut self, fit: &Fit, request: &AllocRequest) -> Result<()> {
        let op = || request.to_string();
        let keep = |key, index: usize| key == fit.segment && fit.slots.contains(&index);
        self.make_room(op, fit.absent_bytes, &keep)?;
        let slots: Vec<usize> = fit.slots.clone().collect();
        let Err(mut error) = self.bring_in_or_undo(fit.segment, &slots) else { return Ok(()) };
        if error.is_out_of_memory() && self.reclaim(u64::MAX, &keep).0 > 0 {
            match self.bring_in_or_undo(fit.segment, &slots) {
                Ok(()) => return Ok(()),
                Err(again) => error = again,
            }
        }
        Err(if error.is_out_of_memory() {
            self.device_full(op(), fit.absent_bytes, error)
        } else {
            PoolError::AllocFailed { bytes: request.bytes, tag: request.tag.clone(), source: error }
        })
    }

    /// The refusal of what could never fit, before anything is tried.
    fn hopeless(&self, bytes: u64, request: &AllocRequest) -> PoolError {
        let (op, usage) = (request.to_string(), self.usage());
        let needed_bytes = bytes.next_multiple_of(self.granule_bytes);
        if bytes > self.limit_bytes() {
            return PoolError::OverLimit { op, needed_bytes, usage, hint: NEVER_FITS };
        }
        let free_bytes = self.driver.memory_info().map_or(0, |info| info.free_bytes);
        let kind = DriverErrorKind::OutOfMemory { asked_bytes: needed_bytes, free_bytes };
        self.device_full(op, needed_bytes, DriverError::new(Op::Create, kind))
    }

    /// The refusal of a full device, with figures of now: whatever was brought in before is gone again.
    pub(super) fn device_full(&self, op: String, needed_bytes: u64, source: DriverError) -> PoolError {
        let info = self.driver.memory_info().ok();
        let free_bytes = info.map(|info| info.free_bytes).or(match source.kind {
            DriverErrorKind::OutOfMemory { free_bytes, .. } => Some(free_bytes),
            _ => None,
        });
        let shortage =
            Shortage { needed_bytes, free_bytes: free_bytes.unwrap_or(0), total_bytes: self.total_bytes };
        PoolError::DeviceFull { op, shortage, usage: self.usage(), source: source.into() }
    }

    fn bring_in_or_undo(&mut self, key: SegmentKey, slots: &[usize]) -> Result<(), DriverError> {
        let Some(segment) = self.segments.get_mut(key) else { return Ok(()) };
        let mut log = UndoLog::new();
        let result =
            segment.bring_in(key, slots, &*self.driver, &mut self.ledger, &mut log, &mut MapTimes::default());
        if result.is_err() {
            // What cannot be undone stays as idle memory, which the next call uses or reclaims.
            let _ = undo(&mut self.segments, log, &*self.driver, &mut self.ledger);
        }
        result
    }

    /// Makes the place live. Cannot fail.
    fn take(&mut self, fit: &Fit, bytes: u64, request: &AllocRequest) -> Block {
        let (pool, key, serial) = (self.pool, fit.block, self.next_serial);
        self.next_serial += 1;
        let whole = self.blocks.get(key).map(|block| (block.offset, block.bytes));
        let (before, behind) = self.blocks.carve(key, fit.offset, bytes, request.bytes, serial);
        let mut base = 0;
        if let Some(segment) = self.segments.get_mut(fit.segment) {
            base = segment.range.addr;
            segment.live_blocks += 1;
            segment.slots[fit.slots.clone()].iter_mut().for_each(|slot| slot.live_blocks += 1);
            if let Some(first) = before.filter(|_| whole.is_some_and(|(offset, _)| offset == 0)) {
                segment.first = first;
            }
        }
        let rest: Vec<(BlockKey, u64, u64)> = [before, behind]
            .into_iter()
            .flatten()
            .filter_map(|key| self.blocks.get(key).map(|block| (key, block.offset, block.bytes)))
            .collect();
        self.live_bytes += bytes;
        self.peak_live_bytes = self.peak_live_bytes.max(self.live_bytes);
        let tag = self.tag_entry(&request.tag);
        tag.live_bytes += bytes;
        tag.live_blocks += 1;
        if let Some((offset, bytes)) = whole {
            tag.free.remove(bytes, base + offset);
        }
        rest.into_iter().for_each(|(key, offset, bytes)| tag.free.insert(bytes, base + offset, key));
        let range = DeviceRange::new(base + fit.offset, bytes);
        Block { id: BlockId { pool, key, serial }, range, requested_bytes: request.bytes }
    }
}

fn stale(op: &'static str, block: BlockId) -> PoolError {
    PoolError::StaleBlock { op, block }
}
