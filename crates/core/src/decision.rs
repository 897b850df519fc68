//! The verdict of a group that sleeps or wakes together: all of it, or none.
//!
//! Each participant does everything that can fail, and keeps it reversible ([`crate::Pool::stage_sleep`]). Then the
//! group commits or undoes. A [`Decision`] is where it says which: it is written once, and all read the same verdict.
//! So a message that is lost delays a participant, and never splits the group. One that hears nothing proposes
//! to undo, which holds only if the group has not committed.
//!
//! This is two-phase commit with its decision in a register; see Gray and Lamport, *Consensus on Transaction Commit*
//! (2006). [`LocalDecision`] is for one process.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

/// What a group does.
///
/// ```
/// use poorwill::Verdict;
///
/// assert_eq!(Verdict::Commit.to_string(), "commit");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// All go on.
    Commit,
    /// All go back.
    Undo,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Commit => "commit",
            Self::Undo => "undo",
        })
    }
}

/// The verdict cannot be read or written now; an earlier one still holds.
///
/// ```
/// use poorwill::DecisionError;
///
/// let error = DecisionError { problem: "the folder is gone".to_owned() };
/// assert_eq!(error.to_string(), "the folder is gone");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct DecisionError {
    /// What failed, and what would help.
    pub problem: String,
}

/// A register that is written once.
///
/// Promise: all that read it, in whatever process, get the same verdict.
///
/// ```
/// use poorwill::{Decision, DecisionError, Verdict};
///
/// /// Whether a group still has to be heard of.
/// fn is_open(decision: &dyn Decision) -> Result<bool, DecisionError> {
///     Ok(decision.verdict()?.is_none())
/// }
/// # let decision = poorwill::LocalDecision::default();
/// assert!(is_open(&decision)?);
/// decision.decide(Verdict::Commit)?;
/// assert!(!is_open(&decision)?);
/// # Ok::<(), DecisionError>(())
/// ```
pub trait Decision: Send + Sync + fmt::Debug {
    /// Decides, unless that was done before. Returns the verdict that holds.
    ///
    /// # Errors
    /// The verdict may or may not have been written.
    fn decide(&self, proposed: Verdict) -> Result<Verdict, DecisionError>;

    /// The verdict, if there is one.
    ///
    /// # Errors
    /// It cannot be read.
    fn verdict(&self) -> Result<Option<Verdict>, DecisionError>;

    /// A participant is staged. A decision that counts its participants commits with the last of them; others leave that
    /// to a coordinator, and do nothing here. Called again after an error.
    ///
    /// # Errors
    /// It may or may not be noted.
    fn note_staged(&self) -> Result<(), DecisionError> {
        Ok(())
    }
}

/// One look of a participant that holds what it staged. Once it is overdue, it proposes to undo.
///
/// `None`: it holds on, and looks again.
///
/// ```
/// use poorwill::decision::{LocalDecision, Verdict, look};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let decision = LocalDecision::default();
/// assert_eq!(look(&decision, false)?, None);
/// assert_eq!(look(&decision, true)?, Some(Verdict::Undo));
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The decision cannot be reached. It holds on, whatever the time: the verdict may be there.
pub fn look(decision: &dyn Decision, is_overdue: bool) -> Result<Option<Verdict>, DecisionError> {
    if is_overdue { decision.decide(Verdict::Undo).map(Some) } else { decision.verdict() }
}

/// A decision in this process, for one participant or for the arenas of several devices.
///
/// ```
/// use poorwill::decision::{Decision, LocalDecision, Verdict};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let decision = LocalDecision::default();
/// assert_eq!(decision.verdict()?, None);
/// assert_eq!(decision.decide(Verdict::Undo)?, Verdict::Undo);
/// assert_eq!(decision.decide(Verdict::Commit)?, Verdict::Undo); // The first holds.
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Default)]
pub struct LocalDecision(Mutex<Option<Verdict>>);

impl Decision for LocalDecision {
    fn decide(&self, proposed: Verdict) -> Result<Verdict, DecisionError> {
        Ok(*self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(proposed))
    }

    fn verdict(&self) -> Result<Option<Verdict>, DecisionError> {
        Ok(*self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
