//! [`Driver`] for the host device.

use std::collections::HashMap;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;

use poorwill_core::digest::{Digest, DigestHasher};
use poorwill_core::driver::{HostWork, MovePart, Result, check_save, digests_of_saved};
use poorwill_core::hibernation::{CheckpointErrorKind, HeldMemory};
use poorwill_core::{
    BackingId, ByteSize, CopyPart, DeviceInfo, DeviceRange, Driver, DriverError, DriverErrorKind, EventId,
    HostBuffer, HostMemoryInfo, MemoryInfo, Op, Pending, ProcessMemory, StreamId,
};

use super::file::{DeviceFile, punch};
use super::hibernation::{DeviceCall, HostProcess, HostProcessMemory, StepFailure};
use super::state::{BackingMemory, HostState, Span};
use super::stream::{HostEvent, HostStream, Refused, system};
use crate::copy_ranges::{self, check_moves};
use crate::host_memory::{
    BufferMade, BufferPin, HostArena, HostMemoryConfig, HostMemoryDetails, Options, Plain,
};
use crate::ledger::{check_granules, of};
use crate::process::Owner;
use crate::system::System;

/// Default granule, the same as on NVIDIA's GPUs.
pub const GRANULE_BYTES: u64 = 2 << 20;

const COPY_STREAMS_MAX: usize = 4;

/// Options of a host device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostConfig {
    /// Physical memory, in bytes; rounded down to the granule.
    pub capacity_bytes: u64,
    /// Granule, in bytes: a power of two and a multiple of the page size.
    pub granule_bytes: u64,
    /// How memory for buffers is allocated.
    pub host_memory: HostMemoryConfig,
    /// Links of other devices that may carry its copies: here they are streams like any others.
    pub links: usize,
    /// A folder, one for each device that several processes have. Their capacities must be equal. It needs as much space
    /// as its processes share memory.
    pub shared_in: Option<PathBuf>,
}

impl HostConfig {
    /// A device with the default granule, or a page where pages are larger.
    #[must_use]
    pub fn with_capacity(capacity_bytes: u64) -> Self {
        let granule_bytes = GRANULE_BYTES.max(rustix::param::page_size() as u64);
        Self::new(capacity_bytes, granule_bytes)
    }

    /// A device of this many granules of one page, the smallest granule, for tests.
    #[must_use]
    pub fn of_pages(granules: u64) -> Self {
        let granule_bytes = rustix::param::page_size() as u64;
        let capacity_bytes = granules.saturating_mul(granule_bytes);
        Self::new(capacity_bytes, granule_bytes)
    }

    fn new(capacity_bytes: u64, granule_bytes: u64) -> Self {
        Self {
            capacity_bytes,
            granule_bytes,
            host_memory: HostMemoryConfig::default(),
            links: 0,
            shared_in: None,
        }
    }

    /// Makes it the device of all processes that name the same folder.
    #[must_use]
    pub fn shared_in(mut self, folder: impl Into<PathBuf>) -> Self {
        self.shared_in = Some(folder.into());
        self
    }

    /// Sets the granule.
    #[must_use]
    pub fn in_granules_of(mut self, granule_bytes: u64) -> Self {
        self.granule_bytes = granule_bytes;
        self
    }

    /// Sets how many links of other devices may carry its copies.
    #[must_use]
    pub fn linking_over(mut self, links: usize) -> Self {
        self.links = links;
        self
    }

    /// Sets how memory for buffers is allocated.
    #[must_use]
    pub fn backing_up_in(mut self, host_memory: HostMemoryConfig) -> Self {
        self.host_memory = host_memory;
        self
    }
}

/// A device made of host memory. See [the module's documentation](super).
#[derive(Debug)]
pub struct HostDevice {
    info: DeviceInfo,
    owner: Owner,
    shared: Arc<Shared>,
    /// Not dropped in a forked child, where the threads do not exist.
    queues: ManuallyDrop<Mutex<HostQueues>>,
    host_memory: Arc<HostArena>,
    /// This process, once it is registered.
    process: OnceLock<HostProcess>,
}

