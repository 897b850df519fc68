//! Buffers of host memory for one device.

use std::collections::BTreeSet;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{ByteSize, DriverErrorKind, HostBuffer, HostMemory, HostMemoryInfo, Op, Pending};

use super::backend::Backend;
use super::budget::{Budget, Figures, Shortage};
use super::extents::pack;
use super::probe::HugePages;
use super::table::{Slab, SlabRange, SlabTable, Unused, rounded};
use super::{BufferPin, HostMemoryConfig, HostMemoryDetails, Pin, SURPLUS_BYTES, probe};
use crate::ledger::{Result, invalid, of};
use crate::process::Owner;
use crate::system::System;

/// Smaller amounts may be allocated without reading the system's limits each time.
const SMALL_BYTES: u64 = 2 << 20;

/// Most bytes allocated so per check, and their share of what was left.
const CREDIT_MAX: u64 = 64 << 20;
const CREDIT_SHARE: u64 = 16;

/// More than any machine can address.
const REQUEST_BYTES_MAX: u64 = 1 << 56;

/// Attempts to allocate while other threads release memory.
const ASSIGN_TRIES: u32 = 8;

const THREADS_MAX: usize = 16;

#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) config: HostMemoryConfig,
    /// Why its memory is never page-locked, whatever the configuration says.
    pub(crate) pageable_because: Option<String>,
    /// The NUMA node nearest to the device.
    pub(crate) node: Option<u32>,
    /// Whether making slabs releases unused ones, which may wait for work on the device.
    pub(crate) releases_surplus: bool,
    /// Whether it is the device's memory as well, so that the system keeps its reserve of both.
    pub(crate) is_shared: bool,
    pub(crate) system: System,
}

/// Ranges for buffers, and the slabs that the caller must make for them.
type Assigned = (Vec<SlabExtent>, Vec<Arc<Slab>>);

#[derive(Debug)]
pub(crate) struct HostArena {
    pub(super) owner: Owner,
    pub(super) backend: Box<dyn Backend>,
    pub(super) budget: Budget,
    releases_surplus: bool,
    pub(super) threads: usize,
    pub(super) node: Option<u32>,
    pub(super) is_bound: AtomicBool,
    pub(super) huge_is_allowed: bool,
    pub(super) huge: OnceLock<HugePages>,
    /// Why page-locking is not available; set once.
    pub(super) pageable: OnceLock<String>,
    /// Held while checking that the machine has a slab's memory.
    pub(super) checking: Mutex<()>,
    released: Condvar,
    /// Not dropped in a forked child, where it may be half changed.
    table: ManuallyDrop<Mutex<SlabTable>>,
}

/// A range of a slab that belongs to one buffer. Dropping it frees the range.
pub(super) struct SlabExtent {
    arena: Arc<HostArena>,
    range: SlabRange,
}

/// What is held until it has been made, and then free.
pub(super) struct Ahead {
    extents: Vec<SlabExtent>,
    arena: Arc<HostArena>,
}

struct Releasing<'a> {
    arena: &'a HostArena,
    bytes: u64,
}

/// The memory of one buffer. Access to its bytes in a forked child panics.
pub(crate) struct ArenaBuffer {
    extent: SlabExtent,
    start: usize,
    len: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    /// Page-locked memory of the arena, which the device sees at this address.
    Pinned(u64),
    /// Other memory of the arena.
    Pageable,
    /// Memory outside the arena.
    Foreign,
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.extents.clear();
        {
            let mut table = self.arena.table();
            table.ahead -= 1;
            table.release_count += 1;
        }
        self.arena.released.notify_all();
    }
}

