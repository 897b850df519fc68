//! The file of all host devices of a process: their physical memory.
//!
//! One descriptor serves any number of devices. An extent belongs to one device, and its offsets are never used again.
//! The file goes with the last device. A forked child has a file of its own.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use poorwill_core::per_process::SharedInProcess;
use rustix::fs::{self, FallocateFlags, MemfdFlags, SeekFrom};
use rustix::io::{Errno, pread, pwrite, retry_on_intr};
use rustix::process::{Resource, getrlimit};

/// Logical size of a sparse file. At 10 GiB/s of creation it lasts thirteen years.
const FILE_BYTES: u64 = 1 << 62;

static FILE: SharedInProcess<DeviceFile> = SharedInProcess::new();

#[derive(Debug)]
pub(super) struct DeviceFile {
    fd: OwnedFd,
    next_offset: AtomicU64,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl DeviceFile {
    /// That of this process.
    pub(super) fn share() -> io::Result<Arc<Self>> {
        FILE.get_or_make(|| Self::make("poorwill-host-device"))
    }

    /// One for bytes beside a device, at the same offsets.
    pub(super) fn aside() -> io::Result<Self> {
        Self::make("poorwill-host-device-aside")
    }

    fn make(name: &str) -> io::Result<Self> {
        let fd = fs::memfd_create(name, MemfdFlags::CLOEXEC)?;
        // Growing a file beyond this limit raises a signal instead of an error.
        if let Some(limit) = getrlimit(Resource::Fsize).current.filter(|limit| *limit < FILE_BYTES) {
            let limit = poorwill_core::ByteSize(limit);
            let reason = format!("files may not exceed {limit} here; lift the limit (ulimit -f unlimited)");
            return Err(io::Error::other(reason));
        }
        fs::ftruncate(&fd, FILE_BYTES)?;
        Ok(Self { fd, next_offset: AtomicU64::new(0) })
    }

    /// An extent that no device has had; it reads as zeros. `None` when all offsets were used.
    pub(super) fn take(&self, bytes: u64) -> Option<Extent> {
        let end = |offset: u64| offset.checked_add(bytes).filter(|end| *end <= FILE_BYTES);
        let taken = self.next_offset.fetch_update(Ordering::Relaxed, Ordering::Relaxed, end);
        taken.ok().map(|offset| Extent { offset, bytes })
    }

    /// The range reads as zeros afterwards.
    pub(super) fn punch(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(retry_on_intr(|| fs::fallocate(&self.fd, flags, offset, bytes))?)
    }

    /// Pages that the operating system keeps for an extent.
    pub(super) fn resident_bytes(&self, extent: Extent) -> io::Result<u64> {
        let (mut at, mut bytes) = (extent.offset, 0);
        while let Some(data) = self.data(at..extent.offset + extent.bytes)? {
            bytes += data.end - data.start;
            at = data.end;
        }
        Ok(bytes)
    }

    /// Copies what an extent has, to the same offsets.
    pub(super) fn copy_to(&self, to: &Self, extent: Extent) -> io::Result<()> {
        let (mut at, mut buffer) = (extent.offset, Vec::new());
        while let Some(data) = self.data(at..extent.offset + extent.bytes)? {
            at = data.start;
            buffer.resize(1 << 20, 0);
            while at < data.end {
                let len = buffer.len().min(usize::try_from(data.end - at).unwrap_or(usize::MAX));
                let read = retry_on_intr(|| pread(&self.fd, &mut buffer[..len], at))?;
                let mut bytes = &buffer[..read];
                if bytes.is_empty() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                while !bytes.is_empty() {
                    let written = retry_on_intr(|| pwrite(&to.fd, bytes, at))?;
                    at += written as u64;
                    bytes = &bytes[written..];
                }
            }
        }
        Ok(())
    }

    /// The first data in a range.
    fn data(&self, range: Range<u64>) -> io::Result<Option<Range<u64>>> {
        // Each answer is in what the call returns; other threads may move the file's position meanwhile.
        let start = match fs::seek(&self.fd, SeekFrom::Data(range.start)) {
            Ok(start) if start < range.end => start,
            Ok(_) | Err(Errno::NXIO) => return Ok(None), // No data after this.
            Err(error) => return Err(error.into()),
        };
        let hole = fs::seek(&self.fd, SeekFrom::Hole(start))?;
        Ok(Some(start..hole.min(range.end)))
    }
}

impl AsFd for DeviceFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
