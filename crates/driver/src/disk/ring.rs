//! Transfers by `io_uring`: one thread, many pieces in flight.
//!
//! A transfer is cut into pieces, so that each is queued without a thread of the kernel's. Pieces of several transfers
//! run at a time, the oldest first. A failure of the ring itself ends the transfers in flight with an error. Their
//! memory is kept for ever, since the kernel may still write to it. Later transfers run on this thread.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};

use io_uring::{IoUring, Probe, opcode, types};
use poorwill_core::DriverError;

use super::file::{BackingFile, FilePlace};
use super::task::Task;
use super::threads;
use super::transfer::{Transfer, TransferMemory, is_refused};

/// Pieces in flight.
const PIECES_MAX: usize = 64;

const PIECE_BYTES: u64 = 1 << 20;

pub(super) struct Ring(IoUring);

impl Ring {
    /// `Err` says why the kernel has none.
    pub(super) fn open() -> Result<Self, String> {
        let entries = u32::try_from(PIECES_MAX).unwrap_or(u32::MAX);
        let ring = IoUring::new(entries).map_err(|error| format!("the kernel refuses a ring: {error}"))?;
        let mut probe = Probe::new();
        let asked = ring.submitter().register_probe(&mut probe);
        asked.map_err(|error| format!("the kernel's ring is too old: {error}"))?;
        match [opcode::Read::CODE, opcode::Write::CODE].iter().all(|code| probe.is_supported(*code)) {
            true => Ok(Self(ring)),
            false => Err("the kernel's ring neither reads nor writes".to_owned()),
        }
    }

    /// Until the queue has ended.
    pub(super) fn run(self, file: &Arc<BackingFile>, queue: Receiver<Task>) {
        let mut work = Work { ring: self.0, file, running: VecDeque::new(), first: 0, pieces: Vec::new() };
        work.pieces.resize_with(PIECES_MAX, || None);
        let failed = work.run(&queue).is_err();
        drop(work);
        if failed {
            queue.into_iter().for_each(|task| threads::run(file, task));
        }
    }
}

struct Work<'a> {
    ring: IoUring,
    file: &'a BackingFile,
    /// In order of their numbers, which begin with `first`. `None` for those that have ended.
    running: VecDeque<Option<Box<Running>>>,
    first: u64,
    /// In flight.
    pieces: Vec<Option<Piece>>,
}

/// Boxed, so that neither it nor the address of its memory changes.
struct Running {
    transfer: Transfer,
    addr: *mut u8,
    queued_bytes: u64,
    pieces: usize,
    failed: Option<DriverError>,
}

#[derive(Clone, Copy)]
struct Piece {
    /// Its number.
    transfer: u64,
    /// In it.
    offset: u64,
    bytes: u64,
    is_direct: bool,
}

