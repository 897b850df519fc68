//! A decision that the ranks of a group make by themselves: the last one that is staged commits.
//!
//! Each rank leaves a mark in the decision's folder. So they need no coordinator, only some channel that has all of them
//! begin. Whichever of them is stopped or ends, the others go back when their time is up.

use std::path::Path;

use poorwill_core::{Decision, DecisionError, Verdict};

use super::decision::FileDecision;
use super::error::RanksError;

/// One rank's part in a decision, for one sleep or wake of one arena: each arena joins as a rank of its own.
///
/// ```
/// use poorwill::decision::{Decision, Verdict};
/// use poorwill::ranks::{CountedDecision, FileDecision};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let made = FileDecision::create(Some(folder))?;
/// let ranks = [0, 1].map(|rank| CountedDecision::join(made.path(), rank, 2).unwrap()); // Each in its process.
/// ranks[0].note_staged()?; // As [`Arena::stage_sleep`](poorwill::Arena::stage_sleep) does.
/// assert_eq!(ranks[0].verdict()?, None);
/// ranks[1].note_staged()?;
/// assert_eq!(ranks[0].verdict()?, Some(Verdict::Commit));
/// made.remove()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct CountedDecision {
    file: FileDecision,
    rank: u32,
    world_size: u32,
}

impl CountedDecision {
    /// Joins a decision as one of the ranks 0 to `world_size` - 1, each of which joins it once.
    ///
    /// # Errors
    /// `Rank`: there is no such rank. As [`FileDecision::open`].
    pub fn join(path: &Path, rank: u32, world_size: u32) -> Result<Self, RanksError> {
        if rank >= world_size {
            return Err(RanksError::Rank { rank, name: path.display().to_string(), world_size });
        }
        Ok(Self { file: FileDecision::open(path)?, rank, world_size })
    }

    /// What the ranks share.
    #[must_use]
    pub fn file(&self) -> &FileDecision {
        &self.file
    }
}

impl Decision for CountedDecision {
    fn decide(&self, proposed: Verdict) -> Result<Verdict, DecisionError> {
        self.file.decide(proposed)
    }

    fn verdict(&self) -> Result<Option<Verdict>, DecisionError> {
        self.file.verdict()
    }

    fn note_staged(&self) -> Result<(), DecisionError> {
        self.file.mark(self.rank)?;
        if self.file.has_marks_of_all(self.world_size)? {
            self.file.decide(Verdict::Commit)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    fn joined(made: &FileDecision, world_size: u32) -> Vec<CountedDecision> {
        (0..world_size).map(|rank| CountedDecision::join(made.path(), rank, world_size).unwrap()).collect()
    }

    #[test]
    fn the_last_of_many_commits() {
        let folder = tempfile::tempdir().unwrap();
        for round in 0..20 {
            let made = FileDecision::create(Some(folder.path())).unwrap();
            let ranks = joined(&made, 8);
            let start = Barrier::new(ranks.len());
            thread::scope(|scope| {
                for rank in &ranks {
                    scope.spawn(|| {
                        start.wait();
                        rank.note_staged().unwrap();
                    });
                }
            });
            assert_eq!(made.verdict(), Ok(Some(Verdict::Commit)), "{round}");
            made.remove().unwrap();
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn nothing_is_committed_without_one_or_after_an_undo() {
        let folder = tempfile::tempdir().unwrap();
        let made = FileDecision::create(Some(folder.path())).unwrap();
        let ranks = joined(&made, 3);
        for _ in 0..3 {
            // A mark counts once.
            ranks[0].note_staged().unwrap();
            ranks[2].note_staged().unwrap();
        }
        assert_eq!(made.verdict(), Ok(None));
        assert_eq!(ranks[0].decide(Verdict::Undo), Ok(Verdict::Undo));
        ranks[1].note_staged().unwrap();
        assert_eq!(made.verdict(), Ok(Some(Verdict::Undo)));
        let refused = CountedDecision::join(made.path(), 3, 3).unwrap_err();
        assert!(matches!(refused, RanksError::Rank { rank: 3, .. }), "{refused}");
        made.remove().unwrap();
        assert!(ranks[1].note_staged().is_err(), "it is gone");
        assert!(matches!(
            CountedDecision::join(ranks[1].file().path(), 1, 3),
            Err(RanksError::DecisionGone { .. })
        ));
    }
}
