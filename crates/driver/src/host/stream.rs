//! Streams and events of the host device: threads that run jobs in order.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use poorwill_core::{DriverError, DriverErrorKind, Op, Pending, StreamId};

use crate::process::Owner;

type Job = Box<dyn FnOnce() + Send>;

/// A queue of jobs and the thread that works it off.
#[derive(Debug)]
pub(super) struct Stream {
    id: StreamId,
    owner: Owner,
    jobs: Sender<Job>,
    /// Jobs that have not finished.
    unfinished: Arc<AtomicUsize>,
    worker: JoinHandle<()>,
}

impl Stream {
    pub(super) fn start(id: StreamId, owner: Owner, op: Op) -> Result<Self, DriverError> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let work = move || queue.into_iter().for_each(|job| job());
        let worker = thread::Builder::new()
            .name(format!("poorwill-host-{}", id.0))
            .spawn(work)
            .map_err(|error| DriverError::new(op, system("spawn a thread", &error)))?;
        Ok(Self { id, owner, jobs, unfinished: Arc::default(), worker })
    }

    /// Queues `work` and gives its outcome.
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
            // Work runs code of whoever made the host buffer; a panic there fails this work and no other.
            let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(panicked()));
            // Before anybody is told: who has seen the work finish finds the stream idle.
            unfinished.fetch_sub(1, Ordering::Release);
            // Nobody may be waiting any more: then the outcome is dropped, as the contract says.
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

    /// Whether everything queued has finished. Only who keeps others from queuing can rely on it.
    pub(super) fn is_idle(&self) -> bool {
        self.unfinished.load(Ordering::Acquire) == 0
    }

    /// Works off what is queued, then ends the thread.
    pub(super) fn finish(self) {
        drop(self.jobs);
        if self.worker.thread().id() == thread::current().id() {
            return; // The device was dropped by its own last job: the thread ends by itself.
        }
        // A job that panicked has reported that already, to whoever waited for it.
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

/// An error of the operating system, in the contract's form.
pub(super) fn system(what: &str, error: &std::io::Error) -> DriverErrorKind {
    let code = error.raw_os_error();
    let text = error.to_string();
    // The number stands beside the text already.
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

/// A flag that passes once.
#[derive(Debug, Default)]
pub(super) struct Event {
    passed: Mutex<bool>,
    changed: Condvar,
}

impl Event {
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
