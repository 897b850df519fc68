//! Streams, events, and what work in flight keeps alive.
//!
//! All work is queued as a [`Flight`], which owns what the work touches until an event after the work has
//! passed. Waiting returns these objects. Dropping the flight leaves them to the [`Queues`]. Promise:
//! whatever fails, nothing that a copy or a host function may still touch is freed.

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
use super::primary::Primary;
use super::stream::{Event, Stream};
use crate::ledger::{Result, invalid, of};

/// The driver's handles of default streams.
const STREAM_LEGACY: Raw = 1;
const STREAM_PER_THREAD: Raw = 2;

/// Longest pause between checks of a stream to be removed while other threads use it.
const REMOVAL_PAUSE_MAX: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) struct Queues {
    context: Arc<Context>,
    table: Mutex<Table>,
    abandoned: Mutex<Abandoned>,
    abandoned_count: AtomicUsize,
}

/// Work that no caller waits for.
#[derive(Debug, Default)]
struct Abandoned {
    in_flight: VecDeque<AbandonedWork>,
    end: End,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum End {
    #[default]
    NotYet,
    /// All work had finished.
    Idle,
    /// Some work may still be running.
    Unknown,
}

/// Pending events after which a sweep stops.
const SWEEP_MISSES: usize = 8;

#[derive(Debug)]
struct Table {
    streams: HashMap<u64, Arc<Stream>>,
    events: HashMap<u64, Arc<Event>>,
    next_id: u64,
}

struct AbandonedWork {
    /// Recorded after the work. Without it, only synchronizing the device shows the work's end.
    event: Option<Arc<Event>>,
    kept: Box<dyn Send>,
}

impl fmt::Debug for AbandonedWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AbandonedWork").field("event", &self.event).finish_non_exhaustive()
    }
}

pub(super) struct Flight<T: Send + 'static> {
    queues: Arc<Queues>,
    work: Option<(Arc<Event>, T)>,
}

