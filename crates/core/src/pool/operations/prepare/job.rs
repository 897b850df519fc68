//! What the thread and the caller of a preparation share.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::report::{PrepareProgress, PrepareReport};
use crate::driver::Driver;
use crate::pool::tools::error::{PoolError, Result};
use crate::pool::tools::keys::TagKey;
use crate::pool::tools::tag_lock::Monitor;

/// A sleep that is being prepared. Dropping it lets the preparation go on.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// let preparation = arena.prepare_sleep(&SleepRequest::all(Level::One))?;
/// // Serve requests meanwhile.
/// preparation.wait()?;
/// arena.sleep(&SleepRequest::all(Level::One))?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Preparation {
    job: Arc<Job>,
    driver: Arc<dyn Driver>,
}

#[derive(Debug)]
pub(super) struct Job {
    cancelled: AtomicBool,
    done_bytes: AtomicU64,
    total_bytes: u64,
    /// Counts of backup drops at the start.
    forgets: BTreeMap<TagKey, u64>,
    /// [`PrepareOutcome::ended`], readable without a lock.
    ended: AtomicBool,
    outcome: Monitor<PrepareOutcome>,
}

#[derive(Debug, Default)]
struct PrepareOutcome {
    ended: bool,
    result: Option<Result<PrepareReport>>,
}

impl Job {
    /// `forgets` has the counts of backup drops of each tag.
    pub(super) fn new(total_bytes: u64, forgets: BTreeMap<TagKey, u64>) -> Self {
        Self {
            cancelled: AtomicBool::new(false),
            done_bytes: AtomicU64::new(0),
            total_bytes,
            forgets,
            ended: AtomicBool::new(false),
            outcome: Monitor::new(PrepareOutcome::default()),
        }
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    pub(super) fn forgets(&self, tag: TagKey) -> Option<u64> {
        self.forgets.get(&tag).copied()
    }

    pub(super) fn note_visited(&self, bytes: u64) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Preparation {
    pub(super) fn new(job: Arc<Job>, driver: Arc<dyn Driver>) -> Self {
        Self { job, driver }
    }

    /// Requests its end. Copies in flight are finished and kept.
    pub fn cancel(&self) {
        self.job.cancelled.store(true, Ordering::Relaxed);
    }

    /// How far the preparation is.
    #[must_use]
    pub fn progress(&self) -> PrepareProgress {
        let is_ended = self.job.ended.load(Ordering::Acquire);
        let done_bytes = self.job.done_bytes.load(Ordering::Relaxed);
        PrepareProgress { done_bytes, total_bytes: self.job.total_bytes, is_ended }
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// `PrepareFailed` when host memory was lacking or the device failed; backups stored by then stay. `Lost`
    /// when backups that the last wake did not compare turn out to be spoiled. `Poisoned` when the thread has
    /// panicked. `WrongProcess` in a forked child, which has no such thread.
    pub fn wait(self) -> Result<PrepareReport> {
        self.driver.check_process().map_err(PoolError::WrongProcess)?;
        let mut outcome = self.job.outcome.lock_anyway();
        while !outcome.ended {
            outcome = self.job.outcome.wait(outcome).ok_or(PoolError::Poisoned)?;
        }
        outcome.result.take().unwrap_or(Err(PoolError::Poisoned))
    }
}

/// Signals the end, also of a thread that panics.
pub(super) struct EndNotifier(Arc<Job>);

impl EndNotifier {
    pub(super) fn of(job: Arc<Job>) -> Self {
        Self(job)
    }

    pub(super) fn job(&self) -> &Job {
        &self.0
    }

    pub(super) fn end(self, result: Result<PrepareReport>) {
        self.0.outcome.lock_anyway().result = Some(result);
    }
}

impl Drop for EndNotifier {
    fn drop(&mut self) {
        self.0.outcome.lock_anyway().ended = true;
        self.0.ended.store(true, Ordering::Release);
        self.0.outcome.notify();
    }
}
