//! Stores of backups other than host memory of the driver, to prove that a sleep knows nothing of where bytes are.
//!
//! [`OddBackups`] keeps granules in a coding of its own, within a limit, and fails where a script says.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use poorwill_core::backup::{Backups, Room, StoredBytes};
use poorwill_core::driver::Result;
use poorwill_core::{CopyPart, Digest, Driver, DriverError, DriverErrorKind, Op, Pending, StreamId};

/// How bytes are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// Each with its bits turned round.
    Xored,
    /// Granules of zeros take no room.
    WithoutZeros,
}

/// A call that a script can let fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreCall {
    /// Rooms are asked for.
    Rooms,
    /// One of them is waited for.
    Room,
    /// A copy into a room is queued.
    Save,
    /// It is waited for.
    Saved,
    /// A copy out of a room is queued.
    Load,
    /// It is waited for.
    Loaded,
}

type Script = dyn Fn(StoreCall) -> bool + Send + Sync;

/// The store.
#[derive(Debug, Clone)]
pub struct OddBackups(Arc<Store>);

struct Store {
    driver: Arc<dyn Driver>,
    coding: Coding,
    limit_bytes: u64,
    used_bytes: AtomicU64,
    /// Of a machine whose memory several stores share; what is given back to one of them stays there for later.
    machine: Option<Arc<OddMachine>>,
    /// Given back, and kept for later.
    idle_bytes: AtomicU64,
    /// Every granule that is kept, for those who want to spoil one.
    kept: Mutex<Vec<std::sync::Weak<Mutex<Granules>>>>,
    /// How many of the next loads bring a wrong byte.
    garbled: AtomicU64,
    fails: Box<Script>,
}

/// A machine with so much memory for stores.
#[derive(Debug)]
pub struct OddMachine {
    bytes: u64,
    held_bytes: AtomicU64,
}

impl OddMachine {
    /// One with `bytes`.
    #[must_use]
    pub fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self { bytes, held_bytes: AtomicU64::new(0) })
    }

    /// What stores hold of it, for rooms or for later.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: u64) -> bool {
        let take = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= self.bytes);
        self.held_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }
}

/// By number. What is missing is zeros.
type Granules = Vec<Option<Vec<u8>>>;

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OddBackups").field("coding", &self.coding).finish_non_exhaustive()
    }
}

impl OddBackups {
    /// A store of rooms of `limit_bytes` together, for memory of `driver`.
    #[must_use]
    pub fn new(driver: &Arc<dyn Driver>, coding: Coding, limit_bytes: u64) -> Self {
        Self::failing(driver, coding, limit_bytes, |_| false)
    }

    /// The same; a call fails when `fails` says so.
    #[must_use]
    pub fn failing(
        driver: &Arc<dyn Driver>,
        coding: Coding,
        limit_bytes: u64,
        fails: impl Fn(StoreCall) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self::build(driver, coding, limit_bytes, None, Box::new(fails))
    }

    /// A store without a limit of its own on a machine that others use, too: what is given back to it stays with it
    /// until it is trimmed.
    #[must_use]
    pub fn on_machine(driver: &Arc<dyn Driver>, machine: &Arc<OddMachine>) -> Self {
        Self::build(driver, Coding::Xored, u64::MAX, Some(Arc::clone(machine)), Box::new(|_| false))
    }

    fn build(
        driver: &Arc<dyn Driver>,
        coding: Coding,
        limit_bytes: u64,
        machine: Option<Arc<OddMachine>>,
        fails: Box<Script>,
    ) -> Self {
        let (used_bytes, idle_bytes, kept, garbled) = Default::default();
        let driver = Arc::clone(driver);
        Self(Arc::new(Store {
            driver,
            coding,
            limit_bytes,
            used_bytes,
            machine,
            idle_bytes,
            kept,
            garbled,
            fails,
        }))
    }

