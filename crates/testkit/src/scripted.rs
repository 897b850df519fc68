//! A driver around another one, whose calls fail or wait as a script says.
//!
//! Every call of the trait but `info` and `check_process` asks the script first; a call that gives a
//! [`Pending`] asks again when it is waited for. A call that the script fails never reaches the device, as the
//! contract demands of errors. Where it refuses host memory, that counts as a limit of this driver's own, so that pools
//! of other tests need not make room.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use poorwill_core::digest::Digest;
use poorwill_core::driver::{HostWork, Result};
use poorwill_core::{
    BackingId, CopyPart, DeviceInfo, DeviceRange, Driver, DriverError, DriverErrorKind, EventId, HostBuffer,
    HostMemoryInfo, MemoryInfo, Op, Pending, StreamId,
};

use crate::capture::Capture;
use crate::clock::Clock;
use crate::forward::{forward, forward_streams_and_events};

/// One question to the script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// How many questions came before.
    pub number: u64,
    /// The driver's call.
    pub op: Op,
    /// Whether its outcome is being waited for, rather than the call being made.
    pub waiting: bool,
    /// What an unmap is to remove.
    pub unmaps: Option<DeviceRange>,
    /// Of device and host memory that is asked for, copies and digests: how much.
    pub bytes: u64,
    /// Of copies to the device: on which stream.
    pub stream: Option<StreamId>,
}

impl Call {
    /// One that is being made, with nothing known but its name.
    fn of(op: Op) -> Self {
        Self { number: 0, op, waiting: false, unmaps: None, bytes: 0, stream: None }
    }
}

/// The script's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Go on.
    Pass,
    /// Fail like a device would, with this kind of error.
    Fail(DriverErrorKind),
    /// Go on after a while.
    Delay(Duration),
}

impl Verdict {
    /// A failure of the device's own.
    #[must_use]
    pub fn device_failure(call: Call) -> Self {
        let text = format!("call {} was made to fail by the test", call.number);
        Self::Fail(DriverErrorKind::Device { code: 999, name: "INJECTED".into(), text })
    }
}

type Script = dyn Fn(Call) -> Verdict + Send + Sync;

/// The wrapper.
pub struct ScriptedDriver {
    inner: Arc<dyn Driver>,
    info: DeviceInfo,
    gate: Arc<Gate>,
    clock: Option<Arc<Clock>>,
}

struct Gate {
    script: Box<Script>,
    calls: AtomicU64,
    capture: Arc<Capture>,
    /// Whether host memory was refused.
    limits_host: AtomicBool,
}

