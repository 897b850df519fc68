//! Making slabs: here, or on several threads, of which each takes the next slab, brings its memory in and registers
//! it. So both go on at the same time, and the first slabs are ready first.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use super::arena::HostArena;
use super::backend::Refusal;
use super::books::{Made, Slab};
use super::budget::Lack;
use super::probe;
use super::region::{Region, Wish};

/// Less than this is made without threads.
const BACKGROUND_BYTES: u64 = 64 << 20;

/// From here on it is worth finding out whether huge pages are quicker.
const PROBE_BYTES: u64 = 256 << 20;

/// A slab of this size or more is brought in by several threads, where there are fewer slabs than threads.
const SHARED_BYTES: u64 = 128 << 20;

/// Slabs that are to be made.
struct Growth {
    slabs: Vec<Arc<Slab>>,
    /// Addresses for each, mapped with one call: mapping waits for whoever is bringing memory in, and holds up who
    /// would begin to.
    regions: Vec<Mutex<Option<Region>>>,
    /// Held until all threads are there, for the same reason.
    start: Mutex<()>,
    next: AtomicUsize,
    bytes: u64,
    /// Threads to a slab.
    faulters: usize,
    /// Whether one was not to be had: then others are not waited for.
    has_failed: AtomicBool,
}

/// A slab that is being made: whatever happens, those who wait for it hear of it.
struct Making<'a> {
    arena: &'a HostArena,
    slab: &'a Slab,
    made: Option<Result<Made, String>>,
}

impl HostArena {
    pub(super) fn make_in_background(self: &Arc<Self>, slabs: Vec<Arc<Slab>>) {
        let growth = Growth::new(slabs, self.threads);
        if growth.bytes < BACKGROUND_BYTES {
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
            return growth.run(self); // No thread is to be had.
        }
        let mut books = self.books();
        books.workers.retain(|worker| !worker.is_finished());
        books.workers.append(&mut workers);
    }

    pub(super) fn make_here(&self, slabs: &[Arc<Slab>]) {
        if !slabs.is_empty() {
            Growth::new(slabs.to_vec(), self.threads).run(self);
        }
    }

    /// Makes a slab, unless nobody waits for it any more.
    fn make(&self, slab: &Slab, region: Option<Region>, growth: &Growth) {
        if !self.books().begin(slab) {
            region.into_iter().for_each(|region| self.backend.unmap(region));
            return self.books().fail(slab, "the device was closed before it was made".into());
        }
        let mut making = Making { arena: self, slab, made: None };
        let made = self.try_make(slab, region, growth);
        // What lies unused must not be what is lacking.
        let again = made.is_err() && self.give_unused_back(u64::MAX);
        let made = if again { self.try_make(slab, None, growth) } else { made };
        if made.is_err() {
            growth.has_failed.store(true, Ordering::Relaxed);
        }
        making.made = Some(made);
    }

    fn try_make(&self, slab: &Slab, region: Option<Region>, growth: &Growth) -> Result<Made, String> {
        if let Err(lack) = self.ask_machine(slab, growth) {
            region.into_iter().for_each(|region| self.backend.unmap(region));
            return Err(lack.reason);
        }
        let region = match region {
            Some(region) => region,
            None => self.backend.map(&self.wish(slab.bytes, growth.bytes)?)?,
        };
        if region.node().is_some() {
            self.is_bound.store(true, Ordering::Relaxed);
        }
        let came = |bytes| self.books().came(slab, bytes as u64);
        if let Err(reason) = self.backend.populate(&region, growth.faulters, &came) {
            self.backend.unmap(region);
            return Err(reason);
        }
        let device = match self.lock(slab, &region) {
            Ok(device) => device,
            Err(Refusal::Stuck(reason)) => {
                self.books().stick(region); // It may be registered, so it stays mapped.
                return Err(reason);
            }
            Err(Refusal::Failed(reason) | Refusal::Unsupported(reason)) => {
                self.backend.unmap(region);
                return Err(reason);
            }
        };
        Ok(Made { region, device })
    }

