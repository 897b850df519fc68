//! A device without memory: addresses and sizes, by the rules of the driver contract.
//!
//! A pool on it maps what it would map on the host device of that capacity, without a system call. Wrong calls are
//! refused as there. No work is ever queued, so every event has passed. What needs bytes is unsupported.
//!
//! Among equal places a pool takes the lowest address. Here addresses follow each other as on Linux, where only the
//! host device reserves any.
//!
//! It lives within one call of this crate, which no fork outlasts: `check_process` has nothing to find.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ::poorwill::driver::{BackingId, EventId, HostWork, MovePart, Result};
use ::poorwill::{
    ByteSize, CopyPart, DeviceInfo, DeviceRange, Digest, Driver, DriverError, DriverErrorKind, HostBuffer,
    MemoryInfo, Op, Pending, ProcessMemory, StreamId,
};

/// As on the host device, and on NVIDIA's GPUs.
pub(super) const GRANULE_BYTES: u64 = 2 << 20;

/// Where addresses end. Numbers of a page's script hold them exactly.
const ADDRESSES_END: u64 = 1 << 52;

#[derive(Debug)]
pub(super) struct MemorylessDevice {
    info: DeviceInfo,
    memory: Mutex<Account>,
    handles: Mutex<Handles>,
}

/// What of the device is taken. A failed call has changed nothing.
#[derive(Debug)]
struct Account {
    capacity_bytes: u64,
    held_bytes: u64,
    /// What others take; what is held already stays, also beyond that.
    claimed_bytes: u64,
    backings: HashMap<BackingId, Backing>,
    created: u64,
    /// Addresses that nothing has: first to end.
    gaps: BTreeMap<u64, u64>,
    /// First address and size.
    reservations: BTreeMap<u64, u64>,
    /// By first address.
    mappings: BTreeMap<u64, MappedBacking>,
}

#[derive(Debug)]
struct Backing {
    bytes: u64,
    mappings: u32,
    released: bool,
}

#[derive(Debug)]
struct MappedBacking {
    bytes: u64,
    backing: BackingId,
    open: bool,
}

/// Streams and events.
#[derive(Debug, Default)]
struct Handles {
    last: u64,
    streams: HashSet<StreamId>,
    events: HashSet<EventId>,
}

/// A result whose error does not name its call yet.
type Checked<T> = std::result::Result<T, DriverErrorKind>;

impl MemorylessDevice {
    /// The capacity is rounded down to granules.
    pub(super) fn of(capacity_bytes: u64) -> Self {
        let capacity_bytes = capacity_bytes / GRANULE_BYTES * GRANULE_BYTES;
        let name = format!("device of {} without memory", ByteSize(capacity_bytes));
        let account = Account {
            capacity_bytes,
            held_bytes: 0,
            claimed_bytes: 0,
            backings: HashMap::new(),
            created: 0,
            gaps: BTreeMap::from([(GRANULE_BYTES, ADDRESSES_END)]),
            reservations: BTreeMap::new(),
            mappings: BTreeMap::new(),
        };
        Self {
            info: DeviceInfo::new("memoryless", name, GRANULE_BYTES, capacity_bytes),
            memory: Mutex::new(account),
            handles: Mutex::default(),
        }
    }

    /// Others take so much from now on.
    pub(super) fn claim(&self, bytes: u64) {
        self.account().claimed_bytes = bytes;
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.account().held_bytes
    }

    fn account(&self) -> MutexGuard<'_, Account> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handles(&self) -> MutexGuard<'_, Handles> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For calls on a stream, whose work has always ended.
    fn stream(&self, op: Op, stream: StreamId) -> Result<()> {
        if stream == StreamId::DEFAULT || self.handles().streams.contains(&stream) {
            return Ok(());
        }
        Err(unknown(op, stream.to_string()))
    }

    fn event(&self, op: Op, event: EventId) -> Result<()> {
        if self.handles().events.contains(&event) { Ok(()) } else { Err(unknown(op, event.to_string())) }
    }
}

impl Account {
    /// In the highest gap that is long enough, with a granule left above it and at least one below.
    fn reserve(&mut self, bytes: u64) -> Checked<DeviceRange> {
        check_size(bytes)?;
        // To align it, the host device asks Linux for a granule more, and Linux looks for another one.
        let fits = |(start, end): &(&u64, &u64)| (*end - *start).saturating_sub(2 * GRANULE_BYTES) >= bytes;
        let Some((start, end)) = self.gaps.iter().rev().find(fits).map(|(start, end)| (*start, *end)) else {
            let reason = "no gap between reservations is long enough".into();
            return Err(DriverErrorKind::OutOfAddressSpace { asked_bytes: bytes, reason });
        };
        let range = DeviceRange::new(end - GRANULE_BYTES - bytes, bytes);
        self.gaps.insert(start, range.addr);
        self.gaps.insert(range.end(), end);
        self.reservations.insert(range.addr, bytes);
        Ok(range)
    }

