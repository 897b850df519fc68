//! Device access to host memory.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use poorwill_core::{ByteSize, DriverError, DriverErrorKind, Op};

use super::{Buffer, Switches};
use crate::open::{Device, HostViewGuard};

/// Host memory as a device sees it, without a copy. The caller orders accesses of host and device.
///
/// ```
/// use std::sync::Arc;
///
/// use poorwill::Device;
/// use poorwill::offload::{Buffer, BufferPin, Switches, View};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::open(&"host:64MiB".parse()?)?;
/// let buffer = Arc::new(Buffer::new(&device, 4096, BufferPin::Auto, Switches::default())?);
/// let view = View::of(&buffer, Switches::default())?;
/// println!("kernels read {} bytes at {:#x}", view.bytes(), view.device_addr());
/// # Ok(())
/// # }
/// ```
pub struct View {
    device: Device,
    device_addr: u64,
    bytes: u64,
    keep_alive: Option<KeepAlive>,
}

enum KeepAlive {
    /// Its own drop waits for the device.
    Buffer {
        _buffer: Arc<Buffer>,
    },
    Foreign {
        view: HostViewGuard,
        keep: Box<dyn Any + Send + Sync>,
    },
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View")
            .field("device", self.device.spec())
            .field("device_addr", &self.device_addr)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl View {
    /// A view of a buffer.
    ///
    /// # Errors
    /// `Unsupported` for a buffer that the device does not see, or when `switches` disable views;
    /// `WrongProcess` in a forked child.
    pub fn of(buffer: &Arc<Buffer>, switches: Switches) -> Result<Self, DriverError> {
        check(buffer.device(), switches, buffer.bytes())?;
        let device = buffer.device().clone();
        let device_addr = match (buffer.device_addr(), device.sees_all_memory()) {
            (Some(device_addr), _) => device_addr,
            (None, true) => buffer.addr() as u64,
            (None, false) => {
                let size = ByteSize(buffer.bytes());
                let because = buffer.pageable_because().unwrap_or("nothing says why");
                return Err(unsupported(format!(
                    "a buffer of {size} is pageable ({because}), so {} does not see it; take it page-locked, or copy it \
                     with stage_in",
                    device.spec()
                )));
            }
        };
        let (bytes, buffer) = (buffer.bytes(), buffer.retain_for_view());
        Ok(Self { device, device_addr, bytes, keep_alive: Some(KeepAlive::Buffer { _buffer: buffer }) })
    }

    /// A view of foreign memory, which `keep` keeps alive. Page-locks the memory while views exist, unless
    /// its owner has.
    ///
    /// # Errors
    /// - `InvalidArgument` for zero bytes, and for memory that shares a page with what other code has page-locked.
    /// - `Unsupported` when the memory cannot be page-locked, or `switches` disable that or views.
    /// - `WrongProcess` in a forked child.
    pub fn over(
        device: &Device,
        memory: Range<usize>,
        keep: Box<dyn Any + Send + Sync>,
        switches: Switches,
    ) -> Result<Self, DriverError> {
        let bytes = memory.len() as u64;
        check(device, switches, bytes)?;
        if memory.is_empty() {
            return Err(DriverError::invalid(Op::HostRegister, "a view of no bytes was requested"));
        }
        device.free_deferred();
        let may_lock = switches.pin_off.is_none();
        let Some((device_addr, view)) = device.host_view(memory, may_lock)? else {
            let name = switches.pin_off.unwrap_or_default();
            return Err(unsupported(format!(
                "{} of pageable memory would have to be page-locked for a view, and {name}=1 is set; unset it, or \
                 copy the bytes with stage_in",
                ByteSize(bytes)
            )));
        };
        let keep_alive = Some(KeepAlive::Foreign { view, keep });
        Ok(Self { device: device.clone(), device_addr, bytes, keep_alive })
    }

    /// The device that sees it.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Its device address.
    #[must_use]
    pub fn device_addr(&self) -> u64 {
        self.device_addr
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for View {
    fn drop(&mut self) {
        let Some(KeepAlive::Foreign { view, keep }) = self.keep_alive.take() else { return };
        if self.device.driver().check_process().is_ok() {
            // The device's access first, then the memory.
            self.device.free_later(Box::new((view, keep)));
        } else {
            std::mem::forget(keep);
        }
    }
}

fn check(device: &Device, switches: Switches, bytes: u64) -> Result<(), DriverError> {
    device.driver().check_process()?;
    let Some(name) = switches.uva_off else { return Ok(()) };
    let size = ByteSize(bytes);
    Err(unsupported(format!(
        "{size} of host memory cannot be read in place: {name}=1 is set; unset it, or copy the bytes with \
         stage_in"
    )))
}

fn unsupported(reason: String) -> DriverError {
    DriverError::new(Op::HostRegister, DriverErrorKind::Unsupported { reason })
}
