//! [`Driver`] for one GPU.
//!
//! The ledger checks arguments before the driver is called, wherever the driver's own checks differ. So its
//! errors are the contract's and have changed nothing.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use poorwill_core::driver::{
    HostWork, MovePart, Result as DriverResult, check_codes, check_save, decoded_on_the_host,
    encoded_on_the_host, measured_on_the_host,
};
use poorwill_core::{
    BackingId, CodePart, CopyPart, DeviceInfo, DeviceRange, Digest, Driver, DriverErrorKind, Encoded,
    EventId, HostBuffer, HostMemoryInfo, MemoryInfo, Op, Pending, Scratch, StreamId,
};

use super::codec::{Codec, DecodeJob, Decoding, EncodeJob};
use super::context::Context;
use super::copies::CopyKernel;
use super::digest::{DigestJob, Digester, Digests, of_stored};
use super::ffi::Api;
use super::gpu::{GpuInfo, count, find};
use super::job::HostJob;
use super::links::{LinkGpus, Links};
use super::peer_memory::PeerGpu;
use super::peers::{Access, Peers, Reach};
use super::primary::{CudaMemory, Entered, Opening};
use super::queue::Queues;
use super::registered::Registrations;
use super::slots::PinnedSlots;
use super::staging::{self, Queued};
use super::state::CudaState;
use super::stream::Stream;
use super::transfer::{self, Writable};
use super::usage::Usage;
use super::vm::{Vm, to_usize};
use crate::copy_ranges::{self, check_moves};
use crate::host_memory::{HostMemoryConfig, HostMemoryDetails};
use crate::ledger::{Result, check_granules, of};
use crate::process::Owner;

/// Copies in one direction run one after another on all streams, and switching streams costs time.
const COPY_STREAMS: usize = 1;

/// Digests of one stream's saved bytes overlap other streams' copies. Those of a single granule take as long
/// as several copies.
const SAVE_STREAMS: usize = 8;

/// Options of a GPU device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CudaConfig {
    /// The GPU's number in the driver's order (`CUDA_VISIBLE_DEVICES` applies).
    pub ordinal: u32,
    /// The driver's library, for tests; by default the system's `libcuda.so.1`.
    pub library: Option<PathBuf>,
    /// How its host memory is allocated.
    pub host_memory: HostMemoryConfig,
    /// Other GPUs that may access its memory.
    pub peers: Peers,
    /// Other GPUs whose links to host memory may carry its copies.
    pub links: Links,
}

impl CudaConfig {
    /// The GPU with this number, through the system's driver.
    #[must_use]
    pub fn gpu(ordinal: u32) -> Self {
        Self { ordinal, ..Self::default() }
    }

    /// Sets the GPU's number.
    #[must_use]
    pub fn numbered(mut self, ordinal: u32) -> Self {
        self.ordinal = ordinal;
        self
    }

    /// Sets the driver's library; `None`: the system's.
    #[must_use]
    pub fn through(mut self, library: impl Into<Option<PathBuf>>) -> Self {
        self.library = library.into();
        self
    }

    /// Sets the other GPUs that may access its memory.
    #[must_use]
    pub fn open_to(mut self, peers: Peers) -> Self {
        self.peers = peers;
        self
    }

    /// Sets the other GPUs whose links may carry its copies.
    #[must_use]
    pub fn linking_over(mut self, links: Links) -> Self {
        self.links = links;
        self
    }

    /// Sets how its host memory is allocated.
    #[must_use]
    pub fn backing_up_in(mut self, host_memory: HostMemoryConfig) -> Self {
        self.host_memory = host_memory;
        self
    }
}

/// A GPU. Dropping it releases everything that is left.
pub struct CudaDevice {
    info: DeviceInfo,
    gpu: GpuInfo,
    context: Arc<Context>,
    queues: Arc<Queues>,
    links: LinkGpus,
    state: CudaState,
    usage: Option<Usage>,
    digester: Digester,
    codec: Codec,
    /// For copies to the device, or why there is none.
    copy_kernel: std::result::Result<Arc<CopyKernel>, String>,
    registrations: Arc<Registrations>,
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDevice").field("gpu", &self.gpu).finish_non_exhaustive()
    }
}