    fn unreserve(&mut self, range: DeviceRange) -> Checked<()> {
        if self.reservations.get(&range.addr) != Some(&range.bytes) {
            return Err(invalid(format!("{range} is not a reservation")));
        }
        if self.mappings.range(range.addr..range.end()).next().is_some() {
            return Err(DriverErrorKind::AlreadyMapped { range });
        }
        self.reservations.remove(&range.addr);
        let end = self.gaps.remove(&range.end()).unwrap_or(range.end());
        let before = self.gaps.range(..range.addr).next_back();
        let start = before.filter(|(_, end)| **end == range.addr).map_or(range.addr, |(start, _)| *start);
        self.gaps.insert(start, end);
        Ok(())
    }

    const fn free_bytes(&self) -> u64 {
        self.capacity_bytes.saturating_sub(self.held_bytes).saturating_sub(self.claimed_bytes)
    }

    fn create(&mut self, bytes: u64) -> Checked<BackingId> {
        check_size(bytes)?;
        let free_bytes = self.free_bytes();
        if bytes > free_bytes {
            return Err(DriverErrorKind::OutOfMemory { asked_bytes: bytes, free_bytes });
        }
        self.held_bytes += bytes;
        self.created += 1;
        let id = BackingId(self.created);
        self.backings.insert(id, Backing { bytes, mappings: 0, released: false });
        Ok(id)
    }

    fn release(&mut self, id: BackingId) -> Checked<()> {
        match self.backings.get_mut(&id) {
            Some(Backing { released: true, .. }) | None => return Err(DriverErrorKind::unknown_backing(id)),
            Some(backing) => backing.released = true,
        }
        self.drop_unused(id);
        Ok(())
    }

    fn map(&mut self, range: DeviceRange, id: BackingId) -> Checked<()> {
        check_range(range)?;
        let backing = self.backings.get_mut(&id).filter(|backing| !backing.released);
        let backing = backing.ok_or_else(|| DriverErrorKind::unknown_backing(id))?;
        if backing.bytes != range.bytes {
            return Err(invalid(format!("{id} has {} bytes and {range} has {}", backing.bytes, range.bytes)));
        }
        check_reserved(&self.reservations, range)?;
        let below = self.mappings.range(..range.end()).next_back();
        if below.is_some_and(|(addr, mapping)| DeviceRange::new(*addr, mapping.bytes).overlaps(&range)) {
            return Err(DriverErrorKind::AlreadyMapped { range });
        }
        backing.mappings += 1;
        self.mappings.insert(range.addr, MappedBacking { bytes: range.bytes, backing: id, open: false });
        Ok(())
    }

    fn set_access(&mut self, range: DeviceRange) -> Checked<()> {
        self.check_run(range)?;
        self.mappings.range_mut(range.addr..range.end()).for_each(|(_, mapping)| mapping.open = true);
        Ok(())
    }

    fn unmap(&mut self, range: DeviceRange) -> Checked<()> {
        self.check_run(range)?;
        let mut addr = range.addr;
        while addr < range.end() {
            let Some(gone) = self.mappings.remove(&addr) else { break };
            addr += gone.bytes;
            self.backings.entry(gone.backing).and_modify(|backing| backing.mappings -= 1);
            self.drop_unused(gone.backing);
        }
        Ok(())
    }

    /// A released backing goes with its last mapping.
    fn drop_unused(&mut self, id: BackingId) {
        let unused = self.backings.get(&id).filter(|backing| backing.released && backing.mappings == 0);
        if let Some(bytes) = unused.map(|backing| backing.bytes) {
            self.held_bytes -= bytes;
            self.backings.remove(&id);
        }
    }

    /// Requires exactly a run of mappings without a gap, in one reservation.
    fn check_run(&self, range: DeviceRange) -> Checked<()> {
        check_range(range)?;
        check_reserved(&self.reservations, range)?;
        let mut end = range.addr;
        for (addr, mapping) in self.mappings.range(range.addr..range.end()) {
            if *addr != end {
                break;
            }
            end += mapping.bytes;
        }
        if end == range.end() { Ok(()) } else { Err(DriverErrorKind::NotMapped { range }) }
    }
}

impl Handles {
    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }
}

fn check_size(bytes: u64) -> Checked<()> {
    if bytes == 0 || !bytes.is_multiple_of(GRANULE_BYTES) {
        return Err(invalid(format!("{bytes} bytes are no multiple of the granule of {GRANULE_BYTES}")));
    }
    Ok(())
}

fn check_range(range: DeviceRange) -> Checked<()> {
    check_size(range.bytes)?;
    if !range.addr.is_multiple_of(GRANULE_BYTES) || range.addr.checked_add(range.bytes).is_none() {
        return Err(invalid(format!("{range} does not begin on a granule of {GRANULE_BYTES}")));
    }
    Ok(())
}

fn check_reserved(reservations: &BTreeMap<u64, u64>, range: DeviceRange) -> Checked<()> {
    let below = reservations.range(..=range.addr).next_back();
    match below.filter(|(addr, bytes)| DeviceRange::new(**addr, **bytes).contains(&range)) {
        Some(_) => Ok(()),
        None => Err(invalid(format!("{range} does not lie inside one reservation"))),
    }
}

