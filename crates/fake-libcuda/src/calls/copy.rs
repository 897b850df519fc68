//! Copies: always by the thread of the stream, from and to the memory that the caller named, so that one who
//! frees it too early is found out.

use std::ptr;
use std::slice;
use std::sync::Arc;

use poorwill_core::{CopyPart, DeviceRange, Driver, HostBuffer, HostMemory, Pending};

use crate::abi::{Code, HostPointer, Outcome};
use crate::context::current;
use crate::entry::entries;
use crate::world::{Handle, range};

/// How much memory a fill with anything but zeros takes.
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
        let queued = current.device.host.copy_to_device(stream.id, Arc::new(HostBuffer::new(from)), &[part]);
        stream.keep(current.device, queued)
    }

    call cuMemcpyDtoHAsync_v2(to: HostPointer, from: u64, bytes: usize, handle: Handle) {
        let current = current()?;
        let stream = current.stream(handle)?;
        let part = CopyPart { device: range(from, bytes)?, host_offset: 0 };
        let Some(to) = Borrowed::new(&to, bytes)? else { return Ok(()) };
        if current.captures(handle)? {
            return Ok(());
        }
        let queued = current.device.host.copy_to_host(stream.id, HostBuffer::new(to), &[part]);
        stream.keep(current.device, queued.map(forget_buffer))
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
            return stream.keep(current.device, host.zero(stream.id, to));
        }
        let window = to.bytes.min(FILL_BYTES);
        let buffer = vec![value; usize::try_from(window).map_err(|_| Code::INVALID_VALUE)?];
        let offsets = (0..to.bytes).step_by(1 << 20);
        let parts: Vec<CopyPart> = offsets
            .map(|offset| DeviceRange::new(to.addr + offset, window.min(to.bytes - offset)))
            .map(|device| CopyPart { device, host_offset: 0 })
            .collect();
        let queued = host.copy_to_device(stream.id, Arc::new(HostBuffer::from(buffer)), &parts);
        stream.keep(current.device, queued)
    }
}

fn forget_buffer(copy: Pending<HostBuffer>) -> Pending<()> {
    copy.then(|copied| copied.map(drop))
}

/// Memory of the caller's, for as long as a copy runs.
#[derive(Debug)]
struct Borrowed {
    addr: usize,
    bytes: usize,
}

impl Borrowed {
    /// `None` for no bytes, wherever they are not.
    fn new(host: &HostPointer, bytes: usize) -> Outcome<Option<Self>> {
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
        // SAFETY: F4, as above, and nobody else looks at what a copy to it writes.
        unsafe { slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut(self.addr), self.bytes) }
    }
}
