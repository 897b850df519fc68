//! Backup storage for sleeps: host memory ([`HostBackups`]), or by trait files, other GPUs, compression.
//!
//! Promises of a storage:
//! - **Announced.** [`Backups::buffers`] gets all sizes of a sleep at once. It may prepare them one after
//!   another, while copies to the first run.
//! - **Digests of stored bytes**, never of the device's.
//! - **Owned.** A copy owns the buffer that it writes, and shares the one that it reads.
//! - **Released.** Dropping a buffer returns it without waiting.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use crate::digest::Digest;
use crate::driver::{
    CopyPart, Driver, DriverError, DriverErrorKind, HostBuffer, Op, Pending, Result, StreamId,
};

/// Storage for backups of one device's memory.
///
/// ```
/// use std::sync::Arc;
///
/// use poorwill::backup::{BackupBuffer, Backups, HostBackups};
/// use poorwill::driver::{self, Pending};
/// use poorwill::{Device, Pool, PoolConfig};
///
/// /// At most so many bytes of host memory.
/// #[derive(Debug)]
/// struct Limited(HostBackups, u64);
///
/// impl Backups for Limited {
///     fn buffers(&self, sizes: &[u64]) -> driver::Result<Vec<Pending<BackupBuffer>>> {
///         self.0.buffers(sizes)
///     }
///     fn trim(&self) -> driver::Result<()> {
///         self.0.trim()
///     }
///     fn held_bytes(&self) -> u64 {
///         self.0.held_bytes()
///     }
///     fn allows(&self, bytes: u64) -> bool {
///         self.held_bytes().saturating_add(bytes) <= self.1
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let driver = Device::open(&"host:64MiB".parse()?)?.driver();
/// let backups = Limited(HostBackups::new(Arc::clone(&driver)), 16 << 20);
/// let pool = Pool::with_backups(driver, PoolConfig::default(), Arc::new(backups))?;
/// # drop(pool);
/// # Ok(())
/// # }
/// ```
pub trait Backups: Send + Sync + fmt::Debug {
    /// Buffers of these sizes, in bytes; each can be awaited alone.
    ///
    /// # Errors
    /// `OutOfHostMemory` (for any storage) if they are known not to fit, here or at `wait`.
    fn buffers(&self, sizes: &[u64]) -> Result<Vec<Pending<BackupBuffer>>>;

    /// Releases unused memory. May wait for device work.
    ///
    /// # Errors
    /// Of the machine.
    fn trim(&self) -> Result<()>;

    /// Host memory held, used or not.
    fn held_bytes(&self) -> u64;

    /// Whether the storage's own limit, not the machine's memory, allows `bytes` more.
    fn allows(&self, bytes: u64) -> bool {
        let _ = bytes;
        true
    }
}

/// Stored bytes of one extent of device memory, by granule. Offsets are in bytes.
///
/// ```
/// use poorwill::Device;
/// use poorwill::backup::{Backups, HostBackups, StoredBytes};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let backups = HostBackups::new(Device::open(&"host:64MiB".parse()?)?.driver());
/// for buffer in backups.buffers(&[4096])? {
///     let buffer = buffer.wait()?;
///     let stored: &dyn StoredBytes = &*buffer;
///     println!("digest {} of {} bytes", stored.digest(0, 4096)?, stored.bytes());
/// }
/// # Ok(())
/// # }
/// ```
pub trait StoredBytes: Send + Sync + fmt::Debug {
    /// Size.
    fn bytes(&self) -> u64;

    /// Whether no copy reads it, so that it can be written.
    fn is_free(&self) -> bool;

    /// Queues copies of whole granules to the parts' offsets, and digests of the stored bytes, in order of
    /// the parts.
    ///
    /// # Errors
    /// As [`Driver::save`]; the buffer is then released.
    fn save(
        self: Box<Self>,
        stream: StreamId,
        parts: &[CopyPart],
    ) -> Result<Pending<(BackupBuffer, Vec<Digest>)>>;

    /// Queues copies to the device.
    ///
    /// # Errors
    /// As [`Driver::copy_to_device`].
    fn load(&self, stream: StreamId, parts: &[CopyPart]) -> Result<Pending<()>>;

    /// Digest of the bytes stored now.
    ///
    /// # Errors
    /// `InvalidArgument` outside the buffer; errors of the storage.
    fn digest(&self, offset: u64, bytes: u64) -> Result<Digest>;
}