impl CudaDevice {
    /// Opens a GPU, retaining its primary context.
    ///
    /// # Errors
    /// `Unsupported` without a usable driver, a GPU, or virtual memory management. `InvalidArgument` for a
    /// GPU or peer that does not exist, or a peer that cannot reach the GPU. Otherwise what the driver
    /// reports.
    pub fn open(config: &CudaConfig) -> DriverResult<Self> {
        let api = Api::load(config.library.as_deref())?;
        let owner = Owner::this()?;
        let open = || -> Result<Self> {
            let (device, gpu) = find(api, config.ordinal)?;
            let context = Arc::new(Context::retain(api, device, &gpu, owner, &config.host_memory)?);
            let access = Access::of(api, config.ordinal, device, &config.peers)?;
            let links = LinkGpus::of(api, config.ordinal, &config.links, access.peers())?;
            Self::over(context, gpu, access, links)
        };
        let _opening = Opening::of(config.ordinal, owner);
        let mut device = open().map_err(of(Op::Open))?;
        // NVML knows the system's GPUs, not those of a library that the caller names.
        if config.library.is_none() {
            device.usage = Usage::of(&device.gpu.uuid, device.context.is_first());
        }
        Ok(device)
    }

    fn over(context: Arc<Context>, gpu: GpuInfo, access: Access, links: LinkGpus) -> Result<Self> {
        let entered = context.enter(Op::Open).map_err(|error| error.kind)?;
        let total_bytes = match context.memory()? {
            CudaMemory::Known { total_bytes: 0, .. } => gpu.total_of_slice().unwrap_or(0),
            CudaMemory::Known { total_bytes, .. } => total_bytes,
            CudaMemory::OverLimit { .. } => gpu.total_of_slice().unwrap_or(0),
        };
        let slots = PinnedSlots::new(&context).map_err(|error| format!("trying it out failed: {error}"));
        let digester = Digester::open(&context, &slots, gpu.granule_bytes);
        let codec = Codec::open(&context, &slots, gpu.granule_bytes);
        let pageable_because = context.host_memory().details().pageable_because;
        let copy_kernel = match &pageable_because {
            None => CopyKernel::open(&context, &slots),
            Some(why) => Err(format!("host memory is not page-locked: {why}")),
        };
        drop(entered);
        let id = format!("cuda:{}", gpu.ordinal);
        let state = CudaState::new(gpu.granule_bytes, Vm::new(&context, access));
        let info = DeviceInfo::new(id, gpu.name.as_str(), gpu.granule_bytes, total_bytes)
            .copying_over(COPY_STREAMS)
            .copying_by_kernel(copy_kernel.is_ok())
            .linking_over(if pageable_because.is_none() { links.numbers().count() } else { 0 })
            .saving_over(SAVE_STREAMS)
            .digesting_fast(digester.kernel().is_ok())
            .encoding_fast(codec.kernels().is_ok() && pageable_because.is_none())
            .sharing_host_memory(gpu.integrated)
            .sharing_memory_as(state.shares_memory().then(|| format!("GPU-{}", gpu.uuid)));
        let queues = Arc::new(Queues::new(&context));
        let registrations = Registrations::of(&context);
        Ok(Self {
            info,
            gpu,
            queues,
            context,
            links,
            state,
            usage: None,
            digester,
            codec,
            copy_kernel,
            registrations,
        })
    }

    /// Properties of the GPU.
    #[must_use]
    pub fn gpu(&self) -> &GpuInfo {
        &self.gpu
    }

    /// Numbers of the other GPUs that may access its memory.
    #[must_use]
    pub fn peers(&self) -> &[u32] {
        self.state.peers()
    }

    /// Memory of another GPU, for copies of what sleeps here.
    ///
    /// # Errors
    /// `InvalidArgument`: there is no such GPU, or this one does not reach its memory.
    pub fn peer_memory(&self, number: u32) -> DriverResult<PeerGpu> {
        PeerGpu::of(&self.context, self.gpu.ordinal, number).map_err(of(Op::Open))
    }

    /// That of all GPUs whose memory this one reaches.
    #[must_use]
    pub fn peer_memories(&self) -> Vec<PeerGpu> {
        let count = count(self.api()).unwrap_or(0);
        (0..count).filter_map(|number| self.peer_memory(number).ok()).collect()
    }

    /// Numbers of the other GPUs whose links may carry its copies: none where host memory is not page-locked.
    pub fn links(&self) -> impl Iterator<Item = u32> {
        self.links.numbers().take(self.info.links)
    }