impl HostArena {
    pub(crate) fn new(owner: Owner, backend: Box<dyn Backend>, options: Options) -> Arc<Self> {
        let Options { config, pageable_because, node, releases_surplus, is_shared, system } = options;
        let never = "page-locking was switched off (Pin::Never)".to_owned();
        let pageable_because = pageable_because.or((config.pin == Pin::Never).then_some(never));
        let pageable = OnceLock::new();
        if let Some(because) = pageable_because {
            let _ = pageable.set(because);
        }
        // A choice needs several nodes. Nodes without processors are a GPU's own memory.
        let nodes = system.numa_nodes().unwrap_or_default().with_cpus;
        let nodes: BTreeSet<u32> = nodes.into_iter().collect();
        let node = node.filter(|node| nodes.len() > 1 && nodes.contains(node));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let setting = system.memory().transparent_huge_pages;
        Arc::new(Self {
            owner,
            backend,
            releases_surplus,
            // Half the cores. With all of them, slabs are made a little faster, but first copies wait longer
            // for the driver's locks. On 16 cores, a first sleep of 8 GiB took a fifth less time with 8
            // threads, in one run each.
            threads: (cores / 2).clamp(1, THREADS_MAX),
            node,
            is_bound: AtomicBool::new(false),
            huge_is_allowed: probe::is_allowed(setting.as_deref()),
            huge: OnceLock::new(),
            pageable,
            checking: Mutex::new(()),
            released: Condvar::new(),
            budget: Budget::new(config.limit_bytes, is_shared, system),
            table: ManuallyDrop::new(Mutex::new(SlabTable::default())),
        })
    }

