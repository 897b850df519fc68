//! Events as server-sent events.
//!
//! One task moves events from the service into a [`Hub`]. Each follower reads from it at its own speed, so a slow one
//! delays no other. A follower that falls too far back gets the number of lost events. A follower that reconnects sends
//! the last id that it saw, and gets the kept events after it.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, watch};
use tokio_util::sync::CancellationToken;

use super::follow::Followed;
use super::metrics::Metrics;
use crate::service::ServiceEvent;

const KEPT_MAX: usize = 1024;
/// Most events in one write.
const CHUNK: usize = 32;

#[derive(Debug)]
pub(super) struct Hub {
    ring: Mutex<EventBuffer>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct EventBuffer {
    /// Events dropped before the first kept one.
    first: u64,
    kept: VecDeque<Kept>,
}

#[derive(Debug, Clone)]
enum Kept {
    Event(Arc<ServiceEvent>),
    /// This many events were lost between the service and the hub.
    Lost(u64),
}

#[derive(Debug, Clone, Copy)]
pub(super) enum StartAt {
    /// With this many past events.
    Last(usize),
    /// After the event with this number.
    After(u64),
}

#[derive(Debug, Clone, Copy)]
struct Cursor {
    at: u64,
    /// Lost events that the follower has not been notified of.
    lost: u64,
}

impl Default for Hub {
    fn default() -> Self {
        Self { ring: Mutex::default(), changed: watch::Sender::new(()) }
    }
}

impl Hub {
    fn keep(&self, kept: Kept) {
        let mut ring = self.ring();
        ring.kept.push_back(kept);
        if ring.kept.len() > KEPT_MAX {
            ring.kept.pop_front();
            ring.first += 1;
        }
        drop(ring);
        self.changed.send_replace(());
    }

    fn begin(&self, from: StartAt) -> Cursor {
        let ring = self.ring();
        let at = |index: usize| ring.first.saturating_add(u64::try_from(index).unwrap_or(u64::MAX));
        match from {
            StartAt::Last(count) => Cursor { at: at(ring.kept.len().saturating_sub(count)), lost: 0 },
            StartAt::After(id) => {
                let seqs = || {
                    ring.kept.iter().enumerate().filter_map(|(index, kept)| match kept {
                        Kept::Event(event) => Some((index, event.seq)),
                        Kept::Lost(_) => None,
                    })
                };
                match (seqs().next(), seqs().next_back()) {
                    // The service restarted since, so all kept events are newer.
                    (Some(_), Some((_, newest))) if id > newest => Cursor { at: at(0), lost: 0 },
                    (Some((_, oldest)), _) if id < oldest => {
                        Cursor { at: at(0), lost: oldest.saturating_sub(id).saturating_sub(1) }
                    }
                    _ => {
                        let seen = seqs().take_while(|(_, seq)| *seq <= id).last();
                        Cursor { at: at(seen.map_or(0, |(index, _)| index + 1)), lost: 0 }
                    }
                }
            }
        }
    }

    /// The next unseen events, at most [`CHUNK`].
    fn read(&self, cursor: &mut Cursor) -> Vec<Kept> {
        let ring = self.ring();
        if cursor.at < ring.first {
            cursor.lost = cursor.lost.saturating_add(ring.first - cursor.at);
            cursor.at = ring.first;
        }
        let mut read = Vec::new();
        if cursor.lost > 0 {
            read.push(Kept::Lost(std::mem::take(&mut cursor.lost)));
        }
        let skipped = usize::try_from(cursor.at - ring.first).unwrap_or(usize::MAX);
        for kept in ring.kept.iter().skip(skipped).take(CHUNK) {
            read.push(kept.clone());
            cursor.at += 1;
        }
        read
    }

    fn ring(&self) -> MutexGuard<'_, EventBuffer> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) async fn collect(
    mut events: broadcast::Receiver<Arc<ServiceEvent>>,
    hub: Arc<Hub>,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) {
    loop {
        let event = tokio::select! {
            () = shutdown.cancelled() => return,
            event = events.recv() => event,
        };
        match event {
            Ok(event) => {
                metrics.count(&event);
                hub.keep(Kept::Event(event));
            }
            Err(RecvError::Lagged(lost)) => {
                tracing::warn!(lost, "lost events, which metrics lack");
                metrics.lost(lost);
                hub.keep(Kept::Lost(lost));
            }
            Err(RecvError::Closed) => return,
        }
    }
}

/// The events from where one follower is.
pub(super) struct Events {
    hub: Arc<Hub>,
    changed: watch::Receiver<()>,
    cursor: Cursor,
}

impl Events {
    pub(super) fn of(hub: Arc<Hub>, from: StartAt) -> Self {
        Self { changed: hub.changed.subscribe(), cursor: hub.begin(from), hub }
    }
}

impl Followed for Events {
    /// The reconnection delay in milliseconds.
    const PREAMBLE: &'static str = "retry: 2000\n\n";

    fn read(&mut self) -> String {
        self.changed.mark_unchanged();
        self.hub.read(&mut self.cursor).iter().map(written).collect()
    }

