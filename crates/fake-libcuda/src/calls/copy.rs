//! Copies. The stream's thread uses the caller's own memory, so that freeing it too early is detected.

use std::ptr;
use std::slice;
use std::sync::Arc;

use poorwill_core::{CopyPart, DeviceRange, Driver, HostBuffer, HostMemory, Pending};

use crate::abi::{CallResult, Code, HostPointer};
use crate::current::current;
use crate::entry::entries;
use crate::handle::Handle;
use crate::memory::range;
use crate::{context, peer};

/// Buffer size of a fill with a value other than 0.
const FILL_BYTES: u64 = 1 << 20;

entries! {
    call cuMemcpyHtoDAsync_v2(to: u64, from: HostPointer, bytes: usize, handle: Handle) {
        let current = current()?;
        let stream = current.stream(handle)?;
        let part = CopyPart { device: range(to, bytes)?, host_offset: 0 };
        let Some(from) = Borrowed::new(&from, bytes)? else { return Ok(()) };
        if current.captures(handle)? {
            return Ok(());
        }
        let from = Arc::new(HostBuffer::new(from));
        let queued = match peer::owner(&current, part.device)? {
            None => current.device.host.copy_to_device(stream.id, from, &[part]),
            Some(owner) => peer::queue(current.device, stream.id, move || peer::write(owner, from, part.device)),
        };
        stream.track(current.device, queued)
    }

    call cuMemcpyDtoHAsync_v2(to: HostPointer, from: u64, bytes: usize, handle: Handle) {
        let current = current()?;
        let stream = current.stream(handle)?;
        let part = CopyPart { device: range(from, bytes)?, host_offset: 0 };
        let Some(to) = Borrowed::new(&to, bytes)? else { return Ok(()) };
        if current.captures(handle)? {
            return Ok(());
        }
        let to = HostBuffer::new(to);
        let queued = match peer::owner(&current, part.device)? {
            None => current.device.host.copy_to_host(stream.id, to, &[part]).map(forget_buffer),
            Some(owner) => peer::queue(current.device, stream.id, move || {
                peer::read(owner, to, part.device).map(drop)
            }),
        };
        stream.track(current.device, queued)
    }

    call cuMemcpyAsync(to: u64, from: u64, bytes: usize, handle: Handle) {
        // Device addresses only: other calls copy host memory.
        let current = current()?;
        let stream = current.stream(handle)?;
        let (to, from) = (range(to, bytes)?, range(from, bytes)?);
        let owners = (
            current.state.owner_of(current.device, to)?,
            current.state.owner_of(current.device, from)?,
        );
        if bytes == 0 || current.captures(handle)? {
            return Ok(());
        }
        stream.track(current.device, peer::copy(current.device, stream.id, (owners.0, to), (owners.1, from)))
    }

    call cuMemcpyPeerAsync(
        to: u64,
        to_context: Handle,
        from: u64,
        from_context: Handle,
        bytes: usize,
        handle: Handle,
    ) {
        // This call needs no access of a device to the other's memory.
        let current = current()?;
        let stream = current.stream(handle)?;
        let end = |addr, context| {
            let (device, range) = (context::device_of(context)?, range(addr, bytes)?);
            let owner = current.state.owner_of(device, range)?;
            if owner.ordinal == device.ordinal { Ok((owner, range)) } else { Err(Code::INVALID_VALUE) }
        };
        let (to, from) = (end(to, to_context)?, end(from, from_context)?);
        if bytes == 0 || current.captures(handle)? {
            return Ok(());
        }
        stream.track(current.device, peer::copy(current.device, stream.id, to, from))
    }

    call cuMemsetD8Async(to: u64, value: u8, bytes: usize, handle: Handle) {
        let current = current()?;
        let stream = current.stream(handle)?;
        let to = range(to, bytes)?;
        let host = &current.device.host;
        if bytes == 0 || current.captures(handle)? {
            return Ok(());
        }
        if value == 0 {
            return stream.track(current.device, host.zero(stream.id, to));
        }
        let window = to.bytes.min(FILL_BYTES);
        let buffer = vec![value; usize::try_from(window).map_err(|_| Code::INVALID_VALUE)?];
        let offsets = (0..to.bytes).step_by(1 << 20);
        let parts: Vec<CopyPart> = offsets
            .map(|offset| DeviceRange::new(to.addr + offset, window.min(to.bytes - offset)))
            .map(|device| CopyPart { device, host_offset: 0 })
            .collect();
        let queued = host.copy_to_device(stream.id, Arc::new(HostBuffer::from(buffer)), &parts);
        stream.track(current.device, queued)
    }
}

fn forget_buffer(copy: Pending<HostBuffer>) -> Pending<()> {
    copy.then(|copied| copied.map(drop))
}

/// The caller's memory, while a copy runs.
#[derive(Debug)]
struct Borrowed {
    addr: usize,
    bytes: usize,
}

impl Borrowed {
    /// `None` for no bytes, at any address.
    fn new(host: &HostPointer, bytes: usize) -> CallResult<Option<Self>> {
        let addr = host.addr();
        if bytes == 0 {
            return Ok(None);
        }
        let fits = isize::try_from(bytes).is_ok() && addr.checked_add(bytes).is_some();
        if addr == 0 || !fits { Err(Code::INVALID_VALUE) } else { Ok(Some(Self { addr, bytes })) }
    }
}

impl HostMemory for Borrowed {
    fn as_slice(&self) -> &[u8] {
        // SAFETY: F4, the memory stays as it is until the copy has finished, which is as long as this lives.
        unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(self.addr), self.bytes) }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: F4, as above, and no other code looks at what a copy to it writes.
        unsafe { slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut(self.addr), self.bytes) }
    }
}
