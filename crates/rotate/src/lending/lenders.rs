//! Who lends, as far as the service needs to know it.

use std::fmt;

use serde::Serialize;

/// What one process lends of one memory, or keeps there until it is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lender {
    /// The name of the memory that all processes of the computer agree on.
    pub memory: String,
    /// The process.
    pub pid: u32,
    /// What can be had of it: what it lent and is still there, and what it gives up when asked.
    pub reclaimable_bytes: u64,
}

/// Sums since the broker began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LentTotals {
    /// What was lent.
    pub lent_bytes: u64,
    /// What of it was freed for those who asked.
    pub taken_bytes: u64,
    /// What of it lenders took back.
    pub brought_back_bytes: u64,
    /// What owners gave up when asked.
    pub given_up_bytes: u64,
}

/// What is lent now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lent {
    /// One for each process and memory.
    pub lenders: Vec<Lender>,
    /// Since the broker began.
    pub totals: LentTotals,
}

impl Lent {
    /// What can be had of this memory, of processes that are wanted.
    #[must_use]
    pub fn bytes(&self, memory: &str, is_wanted: impl Fn(u32) -> bool) -> u64 {
        let of_it = self.lenders.iter().filter(|one| one.memory == memory && is_wanted(one.pid));
        of_it.fold(0, |sum, one| sum.saturating_add(one.reclaimable_bytes))
    }
}

/// Why nothing is known of what is lent. The service goes on as if nothing were.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct LendError(pub String);

/// Knows what is lent, and has it given up. Calls may block for as long as a broker has for its answer.
pub trait Lenders: fmt::Debug + Send + Sync {
    /// What is lent now.
    ///
    /// # Errors
    /// If there is no broker, or no answer of it.
    fn lent(&self) -> Result<Lent, LendError>;

    /// Has so many bytes of a memory freed, or all for [`u64::MAX`]. Spared processes keep theirs. Returns what was freed.
    ///
    /// # Errors
    /// If there is no broker, or no answer of it.
    fn free(&self, memory: &str, bytes: u64, spared: &[u32]) -> Result<u64, LendError>;
}
