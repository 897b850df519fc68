//! Copies in other devices' memory that a sleep or a wake has at hand: mapped here, to be written or read.
//!
//! No broker holds them meanwhile. So a broker that is asked for that memory asks the pool, and these are given up: the
//! wake goes on without them.
//!
//! Promise: they are unmapped only when no work that was queued there is in flight. What the driver refuses is tried again,
//! and keeps its memory until then.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::peer_copies::PeerCopy;
use crate::digest::Digest;
use crate::driver::{BackingId, DeviceRange, Driver, DriverError, MovePart, StreamId};
use crate::pool::tools::keys::Location;

/// A copy whose descriptor is here.
#[derive(Debug)]
pub(in crate::pool) struct CopyAtHand {
    pub(in crate::pool) location: Location,
    pub(in crate::pool) copy: PeerCopy,
    pub(in crate::pool) descriptor: OwnedFd,
}

/// Those of one peer.
#[derive(Debug)]
pub(in crate::pool) struct OpenCopies {
    peer: usize,
    /// Where it began with some.
    locations: Vec<Location>,
    at_hand: Mutex<AtHand>,
}

#[derive(Debug, Default)]
struct AtHand {
    /// By address.
    held: Vec<CopyAtHand>,
    window: Option<Window>,
    /// Not those of their backups, or not to be read.
    bad: BTreeSet<Location>,
}

/// Addresses at which their memory is mapped.
#[derive(Debug, Default)]
struct Window {
    reservation: Option<DeviceRange>,
    imported: Vec<BackingId>,
    /// Where each was mapped, in order.
    mapped: Vec<DeviceRange>,
    /// Where work may be in flight.
    streams: BTreeSet<StreamId>,
}

/// All that are open in a pool, and what the driver has refused to unmap.
#[derive(Debug, Default)]
pub(in crate::pool) struct Opened {
    /// Held while copies are between a broker and the pool: who is asked for them waits until they are in one place.
    hand_over: Mutex<()>,
    open: Mutex<Vec<Arc<OpenCopies>>>,
    left: Mutex<Vec<Window>>,
}

impl Opened {
    /// While the guard lives, copies change hands.
    pub(in crate::pool) fn hand_over(&self) -> MutexGuard<'_, ()> {
        lock(&self.hand_over)
    }

    /// What is at hand of this peer's, in bytes.
    pub(in crate::pool) fn bytes_of(&self, peer: usize) -> u64 {
        let open = lock(&self.open);
        let of_peer = open.iter().filter(|open| open.peer == peer);
        of_peer
            .flat_map(|open| lock(&open.at_hand).held.iter().map(|held| held.copy.bytes).collect::<Vec<_>>())
            .sum()
    }

    /// From now on they can be given up.
    pub(in crate::pool) fn add(&self, peer: usize, mut held: Vec<CopyAtHand>) -> Arc<OpenCopies> {
        held.sort_by_key(|held| held.location.1);
        let copies = Arc::new(OpenCopies {
            peer,
            locations: held.iter().map(|held| held.location).collect(),
            at_hand: Mutex::new(AtHand { held, ..AtHand::default() }),
        });
        lock(&self.open).push(Arc::clone(&copies));
        copies
    }

    /// Maps them.
    pub(in crate::pool) fn map(&self, driver: &dyn Driver, copies: &OpenCopies) -> Result<(), DriverError> {
        self.recover(driver);
        let mut inner = lock(&copies.at_hand);
        if inner.held.is_empty() {
            return Ok(()); // Given up already.
        }
        let mut window = Window::default();
        match window.map(driver, &inner.held) {
            Ok(()) => {
                inner.window = Some(window);
                Ok(())
            }
            Err(error) => {
                self.unmap(driver, window);
                Err(error)
            }
        }
    }

    /// Unmaps them, and returns what is left of them and of use; `None` if that was done before.
    pub(in crate::pool) fn close(
        &self,
        driver: &dyn Driver,
        copies: &Arc<OpenCopies>,
    ) -> Option<Vec<CopyAtHand>> {
        lock(&self.open).extract_if(.., |open| Arc::ptr_eq(open, copies)).next()?;
        let AtHand { mut held, window, bad } = std::mem::take(&mut *lock(&copies.at_hand));
        // What stays mapped stays in use there, and nothing else may have it.
        let is_unmapped = window.is_none_or(|window| self.unmap(driver, window));
        held.retain(|held| is_unmapped && !bad.contains(&held.location));
        Some(held)
    }

    /// Gives up those of this peer. Returns the bytes. Waits for work that is queued there, and for a hand-over.
    pub(in crate::pool) fn give_up(&self, driver: &dyn Driver, peer: usize) -> u64 {
        let _in_one_place = self.hand_over();
        let open: Vec<Arc<OpenCopies>> =
            lock(&self.open).iter().filter(|open| open.peer == peer).cloned().collect();
        let given_up = |copies: Arc<OpenCopies>| {
            let mut inner = lock(&copies.at_hand);
            let AtHand { held, window, .. } = std::mem::take(&mut *inner);
            let bytes: u64 = held.iter().map(|held| held.copy.bytes).sum();
            if window.is_none_or(|window| self.unmap(driver, window)) { bytes } else { 0 }
        };
        open.into_iter().map(given_up).sum()
    }

    /// Tries again what the driver has refused before.
    pub(in crate::pool) fn recover(&self, driver: &dyn Driver) {
        lock(&self.left).retain_mut(|window| window.unmap(driver).is_err());
    }

    /// Whether it is.
    fn unmap(&self, driver: &dyn Driver, mut window: Window) -> bool {
        let is_unmapped = window.unmap(driver).is_ok();
        if !is_unmapped {
            lock(&self.left).push(window);
        }
        is_unmapped
    }
}