/// A buffer of any storage.
///
/// ```
/// use poorwill::Device;
/// use poorwill::backup::{Backups, HostBackups};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let backups = HostBackups::new(Device::open(&"host:64MiB".parse()?)?.driver());
/// for (pending, bytes) in backups.buffers(&[4096, 8192])?.into_iter().zip([4096, 8192]) {
///     let buffer = pending.wait()?;
///     assert_eq!(buffer.bytes(), bytes);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct BackupBuffer(Box<dyn StoredBytes>);

impl BackupBuffer {
    /// Wraps `stored`.
    #[must_use]
    pub fn new(stored: impl StoredBytes + 'static) -> Self {
        Self(Box::new(stored))
    }

    /// See [`StoredBytes::save`].
    ///
    /// # Errors
    /// As there.
    pub fn save(self, stream: StreamId, parts: &[CopyPart]) -> Result<Pending<(Self, Vec<Digest>)>> {
        self.0.save(stream, parts)
    }
}

impl Deref for BackupBuffer {
    type Target = dyn StoredBytes;
    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

/// Backups in the driver's host memory, pinned where possible.
///
/// ```
/// use poorwill::Device;
/// use poorwill::backup::{Backups, HostBackups};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let backups = HostBackups::new(Device::open(&"host:64MiB".parse()?)?.driver());
/// assert_eq!(backups.held_bytes(), 0);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct HostBackups {
    driver: Arc<dyn Driver>,
}

impl HostBackups {
    /// In host memory of `driver`.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>) -> Self {
        Self { driver }
    }
}

impl Backups for HostBackups {
    fn buffers(&self, sizes: &[u64]) -> Result<Vec<Pending<BackupBuffer>>> {
        let buffers = self.driver.host_alloc_all(sizes)?;
        let buffer = |buffer: Pending<HostBuffer>| {
            let driver = Arc::clone(&self.driver);
            buffer
                .then(|buffer| Ok(BackupBuffer::new(HostBackupBuffer { driver, buffer: Arc::new(buffer?) })))
        };
        Ok(buffers.into_iter().map(buffer).collect())
    }

    fn trim(&self) -> Result<()> {
        self.driver.host_trim()
    }

    fn held_bytes(&self) -> u64 {
        self.driver.host_memory().held_bytes
    }

    fn allows(&self, bytes: u64) -> bool {
        let info = self.driver.host_memory();
        info.limit_bytes.is_none_or(|limit| info.used_bytes.saturating_add(bytes) <= limit)
    }
}

#[derive(Debug)]
struct HostBackupBuffer {
    driver: Arc<dyn Driver>,
    buffer: Arc<HostBuffer>,
}

impl StoredBytes for HostBackupBuffer {
    fn bytes(&self) -> u64 {
        self.buffer.len() as u64
    }

    fn is_free(&self) -> bool {
        Arc::strong_count(&self.buffer) == 1
    }

    fn save(
        self: Box<Self>,
        stream: StreamId,
        parts: &[CopyPart],
    ) -> Result<Pending<(BackupBuffer, Vec<Digest>)>> {
        let Self { driver, buffer } = *self;
        let buffer = Arc::try_unwrap(buffer)
            .map_err(|_| DriverError::invalid(Op::Save, "the buffer is being read by an earlier copy"))?;
        let saved = driver.save(stream, buffer, parts)?;
        Ok(saved.then(|saved| {
            let (buffer, digests) = saved?;
            Ok((BackupBuffer::new(Self { driver, buffer: Arc::new(buffer) }), digests))
        }))
    }

    fn load(&self, stream: StreamId, parts: &[CopyPart]) -> Result<Pending<()>> {
        self.driver.copy_to_device(stream, Arc::clone(&self.buffer), parts)
    }

    fn digest(&self, offset: u64, bytes: u64) -> Result<Digest> {
        let stored = || {
            let start = usize::try_from(offset).ok()?;
            self.buffer.get(start..start.checked_add(usize::try_from(bytes).ok()?)?)
        };
        let outside = || {
            let reason = format!("{bytes} bytes at {offset} leave a buffer of {}", self.buffer.len());
            DriverError::new(Op::Digest, DriverErrorKind::InvalidArgument { reason })
        };
        stored().map(Digest::of).ok_or_else(outside)
    }
}
