//! The disk: its file, and the threads that it has given to it.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use poorwill_core::backup::{Disk, DiskInfo, OnDisk};
use poorwill_core::{DriverError, HostBuffer, Op, Pending};

use super::config::{DiskConfig, DiskIo};
use super::file::{BackingFile, Place};
use super::job::{Job, Memory};
use super::ring::Ring;
use super::task::Task;
use super::threads;
use crate::process::Owner;

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
    pub(super) shared: Arc<Shared>,
    io: &'static str,
    io_because: Option<String>,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) file: Arc<BackingFile>,
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
