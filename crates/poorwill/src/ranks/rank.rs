//! What a rank has to be able to do, and what became of it.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use poorwill_core::{Decision, PoolError, SleepRequest, Staged, WakeRequest, chain};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::arena::Arena;

/// Why a rank could not stage.
pub type StageError = Box<dyn Error + Send + Sync>;

/// What a process of the group puts to sleep and wakes. [`Arena`] is one.
///
/// Promise to keep: both calls do all that can fail, keep it reversible, and then do what the decision says. By
/// themselves they propose to undo after `undo_after`. A call that fails has changed nothing.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// use poorwill::decision::Decision;
/// use poorwill::ranks::{Rank, StageError, StagedRank};
/// use poorwill::{Arena, SleepRequest, WakeRequest};
///
/// /// Two devices of one process.
/// struct Pair(Arena, Arena);
///
/// impl Rank for Pair {
///     fn stage_sleep(
///         &self,
///         request: &SleepRequest,
///         decision: Arc<dyn Decision>,
///         undo_after: Duration,
///     ) -> Result<Box<dyn StagedRank>, StageError> {
///         let first = self.0.stage_sleep(request, Arc::clone(&decision), undo_after)?;
///         let second = self.1.stage_sleep(request, decision, undo_after)?;
///         Ok(Box::new((first, second)))
///     }
///
///     fn stage_wake(
///         &self,
///         request: &WakeRequest,
///         decision: Arc<dyn Decision>,
///         undo_after: Duration,
///     ) -> Result<Box<dyn StagedRank>, StageError> {
///         let first = self.0.stage_wake(request, Arc::clone(&decision), undo_after)?;
///         let second = self.1.stage_wake(request, decision, undo_after)?;
///         Ok(Box::new((first, second)))
///     }
/// }
/// ```
pub trait Rank: Send + Sync {
    /// Does a sleep up to its point of no return.
    ///
    /// # Errors
    /// It cannot sleep. Nothing has changed.
    fn stage_sleep(
        &self,
        request: &SleepRequest,
        decision: Arc<dyn Decision>,
        undo_after: Duration,
    ) -> Result<Box<dyn StagedRank>, StageError>;

    /// Does a wake up to its point of no return.
    ///
    /// # Errors
    /// It cannot wake. Nothing has changed.
    fn stage_wake(
        &self,
        request: &WakeRequest,
        decision: Arc<dyn Decision>,
        undo_after: Duration,
    ) -> Result<Box<dyn StagedRank>, StageError>;
}

/// A rank that is staged. Dropping it proposes to undo.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// use poorwill::decision::{Decision, LocalDecision, Verdict};
/// use poorwill::ranks::{RankOutcome, Rank};
/// use poorwill::{Arena, Config, Level, SleepRequest};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let decision: Arc<dyn Decision> = Arc::new(LocalDecision::default());
/// let rank: &dyn Rank = &arena;
/// let minute = Duration::from_secs(60);
/// let staged = rank.stage_sleep(&SleepRequest::all(Level::One), Arc::clone(&decision), minute)?;
/// decision.decide(Verdict::Undo)?;
/// assert!(matches!(staged.wait(), RankOutcome::Undone { .. }));
/// # Ok(())
/// # }
/// ```
pub trait StagedRank: Send {
    /// Waits until the verdict, from wherever it comes, is carried out.
    fn wait(self: Box<Self>) -> RankOutcome;
}

/// What became of a rank that was staged.
///
/// ```
/// use poorwill::ranks::RankOutcome;
///
/// let outcome = RankOutcome::Undone { why: "its group decided so".into() };
/// assert_eq!(serde_json::to_value(&outcome).unwrap()["outcome"], "undone");
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum RankOutcome {
    /// It was committed, and done.
    Done {
        /// As the rank reports it.
        report: Value,
    },
    /// It was undone. Everything is as before.
    Undone {
        /// Why.
        why: String,
    },
    /// The verdict was carried out, but not wholly. A sleep may have released less, or a rank is stranded.
    Failed {
        /// What failed, and what would help.
        why: String,
    },
}

impl RankOutcome {
    fn of<R: Serialize>(result: Result<R, PoolError>) -> Self {
        match result.map(serde_json::to_value) {
            Ok(Ok(report)) => Self::Done { report },
            Ok(Err(error)) => Self::Failed { why: format!("it is done, but cannot be reported: {error}") },
            Err(error @ PoolError::Undone { .. }) => Self::Undone { why: chain(&error) },
            Err(error) => Self::Failed { why: chain(&error) },
        }
    }
}

impl fmt::Display for RankOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done { .. } => f.write_str("done"),
            Self::Undone { why } | Self::Failed { why } => f.write_str(why),
        }
    }
}

impl<R: Serialize + Send> StagedRank for Staged<R> {
    fn wait(self: Box<Self>) -> RankOutcome {
        RankOutcome::of(Staged::wait(*self))
    }
}

/// Several of one process: the report is a list.
impl<A: Serialize + Send, B: Serialize + Send> StagedRank for (Staged<A>, Staged<B>) {
    fn wait(self: Box<Self>) -> RankOutcome {
        let (first, second) = *self;
        let (first, second) = (first.wait(), second.wait());
        RankOutcome::of(first.and_then(|first| Ok((first, second?))))
    }
}

impl Rank for Arena {
    fn stage_sleep(
        &self,
        request: &SleepRequest,
        decision: Arc<dyn Decision>,
        undo_after: Duration,
    ) -> Result<Box<dyn StagedRank>, StageError> {
        Ok(Box::new(Arena::stage_sleep(self, request, decision, undo_after)?))
    }

    fn stage_wake(
        &self,
        request: &WakeRequest,
        decision: Arc<dyn Decision>,
        undo_after: Duration,
    ) -> Result<Box<dyn StagedRank>, StageError> {
        Ok(Box::new(Arena::stage_wake(self, request, decision, undo_after)?))
    }
}
