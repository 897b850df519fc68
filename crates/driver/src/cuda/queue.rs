//! Streams, events, and what work in flight keeps alive.
//!
//! [`Flight`] is the one way in which work leaves: it owns whatever the work touches until an event behind the work
//! has passed. Who waits gets it back; who does not leaves it to the [`Queues`], which let go of it once the event
//! has passed. Promise: nothing that a copy or a host function may still touch is freed, whatever fails.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{DriverErrorKind, EventId, Op, Pending, StreamId};

use super::context::Context;
use super::ffi::Raw;
use super::stream::{Event, Stream};
use crate::ledger::{Result, invalid, of};

/// What the driver calls the default stream, and the default stream of each thread.
const STREAM_LEGACY: Raw = 1;
const STREAM_PER_THREAD: Raw = 2;

/// Longest between two looks at a stream that is to be removed while others use it.
const REMOVAL_PAUSE_MAX: Duration = Duration::from_millis(1);

/// Streams and events by number, and what is left in flight.
#[derive(Debug)]
pub(super) struct Queues {
    context: Arc<Context>,
    table: Mutex<Table>,
    left: Mutex<Remains>,
    left_count: AtomicUsize,
}

/// Work that nobody waits for.
#[derive(Debug, Default)]
struct Remains {
    flying: VecDeque<Left>,
    end: End,
}

/// How the device has ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum End {
    #[default]
    NotYet,
    /// All work had finished.
    Idle,
    /// Some may still be running, for all that is known.
    Unknown,
}

/// How many events that have not passed are met before a sweep ends.
const SWEEP_MISSES: usize = 8;

#[derive(Debug)]
struct Table {
    streams: HashMap<u64, Arc<Stream>>,
    events: HashMap<u64, Arc<Event>>,
    next_id: u64,
}

/// A piece of such work, with what it may touch.
struct Left {
    /// Behind the work; without one, only waiting for the whole device tells.
    event: Option<Arc<Event>>,
    kept: Box<dyn Send>,
}

impl fmt::Debug for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Left").field("event", &self.event).finish_non_exhaustive()
    }
}

/// Work on its way.
pub(super) struct Flight<T: Send + 'static> {
    queues: Arc<Queues>,
    /// Taken by whoever ends the flight.
    going: Option<(Arc<Event>, T)>,
}

