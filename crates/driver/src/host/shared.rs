//! Memory of a host device that other processes can have: a file for each backing.
//!
//! Its creator locks the file (`flock`). The lock belongs to the open file that all its descriptors and mappings share,
//! in every process, and ends with the last of them. So a second opening of the file tells whether the memory is in use.
//!
//! A device of one process watches memory files without a name. A device of several is a folder of named ones. There each
//! process also has a file as long as its other memory, so that the capacity is that of all together.
//!
//! Promise: bytes count as used from their creation until their last descriptor and mapping are gone.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{self, FileType, FlockOperation, MemfdFlags, Mode, OFlags};

use crate::parents_only::ParentsOnly;

/// Files of this process, on all devices.
static MADE: AtomicU64 = AtomicU64::new(0);

/// The memory of one shared backing.
#[derive(Debug)]
pub(super) struct SharedFile {
    fd: ParentsOnly,
    pub(super) bytes: u64,
}

/// What is in use of a device's capacity.
#[derive(Debug)]
pub(super) struct InUse {
    capacity_bytes: u64,
    /// This process's memory that is not shared.
    unshared_bytes: u64,
    files: MemoryFiles,
}

#[derive(Debug)]
enum MemoryFiles {
    /// Second openings of shared memory, with its sizes.
    Here(Vec<(OwnedFd, u64)>),
    /// A folder with all memory of all processes. The file is as long as the unshared memory of this one.
    Folder { path: PathBuf, unshared: OwnedFd },
}

impl SharedFile {
    /// A new file, which nothing else has opened to lock it.
    fn made(fd: OwnedFd, bytes: u64) -> io::Result<Self> {
        fs::flock(&fd, FlockOperation::NonBlockingLockExclusive)?;
        fs::ftruncate(&fd, bytes)?;
        Ok(Self { fd: ParentsOnly::new(fd)?, bytes })
    }

    /// A file that was received.
    pub(super) fn import(fd: BorrowedFd<'_>, bytes: u64) -> io::Result<Self> {
        let found = fs::fstat(fd)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the descriptor is no device memory"));
        }
        if u64::try_from(found.st_size).ok() != Some(bytes) {
            let reason = format!("the descriptor has {} bytes, and {bytes} were said", found.st_size);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        Ok(Self { fd: ParentsOnly::new(fd.try_clone_to_owned()?)?, bytes })
    }

    pub(super) fn export(&self) -> io::Result<OwnedFd> {
        self.fd.as_fd().try_clone_to_owned()
    }
}

impl AsFd for SharedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl InUse {
    pub(super) fn open(capacity_bytes: u64, folder: Option<&Path>) -> io::Result<Self> {
        let files = folder.map_or_else(|| Ok(MemoryFiles::Here(Vec::new())), MemoryFiles::in_folder)?;
        Ok(Self { capacity_bytes, unshared_bytes: 0, files })
    }

    pub(super) fn folder(&self) -> Option<&Path> {
        match &self.files {
            MemoryFiles::Here(_) => None,
            MemoryFiles::Folder { path, .. } => Some(path),
        }
    }

