//! The disk behind host memory, by trait.
//!
//! [`HostBackups`](super::HostBackups) with a [`Disk`] can *spill* a buffer: its bytes are written there as they are
//! stored, raw or as codes. Then its host memory is released. A wake *fetches* them back into host memory, some
//! extents ahead of its copies.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use crate::driver::{HostBuffer, Pending};

/// A file system that holds bytes of this process.
///
/// ```no_run
/// use poorwill::backup::Disk;
/// use poorwill::disk::{DiskConfig, FileDisk};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let disk = FileDisk::open(&DiskConfig::in_folder("/mnt/nvme"))?;
/// println!("{} bytes used, by {}", disk.info().used_bytes, disk.info().io);
/// # Ok(())
/// # }
/// ```
pub trait Disk: Send + Sync + fmt::Debug {
    /// Queues a copy of these bytes. Several run at a time.
    ///
    /// # Errors
    /// `OutOfDisk` here or at `wait`; what the operating system reports.
    fn write(&self, bytes: Arc<HostBuffer>) -> Pending<Arc<dyn OnDisk>>;

    /// How it works, and what it holds.
    fn info(&self) -> DiskInfo;
}

/// Bytes on a disk. Dropping it gives their space back, without waiting.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use poorwill::HostBuffer;
/// use poorwill::backup::{Disk, OnDisk};
/// use poorwill::disk::{DiskConfig, FileDisk};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let disk = FileDisk::open(&DiskConfig::in_folder("/mnt/nvme"))?;
/// let there = disk.write(Arc::new(HostBuffer::from(vec![7; 4096]))).wait()?;
/// assert_eq!(*there.read(0, HostBuffer::from(vec![0; 512])).wait()?, [7; 512]);
/// # Ok(())
/// # }
/// ```
pub trait OnDisk: Send + Sync + fmt::Debug {
    /// How many.
    fn bytes(&self) -> u64;

    /// Queues a read of as many bytes as `into` has, from byte `offset` on.
    ///
    /// # Errors
    /// `InvalidArgument` beyond the end; what the operating system reports. Bytes that are missing are an error, also
    /// where a file was truncated.
    fn read(&self, offset: u64, into: HostBuffer) -> Pending<HostBuffer>;
}

/// How a disk works, and what it holds.
///
/// ```
/// use poorwill::backup::DiskInfo;
///
/// let info = DiskInfo::new("io_uring");
/// assert_eq!((info.used_bytes, info.is_direct), (0, true));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DiskInfo {
    /// In use.
    pub used_bytes: u64,
    /// Its configured limit, if any.
    pub limit_bytes: Option<u64>,
    /// How bytes are read and written: `io_uring` or `threads`.
    pub io: &'static str,
    /// Why not by `io_uring`, if so.
    pub io_because: Option<String>,
    /// Whether transfers bypass the page cache.
    pub is_direct: bool,
    /// Why they do not, if so.
    pub direct_because: Option<String>,
}

impl DiskInfo {
    /// An empty disk without a limit, bypassing the page cache.
    #[must_use]
    pub fn new(io: &'static str) -> Self {
        Self { used_bytes: 0, limit_bytes: None, io, io_because: None, is_direct: true, direct_because: None }
    }
}
