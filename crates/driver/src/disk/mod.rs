//! A disk for backups: one unnamed file in a folder.
//!
//! The file has no name, so nothing is left of it when the process ends, however it ends. Bytes are read and written
//! past the page cache where the file system allows it, by `io_uring` where the kernel has it, and otherwise by a few
//! threads. [`FileDisk::info`] says which, and why not the other.
//!
//! - [`file`] opens the file and reserves its space.
//! - [`job`] is one transfer. It owns its memory until it ends.
//! - [`ring`] and [`threads`] do the transfers.
//!
//! Promises: a transfer is complete or an error. Space is reserved before it is written, so that a full disk is
//! noticed in time, and given back when the bytes are dropped.

mod file;
mod job;
mod ring;
mod space;
#[cfg(test)]
mod tests;
mod threads;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use poorwill_core::backup::{Disk, DiskInfo, OnDisk};
use poorwill_core::{DriverError, DriverErrorKind, HostBuffer, Op, Pending};

use self::file::{BackingFile, Place};
use self::job::{Job, Memory};
use self::ring::Ring;
use crate::process::Owner;

/// Where a disk's file is, and how it is used.
///
/// ```
/// use poorwill_driver::disk::DiskConfig; // In the library: poorwill::disk.
///
/// let config = DiskConfig::in_folder("/mnt/nvme").limited_to(64 << 30);
/// assert_eq!(config.limit_bytes, Some(64 << 30));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskConfig {
    /// The folder, on a local disk.
    pub folder: PathBuf,
    /// Most bytes that it may hold; `None`: what the file system has.
    pub limit_bytes: Option<u64>,
    /// How bytes are transferred.
    pub io: DiskIo,
    /// Whether the page cache is passed by, where the file system allows it.
    pub is_direct: bool,
}

/// How bytes are transferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DiskIo {
    /// By `io_uring` where the kernel has it.
    #[default]
    Auto,
    /// By threads.
    Threads,
}

impl DiskConfig {
    /// All of the file system's space.
    #[must_use]
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), limit_bytes: None, io: DiskIo::Auto, is_direct: true }
    }

    /// Sets the limit.
    #[must_use]
    pub fn limited_to(mut self, limit_bytes: impl Into<Option<u64>>) -> Self {
        self.limit_bytes = limit_bytes.into();
        self
    }

    /// Sets how bytes are transferred.
    #[must_use]
    pub fn by(mut self, io: DiskIo) -> Self {
        self.io = io;
        self
    }

    /// Sets whether the page cache is passed by.
    #[must_use]
    pub fn directly(mut self, is_direct: bool) -> Self {
        self.is_direct = is_direct;
        self
    }
}

/// What the threads of a disk do.
#[derive(Debug)]
enum Task {
    Transfer(Job),
    Release(Place),
}

/// A disk in a file.
///
/// ```
/// use std::sync::Arc;
///
/// use poorwill_core::HostBuffer;
/// use poorwill_core::backup::{Disk, OnDisk};
/// use poorwill_driver::disk::{DiskConfig, FileDisk};
///
/// # fn main() -> Result<(), poorwill_core::DriverError> {
/// let disk = FileDisk::open(&DiskConfig::in_folder(std::env::temp_dir()))?;
/// let there = disk.write(Arc::new(HostBuffer::from(vec![7; 10_000]))).wait()?;
/// assert_eq!(*there.read(9_000, HostBuffer::from(vec![0; 1_000])).wait()?, [7; 1_000]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct FileDisk {
    shared: Arc<Shared>,
    io: &'static str,
    io_because: Option<String>,
}

#[derive(Debug)]
struct Shared {
    file: Arc<BackingFile>,
    tasks: Sender<Task>,
    owner: Owner,
}