    /// Call it only in the process that made the arena.
    pub(super) fn table(&self) -> MutexGuard<'_, SlabTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn alloc_all(self: &Arc<Self>, sizes: &[u64]) -> DriverResult<Vec<Pending<HostBuffer>>> {
        self.owner.check(Op::HostAlloc)?;
        let (extents, slabs) = self.assign(sizes, true).map_err(of(Op::HostAlloc))?;
        self.make_in_background(slabs, None);
        let pending = |extent: SlabExtent| Pending::new(move || extent.wait().map(HostBuffer::new));
        Ok(extents.into_iter().map(pending).collect())
    }

    /// Returns before it is made. Nothing is made where it would not fit beside what is there. A request that lacks
    /// memory meanwhile has it as soon as it is made.
    pub(crate) fn make_ahead(self: &Arc<Self>, sizes: &[u64]) {
        if !self.owner.is_here() || sizes.contains(&0) {
            return;
        }
        // Counted first: a request that finds the memory taken waits for what is counted.
        self.table().ahead += 1;
        let mut ahead = Ahead { extents: Vec::new(), arena: Arc::clone(self) };
        let (ranges, slabs, is_small) = self.assign_ranges(sizes, true);
        let is_new = |range: &SlabRange| slabs.iter().any(|slab| slab.id == range.slab.id);
        let extent = |range| SlabExtent { arena: Arc::clone(self), range };
        // What is there already is free for others at once.
        let (new, there): (Vec<SlabRange>, Vec<SlabRange>) = ranges.into_iter().partition(is_new);
        drop(there.into_iter().map(extent).collect::<Vec<_>>());
        ahead.extents = new.into_iter().map(extent).collect();
        if !slabs.is_empty() && self.check(is_small).is_ok() {
            self.make_in_background(slabs, Some(ahead));
        }
    }

    /// Waits until nothing is being made ahead. Returns whether it had to.
    pub(super) fn await_ahead(&self) -> bool {
        let table = self.table();
        let is_needed = table.ahead > 0;
        let wait = self.released.wait_while(table, |table| table.ahead > 0);
        drop(wait.unwrap_or_else(PoisonError::into_inner));
        is_needed
    }

    pub(crate) fn alloc(self: &Arc<Self>, bytes: u64) -> DriverResult<ArenaBuffer> {
        self.alloc_one(bytes, true)
    }

    /// The text says why the buffer is not page-locked, if it might have been.
    pub(crate) fn alloc_as(
        self: &Arc<Self>,
        bytes: u64,
        pin: BufferPin,
    ) -> DriverResult<(ArenaBuffer, Option<String>)> {
        let made = self.alloc_one(bytes, pin != BufferPin::Never);
        self.resolve_pin(bytes, pin, made)
    }

    pub(super) fn resolve_pin(
        self: &Arc<Self>,
        bytes: u64,
        pin: BufferPin,
        made: DriverResult<ArenaBuffer>,
    ) -> DriverResult<(ArenaBuffer, Option<String>)> {
        match (pin, made) {
            (BufferPin::Never, made) => Ok((made?, None)),
            (BufferPin::Always, made) => {
                let buffer = made?;
                if buffer.is_pinned() {
                    return Ok((buffer, None));
                }
                let because = self.pageable_because();
                let reason = format!(
                    "{} were requested page-locked, and this device's host memory is not: {because}; ask for pageable \
                     memory, or leave the choice to the machine",
                    ByteSize(bytes)
                );
                Err(of(Op::HostAlloc)(DriverErrorKind::Unsupported { reason }))
            }
            (BufferPin::Auto, Ok(buffer)) => {
                let because = (!buffer.is_pinned()).then(|| self.pageable_because());
                Ok((buffer, because))
            }
            // Pageable memory may be available instead.
            (BufferPin::Auto, Err(refused)) if self.pageable.get().is_none() => {
                match self.alloc_one(bytes, false) {
                    Ok(buffer) => Ok((buffer, Some(refused.kind.to_string()))),
                    Err(_) => Err(refused),
                }
            }
            (BufferPin::Auto, Err(refused)) => Err(refused),
        }
    }

    fn pageable_because(&self) -> String {
        self.pageable.get().map_or_else(|| "the device has no such thing".to_owned(), Clone::clone)
    }

    pub(super) fn alloc_one(self: &Arc<Self>, bytes: u64, is_locked: bool) -> DriverResult<ArenaBuffer> {
        self.owner.check(Op::HostAlloc)?;
        let (mut extents, slabs) = self.assign(&[bytes], is_locked).map_err(of(Op::HostAlloc))?;
        self.make_here(&slabs);
        match extents.pop() {
            Some(extent) => extent.wait(),
            None => Err(of(Op::HostAlloc)(invalid("no host memory was requested".into()))),
        }
    }

    pub(super) fn assign(self: &Arc<Self>, sizes: &[u64], is_locked: bool) -> Result<Assigned> {
        if sizes.contains(&0) {
            return Err(invalid("0 bytes of host memory were requested".into()));
        }
        let total = sizes.iter().fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
        let refused = |reason| DriverErrorKind::OutOfHostMemory { asked_bytes: total, reason };
        if total > REQUEST_BYTES_MAX {
            return Err(refused("no machine has as much; ask for less".to_owned()));
        }
        let mut tries = 0;
        loop {
            let released = self.table().release_count;
            let shortage = match self.assign_or_reclaim(sizes, is_locked) {
                Ok(assigned) => return Ok(assigned),
                Err(shortage) => shortage,
            };
            let table = self.table();
            tries += 1;
            // Memory released by other threads may suffice.
            if table.release_count == released || tries == ASSIGN_TRIES {
                return Err(refused(format!(
                    "{} held before; {}",
                    ByteSize(table.held_bytes),
                    shortage.reason
                )));
            }
        }
    }

    fn assign_or_reclaim(
        self: &Arc<Self>,
        sizes: &[u64],
        is_locked: bool,
    ) -> std::result::Result<Assigned, Shortage> {
        let shortage = match self.try_assign(sizes, is_locked) {
            Ok(assigned) => return Ok(assigned),
            Err(shortage) => shortage,
        };
        if self.await_ahead()
            && let Ok(assigned) = self.try_assign(sizes, is_locked)
        {
            return Ok(assigned);
        }
        // Unused slabs must not prevent the allocation.
        if self.would_help(&shortage) && self.release_unused(u64::MAX) {
            return self.try_assign(sizes, is_locked);
        }
        Err(shortage)
    }

    fn try_assign(
        self: &Arc<Self>,
        sizes: &[u64],
        is_locked: bool,
    ) -> std::result::Result<Assigned, Shortage> {
        let (ranges, slabs, is_small) = self.assign_ranges(sizes, is_locked);
        let extent = |range| SlabExtent { arena: Arc::clone(self), range };
        // From here on, dropping the ranges frees them and removes unstarted slabs.
        let extents: Vec<SlabExtent> = ranges.into_iter().map(extent).collect();
        if slabs.is_empty() {
            return Ok((extents, slabs));
        }
        if let Err(shortage) = self.check(is_small) {
            if !self.would_help(&shortage) || !self.release_unused(shortage.missing_bytes) {
                return Err(shortage);
            }
            self.check(is_small)?;
        }
        Ok((extents, slabs))
    }

    /// Whether releasing unused slabs, or waiting for releases, may suffice.
    fn would_help(&self, shortage: &Shortage) -> bool {
        let table = self.table();
        table.unused() + table.releasing_bytes >= shortage.missing_bytes
    }

    /// The flag: the new slabs are small.
    fn assign_ranges(&self, sizes: &[u64], is_locked: bool) -> (Vec<SlabRange>, Vec<Arc<Slab>>, bool) {
        // Where nothing is ever locked, there is one kind.
        let is_locked = is_locked || self.pageable.get().is_some();
        let mut table = self.table();
        let found = table.take_free(sizes, is_locked);
        let is_missing = |(_, range): &(&u64, &Option<SlabRange>)| range.is_none();
        let missing: Vec<u64> =
            sizes.iter().zip(&found).filter(is_missing).map(|(bytes, _)| *bytes).collect();
        let to_pack: Vec<u64> = missing.iter().map(|bytes| rounded(*bytes)).collect();
        let plan = pack(&to_pack, rustix::param::page_size() as u64);
        let bytes: u64 = plan.slabs.iter().map(|slab| slab.bytes).sum();
        let is_small = bytes < SMALL_BYTES && bytes <= table.credit_bytes;
        if is_small {
            table.credit_bytes -= bytes;
        }
        let (slabs, made) = table.announce(&plan, &missing, is_locked);
        let mut made = made.into_iter();
        let ranges = found.into_iter().filter_map(|range| range.or_else(|| made.next())).collect();
        (ranges, slabs, is_small)
    }

    fn check(&self, is_small: bool) -> std::result::Result<(), Shortage> {
        let figures = {
            let table = self.table();
            Figures { held_bytes: table.held_bytes, unmade_bytes: table.unmade_bytes }
        };
        self.budget.check_limit(figures.held_bytes)?;
        if is_small {
            return Ok(());
        }
        let left = self.budget.check_groups(figures)?;
        let credit_bytes = left.map_or(CREDIT_MAX, |left| (left / CREDIT_SHARE).min(CREDIT_MAX));
        self.table().credit_bytes = credit_bytes;
        Ok(())
    }

    /// Unused slabs beyond the allowed surplus, which these replace.
    pub(super) fn surplus(&self, slabs: &[Arc<Slab>]) -> Vec<Unused> {
        if !self.releases_surplus {
            return Vec::new();
        }
        let made: u64 = slabs.iter().map(|slab| slab.bytes).sum();
        let mut table = self.table();
        let surplus = table.unused().saturating_sub(SURPLUS_BYTES).min(made.saturating_mul(2));
        if surplus > 0 { table.take_unused(surplus) } else { Vec::new() }
    }

    /// Releases unused slabs of `bytes` bytes and waits for releases in progress. Returns whether any was.
    pub(super) fn release_unused(&self, bytes: u64) -> bool {
        let (releasing, unused, half_registered) = {
            let mut table = self.table();
            let releasing = table.releasing_bytes;
            (releasing, table.take_unused(bytes.saturating_sub(releasing)), table.take_half_registered())
        };
        for region in half_registered {
            if self.backend.unlock(&region) {
                self.backend.unmap(region);
            } else {
                self.table().keep_half_registered(region);
            }
        }
        let any = self.release(unused);
        if releasing > 0 {
            let wait = self.released.wait_while(self.table(), |table| table.releasing_bytes > 0);
            drop(wait.unwrap_or_else(PoisonError::into_inner));
        }
        any || releasing > 0
    }

    /// Releases unused slabs of at most `bytes` bytes, down to the allowed surplus, for callers that dropped
    /// as much for good. May wait for all work on the device.
    pub(crate) fn release_surplus(&self, bytes: u64) {
        if self.owner.is_here() {
            let bytes = bytes.next_multiple_of(rustix::param::page_size() as u64);
            let unused = self.table().take_surplus(bytes);
            self.release(unused);
        }
    }

    /// Whether any was released. The arena keeps slabs that the device refuses to unregister.
    pub(super) fn release(&self, unused: Vec<Unused>) -> bool {
        let releasing = |one: Unused| (Releasing { arena: self, bytes: one.slab.bytes }, one);
        // All at once, so that a panic leaves no release to wait for.
        let unused: Vec<_> = unused.into_iter().map(releasing).collect();
        let mut any = false;
        for (releasing, one) in unused {
            if one.made.device.is_some() && !self.backend.unlock(&one.made.region) {
                self.table().put_back(one);
            } else {
                self.backend.unmap(one.made.region);
                any = true;
            }
            drop(releasing);
        }
        any
    }

    /// Releases all unused slabs, and abandoned ones in the making. May wait for all work on the device.
    pub(crate) fn trim(&self) {
        self.await_ahead();
        let abandoned = self.table().abandoned();
        for slab in abandoned {
            let _ = slab.wait(); // Made or failed, it is not wanted.
        }
        self.release_unused(u64::MAX);
    }

    /// Ends the threads that make slabs. Existing memory stays usable.
    pub(crate) fn close(&self) {
        if !self.owner.is_here() {
            return;
        }
        let workers = {
            let mut table = self.table();
            table.is_closed = true;
            std::mem::take(&mut table.workers)
        };
        for worker in workers {
            let _ = worker.join();
        }
    }

    /// Call it only in the process that made the arena.
    pub(crate) fn memory_kind(&self, addr: usize, len: usize) -> MemoryKind {
        match self.table().at(addr, len) {
            None => MemoryKind::Foreign,
            Some((made, offset)) => {
                made.device.map_or(MemoryKind::Pageable, |device| MemoryKind::Pinned(device + offset as u64))
            }
        }
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        if self.owner.is_here() { self.table().used_bytes } else { 0 }
    }

    pub(crate) fn info(&self) -> HostMemoryInfo {
        let limit_bytes = self.budget.limit_bytes();
        if !self.owner.is_here() {
            return HostMemoryInfo::default().limited_to(limit_bytes);
        }
        let table = self.table();
        HostMemoryInfo::new(table.held_bytes, table.used_bytes)
            .pinning(table.pinned_bytes)
            .limited_to(limit_bytes)
    }

    pub(crate) fn details(&self) -> HostMemoryDetails {
        HostMemoryDetails {
            slabs: if self.owner.is_here() { self.table().slabs() } else { 0 },
            threads: self.threads,
            huge_pages: self.huge.get().cloned(),
            numa_node: self.node.filter(|_| self.is_bound.load(Ordering::Relaxed)),
            pageable_because: self.pageable.get().cloned(),
        }
    }
}