impl Queues {
    pub(super) fn new(context: &Arc<Context>) -> Self {
        let default = Arc::new(Stream::of(context, 0, false));
        let mut table = Table::empty();
        table.streams.insert(StreamId::DEFAULT.0, default);
        let (left, left_count) = Default::default();
        Self { context: Arc::clone(context), table: Mutex::new(table), left, left_count }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stream(&self, id: StreamId) -> Result<Arc<Stream>> {
        self.table().streams.get(&id.0).cloned().ok_or_else(|| unknown(id))
    }

    pub(super) fn check_stream(&self, id: StreamId) -> Result<()> {
        if self.table().streams.contains_key(&id.0) { Ok(()) } else { Err(unknown(id)) }
    }

    /// A stream that runs what is queued on it: while it is captured, work on it would never be done, and waiting for it
    /// would end the capture.
    pub(super) fn running_stream(&self, id: StreamId) -> Result<Arc<Stream>> {
        let stream = self.stream(id)?;
        if stream.is_captured()? { Err(captured(id)) } else { Ok(stream) }
    }

    /// The first stream here that is captured. The caller has entered the context.
    pub(super) fn capturing(&self) -> Result<Option<StreamId>> {
        let mut streams: Vec<(u64, Arc<Stream>)> = {
            let table = self.table();
            table.streams.iter().map(|(id, stream)| (*id, Arc::clone(stream))).collect()
        };
        streams.sort_unstable_by_key(|(id, _)| *id);
        for (id, stream) in streams {
            match stream.is_captured() {
                Ok(false) => {}
                Ok(true) => return Ok(Some(StreamId(id))),
                Err(error) if stream.is_ours() => return Err(error),
                // Its owner has ended it.
                Err(_) => {}
            }
        }
        Ok(None)
    }

    pub(super) fn event(&self, id: EventId) -> Result<Arc<Event>> {
        self.table().events.get(&id.0).cloned().ok_or_else(|| unknown(id))
    }

    pub(super) fn create_stream(&self) -> Result<StreamId> {
        let stream = Stream::ours(&self.context)?;
        Ok(self.table().add(stream))
    }

    pub(super) fn create_kernel_copy_stream(&self) -> Result<StreamId> {
        let stream = Stream::ours(&self.context)?.copied_by_kernel();
        Ok(self.table().add(stream))
    }

    pub(super) fn create_background_stream(&self) -> Result<StreamId> {
        let stream = Stream::behind_others(&self.context)?;
        Ok(self.table().add(stream))
    }

    /// The number of a stream of the caller's: the same one as long as it is not removed.
    pub(super) fn adopt(&self, raw: Raw) -> Result<StreamId> {
        match raw {
            0 | STREAM_LEGACY => return Ok(StreamId::DEFAULT),
            STREAM_PER_THREAD => {
                let reason =
                    "the default stream of each thread is a stream for each thread, and has no one name";
                return Err(invalid(reason.into()));
            }
            _ => {}
        }
        let api = self.context.api();
        // SAFETY: C2; that the handle is a stream is what the caller of `adopt_stream` promises.
        let context: Raw = api.get(|context| unsafe { (api.stream_get_ctx)(raw, context) })?;
        if context != self.context.raw() {
            return Err(invalid("the stream belongs to another context than the GPU's primary one".into()));
        }
        let mut table = self.table();
        let known = table.streams.iter().find(|(_, stream)| stream.raw() == raw).map(|(id, _)| StreamId(*id));
        Ok(known.unwrap_or_else(|| table.add(Stream::of(&self.context, raw, false))))
    }

    pub(super) fn remove_stream(&self, id: StreamId) -> Result<()> {
        if id == StreamId::DEFAULT {
            return Err(invalid("the default stream cannot be destroyed".into()));
        }
        let mut pause = Duration::from_micros(10);
        loop {
            // It stays known until its work is done: who does not know it takes its work for finished.
            let stream = self.running_stream(id)?;
            let queued = stream.queued();
            stream.synchronize()?;
            let mut table = self.table();
            // One in the table, one here: nobody is between looking it up and queuing something.
            let is_alone = Arc::strong_count(&stream) == 2;
            fence(Ordering::Acquire); // With whoever let go of it last.
            if is_alone && stream.queued() == queued {
                let removed = table.streams.remove(&id.0);
                drop(table);
                return removed.map(drop).ok_or_else(|| unknown(id));
            }
            drop(table);
            drop(stream);
            thread::sleep(pause);
            pause = (pause * 2).min(REMOVAL_PAUSE_MAX);
        }
    }

    pub(super) fn record_event(&self, id: StreamId) -> Result<EventId> {
        let stream = self.running_stream(id)?;
        let event = Event::create(&self.context)?;
        event.record(&stream)?;
        // If a capture has begun just now, the event says nothing, and whoever asks for it ends the capture.
        if stream.is_captured()? {
            return Err(captured(id));
        }
        let mut table = self.table();
        let id = table.next_id();
        table.events.insert(id, Arc::new(event));
        Ok(EventId(id))
    }

    pub(super) fn event_has_passed(&self, id: EventId) -> Result<bool> {
        self.event(id)?.has_passed()
    }

    pub(super) fn wait_for_event(&self, id: EventId) -> Result<()> {
        self.event(id)?.wait()
    }

    pub(super) fn remove_event(&self, id: EventId) -> Result<()> {
        let removed = self.table().events.remove(&id.0);
        removed.map(drop).ok_or_else(|| unknown(id))
    }

    pub(super) fn stream_waits(&self, stream: StreamId, event: EventId) -> Result<()> {
        let (event, stream) = (self.event(event)?, self.running_stream(stream)?);
        stream.wait_for(&event)
    }

    /// Lets go of what work has finished with that nobody waits for, as far as a few events tell.
    /// The caller has entered the context.
    pub(super) fn sweep(&self) {
        if self.left_count.load(Ordering::Acquire) == 0 {
            return;
        }
        // With no lock held while the driver is asked, and while code of whoever made a buffer runs.
        let mut asked = self.take_left();
        let (mut passed, mut missed) = (Vec::new(), VecDeque::new());
        while missed.len() < SWEEP_MISSES
            && let Some(left) = asked.pop_front()
        {
            // What cannot be asked for may still be in flight.
            if left.event.as_ref().is_some_and(|event| event.has_passed().unwrap_or(false)) {
                passed.push(left);
            } else {
                missed.push_back(left);
            }
        }
        // Those that were missed go to the end, so that the next sweep looks at others.
        asked.append(&mut missed);
        self.leave_again(asked);
        // Last, since this runs code of whoever made a buffer, which may panic.
        drop(passed);
    }

    /// At the end: nothing is in flight any more if the device says so; otherwise what may be is never freed.
    pub(super) fn close(&self, is_idle: bool) {
        let left = {
            let mut left = self.left();
            left.end = if is_idle { End::Idle } else { End::Unknown };
            self.left_count.store(0, Ordering::Release);
            std::mem::take(&mut left.flying)
        };
        for Left { kept, .. } in left {
            if is_idle { drop(kept) } else { std::mem::forget(kept) }
        }
        let mut table = self.table();
        let (streams, events) = (std::mem::take(&mut table.streams), std::mem::take(&mut table.events));
        drop(table);
        if is_idle {
            drop(streams);
        } else {
            // Their staging buffers may be written to.
            std::mem::forget(streams);
        }
        drop(events);
    }

    fn left(&self) -> MutexGuard<'_, Remains> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_left(&self) -> VecDeque<Left> {
        std::mem::take(&mut self.left().flying)
    }

    /// Puts back what was taken, before whatever was left meanwhile.
    fn leave_again(&self, mut older: VecDeque<Left>) {
        let mut left = self.left();
        older.append(&mut left.flying);
        self.keep(left, older);
    }

