//! Where a sleep or a wake waits for the verdict, and what it shares with its handle.

use std::sync::Arc;
use std::time::Duration;

use crate::decision::{Decision, DecisionError, Verdict, look};
use crate::pool::shared::Shared;
use crate::pool::tools::cancel;
use crate::pool::tools::deadline::Deadline;
use crate::pool::tools::error::{PoolError, Result, UndoneBecause};
use crate::pool::tools::tag_lock::Monitor;

/// Between the first two looks at a decision that was made elsewhere. Each later pause is an eighth longer, so a
/// verdict is seen after that share of the time that it took.
const FIRST_PAUSE: Duration = Duration::from_micros(250);
const LONGEST_PAUSE: Duration = Duration::from_millis(5);

/// What a call passes right before its point of no return. An error makes it undo.
pub(in crate::pool) type ReadyStep<'a> = &'a dyn Fn() -> Result<()>;

#[derive(Debug)]
pub(super) struct Stage<R> {
    pub(super) op: &'static str,
    pub(super) decision: Arc<dyn Decision>,
    undo_after: Duration,
    progress: Monitor<Progress<R>>,
}

#[derive(Debug)]
pub(super) struct Progress<R> {
    pub(super) is_staged: bool,
    pub(super) is_ended: bool,
    pub(super) result: Option<Result<R>>,
    /// Why the verdict is not known, if it should be.
    pub(super) problem: Option<DecisionError>,
}

impl<R> Stage<R> {
    pub(super) fn new(op: &'static str, decision: Arc<dyn Decision>, undo_after: Duration) -> Self {
        let progress = Progress { is_staged: false, is_ended: false, result: None, problem: None };
        Self { op, decision, undo_after, progress: Monitor::new(progress) }
    }

    pub(super) fn progress(&self) -> &Monitor<Progress<R>> {
        &self.progress
    }

    /// Waits for the verdict.
    pub(super) fn pass(&self, shared: &Shared) -> Result<()> {
        let deadline = Deadline::begin(shared.driver(), Some(self.undo_after));
        let mut progress = self.progress.lock_anyway();
        progress.is_staged = true;
        self.progress.notify();
        let (mut is_noted, mut has_looked) = (false, false);
        let mut pause = FIRST_PAUSE;
        loop {
            let is_closed = shared.open_state().is_err();
            // It has its say once, however short its time is.
            let is_late = has_looked && deadline.has_passed(shared.driver());
            let because = match (is_closed, is_late) {
                (true, _) => Some(UndoneBecause::Closed),
                _ if cancel::is_cancelled() => Some(UndoneBecause::Cancelled),
                (_, true) => Some(UndoneBecause::Undecided { waited: self.undo_after }),
                _ => None,
            };
            // Locked, so that a verdict which is announced in between is not missed.
            let noted = if is_noted || because.is_some() { Ok(()) } else { self.decision.note_staged() };
            let verdict = noted.and_then(|()| {
                is_noted = true;
                look(&*self.decision, because.is_some())
            });
            has_looked = true;
            let because = because.unwrap_or(UndoneBecause::Decided);
            let undone = PoolError::Undone { op: self.op, because };
            match verdict {
                Ok(Some(Verdict::Commit)) => return Ok(()),
                Ok(Some(Verdict::Undo)) => return Err(undone),
                Ok(None) => progress.problem = None,
                // Everything is released anyway.
                Err(_) if is_closed => return Err(undone),
                Err(problem) => progress.problem = Some(problem),
            }
            progress = self.progress.wait_for(progress, pause).ok_or(PoolError::Poisoned)?;
            pause = (pause + pause / 8).min(LONGEST_PAUSE);
        }
    }
}