impl Drop for Releasing<'_> {
    fn drop(&mut self) {
        self.arena.table().release_ended(self.bytes);
        self.arena.released.notify_all();
    }
}

impl Drop for HostArena {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            return; // The memory is absent, and something else may be there.
        }
        // No buffer and no thread is left: each holds the arena. What is registered stays mapped.
        self.trim();
        // SAFETY: taken once, here, and not used afterwards.
        drop(unsafe { ManuallyDrop::take(&mut self.table) });
    }
}

impl SlabExtent {
    pub(super) fn wait(self) -> DriverResult<ArenaBuffer> {
        self.arena.owner.check(Op::HostAlloc)?;
        let asked_bytes = self.range.bytes;
        let failed = |reason| of(Op::HostAlloc)(DriverErrorKind::OutOfHostMemory { asked_bytes, reason });
        let slab = self.range.slab.wait().map_err(failed)?;
        let [offset, len] = [self.range.offset, asked_bytes].map(usize::try_from);
        match (offset, len) {
            (Ok(offset), Ok(len)) => Ok(ArenaBuffer { start: slab + offset, len, extent: self }),
            _ => Err(failed("it is more than this machine addresses".into())),
        }
    }
}

impl Drop for SlabExtent {
    fn drop(&mut self) {
        if self.arena.owner.is_here() {
            self.arena.table().free_range(&self.range);
        } else {
            // In a forked child the lock may be held for ever, and both may be half changed.
            std::mem::forget((Arc::clone(&self.arena), Arc::clone(&self.range.slab)));
        }
    }
}

impl ArenaBuffer {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The caller must exclude conflicting access through it.
    pub(crate) fn start(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.start)
    }

    /// In a forked child the memory is absent, and something else may be there.
    fn expect_memory(&self) {
        assert!(
            self.extent.arena.owner.is_here(),
            "host memory belongs to the process that opened its device"
        );
    }

    pub(crate) fn is_pinned(&self) -> bool {
        matches!(self.extent.arena.memory_kind(self.start, self.len), MemoryKind::Pinned(_))
    }
}

impl fmt::Debug for ArenaBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArenaBuffer").field("bytes", &self.len).finish_non_exhaustive()
    }
}

impl HostMemory for ArenaBuffer {
    fn as_slice(&self) -> &[u8] {
        self.expect_memory();
        // SAFETY: A2 and A3, these bytes of a slab are this buffer's alone, readable, and there as long as it is.
        unsafe { std::slice::from_raw_parts(self.start().cast_const(), self.len) }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        self.expect_memory();
        // SAFETY: A2 and A3, likewise, and `&mut self` excludes other access.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len) }
    }
}
