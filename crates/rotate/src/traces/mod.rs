//! Traces of requests and swaps, exported with OTLP: JSON over HTTP.
//!
//! A request has a span, with children for its wait and its engine's answer. A swap has one with a child for each phase.
//! A wait links to the swap that ended it, and a swap to the models that left for it.
//!
//! Promises:
//!
//! - Without a configured endpoint nothing is recorded.
//! - A collector that is slow or gone delays no request. Spans wait in a bounded queue; more are dropped, with a warning.
//! - Neither bodies nor keys are recorded, and of an address only its path.

mod export;
mod front;
mod otlp;
mod request;
mod span;
mod swap;
mod tracer;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use self::export::{Exporting, SpanQueue};
use self::swap::Moves;
use self::tracer::Tracer;
use crate::config::TraceExport;
use crate::service::ServiceEvent;

/// For the spans that wait at the end.
const END_MAX: Duration = Duration::from_secs(3);

/// Why traces cannot be exported.
#[derive(Debug, thiserror::Error)]
#[error("traces cannot be exported: {reason}; correct [traces]")]
pub struct TraceError {
    reason: String,
}

/// Records spans, or nothing. Clones share it.
///
/// ```
/// use std::sync::Arc;
///
/// use poorwill_front::requests::Requests;
/// use poorwill_rotate::traces::Traces;
///
/// let requests = Requests::traced(Arc::new(Traces::default()));
/// assert_eq!(requests.active(10).1, 0);
/// ```
#[derive(Debug, Clone, Default)]
pub struct Traces(Option<Arc<Recording>>);

#[derive(Debug)]
struct Recording {
    /// Samples by the parent, or else by the configured share.
    requests: Tracer,
    /// Records all: swaps are few.
    swaps: Tracer,
    moves: Mutex<Moves>,
    exporting: Option<Exporting>,
}

impl Traces {
    /// Begins to export. Needs a Tokio runtime.
    ///
    /// # Errors
    /// The exporter cannot be made.
    pub fn start(export: &TraceExport) -> Result<Self, TraceError> {
        let variable = |name: &str| std::env::var(name).ok();
        let (exporting, queue) =
            Exporting::start(export, &variable).map_err(|reason| TraceError { reason })?;
        Ok(Self::recording(export.sample, queue, Some(exporting)))
    }

    fn recording(sample: f64, queue: SpanQueue, exporting: Option<Exporting>) -> Self {
        let (requests, swaps) = (Tracer::new(sample, queue.clone()), Tracer::new(1.0, queue));
        Self(Some(Arc::new(Recording { requests, swaps, moves: Mutex::default(), exporting })))
    }

    /// Records the swaps of these events, until they end.
    pub fn follow(&self, mut events: broadcast::Receiver<Arc<ServiceEvent>>) {
        let Some(recording) = self.0.clone() else { return };
        tokio::spawn(async move {
            loop {
                match events.recv().await {
                    Ok(event) => recording.record(&event),
                    Err(RecvError::Lagged(_)) => recording.moves().lose(),
                    Err(RecvError::Closed) => return,
                }
            }
        });
    }

    /// Exports the spans that wait, for a few seconds at most. Later spans are dropped.
    pub async fn end(&self) {
        if let Some(exporting) = self.0.as_ref().and_then(|recording| recording.exporting.as_ref()) {
            exporting.end(END_MAX).await;
        }
    }
}

impl Recording {
    fn moves(&self) -> std::sync::MutexGuard<'_, Moves> {
        self.moves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, event: &ServiceEvent) {
        self.moves().record(&self.swaps, event);
    }
}

/// Keeps spans for tests.
#[cfg(test)]
mod kept {
    use std::sync::Mutex;

    use tokio::sync::mpsc;

    use super::Traces;
    use super::export::SpanQueue;
    use super::span::{AttributeValue, Span};

    #[derive(Debug)]
    pub(super) struct KeptSpans {
        queue: SpanQueue,
        ended: Mutex<(mpsc::Receiver<Span>, Vec<Span>)>,
    }

    impl Default for KeptSpans {
        fn default() -> Self {
            let (queue, ended) = SpanQueue::new();
            Self { queue, ended: Mutex::new((ended, Vec::new())) }
        }
    }

    impl KeptSpans {
        pub(super) fn traces(&self, sample: f64) -> Traces {
            Traces::recording(sample, self.queue.clone(), None)
        }

        pub(super) fn all(&self) -> Vec<Span> {
            let (ended, kept) = &mut *self.ended.lock().unwrap();
            kept.extend(std::iter::from_fn(|| ended.try_recv().ok()));
            kept.clone()
        }

        pub(super) fn one(&self, name: &str) -> Span {
            let mut all = self.all();
            all.retain(|span| span.name == name);
            assert_eq!(all.len(), 1, "{name}: {all:#?}");
            all.remove(0)
        }
    }

    pub(super) fn attribute(span: &Span, key: &str) -> Option<AttributeValue> {
        span.attributes.iter().find(|one| one.key == key).map(|one| one.value.clone())
    }
}
