//! Backup storage other than the driver's host memory: sleep must not depend on where bytes are.
//!
//! [`TestBackups`] encodes granules, has a limit, and fails where a script decides.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use poorwill_core::backup::{BackupBuffer, Backups, Footprint, StoredBytes};
use poorwill_core::driver::{Result, Scratch};
use poorwill_core::{CopyPart, Digest, Driver, DriverError, DriverErrorKind, Op, Pending, StreamId};

/// How granules are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// Each granule with some bits inverted.
    Xored,
    /// Granules of zeros take no space.
    WithoutZeros,
}

/// A call that a script can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackupCall {
    /// Buffers are requested.
    Allocate,
    /// The wait for a buffer.
    Allocated,
    /// A copy into a buffer is queued.
    Save,
    /// The wait for that copy.
    Saved,
    /// A copy from a buffer is queued.
    Load,
    /// The wait for that copy.
    Loaded,
}

type Fails = dyn Fn(BackupCall) -> bool + Send + Sync;

/// The storage.
#[derive(Debug, Clone)]
pub struct TestBackups(Arc<Storage>);

struct Storage {
    driver: Arc<dyn Driver>,
    coding: Coding,
    limit_bytes: u64,
    used_bytes: AtomicU64,
    /// Set if several storages share its memory; each keeps released memory for reuse.
    machine: Option<Arc<SharedMachine>>,
    /// Released, and cached for reuse.
    cached_bytes: AtomicU64,
    /// All stored granules, for tests that corrupt one.
    stored: Mutex<Vec<std::sync::Weak<Mutex<Granules>>>>,
    /// How many of the next loads, and saves, bring a wrong byte.
    garbled: AtomicU64,
    garbled_saves: AtomicU64,
    fails: Box<Fails>,
}

/// Memory that several storages share.
#[derive(Debug)]
pub struct SharedMachine {
    bytes: u64,
    held_bytes: AtomicU64,
}

impl SharedMachine {
    /// A machine with `bytes`.
    #[must_use]
    pub fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self { bytes, held_bytes: AtomicU64::new(0) })
    }

    /// Bytes that storages hold, in use or cached.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: u64) -> bool {
        let take = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= self.bytes);
        self.held_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }
}

/// By index; `None` is zeros.
type Granules = Vec<Option<Vec<u8>>>;

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestBackups").field("coding", &self.coding).finish_non_exhaustive()
    }
}

impl TestBackups {
    /// Storage with this limit over all buffers, for memory of `driver`.
    #[must_use]
    pub fn new(driver: &Arc<dyn Driver>, coding: Coding, limit_bytes: u64) -> Self {
        Self::failing(driver, coding, limit_bytes, |_| false)
    }

    /// As [`TestBackups::new`]; a call fails if `fails` returns true.
    #[must_use]
    pub fn failing(
        driver: &Arc<dyn Driver>,
        coding: Coding,
        limit_bytes: u64,
        fails: impl Fn(BackupCall) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self::build(driver, coding, limit_bytes, None, Box::new(fails))
    }

    /// Storage on a shared machine, without its own limit. It keeps released memory until it is trimmed.
    #[must_use]
    pub fn on_machine(driver: &Arc<dyn Driver>, machine: &Arc<SharedMachine>) -> Self {
        Self::build(driver, Coding::Xored, u64::MAX, Some(Arc::clone(machine)), Box::new(|_| false))
    }

    fn build(
        driver: &Arc<dyn Driver>,
        coding: Coding,
        limit_bytes: u64,
        machine: Option<Arc<SharedMachine>>,
        fails: Box<Fails>,
    ) -> Self {
        let (used_bytes, cached_bytes, stored, garbled, garbled_saves) = Default::default();
        let driver = Arc::clone(driver);
        Self(Arc::new(Storage {
            driver,
            coding,
            limit_bytes,
            used_bytes,
            machine,
            cached_bytes,
            stored,
            garbled,
            garbled_saves,
            fails,
        }))
    }

