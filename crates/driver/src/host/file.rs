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
        punch(self.fd.as_fd(), offset, bytes)
    }

    /// Pages that the operating system keeps for extents.
    pub(super) fn resident_bytes(&self, extents: impl Iterator<Item = Extent>) -> io::Result<u64> {
        let mut bytes = 0;
        self.visit_data(extents, |data| {
            bytes += data.end - data.start;
            Ok(())
        })?;
        Ok(bytes)
    }

    /// Copies what extents have, to the same offsets.
    pub(super) fn copy_to(&self, to: &Self, extents: impl Iterator<Item = Extent>) -> io::Result<()> {
        let mut buffer = Vec::new();
        self.visit_data(extents, |data| {
            buffer.resize(1 << 20, 0);
            let mut at = data.start;
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
            Ok(())
        })
    }

    /// In the order of the file. Each run of data is looked for once, however many extents share it: the system visits
    /// all its pages to find its end.
    fn visit_data(
        &self,
        extents: impl Iterator<Item = Extent>,
        mut visit: impl FnMut(Range<u64>) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut extents: Vec<Extent> = extents.collect();
        extents.sort_unstable_by_key(|extent| extent.offset);
        let mut run = 0..0;
        for Extent { offset: mut at, bytes } in extents {
            let end = at + bytes;
            while at < end {
                if run.end <= at {
                    let Some(next) = self.next_run(at)? else { return Ok(()) };
                    run = next;
                }
                let data = run.start.clamp(at, end)..run.end.min(end);
                at = data.end;
                if !data.is_empty() {
                    visit(data)?;
                }
            }
        }
        Ok(())
    }

    /// The first run of data that ends after an offset.
    fn next_run(&self, at: u64) -> io::Result<Option<Range<u64>>> {
        // Each answer is in what the call returns; other threads may move the file's position meanwhile.
        let start = match fs::seek(&self.fd, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None), // No data after this.
            Err(error) => return Err(error.into()),
        };
        let end = fs::seek(&self.fd, SeekFrom::Hole(start))?;
        Ok(Some(start..end))
    }
}

/// The range of the file reads as zeros afterwards.
pub(super) fn punch(file: BorrowedFd<'_>, offset: u64, bytes: u64) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(retry_on_intr(|| fs::fallocate(file, flags, offset, bytes))?)
}

impl AsFd for DeviceFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 64 << 10; // A page of any machine, or several.

    fn write(file: &DeviceFile, range: Range<u64>) {
        let bytes: Vec<u8> =
            (range.start..range.end).map(|at| u8::try_from(at / PAGE + 1).unwrap()).collect();
        assert_eq!(pwrite(&file.fd, &bytes, range.start).unwrap(), bytes.len());
    }

    #[test]
    fn data_of_extents_in_shared_runs_is_counted_and_copied_exactly() {
        let file = DeviceFile::aside().unwrap();
        let [first, foreign, second, empty, last] =
            [3, 1, 2, 2, 4].map(|pages| file.take(pages * PAGE).unwrap());
        // From within the first to within the second, and two runs in the last.
        for pages in [1..5, 8..9, 10..11] {
            write(&file, pages.start * PAGE..pages.end * PAGE);
        }
        let mine = [last, second, empty, first];
        assert_eq!(file.resident_bytes(mine.into_iter()).unwrap(), 5 * PAGE);
        assert_eq!(file.resident_bytes([foreign].into_iter()).unwrap(), PAGE);
        assert_eq!(file.resident_bytes([empty].into_iter()).unwrap(), 0);
        let copy = DeviceFile::aside().unwrap();
        file.copy_to(&copy, mine.into_iter()).unwrap();
        for page in 0..12 {
            let mut byte = [0];
            assert_eq!(pread(&copy.fd, &mut byte, page * PAGE).unwrap(), 1);
            let is_copied = [1, 2, 4, 8, 10].contains(&page);
            assert_eq!(u64::from(byte[0]), if is_copied { page + 1 } else { 0 }, "page {page}");
        }
        let all = Extent { offset: 0, bytes: FILE_BYTES };
        assert_eq!(copy.resident_bytes([all].into_iter()).unwrap(), 5 * PAGE, "holes stay holes");
    }
}