impl FileDisk {
    /// Makes the file.
    ///
    /// # Errors
    /// What the operating system reports of the folder, or of a thread.
    pub fn open(config: &DiskConfig) -> Result<Self, DriverError> {
        let owner = Owner::this()?;
        let file = Arc::new(BackingFile::make(config)?);
        let (tasks, queue) = mpsc::channel();
        let ring = match config.io {
            DiskIo::Auto => Ring::open(),
            DiskIo::Threads => Err("threads were asked for".to_owned()),
        };
        let (io, io_because) = match ring {
            Ok(ring) => {
                start(ring, &file, queue)?;
                ("io_uring", None)
            }
            Err(because) => {
                threads::start(&file, queue)?;
                ("threads", Some(because))
            }
        };
        let shared = Arc::new(Shared { file, tasks, owner });
        Ok(Self { shared, io, io_because })
    }
}

fn start(ring: Ring, file: &Arc<BackingFile>, queue: Receiver<Task>) -> Result<(), DriverError> {
    let file = Arc::clone(file);
    threads::spawn(move || ring.run(&file, queue))
}

impl Disk for FileDisk {
    fn write(&self, bytes: Arc<HostBuffer>) -> Pending<Arc<dyn OnDisk>> {
        let place = match self.shared.owner.check(Op::DiskWrite) {
            Ok(()) => self.shared.file.reserve(bytes.len() as u64),
            Err(error) => Err(error),
        };
        let place = match place {
            Ok(place) => place,
            Err(error) => return Pending::new(move || Err(error)),
        };
        // Given back when writing fails.
        let stored = FileRange { shared: Arc::clone(&self.shared), place: Some(place) };
        let written = self.shared.transfer(place, Memory::Write(bytes));
        written.then(move |written| written.map(|_| Arc::new(stored) as Arc<dyn OnDisk>))
    }

    fn info(&self) -> DiskInfo {
        let mut info = DiskInfo::new(self.io);
        (info.used_bytes, info.limit_bytes) = self.shared.file.used();
        info.io_because.clone_from(&self.io_because);
        info.direct_because = self.shared.file.direct_because();
        info.is_direct = info.direct_because.is_none();
        info
    }
}

impl Shared {
    fn transfer(&self, place: Place, memory: Memory) -> Pending<Memory> {
        if let Err(error) = self.owner.check(memory.op()) {
            return Pending::new(move || Err(error));
        }
        let (job, outcome) = Job::new(place, memory);
        // The outcome of a job that is lost says so.
        let _ = self.tasks.send(Task::Transfer(job));
        outcome
    }
}

/// Bytes in a file.
#[derive(Debug)]
struct FileRange {
    shared: Arc<Shared>,
    place: Option<Place>,
}

impl OnDisk for FileRange {
    fn bytes(&self) -> u64 {
        self.place.map_or(0, |place| place.bytes)
    }

    fn read(&self, offset: u64, into: HostBuffer) -> Pending<HostBuffer> {
        let place = self.place.and_then(|place| place.part(offset, into.len() as u64));
        let Some(place) = place else {
            let reason = format!("{} bytes at {offset} leave {} bytes on disk", into.len(), self.bytes());
            return Pending::new(move || Err(DriverError::invalid(Op::DiskRead, reason)));
        };
        self.shared.transfer(place, Memory::Read(into)).then(|memory| match memory? {
            Memory::Read(buffer) => Ok(buffer),
            Memory::Write(_) => Err(DriverError::invalid(Op::DiskRead, "a read came back as a write")),
        })
    }
}

impl Drop for FileRange {
    fn drop(&mut self) {
        // In a forked child the space is the parent's.
        if let Some(place) = self.place.take()
            && self.shared.owner.is_here()
        {
            let _ = self.shared.tasks.send(Task::Release(place));
        }
    }
}

/// What the operating system reports, with the next step.
fn refused(op: Op, what: &str, error: &std::io::Error, next: &str) -> DriverError {
    let kind = DriverErrorKind::Device {
        code: error.raw_os_error().unwrap_or(0).into(),
        name: what.to_owned(),
        text: format!("{error}; {next}"),
    };
    DriverError::new(op, kind)
}