/// A device as what its process holds.
struct RegisteredMemory(Weak<HostDevice>);

#[derive(Debug)]
struct Shared {
    state: Mutex<HostState>,
    file: Arc<DeviceFile>,
    granule_bytes: usize,
}

#[derive(Debug, Default)]
struct HostQueues {
    streams: HashMap<u64, HostStream>,
    events: HashMap<u64, Arc<HostEvent>>,
    next_id: u64,
}

impl HostDevice {
    /// Opens a device.
    ///
    /// # Errors
    /// `InvalidArgument` if the granule is not a power of two and a multiple of the page size, or exceeds the
    /// capacity. Otherwise what the operating system reports.
    pub fn open(config: &HostConfig) -> Result<Self> {
        let granule = config.granule_bytes;
        let page = rustix::param::page_size() as u64;
        if !granule.is_power_of_two() || !granule.is_multiple_of(page) {
            let reason =
                format!("a granule of {granule} bytes is not a power of two of pages of {page} bytes");
            return Err(DriverError::invalid(Op::Open, reason));
        }
        let capacity_bytes = config.capacity_bytes / granule * granule;
        if capacity_bytes == 0 || capacity_bytes > i64::MAX as u64 {
            let capacity = ByteSize(config.capacity_bytes);
            let reason = format!(
                "a capacity of {capacity}: it must be at least one granule of {} and below 8 EiB",
                ByteSize(granule)
            );
            return Err(DriverError::invalid(Op::Open, reason));
        }
        let granule_bytes = usize::try_from(granule).map_err(|_| {
            DriverError::invalid(Op::Open, format!("a granule of {granule} bytes is too large"))
        })?;
        let owner = Owner::this()?;
        let state = HostState::new(owner, capacity_bytes, granule, config.shared_in.as_deref())
            .map_err(|error| DriverError::new(Op::Open, system("make a file for device memory", &error)))?;
        let mut queues = HostQueues { next_id: 1, ..HostQueues::default() };
        queues.streams.insert(StreamId::DEFAULT.0, HostStream::new(StreamId::DEFAULT, owner));
        let copy_streams = thread::available_parallelism().map_or(1, usize::from).min(COPY_STREAMS_MAX);
        let file = Arc::clone(state.file());
        let options = Options {
            config: config.host_memory.clone(),
            pageable_because: Some("the host device copies from any memory alike".into()),
            node: None,
            releases_surplus: true,
            is_shared: false,
            system: System::here(),
        };
        let memory_name = state.in_use().name();
        let name = format!("host device of {}", ByteSize(capacity_bytes));
        Ok(Self {
            info: DeviceInfo::new("host", name, granule, capacity_bytes)
                .copying_over(copy_streams)
                .linking_over(config.links)
                .saving_over(copy_streams)
                .digesting_fast(true)
                .sharing_memory_as(Some(memory_name)),
            owner,
            shared: Arc::new(Shared { state: Mutex::new(state), file, granule_bytes }),
            queues: ManuallyDrop::new(Mutex::new(queues)),
            host_memory: HostArena::new(owner, Box::new(Plain), options),
            process: OnceLock::new(),
        })
    }

    /// The folder of a device of several processes.
    #[must_use]
    pub fn shared_in(&self) -> Option<PathBuf> {
        self.shared.lock().in_use().folder().map(Path::to_owned)
    }

    /// Registers this process in a folder, so that a [`HostCheckpointer`](super::HostCheckpointer) of another process can
    /// take it off this device. Device calls then wait while it is locked.
    ///
    /// # Errors
    /// What the operating system reports; `AlreadyExists` if this process is registered there.
    pub fn register(self: &Arc<Self>, folder: &Path) -> io::Result<()> {
        let process = HostProcess::register(folder, Box::new(RegisteredMemory(Arc::downgrade(self))))?;
        let registered = || io::Error::new(io::ErrorKind::AlreadyExists, "this device is registered already");
        self.process.set(process).map_err(|_| registered())
    }

    /// Begins a device call, once the process is not locked.
    fn enter(&self, op: Op) -> Result<Option<DeviceCall>> {
        let entered = self.process.get().map(HostProcess::enter).transpose();
        entered.map_err(|lost| DriverError::new(op, system("use the device", &io::Error::other(lost))))
    }

