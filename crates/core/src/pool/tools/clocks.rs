//! Stream order: when the work that may still touch freed memory is complete.
//!
//! Each stream has a clock. A freed block gets the clock's current epoch. Recording an event on the stream
//! ends the epoch. After the event has completed, everything freed in that epoch or an earlier one is
//! *complete*: no work queued before the free is left. So one event serves many frees, a free needs no driver
//! call, and the check is one comparison.
//!
//! A clock exists while it is [acquired](Clocks::acquire) (by a list, or a block that waits for the stream)
//! or has an event in flight. Keys are never reused, and anything under the key of a removed clock is
//! complete.
//!
//! Bookkeeping only: [`crate::pool::means::events`] records and queries.

use std::collections::{HashMap, VecDeque};

use slotmap::SlotMap;

use crate::driver::{EventId, StreamId};

slotmap::new_key_type! {
    /// The null key is always complete.
    pub(in crate::pool) struct ClockKey;
}

/// An event to record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pool) struct Due {
    pub(in crate::pool) clock: ClockKey,
    pub(in crate::pool) stream: StreamId,
    pub(in crate::pool) epoch: u64,
}

#[derive(Debug, Default)]
pub(in crate::pool) struct Clocks {
    clocks: SlotMap<ClockKey, Clock>,
    by_stream: HashMap<StreamId, ClockKey>,
    version: u64,
    /// Whether a capture prevented recording at the last attempt.
    blocked: bool,
}

#[derive(Debug)]
struct Clock {
    stream: StreamId,
    users: usize,
    /// The epoch of memory that is freed now.
    epoch: u64,
    /// Whether anything was freed in this epoch.
    dirty: bool,
    /// Epochs up to this one are complete.
    passed: u64,
    /// Oldest first, each event with the epoch that it ends.
    in_flight: VecDeque<(u64, EventId)>,
}

impl Clock {
    fn new(stream: StreamId) -> Self {
        Self { stream, users: 0, epoch: 1, dirty: false, passed: 0, in_flight: VecDeque::new() }
    }

    fn is_complete(&self) -> bool {
        self.passed + 1 >= self.epoch && !self.dirty
    }
}

impl Clocks {
    /// The clock stays until each acquisition is released.
    pub(in crate::pool) fn acquire(&mut self, stream: StreamId) -> ClockKey {
        let clocks = &mut self.clocks;
        let key = *self.by_stream.entry(stream).or_insert_with(|| clocks.insert(Clock::new(stream)));
        clocks[key].users += 1;
        key
    }

    /// The owner of the acquisition keeps no epochs.
    pub(in crate::pool) fn release(&mut self, key: ClockKey) {
        if let Some(clock) = self.clocks.get_mut(key) {
            clock.users -= 1;
            self.drop_unused(key);
        }
    }

    fn drop_unused(&mut self, key: ClockKey) {
        let unused = self.clocks.get(key).filter(|clock| clock.users == 0 && clock.in_flight.is_empty());
        if let Some(stream) = unused.map(|clock| clock.stream) {
            self.clocks.remove(key);
            self.by_stream.remove(&stream);
        }
    }

    pub(in crate::pool) fn count(&self) -> usize {
        self.clocks.len()
    }

    /// Notes a free on this clock's stream, and returns its epoch.
    pub(in crate::pool) fn freed_epoch(&mut self, key: ClockKey) -> u64 {
        self.version += 1;
        let Some(clock) = self.clocks.get_mut(key) else { return 0 };
        clock.dirty = true;
        clock.epoch
    }

    pub(in crate::pool) fn is_complete(&self, key: ClockKey, freed_epoch: u64) -> bool {
        self.clocks.get(key).is_none_or(|clock| freed_epoch <= clock.passed)
    }

    pub(in crate::pool) fn any_pending(&self) -> bool {
        self.clocks.values().any(|clock| clock.dirty || !clock.in_flight.is_empty())
    }

    pub(in crate::pool) fn set_blocked(&mut self, blocked: bool) {
        self.blocked = blocked;
    }