impl Work<'_> {
    fn run(&mut self, queue: &Receiver<Task>) -> io::Result<()> {
        let mut is_open = true;
        while is_open || !self.running.is_empty() {
            while is_open && self.has_free_pieces() {
                let task = match self.running.is_empty() {
                    true => queue.recv().map_err(|_| TryRecvError::Disconnected),
                    false => queue.try_recv(),
                };
                match task {
                    Ok(Task::Transfer(transfer)) => self.begin(transfer)?,
                    Ok(Task::GiveBack) => self.file.give_back_leaving(),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => is_open = false,
                }
            }
            if self.pieces.iter().any(Option::is_some) {
                self.wait()?;
            }
        }
        Ok(())
    }

    /// Whether all that runs is queued, and more may be.
    fn has_free_pieces(&self) -> bool {
        let is_queued =
            |running: &Option<Box<Running>>| running.as_ref().is_none_or(|running| running.is_queued());
        self.pieces.iter().any(Option::is_none) && self.running.iter().all(is_queued)
    }

    fn begin(&mut self, mut transfer: Transfer) -> io::Result<()> {
        if transfer.place.bytes == 0 {
            transfer.end(None);
            return Ok(());
        }
        let addr = match &mut transfer.memory {
            TransferMemory::Read(buffer) => buffer.as_mut_ptr(),
            TransferMemory::Write(buffer) => buffer.as_ptr().cast_mut(),
        };
        self.running.push_back(Some(Box::new(Running {
            transfer,
            addr,
            queued_bytes: 0,
            pieces: 0,
            failed: None,
        })));
        self.fill()
    }

    /// Queues pieces of the oldest transfers first.
    fn fill(&mut self) -> io::Result<()> {
        for nth in 0..self.running.len() {
            while let Some(running) = self.running[nth].as_mut().filter(|running| !running.is_queued()) {
                let Some(free) = self.pieces.iter().position(Option::is_none) else { return Ok(()) };
                let offset = running.queued_bytes;
                let bytes = PIECE_BYTES.min(running.transfer.place.bytes - offset);
                running.queued_bytes += bytes;
                running.pieces += 1;
                self.queue(
                    free,
                    Piece { transfer: self.first + nth as u64, offset, bytes, is_direct: false },
                )?;
            }
        }
        Ok(())
    }

    fn queue(&mut self, nth: usize, mut piece: Piece) -> io::Result<()> {
        let Some(running) = self.running_mut(piece.transfer) else { return Ok(()) };
        let index = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let addr = running.addr.wrapping_add(index(piece.offset));
        let (at, is_write) = (
            running.transfer.place.offset + piece.offset,
            matches!(running.transfer.memory, TransferMemory::Write(_)),
        );
        let (file, is_direct) = self.file.for_transfer(at, addr.addr(), index(piece.bytes));
        piece.is_direct = is_direct;
        let (file, bytes) = (types::Fd(file.as_raw_fd()), u32::try_from(piece.bytes).unwrap_or(u32::MAX));
        let entry = match is_write {
            true => opcode::Write::new(file, addr, bytes).offset(at).build(),
            false => opcode::Read::new(file, addr, bytes).offset(at).build(),
        };
        let entry = entry.user_data(nth as u64);
        self.pieces[nth] = Some(piece);
        // SAFETY: D1: `running` owns the range's memory until this piece has completed, or for ever. The file is open
        // as long as the thread runs.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // There are as many entries as pieces, so it never is full.
        pushed.map_err(|_| io::Error::other("the ring is full"))
    }

    fn running_mut(&mut self, transfer: u64) -> Option<&mut Box<Running>> {
        let nth = usize::try_from(transfer.checked_sub(self.first)?).ok()?;
        self.running.get_mut(nth)?.as_mut()
    }

    /// Waits for at least one piece, and goes on with what has completed.
    fn wait(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(error)
                if matches!(
                    error.kind(),
                    // The kernel lacks memory for requests until some have completed.
                    io::ErrorKind::Interrupted | io::ErrorKind::ResourceBusy | io::ErrorKind::WouldBlock
                ) => {}
            Err(error) => return Err(error),
        }
        let completed: Vec<(u64, i32)> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for (nth, result) in completed {
            let nth = usize::try_from(nth).unwrap_or(usize::MAX);
            if let Some(piece) = self.pieces.get_mut(nth).and_then(Option::take) {
                self.completed(nth, piece, result)?;
            }
        }
        while self.running.front().is_some_and(Option::is_none) {
            self.running.pop_front();
            self.first += 1;
        }
        self.fill()
    }

    fn completed(&mut self, nth: usize, piece: Piece, result: i32) -> io::Result<()> {
        let file = self.file;
        let Some(running) = self.running_mut(piece.transfer) else { return Ok(()) };
        let moved = match u64::try_from(result) {
            Ok(0) => {
                let short = running.transfer.short(piece.offset);
                running.failed.get_or_insert(short);
                piece.bytes
            }
            Ok(moved) => moved,
            Err(_) => {
                let error = io::Error::from_raw_os_error(-result);
                let again = matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock);
                if again || (is_refused(&error) && piece.is_direct) {
                    if !again {
                        file.disable_direct(format!("direct transfers are refused: {error}"));
                    }
                    return self.queue(nth, piece);
                }
                let failed = running.transfer.failed(&error);
                running.failed.get_or_insert(failed);
                piece.bytes
            }
        };
        if moved < piece.bytes && running.failed.is_none() {
            let rest = Piece { offset: piece.offset + moved, bytes: piece.bytes - moved, ..piece };
            return self.queue(nth, rest);
        }
        let FilePlace { offset, .. } = running.transfer.place;
        if !piece.is_direct && matches!(running.transfer.memory, TransferMemory::Read(_)) {
            file.drop_cached(FilePlace { offset: offset + piece.offset, bytes: piece.bytes });
        }
        running.pieces -= 1;
        if running.failed.is_some() {
            running.queued_bytes = running.transfer.place.bytes; // No more of it.
        }
        if running.is_queued() && running.pieces == 0 {
            let nth = usize::try_from(piece.transfer - self.first).unwrap_or(usize::MAX);
            if let Some(ended) = self.running.get_mut(nth).and_then(Option::take) {
                let Running { transfer, failed, .. } = *ended;
                transfer.end(failed);
            }
        }
        Ok(())
    }
}

/// Also after a failure or a panic: the kernel may still use the memory of what runs.
impl Drop for Work<'_> {
    fn drop(&mut self) {
        self.running.drain(..).flatten().for_each(|running| running.transfer.abandon());
    }
}

impl Running {
    fn is_queued(&self) -> bool {
        self.queued_bytes == self.transfer.place.bytes
    }
}
