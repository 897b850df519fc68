//! The face: buffers for one device.

use std::collections::BTreeSet;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{ByteSize, DriverErrorKind, HostBuffer, HostMemory, HostMemoryInfo, Op, Pending};

use super::backend::Backend;
use super::books::{Books, Slab, Spot, Unused, rounded};
use super::budget::{Budget, Figures, Lack};
use super::extents::pack;
use super::probe::HugePages;
use super::{BufferPin, HostMemoryConfig, HostMemoryDetails, Pin, SURPLUS_BYTES, probe};
use crate::ledger::{Result, invalid, of};
use crate::process::Owner;
use crate::system::System;

/// Up to this much is made without a look at the system each time.
const SMALL_BYTES: u64 = 2 << 20;

/// How much may be made so, after a look, and which share of what was left then.
const CREDIT_MAX: u64 = 64 << 20;
const CREDIT_SHARE: u64 = 16;

/// Most that is ever asked for: more than any machine addresses.
const ASKED_BYTES_MAX: u64 = 1 << 56;

/// How often memory is looked for while others give some back.
const PLACE_TRIES: u32 = 8;

/// Most threads that make slabs at the same time.
const THREADS_MAX: usize = 16;

/// What an arena is for.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) config: HostMemoryConfig,
    /// Why its memory is not page-locked, whatever the configuration says.
    pub(crate) pageable_because: Option<String>,
    /// The node that the device is near to.
    pub(crate) node: Option<u32>,
    /// Whether slabs that nobody uses go when others are made, so that they do not pile up. That may wait for work
    /// on the device.
    pub(crate) gives_surplus_back: bool,
    pub(crate) system: System,
}

/// A place for each size, and the slabs that are to be made for them.
type Placed = (Vec<Extent>, Vec<Arc<Slab>>);

/// Host memory of one device.
#[derive(Debug)]
pub(crate) struct HostArena {
    pub(super) owner: Owner,
    pub(super) backend: Box<dyn Backend>,
    pub(super) budget: Budget,
    gives_surplus_back: bool,
    pub(super) threads: usize,
    pub(super) node: Option<u32>,
    /// Whether the system takes memory from that node first, as it was asked to.
    pub(super) is_bound: AtomicBool,
    /// Whether the system's setting leaves a choice of huge pages.
    pub(super) huge_is_allowed: bool,
    pub(super) huge: OnceLock<HugePages>,
    /// Set once, where page-locking is not to be had.
    pub(super) pageable: OnceLock<String>,
    /// Held while the machine is asked for a slab's memory.
    pub(super) asking: Mutex<()>,
    /// Told when slabs have gone that were to be given back.
    gone: Condvar,
    /// Not dropped in a forked child, where it may be half changed.
    books: ManuallyDrop<Mutex<Books>>,
}

/// Bytes of a slab that belong to one buffer, or will. Dropped, they are free.
pub(super) struct Extent {
    arena: Arc<HostArena>,
    spot: Spot,
}

/// A slab on its way out.
struct Leaving<'a> {
    arena: &'a HostArena,
    bytes: u64,
}

/// Memory of an arena. In a forked child whoever looks at its bytes panics.
pub(crate) struct Piece {
    extent: Extent,
    start: usize,
    len: usize,
}

/// What lies at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Page-locked memory of the arena, which the device sees at this address.
    Pinned(u64),
    /// Other memory of the arena.
    Pageable,
    /// Memory of somebody else's.
    Foreign,
}