    /// Whether a capture delays due events.
    pub(in crate::pool) fn is_blocked(&self) -> bool {
        self.blocked && self.clocks.values().any(|clock| clock.dirty)
    }

    /// Ends the epoch of every clock under which something was freed. The caller records the events.
    pub(in crate::pool) fn begin(&mut self) -> Vec<Due> {
        let dirty = self.clocks.iter_mut().filter(|(_, clock)| clock.dirty);
        dirty
            .map(|(key, clock)| {
                let due = Due { clock: key, stream: clock.stream, epoch: clock.epoch };
                clock.epoch += 1;
                clock.dirty = false;
                due
            })
            .collect()
    }

    /// Notes the event that ends `due`. Returns it if its clock is gone.
    pub(in crate::pool) fn recorded(&mut self, due: Due, event: EventId) -> Option<EventId> {
        match self.clocks.get_mut(due.clock) {
            Some(clock) => {
                clock.in_flight.push_back((due.epoch, event));
                None
            }
            None => Some(event),
        }
    }

    /// The event could not be recorded; the next one covers its epoch too.
    pub(in crate::pool) fn not_recorded(&mut self, due: Due) {
        if let Some(clock) = self.clocks.get_mut(due.clock) {
            clock.dirty = true;
        }
    }

    /// Clock, epoch and event; oldest first within a clock.
    pub(in crate::pool) fn in_flight(&self) -> Vec<(ClockKey, u64, EventId)> {
        let of = |(key, clock): (ClockKey, &Clock)| {
            clock.in_flight.iter().map(move |(epoch, event)| (key, *epoch, *event)).collect::<Vec<_>>()
        };
        self.clocks.iter().flat_map(of).collect()
    }

    /// `None` if the clock was removed meanwhile.
    pub(in crate::pool) fn stream(&self, clock: ClockKey) -> Option<StreamId> {
        self.clocks.get(clock).map(|clock| clock.stream)
    }

    pub(in crate::pool) fn streams(&self) -> impl Iterator<Item = StreamId> {
        self.clocks.iter().map(|(_, clock)| clock.stream)
    }

    /// Changes whenever something has happened that may help a request for memory.
    pub(in crate::pool) fn version(&self) -> u64 {
        self.version
    }

    pub(in crate::pool) fn note_change(&mut self) {
        self.version += 1;
    }

    /// Everything on this clock up to `epoch` is complete. Returns the events that are no longer needed.
    pub(in crate::pool) fn pass(&mut self, key: ClockKey, epoch: u64) -> Vec<EventId> {
        self.version += 1;
        let Some(clock) = self.clocks.get_mut(key) else { return Vec::new() };
        clock.passed = clock.passed.max(epoch);
        let done = clock.in_flight.iter().take_while(|(ends, _)| *ends <= epoch).count();
        let done = clock.in_flight.drain(..done).map(|(_, event)| event).collect();
        self.drop_unused(key);
        done
    }

    /// The device has been idle since [`Clocks::begin`] returned `ended` and the events were `in_flight`.
    pub(in crate::pool) fn pass_all(
        &mut self,
        ended: &[Due],
        in_flight: &[(ClockKey, u64, EventId)],
    ) -> Vec<EventId> {
        let ended = ended.iter().map(|due| (due.clock, due.epoch));
        let epochs: Vec<_> =
            ended.chain(in_flight.iter().map(|(clock, epoch, _)| (*clock, *epoch))).collect();
        epochs.into_iter().flat_map(|(clock, epoch)| self.pass(clock, epoch)).collect()
    }

