//! Streams and events.

use std::sync::Arc;

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{Driver, EventId, Pending, StreamId};

use crate::abi::CallResult;
use crate::device::Device;
use crate::handle::Handle;
use crate::in_flight::InFlight;

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
            self.device.record_outcomes(&self.in_flight, self.upto);
        }
        Ok(passed)
    }

    /// Waits on a thread of another device's.
    pub(crate) fn pass(&self) -> DriverResult<()> {
        self.device.host.event_synchronize(self.id)
    }

    pub(crate) fn wait(&self) -> CallResult {
        self.device.host.event_synchronize(self.id)?;
        self.device.record_outcomes(&self.in_flight, self.upto);
        Ok(())
    }
}

impl Drop for Point {
    fn drop(&mut self) {
        // Only this owns the event.
        let _ = self.device.host.event_destroy(self.id);
    }
}

impl Stream {
    /// Keeps the outcome of work that was just queued.
    pub(crate) fn track(&self, device: &'static Device, queued: DriverResult<Pending<()>>) -> CallResult {
        if self.in_flight.keep(queued?) && Point::record(device, self)?.has_passed()? {
            self.in_flight.has_passed();
        }
        Ok(())
    }

    pub(crate) fn is_idle(&self, device: &'static Device) -> CallResult<bool> {
        Point::record(device, self)?.has_passed()
    }

    pub(crate) fn wait(&self, device: &Device) -> CallResult {
        let upto = self.in_flight.queued();
        device.host.stream_synchronize(self.id)?;
        device.record_outcomes(&self.in_flight, upto);
        Ok(())
    }
}
