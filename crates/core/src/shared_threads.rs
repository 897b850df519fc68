//! Threads of one kind that their users in a process share: as many as there is work, and a few that wait for more.
//!
//! Work never waits for other work: where no thread waits, it gets a new one. When the last user leaves, all threads
//! have ended; if it leaves in its own work, they end by themselves. A forked child shares none of its parent's.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, ThreadId};
use std::{fmt, io, mem, process};

use crate::per_process::SharedInProcess;

/// Threads that wait for work, at most.
const IDLE_MAX: usize = 8;

type SharedWork = Box<dyn FnOnce() + Send>;

/// A kind of threads, by their name.
#[doc(hidden)]
#[derive(Debug)]
pub struct ThreadKind {
    name: &'static str,
    shared: SharedInProcess<SharedThreads>,
}

impl ThreadKind {
    /// An unused kind.
    #[must_use]
    pub const fn named(name: &'static str) -> Self {
        Self { name, shared: SharedInProcess::new() }
    }

    /// The threads of this process, for one user. Until it drops them, its work ends.
    #[must_use]
    pub fn share(&self) -> Arc<SharedThreads> {
        let make = || Ok::<_, Infallible>(SharedThreads::of_this_process(self.name));
        self.shared.get_or_make(make).unwrap_or_else(|never| match never {})
    }
}

/// The threads of a kind in one process.
#[doc(hidden)]
pub struct SharedThreads {
    name: &'static str,
    process: u32,
    crew: Arc<Crew>,
}

#[derive(Default)]
struct Crew {
    now: Mutex<CrewNow>,
    changed: Condvar,
}

#[derive(Default)]
struct CrewNow {
    /// At most as much as threads wait, so that each has its own.
    queue: VecDeque<SharedWork>,
    idle: usize,
    is_over: bool,
    threads: Vec<JoinHandle<()>>,
    /// The last one that had nothing to wait for. It ends without further work.
    leaving: Option<JoinHandle<()>>,
}

impl SharedThreads {
    fn of_this_process(name: &'static str) -> Self {
        Self { name, process: process::id(), crew: Arc::default() }
    }

    /// Begins `work` at once, on a thread of its own while it lasts. A panic ends the thread.
    ///
    /// # Errors
    /// The system refuses another thread. The work is dropped.
    pub fn start(&self, work: impl FnOnce() + Send + 'static) -> io::Result<Task> {
        let task = Task::default();
        let signal = TaskEnd(Arc::clone(&task.0));
        let work: SharedWork = Box::new(move || {
            signal.0.set(TaskProgress::Begun(thread::current().id()));
            work();
            drop(signal); // With a panic likewise last, after all that the work owned.
        });
        let mut now = self.crew.lock();
        if now.queue.len() < now.idle {
            now.queue.push_back(work);
            drop(now);
            self.crew.changed.notify_one();
        } else {
            let crew = Arc::clone(&self.crew);
            let run = move || crew.run(work);
            now.threads.push(thread::Builder::new().name(self.name.into()).spawn(run)?);
        }
        Ok(task)
    }
}

impl Crew {
    fn lock(&self) -> MutexGuard<'_, CrewNow> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, first: SharedWork) {
        let mut next = Some(first);
        while let Some(work) = next {
            work();
            next = self.next();
        }
    }

    fn next(&self) -> Option<SharedWork> {
        let mut now = self.lock();
        if now.idle >= IDLE_MAX && !now.is_over {
            return self.leave(now);
        }
        now.idle += 1;
        let waits = |now: &mut CrewNow| now.queue.is_empty() && !now.is_over;
        let mut now = self.changed.wait_while(now, waits).unwrap_or_else(PoisonError::into_inner);
        now.idle -= 1;
        now.queue.pop_front()
    }

    /// Joins the one that has left before, so that no more than one is ever left to join.
    fn leave(&self, mut now: MutexGuard<'_, CrewNow>) -> Option<SharedWork> {
        let here = now.threads.iter().position(is_this);
        let before = here.map(|at| now.threads.swap_remove(at)).and_then(|this| now.leaving.replace(this));
        drop(now);
        let _ = before.map(JoinHandle::join).transpose().map_err(mem::forget);
        None
    }
}

fn is_this(thread: &JoinHandle<()>) -> bool {
    thread.thread().id() == thread::current().id()
}

impl Drop for SharedThreads {
    fn drop(&mut self) {
        if self.process != process::id() {
            return; // A forked child: the threads are the parent's.
        }
        let mut now = self.crew.lock();
        now.is_over = true;
        let mut threads = mem::take(&mut now.threads);
        threads.extend(now.leaving.take());
        drop(now);
        self.crew.changed.notify_all();
        // The last user may be dropped by its own work. Other work may wait for that, so it waits for none.
        if !threads.iter().any(is_this) {
            for thread in threads {
                let _ = thread.join().map_err(mem::forget);
            }
        }
    }
}