    /// Everything freed on streams that no longer exist is complete. Their events are left to the next query.
    pub(in crate::pool) fn end_streams(&mut self, exists: impl Fn(StreamId) -> bool) {
        for clock in self.clocks.values_mut().filter(|clock| !clock.is_complete()) {
            if !exists(clock.stream) {
                (clock.passed, clock.dirty) = (clock.epoch, false);
                clock.epoch += 1;
                self.version += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_covers_what_was_freed_before_it_and_nothing_later() {
        let mut clocks = Clocks::default();
        let (a, b) = (clocks.acquire(StreamId(1)), clocks.acquire(StreamId(2)));
        assert_eq!((clocks.acquire(StreamId(1)), a == b), (a, false));
        assert!(!clocks.any_pending() && clocks.begin().is_empty());
        assert!(clocks.is_complete(a, 0), "what was never used is complete");
        let early = clocks.freed_epoch(a);
        assert_eq!(clocks.freed_epoch(a), early);
        let due = clocks.begin();
        assert_eq!(due, [Due { clock: a, stream: StreamId(1), epoch: early }]);
        let late = clocks.freed_epoch(a);
        assert!(late > early);
        assert_eq!(clocks.recorded(due[0], EventId(7)), None);
        assert_eq!(clocks.in_flight(), [(a, early, EventId(7))]);
        assert!(!clocks.is_complete(a, early));
        assert_eq!(clocks.pass(a, early), [EventId(7)]);
        assert!(
            clocks.is_complete(a, early) && !clocks.is_complete(a, late) && !clocks.is_complete(b, early)
        );
        assert!(clocks.any_pending());
        let again = clocks.begin();
        clocks.not_recorded(again[0]);
        let later = clocks.begin();
        assert!(later[0].epoch > again[0].epoch, "one event covers both epochs");
        assert_eq!(clocks.recorded(later[0], EventId(8)), None);
        assert_eq!(clocks.pass_all(&later, &[]), [EventId(8)]);
        assert!(clocks.is_complete(a, late) && !clocks.any_pending());
    }

    #[test]
    fn a_clock_is_there_for_its_users_and_its_events() {
        let mut clocks = Clocks::default();
        let a = clocks.acquire(StreamId(1));
        assert_eq!(clocks.acquire(StreamId(1)), a);
        let early = clocks.freed_epoch(a);
        clocks.release(a);
        assert!(!clocks.is_complete(a, early), "it is still acquired");
        let due = clocks.begin();
        assert_eq!(clocks.recorded(due[0], EventId(7)), None);
        clocks.release(a);
        assert_eq!((clocks.count(), clocks.in_flight().len()), (1, 1), "its event has to be destroyed");
        assert_eq!(clocks.pass(a, early), [EventId(7)]);
        assert_eq!(clocks.count(), 0);
        let b = clocks.acquire(StreamId(1));
        assert_ne!(a, b, "an old key finds no other clock");
        let freed_epoch = clocks.freed_epoch(b);
        assert!(clocks.is_complete(a, freed_epoch) && !clocks.is_complete(b, freed_epoch));
        let due = clocks.begin();
        clocks.release(b);
        assert_eq!(clocks.count(), 0);
        assert_eq!(clocks.recorded(due[0], EventId(8)), Some(EventId(8)), "nothing waits for it");
        clocks.not_recorded(due[0]);
        assert!(clocks.pass(b, 9).is_empty() && !clocks.any_pending());
    }

    #[test]
    fn a_stream_that_has_ended_is_complete() {
        let mut clocks = Clocks::default();
        let (a, b) = (clocks.acquire(StreamId(1)), clocks.acquire(StreamId(2)));
        let (first, other) = (clocks.freed_epoch(a), clocks.freed_epoch(b));
        let due = clocks.begin();
        assert_eq!(clocks.recorded(due[0], EventId(1)), None);
        let second = clocks.freed_epoch(a);
        let version = clocks.version();
        clocks.end_streams(|stream| stream != StreamId(1));
        assert!(
            clocks.is_complete(a, first) && clocks.is_complete(a, second) && !clocks.is_complete(b, other)
        );
        assert!(clocks.version() > version, "it may help a request");
        assert!(!clocks.is_complete(a, clocks.clocks[a].epoch), "what is freed from now on has to pass");
        assert_eq!(clocks.in_flight(), [(a, first, EventId(1))]);
        assert_eq!(clocks.pass(a, first), [EventId(1)]);
    }
}