impl HostArena {
    pub(crate) fn new(owner: Owner, backend: Box<dyn Backend>, options: Options) -> Arc<Self> {
        let Options { config, pageable_because, node, gives_surplus_back, system } = options;
        let never = "page-locking was switched off (Pin::Never)".to_owned();
        let pageable_because = pageable_because.or((config.pin == Pin::Never).then_some(never));
        let pageable = OnceLock::new();
        if let Some(because) = pageable_because {
            let _ = pageable.set(because);
        }
        // Only of several nodes is one to be chosen, and never one that is a GPU's own memory.
        let nodes = system.numa_nodes().unwrap_or_default().with_cpus;
        let nodes: BTreeSet<u32> = nodes.into_iter().collect();
        let node = node.filter(|node| nodes.len() > 1 && nodes.contains(node));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let setting = system.memory().transparent_huge_pages;
        Arc::new(Self {
            owner,
            backend,
            gives_surplus_back,
            // Half the cores: with all of them slabs are made a little faster, and whoever copies into the first ones
            // meanwhile waits longer for the driver's locks. On 16 cores a first sleep of 8 GiB took a fifth less with 8, in one run each.
            threads: (cores / 2).clamp(1, THREADS_MAX),
            node,
            is_bound: AtomicBool::new(false),
            huge_is_allowed: probe::is_allowed(setting.as_deref()),
            huge: OnceLock::new(),
            pageable,
            asking: Mutex::new(()),
            gone: Condvar::new(),
            budget: Budget::new(config.limit_bytes, system),
            books: ManuallyDrop::new(Mutex::new(Books::default())),
        })
    }

    /// The caller runs in the process that made the arena.
    pub(super) fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory of each of these sizes, made meanwhile by other threads.
    pub(crate) fn alloc_all(self: &Arc<Self>, sizes: &[u64]) -> DriverResult<Vec<Pending<HostBuffer>>> {
        self.owner.check(Op::HostAlloc)?;
        let (extents, slabs) = self.place(sizes, true).map_err(of(Op::HostAlloc))?;
        self.make_in_background(slabs);
        let pending = |extent: Extent| Pending::new(move || extent.wait().map(HostBuffer::new));
        Ok(extents.into_iter().map(pending).collect())
    }

    /// Memory of one size, at once.
    pub(crate) fn alloc(self: &Arc<Self>, bytes: u64) -> DriverResult<Piece> {
        self.alloc_one(bytes, true)
    }

    /// Memory of one size, page-locked or not; where it is not and might have been, why.
    pub(crate) fn alloc_as(
        self: &Arc<Self>,
        bytes: u64,
        pin: BufferPin,
    ) -> DriverResult<(Piece, Option<String>)> {
        let made = self.alloc_one(bytes, pin != BufferPin::Never);
        self.as_asked(bytes, pin, made)
    }

    /// What a request comes to when memory of the kind that it would have first was made, or was not.
    pub(super) fn as_asked(
        self: &Arc<Self>,
        bytes: u64,
        pin: BufferPin,
        made: DriverResult<Piece>,
    ) -> DriverResult<(Piece, Option<String>)> {
        match (pin, made) {
            (BufferPin::Never, made) => Ok((made?, None)),
            (BufferPin::Always, made) => {
                let piece = made?;
                if piece.is_pinned() {
                    return Ok((piece, None));
                }
                let because = self.pageable_because();
                let reason = format!(
                    "{} were asked for page-locked, and this device's host memory is not: {because}; ask for pageable \
                     memory, or leave the choice to the machine",
                    ByteSize(bytes)
                );
                Err(of(Op::HostAlloc)(DriverErrorKind::Unsupported { reason }))
            }
            (BufferPin::Auto, Ok(piece)) => {
                let because = (!piece.is_pinned()).then(|| self.pageable_because());
                Ok((piece, because))
            }
            // What cannot be locked just now may be had all the same.
            (BufferPin::Auto, Err(refused)) if self.pageable.get().is_none() => {
                match self.alloc_one(bytes, false) {
                    Ok(piece) => Ok((piece, Some(refused.kind.to_string()))),
                    Err(_) => Err(refused),
                }
            }
            (BufferPin::Auto, Err(refused)) => Err(refused),
        }
    }

    fn pageable_because(&self) -> String {
        self.pageable.get().map_or_else(|| "the device has no such thing".to_owned(), Clone::clone)
    }

