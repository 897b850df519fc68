//! The disk: its file, and the threads that it has given to it.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use poorwill_core::backup::{Disk, DiskInfo, OnDisk};
use poorwill_core::{DriverError, HostBuffer, Op, Pending};

use super::config::{DiskConfig, DiskIo};
use super::file::{BackingFile, FilePlace};
use super::ring::Ring;
use super::task::Task;
use super::threads;
use super::transfer::{Transfer, TransferMemory};
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
    pub(super) shared: Arc<OpenDisk>,
    io: &'static str,
    io_because: Option<String>,
}

#[derive(Debug)]
pub(super) struct OpenDisk {
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
        let shared = Arc::new(OpenDisk { file, tasks, owner });
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
        let stored = FileRange(Arc::new(Taken { shared: Arc::clone(&self.shared), place }));
        let written = stored.transfer(place, TransferMemory::Write(bytes));
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

/// A place in the file that is in use: by its owner, or by transfers that have not ended.
#[derive(Debug)]
pub(super) struct Taken {
    shared: Arc<OpenDisk>,
    place: FilePlace,
}

/// Bytes in a file.
#[derive(Debug)]
struct FileRange(Arc<Taken>);

impl FileRange {
    fn transfer(&self, part: FilePlace, memory: TransferMemory) -> Pending<TransferMemory> {
        let shared = &self.0.shared;
        if let Err(error) = shared.owner.check(memory.op()) {
            return Pending::new(move || Err(error));
        }
        let taken = Arc::clone(&self.0);
        let (transfer, outcome) = Transfer::new(taken, part, memory);
        // The outcome of one that is lost says so.
        let _ = shared.tasks.send(Task::Transfer(transfer));
        outcome
    }
}

impl OnDisk for FileRange {
    fn bytes(&self) -> u64 {
        self.0.place.bytes
    }

    fn read(&self, offset: u64, into: HostBuffer) -> Pending<HostBuffer> {
        let Some(part) = self.0.place.part(offset, into.len() as u64) else {
            let reason = format!("{} bytes at {offset} leave {} bytes on disk", into.len(), self.bytes());
            return Pending::new(move || Err(DriverError::invalid(Op::DiskRead, reason)));
        };
        self.transfer(part, TransferMemory::Read(into)).then(|memory| match memory? {
            TransferMemory::Read(buffer) => Ok(buffer),
            TransferMemory::Write(_) => {
                Err(DriverError::invalid(Op::DiskRead, "a read came back as a write"))
            }
        })
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        // In a forked child the space is the parent's.
        if self.shared.owner.is_here() {
            self.shared.file.leave(self.place);
            // Without its threads, the next that lacks space does it.
            let _ = self.shared.tasks.send(Task::GiveBack);
        }
    }
}
