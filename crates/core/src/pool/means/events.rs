//! Recording and querying events, with the state unlocked.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use super::capture::is_captured;
use crate::driver::{DriverError, DriverErrorKind, EventId, StreamId};
use crate::pool::parts::physical::PhysicalMemory;
use crate::pool::shared::Shared;
use crate::pool::tools::clocks::ClockKey;
use crate::pool::tools::deadline::Deadline;
use crate::pool::tools::error::{PoolError, Result};

/// Between two queries of events.
const PAUSE_MIN: Duration = Duration::from_micros(10);
const PAUSE_MAX: Duration = Duration::from_millis(1);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::pool) enum Waited {
    /// Something has completed, or can be queried now.
    Progress,
    NothingPending,
    /// A capture is under way, so nothing was awaited.
    Captured,
    /// The deadline has passed, and these streams still work.
    TimedOut(Vec<StreamId>),
}

impl Shared {
    /// Records an event on every stream under which something was freed, and queries those in flight. Never
    /// blocks, and does nothing during a capture. Tries everything before it returns an error.
    pub(in crate::pool) fn poll(&self, _vm: &PhysicalMemory) -> Option<DriverError> {
        {
            let state = self.lock_state();
            if !state.heap().clocks().any_pending() && !state.heap().is_waiting() {
                return None;
            }
        }
        match self.captured() {
            Ok(None) => {}
            Ok(Some(_)) => {
                self.lock_state().heap_mut().clocks_mut().set_blocked(true);
                return None;
            }
            Err(error) => return Some(error),
        }
        let refused = self.record_due();
        let refused = self.query_in_flight().or(refused);
        self.lock_state().settle_waiting();
        refused
    }

    fn record_due(&self) -> Option<DriverError> {
        let due = self.lock_state().heap_mut().clocks_mut().begin();
        let (mut refused, mut blocked) = (None, false);
        for due in due {
            match self.driver().event_record(due.stream) {
                Ok(event) => {
                    let unneeded = self.lock_state().heap_mut().clocks_mut().recorded(due, event);
                    self.forget(unneeded);
                }
                // A stream ends when its work has finished.
                Err(error) if is_unknown(&error) => self.pass(due.clock, due.epoch),
                Err(error) => {
                    self.lock_state().heap_mut().clocks_mut().not_recorded(due);
                    // A capture may have begun just now.
                    blocked |= is_captured(&error);
                    refused = refused.or(Some(error).filter(|error| !is_captured(error)));
                }
            }
        }
        self.lock_state().heap_mut().clocks_mut().set_blocked(blocked);
        refused
    }

    /// Skips later events of a stream after the first incomplete one.
    fn query_in_flight(&self) -> Option<DriverError> {
        let in_flight = self.lock_state().heap().clocks().in_flight();
        let (mut late, mut refused) = (None, None);
        for (clock, epoch, event) in in_flight {
            if late == Some(clock) {
                continue;
            }
            match self.has_passed(event) {
                Ok(true) => self.pass(clock, epoch),
                Ok(false) => late = Some(clock),
                Err(error) => {
                    late = Some(clock);
                    refused = Some(error);
                }
            }
        }
        refused
    }

