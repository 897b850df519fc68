//! Making slabs: on the calling thread, or on several. Each thread populates and registers one slab after
//! another, so both steps overlap, and the first slabs are ready first.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use super::arena::{Ahead, HostArena};
use super::backend::Refusal;
use super::budget::Shortage;
use super::probe;
use super::region::{Region, RegionOptions};
use super::table::{Slab, SlabMemory};

/// Smaller totals are made without threads.
const BACKGROUND_BYTES: u64 = 64 << 20;

/// From this total on, the huge-page measurement pays off.
const PROBE_BYTES: u64 = 256 << 20;

/// Slabs from this size on are populated by several threads, where there are fewer slabs than threads.
const SHARED_BYTES: u64 = 128 << 20;

struct Growth {
    slabs: Vec<Arc<Slab>>,
    /// Reserved with one call: `mmap` waits for threads that populate, and delays others that begin to.
    regions: Vec<Mutex<Option<Region>>>,
    /// Held until all threads exist, for the same reason.
    start: Mutex<()>,
    next: AtomicUsize,
    bytes: u64,
    /// Threads that populate one slab.
    faulters: usize,
    /// Whether a slab failed; the others then do not wait for memory.
    has_failed: AtomicBool,
    /// Without owners, these slabs would not be made.
    ahead: Option<Ahead>,
}

/// On drop, waiters receive the outcome, whatever happens.
struct Making<'a> {
    arena: &'a HostArena,
    slab: &'a Slab,
    made: Option<Result<SlabMemory, String>>,
}

impl HostArena {
    /// `ahead` is dropped when all are made.
    pub(super) fn make_in_background(self: &Arc<Self>, slabs: Vec<Arc<Slab>>, ahead: Option<Ahead>) {
        let is_awaited = ahead.is_none();
        let growth = Growth { ahead, ..Growth::new(slabs, self.threads) };
        if is_awaited && growth.bytes < BACKGROUND_BYTES {
            return growth.run(self);
        }
        let growth = Arc::new(growth.mapped(self));
        let mut workers = Vec::new();
        let starting = growth.start.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..self.threads.min(growth.slabs.len()) {
            let (arena, growth) = (Arc::clone(self), Arc::clone(&growth));
            let work = move || {
                drop(growth.start.lock().unwrap_or_else(PoisonError::into_inner));
                growth.run(&arena);
            };
            let Ok(worker) = thread::Builder::new().name("poorwill-pin".into()).spawn(work) else { break };
            workers.push(worker);
        }
        drop(starting);
        if workers.is_empty() {
            return growth.run(self); // No thread can be started.
        }
        let mut table = self.table();
        table.workers.retain(|worker| !worker.is_finished());
        table.workers.append(&mut workers);
    }

    pub(super) fn make_here(&self, slabs: &[Arc<Slab>]) {
        if !slabs.is_empty() {
            Growth::new(slabs.to_vec(), self.threads).run(self);
        }
    }

    fn make(&self, slab: &Slab, region: Option<Region>, growth: &Growth) {
        if !self.table().begin(slab) {
            region.into_iter().for_each(|region| self.backend.unmap(region));
            return self.table().fail(slab, "the device was closed before it was made".into());
        }
        let mut making = Making { arena: self, slab, made: None };
        let made = self.try_make(slab, region, growth);
        // Unused slabs must not be the reason for a failure, nor those that are made ahead. What these lack is not made.
        let is_needed = growth.ahead.is_none();
        let again = made.is_err() && is_needed && (self.await_ahead() | self.release_unused(u64::MAX));
        let made = if again { self.try_make(slab, None, growth) } else { made };
        if made.is_err() {
            growth.has_failed.store(true, Ordering::Relaxed);
        }
        making.made = Some(made);
    }

    fn try_make(&self, slab: &Slab, region: Option<Region>, growth: &Growth) -> Result<SlabMemory, String> {
        if let Err(shortage) = self.check_machine(slab, growth) {
            region.into_iter().for_each(|region| self.backend.unmap(region));
            return Err(shortage.reason);
        }
        let region = match region {
            Some(region) => region,
            None => self.backend.map(&self.region_options(slab.bytes, growth.bytes)?)?,
        };
        if region.node().is_some() {
            self.is_bound.store(true, Ordering::Relaxed);
        }
        let progress = |bytes| self.table().add_populated(slab, bytes as u64);
        if let Err(reason) = self.backend.populate(&region, growth.faulters, &progress) {
            self.backend.unmap(region);
            return Err(reason);
        }
        let device = match self.lock(slab, &region) {
            Ok(device) => device,
            Err(Refusal::HalfRegistered(reason)) => {
                self.table().keep_half_registered(region); // It may be registered, so it stays mapped.
                return Err(reason);
            }
            Err(Refusal::Failed(reason) | Refusal::Unsupported(reason)) => {
                self.backend.unmap(region);
                return Err(reason);
            }
        };
        Ok(SlabMemory { region, device })
    }

