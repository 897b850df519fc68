//! Physical memory: getting it, putting it at addresses and taking it away again.
//!
//! This is the mechanism under everything that moves memory. Allocating, waking and undoing a sleep bring
//! pieces in; reclaiming, sleeping and undoing a wake take pieces out; and [`PhysicalMemory::restore`] goes back to what
//! was. It works on copies of what the pool knows ([`Piece`]), so the pool's own lock is free meanwhile; one
//! lock around the [`PhysicalMemory`] orders those who move memory. Whatever a call could not finish it leaves in its
//! pieces, from where the next call can go on: a step that cannot be undone is not lost, only left.
//!
//! Promise: the bytes held equal creates minus successful releases as the driver counted them, at any time.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::piece::{Backing, Piece};
use crate::driver::{BackingId, DeviceRange, Driver, DriverError, StreamId};

/// Figures that anybody may read at any time, in bytes.
#[derive(Debug, Default)]
pub(super) struct Counters {
    held: AtomicU64,
    peak: AtomicU64,
    created: AtomicU64,
    loose: AtomicU64,
    owed: AtomicU64,
    reserved: AtomicU64,
}

/// Memory that is about to be created, and counts against the limit until this is dropped: by who has the lock again and
/// keeps it until then. See [`PhysicalMemory::set_aside`].
#[derive(Debug)]
#[must_use]
pub(super) struct Reservation {
    counters: Arc<Counters>,
    bytes: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.counters.reserved.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Time spent getting memory, and mapping it.
#[derive(Debug, Default)]
pub(super) struct MapTimes {
    pub(super) create: Duration,
    pub(super) map: Duration,
}

/// Physical memory of a pool that is not in a segment, and the way in and out of one.
#[derive(Debug)]
pub(super) struct PhysicalMemory {
    driver: Arc<dyn Driver>,
    counters: Arc<Counters>,
    /// Memory that is mapped nowhere, by size.
    loose: BTreeMap<u64, Vec<BackingId>>,
    /// Memory whose release the driver has refused so far.
    owed: Vec<(BackingId, u64)>,
    held_by_size: BTreeMap<u64, u64>,
    streams_destroyed: usize,
}

impl Counters {
    /// Created and not released, what is owed included.
    pub(super) fn held_bytes(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Held, or about to be created by who has made room for it: what a limit is compared with.
    pub(super) fn committed_bytes(&self) -> u64 {
        self.held_bytes() + self.reserved.load(Ordering::Relaxed)
    }

    /// Most bytes held at any time.
    pub(super) fn peak_bytes(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// All bytes ever created.
    pub(super) fn created_bytes(&self) -> u64 {
        self.created.load(Ordering::Relaxed)
    }

    /// Held, mapped nowhere, and ready for use.
    pub(super) fn loose_bytes(&self) -> u64 {
        self.loose.load(Ordering::Relaxed)
    }

    /// Held because the driver has refused the release so far.
    pub(super) fn owed_bytes(&self) -> u64 {
        self.owed.load(Ordering::Relaxed)
    }
}

impl PhysicalMemory {
    pub(super) fn new(driver: Arc<dyn Driver>, counters: Arc<Counters>) -> Self {
        Self {
            driver,
            counters,
            loose: BTreeMap::new(),
            owed: Vec::new(),
            held_by_size: BTreeMap::new(),
            streams_destroyed: 0,
        }
    }

    pub(super) fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// How many loose backings of this size there are.
    pub(super) fn loose_count(&self, bytes: u64) -> usize {
        self.loose.get(&bytes).map_or(0, Vec::len)
    }

    /// Bytes held in pieces of this size, mapped or not.
    pub(super) fn held_of(&self, bytes: u64) -> u64 {
        self.held_by_size.get(&bytes).copied().unwrap_or(0)
    }

    /// Creates loose memory, as far as there is any: nobody needs it yet.
    pub(super) fn stock(&mut self, bytes: u64, count: usize) {
        for _ in 0..count {
            let Ok(id) = self.create(bytes) else { return };
            self.put_loose(id, bytes);
        }
    }

    /// Loose memory that `needs` will take.
    pub(super) fn usable_loose_bytes(&self, needs: &[Piece]) -> u64 {
        let of = |bytes: u64| needs.iter().filter(|need| need.range.bytes == bytes).count();
        self.loose.iter().map(|(bytes, ids)| bytes * ids.len().min(of(*bytes)) as u64).sum()
    }

    /// For who has made room for `pieces` and lets others have the lock before they are brought in: takes the loose
    /// memory of their sizes into hand, and reserves what is to be created.
    pub(super) fn set_aside(&mut self, pieces: &mut [Piece]) -> Reservation {
        let mut bytes = 0;
        for piece in pieces.iter_mut().filter(|piece| piece.is_absent()) {
            match self.take_loose(piece.range.bytes) {
                Some(id) => piece.backing = Backing::Held(id),
                None => bytes += piece.range.bytes,
            }
        }
        self.counters.reserved.fetch_add(bytes, Ordering::Relaxed);
        Reservation { counters: Arc::clone(&self.counters), bytes }
    }

    /// Maps and opens `pieces` (in address order within a segment) as far as they are not, taking loose memory
    /// first and creating the rest. Stops at the first error.
    pub(super) fn bring_in(&mut self, pieces: &mut [Piece], times: &mut MapTimes) -> Result<(), DriverError> {
        let started = Instant::now();
        for piece in pieces.iter_mut().filter(|piece| piece.backing == Backing::Absent) {
            piece.backing = Backing::Held(self.obtain(piece.range.bytes)?);
        }
        let created = Instant::now();
        times.create += created - started;
        let mapped = self.map_and_open(pieces);
        times.map += created.elapsed();
        mapped
    }

    fn map_and_open(&mut self, pieces: &mut [Piece]) -> Result<(), DriverError> {
        for piece in pieces.iter_mut() {
            if let Backing::Held(id) = piece.backing {
                self.driver.map(piece.range, id)?;
                piece.backing = Backing::Mapped { id, open: false };
            }
        }
        for run in neighbours(pieces, Piece::is_shut) {
            self.driver.set_access(span(&pieces[run.clone()]))?;
            for piece in &mut pieces[run] {
                if let Backing::Mapped { open, .. } = &mut piece.backing {
                    *open = true;
                }
            }
        }
        Ok(())
    }

    /// Unmaps `pieces` (in address order within a segment) as far as they are mapped, keeping their memory.
    /// Stops at the first error.
    pub(super) fn take_out(&mut self, pieces: &mut [Piece]) -> Result<(), DriverError> {
        for run in neighbours(pieces, Piece::is_mapped) {
            self.driver.unmap(span(&pieces[run.clone()]))?;
            for piece in &mut pieces[run] {
                if let Backing::Mapped { id, .. } = piece.backing {
                    piece.backing = Backing::Held(id);
                }
            }
        }
        Ok(())
    }

    /// The same, but one refusal is no reason to leave the rest; returns the first.
    pub(super) fn take_out_each(&mut self, pieces: &mut [Piece]) -> Option<DriverError> {
        let refused = self.take_out(pieces).err()?;
        for piece in pieces {
            // What is refused again stays mapped, which its state says.
            let _ = self.take_out(std::slice::from_mut(piece));
        }
        Some(refused)
    }

    /// Goes back to `before`, as far as the driver lets it; returns its first refusal.
    pub(super) fn restore(&mut self, pieces: &mut [Piece], before: &[Backing]) -> Option<DriverError> {
        let mut refused = None;
        let (mut out, mut back) = (Vec::new(), Vec::new());
        for (nth, before) in before.iter().enumerate() {
            match (pieces[nth].backing, before) {
                (Backing::Mapped { .. }, Backing::Held(_) | Backing::Absent) => out.push(nth),
                (Backing::Held(_), Backing::Mapped { .. }) => back.push(nth),
                _ => {}
            }
        }
        for nth in out {
            refused = refused.or(self.take_out(&mut pieces[nth..=nth]).err());
        }
        for (piece, before) in pieces.iter_mut().zip(before) {
            if let (Backing::Held(id), Backing::Absent) = (piece.backing, before) {
                piece.backing = Backing::Absent;
                // Nothing is lost by a refusal: it is owed, and tried again.
                refused = refused.or(self.release(id, piece.range.bytes).err());
            }
        }
        let mut returning: Vec<Piece> = back.iter().map(|nth| pieces[*nth]).collect();
        refused = refused.or(self.map_and_open(&mut returning).err());
        back.into_iter().zip(returning).for_each(|(nth, piece)| pieces[nth] = piece);
        refused
    }

    /// Keeps the memory of an unmapped piece for whoever needs some next.
    pub(super) fn keep(&mut self, piece: &mut Piece) {
        if let Backing::Held(id) = piece.backing {
            piece.backing = Backing::Absent;
            self.put_loose(id, piece.range.bytes);
        }
    }

    /// Gives the memory of an unmapped piece up. Returns the bytes given back; after an error they are owed.
    pub(super) fn let_go(&mut self, piece: &mut Piece) -> Result<u64, DriverError> {
        let Backing::Held(id) = piece.backing else { return Ok(0) };
        piece.backing = Backing::Absent;
        self.release(id, piece.range.bytes).map(|()| piece.range.bytes)
    }

    /// Gives up loose memory, large pieces first, until `needed_bytes` are given back or only what `reserved`
    /// names (size and count) is left. Returns the bytes given back, and the first refusal.
    pub(super) fn let_go_of_loose(
        &mut self,
        needed_bytes: u64,
        reserved: &[(u64, usize)],
    ) -> (u64, Option<DriverError>) {
        let (mut freed_bytes, mut refused) = (0, None);
        for bytes in self.loose.keys().rev().copied().collect::<Vec<_>>() {
            let kept = reserved.iter().find(|(size, _)| *size == bytes).map_or(0, |(_, count)| *count);
            while freed_bytes < needed_bytes && self.loose_count(bytes) > kept {
                let Some(id) = self.take_loose(bytes) else { break };
                match self.release(id, bytes) {
                    Ok(()) => freed_bytes += bytes,
                    Err(error) => refused = refused.or(Some(error)),
                }
            }
        }
        (freed_bytes, refused)
    }

    /// Tries the releases that failed again. Returns the bytes given back, and the first refusal.
    pub(super) fn settle(&mut self) -> (u64, Option<DriverError>) {
        let (mut freed_bytes, mut refused) = (0, None);
        for (backing, bytes) in std::mem::take(&mut self.owed) {
            self.counters.owed.fetch_sub(bytes, Ordering::Relaxed);
            match self.release(backing, bytes) {
                Ok(()) => freed_bytes += bytes,
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        (freed_bytes, refused)
    }

    /// Ends streams, each once, however often this is called. Stops at the first refusal.
    pub(super) fn destroy_streams(&mut self, streams: &[StreamId]) -> Result<(), DriverError> {
        while let Some(stream) = streams.get(self.streams_destroyed) {
            self.driver.stream_destroy(*stream)?;
            self.streams_destroyed += 1;
        }
        Ok(())
    }

    fn obtain(&mut self, bytes: u64) -> Result<BackingId, DriverError> {
        match self.take_loose(bytes) {
            Some(id) => Ok(id),
            None => self.create(bytes),
        }
    }

    fn create(&mut self, bytes: u64) -> Result<BackingId, DriverError> {
        let backing = self.driver.create(bytes)?;
        let held = self.counters.held.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.counters.created.fetch_add(bytes, Ordering::Relaxed);
        self.counters.peak.fetch_max(held, Ordering::Relaxed);
        *self.held_by_size.entry(bytes).or_default() += bytes;
        Ok(backing)
    }

    fn put_loose(&mut self, id: BackingId, bytes: u64) {
        self.loose.entry(bytes).or_default().push(id);
        self.counters.loose.fetch_add(bytes, Ordering::Relaxed);
    }

    fn take_loose(&mut self, bytes: u64) -> Option<BackingId> {
        let ids = self.loose.get_mut(&bytes)?;
        let id = ids.pop()?;
        if ids.is_empty() {
            self.loose.remove(&bytes);
        }
        self.counters.loose.fetch_sub(bytes, Ordering::Relaxed);
        Some(id)
    }

    fn release(&mut self, backing: BackingId, bytes: u64) -> Result<(), DriverError> {
        let released = self.driver.release(backing);
        if released.is_ok() {
            self.counters.held.fetch_sub(bytes, Ordering::Relaxed);
            self.held_by_size.entry(bytes).and_modify(|held| *held -= bytes);
        } else {
            self.owed.push((backing, bytes));
            self.counters.owed.fetch_add(bytes, Ordering::Relaxed);
        }
        released
    }
}

/// Maximal runs of pieces that touch each other and all satisfy `wanted`.
fn neighbours(pieces: &[Piece], wanted: impl Fn(&Piece) -> bool) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (nth, piece) in pieces.iter().enumerate().filter(|(_, piece)| wanted(piece)) {
        let touches = |last: &Piece| last.segment == piece.segment && last.range.end() == piece.range.addr;
        match runs.last_mut() {
            Some(run) if run.end == nth && touches(&pieces[nth - 1]) => run.end += 1,
            _ => runs.push(nth..nth + 1),
        }
    }
    runs
}

/// The addresses of a run.
fn span(run: &[Piece]) -> DeviceRange {
    let (first, last) = (run[0].range, run[run.len() - 1].range);
    DeviceRange::new(first.addr, last.end() - first.addr)
}