    /// Rooms that are given out, in bytes.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.0.used_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that are really kept.
    ///
    /// # Panics
    /// After another panic.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        let kept = self.0.kept.lock().unwrap();
        let rooms = kept.iter().filter_map(std::sync::Weak::upgrade);
        rooms.map(|room| room.lock().unwrap().iter().flatten().map(|g| g.len() as u64).sum::<u64>()).sum()
    }

    /// How many granules are kept.
    ///
    /// # Panics
    /// After another panic.
    #[must_use]
    pub fn kept_granules(&self) -> usize {
        let kept = self.0.kept.lock().unwrap();
        let rooms = kept.iter().filter_map(std::sync::Weak::upgrade);
        rooms.map(|room| room.lock().unwrap().iter().flatten().count()).sum()
    }

    /// The next `loads` copies to the device bring one wrong byte each. What is kept stays.
    pub fn garble(&self, loads: u64) {
        self.0.garbled.store(loads, Ordering::Relaxed);
    }

    /// Changes one bit in the middle of the `nth` granule that is kept.
    ///
    /// # Panics
    /// When there are not so many.
    pub fn spoil(&self, nth: usize) {
        let middle = usize::try_from(self.0.driver.info().granule_bytes / 2).unwrap();
        self.change(nth, &[middle], |byte| byte ^ 0x10);
    }

    /// Changes these bytes of the `nth` granule that is kept, to others each time.
    ///
    /// # Panics
    /// When there are not so many granules, or bytes.
    pub fn spoil_bytes(&self, nth: usize, bytes: &[usize]) {
        self.change(nth, bytes, |byte| byte.wrapping_add(1));
    }

    fn change(&self, nth: usize, bytes: &[usize], change: impl Fn(u8) -> u8) {
        let kept = self.0.kept.lock().unwrap();
        let mut left = nth;
        for room in kept.iter().filter_map(std::sync::Weak::upgrade) {
            let mut room = room.lock().unwrap();
            let count = room.iter().flatten().count();
            if left < count {
                let granule = room.iter_mut().flatten().nth(left).unwrap();
                bytes.iter().for_each(|at| granule[*at] = change(granule[*at]));
                return;
            }
            left -= count;
        }
        panic!("no {nth} granules are kept");
    }
}

impl Store {
    fn ask(&self, call: StoreCall, op: Op) -> Result<()> {
        let text = format!("{call:?} was made to fail by the test");
        let injected = DriverErrorKind::Device { code: 998, name: "STORE".into(), text };
        if (self.fails)(call) { Err(DriverError::new(op, injected)) } else { Ok(()) }
    }

    fn claim(self: &Arc<Self>, bytes: u64) -> Result<Claim> {
        let take = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.limit_bytes);
        let lacks = |reason| {
            let kind = DriverErrorKind::OutOfHostMemory { asked_bytes: bytes, reason };
            DriverError::new(Op::HostAlloc, kind)
        };
        let taken = self.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        taken.map_err(|_| lacks(format!("the store may have {} bytes", self.limit_bytes)))?;
        let reuse = |idle: u64| idle.checked_sub(bytes);
        let is_reused = self.idle_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, reuse).is_ok();
        if let Some(machine) = self.machine.as_ref().filter(|machine| !is_reused && !machine.take(bytes)) {
            self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Err(lacks(format!("the machine has {} bytes", machine.bytes)));
        }
        Ok(Claim { store: Arc::clone(self), bytes })
    }
}

/// What a room takes of the limit.
#[derive(Debug)]
struct Claim {
    store: Arc<Store>,
    bytes: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.store.used_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        if self.store.machine.is_some() {
            self.store.idle_bytes.fetch_add(self.bytes, Ordering::Relaxed);
        }
    }
}

impl Backups for OddBackups {
    fn rooms(&self, sizes: &[u64]) -> Result<Vec<Pending<Room>>> {
        self.0.ask(StoreCall::Rooms, Op::HostAlloc)?;
        let room = |bytes: &u64| {
            let (claim, store, bytes) = (self.0.claim(*bytes)?, Arc::clone(&self.0), *bytes);
            Ok(Pending::new(move || {
                store.ask(StoreCall::Room, Op::HostAlloc)?;
                let granules = usize::try_from(bytes / store.driver.info().granule_bytes).unwrap();
                let granules = Arc::new(Mutex::new(vec![None; granules]));
                store.kept.lock().unwrap().push(Arc::downgrade(&granules));
                Ok(Room::new(OddRoom { claim, granules }))
            }))
        };
        sizes.iter().map(room).collect()
    }