    /// Memory that the operating system keeps for the device: pages created, written and not released.
    ///
    /// # Errors
    /// What the operating system reports.
    pub fn resident_bytes(&self) -> io::Result<u64> {
        self.shared.lock().resident_bytes()
    }

    /// Whether all queued work is done.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.queues().streams.values().all(HostStream::is_idle)
    }

    /// Moves all device memory to host memory, and holds none of it. For [`HostProcessMemory`](super::HostProcessMemory):
    /// no work may be queued until it is back, and nothing may look at addresses of the device.
    ///
    /// # Errors
    /// What the operating system reports; then nothing has moved.
    pub fn take_off(&self) -> io::Result<()> {
        self.shared.lock().take_off()
    }

    /// What is off the device, in bytes.
    #[must_use]
    pub fn taken_off_bytes(&self) -> u64 {
        self.shared.lock().taken_off_bytes()
    }

    /// Puts device memory back, at the same addresses.
    ///
    /// # Errors
    /// What the operating system reports; then it is still in host memory.
    pub fn put_back(&self) -> io::Result<()> {
        self.shared.lock().put_back()
    }

    /// Bytes of `host_alloc` buffers that are not dropped yet.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        self.host_memory.used_bytes()
    }

    /// A buffer of exactly `bytes` bytes. It is never page-locked: the device sees all memory of the process.
    /// The text says why.
    ///
    /// # Errors
    /// `OutOfHostMemory`.
    pub fn host_buffer(&self, bytes: u64, pin: BufferPin) -> Result<(HostBuffer, Option<String>)> {
        let pin = if pin == BufferPin::Always { BufferPin::Auto } else { pin };
        let (buffer, because) = self.host_memory.alloc_as(bytes, pin)?;
        Ok((HostBuffer::new(buffer), because))
    }

    /// Releases at most `bytes` bytes of unused host memory, as long as more than 1 GiB is unused. Callers
    /// pass the size of a buffer that they dropped for good.
    pub fn release_surplus(&self, bytes: u64) {
        self.host_memory.release_surplus(bytes);
    }

    /// Several buffers like those of [`Self::host_buffer`], made in the background.
    ///
    /// # Errors
    /// `OutOfHostMemory`: at the call, before anything is made, if not all of it is known to be available;
    /// otherwise at `wait`.
    pub fn host_buffers(&self, sizes: &[u64], pin: BufferPin) -> Result<Vec<BufferMade>> {
        let pin = if pin == BufferPin::Always { BufferPin::Auto } else { pin };
        self.host_memory.alloc_all_as(sizes, pin)
    }

    /// How host memory is allocated.
    #[must_use]
    pub fn host_memory_details(&self) -> HostMemoryDetails {
        self.host_memory.details()
    }

    /// Queues `work` that reads or writes `ranges` through their addresses. Until it returns, unmapping them
    /// fails with `Busy`.
    ///
    /// # Errors
    /// `NotMapped` when a range is not mapped with access throughout; `UnknownHandle`; at `wait`, that the work
    /// panicked.
    pub fn launch(
        &self,
        stream: StreamId,
        ranges: &[DeviceRange],
        work: impl FnOnce() + Send + 'static,
    ) -> Result<Pending<()>> {
        self.submit(Op::LaunchHost, stream, ranges, move |_, _| {
            work();
            Ok(())
        })
    }

    fn queues(&self) -> MutexGuard<'_, HostQueues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with_state<T>(
        &self,
        op: Op,
        f: impl FnOnce(&mut HostState) -> std::result::Result<T, DriverErrorKind>,
    ) -> Result<T> {
        self.owner.check(op)?;
        let _call = self.enter(op)?;
        f(&mut self.shared.lock()).map_err(of(op))
    }

    fn submit<T: Send + 'static>(
        &self,
        op: Op,
        stream: StreamId,
        ranges: &[DeviceRange],
        work: impl FnOnce(&Shared, &[Vec<Span>]) -> std::result::Result<T, DriverErrorKind> + Send + 'static,
    ) -> Result<Pending<T>> {
        self.owner.check(op)?;
        let _call = self.enter(op)?;
        let mut flight =
            InFlight { shared: Arc::clone(&self.shared), spans: Vec::with_capacity(ranges.len()) };
        for range in ranges {
            let spans = self.shared.lock().begin_work(*range).map_err(of(op))?;
            flight.spans.push(spans);
        }
        // Not earlier, so that look-ups of streams and events do not wait for a system call on memory.
        let queued = self.queues().stream(op, stream)?.submit(op, move || {
            let result = work(&flight.shared, &flight.spans);
            drop(flight);
            result
        });
        queued.map_err(Refused::into_error)
    }
}

