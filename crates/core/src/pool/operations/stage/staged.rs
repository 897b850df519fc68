//! The handle of a staged sleep or wake.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::verdict::{ReadyStep, Stage};
use crate::decision::{Decision, DecisionError, Verdict};
use crate::driver::{Driver, Op};
use crate::pool::shared::Shared;
use crate::pool::tools::cancel::CancellationToken;
use crate::pool::tools::error::{PoolError, Result, UndoneBecause};
use crate::pool::tools::report::{SleepReport, SleepRequest, WakeReport, WakeRequest};
use crate::pool::tools::threads::Threads;

/// A sleep ([`SleepReport`]) or a wake ([`WakeReport`]) that is done but for its last step, and can be undone.
///
/// Dropping it proposes to undo it.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// use poorwill::decision::{Decision, LocalDecision, Verdict};
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag, TagState};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arenas = [(); 2].map(|()| Arena::open(Config::on("host:64MiB".parse().unwrap())).unwrap());
/// let group: Arc<dyn Decision> = Arc::new(LocalDecision::default());
/// let stage = |arena: &Arena| {
///     arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
///     arena.stage_sleep(&SleepRequest::all(Level::One), Arc::clone(&group), Duration::from_secs(30))
/// };
/// let staged = [stage(&arenas[0])?, stage(&arenas[1])?]; // All can sleep.
/// group.decide(Verdict::Commit)?; // From here on all sleep.
/// for one in staged {
///     assert_eq!(one.wait()?.released_bytes, 2 << 20);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "dropping it proposes to undo it"]
pub struct Staged<R> {
    stage: Arc<Stage<R>>,
    driver: Arc<dyn Driver>,
}

impl<R> Staged<R> {
    /// Commits, and waits until it is carried out.
    ///
    /// # Errors
    /// `Undone`: another verdict was there before. `Undecided`: the decision cannot be reached, so this participant waits
    /// for its time to end. Otherwise as [`Staged::wait`].
    pub fn commit(self) -> Result<R> {
        self.decide(Verdict::Commit)?;
        self.wait()
    }

    /// Undoes it, and waits for that.
    ///
    /// # Errors
    /// `Committed`: another verdict was there before. `Stranded` where undoing failed. `Undecided` as for
    /// [`Staged::commit`].
    pub fn undo(self) -> Result<()> {
        let op = self.stage.op;
        self.decide(Verdict::Undo)?;
        match self.wait() {
            Err(PoolError::Undone { .. }) => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Err(PoolError::Committed { op }),
        }
    }

    /// Waits until the verdict, from wherever it comes, is carried out.
    ///
    /// # Errors
    /// `Undone`: everything is as it was before. After a commit, `Shortfall` for a sleep that released less. `Stranded`
    /// where undoing failed. `Poisoned` after a panic, `WrongProcess` in a forked child.
    pub fn wait(self) -> Result<R> {
        self.driver.check_process().map_err(PoolError::WrongProcess)?;
        let progress = self.stage.progress();
        let mut now = progress.lock_anyway();
        progress.notify(); // It may be decided.
        while !now.is_ended {
            now = progress.wait(now).ok_or(PoolError::Poisoned)?;
        }
        now.result.take().unwrap_or(Err(PoolError::Poisoned))
    }

    /// Why it waits beyond its time: the decision cannot be reached.
    #[must_use]
    pub fn problem(&self) -> Option<DecisionError> {
        self.driver.check_process().ok()?;
        self.stage.progress().lock_anyway().problem.clone()
    }

    fn decide(&self, verdict: Verdict) -> Result<()> {
        self.driver.check_process().map_err(PoolError::WrongProcess)?;
        let decided = self.stage.decision.decide(verdict);
        decided.map(drop).map_err(|source| PoolError::Undecided { op: self.stage.op, verdict, source })
    }
}

impl<R> Drop for Staged<R> {
    fn drop(&mut self) {
        if self.driver.check_process().is_err() {
            return; // The parent's.
        }
        let progress = self.stage.progress();
        if !progress.lock_anyway().is_ended {
            // If it fails, time ends it.
            let _ = self.stage.decision.decide(Verdict::Undo);
            drop(progress.lock_anyway());
            progress.notify();
        }
    }
}

/// Signals the end, also of a thread that panics.
struct EndSignal<R>(Arc<Stage<R>>);

impl<R> Drop for EndSignal<R> {
    fn drop(&mut self) {
        self.0.progress().lock_anyway().is_ended = true;
        self.0.progress().notify();
    }
}

impl Shared {
    pub(in crate::pool) fn stage_sleep(
        self: &Arc<Self>,
        threads: &Mutex<Threads>,
        request: &SleepRequest,
        decision: Arc<dyn Decision>,
        undo_after: Duration,
    ) -> Result<Staged<SleepReport>> {
        let request = request.clone();
        let stage = Stage::new("sleep", decision, undo_after);
        self.stage(threads, Op::Unmap, stage, move |shared, when_ready| shared.sleep(&request, when_ready))
    }

    pub(in crate::pool) fn stage_wake(
        self: &Arc<Self>,
        threads: &Mutex<Threads>,
        request: &WakeRequest,
        decision: Arc<dyn Decision>,
        undo_after: Duration,
    ) -> Result<Staged<WakeReport>> {
        let request = request.clone();
        let stage = Stage::new("wake", decision, undo_after);
        self.stage(threads, Op::Map, stage, move |shared, when_ready| shared.wake(&request, when_ready))
    }

    fn stage<R: Send + 'static>(
        self: &Arc<Self>,
        threads: &Mutex<Threads>,
        op: Op,
        stage: Stage<R>,
        call: impl FnOnce(&Self, ReadyStep<'_>) -> Result<R> + Send + 'static,
    ) -> Result<Staged<R>> {
        // Before the lock, as in [`Shared::open_state`].
        self.driver().check_process().map_err(PoolError::WrongProcess)?;
        let name = stage.op;
        let driver = Arc::clone(self.shared_driver());
        let staged = Staged { stage: Arc::new(stage), driver };
        match staged.stage.decision.verdict() {
            Ok(None) => {}
            // A commit without this participant is of an earlier call.
            Ok(Some(_)) => return Err(PoolError::Undone { op: name, because: UndoneBecause::Decided }),
            Err(source) => {
                return Err(PoolError::Undecided { op: name, verdict: Verdict::Commit, source });
            }
        }
        let (shared, notifier) = (Arc::clone(self), EndSignal(Arc::clone(&staged.stage)));
        let cancellation = CancellationToken::current().unwrap_or_default();
        let work = move || {
            let stage = &notifier.0;
            let result = cancellation.scope(|| call(&shared, &|| stage.pass(&shared)));
            stage.progress().lock_anyway().result = Some(result);
        };
        {
            // Locked before the pool is found open, so that closing it joins every started thread.
            let mut threads = threads.lock().unwrap_or_else(PoisonError::into_inner);
            drop(self.open_state()?);
            let started = threads.start("poorwill-stage", op, work);
            started.map_err(|source| PoolError::Driver { op: "stage a sleep or a wake", source })?;
        }
        let progress = staged.stage.progress();
        let mut now = progress.lock_anyway();
        while !now.is_staged && !now.is_ended {
            now = progress.wait(now).ok_or(PoolError::Poisoned)?;
        }
        if now.is_staged {
            drop(now);
            return Ok(staged);
        }
        drop(now);
        // The others need not wait for this one.
        let _ = staged.stage.decision.decide(Verdict::Undo);
        staged.wait().and(Err(PoolError::Poisoned))
    }
}
