//! The file of a disk: how it is opened, and its space.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use poorwill_core::{ByteSize, DriverError, DriverErrorKind, Op};
use rustix::fs::{Advice, FallocateFlags, OFlags};
use rustix::io::Errno;

use super::config::DiskConfig;
use super::refused::refused;
use super::space::Space;
use crate::system::direct::{self, ALIGN_BYTES, Alignment};

/// A range of the file. Its reserved length is a multiple of [`ALIGN_BYTES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FilePlace {
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl FilePlace {
    fn reserved_bytes(self) -> u64 {
        reserved_for(self.bytes)
    }

    pub(super) fn part(self, offset: u64, bytes: u64) -> Option<Self> {
        let end = offset.checked_add(bytes)?;
        (end <= self.bytes).then_some(Self { offset: self.offset + offset, bytes })
    }
}

/// At least one block, so that no two places begin at one offset.
fn reserved_for(bytes: u64) -> u64 {
    bytes.max(1).next_multiple_of(ALIGN_BYTES)
}

#[derive(Debug)]
pub(super) struct BackingFile {
    folder: PathBuf,
    plain: File,
    direct: Option<(File, Alignment)>,
    direct_because: OnceLock<String>,
    limit_bytes: Option<u64>,
    space: Mutex<Space>,
    /// Used by nothing, and not yet given back.
    leaving: Mutex<Vec<FilePlace>>,
    /// Held while one of them is given back.
    giving_back: Mutex<()>,
}

impl BackingFile {
    pub(super) fn make(config: &DiskConfig) -> Result<Self, DriverError> {
        let folder = config.folder.clone();
        let plain = tempfile::tempfile_in(&folder).map_err(|error| {
            let next =
                format!("name a folder on a local disk that can be written, not `{}`", folder.display());
            refused(Op::DiskOpen, "no file", &error, &next)
        })?;
        let opened = match config.is_direct {
            true => direct::direct(&plain, OFlags::RDWR),
            false => Err("it was not asked for".to_owned()),
        };
        let (direct, direct_because) = match opened {
            Ok(direct) => (Some(direct), OnceLock::new()),
            Err(because) => (None, OnceLock::from(because)),
        };
        let (limit_bytes, space) = (config.limit_bytes, Mutex::default());
        let (leaving, giving_back) = Default::default();
        Ok(Self { folder, plain, direct, direct_because, limit_bytes, space, leaving, giving_back })
    }

    /// Used bytes, and the limit.
    pub(super) fn used(&self) -> (u64, Option<u64>) {
        (self.lock().used_bytes(), self.limit_bytes)
    }

    pub(super) fn direct_because(&self) -> Option<String> {
        self.direct_because.get().cloned()
    }

    /// Direct transfers are refused from now on.
    pub(super) fn disable_direct(&self, because: String) {
        let _ = self.direct_because.set(because); // The first reason is the reason.
    }

    /// The file for a transfer between these, and whether it is direct.
    pub(super) fn for_transfer(&self, offset: u64, addr: usize, bytes: usize) -> (&File, bool) {
        let fits = |aligned: &Alignment| {
            offset.is_multiple_of(aligned.offset_bytes)
                && (bytes as u64).is_multiple_of(aligned.offset_bytes)
                && (addr as u64).is_multiple_of(aligned.memory_bytes)
        };
        match &self.direct {
            Some((direct, aligned)) if self.direct_because.get().is_none() && fits(aligned) => (direct, true),
            _ => (&self.plain, false),
        }
    }

    /// Space for `bytes` bytes, also that which is about to be given back.
    pub(super) fn reserve(&self, bytes: u64) -> Result<FilePlace, DriverError> {
        match self.try_reserve(bytes) {
            Err(error) if matches!(error.kind, DriverErrorKind::OutOfDisk { .. }) => {
                self.give_back_leaving();
                self.try_reserve(bytes)
            }
            reserved => reserved,
        }
    }

