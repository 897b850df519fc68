//! Buffers.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use poorwill_core::{DriverError, HostBuffer, Pending};
use poorwill_driver::{BufferMade, BufferPin};

use super::Switches;
use crate::open::Device;

/// Host memory of exactly the size that was asked for, of a device's host arena. Given back when it and all views of
/// it are gone.
pub struct Buffer {
    device: Device,
    /// There until it is dropped. In a forked child not even its length may be asked for.
    memory: Option<Arc<HostBuffer>>,
    addr: usize,
    bytes: u64,
    device_addr: Option<u64>,
    pageable_because: Option<String>,
    /// Whether the device may have been shown it, by us or by whoever it was lent to.
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
    /// Takes memory. A switch that turns page-locking off wins over `pin`: the buffer is pageable then, and says which
    /// it was. What the bytes are is not specified.
    ///
    /// # Errors
    /// `OutOfHostMemory` with what is asked, held and allowed; `Unsupported` for [`BufferPin::Always`] where the memory
    /// cannot be page-locked; `InvalidArgument` for no bytes.
    pub fn new(device: &Device, bytes: u64, pin: BufferPin, switches: Switches) -> Result<Self, DriverError> {
        device.deferred().free_deferred(device);
        let (pin, switched_off) = switched(pin, switches);
        let (memory, because) = device.host_buffer(bytes, pin)?;
        Ok(Self::of(device, memory, pin, switched_off.or(because)))
    }

    /// Several at once, as from [`Buffer::new`] each. All of them are taken, or refused, before this returns, and
    /// made meanwhile by other threads; each can be waited for by itself. Those that were not waited for are given
    /// back when they are dropped.
    ///
    /// # Errors
    /// `OutOfHostMemory` and `InvalidArgument` as for [`Buffer::new`], which leave nothing behind; at `wait`, what
    /// else it says.
    pub fn new_all(
        device: &Device,
        sizes: &[u64],
        pin: BufferPin,
        switches: Switches,
    ) -> Result<Vec<Pending<Self>>, DriverError> {
        device.deferred().free_deferred(device);
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

    /// Of memory of the device's that was asked for so, and that is not page-locked because of this.
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

    /// Whose it is.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where it begins in this process. Who has others use that lends it.
    #[must_use]
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// Where it begins, for others to use as long as they keep this. A GPU copies to and from page-locked memory while
    /// the host goes on, whoever asks for that: so such memory is given back as if there had been a view of it.
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

    /// Why it is not page-locked, if it is not.
    #[must_use]
    pub fn pageable_because(&self) -> Option<&str> {
        if self.is_pinned() { None } else { self.pageable_because.as_deref() }
    }

    /// Where the device sees it, if it is page-locked.
    pub(super) fn device_addr(&self) -> Option<u64> {
        self.device_addr
    }

    /// The bytes, for writing, unless a copy has them.
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        self.memory.as_mut().and_then(Arc::get_mut).map(|memory| &mut **memory)
    }

    /// The memory, for copies to the device; see [`copy_to_device`](poorwill_core::Driver::copy_to_device). It is
    /// theirs as long as they run, whatever becomes of this.
    #[must_use]
    pub fn memory(&self) -> Option<Arc<HostBuffer>> {
        self.memory.clone()
    }

    pub(super) fn retain_for_view(self: &Arc<Self>) -> Arc<Self> {
        self.may_be_in_use.store(true, Ordering::Release);
        Arc::clone(self)
    }
}

/// How memory is asked for when some of it is turned off, and what turned it off.
fn switched(pin: BufferPin, switches: Switches) -> (BufferPin, Option<String>) {
    match switches.pin_off {
        Some(name) if pin != BufferPin::Never => (BufferPin::Never, Some(format!("{name}=1 is set"))),
        _ => (pin, None),
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        // In a forked child it is not there, and dropping it does nothing.
        if self.device.driver().check_process().is_err() {
            return;
        }
        let may_be_in_use = *self.may_be_in_use.get_mut();
        if may_be_in_use {
            self.device.deferred().free(&self.device, Box::new(memory));
        } else {
            drop(memory);
        }
        // Weights are not asked for again, as backups are. To unlock memory is to wait.
        if may_be_in_use || !self.is_pinned() {
            self.device.release_surplus(self.bytes);
        }
    }
}
