//! One step of many processes at the same time.

use std::panic::resume_unwind;
use std::thread;
use std::time::{Duration, Instant};

use super::{JournalEntry, ProcessKey, SetPlan};
use crate::hibernation::{CheckpointErrorKind, ProcessState, Result};

/// How often a question or an unlock is tried. What failed once may work again.
pub(super) const TRIES: u32 = 3;

/// How long a step may go on whose caller has ended or does not wait.
const STEP_MAX: Duration = Duration::from_secs(30);

const STEP_POLL: Duration = Duration::from_millis(2);

/// Where a process of a set is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    At(ProcessState),
    /// It has ended.
    Gone,
    /// Its state cannot be read.
    Unknown,
}

impl SetPlan<'_> {
    /// Makes a step of all, and says how long each took in milliseconds.
    pub(super) fn timed(
        &self,
        processes: &[ProcessKey],
        step: impl Fn(u32) -> Result<()> + Sync,
    ) -> Vec<Result<f64>> {
        each(processes, |process| {
            let started = Instant::now();
            step(process.pid)?;
            Ok(started.elapsed().as_secs_f64() * 1e3)
        })
    }

    pub(super) fn standings(&self, processes: &[ProcessKey]) -> Vec<(ProcessKey, Standing)> {
        processes.iter().map(|process| (*process, self.standing(process.pid))).collect()
    }

    /// Waits for steps that go on without a caller.
    pub(super) fn at_rest(&self, processes: &[ProcessKey]) -> Vec<(ProcessKey, Standing)> {
        let started = Instant::now();
        loop {
            let standings = self.standings(processes);
            if !standings.iter().any(|(_, standing)| is_moving(*standing)) || started.elapsed() > STEP_MAX {
                return standings;
            }
            thread::sleep(STEP_POLL);
        }
    }

    pub(super) fn standing(&self, pid: u32) -> Standing {
        for _ in 0..TRIES {
            match self.checkpointer.state(pid) {
                Ok(state) => return Standing::At(state),
                Err(error) if error.kind == CheckpointErrorKind::NoSuchProcess => return Standing::Gone,
                Err(_) => {}
            }
        }
        Standing::Unknown
    }

    /// Forgets a set. Should its entry stay, a recovery finds nothing to do there.
    pub(super) fn forget(&self, entry: &JournalEntry) {
        drop(self.journal.remove(entry));
    }
}

fn is_moving(standing: Standing) -> bool {
    matches!(standing, Standing::At(ProcessState::Checkpointing | ProcessState::Restoring))
}

/// Calls on all at the same time. The results are in the order of `processes`.
pub(super) fn each<T: Send>(processes: &[ProcessKey], call: impl Fn(ProcessKey) -> T + Sync) -> Vec<T> {
    let Some((&last, others)) = processes.split_last() else { return Vec::new() };
    let call = &call;
    thread::scope(|scope| {
        let begun: Vec<_> = others
            .iter()
            .map(|&process| (process, thread::Builder::new().spawn_scoped(scope, move || call(process))))
            .collect();
        let last = call(last);
        let results = begun.into_iter().map(|(process, thread)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            // Without another thread, one after another.
            Err(_) => call(process),
        });
        results.chain([last]).collect()
    })
}

/// All of the values, or the first error.
pub(super) fn all<T>(results: Vec<Result<T>>) -> Result<Vec<T>> {
    results.into_iter().collect()
}