    fn trim(&self) -> Result<()> {
        self.0.kept.lock().unwrap().retain(|room| room.strong_count() > 0);
        let idle_bytes = self.0.idle_bytes.swap(0, Ordering::Relaxed);
        if let Some(machine) = &self.0.machine {
            machine.held_bytes.fetch_sub(idle_bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    fn held_bytes(&self) -> u64 {
        self.used_bytes() + self.0.idle_bytes.load(Ordering::Relaxed)
    }

    fn allows(&self, bytes: u64) -> bool {
        self.used_bytes().saturating_add(bytes) <= self.0.limit_bytes
    }
}

#[derive(Debug)]
struct OddRoom {
    claim: Claim,
    granules: Arc<Mutex<Granules>>,
}

impl OddRoom {
    fn granule_bytes(&self) -> usize {
        usize::try_from(self.claim.store.driver.info().granule_bytes).unwrap()
    }

    fn encode(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        match self.claim.store.coding {
            Coding::Xored => Some(bytes.iter().map(|byte| byte ^ 0x5A).collect()),
            Coding::WithoutZeros => bytes.iter().any(|byte| *byte != 0).then(|| bytes.to_vec()),
        }
    }

    fn decode(&self, granule: usize) -> Vec<u8> {
        let key = if self.claim.store.coding == Coding::Xored { 0x5A } else { 0 };
        let stored = &self.granules.lock().unwrap()[granule];
        let decoded = stored.as_ref().map(|bytes| bytes.iter().map(|byte| byte ^ key).collect());
        decoded.unwrap_or_else(|| vec![0; self.granule_bytes()])
    }

    fn granules_of(&self, part: &CopyPart) -> std::ops::Range<usize> {
        let granule = self.granule_bytes() as u64;
        let [first, end] = [part.host_offset, part.host_offset + part.device.bytes];
        usize::try_from(first / granule).unwrap()..usize::try_from(end / granule).unwrap()
    }
}

impl StoredBytes for OddRoom {
    fn bytes(&self) -> u64 {
        self.claim.bytes
    }

    fn is_free(&self) -> bool {
        true // Whoever reads has a copy.
    }

    fn save(self: Box<Self>, stream: StreamId, parts: &[CopyPart]) -> Result<Pending<(Room, Vec<Digest>)>> {
        let store = Arc::clone(&self.claim.store);
        store.ask(StoreCall::Save, Op::Save)?;
        let staging = store.driver.host_alloc(self.claim.bytes)?;
        let copy = store.driver.copy_to_host(stream, staging, parts)?;
        let parts = parts.to_vec();
        Ok(copy.then(move |copied| {
            let staging = copied?;
            store.ask(StoreCall::Saved, Op::Save)?;
            let mut digests = Vec::new();
            for granule in parts.iter().flat_map(|part| self.granules_of(part)) {
                let start = granule * self.granule_bytes();
                let encoded = self.encode(&staging[start..start + self.granule_bytes()]);
                self.granules.lock().unwrap()[granule] = encoded;
                digests.push(Digest::of(&self.decode(granule)));
            }
            Ok((Room::new(*self), digests))
        }))
    }

    fn load(&self, stream: StreamId, parts: &[CopyPart]) -> Result<Pending<()>> {
        let store = Arc::clone(&self.claim.store);
        store.ask(StoreCall::Load, Op::CopyToDevice)?;
        let mut staging = store.driver.host_alloc(self.claim.bytes)?;
        for granule in parts.iter().flat_map(|part| self.granules_of(part)) {
            let start = granule * self.granule_bytes();
            staging[start..start + self.granule_bytes()].copy_from_slice(&self.decode(granule));
        }
        let garbled =
            store.garbled.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if let (Ok(_), Some(part)) = (garbled, parts.first()) {
            staging[usize::try_from(part.host_offset).unwrap()] ^= 1;
        }
        let copy = store.driver.copy_to_device(stream, Arc::new(staging), parts)?;
        Ok(copy.then(move |loaded| {
            loaded?;
            store.ask(StoreCall::Loaded, Op::CopyToDevice)
        }))
    }

    fn digest(&self, offset: u64, bytes: u64) -> Result<Digest> {
        let granule = self.granule_bytes() as u64;
        if bytes != granule || !offset.is_multiple_of(granule) || offset + bytes > self.claim.bytes {
            return Err(DriverError::invalid(Op::Digest, "the store keeps whole granules"));
        }
        Ok(Digest::of(&self.decode(usize::try_from(offset / granule).unwrap())))
    }
}
