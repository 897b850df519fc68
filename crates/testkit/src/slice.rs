//! A few granules of a larger device.
//!
//! A [`Slice`] is full when its granules are in use; its figures count memory created and not released. A
//! released backing counts until its last unmap. So tests are exact on a device that other tests and
//! processes use. All else is the larger device's.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use poorwill_core::digest::Digest;
use poorwill_core::driver::{CodePart, Encoded, HostWork, MovePart, Result, Scratch};
use poorwill_core::{
    BackingId, ByteSize, CopyPart, DeviceInfo, DeviceRange, Driver, DriverError, DriverErrorKind, EventId,
    HostBuffer, HostMemory, HostMemoryInfo, MemoryInfo, Op, Pending, ProcessMemory, StreamId,
};

use crate::forward::{forward, forward_codes, forward_streams_and_events};

/// A part of a device.
#[derive(Debug)]
pub struct Slice {
    inner: Arc<dyn Driver>,
    info: DeviceInfo,
    /// Locked while memory moves, so that the count matches the device.
    ledger: Mutex<Ledger>,
    /// Outside the lock, so that reading it waits for no call of the device.
    held_bytes: AtomicU64,
    host_bytes: Arc<AtomicU64>,
}

#[derive(Debug, Default)]
struct Ledger {
    backings: HashMap<BackingId, Backing>,
    /// By address.
    mappings: BTreeMap<u64, BackingId>,
}

#[derive(Debug)]
struct Backing {
    bytes: u64,
    mappings: u32,
    released: bool,
}

impl Slice {
    /// `granules` of `inner`.
    ///
    /// # Panics
    /// If `inner` has fewer.
    #[must_use]
    pub fn new(inner: Arc<dyn Driver>, granules: u64) -> Self {
        let mut info = inner.info().clone();
        let total_bytes = granules.checked_mul(info.granule_bytes).unwrap();
        let (wanted, there) = (ByteSize(total_bytes), ByteSize(info.total_bytes));
        assert!(total_bytes <= info.total_bytes, "{} has {there}, and the test needs {wanted}", info.name);
        info.name = format!("{wanted} of {}", info.name);
        info.total_bytes = total_bytes;
        info.links = 0;
        let (ledger, held_bytes, host_bytes) = Default::default();
        Self { inner, info, ledger, held_bytes, host_bytes }
    }

    /// Shows the links of the larger device.
    #[must_use]
    pub fn showing_links(mut self) -> Self {
        self.info.links = self.inner.info().links;
        self
    }

    /// The larger device.
    #[must_use]
    pub fn inner(&self) -> &Arc<dyn Driver> {
        &self.inner
    }