impl RegisteredMemory {
    fn device(&self) -> std::result::Result<Arc<HostDevice>, StepFailure> {
        self.0.upgrade().ok_or_else(|| CheckpointErrorKind::NoDevice.into())
    }
}

impl HostProcessMemory for RegisteredMemory {
    fn held(&self) -> Vec<HeldMemory> {
        let held = |device: Arc<HostDevice>| HeldMemory {
            uuid: device.info.name.clone(),
            used_bytes: Some(device.shared.lock().held_bytes()),
        };
        self.0.upgrade().map(held).into_iter().collect()
    }

    fn is_idle(&self) -> bool {
        self.0.upgrade().is_none_or(|device| device.is_idle())
    }

    fn take_off(&self) -> std::result::Result<(), StepFailure> {
        self.device()?.take_off().map_err(|_| CheckpointErrorKind::OutOfHostMemory.into())
    }

    fn put_back(&self) -> std::result::Result<(), StepFailure> {
        self.device()?.put_back().map_err(|_| CheckpointErrorKind::OutOfDeviceMemory.into())
    }
}

struct InFlight {
    shared: Arc<Shared>,
    spans: Vec<Vec<Span>>,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        self.spans.iter().for_each(|spans| state.end_work(spans));
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, HostState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, spans: &[Span], mut bytes: &[u8]) -> std::result::Result<(), DriverErrorKind> {
        let _ = self;
        for span in spans {
            let (now, rest) = bytes.split_at(span.bytes);
            span.region
                .write(span.region_offset, now)
                .map_err(|error| system("write device memory", &error))?;
            bytes = rest;
        }
        Ok(())
    }

    fn read(&self, spans: &[Span], mut bytes: &mut [u8]) -> std::result::Result<(), DriverErrorKind> {
        for span in spans {
            let (now, rest) = bytes.split_at_mut(span.bytes);
            self.read_file(span, 0, now)?;
            bytes = rest;
        }
        Ok(())
    }

    fn copy(&self, to: &[Span], from: &[Span]) -> std::result::Result<(), DriverErrorKind> {
        let mut scratch = vec![0u8; self.granule_bytes.min(128 << 10)];
        let mut to = to.iter().map(|span| (span, 0)).peekable();
        for span in from {
            let mut done = 0;
            while done < span.bytes
                && let Some((target, at)) = to.peek_mut()
            {
                let len = scratch.len().min(span.bytes - done).min(target.bytes - *at);
                self.read_file(span, done, &mut scratch[..len])?;
                target
                    .region
                    .write(target.region_offset + *at, &scratch[..len])
                    .map_err(|error| system("write device memory", &error))?;
                done += len;
                *at += len;
                if *at == target.bytes {
                    to.next();
                }
            }
        }
        Ok(())
    }

    fn file_of<'a>(&'a self, span: &'a Span) -> BorrowedFd<'a> {
        match &span.memory {
            BackingMemory::Extent(_) => self.file.as_fd(),
            BackingMemory::Shared(file) => file.as_fd(),
        }
    }

    fn read_file(
        &self,
        span: &Span,
        from: usize,
        mut bytes: &mut [u8],
    ) -> std::result::Result<(), DriverErrorKind> {
        let mut offset = span.file_offset + from as u64;
        while !bytes.is_empty() {
            let file = self.file_of(span);
            let read = rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut *bytes, offset))
                .map_err(|errno| system("read device memory", &errno.into()))?;
            if read == 0 {
                return Err(system("read device memory", &io::ErrorKind::UnexpectedEof.into()));
            }
            offset += read as u64;
            bytes = &mut bytes[read..];
        }
        Ok(())
    }

    /// Mappings consist of whole granules, so no granule crosses two.
    fn digests(&self, spans: &[Span]) -> std::result::Result<Vec<Digest>, DriverErrorKind> {
        // Small enough to stay in a core's cache between the read and the hash.
        let mut scratch = vec![0u8; self.granule_bytes.min(128 << 10)];
        let mut digests = Vec::new();
        for span in spans {
            for granule in (0..span.bytes).step_by(self.granule_bytes) {
                let mut hasher = DigestHasher::default();
                for part in (0..self.granule_bytes).step_by(scratch.len()) {
                    self.read_file(span, granule + part, &mut scratch)?;
                    hasher.update(&scratch);
                }
                digests.push(hasher.finish());
            }
        }
        Ok(digests)
    }

    /// Whole pages become holes; the kernel overwrites the rest.
    fn zero(&self, spans: &[Span]) -> std::result::Result<(), DriverErrorKind> {
        spans.iter().try_for_each(|span| {
            punch(self.file_of(span), span.file_offset, span.bytes as u64)
                .map_err(|error| system("write zeros", &error))
        })
    }
}

