//! The thread of a pool's reaper, one of those that the pools of a process share.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use crate::shared_threads::{SharedThreads, Task, ThreadKind};

static REAPERS: ThreadKind = ThreadKind::named("poorwill-reaper");

#[derive(Debug)]
pub(in crate::pool) struct ReaperThread {
    threads: Arc<SharedThreads>,
    task: Mutex<Option<Task>>,
}

impl ReaperThread {
    pub(in crate::pool) fn new() -> Self {
        Self { threads: REAPERS.share(), task: Mutex::default() }
    }

    /// The last work must be ending.
    pub(in crate::pool) fn start(&self, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        // Locked until it is known, so that closing the pool joins what was started.
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        *task = Some(self.threads.start(work)?);
        Ok(())
    }

    pub(in crate::pool) fn join(&self) {
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        task.into_iter().for_each(Task::join);
    }
}
