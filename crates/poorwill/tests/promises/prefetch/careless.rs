//! A faulty driver around another one: holds streams, omits waits and copies as a test requires, and counts
//! streams and events.

use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use poorwill::driver::{BackingId, EventId, HostWork, MovePart, Result};
use poorwill::{
    CopyPart, DeviceInfo, DeviceRange, Digest, Driver, HostBuffer, HostMemoryInfo, MemoryInfo, Pending,
    StreamId,
};
use poorwill_testkit::latch::{Latch, hold};

/// What the driver does wrong. Copies to the device and digests count from 0. A wait is named by the copy or
/// digest after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// This copy does not wait for the slot's last user.
    CopyAtOnce(usize),
    /// This digest does not wait for its copy.
    DigestAtOnce(usize),
    /// This copy is not made.
    NoCopy(usize),
    /// The last byte of this copy is wrong.
    Torn(usize),
}

/// Where a stream is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Held {
    Nothing,
    BeforeCopy(usize),
    BeforeDigest(usize),
}

#[derive(Debug)]
pub(crate) struct Careless {
    inner: Arc<dyn Driver>,
    fault: Fault,
    held: Held,
    pub(crate) latch: Arc<Latch>,
    copies: AtomicUsize,
    digests: AtomicUsize,
    streams: AtomicI64,
    events: AtomicI64,
    /// The stream of the first copy, and an event after each copy.
    copying: Mutex<(Option<StreamId>, Vec<EventId>)>,
}

impl Careless {
    pub(crate) fn new(inner: Arc<dyn Driver>, fault: Fault, held: Held) -> Arc<Self> {
        let (latch, copies, digests, streams, events, copying) = Default::default();
        Arc::new(Self { inner, fault, held, latch, copies, digests, streams, events, copying })
    }

    /// How many copies to the device there were.
    pub(crate) fn copies(&self) -> usize {
        self.copies.load(Ordering::Relaxed)
    }

    /// Streams and events created and not destroyed.
    pub(crate) fn streams_and_events(&self) -> [i64; 2] {
        [&self.streams, &self.events].map(|count| count.load(Ordering::Relaxed))
    }

    /// Whether a copy has ended.
    pub(crate) fn has_copied(&self, copy: usize) -> bool {
        let event = self.copying.lock().unwrap().1[copy];
        self.inner.event_query(event).unwrap()
    }
}

/// Counts what has succeeded.
fn counted<T>(outcome: Result<T>, count: &AtomicI64, change: i64) -> Result<T> {
    if outcome.is_ok() {
        count.fetch_add(change, Ordering::Relaxed);
    }
    outcome
}

macro_rules! hand_on {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)+) => {
        $(fn $name(&self, $($arg: $ty),*) -> $ret {
            self.inner.$name($($arg),*)
        })+
    };
}

impl Driver for Careless {
    hand_on! {
        info() -> &DeviceInfo;
        check_process() -> Result<()>;
        check_stream(stream: StreamId) -> Result<()>;
        reserve(bytes: u64) -> Result<DeviceRange>;
        unreserve(range: DeviceRange) -> Result<()>;
        create(bytes: u64) -> Result<BackingId>;
        release(backing: BackingId) -> Result<()>;
        map(range: DeviceRange, backing: BackingId) -> Result<()>;
        set_access(range: DeviceRange) -> Result<()>;
        unmap(range: DeviceRange) -> Result<()>;
        stream_synchronize(stream: StreamId) -> Result<()>;
        event_query(event: EventId) -> Result<bool>;
        event_synchronize(event: EventId) -> Result<()>;
        synchronize() -> Result<()>;
        copy_to_host(stream: StreamId, dst: HostBuffer, parts: &[CopyPart]) -> Result<Pending<HostBuffer>>;
        copy_within(stream: StreamId, parts: &[MovePart]) -> Result<Pending<()>>;
        zero(stream: StreamId, range: DeviceRange) -> Result<Pending<()>>;
        launch_host(stream: StreamId, work: HostWork) -> Result<Pending<()>>;
        memory_info() -> Result<MemoryInfo>;
        host_alloc(bytes: u64) -> Result<HostBuffer>;
        host_memory() -> HostMemoryInfo;
        host_trim() -> Result<()>;
    }

    fn stream_create(&self) -> Result<StreamId> {
        counted(self.inner.stream_create(), &self.streams, 1)
    }

    fn stream_create_background(&self) -> Result<StreamId> {
        counted(self.inner.stream_create_background(), &self.streams, 1)
    }

    fn stream_create_kernel_copies(&self) -> Result<StreamId> {
        counted(self.inner.stream_create_kernel_copies(), &self.streams, 1)
    }

    fn stream_destroy(&self, stream: StreamId) -> Result<()> {
        counted(self.inner.stream_destroy(stream), &self.streams, -1)
    }

    fn event_record(&self, stream: StreamId) -> Result<EventId> {
        counted(self.inner.event_record(stream), &self.events, 1)
    }

    fn event_destroy(&self, event: EventId) -> Result<()> {
        counted(self.inner.event_destroy(event), &self.events, -1)
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()> {
        let left_out = if self.copying.lock().unwrap().0 == Some(stream) {
            self.fault == Fault::CopyAtOnce(self.copies.load(Ordering::Relaxed))
        } else {
            self.fault == Fault::DigestAtOnce(self.digests.load(Ordering::Relaxed))
        };
        if left_out { Ok(()) } else { self.inner.stream_wait_event(stream, event) }
    }

    fn copy_to_device(
        &self,
        stream: StreamId,
        src: Arc<HostBuffer>,
        parts: &[CopyPart],
    ) -> Result<Pending<()>> {
        let copy = self.copies.fetch_add(1, Ordering::Relaxed);
        if self.held == Held::BeforeCopy(copy) {
            hold(&*self.inner, stream, &self.latch);
        }
        if self.fault == Fault::NoCopy(copy) {
            return Ok(Pending::new(|| Ok(())));
        }
        let pending = self.inner.copy_to_device(stream, src, parts)?;
        if self.fault == Fault::Torn(copy) {
            let end = parts[parts.len() - 1].device.end();
            let device = DeviceRange::new(end - 1, 1);
            // No layer's bytes can be recognized by this byte's position alone.
            let other: Arc<HostBuffer> = Arc::new(vec![0xEE_u8].into());
            let torn = [CopyPart { device, host_offset: 0 }];
            drop(self.inner.copy_to_device(stream, other, &torn)?);
        }
        if self.held != Held::Nothing {
            let mut copying = self.copying.lock().unwrap();
            copying.0.get_or_insert(stream);
            copying.1.push(self.inner.event_record(stream)?);
        }
        Ok(pending)
    }

    fn digest(&self, stream: StreamId, ranges: &[DeviceRange]) -> Result<Pending<Vec<Digest>>> {
        if self.held == Held::BeforeDigest(self.digests.fetch_add(1, Ordering::Relaxed)) {
            hold(&*self.inner, stream, &self.latch);
        }
        self.inner.digest(stream, ranges)
    }
}
