//! One transfer between host memory and a file.

use std::fmt;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};

use poorwill_core::{DriverError, DriverErrorKind, HostBuffer, Op, Pending};

use super::file::{BackingFile, FilePlace};
use super::refused::refused;

/// What a transfer fills or reads. It owns it until its end.
#[derive(Debug)]
pub(super) enum TransferMemory {
    Read(HostBuffer),
    Write(Arc<HostBuffer>),
}

impl TransferMemory {
    pub(super) fn op(&self) -> Op {
        match self {
            Self::Read(_) => Op::DiskRead,
            Self::Write(_) => Op::DiskWrite,
        }
    }
}

#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) place: FilePlace,
    pub(super) memory: TransferMemory,
    /// Keeps the place until the transfer ends.
    taken: Arc<dyn fmt::Debug + Send + Sync>,
    outcome: Sender<Result<TransferMemory, DriverError>>,
}

impl Transfer {
    pub(super) fn new(
        taken: Arc<dyn fmt::Debug + Send + Sync>,
        place: FilePlace,
        memory: TransferMemory,
    ) -> (Self, Pending<TransferMemory>) {
        let (outcome, outcomes) = mpsc::channel();
        let op = memory.op();
        let lost = move || {
            let reason = "the thread of the disk has ended; open the arena again".to_owned();
            DriverError::new(op, DriverErrorKind::Unsupported { reason })
        };
        let wait = move || outcomes.recv().unwrap_or_else(|_| Err(lost()));
        (Self { place, memory, taken, outcome }, Pending::new(wait))
    }

    /// Ends the wait for it, if there is one.
    pub(super) fn end(self, failed: Option<DriverError>) {
        let Self { memory, taken, outcome, .. } = self;
        drop(taken);
        let _ = outcome.send(failed.map_or(Ok(memory), Err));
    }

    /// Fails without ever releasing its memory and its place.
    pub(super) fn abandon(self) {
        let error = self.failed(&io::Error::other("the kernel's ring has failed"));
        std::mem::forget((self.memory, self.taken));
        let _ = self.outcome.send(Err(error));
    }

    pub(super) fn failed(&self, error: &io::Error) -> DriverError {
        let op = self.memory.op();
        let what = format!("{} bytes at {} of the file", self.place.bytes, self.place.offset);
        let next = match self.memory {
            TransferMemory::Read(_) => "wake again, or discard the tag",
            TransferMemory::Write(_) => "name another folder",
        };
        if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) {
            let reason = format!("{error}; free some space, or name another folder");
            return DriverError::new(
                op,
                DriverErrorKind::OutOfDisk { asked_bytes: self.place.bytes, reason },
            );
        }
        refused(op, &what, error, next)
    }

    /// The file ends within it, or takes no more.
    pub(super) fn short(&self, done_bytes: u64) -> DriverError {
        let missing = io::Error::new(ErrorKind::UnexpectedEof, format!("it ends after {done_bytes} bytes"));
        self.failed(&missing)
    }

    /// Transfers all of it on this thread.
    pub(super) fn run(mut self, file: &BackingFile) {
        let failed = self.transfer(file).err();
        self.end(failed);
    }

    fn transfer(&mut self, file: &BackingFile) -> Result<(), DriverError> {
        let mut done = 0;
        while done < self.place.bytes {
            let rest = FilePlace { offset: self.place.offset + done, bytes: self.place.bytes - done };
            let from = usize::try_from(done).unwrap_or(usize::MAX);
            // Another thread may disable them meanwhile.
            let may_be_direct = file.direct_because().is_none();
            let moved = match &mut self.memory {
                TransferMemory::Read(buffer) => {
                    file.read_at(rest, buffer.get_mut(from..).unwrap_or_default())
                }
                TransferMemory::Write(buffer) => file.write_at(rest, buffer.get(from..).unwrap_or_default()),
            };
            match moved {
                Ok(0) => return Err(self.short(done)),
                Ok(bytes) => done += bytes as u64,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if is_refused(&error) && may_be_direct => {
                    file.disable_direct(format!("direct transfers are refused: {error}"));
                }
                Err(error) => return Err(self.failed(&error)),
            }
        }
        Ok(())
    }
}

/// Whether a transfer may fail only because it is direct.
pub(super) fn is_refused(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported)
}
