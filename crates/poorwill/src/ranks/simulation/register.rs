//! A decision whose operations are atomic, and fail now and then, before or after they were done.

use std::sync::{Mutex, MutexGuard, PoisonError};

use fastrand::Rng;
use poorwill_core::{Decision, DecisionError, Verdict};

#[derive(Debug)]
pub(super) struct SimulatedRegister(Mutex<RegisterState>);

#[derive(Debug)]
struct RegisterState {
    verdict: Option<Verdict>,
    is_removed: bool,
    rng: Rng,
    failing: f64,
    /// A defect: the last proposal wins.
    overwrites: bool,
    /// A defect: one that was removed is undecided.
    forgets: bool,
}

impl SimulatedRegister {
    pub(super) fn new(rng: Rng, failing: f64, overwrites: bool, forgets: bool) -> Self {
        let (verdict, is_removed) = (None, false);
        Self(Mutex::new(RegisterState { verdict, is_removed, rng, failing, overwrites, forgets }))
    }

    fn state(&self) -> MutexGuard<'_, RegisterState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It no longer fails.
    pub(super) fn heal(&self) {
        self.state().failing = 0.0;
    }

    pub(super) fn remove(&self) {
        let mut state = self.state();
        state.is_removed = true;
        if state.forgets {
            (state.verdict, state.is_removed) = (None, false);
        }
    }
}

impl RegisterState {
    fn check(&mut self) -> Result<(), DecisionError> {
        let problem = |problem: &str| Err(DecisionError { problem: problem.into() });
        if self.is_removed {
            return problem("it was removed");
        }
        if self.rng.f64() < self.failing { problem("it fails") } else { Ok(()) }
    }
}

impl Decision for SimulatedRegister {
    fn decide(&self, proposed: Verdict) -> Result<Verdict, DecisionError> {
        let mut state = self.state();
        state.check()?;
        if state.overwrites {
            state.verdict = Some(proposed);
        }
        let verdict = *state.verdict.get_or_insert(proposed);
        state.check()?;
        Ok(verdict)
    }

    fn verdict(&self) -> Result<Option<Verdict>, DecisionError> {
        let mut state = self.state();
        state.check()?;
        Ok(state.verdict)
    }
}
