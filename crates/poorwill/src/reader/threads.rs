//! Reader threads and their caller, which provides the tasks, observes progress, and may stop.

use std::mem;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
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
    let wanted = workers.len();
    let (queue, tasks) = mpsc::channel();
    let (finish, finished) = mpsc::channel();
    let shared = Reading {
        tasks: Mutex::new(tasks),
        idle: Mutex::new(mem::take(workers)),
        is_stopped: AtomicBool::new(false),
        failed: Mutex::new(None),
        read_bytes: AtomicU64::new(0),
    };
    let mut observe = || {
        if let ControlFlow::Break(error) = observe(shared.read_bytes.load(Ordering::Relaxed)) {
            shared.fail(error);
        }
    };
    let readers = thread::scope(|scope| {
        let _caller = StopOnPanic(&shared.is_stopped);
        let started = (0..wanted).take_while(|_| {
            let (finish, shared, read) = (finish.clone(), &shared, &read);
            let reader = move || {
                let _reader = StopOnPanic(&shared.is_stopped);
                let Some(mut worker) = lock(&shared.idle).pop() else { return };
                shared.work(&mut worker, read, &mut || ());
                let _ = finish.send(worker);
            };
            thread::Builder::new().name("poorwill-read".into()).spawn_scoped(scope, reader).is_ok()
        });
        let readers = started.count();
        drop(finish);
        let mut batches = batches.into_iter();
        loop {
            observe();
            match if shared.is_stopped() { None } else { batches.next() } {
                Some(Ok(batch)) => batch.into_iter().for_each(|task| _ = queue.send(task)),
                Some(Err(error)) => shared.fail(error),
                None => break,
            }
        }
        drop(queue);
        if let (0, Some(worker)) = (readers, lock(&shared.idle).first_mut()) {
            shared.work(worker, &read, &mut observe);
        }
        shared.take_back(&finished, &mut observe);
        readers.max(1)
    });
    *workers = shared.idle.into_inner().unwrap_or_else(PoisonError::into_inner);
    let failed = shared.failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    failed.map_or(Ok(readers), Err)
}

/// What the threads and their caller share.
struct Reading<T, W, E> {
    tasks: Mutex<Receiver<T>>,
    idle: Mutex<Vec<W>>,
    is_stopped: AtomicBool,
    failed: Mutex<Option<E>>,
    read_bytes: AtomicU64,
}

impl<T, W, E> Reading<T, W, E> {
    /// Does tasks until there are none.
    fn work(
        &self,
        worker: &mut W,
        read: &impl Fn(T, &mut W) -> Result<u64, E>,
        after_each: &mut dyn FnMut(),
    ) {
        let next = || lock(&self.tasks).recv().ok().filter(|_| !self.is_stopped());
        while let Some(task) = next() {
            match read(task, worker) {
                Ok(bytes) => _ = self.read_bytes.fetch_add(bytes, Ordering::Relaxed),
                Err(error) => self.fail(error),
            }
            after_each();
        }
    }

    /// Waits for all workers.
    fn take_back(&self, finished: &Receiver<W>, observe: &mut dyn FnMut()) {
        loop {
            match finished.recv_timeout(OBSERVE_INTERVAL) {
                Ok(worker) => lock(&self.idle).push(worker),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            observe();
        }
    }

    fn fail(&self, error: E) {
        lock(&self.failed).get_or_insert(error);
        self.is_stopped.store(true, Ordering::Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }
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
