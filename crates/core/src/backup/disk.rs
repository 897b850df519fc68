//! Backups on disk, for what host memory cannot hold.
//!
//! [`HostBackups`](super::HostBackups) with a [`Disk`] can *spill* a buffer: its bytes are written there as they are
//! stored, raw or as codes. Then its host memory is released. A wake *fetches* them back into host memory, some
//! extents ahead of its copies.
//!
//! Promise: spilling that fails changes nothing. What comes back from a disk is compared with the digests of what was
//! stored, as any backup is.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::Serialize;

use super::footprint::{Layout, granules};
use super::host::HostBackupBuffer;
use super::{BackupBuffer, Footprint, StoredBytes};
use crate::digest::Digest;
use crate::driver::{CopyPart, Driver, DriverError, HostBuffer, Op, Pending, Result, Scratch, StreamId};

/// Granules that are read at a time.
const READS_MAX: usize = 8;

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

/// A buffer whose bytes are on disk. It is read only: a change needs a buffer in host memory again.
#[derive(Debug)]
pub(super) struct DiskBackupBuffer {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) stored: Arc<dyn OnDisk>,
    pub(super) layout: Layout,
}

impl StoredBytes for DiskBackupBuffer {
    fn bytes(&self) -> u64 {
        self.stored.bytes()
    }

    fn disk_bytes(&self) -> u64 {
        self.stored.bytes()
    }

    fn is_free(&self) -> bool {
        Arc::strong_count(&self.stored) == 1
    }

    fn fits(&self, _: &Footprint, _: &[usize]) -> bool {
        false
    }

    fn save(
        self: Box<Self>,
        _: StreamId,
        _: &Footprint,
        _: &[CopyPart],
        _: Option<&[Digest]>,
    ) -> Result<Pending<(BackupBuffer, Vec<Option<Digest>>)>> {
        Err(DriverError::invalid(Op::Save, "a backup on disk is not overwritten; save to a new buffer"))
    }

    fn load(
        &self,
        stream: StreamId,
        parts: &[CopyPart],
        scratch: Option<Scratch>,
    ) -> Result<Pending<Vec<Option<Digest>>>> {
        self.fetched()?.wait()?.load(stream, parts, scratch)
    }

    fn read_bytes(&self, parts: &[CopyPart]) -> u64 {
        self.layout.read_bytes(granules(parts, self.driver.info().granule_bytes))
    }

    fn digest(&self, offset: u64, bytes: u64) -> Result<Digest> {
        let granule_bytes = self.driver.info().granule_bytes;
        let place = self.layout.place(self.bytes(), offset, bytes, granule_bytes)?;
        self.layout.digest(&self.queue_read(&place)?.wait()?, granule_bytes)
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let granule_bytes = self.driver.info().granule_bytes;
        let mut rest = into;
        let pieces = self.layout.pieces(self.bytes(), offset, rest.len(), granule_bytes)?;
        let (mut next, mut reads) = (pieces.iter(), VecDeque::new());
        for piece in &pieces {
            while reads.len() < READS_MAX
                && let Some(ahead) = next.next()
            {
                reads.push_back(self.queue_read(&ahead.place)?);
            }
            let Some(read) = reads.pop_front() else { break };
            let (part, behind) = rest.split_at_mut(piece.bytes);
            piece.copy(&read.wait()?, part, &self.layout, granule_bytes)?;
            rest = behind;
        }
        Ok(())
    }

    fn fetch(&self) -> Option<Result<Pending<BackupBuffer>>> {
        Some(self.fetched())
    }
}

impl DiskBackupBuffer {
    fn queue_read(&self, place: &Range<u64>) -> Result<Pending<HostBuffer>> {
        // Not of the driver's host memory: that may be what is lacking.
        let bytes = usize::try_from(place.end - place.start).map_err(|_| {
            DriverError::invalid(Op::DiskRead, format!("{place:?} is more than can be addressed"))
        })?;
        Ok(self.stored.read(place.start, HostBuffer::from(vec![0; bytes])))
    }

    fn fetched(&self) -> Result<Pending<BackupBuffer>> {
        let into = self.driver.host_alloc(self.bytes())?;
        let (driver, layout, stored) =
            (Arc::clone(&self.driver), self.layout.clone(), Arc::clone(&self.stored));
        Ok(self.stored.read(0, into).then(move |buffer| {
            drop(stored); // Its space was in use until now.
            Ok(BackupBuffer::new(HostBackupBuffer { driver, buffer: Arc::new(buffer?), layout, disk: None }))
        }))
    }
}
