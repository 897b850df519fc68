//! Copies of another device's memory.
//!
//! Each device is a host device with its own memory. So such a copy is a host function in its stream, which
//! has the owning device move the bytes. It does not count as in flight on that memory: an early unmap fails
//! the copy, as on GPUs.

use std::sync::{Arc, Mutex, PoisonError};

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{CopyPart, DeviceRange, Driver, HostBuffer, Pending, StreamId};

use crate::abi::CallResult;
use crate::current::Current;
use crate::device::Device;

/// The device that owns a range, if it is another one than the call's. That device must have been given
/// access.
pub(crate) fn owner(current: &Current, range: DeviceRange) -> CallResult<Option<&'static Device>> {
    let owner = current.state.tables().memory.device_at(range);
    if owner.is_none_or(|owner| owner == current.device.ordinal) {
        return Ok(None);
    }
    current.state.owner_of(current.device, range).map(Some)
}

pub(crate) fn copy(
    device: &Device,
    stream: StreamId,
    (to_owner, to): (&'static Device, DeviceRange),
    (from_owner, from): (&'static Device, DeviceRange),
) -> DriverResult<Pending<()>> {
    queue(device, stream, move || {
        let buffer = from_owner.host.host_alloc(from.bytes)?;
        write(to_owner, Arc::new(read(from_owner, buffer, from)?), to)
    })
}

pub(crate) fn queue(
    device: &Device,
    stream: StreamId,
    work: impl FnOnce() -> DriverResult<()> + Send + 'static,
) -> DriverResult<Pending<()>> {
    let outcome = Arc::new(Mutex::new(Ok(())));
    let result = Arc::clone(&outcome);
    let work = move || *result.lock().unwrap_or_else(PoisonError::into_inner) = work();
    let queued = device.host.launch_host(stream, Box::new(work))?;
    Ok(queued.then(move |ran| {
        ran?;
        outcome.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }))
}

pub(crate) fn write(owner: &Device, from: Arc<HostBuffer>, to: DeviceRange) -> DriverResult<()> {
    let part = CopyPart { device: to, host_offset: 0 };
    on_own_stream(owner, |stream| owner.host.copy_to_device(stream, from, &[part]))
}

pub(crate) fn read(owner: &Device, to: HostBuffer, from: DeviceRange) -> DriverResult<HostBuffer> {
    let part = CopyPart { device: from, host_offset: 0 };
    on_own_stream(owner, |stream| owner.host.copy_to_host(stream, to, &[part]))
}

/// Runs the copy on a new stream, since the device's others may be waiting for the caller.
fn on_own_stream<T: 'static>(
    owner: &Device,
    queue: impl FnOnce(StreamId) -> DriverResult<Pending<T>>,
) -> DriverResult<T> {
    let stream = owner.host.stream_create()?;
    let done = queue(stream).and_then(Pending::wait);
    owner.host.stream_destroy(stream)?;
    done
}