    /// Size of the live buffers.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.0.used_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that are stored after encoding.
    ///
    /// # Panics
    /// After another panic.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        let stored = self.0.stored.lock().unwrap();
        let buffers = stored.iter().filter_map(std::sync::Weak::upgrade);
        buffers
            .map(|buffer| buffer.lock().unwrap().iter().flatten().map(|g| g.len() as u64).sum::<u64>())
            .sum()
    }

    /// The number of stored granules.
    ///
    /// # Panics
    /// After another panic.
    #[must_use]
    pub fn stored_granules(&self) -> usize {
        let stored = self.0.stored.lock().unwrap();
        let buffers = stored.iter().filter_map(std::sync::Weak::upgrade);
        buffers.map(|buffer| buffer.lock().unwrap().iter().flatten().count()).sum()
    }

    /// The next `loads` copies to the device bring one wrong byte each; the stored bytes stay intact.
    pub fn garble(&self, loads: u64) {
        self.0.garbled.store(loads, Ordering::Relaxed);
    }

    /// The next `saves` copies to the storage bring one wrong byte each.
    pub fn garble_saves(&self, saves: u64) {
        self.0.garbled_saves.store(saves, Ordering::Relaxed);
    }

    /// Flips one bit in the middle of the `nth` stored granule.
    ///
    /// # Panics
    /// If there is no such granule.
    pub fn spoil(&self, nth: usize) {
        let middle = usize::try_from(self.0.driver.info().granule_bytes / 2).unwrap();
        self.change(nth, &[middle], |byte| byte ^ 0x10);
    }

    /// Changes these bytes of the `nth` stored granule, differently each time.
    ///
    /// # Panics
    /// If there is no such granule or byte.
    pub fn spoil_bytes(&self, nth: usize, bytes: &[usize]) {
        self.change(nth, bytes, |byte| byte.wrapping_add(1));
    }

    fn change(&self, nth: usize, bytes: &[usize], change: impl Fn(u8) -> u8) {
        let stored = self.0.stored.lock().unwrap();
        let mut left = nth;
        for buffer in stored.iter().filter_map(std::sync::Weak::upgrade) {
            let mut buffer = buffer.lock().unwrap();
            let count = buffer.iter().flatten().count();
            if left < count {
                let granule = buffer.iter_mut().flatten().nth(left).unwrap();
                bytes.iter().for_each(|at| granule[*at] = change(granule[*at]));
                return;
            }
            left -= count;
        }
        panic!("no {nth} granules are stored");
    }
}

/// Whether this is one of the next `left`.
fn takes_one(left: &AtomicU64) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
}

impl Storage {
    fn check(&self, call: BackupCall, op: Op) -> Result<()> {
        let text = format!("{call:?} was made to fail by the test");
        let injected = DriverErrorKind::Device { code: 998, name: "STORAGE".into(), text };
        if (self.fails)(call) { Err(DriverError::new(op, injected)) } else { Ok(()) }
    }

    fn claim(self: &Arc<Self>, bytes: u64) -> Result<Claim> {
        let take = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.limit_bytes);
        let refused = |reason| {
            let kind = DriverErrorKind::OutOfHostMemory { asked_bytes: bytes, reason };
            DriverError::new(Op::HostAlloc, kind)
        };
        let taken = self.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        taken.map_err(|_| refused(format!("the storage may have {} bytes", self.limit_bytes)))?;
        let reuse = |idle: u64| idle.checked_sub(bytes);
        let is_reused = self.cached_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, reuse).is_ok();
        if let Some(machine) = self.machine.as_ref().filter(|machine| !is_reused && !machine.take(bytes)) {
            self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Err(refused(format!("the machine has {} bytes", machine.bytes)));
        }
        Ok(Claim { storage: Arc::clone(self), bytes })
    }
}

#[derive(Debug)]
struct Claim {
    storage: Arc<Storage>,
    bytes: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.storage.used_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        if self.storage.machine.is_some() {
            self.storage.cached_bytes.fetch_add(self.bytes, Ordering::Relaxed);
        }
    }
}

impl Backups for TestBackups {
    fn buffers(&self, footprints: &[Footprint]) -> Result<Vec<Pending<BackupBuffer>>> {
        self.0.check(BackupCall::Allocate, Op::HostAlloc)?;
        let buffer = |footprint: &Footprint| {
            let bytes = footprint.bytes();
            let (claim, storage) = (self.0.claim(bytes)?, Arc::clone(&self.0));
            Ok(Pending::new(move || {
                storage.check(BackupCall::Allocated, Op::HostAlloc)?;
                let granules = usize::try_from(bytes / storage.driver.info().granule_bytes).unwrap();
                let granules = Arc::new(Mutex::new(vec![None; granules]));
                storage.stored.lock().unwrap().push(Arc::downgrade(&granules));
                Ok(BackupBuffer::new(TestBuffer { claim, granules }))
            }))
        };
        footprints.iter().map(buffer).collect()
    }

