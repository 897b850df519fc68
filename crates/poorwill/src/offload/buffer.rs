//! Host memory of exact size.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use poorwill_core::{DriverError, HostBuffer, Pending};
use poorwill_driver::{BufferMade, BufferPin};

use super::Switches;
use crate::open::Device;

/// Host memory of exact size, from a device's host arena. Released with the last reference or view.
///
/// ```
/// use poorwill::Device;
/// use poorwill::offload::{Buffer, BufferPin, Switches};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::open(&"host:64MiB".parse()?)?;
/// let mut buffer = Buffer::new(&device, 1000, BufferPin::Never, Switches::from_env()?)?;
/// buffer.as_mut_slice().ok_or("a copy uses it")?.fill(7);
/// assert_eq!((buffer.bytes(), buffer.is_pinned()), (1000, false));
/// # Ok(())
/// # }
/// ```
pub struct Buffer {
    device: Device,
    /// A forked child must not even read its length.
    memory: Option<Arc<HostBuffer>>,
    addr: usize,
    bytes: u64,
    device_addr: Option<u64>,
    pageable_because: Option<String>,
    /// Whether the device may access it, through a view or a lent address.
    may_be_in_use: AtomicBool,
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("device", self.device.spec())
            .field("bytes", &self.bytes())
            .field("is_pinned", &self.is_pinned())
            .finish_non_exhaustive()
    }
}

impl Buffer {
    /// Allocates memory with unspecified contents. If a switch overrides `pin`,
    /// [`pageable_because`](Self::pageable_because) names it.
    ///
    /// # Errors
    /// - `OutOfHostMemory` with requested, held and allowed bytes; `InvalidArgument` for zero bytes.
    /// - `Unsupported` for [`BufferPin::Always`] when the memory cannot be page-locked.
    pub fn new(device: &Device, bytes: u64, pin: BufferPin, switches: Switches) -> Result<Self, DriverError> {
        device.free_deferred();
        let (pin, switched_off) = switched(pin, switches);
        let (memory, because) = device.host_buffer(bytes, pin)?;
        Ok(Self::of(device, memory, pin, switched_off.or(because)))
    }

    /// Several buffers, as by [`Buffer::new`]. All are reserved or refused before this returns; other threads
    /// make them meanwhile. Dropping an unfinished one releases it.
    ///
    /// # Errors
    /// `OutOfHostMemory` and `InvalidArgument` as [`Buffer::new`], without a reservation; others when
    /// waiting.
    pub fn new_all(
        device: &Device,
        sizes: &[u64],
        pin: BufferPin,
        switches: Switches,
    ) -> Result<Vec<Pending<Self>>, DriverError> {
        device.free_deferred();
        let (pin, switched_off) = switched(pin, switches);
        let made = device.host_buffers(sizes, pin)?;
        let named = |pending: BufferMade| {
            let (device, switched_off) = (device.clone(), switched_off.clone());
            pending.then(move |made| {
                let (memory, because) = made?;
                Ok(Self::of(&device, memory, pin, switched_off.or(because)))
            })
        };
        Ok(made.into_iter().map(named).collect())
    }

    fn of(device: &Device, memory: HostBuffer, pin: BufferPin, because: Option<String>) -> Self {
        let asked_for = (pin == BufferPin::Never).then(|| "pageable memory was asked for".to_owned());
        let addr = memory.as_ptr().expose_provenance();
        let device_addr = device.pinned_addr(&memory);
        Self {
            addr,
            bytes: memory.len() as u64,
            device_addr,
            pageable_because: because.or(asked_for),
            memory: Some(Arc::new(memory)),
            device: device.clone(),
            may_be_in_use: AtomicBool::new(false),
        }
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Its address in this process; to pass it on, use [`lend`](Self::lend).
    #[must_use]
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// Its address for other libraries, valid as long as the buffer. A GPU may copy to and from page-locked
    /// memory after the host continues. So dropping a lent, page-locked buffer waits for the device.
    #[must_use]
    pub fn lend(&self) -> usize {
        if self.is_pinned() {
            self.may_be_in_use.store(true, Ordering::Release);
        }
        self.addr
    }

    /// Whether it is page-locked for a GPU.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.device_addr.is_some()
    }

    /// Why it is not page-locked; `None` if it is.
    #[must_use]
    pub fn pageable_because(&self) -> Option<&str> {
        if self.is_pinned() { None } else { self.pageable_because.as_deref() }
    }

    pub(super) fn device_addr(&self) -> Option<u64> {
        self.device_addr
    }

    /// The bytes; `None` during a copy.
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        self.memory.as_mut().and_then(Arc::get_mut).map(|memory| &mut **memory)
    }

    /// The memory; a running copy keeps it.
    #[must_use]
    pub fn memory(&self) -> Option<Arc<HostBuffer>> {
        self.memory.clone()
    }

    pub(super) fn retain_for_view(self: &Arc<Self>) -> Arc<Self> {
        self.may_be_in_use.store(true, Ordering::Release);
        Arc::clone(self)
    }
}

/// How to allocate under these switches, and the switch that applied.
fn switched(pin: BufferPin, switches: Switches) -> (BufferPin, Option<String>) {
    match switches.pin_off {
        Some(name) if pin != BufferPin::Never => (BufferPin::Never, Some(format!("{name}=1 is set"))),
        _ => (pin, None),
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        // A forked child has no such memory.
        if self.device.driver().check_process().is_err() {
            return;
        }
        let may_be_in_use = *self.may_be_in_use.get_mut();
        if may_be_in_use {
            self.device.free_later(Box::new(memory));
        } else {
            drop(memory);
        }
        // Page-locked memory without views stays cached, since unlocking waits.
        if may_be_in_use || !self.is_pinned() {
            self.device.release_surplus(self.bytes);
        }
    }
}
