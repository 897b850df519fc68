//! Traces of requests and swaps, exported with OTLP over HTTP.
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
mod request;
mod swap;
mod tracer;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use opentelemetry::InstrumentationScope;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider, SpanProcessor};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use self::export::Exporting;
use self::swap::Moves;
use crate::config::TraceExport;
use crate::service::ServiceEvent;

/// For the spans that wait at the end.
const END_MAX: Duration = Duration::from_secs(3);

/// Why traces cannot be exported.
#[derive(Debug, thiserror::Error)]
#[error("traces cannot be exported: {reason}; correct [traces], or the environment's OTEL_ variables")]
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
    requests: SdkTracer,
    /// Records all: swaps are few.
    swaps: SdkTracer,
    moves: Mutex<Moves>,
    exporting: Option<Exporting>,
}

impl Traces {
    /// Begins to export. Needs a Tokio runtime.
    ///
    /// # Errors
    /// The exporter cannot be made.
    pub fn start(export: &TraceExport) -> Result<Self, TraceError> {
        let resource = Resource::builder().with_service_name(export.service.clone()).build();
        let (exporting, queue) =
            Exporting::start(export, &resource).map_err(|reason| TraceError { reason })?;
        Ok(Self::recording(export.sample, &resource, || queue.clone(), Some(exporting)))
    }

    fn recording<P: SpanProcessor + 'static>(
        sample: f64,
        resource: &Resource,
        processor: impl Fn() -> P,
        exporting: Option<Exporting>,
    ) -> Self {
        let tracer = |sampler: Sampler| {
            let provider = SdkTracerProvider::builder()
                .with_span_processor(processor())
                .with_resource(resource.clone())
                .with_sampler(sampler)
                .build();
            let scope = InstrumentationScope::builder("poorwill-rotate");
            provider.tracer_with_scope(scope.with_version(env!("CARGO_PKG_VERSION")).build())
        };
        let requests = tracer(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(sample))));
        let swaps = tracer(Sampler::AlwaysOn);
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
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use opentelemetry::{Context, Value};
    use opentelemetry_sdk::Resource;
    use opentelemetry_sdk::error::OTelSdkResult;
    use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};

    use super::Traces;

    #[derive(Debug, Clone, Default)]
    pub(super) struct KeptSpans(Arc<Mutex<Vec<SpanData>>>);

    impl SpanProcessor for KeptSpans {
        fn on_start(&self, _: &mut Span, _: &Context) {}

        fn on_end(&self, span: SpanData) {
            self.0.lock().unwrap().push(span);
        }

        fn force_flush(&self) -> OTelSdkResult {
            Ok(())
        }

        fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
            Ok(())
        }
    }

    impl KeptSpans {
        pub(super) fn traces(&self, sample: f64) -> Traces {
            Traces::recording(sample, &Resource::builder_empty().build(), || self.clone(), None)
        }

        pub(super) fn all(&self) -> Vec<SpanData> {
            self.0.lock().unwrap().clone()
        }

        pub(super) fn one(&self, name: &str) -> SpanData {
            let mut all = self.all();
            all.retain(|span| span.name == name);
            assert_eq!(all.len(), 1, "{name}: {all:#?}");
            all.remove(0)
        }
    }

    pub(super) fn attribute(span: &SpanData, key: &str) -> Option<Value> {
        span.attributes.iter().find(|one| one.key.as_str() == key).map(|one| one.value.clone())
    }
}