impl Gate {
    fn ask(&self, call: Call) -> Result<()> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        if !call.waiting {
            self.capture.note(call.op);
        }
        match (self.script)(Call { number, ..call }) {
            Verdict::Pass => Ok(()),
            Verdict::Fail(kind) => {
                let lacks_host = matches!(kind, DriverErrorKind::OutOfHostMemory { .. });
                self.limits_host.fetch_or(lacks_host, Ordering::Relaxed);
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
    /// `inner`, as `script` lets it.
    pub fn new(inner: Arc<dyn Driver>, script: impl Fn(Call) -> Verdict + Send + Sync + 'static) -> Self {
        let info = inner.info().clone();
        let (calls, capture, limits_host) = Default::default();
        let gate = Gate { script: Box::new(script), calls, capture, limits_host };
        Self { inner, info, gate: Arc::new(gate), clock: None }
    }

    /// The same device with another clock than the machine's.
    #[must_use]
    pub fn by(mut self, clock: &Arc<Clock>) -> Self {
        self.clock = Some(Arc::clone(clock));
        self
    }

    /// The same device, which says something else of itself.
    #[must_use]
    pub fn posing(mut self, pose: impl FnOnce(&mut DeviceInfo)) -> Self {
        pose(&mut self.info);
        self
    }

    /// With which a test says that a stream of this driver is being captured.
    #[must_use]
    pub fn capture(&self) -> Arc<Capture> {
        Arc::clone(&self.gate.capture)
    }

    /// Questions asked so far.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.gate.calls.load(Ordering::Relaxed)
    }

    fn ask(&self, op: Op) -> Result<()> {
        self.gate.ask(Call::of(op))
    }

    fn ask_for(&self, op: Op, bytes: u64) -> Result<()> {
        self.gate.ask(Call { bytes, ..Call::of(op) })
    }

    fn ask_again<T: 'static>(&self, op: Op, bytes: u64, pending: Pending<T>) -> Pending<T> {
        let gate = Arc::clone(&self.gate);
        pending.then(move |result| {
            let outcome = result?;
            gate.ask(Call { waiting: true, bytes, ..Call::of(op) })?;
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
        if self.gate.limits_host.load(Ordering::Relaxed) {
            info.limit_bytes = Some(0);
        }
        info
    }

    forward! {
        MemoryInfo: memory_info() -> MemoryInfo;
        Release: release(backing: BackingId) -> ();
        Map: map(range: DeviceRange, backing: BackingId) -> ();
        SetAccess: set_access(range: DeviceRange) -> ();
        EventQuery: event_query(event: EventId) -> bool;
    }

    fn capturing(&self) -> Result<Option<StreamId>> {
        self.ask(Op::Capturing)?;
        match self.gate.capture.stream() {
            None => self.inner.capturing(),
            stream => Ok(stream),
        }
    }

    fn create(&self, bytes: u64) -> Result<BackingId> {
        self.ask_for(Op::Create, bytes)?;
        self.inner.create(bytes)
    }

    fn host_alloc(&self, bytes: u64) -> Result<HostBuffer> {
        self.ask_for(Op::HostAlloc, bytes)?;
        self.inner.host_alloc(bytes)
    }

    fn unmap(&self, range: DeviceRange) -> Result<()> {
        self.gate.ask(Call { unmaps: Some(range), bytes: range.bytes, ..Call::of(Op::Unmap) })?;
        self.inner.unmap(range)
    }

    fn copy_to_device(
        &self,
        stream: StreamId,
        src: Arc<HostBuffer>,
        parts: &[CopyPart],
    ) -> Result<Pending<()>> {
        let bytes = sum(parts);
        self.gate.ask(Call { bytes, stream: Some(stream), ..Call::of(Op::CopyToDevice) })?;
        let pending = self.inner.copy_to_device(stream, src, parts)?;
        Ok(self.ask_again(Op::CopyToDevice, bytes, pending))
    }

    fn copy_to_host(
        &self,
        stream: StreamId,
        dst: HostBuffer,
        parts: &[CopyPart],
    ) -> Result<Pending<HostBuffer>> {
        let bytes = sum(parts);
        self.ask_for(Op::CopyToHost, bytes)?;
        let pending = self.inner.copy_to_host(stream, dst, parts)?;
        Ok(self.ask_again(Op::CopyToHost, bytes, pending))
    }

    fn zero(&self, stream: StreamId, range: DeviceRange) -> Result<Pending<()>> {
        self.ask_for(Op::Zero, range.bytes)?;
        let pending = self.inner.zero(stream, range)?;
        Ok(self.ask_again(Op::Zero, range.bytes, pending))
    }

    fn save(
        &self,
        stream: StreamId,
        dst: HostBuffer,
        parts: &[CopyPart],
    ) -> Result<Pending<(HostBuffer, Vec<Digest>)>> {
        let bytes = sum(parts);
        self.ask_for(Op::Save, bytes)?;
        let pending = self.inner.save(stream, dst, parts)?;
        Ok(self.ask_again(Op::Save, bytes, pending))
    }

    fn host_alloc_all(&self, sizes: &[u64]) -> Result<Vec<Pending<HostBuffer>>> {
        self.ask_for(Op::HostAlloc, sizes.iter().sum())?;
        let buffers = self.inner.host_alloc_all(sizes)?.into_iter().zip(sizes);
        Ok(buffers.map(|(buffer, bytes)| self.ask_again(Op::HostAlloc, *bytes, buffer)).collect())
    }

    fn digest(&self, stream: StreamId, ranges: &[DeviceRange]) -> Result<Pending<Vec<Digest>>> {
        let bytes = ranges.iter().map(|range| range.bytes).sum();
        self.ask_for(Op::Digest, bytes)?;
        let pending = self.inner.digest(stream, ranges)?;
        Ok(self.ask_again(Op::Digest, bytes, pending))
    }
}

fn sum(parts: &[CopyPart]) -> u64 {
    parts.iter().map(|part| part.device.bytes).sum()
}