impl fmt::Debug for SharedThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedThreads").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Work that was started.
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct Task(Arc<TaskMonitor>);

#[derive(Debug, Default)]
struct TaskMonitor {
    progress: Mutex<TaskProgress>,
    ended: Condvar,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum TaskProgress {
    #[default]
    Queued,
    Begun(ThreadId),
    Ended,
}

impl Task {
    /// Waits until the work has ended and all that it owned is dropped. In the work itself it returns at once.
    pub fn join(self) {
        let here = TaskProgress::Begun(thread::current().id());
        let progress = self.0.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |progress: &mut TaskProgress| *progress != TaskProgress::Ended && *progress != here;
        drop(self.0.ended.wait_while(progress, waits).unwrap_or_else(PoisonError::into_inner));
    }
}

impl TaskMonitor {
    fn set(&self, progress: TaskProgress) {
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner) = progress;
    }
}

struct TaskEnd(Arc<TaskMonitor>);

impl Drop for TaskEnd {
    fn drop(&mut self) {
        self.0.set(TaskProgress::Ended);
        self.0.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// Far longer than any test takes.
    const HANG: Duration = Duration::from_secs(240);

    /// Waits until so many threads wait for work.
    fn settle(threads: &SharedThreads, idle: usize) {
        while threads.crew.lock().idle != idle {
            thread::yield_now();
        }
    }

    #[test]
    fn work_waits_for_no_other_work_and_few_threads_stay() {
        static KIND: ThreadKind = ThreadKind::named("poorwill-test");
        let threads = KIND.share();
        for _ in 0..3 {
            let together = Arc::new(Barrier::new(3 * IDLE_MAX + 1));
            let tasks: Vec<_> = (0..3 * IDLE_MAX)
                .map(|_| {
                    let together = Arc::clone(&together);
                    let work = move || {
                        together.wait();
                    };
                    threads.start(work).unwrap()
                })
                .collect();
            together.wait(); // Ends only if all are under way at once.
            tasks.into_iter().for_each(Task::join);
            settle(&threads, IDLE_MAX);
            while threads.crew.lock().threads.len() > IDLE_MAX {
                thread::yield_now();
            }
        }
    }

    #[test]
    fn one_after_another_needs_one_thread() {
        static KIND: ThreadKind = ThreadKind::named("poorwill-test");
        let threads = KIND.share();
        let (tell, ids) = mpsc::channel();
        for _ in 0..50 {
            let tell = tell.clone();
            threads.start(move || tell.send(thread::current().id()).unwrap()).unwrap().join();
            settle(&threads, 1);
        }
        drop(tell);
        let mut ids: Vec<_> = ids.iter().collect();
        ids.dedup();
        assert_eq!(ids.len(), 1);
    }

    #[test]
    fn joined_work_owns_nothing_any_more_even_after_a_panic() {
        static KIND: ThreadKind = ThreadKind::named("poorwill-test");
        struct Owned(Arc<AtomicUsize>);
        impl Drop for Owned {
            fn drop(&mut self) {
                thread::yield_now();
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let (threads, drops) = (KIND.share(), Arc::new(AtomicUsize::new(0)));
        for panics in [false, true, false] {
            let owned = Owned(Arc::clone(&drops));
            let before = drops.load(Ordering::Relaxed);
            let work = move || {
                let _owned = &owned;
                assert!(!panics, "as it is meant");
            };
            threads.start(work).unwrap().join();
            assert_eq!(drops.load(Ordering::Relaxed), before + 1);
        }
    }

    #[test]
    fn the_last_user_may_leave_from_its_own_work() {
        static KIND: ThreadKind = ThreadKind::named("poorwill-test");
        let threads = KIND.share();
        let (crew, own) = (Arc::clone(&threads.crew), Arc::clone(&threads));
        let (tell, heard) = mpsc::channel();
        let (left, has_left) = mpsc::channel();
        let (end_other, ends) = mpsc::channel::<()>();
        threads.start(move || ends.recv().unwrap_or_default()).unwrap();
        let last = threads
            .start(move || {
                heard.recv().unwrap();
                drop(own);
                left.send(()).unwrap();
            })
            .unwrap();
        drop(threads);
        tell.send(()).unwrap();
        has_left.recv_timeout(HANG).expect("it waits for work of others, which may wait for it");
        last.join();
        drop(end_other);
        assert!(crew.lock().is_over);
        let again = KIND.share();
        assert!(!Arc::ptr_eq(&again.crew, &crew), "later users get others");
        again.start(|| ()).unwrap().join();
    }
}