    fn trim(&self) -> Result<()> {
        self.0.stored.lock().unwrap().retain(|buffer| buffer.strong_count() > 0);
        let cached_bytes = self.0.cached_bytes.swap(0, Ordering::Relaxed);
        if let Some(machine) = &self.0.machine {
            machine.held_bytes.fetch_sub(cached_bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    fn held_bytes(&self) -> u64 {
        self.used_bytes() + self.0.cached_bytes.load(Ordering::Relaxed)
    }

    fn allows(&self, bytes: u64) -> bool {
        self.used_bytes().saturating_add(bytes) <= self.0.limit_bytes
    }
}

#[derive(Debug)]
struct TestBuffer {
    claim: Claim,
    granules: Arc<Mutex<Granules>>,
}

impl TestBuffer {
    fn granule_bytes(&self) -> usize {
        usize::try_from(self.claim.storage.driver.info().granule_bytes).unwrap()
    }

    fn encode(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        match self.claim.storage.coding {
            Coding::Xored => Some(bytes.iter().map(|byte| byte ^ 0x5A).collect()),
            Coding::WithoutZeros => bytes.iter().any(|byte| *byte != 0).then(|| bytes.to_vec()),
        }
    }

    fn decode(&self, granule: usize) -> Vec<u8> {
        let key = if self.claim.storage.coding == Coding::Xored { 0x5A } else { 0 };
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

impl StoredBytes for TestBuffer {
    fn bytes(&self) -> u64 {
        self.claim.bytes
    }

    fn is_free(&self) -> bool {
        true // A reader has its own copy.
    }

    fn save(
        self: Box<Self>,
        stream: StreamId,
        _: &Footprint,
        parts: &[CopyPart],
        digests: Option<&[Digest]>,
    ) -> Result<Pending<(BackupBuffer, Vec<Option<Digest>>)>> {
        let storage = Arc::clone(&self.claim.storage);
        storage.check(BackupCall::Save, Op::Save)?;
        let staging = storage.driver.host_alloc(self.claim.bytes)?;
        let copy = storage.driver.copy_to_host(stream, staging, parts)?;
        let (parts, known) = (parts.to_vec(), digests.map(<[Digest]>::to_vec));
        Ok(copy.then(move |copied| {
            let mut staging = copied?;
            storage.check(BackupCall::Saved, Op::Save)?;
            if let Some(part) = parts.first()
                && takes_one(&storage.garbled_saves)
            {
                staging[usize::try_from(part.host_offset).unwrap()] ^= 1;
            }
            let mut digests = Vec::new();
            for granule in parts.iter().flat_map(|part| self.granules_of(part)) {
                let start = granule * self.granule_bytes();
                let encoded = self.encode(&staging[start..start + self.granule_bytes()]);
                self.granules.lock().unwrap()[granule] = encoded;
                digests.push(Some(Digest::of(&self.decode(granule))));
            }
            let known = known.map(|known| known.into_iter().map(Some).collect());
            Ok((BackupBuffer::new(*self), known.unwrap_or(digests)))
        }))
    }

    fn load(
        &self,
        stream: StreamId,
        parts: &[CopyPart],
        _: Option<Scratch>,
    ) -> Result<Pending<Vec<Option<Digest>>>> {
        let storage = Arc::clone(&self.claim.storage);
        storage.check(BackupCall::Load, Op::CopyToDevice)?;
        let mut staging = storage.driver.host_alloc(self.claim.bytes)?;
        for granule in parts.iter().flat_map(|part| self.granules_of(part)) {
            let start = granule * self.granule_bytes();
            staging[start..start + self.granule_bytes()].copy_from_slice(&self.decode(granule));
        }
        if let Some(part) = parts.first()
            && takes_one(&storage.garbled)
        {
            staging[usize::try_from(part.host_offset).unwrap()] ^= 1;
        }
        let granules = parts.iter().flat_map(|part| self.granules_of(part)).count();
        let copy = storage.driver.copy_to_device(stream, Arc::new(staging), parts)?;
        Ok(copy.then(move |loaded| {
            loaded?;
            storage.check(BackupCall::Loaded, Op::CopyToDevice)?;
            Ok(vec![None; granules])
        }))
    }

    fn digest(&self, offset: u64, bytes: u64) -> Result<Digest> {
        let granule = self.granule_bytes() as u64;
        if bytes != granule || !offset.is_multiple_of(granule) || offset + bytes > self.claim.bytes {
            return Err(DriverError::invalid(Op::Digest, "the storage keeps whole granules"));
        }
        Ok(Digest::of(&self.decode(usize::try_from(offset / granule).unwrap())))
    }
}