impl Queues {
    pub(super) fn new(context: &Arc<Context>) -> Self {
        let default = Arc::new(Stream::of(context.primary(), 0, false));
        let mut table = Table::empty();
        table.streams.insert(StreamId::DEFAULT.0, default);
        let (abandoned, abandoned_count) = Default::default();
        Self { context: Arc::clone(context), table: Mutex::new(table), abandoned, abandoned_count }
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

    /// Refuses a captured stream: work on it would never finish, and waiting would invalidate the capture.
    pub(super) fn running_stream(&self, id: StreamId) -> Result<Arc<Stream>> {
        let stream = self.stream(id)?;
        if stream.is_captured()? { Err(captured(id)) } else { Ok(stream) }
    }

    /// The context is entered.
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
                Err(error) if stream.is_owned() => return Err(error),
                // Its owner has destroyed it.
                Err(_) => {}
            }
        }
        Ok(None)
    }

    pub(super) fn event(&self, id: EventId) -> Result<Arc<Event>> {
        self.table().events.get(&id.0).cloned().ok_or_else(|| unknown(id))
    }

    pub(super) fn create_stream(&self) -> Result<StreamId> {
        let stream = Stream::create(self.context.primary())?;
        Ok(self.table().add(stream))
    }

    pub(super) fn create_kernel_copy_stream(&self) -> Result<StreamId> {
        let stream = Stream::create(self.context.primary())?.copied_by_kernel();
        Ok(self.table().add(stream))
    }

    /// In another GPU's context.
    pub(super) fn create_link_stream(&self, link: &Arc<Primary>) -> Result<StreamId> {
        let _entered = link.enter(Op::StreamCreate).map_err(|error| error.kind)?;
        let stream = Stream::create(link)?.over_link();
        Ok(self.table().add(stream))
    }

    pub(super) fn create_background_stream(&self) -> Result<StreamId> {
        let stream = Stream::low_priority(self.context.primary())?;
        Ok(self.table().add(stream))
    }

    /// Stable until the stream is removed.
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
        // SAFETY: C2; the caller of `adopt_stream` promises that the handle is a stream.
        let context: Raw = api.get(|context| unsafe { (api.stream_get_ctx)(raw, context) })?;
        if context != self.context.raw() {
            return Err(invalid("the stream belongs to another context than the GPU's primary one".into()));
        }
        let mut table = self.table();
        let known = table.streams.iter().find(|(_, stream)| stream.raw() == raw).map(|(id, _)| StreamId(*id));
        Ok(known.unwrap_or_else(|| table.add(Stream::of(self.context.primary(), raw, false))))
    }

    pub(super) fn remove_stream(&self, id: StreamId) -> Result<()> {
        if id == StreamId::DEFAULT {
            return Err(invalid("the default stream cannot be destroyed".into()));
        }
        let mut pause = Duration::from_micros(10);
        loop {
            // It stays known until its work is done: work of an unknown stream counts as finished.
            let stream = self.running_stream(id)?;
            let queued = stream.queued();
            stream.synchronize()?;
            let mut table = self.table();
            // One in the table, one here: no thread is between looking it up and queuing work.
            let is_unused = Arc::strong_count(&stream) == 2;
            fence(Ordering::Acquire); // Pairs with the release of the last other reference.
            if is_unused && stream.queued() == queued {
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
        let event = stream.mark()?;
        // If a capture has just begun, the event is useless, and querying it would invalidate the capture.
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

    /// Drops what finished work kept. The context is entered.
    pub(super) fn sweep(&self) {
        if self.abandoned_count.load(Ordering::Acquire) == 0 {
            return;
        }
        // No lock is held during driver queries, and while a buffer's own code runs.
        let mut queried = self.take_abandoned();
        let (mut passed, mut missed) = (Vec::new(), VecDeque::new());
        while missed.len() < SWEEP_MISSES
            && let Some(abandoned) = queried.pop_front()
        {
            // If the query fails, the work may still be in flight.
            if abandoned.event.as_ref().is_some_and(|event| event.has_passed().unwrap_or(false)) {
                passed.push(abandoned);
            } else {
                missed.push_back(abandoned);
            }
        }
        // At the end, so that the next sweep checks others.
        queried.append(&mut missed);
        self.put_back(queried);
        // Last, since it runs code of the buffers' owners, which may panic.
        drop(passed);
    }

    pub(super) fn close(&self, is_idle: bool) {
        let abandoned = {
            let mut abandoned = self.abandoned();
            abandoned.end = if is_idle { End::Idle } else { End::Unknown };
            self.abandoned_count.store(0, Ordering::Release);
            std::mem::take(&mut abandoned.in_flight)
        };
        for AbandonedWork { kept, .. } in abandoned {
            if is_idle { drop(kept) } else { std::mem::forget(kept) }
        }
        let mut table = self.table();
        let (streams, events) = (std::mem::take(&mut table.streams), std::mem::take(&mut table.events));
        drop(table);
        if is_idle {
            drop(streams);
        } else {
            // Work in flight may still write to their staging buffers.
            std::mem::forget(streams);
        }
        drop(events);
    }

    fn abandoned(&self) -> MutexGuard<'_, Abandoned> {
        self.abandoned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_abandoned(&self) -> VecDeque<AbandonedWork> {
        std::mem::take(&mut self.abandoned().in_flight)
    }

    fn put_back(&self, mut older: VecDeque<AbandonedWork>) {
        let mut abandoned = self.abandoned();
        older.append(&mut abandoned.in_flight);
        self.retain(abandoned, older);
    }

    fn abandon(&self, event: Option<Arc<Event>>, kept: Box<dyn Send>) {
        let mut abandoned = self.abandoned();
        let mut in_flight = std::mem::take(&mut abandoned.in_flight);
        in_flight.push_back(AbandonedWork { event, kept });
        self.retain(abandoned, in_flight);
    }

    /// In a forked child the lock may be held for ever, and nothing is ours to free.
    fn abandon_unfinished<T: Send + 'static>(&self, event: Arc<Event>, kept: T) {
        if self.context.owner().is_here() {
            self.abandon(Some(event), Box::new(kept));
        } else {
            std::mem::forget((event, kept));
        }
    }

    /// Keeps what unfinished work touches while the device is open. After an idle close it is dropped; after
    /// any other it is never freed.
    fn retain(&self, mut abandoned: MutexGuard<'_, Abandoned>, in_flight: VecDeque<AbandonedWork>) {
        match abandoned.end {
            End::NotYet => {
                self.abandoned_count.store(in_flight.len(), Ordering::Release);
                abandoned.in_flight = in_flight;
            }
            End::Idle => {
                drop(abandoned);
                drop(in_flight);
            }
            End::Unknown => std::mem::forget(in_flight),
        }
    }

    /// Work abandoned before has finished afterwards. The context is entered.
    pub(super) fn synchronize(&self) -> Result<()> {
        if let Some(stream) = self.capturing()? {
            return Err(captured(stream));
        }
        let abandoned = self.take_abandoned();
        let idle = self.synchronize_links().and_then(|()| self.context.synchronize());
        if idle.is_err() {
            self.put_back(abandoned);
        }
        idle
    }

    /// What other GPUs still copy. The context's own work is not waited for.
    pub(super) fn synchronize_links(&self) -> Result<()> {
        let streams: Vec<Arc<Stream>> =
            self.table().streams.values().filter(|stream| stream.is_over_link()).map(Arc::clone).collect();
        streams.iter().try_for_each(|stream| stream.synchronize())
    }

    /// Keeps `kept` alive until the queued work has finished.
    pub(super) fn submit<T: Send + 'static>(
        self: &Arc<Self>,
        stream: &Stream,
        kept: T,
        queue: impl FnOnce(&T) -> Result<()>,
    ) -> Result<Flight<T>> {
        let event = Arc::new(stream.event()?);
        stream.count();
        let queued = queue(&kept).and_then(|()| event.record(stream));
        match queued {
            Ok(()) => Ok(Flight { queues: Arc::clone(self), work: Some((event, kept)) }),
            Err(error) => {
                // Part of it may be in flight.
                if stream.synchronize().is_err() {
                    self.abandon(None, Box::new(kept));
                }
                Err(error)
            }
        }
    }
}