    async fn wait_for_more(&mut self) -> bool {
        self.changed.changed().await.is_ok()
    }

    fn keep_alive(&self) -> String {
        ": still here\n\n".to_owned()
    }
}

fn written(kept: &Kept) -> String {
    let mut text = String::new();
    let event = match kept {
        Kept::Event(event) => serde_json::to_value(event.as_ref()).map(|data| (event.seq, data)),
        Kept::Lost(lost) => return lagged(*lost),
    };
    match event {
        Ok((seq, data)) => {
            let kind = data.get("event").and_then(serde_json::Value::as_str).unwrap_or("message");
            // serde_json writes no line breaks, so the JSON is one `data:` line.
            let _ = write!(text, "id: {seq}\nevent: {kind}\ndata: {data}\n\n");
            text
        }
        Err(error) => {
            tracing::error!(%error, "cannot write an event as JSON");
            lagged(1)
        }
    }
}

fn lagged(lost: u64) -> String {
    format!("event: lagged\ndata: {{\"lost\":{lost}}}\n\n")
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::time::Duration;

    use futures_util::StreamExt;
    use tokio::sync::Semaphore;

    use super::super::follow::stream;
    use super::*;
    use crate::service::EventKind;

    fn event(seq: u64) -> Kept {
        let what = EventKind::Learnt { held_bytes: vec![seq] };
        Kept::Event(Arc::new(ServiceEvent { seq, at_unix_ms: 0, model: "one".to_owned(), what }))
    }

    /// Sequence numbers, or the count of lost events.
    fn seen(hub: &Hub, from: StartAt) -> Vec<Result<u64, u64>> {
        let mut cursor = hub.begin(from);
        let mut all = Vec::new();
        loop {
            let read = hub.read(&mut cursor);
            if read.is_empty() {
                return all;
            }
            all.extend(read.iter().map(|kept| match kept {
                Kept::Event(event) => Ok(event.seq),
                Kept::Lost(lost) => Err(*lost),
            }));
        }
    }

    #[test]
    fn a_follower_begins_where_it_says() {
        let hub = Hub::default();
        assert_eq!(seen(&hub, StartAt::After(7)), []);
        (5..=8).for_each(|seq| hub.keep(event(seq)));
        assert_eq!(seen(&hub, StartAt::Last(0)), []);
        assert_eq!(seen(&hub, StartAt::Last(2)), [Ok(7), Ok(8)]);
        assert_eq!(seen(&hub, StartAt::Last(usize::MAX)).len(), 4);
        assert_eq!(seen(&hub, StartAt::After(8)), []);
        assert_eq!(seen(&hub, StartAt::After(6)), [Ok(7), Ok(8)]);
        assert_eq!(seen(&hub, StartAt::After(4)), [Ok(5), Ok(6), Ok(7), Ok(8)]);
        assert_eq!(
            seen(&hub, StartAt::After(1)),
            [Err(3), Ok(5), Ok(6), Ok(7), Ok(8)],
            "2, 3 and 4 are lost"
        );
        assert_eq!(seen(&hub, StartAt::After(99)).len(), 4, "the service began anew");
    }

    #[test]
    fn dropped_and_lost_events_are_reported_as_lost() {
        let hub = Hub::default();
        let mut slow = hub.begin(StartAt::Last(0));
        let more = u64::try_from(KEPT_MAX).unwrap() + 10;
        (1..=more).for_each(|seq| hub.keep(event(seq)));
        let read = hub.read(&mut slow);
        assert!(matches!(read[..2], [Kept::Lost(10), Kept::Event(ref event)] if event.seq == 11), "{read:?}");
        hub.keep(Kept::Lost(3));
        hub.keep(event(more + 4));
        assert_eq!(seen(&hub, StartAt::After(more)), [Err(3), Ok(more + 4)]);
        assert_eq!(hub.ring().kept.len(), KEPT_MAX);
    }

    #[tokio::test]
    async fn a_stream_sends_keep_alives_and_ends_with_its_permission() {
        let hub = Arc::new(Hub::default());
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let (may, shutdown) = (Arc::new(Mutex::new(true)), CancellationToken::new());
        let may_see = {
            let may = Arc::clone(&may);
            move || *may.lock().unwrap()
        };
        let keep_alive = Duration::from_millis(1);
        let events = Events::of(Arc::clone(&hub), StartAt::Last(0));
        let mut stream = pin!(stream(events, keep_alive, may_see, shutdown, permit));
        assert_eq!(stream.next().await.unwrap().unwrap(), Events::PREAMBLE);
        assert_eq!(stream.next().await.unwrap().unwrap(), ": still here\n\n");
        hub.keep(event(3));
        let written = stream.next().await.unwrap().unwrap();
        assert!(written.starts_with(b"id: 3\nevent: learnt\ndata: {"), "{written:?}");
        assert!(written.ends_with(b"}\n\n"), "{written:?}");
        *may.lock().unwrap() = false;
        hub.keep(event(4));
        assert!(stream.next().await.is_none());
    }
}
