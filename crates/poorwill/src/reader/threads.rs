//! Reader threads and their caller, which provides the tasks, observes progress, and may stop.

use std::mem;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

const OBSERVE_INTERVAL: Duration = Duration::from_millis(50);

/// Runs `read` for each task on one thread per worker, and returns the number of threads, or the first
/// error. `read` returns its bytes. If no thread starts, the caller reads.
///
/// The caller's thread produces the batches of tasks, and calls `observe` with the bytes read so far. After
/// the first error or panic no task begins. Workers are returned in any case; a panic continues after all
/// threads end.
pub(crate) fn run<T: Send, W: Send, E: Send>(
    workers: &mut Vec<W>,
    batches: impl IntoIterator<Item = Result<Vec<T>, E>>,
    read: impl Fn(T, &mut W) -> Result<u64, E> + Sync,
    observe: &mut dyn FnMut(u64) -> ControlFlow<E>,
) -> Result<usize, E> {
    let (wanted, idle) = (workers.len(), Mutex::new(mem::take(workers)));
    let (is_stopped, failed, read_bytes) = (AtomicBool::new(false), Mutex::new(None), AtomicU64::new(0));
    let (queue, tasks) = mpsc::channel();
    let (finish, finished) = mpsc::channel();
    let tasks = Mutex::new(tasks);
    let fail = |error| {
        lock(&failed).get_or_insert(error);
        is_stopped.store(true, Ordering::Relaxed);
    };
    let work = |worker: &mut W, after_each: &mut dyn FnMut()| {
        let next = || lock(&tasks).recv().ok().filter(|_| !is_stopped.load(Ordering::Relaxed));
        while let Some(task) = next() {
            match read(task, worker) {
                Ok(bytes) => _ = read_bytes.fetch_add(bytes, Ordering::Relaxed),
                Err(error) => fail(error),
            }
            after_each();
        }
    };
    let mut observe = || {
        if let ControlFlow::Break(error) = observe(read_bytes.load(Ordering::Relaxed)) {
            fail(error);
        }
    };
    let readers = thread::scope(|scope| {
        let _caller = StopOnPanic(&is_stopped);
        let started = (0..wanted).take_while(|_| {
            let (finish, idle, work, is_stopped) = (finish.clone(), &idle, &work, &is_stopped);
            let reader = move || {
                let _reader = StopOnPanic(is_stopped);
                let Some(mut worker) = lock(idle).pop() else { return };
                work(&mut worker, &mut || ());
                let _ = finish.send(worker);
            };
            thread::Builder::new().name("poorwill-read".into()).spawn_scoped(scope, reader).is_ok()
        });
        let readers = started.count();
        drop(finish);
        let mut batches = batches.into_iter();
        loop {
            observe();
            match if is_stopped.load(Ordering::Relaxed) { None } else { batches.next() } {
                Some(Ok(batch)) => batch.into_iter().for_each(|task| _ = queue.send(task)),
                Some(Err(error)) => fail(error),
                None => break,
            }
        }
        drop(queue);
        if let (0, Some(worker)) = (readers, lock(&idle).first_mut()) {
            work(worker, &mut observe);
        }
        loop {
            match finished.recv_timeout(OBSERVE_INTERVAL) {
                Ok(worker) => lock(&idle).push(worker),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            observe();
        }
        readers.max(1)
    });
    *workers = idle.into_inner().unwrap_or_else(PoisonError::into_inner);
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    failed.map_or(Ok(readers), Err)
}

/// Stops the work when its thread panics, the caller's included.
struct StopOnPanic<'a>(&'a AtomicBool);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