    pub(super) fn alloc_one(self: &Arc<Self>, bytes: u64, is_locked: bool) -> DriverResult<Piece> {
        self.owner.check(Op::HostAlloc)?;
        let (mut extents, slabs) = self.place(&[bytes], is_locked).map_err(of(Op::HostAlloc))?;
        self.make_here(&slabs);
        match extents.pop() {
            Some(extent) => extent.wait(),
            None => Err(of(Op::HostAlloc)(invalid("no host memory was asked for".into()))),
        }
    }

    /// A place for each size, and the slabs that are to be made for them. They are the caller's to make.
    pub(super) fn place(self: &Arc<Self>, sizes: &[u64], is_locked: bool) -> Result<Placed> {
        if sizes.contains(&0) {
            return Err(invalid("0 bytes of host memory were asked for".into()));
        }
        let total = sizes.iter().fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
        let refused = |reason| DriverErrorKind::OutOfHostMemory { asked_bytes: total, reason };
        if total > ASKED_BYTES_MAX {
            return Err(refused("no machine has as much; ask for less".to_owned()));
        }
        let mut tries = 0;
        loop {
            let gone = self.books().gone;
            let lack = match self.place_or_make_room(sizes, is_locked) {
                Ok(placed) => return Ok(placed),
                Err(lack) => lack,
            };
            let books = self.books();
            tries += 1;
            // What others gave back between two looks may be what was lacking.
            if books.gone == gone || tries == PLACE_TRIES {
                return Err(refused(format!("{} held before; {}", ByteSize(books.held), lack.reason)));
            }
        }
    }

    fn place_or_make_room(
        self: &Arc<Self>,
        sizes: &[u64],
        is_locked: bool,
    ) -> std::result::Result<Placed, Lack> {
        let lack = match self.try_place(sizes, is_locked) {
            Ok(placed) => return Ok(placed),
            Err(lack) => lack,
        };
        // Slabs that have some of the room must not be what keeps others from being made.
        if self.would_help(&lack) && self.give_unused_back(u64::MAX) {
            return self.try_place(sizes, is_locked);
        }
        Err(lack)
    }

    fn try_place(self: &Arc<Self>, sizes: &[u64], is_locked: bool) -> std::result::Result<Placed, Lack> {
        let (spots, slabs, is_small) = self.enter(sizes, is_locked);
        let extent = |spot| Extent { arena: Arc::clone(self), spot };
        // From here on they go back if they are dropped, and slabs that nobody waits for are forgotten.
        let extents: Vec<Extent> = spots.into_iter().map(extent).collect();
        if slabs.is_empty() {
            return Ok((extents, slabs));
        }
        if let Err(lack) = self.check(is_small) {
            if !self.would_help(&lack) || !self.give_unused_back(lack.lacking_bytes) {
                return Err(lack);
            }
            self.check(is_small)?;
        }
        Ok((extents, slabs))
    }

    /// Whether it is worth it to give back what nobody uses, or to wait for what others are giving back.
    fn would_help(&self, lack: &Lack) -> bool {
        let books = self.books();
        books.unused() + books.leaving >= lack.lacking_bytes
    }

    /// Writes down who gets what. Whether little is made for it.
    fn enter(&self, sizes: &[u64], is_locked: bool) -> (Vec<Spot>, Vec<Arc<Slab>>, bool) {
        // Where nothing is ever locked, all is of one kind.
        let is_locked = is_locked || self.pageable.get().is_some();
        let mut books = self.books();
        let found = books.take_free(sizes, is_locked);
        let lacking = |(_, spot): &(&u64, &Option<Spot>)| spot.is_none();
        let missing: Vec<u64> = sizes.iter().zip(&found).filter(lacking).map(|(bytes, _)| *bytes).collect();
        let to_pack: Vec<u64> = missing.iter().map(|bytes| rounded(*bytes)).collect();
        let plan = pack(&to_pack, rustix::param::page_size() as u64);
        let bytes: u64 = plan.slabs.iter().map(|slab| slab.bytes).sum();
        let is_small = bytes < SMALL_BYTES && bytes <= books.credit;
        if is_small {
            books.credit -= bytes;
        }
        let (slabs, made) = books.announce(&plan, &missing, is_locked);
        let mut made = made.into_iter();
        let spots = found.into_iter().filter_map(|spot| spot.or_else(|| made.next())).collect();
        (spots, slabs, is_small)
    }

