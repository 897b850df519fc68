//! Several readers over the pieces of a checkpoint, beside the making of the memory that they read into.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{DriverError, Op, Pending};

use super::super::Buffer;
use super::layout::Piece;
use super::piece::{self, Fault, Staging, Way};
use super::storage::Storage;

/// How often the caller is told, and asked whether to go on.
const TELL: Duration = Duration::from_millis(50);

/// What is to be read, by buffer.
pub(super) struct Work<'a> {
    pub(super) storage: &'a dyn Storage,
    pub(super) pieces: &'a [Vec<Piece>],
    pub(super) readers: usize,
}

/// What was done.
#[derive(Debug, Default)]
pub(super) struct Done {
    pub(super) memory_s: f64,
    pub(super) direct_bytes: u64,
    pub(super) staged_bytes: u64,
    pub(super) buffered_bytes: u64,
    pub(super) staging_bytes: u64,
    pub(super) readers: usize,
}

/// Why it was not.
#[derive(Debug)]
pub(super) enum Ended {
    /// A piece of a buffer could not be read.
    Piece { buffer: usize, nth: usize, fault: Fault },
    /// A buffer could not be made.
    Memory(DriverError),
    /// The caller said so, when so much had been read.
    Stopped(u64),
}

/// Is told how much has been read, and says whether to go on.
pub(super) type Ask<'a> = &'a mut dyn FnMut(u64) -> ControlFlow<()>;

/// A piece and the memory that it is read into.
struct Task<'m> {
    buffer: usize,
    nth: usize,
    memory: &'m mut [u8],
}

#[derive(Default)]
struct State<'m> {
    tasks: VecDeque<Task<'m>>,
    /// Whether nothing is added any more.
    is_complete: bool,
    /// The first that went wrong; nothing is begun after it.
    ended: Option<Ended>,
    done: Done,
    /// Readers that have not ended.
    at_work: usize,
}

/// What readers and the caller share.
struct Board<'m> {
    state: Mutex<State<'m>>,
    /// Told when there are tasks, or will be none.
    changed: Condvar,
    /// Told when a reader has ended.
    left: Condvar,
    read_bytes: AtomicU64,
}

impl<'m> Board<'m> {
    fn lock(&self) -> MutexGuard<'_, State<'m>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, ended: Ended) {
        self.lock().ended.get_or_insert(ended);
        self.changed.notify_all();
    }

    fn has_ended(&self) -> bool {
        self.lock().ended.is_some()
    }

    fn add(&self, tasks: impl Iterator<Item = Task<'m>>) {
        self.lock().tasks.extend(tasks);
        self.changed.notify_all();
    }

    /// The next task; none when there are no more, or none is to be begun.
    fn next(&self) -> Option<Task<'m>> {
        let mut state = self.lock();
        loop {
            if state.ended.is_some() {
                return None;
            }
            if let Some(task) = state.tasks.pop_front() {
                return Some(task);
            }
            if state.is_complete {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn ask(&self, ask: Ask<'_>) {
        let read_bytes = self.read_bytes.load(Ordering::Relaxed);
        if ask(read_bytes).is_break() {
            self.end(Ended::Stopped(read_bytes));
        }
    }
}

/// Whatever becomes of a reader, it is known to have ended.
struct AtWork<'b, 'm>(&'b Board<'m>);

impl Drop for AtWork<'_, '_> {
    fn drop(&mut self) {
        self.0.lock().at_work -= 1;
        self.0.left.notify_all();
    }
}

/// Whatever becomes of the caller, who may panic where it is asked, no reader waits for more from it.
struct Closing<'b, 'm>(&'b Board<'m>);

impl Drop for Closing<'_, '_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.end(Ended::Stopped(self.0.read_bytes.load(Ordering::Relaxed)));
        }
    }
}

