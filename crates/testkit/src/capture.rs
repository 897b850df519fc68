//! A capture into a graph, for drivers that capture nothing: as long as a test says that one is under way, a
//! [`ScriptedDriver`](crate::scripted::ScriptedDriver) says so, too, and what a pool may not do meanwhile is noted.

use std::sync::{Mutex, MutexGuard, PoisonError};

use poorwill_core::{Op, StreamId};

/// What a pool may not ask for during a capture: a real one would end with an error by some of it.
const FORBIDDEN: [Op; 4] = [Op::EventRecord, Op::EventQuery, Op::EventSynchronize, Op::Synchronize];

/// Whether a capture is under way, and what has spoiled it.
#[derive(Debug, Default)]
pub struct Capture(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    stream: Option<StreamId>,
    spoiled_by: Vec<Op>,
}

impl Capture {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on this stream is being captured.
    pub fn begin(&self, stream: StreamId) {
        *self.state() = State { stream: Some(stream), spoiled_by: Vec::new() };
    }

    /// The capture is over.
    ///
    /// # Panics
    /// When it was spoiled.
    pub fn end(&self) {
        let State { spoiled_by, .. } = std::mem::take(&mut *self.state());
        assert!(spoiled_by.is_empty(), "the capture was spoiled by these calls: {spoiled_by:?}");
    }

    /// The stream that is being captured.
    #[must_use]
    pub fn stream(&self) -> Option<StreamId> {
        self.state().stream
    }

    /// A call that the driver is asked for.
    pub(crate) fn note(&self, op: Op) {
        let mut state = self.state();
        if state.stream.is_some() && FORBIDDEN.contains(&op) {
            state.spoiled_by.push(op);
        }
    }
}