    /// The driver's figures for the GPU's memory, uncorrected.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn reported_memory(&self) -> DriverResult<CudaMemory> {
        self.call(Op::MemoryInfo, |_| self.context.memory())
    }

    /// GPU memory of this process in bytes, with its context, where NVML reports it.
    #[must_use]
    pub fn process_used_bytes(&self) -> Option<u64> {
        Some(self.usage.as_ref()?.now(&self.gpu.uuid)?.used_bytes)
    }

    /// Whether a kernel on the GPU computes digests.
    ///
    /// # Errors
    /// Why not; it may be the driver's text.
    pub fn digest_kernel(&self) -> std::result::Result<(), &str> {
        self.digester.kernel()
    }

    /// Whether kernels on the GPU encode and decode granules.
    ///
    /// # Errors
    /// As for [`Self::digest_kernel`].
    pub fn codec_kernels(&self) -> std::result::Result<(), &str> {
        self.codec.kernels()
    }

    /// Whether a kernel on the GPU copies to it, on streams made for that, instead of the copy engines.
    ///
    /// # Errors
    /// As for [`Self::digest_kernel`].
    pub fn copy_kernel(&self) -> std::result::Result<(), &str> {
        self.copy_kernel.as_ref().map(drop).map_err(String::as_str)
    }

    /// How its host memory is made.
    #[must_use]
    pub fn host_memory_details(&self) -> HostMemoryDetails {
        self.context.host_memory().details()
    }

    /// The device address of these bytes, if they are in page-locked memory of this device.
    #[must_use]
    pub fn pinned_at(&self, bytes: &[u8]) -> Option<u64> {
        self.context.owner().check(Op::HostAlloc).ok()?;
        self.context.pinned_at(bytes.as_ptr().addr(), bytes.len())
    }

    /// Adopts a stream of the caller's (a `CUstream` or `cudaStream_t`); zero is the default stream. Its id
    /// stays the same until [`Driver::stream_destroy`], which forgets the id and leaves the stream to its
    /// owner.
    ///
    /// # Errors
    /// `InvalidArgument` for a stream of another context.
    ///
    /// # Safety
    /// The stream must be alive, and stay so until its id is forgotten.
    pub unsafe fn adopt_stream(&self, stream: usize) -> DriverResult<StreamId> {
        let _entered = self.enter(Op::AdoptStream)?;
        self.queues.adopt(stream).map_err(of(Op::AdoptStream))
    }

    /// The driver's handle of a stream, which the caller may also capture into a graph.
    ///
    /// # Errors
    /// `UnknownHandle`.
    pub fn raw_stream(&self, stream: StreamId) -> DriverResult<usize> {
        self.context.owner().check(Op::AdoptStream)?;
        self.queues.stream(stream).map(|stream| stream.share()).map_err(of(Op::AdoptStream))
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn registrations(&self) -> &Arc<Registrations> {
        &self.registrations
    }

    pub(super) fn queues(&self) -> &Arc<Queues> {
        &self.queues
    }

    /// Makes the context current, and releases what finished work no longer needs.
    pub(super) fn enter(&self, op: Op) -> DriverResult<Entered<'_>> {
        let entered = self.context.enter(op)?;
        self.queues.sweep();
        Ok(entered)
    }

    fn api(&self) -> &'static Api {
        self.context.api()
    }

    fn call<T>(&self, op: Op, f: impl FnOnce(&'static Api) -> Result<T>) -> DriverResult<T> {
        let _entered = self.enter(op)?;
        f(self.api()).map_err(of(op))
    }

    fn submit<T: Send + 'static, U: 'static>(
        &self,
        op: Op,
        stream: StreamId,
        kept: T,
        queue: impl FnOnce(&T, &Stream) -> Result<()>,
        finish: impl FnOnce(T) -> Result<U> + Send + 'static,
    ) -> DriverResult<Pending<U>> {
        self.call(op, |_| {
            let stream = self.queues.running_stream(stream)?;
            if stream.is_over_link() && !matches!(op, Op::CopyToDevice | Op::CopyToHost) {
                let reason = "a stream over another GPU's link only copies".to_owned();
                return Err(DriverErrorKind::Unsupported { reason });
            }
            let flight = self.queues.submit(&stream, kept, |kept| queue(kept, &stream))?;
            Ok(flight.pending(op, finish))
        })
    }

    fn release_everything(&mut self) {
        if !self.context.owner().is_here() {
            self.state.forget();
            return;
        }
        self.context.host_memory().close();
        self.context.staging().close();
        let entered = self.context.enter(Op::Synchronize);
        // Waiting would invalidate a capture, and during one nothing can be released.
        let is_idle = entered.is_ok()
            && matches!(self.queues.capturing(), Ok(None))
            && self.queues.synchronize_links().is_ok()
            && self.context.synchronize().is_ok();
        self.queues.close(is_idle);
        let digester = std::mem::replace(&mut self.digester, Digester::closed());
        let copy_kernel = std::mem::replace(&mut self.copy_kernel, Err("the device has been closed".into()));
        let codec = std::mem::replace(&mut self.codec, Codec::closed());
        if !is_idle {
            std::mem::forget((digester, codec, copy_kernel));
            return; // Nothing can be released under work that may be running.
        }
        drop((digester, codec, copy_kernel));
        // Not with the last buffer that outlives the device: other code may be at work by then.
        self.trim();
        self.state.clear();
    }

    /// The context is entered.
    fn trim(&self) {
        self.context.host_memory().trim();
        self.context.staging().trim();
    }
}

