//! Simulates graph captures.
//!
//! While a test declares one, a [`ScriptedDriver`](crate::scripted::ScriptedDriver) reports it, and records
//! calls that a pool must not make then.

use std::sync::{Mutex, MutexGuard, PoisonError};

use poorwill_core::{Op, StreamId};

/// Calls that a pool may not make during a capture: some of them would invalidate a real one.
const FORBIDDEN: [Op; 4] = [Op::EventRecord, Op::EventQuery, Op::EventSynchronize, Op::Synchronize];

/// A capture, and the calls that invalidated it.
#[derive(Debug, Default)]
pub struct Capture(Mutex<CaptureState>);

#[derive(Debug, Default)]
struct CaptureState {
    stream: Option<StreamId>,
    invalidated_by: Vec<Op>,
}

impl Capture {
    fn state(&self) -> MutexGuard<'_, CaptureState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Captures this stream.
    pub fn begin(&self, stream: StreamId) {
        *self.state() = CaptureState { stream: Some(stream), invalidated_by: Vec::new() };
    }

    /// Ends the capture.
    ///
    /// # Panics
    /// If a forbidden call was made.
    pub fn end(&self) {
        let CaptureState { invalidated_by, .. } = std::mem::take(&mut *self.state());
        assert!(invalidated_by.is_empty(), "the capture was invalidated by these calls: {invalidated_by:?}");
    }

    /// The captured stream.
    #[must_use]
    pub fn stream(&self) -> Option<StreamId> {
        self.state().stream
    }

    pub(crate) fn note(&self, op: Op) {
        let mut state = self.state();
        if state.stream.is_some() && FORBIDDEN.contains(&op) {
            state.invalidated_by.push(op);
        }
    }
}
