//! A driver whose calls fail or wait as a script decides.
//!
//! The script sees every call of the trait but `info` and `check_process`. A call that returns a [`Pending`]
//! is seen again when its result is waited for. A failed call never reaches the device, as the contract
//! requires. Refused host memory counts as this driver's limit, so that pools of other tests need not free
//! memory.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use poorwill_core::digest::Digest;
use poorwill_core::driver::{CodePart, Encoded, HostWork, MovePart, Result, Scratch};
use poorwill_core::{
    BackingId, CopyPart, DeviceInfo, DeviceRange, Driver, DriverError, DriverErrorKind, EventId, HostBuffer,
    HostMemoryInfo, MemoryInfo, Op, Pending, StreamId,
};

use crate::capture::Capture;
use crate::clock::Clock;
use crate::forward::{forward, forward_streams_and_events};

/// A call, as the script sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// How many calls the script saw before.
    pub number: u64,
    /// The driver's call.
    pub op: Op,
    /// Whether its result is waited for, rather than the call made.
    pub waiting: bool,
    /// The range of an unmap.
    pub unmaps: Option<DeviceRange>,
    /// Size of an allocation, a copy or a digest.
    pub bytes: u64,
    /// The stream of a copy to the device.
    pub stream: Option<StreamId>,
    /// What the codes to decode may pass through.
    pub scratch: Option<Scratch>,
}

impl Call {
    fn of(op: Op) -> Self {
        Self { number: 0, op, waiting: false, unmaps: None, bytes: 0, stream: None, scratch: None }
    }
}

/// The script's decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Go on.
    Pass,
    /// Fail with this kind of error, as a device would.
    Fail(DriverErrorKind),
    /// Go on after this delay.
    Delay(Duration),
}

impl Verdict {
    /// A failure of the device itself.
    #[must_use]
    pub fn device_failure(call: Call) -> Self {
        let text = format!("call {} was made to fail by the test", call.number);
        Self::Fail(DriverErrorKind::Device { code: 999, name: "INJECTED".into(), text })
    }
}

type Script = dyn Fn(Call) -> Verdict + Send + Sync;

/// A driver whose calls a script decides.
pub struct ScriptedDriver {
    inner: Arc<dyn Driver>,
    info: DeviceInfo,
    interceptor: Arc<Interceptor>,
    clock: Option<Arc<Clock>>,
}

struct Interceptor {
    script: Box<Script>,
    calls: AtomicU64,
    capture: Arc<Capture>,
    limits_host: AtomicBool,
}

impl Interceptor {
    fn intercept(&self, call: Call) -> Result<()> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        if !call.waiting {
            self.capture.note(call.op);
        }
        match (self.script)(Call { number, ..call }) {
            Verdict::Pass => Ok(()),
            Verdict::Fail(kind) => {
                let is_host = matches!(kind, DriverErrorKind::OutOfHostMemory { .. });
                self.limits_host.fetch_or(is_host, Ordering::Relaxed);
                Err(DriverError::new(call.op, kind))
            }
            Verdict::Delay(duration) => {
                std::thread::sleep(duration);
                Ok(())
            }
        }
    }
}

impl fmt::Debug for ScriptedDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptedDriver").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl ScriptedDriver {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn Driver>, script: impl Fn(Call) -> Verdict + Send + Sync + 'static) -> Self {
        let info = inner.info().clone();
        let (calls, capture, limits_host) = Default::default();
        let interceptor = Interceptor { script: Box::new(script), calls, capture, limits_host };
        Self { inner, info, interceptor: Arc::new(interceptor), clock: None }
    }

    /// Uses another clock than the machine's.
    #[must_use]
    pub fn by(mut self, clock: &Arc<Clock>) -> Self {
        self.clock = Some(Arc::clone(clock));
        self
    }

    /// Changes what the device reports.
    #[must_use]
    pub fn with_info(mut self, change: impl FnOnce(&mut DeviceInfo)) -> Self {
        change(&mut self.info);
        self
    }

    /// Lets a test declare a capture on this driver.
    #[must_use]
    pub fn capture(&self) -> Arc<Capture> {
        Arc::clone(&self.interceptor.capture)
    }

    /// How many calls the script has seen.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.interceptor.calls.load(Ordering::Relaxed)
    }

    fn before(&self, op: Op) -> Result<()> {
        self.interceptor.intercept(Call::of(op))
    }

    fn before_sized(&self, op: Op, bytes: u64) -> Result<()> {
        self.interceptor.intercept(Call { bytes, ..Call::of(op) })
    }

    fn granules(&self, parts: &[CodePart]) -> u64 {
        parts.len() as u64 * self.info.granule_bytes
    }

    fn then_on_wait<T: 'static>(&self, op: Op, bytes: u64, pending: Pending<T>) -> Pending<T> {
        let interceptor = Arc::clone(&self.interceptor);
        pending.then(move |result| {
            let outcome = result?;
            interceptor.intercept(Call { waiting: true, bytes, ..Call::of(op) })?;
            Ok(outcome)
        })
    }
}

impl Driver for ScriptedDriver {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn now(&self) -> Instant {
        self.clock.as_ref().map_or_else(|| self.inner.now(), |clock| clock.now())
    }

    forward_streams_and_events!();

    fn host_memory(&self) -> HostMemoryInfo {
        let mut info = self.inner.host_memory();
        if self.interceptor.limits_host.load(Ordering::Relaxed) {
            info.limit_bytes = Some(0);
        }
        info
    }

