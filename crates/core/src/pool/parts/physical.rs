//! Physical memory: creating, mapping, unmapping and releasing it.
//!
//! Calls work on copies of the bookkeeping ([`Mapping`]), so the state stays unlocked; the lock around the
//! [`PhysicalMemory`] orders them. An unfinished call leaves its progress in its mappings, and the next
//! continues from there.
//!
//! Promise: the held bytes always equal creates and imports minus successful releases.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::driver::{BackingId, DeviceRange, Driver, DriverError, StreamId};
use crate::pool::tools::mapping::{Backing, Mapping};

/// Figures in bytes, readable without a lock.
#[derive(Debug, Default)]
pub(in crate::pool) struct Counters {
    held: AtomicU64,
    peak: AtomicU64,
    created: AtomicU64,
    spare: AtomicU64,
    deferred_releases: AtomicU64,
    reserved: AtomicU64,
}

/// Memory to be created, counted against the limit. Dropped under the lock, once the memory is created.
#[derive(Debug)]
#[must_use]
pub(in crate::pool) struct Reservation {
    counters: Arc<Counters>,
    bytes: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.counters.reserved.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
pub(in crate::pool) struct MapTimes {
    pub(in crate::pool) create: Duration,
    pub(in crate::pool) map: Duration,
}

/// A pool's memory outside of segments.
#[derive(Debug)]
pub(in crate::pool) struct PhysicalMemory {
    driver: Arc<dyn Driver>,
    counters: Arc<Counters>,
    /// Memory that is mapped nowhere, by size.
    spare: BTreeMap<u64, Vec<BackingId>>,
    deferred_releases: Vec<(BackingId, u64)>,
    held_by_size: BTreeMap<u64, u64>,
    /// Memory of at least so many bytes is created for other processes, too.
    shared_from_bytes: Option<u64>,
    /// Of memory that was imported.
    streams_destroyed: usize,
}

impl Counters {
    /// Created or imported, and not released; includes deferred releases.
    pub(in crate::pool) fn held_bytes(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// What a limit is compared with: held or reserved.
    pub(in crate::pool) fn committed_bytes(&self) -> u64 {
        self.held_bytes() + self.reserved.load(Ordering::Relaxed)
    }

    pub(in crate::pool) fn peak_bytes(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    pub(in crate::pool) fn created_bytes(&self) -> u64 {
        self.created.load(Ordering::Relaxed)
    }

    pub(in crate::pool) fn spare_bytes(&self) -> u64 {
        self.spare.load(Ordering::Relaxed)
    }

    /// Held because the driver has refused the release so far.
    pub(in crate::pool) fn deferred_release_bytes(&self) -> u64 {
        self.deferred_releases.load(Ordering::Relaxed)
    }
}

impl PhysicalMemory {
    pub(in crate::pool) fn new(driver: Arc<dyn Driver>, counters: Arc<Counters>) -> Self {
        Self {
            driver,
            counters,
            spare: BTreeMap::new(),
            deferred_releases: Vec::new(),
            held_by_size: BTreeMap::new(),
            shared_from_bytes: None,
            streams_destroyed: 0,
        }
    }

    pub(in crate::pool) fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    pub(in crate::pool) fn counters(&self) -> &Counters {
        &self.counters
    }

    pub(in crate::pool) fn spare_count(&self, bytes: u64) -> usize {
        self.spare.get(&bytes).map_or(0, Vec::len)
    }

    /// In backings of this size, mapped or not.
    pub(in crate::pool) fn held_of(&self, bytes: u64) -> u64 {
        self.held_by_size.get(&bytes).copied().unwrap_or(0)
    }

    pub(in crate::pool) fn share_from(&mut self, bytes: u64) {
        self.shared_from_bytes = Some(bytes);
    }

    /// A descriptor of memory that was created for other processes, or came from them.
    pub(in crate::pool) fn descriptor(&self, id: BackingId) -> Option<OwnedFd> {
        self.driver.export(id).ok()
    }

    /// Holds memory that another process, or this one, had.
    pub(in crate::pool) fn import(&mut self, memory: &OwnedFd, bytes: u64) -> Result<BackingId, DriverError> {
        let id = self.driver.import(memory.as_fd(), bytes)?;
        self.note_held(bytes);
        Ok(id)
    }

    /// Creates spare memory until the driver refuses: nothing needs it yet.
    pub(in crate::pool) fn stock(&mut self, bytes: u64, count: usize) {
        for _ in 0..count {
            let Ok(id) = self.create(bytes) else { return };
            self.put_spare(id, bytes);
        }
    }

    /// Spare memory that `needs` will take.
    pub(in crate::pool) fn usable_spare_bytes(&self, needs: &[Mapping]) -> u64 {
        let of = |bytes: u64| needs.iter().filter(|need| need.range.bytes == bytes).count();
        self.spare.iter().map(|(bytes, ids)| bytes * ids.len().min(of(*bytes)) as u64).sum()
    }

    /// Before the lock is given up: takes spare memory for `mappings`, and reserves what will be created.
    pub(in crate::pool) fn set_aside(&mut self, mappings: &mut [Mapping]) -> Reservation {
        let mut bytes = 0;
        for mapping in mappings.iter_mut().filter(|mapping| mapping.is_absent()) {
            match self.take_spare(mapping.range.bytes) {
                Some(id) => mapping.backing = Backing::Held(id),
                None => bytes += mapping.range.bytes,
            }
        }
        self.counters.reserved.fetch_add(bytes, Ordering::Relaxed);
        Reservation { counters: Arc::clone(&self.counters), bytes }
    }

    /// Maps and opens `mappings` (in address order within a segment) that are not, with spare memory first.
    /// Stops at the first error.
    pub(in crate::pool) fn map(
        &mut self,
        mappings: &mut [Mapping],
        times: &mut MapTimes,
    ) -> Result<(), DriverError> {
        let started = Instant::now();
        for mapping in mappings.iter_mut().filter(|mapping| mapping.backing == Backing::Absent) {
            mapping.backing = Backing::Held(self.obtain(mapping.range.bytes)?);
        }
        let created = Instant::now();
        times.create += created - started;
        let mapped = self.map_and_open(mappings);
        times.map += created.elapsed();
        mapped
    }

    fn map_and_open(&mut self, mappings: &mut [Mapping]) -> Result<(), DriverError> {
        for mapping in mappings.iter_mut() {
            if let Backing::Held(id) = mapping.backing {
                self.driver.map(mapping.range, id)?;
                mapping.backing = Backing::Mapped { id, open: false };
            }
        }
        for run in neighbours(mappings, Mapping::is_shut) {
            self.driver.set_access(span(&mappings[run.clone()]))?;
            for mapping in &mut mappings[run] {
                if let Backing::Mapped { open, .. } = &mut mapping.backing {
                    *open = true;
                }
            }
        }
        Ok(())
    }

    /// Unmaps `mappings` (in address order within a segment) and keeps their memory. Stops at the first
    /// error.
    pub(in crate::pool) fn unmap(&mut self, mappings: &mut [Mapping]) -> Result<(), DriverError> {
        for run in neighbours(mappings, Mapping::is_mapped) {
            self.driver.unmap(span(&mappings[run.clone()]))?;
            for mapping in &mut mappings[run] {
                if let Backing::Mapped { id, .. } = mapping.backing {
                    mapping.backing = Backing::Held(id);
                }
            }
        }
        Ok(())
    }

    /// Like [`Self::unmap`], but goes on after a refusal. Returns the first.
    pub(in crate::pool) fn unmap_each(&mut self, mappings: &mut [Mapping]) -> Option<DriverError> {
        let refused = self.unmap(mappings).err()?;
        for mapping in mappings {
            // A mapping that is refused again says so in its state.
            let _ = self.unmap(std::slice::from_mut(mapping));
        }
        Some(refused)
    }

    /// Goes back to `before`, as far as the driver lets it. Returns its first refusal.
    pub(in crate::pool) fn restore(
        &mut self,
        mappings: &mut [Mapping],
        before: &[Backing],
    ) -> Option<DriverError> {
        let mut refused = None;
        let (mut out, mut back) = (Vec::new(), Vec::new());
        for (nth, before) in before.iter().enumerate() {
            match (mappings[nth].backing, before) {
                (Backing::Mapped { .. }, Backing::Held(_) | Backing::Absent) => out.push(nth),
                (Backing::Held(_), Backing::Mapped { .. }) => back.push(nth),
                _ => {}
            }
        }
        for nth in out {
            refused = refused.or(self.unmap(&mut mappings[nth..=nth]).err());
        }
        for (mapping, before) in mappings.iter_mut().zip(before) {
            if let (Backing::Held(id), Backing::Absent) = (mapping.backing, before) {
                mapping.backing = Backing::Absent;
                // A refused release is deferred and tried again.
                refused = refused.or(self.release_handle(id, mapping.range.bytes).err());
            }
        }
        let mut returning: Vec<Mapping> = back.iter().map(|nth| mappings[*nth]).collect();
        refused = refused.or(self.map_and_open(&mut returning).err());
        back.into_iter().zip(returning).for_each(|(nth, mapping)| mappings[nth] = mapping);
        refused
    }

    /// Makes the memory of an unmapped mapping spare.
    pub(in crate::pool) fn cache(&mut self, mapping: &mut Mapping) {
        if let Backing::Held(id) = mapping.backing {
            mapping.backing = Backing::Absent;
            self.put_spare(id, mapping.range.bytes);
        }
    }

    /// The mapping is unmapped. After an error the release is deferred.
    pub(in crate::pool) fn release(&mut self, mapping: &mut Mapping) -> Result<u64, DriverError> {
        let Backing::Held(id) = mapping.backing else { return Ok(0) };
        mapping.backing = Backing::Absent;
        self.release_handle(id, mapping.range.bytes).map(|()| mapping.range.bytes)
    }

    /// Releases spare memory until `needed_bytes` are released or only `reserved` (size and count) is left: the smallest
    /// that is as large, else the largest first. Returns the bytes released, and the first refusal.
    pub(in crate::pool) fn release_spare(
        &mut self,
        needed_bytes: u64,
        reserved: &[(u64, usize)],
    ) -> (u64, Option<DriverError>) {
        let (mut freed_bytes, mut refused) = (0, None);
        let kept = |bytes| reserved.iter().find(|(size, _)| *size == bytes).map_or(0, |(_, count)| *count);
        while freed_bytes < needed_bytes {
            let free = |spare: &(&u64, &Vec<BackingId>)| spare.1.len() > kept(*spare.0);
            let mut fitting = self.spare.range(needed_bytes - freed_bytes..).filter(free);
            let best = fitting.next().or_else(|| self.spare.iter().rev().find(free)).map(|(bytes, _)| *bytes);
            let Some((bytes, id)) = best.and_then(|bytes| Some((bytes, self.take_spare(bytes)?))) else {
                break;
            };
            match self.release_handle(id, bytes) {
                Ok(()) => freed_bytes += bytes,
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        (freed_bytes, refused)
    }

    /// Retries deferred releases. Returns what [`Self::release_spare`] does.
    pub(in crate::pool) fn settle(&mut self) -> (u64, Option<DriverError>) {
        let (mut freed_bytes, mut refused) = (0, None);
        for (backing, bytes) in std::mem::take(&mut self.deferred_releases) {
            self.counters.deferred_releases.fetch_sub(bytes, Ordering::Relaxed);
            match self.release_handle(backing, bytes) {
                Ok(()) => freed_bytes += bytes,
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        (freed_bytes, refused)
    }

    /// Each is destroyed once over all calls. Stops at the first refusal.
    pub(in crate::pool) fn destroy_streams(&mut self, streams: &[StreamId]) -> Result<(), DriverError> {
        while let Some(stream) = streams.get(self.streams_destroyed) {
            self.driver.stream_destroy(*stream)?;
            self.streams_destroyed += 1;
        }
        Ok(())
    }

    fn obtain(&mut self, bytes: u64) -> Result<BackingId, DriverError> {
        match self.take_spare(bytes) {
            Some(id) => Ok(id),
            None => self.create(bytes),
        }
    }

    fn create(&mut self, bytes: u64) -> Result<BackingId, DriverError> {
        let is_shared = self.shared_from_bytes.is_some_and(|least_bytes| bytes >= least_bytes);
        let backing = if is_shared { self.driver.create_shared(bytes) } else { self.driver.create(bytes) }?;
        self.counters.created.fetch_add(bytes, Ordering::Relaxed);
        self.note_held(bytes);
        Ok(backing)
    }

    fn note_held(&mut self, bytes: u64) {
        let held = self.counters.held.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.counters.peak.fetch_max(held, Ordering::Relaxed);
        *self.held_by_size.entry(bytes).or_default() += bytes;
    }

    /// Memory that is held and has no mapping is spare from now on.
    pub(in crate::pool) fn put_spare(&mut self, id: BackingId, bytes: u64) {
        self.spare.entry(bytes).or_default().push(id);
        self.counters.spare.fetch_add(bytes, Ordering::Relaxed);
    }

    fn take_spare(&mut self, bytes: u64) -> Option<BackingId> {
        let ids = self.spare.get_mut(&bytes)?;
        let id = ids.pop()?;
        if ids.is_empty() {
            self.spare.remove(&bytes);
        }
        self.counters.spare.fetch_sub(bytes, Ordering::Relaxed);
        Some(id)
    }

    /// Releases memory that has no mapping. After an error the release is deferred.
    pub(in crate::pool) fn release_unmapped(&mut self, id: BackingId, bytes: u64) -> Result<(), DriverError> {
        self.release_handle(id, bytes)
    }

    fn release_handle(&mut self, backing: BackingId, bytes: u64) -> Result<(), DriverError> {
        let released = self.driver.release(backing);
        if released.is_ok() {
            self.counters.held.fetch_sub(bytes, Ordering::Relaxed);
            self.held_by_size.entry(bytes).and_modify(|held| *held -= bytes);
        } else {
            self.deferred_releases.push((backing, bytes));
            self.counters.deferred_releases.fetch_add(bytes, Ordering::Relaxed);
        }
        released
    }
}

/// Maximal runs of adjacent mappings that all satisfy `wanted`.
fn neighbours(mappings: &[Mapping], wanted: impl Fn(&Mapping) -> bool) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (nth, mapping) in mappings.iter().enumerate().filter(|(_, mapping)| wanted(mapping)) {
        let touches =
            |last: &Mapping| last.segment == mapping.segment && last.range.end() == mapping.range.addr;
        match runs.last_mut() {
            Some(run) if run.end == nth && touches(&mappings[nth - 1]) => run.end += 1,
            _ => runs.push(nth..nth + 1),
        }
    }
    runs
}

fn span(run: &[Mapping]) -> DeviceRange {
    let (first, last) = (run[0].range, run[run.len() - 1].range);
    DeviceRange::new(first.addr, last.end() - first.addr)
}
