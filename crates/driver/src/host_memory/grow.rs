//! Making slabs: here, or on several threads, of which each takes the next slab, brings its memory in and registers
//! it. So both go on at the same time, and the first slabs are ready first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use super::arena::HostArena;
use super::backend::Refusal;
use super::books::{Made, Slab};
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
        let growth = Arc::new(growth);
        let mut workers = Vec::new();
        for _ in 0..self.threads.min(growth.slabs.len()) {
            let (arena, growth) = (Arc::clone(self), Arc::clone(&growth));
            let work = move || growth.run(&arena);
            let Ok(worker) = thread::Builder::new().name("poorwill-pin".into()).spawn(work) else { break };
            workers.push(worker);
        }
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
    fn make(&self, slab: &Slab, growth: &Growth) {
        if !self.books().begin(slab) {
            return self.books().fail(slab, "the device was closed before it was made".into());
        }
        let mut making = Making { arena: self, slab, made: None };
        let made = self.try_make(slab, growth);
        // What lies unused must not be what is lacking.
        let again = made.is_err() && self.give_unused_back(u64::MAX);
        let made = if again { self.try_make(slab, growth) } else { made };
        if made.is_err() {
            growth.has_failed.store(true, Ordering::Relaxed);
        }
        making.made = Some(made);
    }

    fn try_make(&self, slab: &Slab, growth: &Growth) -> Result<Made, String> {
        let being_made = self.books().being_made;
        // Little is not worth a look each time: what the groups left was looked at.
        if growth.bytes >= BACKGROUND_BYTES || slab.bytes >= BACKGROUND_BYTES / 16 {
            let is_patient = !growth.has_failed.load(Ordering::Relaxed);
            self.budget.check_machine(being_made, is_patient).map_err(|lack| lack.reason)?;
        }
        let bytes = usize::try_from(slab.bytes).map_err(|error| error.to_string())?;
        let wish = Wish { bytes, huge: self.huge_pages(growth.bytes), node: self.node };
        let region = self.backend.map(&wish)?;
        if region.node().is_some() {
            self.is_bound.store(true, Ordering::Relaxed);
        }
        if let Err(reason) = self.backend.populate(&region, growth.faulters) {
            self.backend.unmap(region);
            return Err(reason);
        }
        let device = match self.lock(&region) {
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

    fn lock(&self, region: &Region) -> Result<Option<u64>, Refusal> {
        if self.pageable.get().is_some() {
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
        let (next, has_failed) = Default::default();
        Self { slabs, next, bytes, faulters, has_failed }
    }

    fn run(&self, arena: &HostArena) {
        loop {
            let nth = self.next.fetch_add(1, Ordering::Relaxed);
            if nth == 0 {
                // Now, since giving back takes its time, and takes none from whoever asked.
                arena.give_back(arena.surplus(&self.slabs));
            }
            let Some(slab) = self.slabs.get(nth) else { break };
            arena.make(slab, self);
        }
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
