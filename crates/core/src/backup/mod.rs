//! Backup storage for sleeps: host memory ([`HostBackups`]), raw or as codes, and a [`Disk`] behind it; by trait others.
//!
//! A sleep asks for the footprint of each extent ([`Backups::plan`]), gets buffers for all of them at once, and
//! saves into these.
//!
//! Promises of a storage:
//! - **Announced.** [`Backups::buffers`] gets all footprints of a sleep at once. It may prepare them one after
//!   another, while copies to the first run.
//! - **Digests** are of what a load should bring back: of the stored bytes, or those that the caller knows.
//! - **Owned.** A copy owns the buffer that it writes, and shares the one that it reads.
//! - **Released.** Dropping a buffer returns it without waiting.

mod buffers;
mod compress;
mod disk;
mod footprint;
mod host;
mod on_disk;

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

pub use self::compress::{Compress, UnknownCompress};
pub use self::disk::{Disk, DiskInfo, OnDisk};
pub use self::footprint::{Extent, Footprint};
pub use self::host::HostBackups;
use crate::digest::Digest;
use crate::driver::{
    CopyPart, DriverError, DriverErrorKind, HostBuffer, Op, Pending, Result, Scratch, StreamId,
};

/// Storage for backups of one device's memory.
///
/// ```
/// use std::sync::Arc;
///
/// use poorwill::backup::{BackupBuffer, Backups, HostBackups, Footprint};
/// use poorwill::driver::{self, Pending};
/// use poorwill::{Device, Pool, PoolConfig};
///
/// /// At most so many bytes of host memory.
/// #[derive(Debug)]
/// struct Limited(HostBackups, u64);
///
/// impl Backups for Limited {
///     fn buffers(&self, footprints: &[Footprint]) -> driver::Result<Vec<Pending<BackupBuffer>>> {
///         self.0.buffers(footprints)
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
    /// Whether [`Self::plan`] looks at the bytes. If not, nothing need be mapped for it.
    fn measures(&self) -> bool {
        false
    }

    /// How the extents would be stored now. Where it measures, their live granules are mapped, and stay so until it returns. The
    /// storage may measure their bytes by work on `stream`. A footprint fits as long as they do not change.
    ///
    /// # Errors
    /// Of the device.
    fn plan(&self, stream: StreamId, extents: &[Extent<'_>]) -> Result<Vec<Footprint>> {
        let _ = stream;
        Ok(extents.iter().map(|extent| Footprint::raw(extent.range.bytes)).collect())
    }

    /// Buffers for these footprints; each can be awaited alone.
    ///
    /// # Errors
    /// `OutOfHostMemory` (for any storage) if they are known not to fit, here or at `wait`.
    fn buffers(&self, footprints: &[Footprint]) -> Result<Vec<Pending<BackupBuffer>>>;

    /// Makes memory in the background for raw buffers of these sizes. It only saves time.
    fn make_ahead(&self, sizes: &[u64]) {
        let _ = sizes;
    }

    /// Releases unused memory. May wait for device work.
    ///
    /// # Errors
    /// Of the machine.
    fn trim(&self) -> Result<()>;

    /// Host memory held, used or not.
    fn held_bytes(&self) -> u64;

    /// The disk that its buffers can be [spilled](StoredBytes::spill) to, if any.
    fn disk(&self) -> Option<DiskInfo> {
        None
    }

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
/// use poorwill::backup::{Backups, HostBackups, Footprint, StoredBytes};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let backups = HostBackups::new(Device::open(&"host:64MiB".parse()?)?.driver());
/// for buffer in backups.buffers(&[Footprint::raw(4096)])? {
///     let buffer = buffer.wait()?;
///     let stored: &dyn StoredBytes = &*buffer;
///     println!("digest {} of {} bytes", stored.digest(0, 4096)?, stored.bytes());
/// }
/// # Ok(())
/// # }
/// ```
pub trait StoredBytes: Send + Sync + fmt::Debug {
    /// Bytes that it takes of the storage.
    fn bytes(&self) -> u64;

    /// The part of these that is on disk: all, or none.
    fn disk_bytes(&self) -> u64 {
        0
    }

    /// Whether no copy reads it, so that it can be written.
    fn is_free(&self) -> bool;

    /// Whether the granules numbered `fresh` can be saved as `footprint` says, keeping what is stored of the rest.
    fn fits(&self, footprint: &Footprint, fresh: &[usize]) -> bool {
        let _ = (footprint, fresh);
        true
    }

    /// Queues copies of whole granules, given with their raw offsets in the extent. `wait` returns their digests, in
    /// order of the parts. `None`: the granule changed meanwhile and no longer fits, so nothing is stored of it. Call
    /// it only for a footprint that [`Self::fits`].
    ///
    /// `digests` are those of the granules on the device, in the same order, if nothing writes to them until the copy has
    /// ended. A storage may return these. Without, it returns digests of what it has stored.
    ///
    /// # Errors
    /// As [`Driver::save`](crate::Driver::save); the buffer is then released.
    fn save(
        self: Box<Self>,
        stream: StreamId,
        footprint: &Footprint,
        parts: &[CopyPart],
        digests: Option<&[Digest]>,
    ) -> Result<Pending<(BackupBuffer, Vec<Option<Digest>>)>>;

    /// Queues copies to the device. `wait` returns a digest for each granule, in order of the parts, where the
    /// copy computed one of what it wrote. Codes may pass through `scratch`.
    ///
    /// # Errors
    /// As [`Driver::copy_to_device`](crate::Driver::copy_to_device).
    fn load(
        &self,
        stream: StreamId,
        parts: &[CopyPart],
        scratch: Option<Scratch>,
    ) -> Result<Pending<Vec<Option<Digest>>>>;

    /// Bytes that a load of these parts reads.
    fn read_bytes(&self, parts: &[CopyPart]) -> u64 {
        parts.iter().map(|part| part.device.bytes).sum()
    }

    /// Digest of the bytes that a load would bring back now.
    ///
    /// # Errors
    /// `InvalidArgument` outside the buffer; errors of the storage.
    fn digest(&self, offset: u64, bytes: u64) -> Result<Digest>;

    /// Copies raw bytes from `offset` on into `into`: those that a load would bring back. Waits for a disk.
    ///
    /// # Errors
    /// `InvalidArgument` outside the buffer or of granules that are not stored; errors of the storage. `Unsupported` of
    /// a storage that does not implement it.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let reason = format!(
            "this storage does not read backups in host memory, here {} bytes at {offset}; wake the tag, and read the device",
            into.len()
        );
        Err(DriverError::new(Op::CopyToHost, DriverErrorKind::Unsupported { reason }))
    }

    /// The host memory that has the extent's raw bytes, at their offsets. While it is shared, the buffer is not
    /// [free](Self::is_free). `None` where they are stored otherwise.
    fn in_host_memory(&self) -> Option<Arc<HostBuffer>> {
        None
    }

    /// Queues a copy on disk: the same stored bytes, in a buffer that takes no host memory. `None` where the storage has
    /// no disk, or the bytes are there.
    ///
    /// # Errors
    /// At `wait`: of the disk. This buffer stays as it is.
    fn spill(&self) -> Option<Pending<BackupBuffer>> {
        None
    }

    /// The most raw bytes of the extent that one [`Self::fetch`] brings back, in whole granules.
    fn fetch_bytes_max(&self) -> u64 {
        u64::MAX
    }

    /// Queues a copy in host memory of these raw bytes, whole granules, for loads of them that need not wait for the disk.
    /// `None` where loads do not.
    ///
    /// # Errors
    /// `OutOfHostMemory` at once; of the disk at `wait`.
    fn fetch(&self, raw: Range<u64>) -> Option<Result<Pending<BackupBuffer>>> {
        let _ = raw;
        None
    }
}

/// A buffer of any storage.
///
/// ```
/// use poorwill::Device;
/// use poorwill::backup::{Backups, HostBackups, Footprint};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let backups = HostBackups::new(Device::open(&"host:64MiB".parse()?)?.driver());
/// let footprints = [4096, 8192].map(Footprint::raw);
/// for (pending, footprint) in backups.buffers(&footprints)?.into_iter().zip(&footprints) {
///     let buffer = pending.wait()?;
///     assert_eq!(buffer.bytes(), footprint.bytes());
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
    pub fn save(
        self,
        stream: StreamId,
        footprint: &Footprint,
        parts: &[CopyPart],
        digests: Option<&[Digest]>,
    ) -> Result<Pending<(Self, Vec<Option<Digest>>)>> {
        self.0.save(stream, footprint, parts, digests)
    }
}

impl Deref for BackupBuffer {
    type Target = dyn StoredBytes;
    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}