/// Waits for each buffer in turn and has its pieces read as soon as it is there. `made` has a place for each.
pub(super) fn run(
    work: &Work<'_>,
    pending: Vec<Pending<Buffer>>,
    made: &mut [Option<Buffer>],
    ask: Ask<'_>,
) -> Result<Done, Ended> {
    let started = Instant::now();
    let board = Board {
        state: Mutex::default(),
        changed: Condvar::new(),
        left: Condvar::new(),
        read_bytes: AtomicU64::new(0),
    };
    thread::scope(|scope| {
        let _closing = Closing(&board);
        for _ in 0..work.readers {
            let board = &board;
            board.lock().at_work += 1;
            let at_work = AtWork(board);
            let read = move || {
                let _at_work = at_work;
                read_all(work, board);
            };
            // Where no more threads are to be had, fewer read.
            if thread::Builder::new().name("poorwill-read".into()).spawn_scoped(scope, read).is_err() {
                break;
            }
            board.lock().done.readers += 1;
        }
        for (buffer, (pending, place)) in pending.into_iter().zip(made.iter_mut()).enumerate() {
            board.ask(&mut *ask);
            if board.has_ended() {
                break; // What was not waited for is given back.
            }
            match pending.wait().and_then(|made| pieces_of(work, buffer, place.insert(made))) {
                Ok(tasks) => board.add(tasks.into_iter()),
                Err(error) => board.end(Ended::Memory(error)),
            }
        }
        {
            let mut state = board.lock();
            state.done.memory_s = started.elapsed().as_secs_f64();
            state.is_complete = true;
        }
        board.changed.notify_all();
        if board.lock().done.readers == 0 {
            read_alone(work, &board, &mut *ask);
        }
        let mut state = board.lock();
        while state.at_work > 0 {
            (state, _) = board.left.wait_timeout(state, TELL).unwrap_or_else(PoisonError::into_inner);
            drop(state);
            board.ask(&mut *ask);
            state = board.lock();
        }
    });
    let State { ended, mut done, .. } = board.state.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.readers = done.readers.max(1);
    match ended {
        None => Ok(done),
        Some(ended) => Err(ended),
    }
}

/// What is to be read into a buffer that was just made.
fn pieces_of<'m>(work: &Work<'_>, buffer: usize, made: &'m mut Buffer) -> DriverResult<Vec<Task<'m>>> {
    let wrong = |words: &str| DriverError::invalid(Op::HostAlloc, words);
    let mut memory = made.as_mut_slice().ok_or_else(|| wrong("memory that was just made is in use"))?;
    let (mut tasks, mut at) = (Vec::new(), 0);
    for (nth, piece) in work.pieces[buffer].iter().enumerate() {
        let sizes = [piece.begin() - at, piece.end() - piece.begin()].map(usize::try_from);
        let [Ok(gap), Ok(len)] = sizes else { return Err(wrong("it is more than this machine addresses")) };
        let (_, rest) = memory.split_at_mut(gap);
        let (piece_memory, rest) = rest.split_at_mut(len);
        (memory, at) = (rest, piece.end());
        tasks.push(Task { buffer, nth, memory: piece_memory });
    }
    Ok(tasks)
}

/// A reader.
fn read_all(work: &Work<'_>, board: &Board<'_>) {
    let mut staging = Staging::default();
    while let Some(task) = board.next() {
        read_one(work, board, task, &mut staging);
    }
    board.lock().done.staging_bytes += staging.taken_bytes();
}

/// The caller, where it is the only one.
fn read_alone(work: &Work<'_>, board: &Board<'_>, ask: Ask<'_>) {
    let mut staging = Staging::default();
    while let Some(task) = board.next() {
        read_one(work, board, task, &mut staging);
        board.ask(&mut *ask);
    }
    board.lock().done.staging_bytes += staging.taken_bytes();
}

fn read_one(work: &Work<'_>, board: &Board<'_>, task: Task<'_>, staging: &mut Staging) {
    let Task { buffer, nth, memory } = task;
    let piece = &work.pieces[buffer][nth];
    match piece::read(work.storage, piece, memory, staging) {
        Ok(way) => {
            let done = &mut board.lock().done;
            *match way {
                Way::Direct => &mut done.direct_bytes,
                Way::Staged => &mut done.staged_bytes,
                Way::Buffered => &mut done.buffered_bytes,
            } += piece.bytes;
            board.read_bytes.fetch_add(piece.bytes, Ordering::Relaxed);
        }
        Err(fault) => board.end(Ended::Piece { buffer, nth, fault }),
    }
}