impl OpenCopies {
    pub(in crate::pool) fn peer(&self) -> usize {
        self.peer
    }

    pub(in crate::pool) fn locations(&self) -> &[Location] {
        &self.locations
    }

    /// What queues copies to all of them, each from its chunk.
    pub(in crate::pool) fn write<T>(
        &self,
        stream: impl Fn(usize) -> StreamId,
        mut queue: impl FnMut(StreamId, MovePart) -> T,
    ) -> Vec<(Location, T)> {
        let mut inner = lock(&self.at_hand);
        let AtHand { held, window: Some(window), .. } = &mut *inner else { return Vec::new() };
        let copy = |(nth, held): (usize, &CopyAtHand)| {
            let to = DeviceRange::new(window.mapped[nth].addr, held.copy.bytes);
            window.streams.insert(stream(nth));
            (held.location, queue(stream(nth), MovePart { to, from: held.location.1 }))
        };
        held.iter().enumerate().map(copy).collect()
    }

    /// Queues copies of these granules, each by its address and with its digest, if all are here. They stay until that work
    /// has ended.
    pub(in crate::pool) fn read<T>(
        &self,
        granule_bytes: u64,
        granules: &[(u64, Digest)],
        stream: StreamId,
        queue: impl FnOnce(&[MovePart]) -> T,
    ) -> Option<T> {
        let mut inner = lock(&self.at_hand);
        let parts = inner.parts(granule_bytes, granules)?;
        inner.window.as_mut()?.streams.insert(stream);
        Some(queue(&parts))
    }

    /// Whether [`Self::read`] would find these.
    pub(in crate::pool) fn has(&self, granule_bytes: u64, granules: &[(u64, Digest)]) -> bool {
        lock(&self.at_hand).parts(granule_bytes, granules).is_some()
    }

    /// That with this granule has other bytes, or none: it is not read again.
    pub(in crate::pool) fn spoil(&self, addr: u64) {
        let mut inner = lock(&self.at_hand);
        if let Some(nth) = inner.at(addr) {
            let location = inner.held[nth].location;
            inner.bad.insert(location);
        }
    }

    /// Waits for all that was queued there.
    pub(in crate::pool) fn settle(&self, driver: &dyn Driver) -> Result<(), DriverError> {
        let mut inner = lock(&self.at_hand);
        inner.window.as_mut().map_or(Ok(()), |window| window.settle(driver))
    }
}

impl AtHand {
    /// Which has this address.
    fn at(&self, addr: u64) -> Option<usize> {
        let nth = self.held.partition_point(|held| held.location.1 <= addr).checked_sub(1)?;
        let held = &self.held[nth];
        (addr - held.location.1 < held.copy.bytes).then_some(nth)
    }

    fn parts(&self, granule_bytes: u64, granules: &[(u64, Digest)]) -> Option<Vec<MovePart>> {
        let window = self.window.as_ref()?;
        let (mut parts, mut last_nth): (Vec<MovePart>, usize) = (Vec::new(), usize::MAX);
        for (addr, digest) in granules {
            let nth = self.at(*addr)?;
            let CopyAtHand { location, copy, .. } = &self.held[nth];
            let offset = addr - location.1;
            let granule = usize::try_from(offset / granule_bytes).ok()?;
            if copy.digests.get(granule) != Some(&Some(*digest)) || self.bad.contains(location) {
                return None;
            }
            match parts.last_mut() {
                Some(last) if last.to.end() == *addr && last_nth == nth => last.to.bytes += granule_bytes,
                _ => {
                    let from = window.mapped[nth].addr + offset;
                    parts.push(MovePart { to: DeviceRange::new(*addr, granule_bytes), from });
                }
            }
            last_nth = nth;
        }
        Some(parts)
    }
}

impl Window {
    fn map(&mut self, driver: &dyn Driver, held: &[CopyAtHand]) -> Result<(), DriverError> {
        let whole = driver.reserve(held.iter().map(|held| held.copy.bytes).sum())?;
        self.reservation = Some(whole);
        let mut addr = whole.addr;
        for CopyAtHand { copy, descriptor, .. } in held {
            let id = driver.import(descriptor.as_fd(), copy.bytes)?;
            self.imported.push(id);
            let range = DeviceRange::new(addr, copy.bytes);
            driver.map(range, id)?;
            self.mapped.push(range);
            addr += copy.bytes;
        }
        driver.set_own_access(whole)
    }

    fn settle(&mut self, driver: &dyn Driver) -> Result<(), DriverError> {
        while let Some(stream) = self.streams.first().copied() {
            driver.stream_synchronize(stream)?;
            self.streams.remove(&stream);
        }
        Ok(())
    }

    /// After an error the next call goes on.
    fn unmap(&mut self, driver: &dyn Driver) -> Result<(), DriverError> {
        self.settle(driver)?;
        if let (Some(first), Some(last)) = (self.mapped.first(), self.mapped.last()) {
            driver.unmap(DeviceRange::new(first.addr, last.end() - first.addr))?;
            self.mapped.clear();
        }
        while let Some(id) = self.imported.last() {
            driver.release(*id)?;
            self.imported.pop();
        }
        if let Some(whole) = self.reservation {
            driver.unreserve(whole)?;
            self.reservation = None;
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