    /// The same in all processes of the device, and on no other device.
    pub(super) fn name(&self) -> String {
        match &self.files {
            MemoryFiles::Here(_) => {
                format!("host:process-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed))
            }
            MemoryFiles::Folder { path, .. } => format!("host:{}", path.display()),
        }
    }

    pub(super) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    pub(super) fn unshared_bytes(&self) -> u64 {
        self.unshared_bytes
    }

    pub(super) fn free_bytes(&mut self) -> io::Result<u64> {
        let _turn = self.files.turn()?;
        self.free_in_turn()
    }

    fn free_in_turn(&mut self) -> io::Result<u64> {
        Ok(self.capacity_bytes.saturating_sub(self.files.in_use(self.unshared_bytes)?))
    }

    /// Counts more memory that is not shared. `Err` has what is free where that is less.
    pub(super) fn take(&mut self, bytes: u64) -> io::Result<Result<(), u64>> {
        let _turn = self.files.turn()?;
        let free_bytes = self.free_in_turn()?;
        if bytes > free_bytes {
            return Ok(Err(free_bytes));
        }
        self.set_unshared(self.unshared_bytes + bytes).map(Ok)
    }

    /// Counts less of it.
    pub(super) fn give_back(&mut self, bytes: u64) -> io::Result<()> {
        self.set_unshared(self.unshared_bytes - bytes)
    }

    fn set_unshared(&mut self, bytes: u64) -> io::Result<()> {
        if let MemoryFiles::Folder { unshared, .. } = &self.files {
            fs::ftruncate(unshared, bytes)?;
        }
        self.unshared_bytes = bytes;
        Ok(())
    }

    /// Makes shared memory. `Err` has what is free where that is less.
    pub(super) fn create(&mut self, bytes: u64) -> io::Result<Result<SharedFile, u64>> {
        let _turn = self.files.turn()?;
        let free_bytes = self.free_in_turn()?;
        if bytes > free_bytes {
            return Ok(Err(free_bytes));
        }
        self.files.create(bytes).map(Ok)
    }
}

impl MemoryFiles {
    fn in_folder(path: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(path)?;
        let path = path.canonicalize()?;
        let _turn = Turn::take(&path)?;
        let unshared = make(&path, "unshared")?;
        fs::flock(&unshared, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Self::Folder { path, unshared })
    }

    /// One process at a time looks at a folder's files, or makes some.
    fn turn(&self) -> io::Result<Option<Turn>> {
        match self {
            Self::Here(_) => Ok(None),
            Self::Folder { path, .. } => Turn::take(path).map(Some),
        }
    }

    fn create(&mut self, bytes: u64) -> io::Result<SharedFile> {
        match self {
            Self::Here(files) => {
                let fd = fs::memfd_create("poorwill-shared-memory", MemfdFlags::CLOEXEC)?;
                let again = format!("/proc/self/fd/{}", fd.as_raw_fd());
                files.push((fs::open(again, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?, bytes));
                SharedFile::made(fd, bytes)
            }
            Self::Folder { path, .. } => SharedFile::made(make(path, "shared")?, bytes),
        }
    }

    /// Forgets, or removes, what is out of use.
    fn in_use(&mut self, unshared_bytes: u64) -> io::Result<u64> {
        let path = match self {
            Self::Here(files) => {
                files.retain(|(watched, _)| is_in_use(watched));
                return Ok(files.iter().map(|(_, bytes)| bytes).sum::<u64>() + unshared_bytes);
            }
            Self::Folder { path, .. } => path,
        };
        let mut in_use_bytes = 0;
        for entry in std::fs::read_dir(&*path)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "memory") {
                continue;
            }
            let watched = fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
            if is_in_use(&watched) {
                in_use_bytes += u64::try_from(fs::fstat(&watched)?.st_size).unwrap_or(0);
            } else {
                std::fs::remove_file(&path)?;
            }
        }
        Ok(in_use_bytes)
    }
}

/// Given up at its drop, also where a forked child has the same descriptor.
struct Turn(OwnedFd);

impl Turn {
    fn take(folder: &Path) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let turn = fs::open(folder.join("turn"), flags, Mode::RUSR | Mode::WUSR)?;
        rustix::io::retry_on_intr(|| fs::flock(&turn, FlockOperation::LockExclusive))?;
        Ok(Self(turn))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // It cannot fail for a descriptor that has the lock.
        let _ = fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// A new file for memory, by a name that no other process gives.
fn make(folder: &Path, kind: &str) -> io::Result<OwnedFd> {
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let name = format!("{kind}-{}-{number}.memory", std::process::id());
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::TRUNC;
    Ok(fs::open(folder.join(name), flags, Mode::RUSR | Mode::WUSR)?)
}

fn is_in_use(watched: &OwnedFd) -> bool {
    // With the lock, nothing else has it any more.
    fs::flock(watched, FlockOperation::NonBlockingLockExclusive).is_err()
}