    fn leave(&self, event: Option<Arc<Event>>, kept: Box<dyn Send>) {
        let mut left = self.left();
        let mut flying = std::mem::take(&mut left.flying);
        flying.push_back(Left { event, kept });
        self.keep(left, flying);
    }

    /// Work whose end nobody has seen. In a forked child the lock may be held for ever, and nothing is ours to free.
    fn leave_in_doubt<T: Send + 'static>(&self, event: Arc<Event>, kept: T) {
        if self.context.owner().is_here() {
            self.leave(Some(event), Box::new(kept));
        } else {
            std::mem::forget((event, kept));
        }
    }

    /// What work that has not been waited for touches is kept as long as the device is there; behind its end it
    /// goes if the end was idle, and never otherwise.
    fn keep(&self, mut left: MutexGuard<'_, Remains>, flying: VecDeque<Left>) {
        match left.end {
            End::NotYet => {
                self.left_count.store(flying.len(), Ordering::Release);
                left.flying = flying;
            }
            End::Idle => {
                drop(left);
                drop(flying);
            }
            End::Unknown => std::mem::forget(flying),
        }
    }

    /// Waits for all work in the context. What was left until now has finished then. The caller has entered.
    pub(super) fn synchronize(&self) -> Result<()> {
        if let Some(stream) = self.capturing()? {
            return Err(captured(stream));
        }
        let left = self.take_left();
        let idle = self.context.synchronize();
        if idle.is_err() {
            self.leave_again(left);
        }
        idle
    }

    /// Queues work that touches `kept`, and keeps that alive until the work has finished.
    pub(super) fn fly<T: Send + 'static>(
        self: &Arc<Self>,
        stream: &Stream,
        kept: T,
        queue: impl FnOnce(&T) -> Result<()>,
    ) -> Result<Flight<T>> {
        let event = Arc::new(Event::create(&self.context)?);
        stream.count();
        let queued = queue(&kept).and_then(|()| event.record(stream));
        match queued {
            Ok(()) => Ok(Flight { queues: Arc::clone(self), going: Some((event, kept)) }),
            Err(error) => {
                // Part of it may be on its way.
                if stream.synchronize().is_err() {
                    self.leave(None, Box::new(kept));
                }
                Err(error)
            }
        }
    }
}

impl Drop for Queues {
    fn drop(&mut self) {
        // Only where the device was not closed, as in a forked child: nobody knows what is in flight.
        let left = self.left.get_mut().unwrap_or_else(PoisonError::into_inner);
        std::mem::forget(std::mem::take(&mut left.flying));
        if !self.context.owner().is_here() {
            // A thread of the parent's may have been changing it.
            let table = self.table.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::replace(table, Table::empty()));
        }
    }
}

impl Table {
    fn empty() -> Self {
        Self { streams: HashMap::new(), events: HashMap::new(), next_id: 1 }
    }

    fn next_id(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }

    fn add(&mut self, stream: Stream) -> StreamId {
        let id = self.next_id();
        self.streams.insert(id, Arc::new(stream));
        StreamId(id)
    }
}

impl<T: Send + 'static> Flight<T> {
    /// The outcome, given what the work has touched.
    pub(super) fn pending<U: 'static>(
        self,
        op: Op,
        finish: impl FnOnce(T) -> Result<U> + Send + 'static,
    ) -> Pending<U> {
        let has_ended = self.has_ended(op);
        let wait = move || {
            let kept = self.land(op)?;
            finish(kept).map_err(of(op))
        };
        Pending::new(wait).telling(has_ended)
    }

    /// Asks for the event. What cannot be asked for has ended, as whoever waits then learns.
    fn has_ended(&self, op: Op) -> impl Fn() -> bool + Send + use<T> {
        let context = Arc::clone(&self.queues.context);
        let event = self.going.as_ref().map(|(event, _)| Arc::clone(event));
        move || {
            let Ok(_entered) = context.enter(op) else { return true };
            event.as_ref().is_none_or(|event| event.has_passed().unwrap_or(true))
        }
    }

    fn land(mut self, op: Op) -> DriverResult<T> {
        let queues = Arc::clone(&self.queues);
        let Some((event, kept)) = self.going.take() else {
            return Err(of(op)(invalid("the work was waited for before".into())));
        };
        let waited = queues.context.enter(op).and_then(|_entered| event.wait().map_err(of(op)));
        match waited {
            Ok(()) => Ok(kept),
            Err(error) => {
                queues.leave_in_doubt(event, kept);
                Err(error)
            }
        }
    }
}

impl<T: Send + 'static> Drop for Flight<T> {
    fn drop(&mut self) {
        if let Some((event, kept)) = self.going.take() {
            self.queues.leave_in_doubt(event, kept);
        }
    }
}

fn captured(stream: StreamId) -> DriverErrorKind {
    DriverErrorKind::Capturing { stream }
}

fn unknown(handle: impl fmt::Display) -> DriverErrorKind {
    DriverErrorKind::UnknownHandle { handle: handle.to_string() }
}
