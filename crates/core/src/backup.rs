//! Where a sleep keeps bytes: the trait behind which backups sit.
//!
//! A [`Backups`] hands out [`BackupBuffer`]s, one for each piece of device memory that is to be backed up. A buffer takes
//! granules from the device, says which bytes it has stored by their digests, and gives them back. The plan of a
//! sleep knows nothing else of it, so host memory ([`HostBackups`]), files, other GPUs and compression look alike.
//!
//! What a store promises:
//! - **Announced.** [`Backups::buffers`] is told of everything that a sleep will need at once, and may make it ready
//!   piece by piece, by several threads, while the first pieces are copied already.
//! - **Digests of what is stored.** They are computed from the stored bytes, never from those on the device.
//! - **Owned.** A buffer that is being written belongs to the copy until that has ended; one that is being read is
//!   shared with the copy.
//! - **Given back.** A buffer that is dropped is at the store's disposal again, without a call that waits.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use crate::digest::Digest;
use crate::driver::{
    CopyPart, Driver, DriverError, DriverErrorKind, HostBuffer, Op, Pending, Result, StreamId,
};

/// A place for backups of one device's memory.
pub trait Backups: Send + Sync + fmt::Debug {
    /// Rooms of these sizes, in bytes, each to be waited for by itself.
    ///
    /// # Errors
    /// `OutOfHostMemory` (also for stores of other kinds) when it is known that not all of it is to be had; the
    /// same at `wait`.
    fn buffers(&self, sizes: &[u64]) -> Result<Vec<Pending<BackupBuffer>>>;

    /// Gives back what no buffer uses. May wait for work on the device.
    ///
    /// # Errors
    /// What the machine says.
    fn trim(&self) -> Result<()>;

    /// Host memory that it holds, in use or not, in bytes.
    fn held_bytes(&self) -> u64;

    /// Whether its own limit leaves buffer for so many bytes more, whatever the machine has. Where it does not, nobody else
    /// need make buffer.
    fn allows(&self, bytes: u64) -> bool {
        let _ = bytes;
        true
    }
}

/// BackupBuffer for the copy of one piece of device memory. Offsets are in bytes from its beginning.
pub trait StoredBytes: Send + Sync + fmt::Debug {
    /// Its size.
    fn bytes(&self) -> u64;

    /// Whether nothing reads it, so that it can be written.
    fn is_free(&self) -> bool;

    /// Queues copies of whole granules from the device to where the parts say, and digests of what is stored then;
    /// `wait` gives the buffer back, with a digest for each granule in the order of the parts.
    ///
    /// # Errors
    /// As for [`Driver::save`]. A buffer whose copy failed is given back to its store.
    fn save(
        self: Box<Self>,
        stream: StreamId,
        parts: &[CopyPart],
    ) -> Result<Pending<(BackupBuffer, Vec<Digest>)>>;

    /// Queues copies back to the device.
    ///
    /// # Errors
    /// As for [`Driver::copy_to_device`].
    fn load(&self, stream: StreamId, parts: &[CopyPart]) -> Result<Pending<()>>;

    /// Digest of `bytes` at `offset` as they are stored now.
    ///
    /// # Errors
    /// `InvalidArgument` when that is not inside; what the store says.
    fn digest(&self, offset: u64, bytes: u64) -> Result<Digest>;
}

/// A buffer of any store. Given back when dropped.
#[derive(Debug)]
pub struct BackupBuffer(Box<dyn StoredBytes>);

impl BackupBuffer {
    /// A buffer over `stored`.
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

/// Backups in host memory, as the device's driver has it: pinned where the machine can.
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
