//! Streams and events of the host device: queues of jobs that run in order.
//!
//! A stream with jobs has a thread, one of those that the host devices of a process share. An idle stream has none.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::{fmt, io, mem};

use poorwill_core::shared_threads::{SharedThreads, Task, ThreadKind};
use poorwill_core::{DriverError, DriverErrorKind, Op, Pending, StreamId};

use crate::process::Owner;

/// Of all host devices.
static THREADS: ThreadKind = ThreadKind::named("poorwill-host");

type Job = Box<dyn FnOnce() + Send>;

/// Work that was not queued, and why. Dropping the work runs code of callers, which may use the device: no lock of the
/// device may be held.
pub(super) struct Refused {
    error: DriverError,
    _job: Job,
}

impl Refused {
    pub(super) fn into_error(self) -> DriverError {
        self.error
    }
}

#[derive(Debug)]
pub(super) struct HostStream {
    id: StreamId,
    owner: Owner,
    threads: Arc<SharedThreads>,
    queue: Arc<Queue>,
    unfinished: Arc<AtomicUsize>,
}

#[derive(Default)]
struct Queue(Mutex<StreamJobs>);

#[derive(Default)]
struct StreamJobs {
    jobs: VecDeque<Job>,
    /// Runs them until none is left; then it is ending.
    runner: Option<Task>,
    is_running: bool,
}

impl HostStream {
    pub(super) fn new(id: StreamId, owner: Owner) -> Self {
        let (queue, unfinished) = Default::default();
        Self { id, owner, threads: THREADS.share(), queue, unfinished }
    }

    pub(super) fn submit<T: Send + 'static>(
        &self,
        op: Op,
        work: impl FnOnce() -> Result<T, DriverErrorKind> + Send + 'static,
    ) -> Result<Pending<T>, Refused> {
        let (sender, outcome) = mpsc::sync_channel(1);
        let (id, owner, unfinished) = (self.id, self.owner, Arc::clone(&self.unfinished));
        let ended_here = Arc::new(AtomicBool::new(false));
        let has_ended = Arc::clone(&ended_here);
        let job = Box::new(move || {
            // Work may run a caller's code (a host buffer's); a panic there fails only this work.
            // Dropping what the panic carries may panic again.
            let result = catch_unwind(AssertUnwindSafe(work)).map_err(mem::forget);
            let result = result.unwrap_or_else(|()| Err(panicked()));
            // Before the outcome is sent: a waiter that sees the work finish finds the stream idle.
            unfinished.fetch_sub(1, Ordering::Release);
            // Without a waiter the outcome is dropped, as the contract says.
            let _ = sender.send(result);
            ended_here.store(true, Ordering::Release);
        });
        self.unfinished.fetch_add(1, Ordering::Relaxed);
        self.queue.push(&self.threads, job).map_err(|(error, job)| {
            self.unfinished.fetch_sub(1, Ordering::Relaxed);
            let error = DriverError::new(op, system("start a thread for a stream", &error));
            Refused { error, _job: job }
        })?;
        let wait = move || {
            owner.check(op)?;
            match outcome.recv() {
                Ok(result) => result.map_err(|kind| DriverError::new(op, kind)),
                Err(_) => Err(lost(op, id)),
            }
        };
        Ok(Pending::new(wait).telling(move || has_ended.load(Ordering::Acquire)))
    }

    /// All that was queued before, and what it drops. A stream without jobs needs no thread for it.
    pub(super) fn drain(&self, op: Op) -> Result<Pending<()>, DriverError> {
        if self.queue.lock().is_running {
            return self.submit(op, || Ok(())).map_err(Refused::into_error);
        }
        let owner = self.owner;
        Ok(Pending::new(move || owner.check(op)))
    }

    /// Reliable only while the caller prevents queuing.
    pub(super) fn is_idle(&self) -> bool {
        self.unfinished.load(Ordering::Acquire) == 0
    }

    /// Returns after the last job, or at once in that job if it drops the device.
    pub(super) fn finish(self) {
        let runner = self.queue.lock().runner.take();
        runner.into_iter().for_each(Task::join);
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, StreamJobs> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(self: &Arc<Self>, threads: &SharedThreads, job: Job) -> Result<(), (io::Error, Job)> {
        let mut queued = self.lock();
        if !queued.is_running {
            let queue = Arc::clone(self);
            match threads.start(move || queue.run()) {
                Ok(runner) => queued.runner = Some(runner),
                Err(error) => return Err((error, job)),
            }
            queued.is_running = true;
        }
        queued.jobs.push_back(job);
        Ok(())
    }

    fn run(&self) {
        while let Some(job) = self.next() {
            // Dropping what no waiter took may panic; dropping the payload may panic again.
            let _ = catch_unwind(AssertUnwindSafe(job)).map_err(mem::forget);
        }
    }

    fn next(&self) -> Option<Job> {
        let mut queued = self.lock();
        let job = queued.jobs.pop_front();
        queued.is_running = job.is_some();
        job
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}

fn panicked() -> DriverErrorKind {
    let text = "code of the host that the work called (a host buffer's, or a function's) panicked".into();
    DriverErrorKind::Device { code: 0, name: "work panicked".into(), text }
}

fn lost(op: Op, stream: StreamId) -> DriverError {
    let text = format!("work on {stream} ended without a result: dropping what it used panicked");
    DriverError::new(op, DriverErrorKind::Device { code: 0, name: "work lost".into(), text })
}

pub(super) fn system(what: &str, error: &io::Error) -> DriverErrorKind {
    let code = error.raw_os_error();
    let text = error.to_string();
    // The code is printed separately.
    let text = code.and_then(|code| text.strip_suffix(&format!(" (os error {code})"))).unwrap_or(&text);
    let hint = match code {
        Some(libc::EMFILE | libc::ENFILE) => "; raise the limit on open files (ulimit -n)",
        Some(libc::EAGAIN) => "; the limit on processes and threads may be reached (ulimit -u)",
        _ => "",
    };
    DriverErrorKind::Device {
        code: i64::from(code.unwrap_or(0)),
        name: format!("could not {what}"),
        text: format!("{text}{hint}"),
    }
}

#[derive(Debug, Default)]
pub(super) struct HostEvent {
    passed: Mutex<bool>,
    changed: Condvar,
}

impl HostEvent {
    pub(super) fn pass(self: &Arc<Self>) {
        *self.passed.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    pub(super) fn has_passed(&self) -> bool {
        *self.passed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wait(&self) {
        let passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
        let _passed =
            self.changed.wait_while(passed, |passed| !*passed).unwrap_or_else(PoisonError::into_inner);
    }
}
