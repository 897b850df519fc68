//! Streams and events, and work whose outcome is unknown.
//!
//! The host device returns an outcome to the caller that waits. A CUDA caller learns of a failure from its
//! next call. [`InFlight`] keeps outcomes until the work is complete, then records a failure on the device.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{Driver, DriverError, DriverErrorKind, EventId, Pending, StreamId};

use crate::abi::{CallResult, Code};
use crate::context::Current;
use crate::state::{Device, Handle, SimulatorState};

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`, which are not handles.
const LEGACY: Handle = 1;
const PER_THREAD: Handle = 2;

#[derive(Debug, Clone)]
pub(crate) struct Stream {
    pub(crate) context: Handle,
    pub(crate) device: usize,
    pub(crate) id: StreamId,
    /// Whether the default stream waits for it.
    pub(crate) is_blocking: bool,
    pub(crate) in_flight: Arc<InFlight>,
}

/// A caller's event; it can be recorded repeatedly.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) context: Handle,
    pub(crate) device: usize,
    pub(crate) recorded: Option<Arc<Point>>,
    /// Set if it was recorded in a capture.
    pub(crate) captured: Option<u64>,
}

/// The position where an event was recorded last. On drop the host device's event is destroyed.
#[derive(Debug)]
pub(crate) struct Point {
    device: &'static Device,
    pub(crate) id: EventId,
    in_flight: Arc<InFlight>,
    upto: u64,
}

impl Point {
    pub(crate) fn record(device: &'static Device, stream: &Stream) -> CallResult<Self> {
        let upto = stream.in_flight.queued();
        let id = device.host.event_record(stream.id)?;
        Ok(Self { device, id, in_flight: Arc::clone(&stream.in_flight), upto })
    }

    /// Whether all work before it is complete. If so, its failures are recorded on the device.
    pub(crate) fn has_passed(&self) -> CallResult<bool> {
        let passed = self.device.host.event_query(self.id)?;
        if passed {
            self.in_flight.record_outcomes(self.device, self.upto);
        }
        Ok(passed)
    }

    pub(crate) fn wait(&self) -> CallResult {
        self.device.host.event_synchronize(self.id)?;
        self.in_flight.record_outcomes(self.device, self.upto);
        Ok(())
    }
}

impl Drop for Point {
    fn drop(&mut self) {
        // Only this owns the event.
        let _ = self.device.host.event_destroy(self.id);
    }
}

#[derive(Default)]
pub(crate) struct InFlight(Mutex<Outcomes>);

#[derive(Default)]
struct Outcomes {
    recorded: u64,
    pending: VecDeque<Pending<()>>,
    /// How many may be pending before the next check.
    check_at: usize,
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("queued", &self.queued()).finish()
    }
}

impl InFlight {
    fn lock(&self) -> MutexGuard<'_, Outcomes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn queued(&self) -> u64 {
        let outcomes = self.lock();
        outcomes.recorded + outcomes.pending.len() as u64
    }

    /// Records the outcomes of the first `upto` operations, which are complete.
    pub(crate) fn record_outcomes(&self, device: &Device, upto: u64) {
        let mut outcomes = self.lock();
        while outcomes.recorded < upto
            && let Some(done) = outcomes.pending.pop_front()
        {
            outcomes.recorded += 1;
            if let Err(error) = done.wait() {
                eprintln!("fake libcuda: work on device {} failed: {error}", device.ordinal);
                device.record_failure(failed(error));
            }
        }
    }
}

fn failed(error: DriverError) -> Code {
    match error.kind {
        DriverErrorKind::Device { code: 0, .. } => Code::LAUNCH_FAILED,
        _ => error.into(),
    }
}

impl Stream {
    /// Keeps the outcome of work that was just queued.
    pub(crate) fn track(&self, device: &'static Device, queued: DriverResult<Pending<()>>) -> CallResult {
        let mut outcomes = self.in_flight.lock();
        outcomes.pending.push_back(queued?);
        let pending = outcomes.pending.len();
        if pending < outcomes.check_at.max(256) {
            return Ok(());
        }
        outcomes.check_at = 2 * pending;
        drop(outcomes);
        // So that the outcomes of a caller that never waits do not pile up.
        if Point::record(device, self)?.has_passed()? {
            self.in_flight.lock().check_at = 0;
        }
        Ok(())
    }

    pub(crate) fn is_idle(&self, device: &'static Device) -> CallResult<bool> {
        Point::record(device, self)?.has_passed()
    }

    pub(crate) fn wait(&self, device: &Device) -> CallResult {
        let upto = self.in_flight.queued();
        device.host.stream_synchronize(self.id)?;
        self.in_flight.record_outcomes(device, upto);
        Ok(())
    }
}

impl SimulatorState {
    /// The stream of a handle, in any context.
    pub(crate) fn any_stream(&self, current: &Current, handle: Handle) -> CallResult<Stream> {
        match handle {
            0 | LEGACY => Ok(Stream {
                context: current.context,
                device: current.device.ordinal,
                id: StreamId::DEFAULT,
                is_blocking: false,
                in_flight: Arc::clone(&current.device.in_flight),
            }),
            PER_THREAD => Err(Code::NOT_SUPPORTED),
            _ => self.tables().streams.get(&handle).cloned().ok_or(Code::INVALID_HANDLE),
        }
    }
}

impl Current {
    /// The stream of a handle, which must be of this context.
    pub(crate) fn stream(&self, handle: Handle) -> CallResult<Stream> {
        let stream = self.state.any_stream(self, handle)?;
        if stream.context == self.context { Ok(stream) } else { Err(Code::INVALID_HANDLE) }
    }

    pub(crate) fn wait_for_device(&self) -> CallResult {
        let of_device = |stream: &&Stream| stream.device == self.device.ordinal;
        let mut in_flight: Vec<Arc<InFlight>> = self
            .state
            .tables()
            .streams
            .values()
            .filter(of_device)
            .map(|s| Arc::clone(&s.in_flight))
            .collect();
        in_flight.push(Arc::clone(&self.device.in_flight));
        let queued: Vec<u64> = in_flight.iter().map(|in_flight| in_flight.queued()).collect();
        self.device.wait()?;
        in_flight
            .iter()
            .zip(queued)
            .for_each(|(in_flight, upto)| in_flight.record_outcomes(self.device, upto));
        self.device.check()
    }
}