impl HostQueues {
    fn stream(&self, op: Op, id: StreamId) -> Result<&HostStream> {
        self.streams.get(&id.0).ok_or_else(|| unknown(op, id.to_string()))
    }

    fn event(&self, op: Op, id: EventId) -> Result<Arc<HostEvent>> {
        self.events.get(&id.0).cloned().ok_or_else(|| unknown(op, id.to_string()))
    }

    fn next_id(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }
}

fn unknown(op: Op, handle: String) -> DriverError {
    DriverError::new(op, DriverErrorKind::UnknownHandle { handle })
}

impl Driver for HostDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn check_process(&self) -> Result<()> {
        self.owner.check(Op::CheckProcess)
    }

    fn reserve(&self, bytes: u64) -> Result<DeviceRange> {
        let owner = Owner::this()?;
        self.with_state(Op::Reserve, |state| state.reserve(bytes, owner))
    }

    fn unreserve(&self, range: DeviceRange) -> Result<()> {
        self.with_state(Op::Unreserve, |state| state.unreserve(range)).map(drop)
    }

    fn create(&self, bytes: u64) -> Result<BackingId> {
        self.with_state(Op::Create, |state| state.create(bytes))
    }

    fn create_shared(&self, bytes: u64) -> Result<BackingId> {
        self.with_state(Op::Create, |state| state.create_shared(bytes))
    }

    fn export(&self, backing: BackingId) -> Result<OwnedFd> {
        self.with_state(Op::Export, |state| state.export(backing))
    }

    fn import(&self, memory: BorrowedFd<'_>, bytes: u64) -> Result<BackingId> {
        self.with_state(Op::Import, |state| state.import(memory, bytes))
    }

    fn release(&self, backing: BackingId) -> Result<()> {
        self.with_state(Op::Release, |state| state.release(backing))
    }

    fn map(&self, range: DeviceRange, backing: BackingId) -> Result<()> {
        self.with_state(Op::Map, |state| state.map(range, backing))
    }

    fn set_access(&self, range: DeviceRange) -> Result<()> {
        self.with_state(Op::SetAccess, |state| state.set_access(range))
    }

    fn unmap(&self, range: DeviceRange) -> Result<()> {
        self.with_state(Op::Unmap, |state| state.unmap(range))
    }

    fn stream_create(&self) -> Result<StreamId> {
        self.owner.check(Op::StreamCreate)?;
        let mut queues = self.queues();
        let id = StreamId(queues.next_id());
        queues.streams.insert(id.0, HostStream::new(id, self.owner));
        Ok(id)
    }

    fn stream_create_over_link(&self, link: usize) -> Result<StreamId> {
        if link < self.info.links {
            return self.stream_create();
        }
        let reason = format!("there is no link {link}: of other devices there are {}", self.info.links);
        Err(DriverError::invalid(Op::StreamCreate, reason))
    }

    fn stream_destroy(&self, stream: StreamId) -> Result<()> {
        self.owner.check(Op::StreamDestroy)?;
        if stream == StreamId::DEFAULT {
            return Err(DriverError::invalid(Op::StreamDestroy, "the default stream cannot be destroyed"));
        }
        // It stays known until its work is done, so that `synchronize` waits for it too.
        self.stream_synchronize(stream).map_err(|error| DriverError::new(Op::StreamDestroy, error.kind))?;
        let ended = self.queues().streams.remove(&stream.0);
        ended.ok_or_else(|| unknown(Op::StreamDestroy, stream.to_string()))?.finish();
        Ok(())
    }

    fn check_stream(&self, stream: StreamId) -> Result<()> {
        self.owner.check(Op::CheckStream)?;
        self.queues().stream(Op::CheckStream, stream).map(drop)
    }

    fn stream_synchronize(&self, stream: StreamId) -> Result<()> {
        self.owner.check(Op::StreamSynchronize)?;
        let done = self.queues().stream(Op::StreamSynchronize, stream)?.drain(Op::StreamSynchronize)?;
        done.wait()
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()> {
        self.owner.check(Op::StreamWaitEvent)?;
        let queues = self.queues();
        let event = queues.event(Op::StreamWaitEvent, event)?;
        let queued = queues.stream(Op::StreamWaitEvent, stream)?.submit(Op::StreamWaitEvent, move || {
            event.wait();
            Ok(())
        });
        queued.map(drop).map_err(Refused::into_error)
    }

    fn event_record(&self, stream: StreamId) -> Result<EventId> {
        self.owner.check(Op::EventRecord)?;
        let mut queues = self.queues();
        let event = Arc::new(HostEvent::default());
        let on = queues.stream(Op::EventRecord, stream)?;
        if on.is_idle() {
            event.pass();
        } else {
            let passing = Arc::clone(&event);
            let queued = on.submit(Op::EventRecord, move || {
                passing.pass();
                Ok(())
            });
            queued.map(drop).map_err(Refused::into_error)?;
        }
        let id = queues.next_id();
        queues.events.insert(id, event);
        Ok(EventId(id))
    }

    fn event_query(&self, event: EventId) -> Result<bool> {
        self.owner.check(Op::EventQuery)?;
        self.queues().event(Op::EventQuery, event).map(|event| event.has_passed())
    }

    fn event_synchronize(&self, event: EventId) -> Result<()> {
        self.owner.check(Op::EventSynchronize)?;
        let event = self.queues().event(Op::EventSynchronize, event)?;
        event.wait();
        Ok(())
    }

    fn event_destroy(&self, event: EventId) -> Result<()> {
        self.owner.check(Op::EventDestroy)?;
        let gone = self.queues().events.remove(&event.0);
        gone.map(drop).ok_or_else(|| unknown(Op::EventDestroy, event.to_string()))
    }

    fn synchronize(&self) -> Result<()> {
        self.owner.check(Op::Synchronize)?;
        let waits: Result<Vec<Pending<()>>> =
            self.queues().streams.values().map(|stream| stream.drain(Op::Synchronize)).collect();
        waits?.into_iter().try_for_each(Pending::wait)
    }

    fn copy_to_device(
        &self,
        stream: StreamId,
        src: Arc<HostBuffer>,
        parts: &[CopyPart],
    ) -> Result<Pending<()>> {
        self.owner.check(Op::CopyToDevice)?;
        let ranges = copy_ranges::in_buffer(src.len(), parts).map_err(of(Op::CopyToDevice))?;
        self.submit(Op::CopyToDevice, stream, &device_ranges(parts), move |shared, spans| {
            ranges.into_iter().zip(spans).try_for_each(|(range, spans)| shared.write(spans, &src[range]))
        })
    }

    fn copy_to_host(
        &self,
        stream: StreamId,
        mut dst: HostBuffer,
        parts: &[CopyPart],
    ) -> Result<Pending<HostBuffer>> {
        self.owner.check(Op::CopyToHost)?;
        let ranges = copy_ranges::in_buffer(dst.len(), parts).map_err(of(Op::CopyToHost))?;
        self.submit(Op::CopyToHost, stream, &device_ranges(parts), move |shared, spans| {
            ranges
                .into_iter()
                .zip(spans)
                .try_for_each(|(range, spans)| shared.read(spans, &mut dst[range]))?;
            Ok(dst)
        })
    }

    fn copy_within(&self, stream: StreamId, parts: &[MovePart]) -> Result<Pending<()>> {
        check_moves(parts).map_err(of(Op::CopyWithin))?;
        let ranges: Vec<DeviceRange> = parts.iter().flat_map(|part| [part.to, part.source()]).collect();
        self.submit(Op::CopyWithin, stream, &ranges, |shared, spans| {
            spans.chunks(2).try_for_each(|part| shared.copy(&part[0], &part[1]))
        })
    }

    fn save(
        &self,
        stream: StreamId,
        mut dst: HostBuffer,
        parts: &[CopyPart],
    ) -> Result<Pending<(HostBuffer, Vec<Digest>)>> {
        self.owner.check(Op::Save)?;
        let (granule_bytes, stored) = (self.info.granule_bytes, parts.to_vec());
        check_save(granule_bytes, parts)?;
        let ranges = copy_ranges::in_buffer(dst.len(), parts).map_err(of(Op::Save))?;
        self.submit(Op::Save, stream, &device_ranges(parts), move |shared, spans| {
            let mut parts = ranges.into_iter().zip(spans);
            parts.try_for_each(|(range, spans)| shared.read(spans, &mut dst[range]))?;
            let digests = digests_of_saved(&dst, granule_bytes, &stored).map_err(|error| error.kind)?;
            Ok((dst, digests))
        })
    }

    fn zero(&self, stream: StreamId, range: DeviceRange) -> Result<Pending<()>> {
        self.submit(Op::Zero, stream, &[range], |shared, spans| {
            spans.iter().try_for_each(|spans| shared.zero(spans))
        })
    }

    fn digest(&self, stream: StreamId, ranges: &[DeviceRange]) -> Result<Pending<Vec<Digest>>> {
        check_granules(self.info.granule_bytes, ranges).map_err(of(Op::Digest))?;
        self.submit(Op::Digest, stream, ranges, |shared, spans| shared.digests(&spans.concat()))
    }

    fn launch_host(&self, stream: StreamId, work: HostWork) -> Result<Pending<()>> {
        self.owner.check(Op::LaunchHost)?;
        let queued = self.queues().stream(Op::LaunchHost, stream)?.submit(Op::LaunchHost, move || {
            work();
            Ok(())
        });
        queued.map_err(Refused::into_error)
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        self.with_state(Op::MemoryInfo, |state| {
            let process = ProcessMemory::new(state.held_bytes(), 0);
            Ok(MemoryInfo::new(state.capacity_bytes(), state.free_bytes()?).of_process(Some(process)))
        })
    }

    fn host_trim(&self) -> Result<()> {
        self.owner.check(Op::HostTrim)?;
        self.host_memory.trim();
        Ok(())
    }

    fn host_memory(&self) -> HostMemoryInfo {
        self.host_memory.info()
    }

    fn host_alloc(&self, bytes: u64) -> Result<HostBuffer> {
        self.host_memory.alloc(bytes).map(HostBuffer::new)
    }

    fn host_alloc_all(&self, sizes: &[u64]) -> Result<Vec<Pending<HostBuffer>>> {
        self.host_memory.alloc_all(sizes)
    }

    fn host_make_ahead(&self, sizes: &[u64]) {
        self.host_memory.make_ahead(sizes);
    }
}

fn device_ranges(parts: &[CopyPart]) -> Vec<DeviceRange> {
    parts.iter().map(|part| part.device).collect()
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            return; // The parent's threads and locks: not ours to touch.
        }
        let queues = std::mem::take(&mut *self.queues());
        queues.streams.into_values().for_each(HostStream::finish);
        self.host_memory.close();
        self.host_memory.trim();
    }
}