    /// Whether what is announced may be made.
    fn check(&self, is_small: bool) -> std::result::Result<(), Lack> {
        let figures = {
            let books = self.books();
            Figures { held: books.held, unmade: books.unmade }
        };
        self.budget.check_limit(figures.held)?;
        if is_small {
            return Ok(());
        }
        let left = self.budget.check_groups(figures)?;
        let credit = left.map_or(CREDIT_MAX, |left| (left / CREDIT_SHARE).min(CREDIT_MAX));
        self.books().credit = credit;
        Ok(())
    }

    /// Slabs that lie unused beyond what is kept, for these to take their place.
    pub(super) fn surplus(&self, slabs: &[Arc<Slab>]) -> Vec<Unused> {
        if !self.gives_surplus_back {
            return Vec::new();
        }
        let made: u64 = slabs.iter().map(|slab| slab.bytes).sum();
        let mut books = self.books();
        let surplus = books.unused().saturating_sub(SURPLUS_BYTES).min(made.saturating_mul(2));
        if surplus > 0 { books.take_unused(surplus) } else { Vec::new() }
    }

    /// Gives so many bytes back in slabs that nobody uses, or all there are, and waits for what others are giving
    /// back; whether that was anything.
    pub(super) fn give_unused_back(&self, bytes: u64) -> bool {
        let (leaving, unused, stuck) = {
            let mut books = self.books();
            let leaving = books.leaving;
            (leaving, books.take_unused(bytes.saturating_sub(leaving)), books.take_stuck())
        };
        for region in stuck {
            if self.backend.unlock(&region) {
                self.backend.unmap(region);
            } else {
                self.books().stick(region);
            }
        }
        let any = self.give_back(unused);
        if leaving > 0 {
            let wait = self.gone.wait_while(self.books(), |books| books.leaving > 0);
            drop(wait.unwrap_or_else(PoisonError::into_inner));
        }
        any || leaving > 0
    }

    /// Gives slabs back that nobody uses, of `bytes` together at most, where more lies unused than is kept: for whoever
    /// has dropped as much, and is not going to ask for it again. May wait for all work on the device.
    pub(crate) fn give_surplus_back(&self, bytes: u64) {
        if self.owner.is_here() {
            let bytes = bytes.next_multiple_of(rustix::param::page_size() as u64);
            let unused = self.books().take_surplus(bytes);
            self.give_back(unused);
        }
    }

    /// What the device does not let go of stays as it was. Whether it let go of anything.
    pub(super) fn give_back(&self, unused: Vec<Unused>) -> bool {
        let leaving = |one: Unused| (Leaving { arena: self, bytes: one.slab.bytes }, one);
        // All of them now, so that none is waited for if one panics.
        let unused: Vec<_> = unused.into_iter().map(leaving).collect();
        let mut any = false;
        for (leaving, one) in unused {
            if one.made.device.is_some() && !self.backend.unlock(&one.made.region) {
                self.books().put_back(one);
            } else {
                self.backend.unmap(one.made.region);
                any = true;
            }
            drop(leaving);
        }
        any
    }

    /// Gives all slabs back that nobody uses, with those that are being made and that nobody waits for any more. May
    /// wait for all work on the device.
    pub(crate) fn trim(&self) {
        let abandoned = self.books().abandoned();
        for slab in abandoned {
            let _ = slab.wait(); // Made or failed, nobody wants it.
        }
        self.give_unused_back(u64::MAX);
    }

    /// Nothing more is made: the threads that do it have ended. What is there can still be used. Does nothing in a
    /// forked child.
    pub(crate) fn close(&self) {
        if !self.owner.is_here() {
            return;
        }
        let workers = {
            let mut books = self.books();
            books.is_closed = true;
            std::mem::take(&mut books.workers)
        };
        for worker in workers {
            let _ = worker.join();
        }
    }