    fn try_reserve(&self, bytes: u64) -> Result<FilePlace, DriverError> {
        let full = |reason: String| {
            DriverError::new(Op::DiskWrite, DriverErrorKind::OutOfDisk { asked_bytes: bytes, reason })
        };
        let place = {
            let mut space = self.lock();
            let used_bytes = space.used_bytes();
            let reserved_bytes = reserved_for(bytes);
            if let Some(limit_bytes) =
                self.limit_bytes.filter(|limit| used_bytes.saturating_add(reserved_bytes) > *limit)
            {
                let [used, limit] = [used_bytes, limit_bytes].map(ByteSize);
                return Err(full(format!("{used} of the limit of {limit} are in use; raise it")));
            }
            let offset = space.take(reserved_bytes).ok_or_else(|| full("no file can be as long".into()))?;
            FilePlace { offset, bytes }
        };
        let bytes = place.reserved_bytes();
        let reserve = || rustix::fs::fallocate(&self.plain, FallocateFlags::empty(), place.offset, bytes);
        match rustix::io::retry_on_intr(reserve) {
            // Where space cannot be reserved, writing finds out.
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(place),
            Err(errno) => {
                self.release(place);
                let next = format!("free some space of `{}`, or name another folder", self.folder.display());
                match errno {
                    Errno::NOSPC | Errno::DQUOT | Errno::FBIG => Err(full(format!("{errno}; {next}"))),
                    _ => Err(refused(Op::DiskWrite, "no space reserved", &errno.into(), &next)),
                }
            }
        }
    }

    /// Nothing uses the place any more, and no transfer of it is in flight.
    pub(super) fn leave(&self, place: FilePlace) {
        lock(&self.leaving).push(place);
    }

    /// Gives back all that was left before the call.
    pub(super) fn give_back_leaving(&self) {
        loop {
            let _one_at_a_time = lock(&self.giving_back);
            let Some(place) = lock(&self.leaving).pop() else { return };
            self.release(place);
        }
    }

    /// Gives a place's space back to the file system.
    fn release(&self, place: FilePlace) {
        let whole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Before another can take it. Where this is refused, the file stays as long until it ends.
        let _ = rustix::fs::fallocate(&self.plain, whole, place.offset, place.reserved_bytes());
        let mut space = self.lock();
        let end = space.end();
        space.give_back(place.offset, place.reserved_bytes());
        if space.end() < end {
            let _ = self.plain.set_len(space.end());
        }
    }

    /// Reads as much of `place` as one call does. Returns the number of bytes.
    pub(super) fn read_at(&self, place: FilePlace, into: &mut [u8]) -> std::io::Result<usize> {
        let (file, is_direct) = self.for_transfer(place.offset, into.as_ptr().addr(), into.len());
        let read = file.read_at(into, place.offset);
        if !is_direct {
            self.drop_cached(place);
        }
        read
    }

    /// Writes, likewise.
    pub(super) fn write_at(&self, place: FilePlace, bytes: &[u8]) -> std::io::Result<usize> {
        let (file, _) = self.for_transfer(place.offset, bytes.as_ptr().addr(), bytes.len());
        file.write_at(bytes, place.offset)
    }

    /// Bytes that came back would be held twice.
    pub(super) fn drop_cached(&self, place: FilePlace) {
        let bytes = std::num::NonZeroU64::new(place.bytes);
        let _ =
            bytes.map(|bytes| rustix::fs::fadvise(&self.plain, place.offset, Some(bytes), Advice::DontNeed));
    }

    #[cfg(test)]
    pub(super) fn truncate_for_test(&self, bytes: u64) {
        self.plain.set_len(bytes).unwrap();
    }

    #[cfg(test)]
    pub(super) fn allocated_bytes_for_test(&self) -> u64 {
        std::os::unix::fs::MetadataExt::blocks(&self.plain.metadata().unwrap()) * 512
    }

    fn lock(&self) -> MutexGuard<'_, Space> {
        lock(&self.space)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
