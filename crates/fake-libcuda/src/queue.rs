//! Streams and events, and work of which nobody has asked yet how it ended.
//!
//! The host device gives the outcome of each piece of work to whoever waits for it; CUDA's callers learn of a
//! failure from whatever they call next. [`Flights`] keeps the outcomes until it is known that the work is
//! done, and then has the device remember a failure.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{Driver, DriverError, DriverErrorKind, EventId, Pending, StreamId};

use crate::abi::{Code, Outcome};
use crate::context::Current;
use crate::world::{Device, Handle, World};

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`, which are no handles.
const LEGACY: Handle = 1;
const PER_THREAD: Handle = 2;

/// A stream of a caller's.
#[derive(Debug, Clone)]
pub(crate) struct Stream {
    pub(crate) context: Handle,
    pub(crate) device: usize,
    pub(crate) id: StreamId,
    /// Whether the default stream would wait for it.
    pub(crate) is_blocking: bool,
    pub(crate) flights: Arc<Flights>,
}

/// An event of a caller's; it can be recorded any number of times.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) context: Handle,
    pub(crate) device: usize,
    pub(crate) recorded: Option<Arc<Point>>,
    /// The capture in which it was recorded last, instead.
    pub(crate) captured: Option<u64>,
}

/// Where an event was recorded last. The host device's event goes with it.
#[derive(Debug)]
pub(crate) struct Point {
    device: &'static Device,
    pub(crate) id: EventId,
    flights: Arc<Flights>,
    behind: u64,
}

impl Point {
    /// The end of what is queued on a stream.
    pub(crate) fn record(device: &'static Device, stream: &Stream) -> Outcome<Self> {
        let behind = stream.flights.queued();
        let id = device.host.event_record(stream.id)?;
        Ok(Self { device, id, flights: Arc::clone(&stream.flights), behind })
    }

    /// Whether everything before it is done; if so, how it ended is known to the device.
    pub(crate) fn has_passed(&self) -> Outcome<bool> {
        let passed = self.device.host.event_query(self.id)?;
        if passed {
            self.flights.settle(self.device, self.behind);
        }
        Ok(passed)
    }

    pub(crate) fn wait(&self) -> Outcome {
        self.device.host.event_synchronize(self.id)?;
        self.flights.settle(self.device, self.behind);
        Ok(())
    }
}

impl Drop for Point {
    fn drop(&mut self) {
        // It exists: only this point knows it.
        let _ = self.device.host.event_destroy(self.id);
    }
}

/// Outcomes of a stream's work, in its order.
#[derive(Default)]
pub(crate) struct Flights(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    settled: u64,
    pending: VecDeque<Pending<()>>,
    /// How many there may be before somebody looks whether they are done.
    look_at: usize,
}

impl fmt::Debug for Flights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flights").field("queued", &self.queued()).finish()
    }
}

impl Flights {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many pieces of work there have been.
    pub(crate) fn queued(&self) -> u64 {
        let waiting = self.lock();
        waiting.settled + waiting.pending.len() as u64
    }

    /// The first `upto` pieces of work are done: has the device remember if one failed.
    pub(crate) fn settle(&self, device: &Device, upto: u64) {
        let mut waiting = self.lock();
        while waiting.settled < upto
            && let Some(done) = waiting.pending.pop_front()
        {
            waiting.settled += 1;
            if let Err(error) = done.wait() {
                eprintln!("fake libcuda: work on device {} failed: {error}", device.ordinal);
                device.broke(failed(error));
            }
        }
    }
}

/// What work that failed is called.
fn failed(error: DriverError) -> Code {
    match error.kind {
        DriverErrorKind::Device { code: 0, .. } => Code::LAUNCH_FAILED,
        _ => error.into(),
    }
}

impl Stream {
    /// Keeps the outcome of work that was just queued on this stream.
    pub(crate) fn keep(&self, device: &'static Device, queued: DriverResult<Pending<()>>) -> Outcome {
        let mut waiting = self.flights.lock();
        waiting.pending.push_back(queued?);
        let many = waiting.pending.len();
        if many < waiting.look_at.max(256) {
            return Ok(());
        }
        waiting.look_at = 2 * many;
        drop(waiting);
        // Callers that never ask keep no outcomes of theirs for ever.
        if Point::record(device, self)?.has_passed()? {
            self.flights.lock().look_at = 0;
        }
        Ok(())
    }

    /// Whether nothing is left to do on it.
    pub(crate) fn is_idle(&self, device: &'static Device) -> Outcome<bool> {
        Point::record(device, self)?.has_passed()
    }

    /// Waits for everything queued on it.
    pub(crate) fn wait(&self, device: &Device) -> Outcome {
        let upto = self.flights.queued();
        device.host.stream_synchronize(self.id)?;
        self.flights.settle(device, upto);
        Ok(())
    }
}

impl World {
    /// The stream that a handle stands for, of any context.
    pub(crate) fn any_stream(&self, current: &Current, handle: Handle) -> Outcome<Stream> {
        match handle {
            0 | LEGACY => Ok(Stream {
                context: current.context,
                device: current.device.ordinal,
                id: StreamId::DEFAULT,
                is_blocking: false,
                flights: Arc::clone(&current.device.flights),
            }),
            PER_THREAD => Err(Code::NOT_SUPPORTED),
            _ => self.tables().streams.get(&handle).cloned().ok_or(Code::INVALID_HANDLE),
        }
    }
}

impl Current {
    /// The stream that a handle stands for, which must be of this context.
    pub(crate) fn stream(&self, handle: Handle) -> Outcome<Stream> {
        let stream = self.world.any_stream(self, handle)?;
        if stream.context == self.context { Ok(stream) } else { Err(Code::INVALID_HANDLE) }
    }

    /// Waits for everything on the device.
    pub(crate) fn wait_for_device(&self) -> Outcome {
        let of_device = |stream: &&Stream| stream.device == self.device.ordinal;
        let mut flights: Vec<Arc<Flights>> =
            self.world.tables().streams.values().filter(of_device).map(|s| Arc::clone(&s.flights)).collect();
        flights.push(Arc::clone(&self.device.flights));
        let queued: Vec<u64> = flights.iter().map(|flights| flights.queued()).collect();
        self.device.wait()?;
        flights.iter().zip(queued).for_each(|(flights, upto)| flights.settle(self.device, upto));
        self.device.check()
    }
}