    /// What lies at `addr` and the `len` bytes from there on. The caller runs in the process that made the arena.
    pub(crate) fn place_of(&self, addr: usize, len: usize) -> Place {
        match self.books().at(addr, len) {
            None => Place::Foreign,
            Some((made, offset)) => {
                made.device.map_or(Place::Pageable, |device| Place::Pinned(device + offset as u64))
            }
        }
    }

    /// Buffers that were not dropped, in bytes as they were asked for.
    pub(crate) fn used_bytes(&self) -> u64 {
        if self.owner.is_here() { self.books().used } else { 0 }
    }

    pub(crate) fn info(&self) -> HostMemoryInfo {
        let limit_bytes = self.budget.limit_bytes;
        if !self.owner.is_here() {
            return HostMemoryInfo::default().limited_to(limit_bytes);
        }
        let books = self.books();
        HostMemoryInfo::new(books.held, books.used).pinning(books.pinned).limited_to(limit_bytes)
    }

    pub(crate) fn details(&self) -> HostMemoryDetails {
        HostMemoryDetails {
            slabs: if self.owner.is_here() { self.books().slabs() } else { 0 },
            threads: self.threads,
            huge_pages: self.huge.get().cloned(),
            numa_node: self.node.filter(|_| self.is_bound.load(Ordering::Relaxed)),
            pageable_because: self.pageable.get().cloned(),
        }
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.arena.books().left(self.bytes);
        self.arena.gone.notify_all();
    }
}

impl Drop for HostArena {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            return; // The memory is not there, and something else may be.
        }
        // No buffer and no thread is left: each has the arena. What is still registered stays mapped.
        self.trim();
        // SAFETY: taken once, here, and not used afterwards.
        drop(unsafe { ManuallyDrop::take(&mut self.books) });
    }
}

impl Extent {
    /// The memory, when it is made.
    pub(super) fn wait(self) -> DriverResult<Piece> {
        self.arena.owner.check(Op::HostAlloc)?;
        let asked_bytes = self.spot.bytes;
        let failed = |reason| of(Op::HostAlloc)(DriverErrorKind::OutOfHostMemory { asked_bytes, reason });
        let slab = self.spot.slab.wait().map_err(failed)?;
        let [offset, len] = [self.spot.offset, asked_bytes].map(usize::try_from);
        match (offset, len) {
            (Ok(offset), Ok(len)) => Ok(Piece { start: slab + offset, len, extent: self }),
            _ => Err(failed("it is more than this machine addresses".into())),
        }
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        if self.arena.owner.is_here() {
            self.arena.books().give_back(&self.spot);
        } else {
            // In a forked child the lock may be held for ever, and both may be half changed.
            std::mem::forget((Arc::clone(&self.arena), Arc::clone(&self.spot.slab)));
        }
    }
}

impl Piece {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The first byte. Who reads or writes through it keeps others from doing so.
    pub(crate) fn start(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.start)
    }

    /// In a forked child the memory is not there, and something else may be.
    fn expect_memory(&self) {
        assert!(
            self.extent.arena.owner.is_here(),
            "host memory belongs to the process that opened its device"
        );
    }

    /// Whether copies of a device's go at full speed.
    pub(crate) fn is_pinned(&self) -> bool {
        matches!(self.extent.arena.place_of(self.start, self.len), Place::Pinned(_))
    }
}

impl fmt::Debug for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Piece").field("bytes", &self.len).finish_non_exhaustive()
    }
}

impl HostMemory for Piece {
    fn as_slice(&self) -> &[u8] {
        self.expect_memory();
        // SAFETY: A2 and A3, these bytes of a slab are this piece's alone, readable, and there as long as it is.
        unsafe { std::slice::from_raw_parts(self.start().cast_const(), self.len) }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        self.expect_memory();
        // SAFETY: A2 and A3, likewise, and nobody else has the piece now.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len) }
    }
}