    /// Waits until something freed has completed since version `seen`. If only one stream is awaited, without
    /// a deadline or a token, the driver waits; otherwise the events are polled.
    pub(super) fn wait_for_event(&self, seen: u64, deadline: Deadline) -> Result<Waited> {
        let mut pause = PAUSE_MIN;
        loop {
            let (version, blocked, in_flight) = {
                let state = self.lock_state();
                (
                    state.heap().clocks().version(),
                    state.heap().clocks().is_blocked(),
                    state.heap().clocks().in_flight(),
                )
            };
            if version != seen {
                return Ok(Waited::Progress);
            }
            if self.captured().map_err(waiting)?.is_some() {
                return Ok(Waited::Captured);
            }
            if blocked {
                // The capture has ended since, so the events can be recorded now.
                return Ok(Waited::Progress);
            }
            let Some((clock, epoch, event)) = in_flight.first().copied() else {
                return Ok(Waited::NothingPending);
            };
            let is_single_stream = in_flight.iter().all(|(other, _, _)| *other == clock);
            if is_single_stream && deadline.may_block() {
                let passed = self.wait_for_one(clock, epoch, event, deadline);
                return passed.map(|_| Waited::Progress).map_err(waiting);
            }
            // Any of the streams may be first, and some may never complete.
            for (clock, epoch, event) in &in_flight {
                if self.has_passed(*event).map_err(waiting)? {
                    self.pass(*clock, *epoch);
                }
            }
            let state = self.lock_state();
            if state.heap().clocks().version() == seen {
                let Some(rest) = deadline.left(self.driver(), pause) else {
                    let late =
                        in_flight.into_iter().filter_map(|(clock, ..)| state.heap().clocks().stream(clock));
                    return Ok(Waited::TimedOut(late.collect::<BTreeSet<_>>().into_iter().collect()));
                };
                drop(state);
                thread::sleep(rest);
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }

    /// Returns whether the event completed by the deadline.
    pub(super) fn wait_for_one(
        &self,
        clock: ClockKey,
        epoch: u64,
        event: EventId,
        deadline: Deadline,
    ) -> Result<bool, DriverError> {
        if deadline.may_block() {
            // As in [`Self::has_passed`].
            self.driver()
                .event_synchronize(event)
                .or_else(|error| if is_unknown(&error) { Ok(()) } else { Err(error) })?;
        } else if !self.wait_for_all(vec![(clock, event)], deadline)?.is_empty() {
            return Ok(false);
        }
        self.pass(clock, epoch);
        Ok(true)
    }

    /// Returns the keys of events that are not complete by the deadline.
    fn wait_for_all<K: Copy>(
        &self,
        mut events: Vec<(K, EventId)>,
        deadline: Deadline,
    ) -> Result<Vec<K>, DriverError> {
        let mut pause = PAUSE_MIN;
        loop {
            let mut failed = None;
            events.retain(|(_, event)| match self.has_passed(*event) {
                Ok(passed) => !passed,
                Err(error) => {
                    failed = Some(error);
                    true
                }
            });
            if let Some(failed) = failed {
                return Err(failed);
            }
            let rest = deadline.left(self.driver(), pause);
            match rest {
                Some(rest) if !events.is_empty() => thread::sleep(rest),
                _ => return Ok(events.into_iter().map(|(key, _)| key).collect()),
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// An unknown event was seen complete and destroyed by another thread.
    fn has_passed(&self, event: EventId) -> Result<bool, DriverError> {
        match self.driver().event_query(event) {
            Err(error) if is_unknown(&error) => Ok(true),
            queried => queried,
        }
    }

    /// Waits for the work queued by now on known streams. Returns those that are late at the deadline.
    /// Where it may block it returns at once: the driver then waits for the whole device.
    pub(in crate::pool) fn wait_for_streams(&self, deadline: Deadline) -> Result<Vec<StreamId>, DriverError> {
        if deadline.may_block() {
            return Ok(Vec::new());
        }
        let known = self.lock_state().heap().streams();
        let mut events = Vec::new();
        let mut failed = None;
        for stream in known {
            match self.driver().event_record(stream) {
                Ok(event) => events.push((stream, event)),
                // An ended stream has no work left. The caller checks for captures.
                Err(error) if is_unknown(&error) || is_captured(&error) => {}
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        let recorded: Vec<EventId> = events.iter().map(|(_, event)| *event).collect();
        let late = failed.map_or_else(|| self.wait_for_all(events, deadline), Err);
        self.forget(recorded);
        late
    }

    fn pass(&self, clock: ClockKey, epoch: u64) {
        let done = self.lock_state().heap_mut().clocks_mut().pass(clock, epoch);
        self.forget(done);
    }

    /// Waits for all work on the device; everything freed until now is complete then.
    pub(in crate::pool) fn quiesce(&self) -> Result<(), DriverError> {
        let (due, in_flight) = {
            let mut state = self.lock_state();
            (state.heap_mut().clocks_mut().begin(), state.heap().clocks().in_flight())
        };
        let idle = self.driver().synchronize();
        let mut state = self.lock_state();
        if idle.is_err() {
            due.into_iter().for_each(|due| state.heap_mut().clocks_mut().not_recorded(due));
            return idle;
        }
        let done = state.heap_mut().clocks_mut().pass_all(&due, &in_flight);
        state.settle_waiting();
        drop(state);
        self.forget(done);
        Ok(())
    }

    /// Called when no memory is held: nothing needs to be known complete any more.
    pub(in crate::pool) fn forget_clocks(&self) {
        let done = {
            let mut state = self.lock_state();
            let in_flight = state.heap().clocks().in_flight();
            let done = state.heap_mut().clocks_mut().pass_all(&[], &in_flight);
            state.settle_waiting();
            done
        };
        self.forget(done);
    }

    /// Destroys events. One that the driver refuses to destroy ends with it.
    fn forget(&self, events: impl IntoIterator<Item = EventId>) {
        for event in events {
            let _ = self.driver().event_destroy(event);
        }
    }
}

fn waiting(source: DriverError) -> PoolError {
    PoolError::Driver { op: "wait for work on freed memory", source }
}

fn is_unknown(error: &DriverError) -> bool {
    matches!(error.kind, DriverErrorKind::UnknownHandle { .. })
}