    /// Whether the machine has a slab's memory beside what is still to come of others.
    fn ask_machine(&self, slab: &Slab, growth: &Growth) -> Result<(), Lack> {
        self.books().came(slab, slab.bytes); // Of an attempt before.
        // Little is not worth a look each time: what the groups left was looked at.
        let is_little = growth.bytes < BACKGROUND_BYTES && slab.bytes < BACKGROUND_BYTES / 16;
        // One after the other, so that what is refused to one does not count as another's.
        let _asking = (!is_little).then(|| self.asking.lock().unwrap_or_else(PoisonError::into_inner));
        if !is_little {
            let is_patient = !growth.has_failed.load(Ordering::Relaxed);
            let to_come = || self.books().to_come + slab.bytes;
            self.budget
                .check_machine(to_come, is_patient)
                .inspect_err(|_| growth.has_failed.store(true, Ordering::Relaxed))?;
        }
        self.books().expect(slab);
        Ok(())
    }

    /// What a region for `bytes` of the `all_bytes` that are to be made is to be.
    fn wish(&self, bytes: u64, all_bytes: u64) -> Result<Wish, String> {
        let bytes = usize::try_from(bytes).map_err(|error| error.to_string())?;
        Ok(Wish { bytes, huge: self.huge_pages(all_bytes), node: self.node })
    }

    fn lock(&self, slab: &Slab, region: &Region) -> Result<Option<u64>, Refusal> {
        if !slab.is_locked || self.pageable.get().is_some() {
            return Ok(None);
        }
        match self.backend.lock(region) {
            Err(Refusal::Unsupported(reason)) => {
                // From now on it is pageable, and says why.
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
            return self.huge.get_or_init(|| probe::unasked(false)).used;
        }
        // Meanwhile other threads wait for the outcome.
        bytes < PROBE_BYTES || self.huge.get_or_init(|| probe::measure(&*self.backend, self.node)).used
    }
}

impl Growth {
    fn new(slabs: Vec<Arc<Slab>>, threads: usize) -> Self {
        let bytes = slabs.iter().map(|slab| slab.bytes).sum();
        let is_shared = slabs.iter().any(|slab| slab.bytes >= SHARED_BYTES);
        let faulters = if is_shared { (threads / slabs.len().max(1)).max(1) } else { 1 };
        let (regions, start, next, has_failed) = Default::default();
        Self { slabs, regions, start, next, bytes, faulters, has_failed }
    }

    /// The same with addresses for all of it. Where they are not to be had, each slab gets its own, or says why not.
    fn mapped(mut self, arena: &HostArena) -> Self {
        let sizes: Result<Vec<usize>, _> =
            self.slabs.iter().map(|slab| usize::try_from(slab.bytes)).collect();
        let (Ok(sizes), Ok(wish)) = (sizes, arena.wish(self.bytes, self.bytes)) else { return self };
        if let Ok(regions) = arena.backend.map_row(&wish, &sizes) {
            self.regions = regions.into_iter().map(|region| Mutex::new(Some(region))).collect();
        }
        self
    }

    fn region(&self, nth: usize) -> Option<Region> {
        self.regions.get(nth)?.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Visits each slab that nobody else visits, whatever becomes of one: somebody may wait for it.
    fn run(&self, arena: &HostArena) {
        loop {
            let nth = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(slab) = self.slabs.get(nth) else { break };
            guarded(|| arena.make(slab, self.region(nth), self));
            if nth == 0 {
                // Here, since it takes its time, and may wait for work on the device; but not before there is
                // something for whoever waits for the first.
                guarded(|| {
                    arena.give_back(arena.surplus(&self.slabs));
                });
            }
        }
    }
}

/// A panic has been told of, and a slab that was being made says so: no more is to come of it.
fn guarded(work: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(work)) {
        std::mem::forget(payload); // Dropping what was thrown may throw again.
    }
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        let made = self.made.take().unwrap_or_else(|| Err("making it panicked".into()));
        let mut books = self.arena.books();
        match made {
            Ok(made) => books.finish(self.slab, made),
            Err(reason) => books.fail(self.slab, reason),
        }
    }
}
