//! Stream order: when the work that may still touch freed memory has passed.
//!
//! Each stream has a clock. A block that is freed gets the clock's tick as its stamp; recording an event on
//! the stream ends the tick, and when the event has passed, everything stamped with that tick or an earlier
//! one is *quiet*: no work queued before it was freed is left. So one event serves all that was freed before
//! it, freeing itself costs no call of the driver, and whether a block is quiet is one comparison.
//!
//! Bookkeeping only: who records and asks the driver is [`super::quiet`].

use std::collections::VecDeque;

use crate::driver::{EventId, StreamId};

/// A clock of a pool, by number.
pub(super) type ClockKey = usize;

/// An event to record: for which clock, on which stream, and the tick that it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Due {
    pub(super) clock: ClockKey,
    pub(super) stream: StreamId,
    pub(super) tick: u64,
}

/// The clocks of all streams that a pool has seen.
#[derive(Debug, Default)]
pub(super) struct Clocks {
    clocks: Vec<Clock>,
    /// How often anything was freed or has passed.
    news: u64,
    /// Whether a capture has kept events from being recorded, the last time that somebody was about to.
    held_up: bool,
}

#[derive(Debug)]
struct Clock {
    stream: StreamId,
    /// The stamp of what is freed now.
    tick: u64,
    /// Whether anything has that stamp.
    dirty: bool,
    /// Stamps up to this one are quiet.
    passed: u64,
    /// Events under way, oldest first, and the ticks they end.
    flying: VecDeque<(u64, EventId)>,
}

impl Clocks {
    /// The clock of `stream`, made if need be.
    pub(super) fn of(&mut self, stream: StreamId) -> ClockKey {
        let known = self.clocks.iter().position(|clock| clock.stream == stream);
        known.unwrap_or_else(|| {
            self.clocks.push(Clock { stream, tick: 1, dirty: false, passed: 0, flying: VecDeque::new() });
            self.clocks.len() - 1
        })
    }

    /// The stamp of what is freed now on this clock's stream.
    pub(super) fn stamp(&mut self, clock: ClockKey) -> u64 {
        self.news += 1;
        let clock = &mut self.clocks[clock];
        clock.dirty = true;
        clock.tick
    }

    /// Whether everything with this stamp has passed.
    pub(super) fn is_quiet(&self, clock: ClockKey, stamp: u64) -> bool {
        stamp <= self.clocks[clock].passed
    }

    /// Whether anything stamped may still be in use.
    pub(super) fn any_pending(&self) -> bool {
        self.clocks.iter().any(|clock| clock.dirty || !clock.flying.is_empty())
    }

    /// Says whether a capture has kept events from being recorded just now.
    pub(super) fn hold_up(&mut self, held_up: bool) {
        self.held_up = held_up;
    }

    /// Whether events are due that a capture has kept from being recorded.
    pub(super) fn is_held_up(&self) -> bool {
        self.held_up && self.clocks.iter().any(|clock| clock.dirty)
    }

    /// Ends the tick of every clock under which something was freed; the caller records the events.
    pub(super) fn begin(&mut self) -> Vec<Due> {
        let dirty = self.clocks.iter_mut().enumerate().filter(|(_, clock)| clock.dirty);
        dirty
            .map(|(key, clock)| {
                let due = Due { clock: key, stream: clock.stream, tick: clock.tick };
                clock.tick += 1;
                clock.dirty = false;
                due
            })
            .collect()
    }

    /// The event that ends `due` was recorded.
    pub(super) fn recorded(&mut self, due: Due, event: EventId) {
        self.clocks[due.clock].flying.push_back((due.tick, event));
    }

    /// The event could not be recorded: the next one covers its tick too.
    pub(super) fn not_recorded(&mut self, due: Due) {
        self.clocks[due.clock].dirty = true;
    }

    /// Events under way: clock, tick and event, oldest first within a clock.
    pub(super) fn flying(&self) -> Vec<(ClockKey, u64, EventId)> {
        let of = |(key, clock): (ClockKey, &Clock)| {
            clock.flying.iter().map(move |(tick, event)| (key, *tick, *event)).collect::<Vec<_>>()
        };
        self.clocks.iter().enumerate().flat_map(of).collect()
    }

    /// The stream of a clock.
    pub(super) fn stream(&self, clock: ClockKey) -> StreamId {
        self.clocks[clock].stream
    }

    /// All streams that have a clock.
    pub(super) fn streams(&self) -> impl Iterator<Item = StreamId> {
        self.clocks.iter().map(|clock| clock.stream)
    }

    /// How often anything has happened that may help who needs memory: who waits compares.
    pub(super) fn news(&self) -> u64 {
        self.news
    }

    /// Something else has happened that may help.
    pub(super) fn tell(&mut self) {
        self.news += 1;
    }

    /// Everything on this clock up to `tick` has passed. Returns the events that are not needed any more.
    pub(super) fn pass(&mut self, clock: ClockKey, tick: u64) -> Vec<EventId> {
        self.news += 1;
        let clock = &mut self.clocks[clock];
        clock.passed = clock.passed.max(tick);
        let done = clock.flying.iter().take_while(|(ends, _)| *ends <= tick).count();
        clock.flying.drain(..done).map(|(_, event)| event).collect()
    }

    /// The device has been idle since [`Clocks::begin`] returned `ended` and events were `flying`.
    pub(super) fn pass_all(&mut self, ended: &[Due], flying: &[(ClockKey, u64, EventId)]) -> Vec<EventId> {
        let ended = ended.iter().map(|due| (due.clock, due.tick));
        let ticks: Vec<_> = ended.chain(flying.iter().map(|(clock, tick, _)| (*clock, *tick))).collect();
        ticks.into_iter().flat_map(|(clock, tick)| self.pass(clock, tick)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_covers_what_was_freed_before_it_and_nothing_later() {
        let mut clocks = Clocks::default();
        let (a, b) = (clocks.of(StreamId(1)), clocks.of(StreamId(2)));
        assert_eq!((clocks.of(StreamId(1)), a == b), (a, false));
        assert!(!clocks.any_pending() && clocks.begin().is_empty());
        assert!(clocks.is_quiet(a, 0), "what was never used is quiet");
        let early = clocks.stamp(a);
        assert_eq!(clocks.stamp(a), early);
        let due = clocks.begin();
        assert_eq!(due, [Due { clock: a, stream: StreamId(1), tick: early }]);
        let late = clocks.stamp(a);
        assert!(late > early);
        clocks.recorded(due[0], EventId(7));
        assert_eq!(clocks.flying(), [(a, early, EventId(7))]);
        assert!(!clocks.is_quiet(a, early));
        assert_eq!(clocks.pass(a, early), [EventId(7)]);
        assert!(clocks.is_quiet(a, early) && !clocks.is_quiet(a, late) && !clocks.is_quiet(b, early));
        assert!(clocks.any_pending());
        let again = clocks.begin();
        clocks.not_recorded(again[0]);
        let later = clocks.begin();
        assert!(later[0].tick > again[0].tick, "one event covers both ticks");
        clocks.recorded(later[0], EventId(8));
        assert_eq!(clocks.pass_all(&later, &[]), [EventId(8)]);
        assert!(clocks.is_quiet(a, late) && !clocks.any_pending());
    }
}