impl CudaDevice {
    fn granules(&self, parts: &[CodePart]) -> impl Iterator<Item = DeviceRange> {
        let granule_bytes = self.info.granule_bytes;
        parts.iter().map(move |part| DeviceRange::new(part.granule, granule_bytes))
    }
}

type ToDevice = (Arc<HostBuffer>, Queued, Option<Arc<CopyKernel>>);

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // In a forked child, entering fails, and nothing is touched.
        self.release_everything();
    }
}

impl Driver for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn check_process(&self) -> DriverResult<()> {
        self.context.owner().check(Op::CheckProcess)
    }

    fn reserve(&self, bytes: u64) -> DriverResult<DeviceRange> {
        self.call(Op::Reserve, |_| self.state.reserve(bytes))
    }

    fn unreserve(&self, range: DeviceRange) -> DriverResult<()> {
        self.call(Op::Unreserve, |_| self.state.unreserve(range))
    }

    fn create(&self, bytes: u64) -> DriverResult<BackingId> {
        self.call(Op::Create, |_| self.state.create(bytes))
    }

    fn create_shared(&self, bytes: u64) -> DriverResult<BackingId> {
        self.call(Op::Create, |_| self.state.create_shared(bytes))
    }

    fn export(&self, backing: BackingId) -> DriverResult<OwnedFd> {
        self.call(Op::Export, |_| self.state.export(backing))
    }

    fn import(&self, memory: BorrowedFd<'_>, bytes: u64) -> DriverResult<BackingId> {
        self.call(Op::Import, |_| self.state.import(memory, bytes))
    }

    fn release(&self, backing: BackingId) -> DriverResult<()> {
        self.call(Op::Release, |_| self.state.release(backing))
    }

    fn map(&self, range: DeviceRange, backing: BackingId) -> DriverResult<()> {
        self.call(Op::Map, |_| self.state.map(range, backing))
    }

    fn set_access(&self, range: DeviceRange) -> DriverResult<()> {
        self.call(Op::SetAccess, |_| self.state.set_access(range, Reach::All))
    }

    fn set_own_access(&self, range: DeviceRange) -> DriverResult<()> {
        self.call(Op::SetAccess, |_| self.state.set_access(range, Reach::Own))
    }

    fn unmap(&self, range: DeviceRange) -> DriverResult<()> {
        self.call(Op::Unmap, |_| self.state.unmap(range))
    }

    fn stream_create(&self) -> DriverResult<StreamId> {
        self.call(Op::StreamCreate, |_| self.queues.create_stream())
    }

    fn stream_create_background(&self) -> DriverResult<StreamId> {
        self.call(Op::StreamCreate, |_| self.queues.create_background_stream())
    }

    fn stream_create_kernel_copies(&self) -> DriverResult<StreamId> {
        self.call(Op::StreamCreate, |_| self.queues.create_kernel_copy_stream())
    }

    fn stream_create_over_link(&self, link: usize) -> DriverResult<StreamId> {
        self.call(Op::StreamCreate, |_| {
            let link = self.links.context(link, self.context.owner())?;
            self.queues.create_link_stream(&link)
        })
    }

    fn stream_destroy(&self, stream: StreamId) -> DriverResult<()> {
        self.call(Op::StreamDestroy, |_| self.queues.remove_stream(stream))
    }

    fn check_stream(&self, stream: StreamId) -> DriverResult<()> {
        self.check_process()?;
        self.queues.check_stream(stream).map_err(of(Op::CheckStream))
    }

    fn stream_synchronize(&self, stream: StreamId) -> DriverResult<()> {
        self.call(Op::StreamSynchronize, |_| self.queues.running_stream(stream)?.synchronize())
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        self.call(Op::StreamWaitEvent, |_| self.queues.stream_waits(stream, event))
    }

    fn event_record(&self, stream: StreamId) -> DriverResult<EventId> {
        self.call(Op::EventRecord, |_| self.queues.record_event(stream))
    }

    fn event_query(&self, event: EventId) -> DriverResult<bool> {
        self.call(Op::EventQuery, |_| self.queues.event_has_passed(event))
    }

    fn event_synchronize(&self, event: EventId) -> DriverResult<()> {
        self.call(Op::EventSynchronize, |_| self.queues.wait_for_event(event))
    }

    fn event_destroy(&self, event: EventId) -> DriverResult<()> {
        self.call(Op::EventDestroy, |_| self.queues.remove_event(event))
    }

    fn capturing(&self) -> DriverResult<Option<StreamId>> {
        self.call(Op::Capturing, |_| self.queues.capturing())
    }

    fn synchronize(&self) -> DriverResult<()> {
        self.call(Op::Synchronize, |_| self.queues.synchronize())
    }

    fn copy_to_device(
        &self,
        stream: StreamId,
        src: Arc<HostBuffer>,
        parts: &[CopyPart],
    ) -> DriverResult<Pending<()>> {
        let op = Op::CopyToDevice;
        self.context.owner().check(op)?;
        let ranges = copy_ranges::in_buffer(src.len(), parts).map_err(of(op))?;
        self.state.check_open(parts.iter().map(|part| part.device)).map_err(of(op))?;
        let queue = |(src, queued, kernel): &ToDevice, stream: &Stream| {
            transfer::to_device(&self.context, stream, kernel.as_deref(), src, parts, &ranges, queued)
        };
        let kept = (src, Queued::default(), self.copy_kernel.as_ref().ok().cloned());
        self.submit(op, stream, kept, queue, |(_src, queued, _kernel)| staging::outcome(&queued))
    }

    fn copy_to_host(
        &self,
        stream: StreamId,
        mut dst: HostBuffer,
        parts: &[CopyPart],
    ) -> DriverResult<Pending<HostBuffer>> {
        let op = Op::CopyToHost;
        self.context.owner().check(op)?;
        let ranges = copy_ranges::in_buffer(dst.len(), parts).map_err(of(op))?;
        self.state.check_open(parts.iter().map(|part| part.device)).map_err(of(op))?;
        let to = Writable::of(&self.context, &mut dst);
        let queue = |(_, queued): &(HostBuffer, Queued), stream: &Stream| {
            transfer::to_host(&self.context, stream, to, parts, &ranges, queued)
        };
        let kept = (dst, Queued::default());
        self.submit(op, stream, kept, queue, |(dst, queued)| staging::outcome(&queued).map(|()| dst))
    }

    fn copy_within(&self, stream: StreamId, parts: &[MovePart]) -> DriverResult<Pending<()>> {
        let op = Op::CopyWithin;
        self.context.owner().check(op)?;
        check_moves(parts).map_err(of(op))?;
        let ranges = parts.iter().flat_map(|part| [part.to, part.source()]);
        self.state.check_open(ranges).map_err(of(op))?;
        let queue = |(): &(), stream: &Stream| transfer::within(&self.context, stream, parts);
        self.submit(op, stream, (), queue, Ok)
    }

    fn save(
        &self,
        stream: StreamId,
        mut dst: HostBuffer,
        parts: &[CopyPart],
    ) -> DriverResult<Pending<(HostBuffer, Vec<Digest>)>> {
        let op = Op::Save;
        self.context.owner().check(op)?;
        check_save(self.info.granule_bytes, parts)?;
        let ranges = copy_ranges::in_buffer(dst.len(), parts).map_err(of(op))?;
        self.state.check_open(parts.iter().map(|part| part.device)).map_err(of(op))?;
        let to = Writable::of(&self.context, &mut dst);
        let job = self.call(op, |_| Ok(self.digester.of_stored(&self.context, &dst, parts)))?;
        let (granule, stored) = (to_usize(self.info.granule_bytes).map_err(of(op))?, ranges.clone());
        let queue = |(_, job, queued): &(HostBuffer, Option<DigestJob>, Queued), stream: &Stream| {
            transfer::to_host(&self.context, stream, to, parts, &ranges, queued)?;
            job.as_ref().map_or(Ok(()), |job| job.queue(stream))
        };
        let kept = (dst, job, Queued::default());
        self.submit(op, stream, kept, queue, move |(dst, job, queued)| {
            staging::outcome(&queued)?;
            let digests = job.map(|job| job.digests()).unwrap_or_else(|| {
                let bytes: &[u8] = &dst;
                let granules = stored.into_iter().flat_map(|range| bytes[range].chunks(granule));
                of_stored(&granules.collect::<Vec<_>>())
            });
            Ok((dst, digests))
        })
    }

    fn zero(&self, stream: StreamId, range: DeviceRange) -> DriverResult<Pending<()>> {
        let op = Op::Zero;
        self.context.owner().check(op)?;
        self.state.check_open([range]).map_err(of(op))?;
        let bytes = to_usize(range.bytes).map_err(of(op))?;
        let queue = |(): &(), stream: &Stream| {
            if bytes == 0 {
                return Ok(());
            }
            // SAFETY: C3, the range is mapped with access.
            self.api().check(unsafe { (self.api().memset_d8_async)(range.addr, 0, bytes, stream.raw()) })
        };
        self.submit(op, stream, (), queue, Ok)
    }

    fn encoded_bytes(&self, stream: StreamId, ranges: &[DeviceRange]) -> DriverResult<Pending<Vec<u64>>> {
        let op = Op::Encode;
        self.context.owner().check(op)?;
        check_granules(self.info.granule_bytes, ranges).map_err(of(op))?;
        self.state.check_open(ranges.iter().copied()).map_err(of(op))?;
        match self.call(op, |_| Ok(self.codec.measuring(ranges)))? {
            Some(job) => self.submit(op, stream, job, EncodeJob::queue, |job| Ok(job.sizes())),
            None => measured_on_the_host(self, stream, ranges),
        }
    }

    fn encode(
        &self,
        stream: StreamId,
        dst: HostBuffer,
        parts: &[CodePart],
    ) -> DriverResult<Pending<(HostBuffer, Vec<Option<Encoded>>)>> {
        let op = Op::Encode;
        self.context.owner().check(op)?;
        check_codes(op, self.info.granule_bytes, parts, dst.len())?;
        self.state.check_open(self.granules(parts)).map_err(of(op))?;
        let jobs = self.call(op, |_| {
            let encoding = self.codec.encoding(&self.context, &dst, parts);
            // The stored codes are read once more for their digests.
            Ok(encoding.zip(self.codec.digesting(&self.context, &dst, parts)))
        })?;
        let Some((encoding, digesting)) = jobs else { return encoded_on_the_host(self, stream, dst, parts) };
        let queue = |(_, encoding, digesting): &(HostBuffer, EncodeJob, DecodeJob), stream: &Stream| {
            encoding.queue(stream)?;
            digesting.queue(stream)
        };
        let slots: Vec<u64> = parts.iter().map(|part| part.slot_bytes).collect();
        let finish = move |(dst, encoding, digesting): (HostBuffer, EncodeJob, DecodeJob)| {
            let codes = encoding.sizes().into_iter().zip(digesting.digests()).zip(slots);
            let stored = |((bytes, digest), slot_bytes): ((u64, Digest), u64)| {
                (bytes <= slot_bytes).then_some(Encoded { bytes, digest })
            };
            Ok((dst, codes.map(stored).collect()))
        };
        self.submit(op, stream, (dst, encoding, digesting), queue, finish)
    }

    fn decode(
        &self,
        stream: StreamId,
        src: Arc<HostBuffer>,
        parts: &[CodePart],
        scratch: Option<Scratch>,
    ) -> DriverResult<Pending<Vec<Digest>>> {
        let op = Op::Decode;
        self.context.owner().check(op)?;
        check_codes(op, self.info.granule_bytes, parts, src.len())?;
        let range = scratch.map(|scratch| scratch.range);
        self.state.check_open(self.granules(parts).chain(range)).map_err(of(op))?;
        let (decoding, copies) = self.call(op, |_| {
            let by_kernel = self.queues.running_stream(stream)?.copies_by_kernel();
            let scratch = scratch.filter(|_| !by_kernel);
            let copies = scratch.map(|scratch| self.queues.running_stream(scratch.copies)).transpose()?;
            let range = scratch.map(|scratch| scratch.range);
            Ok((self.codec.decoding(&self.context, &src, parts, range), copies))
        })?;
        let Some(decoding) = decoding else { return decoded_on_the_host(self, stream, &src, parts) };
        let queue = |(src, decoding): &(Arc<HostBuffer>, Decoding), stream: &Stream| {
            decoding.queue(&self.context, stream, copies.as_deref(), src)
        };
        self.submit(op, stream, (src, decoding), queue, |(_src, decoding)| decoding.digests())
    }

    fn digest(&self, stream: StreamId, ranges: &[DeviceRange]) -> DriverResult<Pending<Vec<Digest>>> {
        let (op, granule) = (Op::Digest, self.info.granule_bytes);
        self.context.owner().check(op)?;
        check_granules(granule, ranges).map_err(of(op))?;
        self.state.check_open(ranges.iter().copied()).map_err(of(op))?;
        if let Some(job) = self.call(op, |_| Ok(self.digester.of_device(ranges)))? {
            return self.submit(op, stream, job, DigestJob::queue, |job| Ok(job.digests()));
        }
        let digests = ranges.iter().map(|range| Digests::of(*range, granule)).collect::<Result<Vec<_>>>();
        let digests = digests.map_err(of(op))?;
        let queued = Mutex::new(Vec::new());
        let queue = |(digests, queued): &(Vec<Arc<Digests>>, Mutex<_>), stream: &Stream| {
            let mut pairs = digests.iter().zip(ranges);
            pairs.try_for_each(|(digests, range)| digests.queue(&self.context, stream, *range, queued))
        };
        self.submit(op, stream, (digests, queued), queue, |(digests, _queued)| {
            Ok(digests.iter().map(|digests| digests.take()).collect::<Result<Vec<_>>>()?.concat())
        })
    }

    fn launch_host(&self, stream: StreamId, work: HostWork) -> DriverResult<Pending<()>> {
        let job = HostJob::new(work);
        let queue = |job: &Arc<HostJob>, stream: &Stream| job.launch(&self.context, stream);
        self.submit(Op::LaunchHost, stream, job, queue, |job| job.outcome())
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        self.call(Op::MemoryInfo, |_| {
            let (free_bytes, total_bytes) = match self.context.memory()? {
                CudaMemory::Known { free_bytes, total_bytes: 0 } => (free_bytes, self.info.total_bytes),
                CudaMemory::Known { free_bytes, total_bytes } => (free_bytes, total_bytes),
                CudaMemory::OverLimit { .. } => (0, self.info.total_bytes),
            };
            let process = self.usage.as_ref().and_then(|usage| usage.now(&self.gpu.uuid));
            Ok(MemoryInfo::new(total_bytes, free_bytes).of_process(process))
        })
    }

    fn host_trim(&self) -> DriverResult<()> {
        self.call(Op::HostTrim, |_| {
            self.trim();
            Ok(())
        })
    }

    fn host_memory(&self) -> HostMemoryInfo {
        self.context.host_memory().info()
    }

    fn host_alloc(&self, bytes: u64) -> DriverResult<HostBuffer> {
        let _entered = self.enter(Op::HostAlloc)?;
        self.context.host_memory().alloc(bytes).map(HostBuffer::new)
    }

    fn host_alloc_all(&self, sizes: &[u64]) -> DriverResult<Vec<Pending<HostBuffer>>> {
        let _entered = self.enter(Op::HostAlloc)?;
        self.context.host_memory().alloc_all(sizes)
    }

    fn host_make_ahead(&self, sizes: &[u64]) {
        if let Ok(_entered) = self.enter(Op::HostAlloc) {
            self.context.host_memory().make_ahead(sizes);
        }
    }
}