fn invalid(reason: String) -> DriverErrorKind {
    DriverErrorKind::InvalidArgument { reason }
}

fn unknown(op: Op, handle: String) -> DriverError {
    DriverError::new(op, DriverErrorKind::UnknownHandle { handle })
}

fn of(op: Op) -> impl Fn(DriverErrorKind) -> DriverError {
    move |kind| DriverError::new(op, kind)
}

fn no_bytes<T>(op: Op) -> Result<T> {
    let reason = "this device has addresses and no memory, and runs nothing".into();
    Err(DriverError::new(op, DriverErrorKind::Unsupported { reason }))
}

impl Driver for MemorylessDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn check_process(&self) -> Result<()> {
        Ok(())
    }

    fn reserve(&self, bytes: u64) -> Result<DeviceRange> {
        self.account().reserve(bytes).map_err(of(Op::Reserve))
    }

    fn unreserve(&self, range: DeviceRange) -> Result<()> {
        self.account().unreserve(range).map_err(of(Op::Unreserve))
    }

    fn create(&self, bytes: u64) -> Result<BackingId> {
        self.account().create(bytes).map_err(of(Op::Create))
    }

    fn release(&self, backing: BackingId) -> Result<()> {
        self.account().release(backing).map_err(of(Op::Release))
    }

    fn map(&self, range: DeviceRange, backing: BackingId) -> Result<()> {
        self.account().map(range, backing).map_err(of(Op::Map))
    }

    fn set_access(&self, range: DeviceRange) -> Result<()> {
        self.account().set_access(range).map_err(of(Op::SetAccess))
    }

    fn unmap(&self, range: DeviceRange) -> Result<()> {
        self.account().unmap(range).map_err(of(Op::Unmap))
    }

    fn stream_create(&self) -> Result<StreamId> {
        let mut handles = self.handles();
        let stream = StreamId(handles.next());
        handles.streams.insert(stream);
        Ok(stream)
    }

    fn stream_destroy(&self, stream: StreamId) -> Result<()> {
        if stream == StreamId::DEFAULT {
            return Err(DriverError::invalid(Op::StreamDestroy, "the default stream cannot be destroyed"));
        }
        let known = self.handles().streams.remove(&stream);
        if known { Ok(()) } else { Err(unknown(Op::StreamDestroy, stream.to_string())) }
    }

    fn check_stream(&self, stream: StreamId) -> Result<()> {
        self.stream(Op::CheckStream, stream)
    }

    fn stream_synchronize(&self, stream: StreamId) -> Result<()> {
        self.stream(Op::StreamSynchronize, stream)
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()> {
        self.event(Op::StreamWaitEvent, event)?;
        self.stream(Op::StreamWaitEvent, stream)
    }

    fn event_record(&self, stream: StreamId) -> Result<EventId> {
        self.stream(Op::EventRecord, stream)?;
        let mut handles = self.handles();
        let event = EventId(handles.next());
        handles.events.insert(event);
        Ok(event)
    }

    fn event_query(&self, event: EventId) -> Result<bool> {
        self.event(Op::EventQuery, event).map(|()| true)
    }

    fn event_synchronize(&self, event: EventId) -> Result<()> {
        self.event(Op::EventSynchronize, event)
    }

    fn event_destroy(&self, event: EventId) -> Result<()> {
        let known = self.handles().events.remove(&event);
        if known { Ok(()) } else { Err(unknown(Op::EventDestroy, event.to_string())) }
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn copy_to_device(&self, _: StreamId, _: Arc<HostBuffer>, _: &[CopyPart]) -> Result<Pending<()>> {
        no_bytes(Op::CopyToDevice)
    }

    fn copy_to_host(&self, _: StreamId, _: HostBuffer, _: &[CopyPart]) -> Result<Pending<HostBuffer>> {
        no_bytes(Op::CopyToHost)
    }

    fn copy_within(&self, _: StreamId, _: &[MovePart]) -> Result<Pending<()>> {
        no_bytes(Op::CopyWithin)
    }

    fn zero(&self, _: StreamId, _: DeviceRange) -> Result<Pending<()>> {
        no_bytes(Op::Zero)
    }

    fn digest(&self, _: StreamId, _: &[DeviceRange]) -> Result<Pending<Vec<Digest>>> {
        no_bytes(Op::Digest)
    }

    fn launch_host(&self, _: StreamId, _: HostWork) -> Result<Pending<()>> {
        no_bytes(Op::LaunchHost)
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        let account = self.account();
        let info = MemoryInfo::new(account.capacity_bytes, account.free_bytes());
        Ok(info.of_process(Some(ProcessMemory::new(account.held_bytes, 0))))
    }

    fn host_alloc(&self, _: u64) -> Result<HostBuffer> {
        no_bytes(Op::HostAlloc)
    }

    fn host_trim(&self) -> Result<()> {
        Ok(())
    }
}
