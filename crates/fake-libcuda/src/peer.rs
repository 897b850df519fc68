//! Copies that concern memory of another device than the one they are queued on.
//!
//! Each device here is a host device of its own, which knows its own memory only. So such a copy is a function of the
//! host in its stream, and has the device whose memory it concerns move the bytes. Nothing counts as in flight on that
//! memory: one that is unmapped too early fails the copy, as it does on GPUs.

use std::sync::{Arc, Mutex, PoisonError};

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{CopyPart, DeviceRange, Driver, HostBuffer, Pending, StreamId};

use crate::abi::Outcome;
use crate::context::Current;
use crate::memory;
use crate::world::Device;

/// The other device whose memory a range is, if it is not memory of the one that the call concerns. It must have been
/// given access then.
pub(crate) fn home(current: &Current, range: DeviceRange) -> Outcome<Option<&'static Device>> {
    if memory::device_at(current.world, range).is_none_or(|home| home == current.device.ordinal) {
        return Ok(None);
    }
    memory::home_of(current.world, current.device, range).map(Some)
}

/// Queues a copy from one device's memory to another's, on a stream of `device`.
pub(crate) fn copy(
    device: &Device,
    stream: StreamId,
    (to_home, to): (&'static Device, DeviceRange),
    (from_home, from): (&'static Device, DeviceRange),
) -> DriverResult<Pending<()>> {
    queue(device, stream, move || {
        let buffer = from_home.host.host_alloc(from.bytes)?;
        write(to_home, Arc::new(read(from_home, buffer, from)?), to)
    })
}

/// Queues work with an outcome on a stream of `device`.
pub(crate) fn queue(
    device: &Device,
    stream: StreamId,
    work: impl FnOnce() -> DriverResult<()> + Send + 'static,
) -> DriverResult<Pending<()>> {
    let outcome = Arc::new(Mutex::new(Ok(())));
    let told = Arc::clone(&outcome);
    let work = move || *told.lock().unwrap_or_else(PoisonError::into_inner) = work();
    let queued = device.host.launch_host(stream, Box::new(work))?;
    Ok(queued.then(move |ran| {
        ran?;
        outcome.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }))
}

/// Writes to memory of a device, and waits for that.
pub(crate) fn write(home: &Device, from: Arc<HostBuffer>, to: DeviceRange) -> DriverResult<()> {
    let part = CopyPart { device: to, host_offset: 0 };
    aside(home, |stream| home.host.copy_to_device(stream, from, &[part]))
}

/// Reads memory of a device, and waits for that.
pub(crate) fn read(home: &Device, to: HostBuffer, from: DeviceRange) -> DriverResult<HostBuffer> {
    let part = CopyPart { device: from, host_offset: 0 };
    aside(home, |stream| home.host.copy_to_host(stream, to, &[part]))
}

/// What is queued on a stream of its own, done: those that the device has may be waiting for the caller.
fn aside<T: 'static>(
    home: &Device,
    queue: impl FnOnce(StreamId) -> DriverResult<Pending<T>>,
) -> DriverResult<T> {
    let stream = home.host.stream_create()?;
    let done = queue(stream).and_then(Pending::wait);
    home.host.stream_destroy(stream)?;
    done
}