    /// Counts what other slabs still populate.
    fn check_machine(&self, slab: &Slab, growth: &Growth) -> Result<(), Shortage> {
        self.table().add_populated(slab, slab.bytes); // From a previous attempt.
        // Small amounts are not worth a check: the control groups were checked.
        let is_little = growth.bytes < BACKGROUND_BYTES && slab.bytes < BACKGROUND_BYTES / 16;
        // One at a time, so that a refused slab does not count against another.
        let _checking = (!is_little).then(|| self.checking.lock().unwrap_or_else(PoisonError::into_inner));
        if !is_little {
            let may_wait = !growth.has_failed.load(Ordering::Relaxed);
            let unpopulated_bytes = || self.table().unpopulated_bytes + slab.bytes;
            self.budget
                .check_machine(unpopulated_bytes, may_wait)
                .inspect_err(|_| growth.has_failed.store(true, Ordering::Relaxed))?;
        }
        self.table().begin_populating(slab);
        Ok(())
    }

    fn region_options(&self, bytes: u64, all_bytes: u64) -> Result<RegionOptions, String> {
        let bytes = usize::try_from(bytes).map_err(|error| error.to_string())?;
        Ok(RegionOptions { bytes, huge: self.huge_pages(all_bytes), node: self.node })
    }

    fn lock(&self, slab: &Slab, region: &Region) -> Result<Option<u64>, Refusal> {
        if !slab.is_locked || self.pageable.get().is_some() {
            return Ok(None);
        }
        match self.backend.lock(region) {
            Err(Refusal::Unsupported(reason)) => {
                // From now on all memory is pageable, with this reason.
                let _ = self.pageable.set(reason);
                Ok(None)
            }
            other => other,
        }
    }

    fn huge_pages(&self, bytes: u64) -> bool {
        if let Some(known) = self.huge.get() {
            return known.used;
        }
        if !self.huge_is_allowed {
            return self.huge.get_or_init(|| probe::unmeasured(false)).used;
        }
        // Other threads wait here for the result.
        bytes < PROBE_BYTES || self.huge.get_or_init(|| probe::measure(&*self.backend, self.node)).used
    }
}

impl Growth {
    fn new(slabs: Vec<Arc<Slab>>, threads: usize) -> Self {
        let bytes = slabs.iter().map(|slab| slab.bytes).sum();
        let is_shared = slabs.iter().any(|slab| slab.bytes >= SHARED_BYTES);
        let faulters = if is_shared { (threads / slabs.len().max(1)).max(1) } else { 1 };
        let (regions, start, next, has_failed, ahead) = Default::default();
        Self { slabs, regions, start, next, bytes, faulters, has_failed, ahead }
    }

    /// If that fails, each slab reserves its own.
    fn mapped(mut self, arena: &HostArena) -> Self {
        let sizes: Result<Vec<usize>, _> =
            self.slabs.iter().map(|slab| usize::try_from(slab.bytes)).collect();
        let (Ok(sizes), Ok(options)) = (sizes, arena.region_options(self.bytes, self.bytes)) else {
            return self;
        };
        if let Ok(regions) = arena.backend.map_row(&options, &sizes) {
            self.regions = regions.into_iter().map(|region| Mutex::new(Some(region))).collect();
        }
        self
    }

    fn region(&self, nth: usize) -> Option<Region> {
        self.regions.get(nth)?.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// A failure does not stop it: callers may wait for the rest.
    fn run(&self, arena: &HostArena) {
        loop {
            let nth = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(slab) = self.slabs.get(nth) else { break };
            if self.ahead.is_some() && self.has_failed.load(Ordering::Relaxed) {
                break;
            }
            guarded(|| arena.make(slab, self.region(nth), self));
            if nth == 0 && self.ahead.is_none() {
                // Not earlier, so that the first buffer is ready first: this takes time and may wait for work
                // on the device.
                guarded(|| {
                    arena.release(arena.surplus(&self.slabs));
                });
            }
        }
    }
}

/// The panic was reported, and fails a slab in the making.
fn guarded(work: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(work)) {
        std::mem::forget(payload); // Dropping the payload may panic again.
    }
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        let made = self.made.take().unwrap_or_else(|| Err("making it panicked".into()));
        let mut table = self.arena.table();
        match made {
            Ok(made) => table.finish(self.slab, made),
            Err(reason) => table.fail(self.slab, reason),
        }
    }
}