    /// Bytes created and not released.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Ordering::Relaxed)
    }

    /// Live bytes of host memory from `host_alloc`.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        self.host_bytes.load(Ordering::Relaxed)
    }

    fn before(&self, _: Op) -> Result<()> {
        let _ = self;
        Ok(())
    }

    /// In a forked child, the lock may be held by a thread that does not exist there.
    fn check(&self, op: Op) -> Result<()> {
        self.inner.check_process().map_err(|error| DriverError::new(op, error.kind))
    }

    fn ledger(&self, op: Op) -> Result<MutexGuard<'_, Ledger>> {
        self.check(op)?;
        Ok(self.ledger.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn create_by(&self, bytes: u64, create: impl FnOnce() -> Result<BackingId>) -> Result<BackingId> {
        let mut ledger = self.ledger(Op::Create)?;
        let free_bytes = self.info.total_bytes.saturating_sub(self.held_bytes());
        if bytes > free_bytes && bytes.is_multiple_of(self.info.granule_bytes) {
            let full = DriverErrorKind::OutOfMemory { asked_bytes: bytes, free_bytes };
            return Err(DriverError::new(Op::Create, full));
        }
        let id = create()?;
        ledger.backings.insert(id, Backing { bytes, mappings: 0, released: false });
        self.held_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(id)
    }

    fn remove_if_unused(&self, ledger: &mut Ledger, id: BackingId) {
        let gone = ledger.backings.get(&id).filter(|backing| backing.released && backing.mappings == 0);
        if let Some(bytes) = gone.map(|backing| backing.bytes) {
            ledger.backings.remove(&id);
            self.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }
}

impl Ledger {
    /// A backing of this slice, not of another slice of the same device.
    fn live(&mut self, op: Op, id: BackingId) -> Result<&mut Backing> {
        let unknown = || DriverError::new(op, DriverErrorKind::unknown_backing(id));
        self.backings.get_mut(&id).filter(|backing| !backing.released).ok_or_else(unknown)
    }
}

impl Driver for Slice {
    forward_streams_and_events!();

    fn host_memory(&self) -> HostMemoryInfo {
        self.inner.host_memory()
    }

    forward! {
        Capturing: capturing() -> Option<StreamId>;
        SetAccess: set_access(range: DeviceRange) -> ();
        EventQuery: event_query(event: EventId) -> bool;
        CopyToDevice: copy_to_device(stream: StreamId, src: Arc<HostBuffer>, parts: &[CopyPart]) -> Pending<()>;
        CopyToHost: copy_to_host(stream: StreamId, dst: HostBuffer, parts: &[CopyPart]) -> Pending<HostBuffer>;
        CopyWithin: copy_within(stream: StreamId, parts: &[MovePart]) -> Pending<()>;
        Save: save(stream: StreamId, dst: HostBuffer, parts: &[CopyPart]) -> Pending<(HostBuffer, Vec<Digest>)>;
        Zero: zero(stream: StreamId, range: DeviceRange) -> Pending<()>;
        Digest: digest(stream: StreamId, ranges: &[DeviceRange]) -> Pending<Vec<Digest>>;
    }
    forward_codes!();

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        self.check(Op::MemoryInfo)?;
        let (total_bytes, used_bytes) = (self.info.total_bytes, self.held_bytes());
        let process = Some(ProcessMemory::new(used_bytes, 0));
        Ok(MemoryInfo::new(total_bytes, total_bytes.saturating_sub(used_bytes)).of_process(process))
    }

    fn create(&self, bytes: u64) -> Result<BackingId> {
        self.create_by(bytes, || self.inner.create(bytes))
    }

    fn create_shared(&self, bytes: u64) -> Result<BackingId> {
        self.create_by(bytes, || self.inner.create_shared(bytes))
    }

    fn export(&self, backing: BackingId) -> Result<OwnedFd> {
        self.ledger(Op::Export)?.live(Op::Export, backing)?;
        self.inner.export(backing)
    }

    fn import(&self, memory: BorrowedFd<'_>, bytes: u64) -> Result<BackingId> {
        let mut ledger = self.ledger(Op::Import)?;
        let id = self.inner.import(memory, bytes)?;
        ledger.backings.insert(id, Backing { bytes, mappings: 0, released: false });
        self.held_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(id)
    }

    fn release(&self, backing: BackingId) -> Result<()> {
        let mut ledger = self.ledger(Op::Release)?;
        ledger.live(Op::Release, backing)?;
        self.inner.release(backing)?;
        ledger.live(Op::Release, backing)?.released = true;
        self.remove_if_unused(&mut ledger, backing);
        Ok(())
    }

    fn map(&self, range: DeviceRange, backing: BackingId) -> Result<()> {
        let mut ledger = self.ledger(Op::Map)?;
        ledger.live(Op::Map, backing)?;
        self.inner.map(range, backing)?;
        ledger.live(Op::Map, backing)?.mappings += 1;
        ledger.mappings.insert(range.addr, backing);
        Ok(())
    }

    fn unmap(&self, range: DeviceRange) -> Result<()> {
        let mut ledger = self.ledger(Op::Unmap)?;
        self.inner.unmap(range)?;
        let mut removed = ledger.mappings.split_off(&range.addr);
        let mut kept = removed.split_off(&range.end());
        ledger.mappings.append(&mut kept);
        for id in removed.into_values() {
            ledger.backings.entry(id).and_modify(|backing| backing.mappings -= 1);
            self.remove_if_unused(&mut ledger, id);
        }
        Ok(())
    }

    fn host_alloc(&self, bytes: u64) -> Result<HostBuffer> {
        self.inner.host_alloc(bytes).map(|buffer| counted(buffer, &self.host_bytes))
    }

    fn host_alloc_all(&self, sizes: &[u64]) -> Result<Vec<Pending<HostBuffer>>> {
        let count = |buffer: Pending<HostBuffer>| {
            let counter = Arc::clone(&self.host_bytes);
            buffer.then(move |buffer| buffer.map(|buffer| counted(buffer, &counter)))
        };
        Ok(self.inner.host_alloc_all(sizes)?.into_iter().map(count).collect())
    }
}

fn counted(buffer: HostBuffer, counter: &Arc<AtomicU64>) -> HostBuffer {
    let bytes = buffer.len() as u64;
    counter.fetch_add(bytes, Ordering::Relaxed);
    HostBuffer::new(Counted { buffer, bytes, counter: Arc::clone(counter) })
}

#[derive(Debug)]
struct Counted {
    buffer: HostBuffer,
    bytes: u64,
    counter: Arc<AtomicU64>,
}

impl HostMemory for Counted {
    fn as_slice(&self) -> &[u8] {
        &self.buffer
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.buffer
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.counter.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
