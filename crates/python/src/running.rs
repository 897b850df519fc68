//! Backups that run in the background, of an arena that knows them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use poorwill::{PoolError, PrepareProgress, PrepareReport};

/// Longest delay of a poll, and so of a signal handler.
pub(crate) const POLL_INTERVAL_MAX: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(crate) struct RunningPreparation(Mutex<PreparationState>);

#[derive(Debug)]
struct PreparationState {
    /// None once its end was seen.
    running: Option<poorwill::Preparation>,
    progress: PrepareProgress,
    outcome: Option<PreparationOutcome>,
}

pub(crate) type PreparationOutcome = Result<PrepareReport, Arc<PoolError>>;

impl RunningPreparation {
    pub(crate) fn new(preparation: poorwill::Preparation) -> Arc<Self> {
        let progress = preparation.progress();
        Arc::new(Self(Mutex::new(PreparationState { running: Some(preparation), progress, outcome: None })))
    }

    pub(crate) fn cancel(&self) {
        if let Some(preparation) = &self.poll().running {
            preparation.cancel();
        }
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.poll().running.is_none()
    }

    pub(crate) fn wait_until_ended(&self) {
        // By polling, since `Preparation.wait` may wait for the same one.
        let mut pause = Duration::from_millis(1);
        while !self.is_ended() {
            thread::sleep(pause);
            pause = (pause * 2).min(POLL_INTERVAL_MAX);
        }
    }

    pub(crate) fn progress(&self) -> PrepareProgress {
        self.poll().progress
    }

    /// What came of it; None before its end was seen.
    pub(crate) fn outcome(&self) -> Option<PreparationOutcome> {
        self.poll().outcome.clone()
    }

    /// The current state. No caller waits while it holds this lock.
    fn poll(&self) -> MutexGuard<'_, PreparationState> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(preparation) = state.running.take() {
            state.progress = preparation.progress();
            if state.progress.is_ended {
                // Returns at once, since it has ended.
                state.outcome = Some(preparation.wait().map_err(Arc::new));
            } else {
                state.running = Some(preparation);
            }
        }
        state
    }
}
