//! Threads that read, and whoever has them read: it makes what they read into, is told how far they are, and says
//! whether to go on.

use std::mem;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// How often the caller is told, and asked whether to go on.
const TELL: Duration = Duration::from_millis(50);

/// Has a thread with each of `hands` `read` tasks, and gives how many there were. Where no thread is to be had, the
/// caller reads. What `read` gives is how many bytes those were.
///
/// The caller's thread makes the tasks, batch by batch, and calls `ask` meanwhile with how much has been read. The first
/// error of anybody's is the outcome, nothing is begun after it, and the hands come back. Nor is anything after a panic,
/// which goes on when all readers have ended.
pub(crate) fn run<T: Send, H: Send, E: Send>(
    hands: &mut Vec<H>,
    batches: impl IntoIterator<Item = Result<Vec<T>, E>>,
    read: impl Fn(T, &mut H) -> Result<u64, E> + Sync,
    ask: &mut dyn FnMut(u64) -> ControlFlow<E>,
) -> Result<usize, E> {
    let (wanted, idle) = (hands.len(), Mutex::new(mem::take(hands)));
    let (is_over, failed, read_bytes) = (AtomicBool::new(false), Mutex::new(None), AtomicU64::new(0));
    let (more, tasks) = mpsc::channel();
    let (leave, left) = mpsc::channel();
    let tasks = Mutex::new(tasks);
    let fail = |error| {
        lock(&failed).get_or_insert(error);
        is_over.store(true, Ordering::Relaxed);
    };
    let work = |hand: &mut H, after_each: &mut dyn FnMut()| {
        let next = || lock(&tasks).recv().ok().filter(|_| !is_over.load(Ordering::Relaxed));
        while let Some(task) = next() {
            match read(task, hand) {
                Ok(bytes) => _ = read_bytes.fetch_add(bytes, Ordering::Relaxed),
                Err(error) => fail(error),
            }
            after_each();
        }
    };
    let mut ask = || {
        if let ControlFlow::Break(error) = ask(read_bytes.load(Ordering::Relaxed)) {
            fail(error);
        }
    };
    let readers = thread::scope(|scope| {
        let _caller = EndsAtPanic(&is_over);
        let started = (0..wanted).take_while(|_| {
            let (leave, idle, work, is_over) = (leave.clone(), &idle, &work, &is_over);
            let reader = move || {
                let _reader = EndsAtPanic(is_over);
                let Some(mut hand) = lock(idle).pop() else { return };
                work(&mut hand, &mut || ());
                let _ = leave.send(hand);
            };
            thread::Builder::new().name("poorwill-read".into()).spawn_scoped(scope, reader).is_ok()
        });
        let readers = started.count();
        drop(leave);
        let mut batches = batches.into_iter();
        loop {
            ask();
            match if is_over.load(Ordering::Relaxed) { None } else { batches.next() } {
                Some(Ok(batch)) => batch.into_iter().for_each(|task| _ = more.send(task)),
                Some(Err(error)) => fail(error),
                None => break,
            }
        }
        drop(more);
        if let (0, Some(hand)) = (readers, lock(&idle).first_mut()) {
            work(hand, &mut ask);
        }
        loop {
            match left.recv_timeout(TELL) {
                Ok(hand) => lock(&idle).push(hand),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            ask();
        }
        readers.max(1)
    });
    *hands = idle.into_inner().unwrap_or_else(PoisonError::into_inner);
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    failed.map_or(Ok(readers), Err)
}

/// Whoever panics, be it the caller where it is asked, ends the work.
struct EndsAtPanic<'a>(&'a AtomicBool);

impl Drop for EndsAtPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