    forward! {
        MemoryInfo: memory_info() -> MemoryInfo;
        Export: export(backing: BackingId) -> OwnedFd;
        Import: import(memory: BorrowedFd<'_>, bytes: u64) -> BackingId;
        Release: release(backing: BackingId) -> ();
        Map: map(range: DeviceRange, backing: BackingId) -> ();
        SetAccess: set_access(range: DeviceRange) -> ();
        EventQuery: event_query(event: EventId) -> bool;
    }

    fn capturing(&self) -> Result<Option<StreamId>> {
        self.before(Op::Capturing)?;
        match self.interceptor.capture.stream() {
            None => self.inner.capturing(),
            stream => Ok(stream),
        }
    }

    fn create(&self, bytes: u64) -> Result<BackingId> {
        self.before_sized(Op::Create, bytes)?;
        self.inner.create(bytes)
    }

    fn create_shared(&self, bytes: u64) -> Result<BackingId> {
        self.before_sized(Op::Create, bytes)?;
        self.inner.create_shared(bytes)
    }

    fn host_alloc(&self, bytes: u64) -> Result<HostBuffer> {
        self.before_sized(Op::HostAlloc, bytes)?;
        self.inner.host_alloc(bytes)
    }

    fn unmap(&self, range: DeviceRange) -> Result<()> {
        self.interceptor.intercept(Call {
            unmaps: Some(range),
            bytes: range.bytes,
            ..Call::of(Op::Unmap)
        })?;
        self.inner.unmap(range)
    }

    fn copy_to_device(
        &self,
        stream: StreamId,
        src: Arc<HostBuffer>,
        parts: &[CopyPart],
    ) -> Result<Pending<()>> {
        let bytes = sum(parts);
        self.interceptor.intercept(Call { bytes, stream: Some(stream), ..Call::of(Op::CopyToDevice) })?;
        let pending = self.inner.copy_to_device(stream, src, parts)?;
        Ok(self.then_on_wait(Op::CopyToDevice, bytes, pending))
    }

    fn copy_to_host(
        &self,
        stream: StreamId,
        dst: HostBuffer,
        parts: &[CopyPart],
    ) -> Result<Pending<HostBuffer>> {
        let bytes = sum(parts);
        self.before_sized(Op::CopyToHost, bytes)?;
        let pending = self.inner.copy_to_host(stream, dst, parts)?;
        Ok(self.then_on_wait(Op::CopyToHost, bytes, pending))
    }

    fn copy_within(&self, stream: StreamId, parts: &[MovePart]) -> Result<Pending<()>> {
        let bytes = parts.iter().map(|part| part.to.bytes).sum();
        self.before_sized(Op::CopyWithin, bytes)?;
        let pending = self.inner.copy_within(stream, parts)?;
        Ok(self.then_on_wait(Op::CopyWithin, bytes, pending))
    }

    fn zero(&self, stream: StreamId, range: DeviceRange) -> Result<Pending<()>> {
        self.before_sized(Op::Zero, range.bytes)?;
        let pending = self.inner.zero(stream, range)?;
        Ok(self.then_on_wait(Op::Zero, range.bytes, pending))
    }

    fn save(
        &self,
        stream: StreamId,
        dst: HostBuffer,
        parts: &[CopyPart],
    ) -> Result<Pending<(HostBuffer, Vec<Digest>)>> {
        let bytes = sum(parts);
        self.before_sized(Op::Save, bytes)?;
        let pending = self.inner.save(stream, dst, parts)?;
        Ok(self.then_on_wait(Op::Save, bytes, pending))
    }

    fn encoded_bytes(&self, stream: StreamId, ranges: &[DeviceRange]) -> Result<Pending<Vec<u64>>> {
        let bytes = ranges.iter().map(|range| range.bytes).sum();
        self.before_sized(Op::Encode, bytes)?;
        let pending = self.inner.encoded_bytes(stream, ranges)?;
        Ok(self.then_on_wait(Op::Encode, bytes, pending))
    }

    fn encode(
        &self,
        stream: StreamId,
        dst: HostBuffer,
        parts: &[CodePart],
    ) -> Result<Pending<(HostBuffer, Vec<Option<Encoded>>)>> {
        let bytes = self.granules(parts);
        self.before_sized(Op::Encode, bytes)?;
        let pending = self.inner.encode(stream, dst, parts)?;
        Ok(self.then_on_wait(Op::Encode, bytes, pending))
    }

    fn decode(
        &self,
        stream: StreamId,
        src: Arc<HostBuffer>,
        parts: &[CodePart],
        scratch: Option<Scratch>,
    ) -> Result<Pending<Vec<Digest>>> {
        let bytes = self.granules(parts);
        self.interceptor.intercept(Call { bytes, stream: Some(stream), scratch, ..Call::of(Op::Decode) })?;
        let pending = self.inner.decode(stream, src, parts, scratch)?;
        Ok(self.then_on_wait(Op::Decode, bytes, pending))
    }

    fn host_alloc_all(&self, sizes: &[u64]) -> Result<Vec<Pending<HostBuffer>>> {
        self.before_sized(Op::HostAlloc, sizes.iter().sum())?;
        let buffers = self.inner.host_alloc_all(sizes)?.into_iter().zip(sizes);
        Ok(buffers.map(|(buffer, bytes)| self.then_on_wait(Op::HostAlloc, *bytes, buffer)).collect())
    }

    fn host_make_ahead(&self, sizes: &[u64]) {
        self.inner.host_make_ahead(sizes);
    }

    fn digest(&self, stream: StreamId, ranges: &[DeviceRange]) -> Result<Pending<Vec<Digest>>> {
        let bytes = ranges.iter().map(|range| range.bytes).sum();
        self.before_sized(Op::Digest, bytes)?;
        let pending = self.inner.digest(stream, ranges)?;
        Ok(self.then_on_wait(Op::Digest, bytes, pending))
    }
}

fn sum(parts: &[CopyPart]) -> u64 {
    parts.iter().map(|part| part.device.bytes).sum()
}
