//! Streams and events of the host device: threads that run jobs in order.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use poorwill_core::{DriverError, DriverErrorKind, Op, Pending, StreamId};

use crate::process::Owner;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Debug)]
pub(super) struct HostStream {
    id: StreamId,
    owner: Owner,
    jobs: Sender<Job>,
    unfinished: Arc<AtomicUsize>,
    worker: JoinHandle<()>,
}

impl HostStream {
    pub(super) fn start(id: StreamId, owner: Owner, op: Op) -> Result<Self, DriverError> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let work = move || queue.into_iter().for_each(|job| job());
        let worker = thread::Builder::new()
            .name(format!("poorwill-host-{}", id.0))
            .spawn(work)
            .map_err(|error| DriverError::new(op, system("spawn a thread", &error)))?;
        Ok(Self { id, owner, jobs, unfinished: Arc::default(), worker })
    }

    pub(super) fn submit<T: Send + 'static>(
        &self,
        op: Op,
        work: impl FnOnce() -> Result<T, DriverErrorKind> + Send + 'static,
    ) -> Result<Pending<T>, DriverError> {
        let (sender, outcome) = mpsc::sync_channel(1);
        let (id, owner, unfinished) = (self.id, self.owner, Arc::clone(&self.unfinished));
        let ended_here = Arc::new(AtomicBool::new(false));
        let has_ended = Arc::clone(&ended_here);
        let job = Box::new(move || {
            // Work may run a caller's code (a host buffer's); a panic there fails only this work.
            let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(panicked()));
            // Before the outcome is sent: a waiter that sees the work finish finds the stream idle.
            unfinished.fetch_sub(1, Ordering::Release);
            // Without a waiter the outcome is dropped, as the contract says.
            let _ = sender.send(result);
            ended_here.store(true, Ordering::Release);
        });
        self.unfinished.fetch_add(1, Ordering::Relaxed);
        self.jobs.send(job).map_err(|_| ended(op, id))?;
        let wait = move || {
            owner.check(op)?;
            match outcome.recv() {
                Ok(result) => result.map_err(|kind| DriverError::new(op, kind)),
                Err(_) => Err(ended(op, id)),
            }
        };
        Ok(Pending::new(wait).telling(move || has_ended.load(Ordering::Acquire)))
    }

    /// Reliable only while the caller prevents queuing.
    pub(super) fn is_idle(&self) -> bool {
        self.unfinished.load(Ordering::Acquire) == 0
    }

    pub(super) fn finish(self) {
        drop(self.jobs);
        if self.worker.thread().id() == thread::current().id() {
            return; // The device was dropped by its own last job; the thread ends by itself.
        }
        // A job's panic was already reported to its waiter.
        let _ = self.worker.join();
    }
}

fn panicked() -> DriverErrorKind {
    let text = "code of the host that the work called (a host buffer's, or a function's) panicked".into();
    DriverErrorKind::Device { code: 0, name: "work panicked".into(), text }
}

fn ended(op: Op, stream: StreamId) -> DriverError {
    let text = format!("the thread of {stream} has ended");
    DriverError::new(op, DriverErrorKind::Device { code: 0, name: "stream ended".into(), text })
}

pub(super) fn system(what: &str, error: &std::io::Error) -> DriverErrorKind {
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
