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

    /// The last work must be ending; this waits for its end.
    pub(in crate::pool) fn start(&self, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        // Locked until it is known, so that closing the pool joins what was started.
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        task.take().into_iter().for_each(Task::join);
        *task = Some(self.threads.start(work)?);
        Ok(())
    }

    /// Locked until then, so that every caller waits.
    pub(in crate::pool) fn join(&self) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        task.take().into_iter().for_each(Task::join);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    /// Work that has begun and goes on for a moment, and whether it has ended.
    fn ending(reaper: &ReaperThread) -> Arc<AtomicBool> {
        let has_ended = Arc::new(AtomicBool::new(false));
        let (begins, begun) = channel();
        let ends = Arc::clone(&has_ended);
        let work = move || {
            begins.send(()).unwrap();
            (0..10_000).for_each(|_| thread::yield_now());
            ends.store(true, Ordering::Release);
        };
        reaper.start(work).unwrap();
        begun.recv().unwrap();
        has_ended
    }

    #[test]
    fn a_join_waits_for_work_that_was_ending_as_the_next_began() {
        let reaper = ReaperThread::new();
        let has_ended = ending(&reaper);
        reaper.start(|| ()).unwrap();
        reaper.join();
        assert!(has_ended.load(Ordering::Acquire));
    }

    #[test]
    fn every_join_waits() {
        let reaper = ReaperThread::new();
        let has_ended = ending(&reaper);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    reaper.join();
                    assert!(has_ended.load(Ordering::Acquire));
                });
            }
        });
    }
}