impl Drop for Queues {
    fn drop(&mut self) {
        // Filled only if the device was not closed, as in a forked child. Its work may still run.
        let abandoned = self.abandoned.get_mut().unwrap_or_else(PoisonError::into_inner);
        std::mem::forget(std::mem::take(&mut abandoned.in_flight));
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
    pub(super) fn pending<U: 'static>(
        self,
        op: Op,
        finish: impl FnOnce(T) -> Result<U> + Send + 'static,
    ) -> Pending<U> {
        let has_ended = self.has_ended(op);
        let wait = move || {
            let kept = self.wait(op)?;
            finish(kept).map_err(of(op))
        };
        Pending::new(wait).telling(has_ended)
    }

    /// An error counts as ended; waiting then returns it.
    fn has_ended(&self, op: Op) -> impl Fn() -> bool + Send + use<T> {
        let event = self.work.as_ref().map(|(event, _)| Arc::clone(event));
        move || {
            let Some(event) = event.as_ref() else { return true };
            let Ok(_entered) = event.enter(op) else { return true };
            event.has_passed().unwrap_or(true)
        }
    }

    fn wait(mut self, op: Op) -> DriverResult<T> {
        let queues = Arc::clone(&self.queues);
        let Some((event, kept)) = self.work.take() else {
            return Err(of(op)(invalid("the work was waited for before".into())));
        };
        let waited = event.enter(op).and_then(|_entered| event.wait().map_err(of(op)));
        match waited {
            Ok(()) => Ok(kept),
            Err(error) => {
                queues.abandon_unfinished(event, kept);
                Err(error)
            }
        }
    }
}

impl<T: Send + 'static> Drop for Flight<T> {
    fn drop(&mut self) {
        if let Some((event, kept)) = self.work.take() {
            self.queues.abandon_unfinished(event, kept);
        }
    }
}

fn captured(stream: StreamId) -> DriverErrorKind {
    DriverErrorKind::Capturing { stream }
}

fn unknown(handle: impl fmt::Display) -> DriverErrorKind {
    DriverErrorKind::UnknownHandle { handle: handle.to_string() }
}
