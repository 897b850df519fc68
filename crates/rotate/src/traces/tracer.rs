//! Begins spans, decides which are recorded, and queues them when they end.

use std::borrow::Cow;
use std::hash::{BuildHasher as _, RandomState};
use std::time::SystemTime;

use super::export::SpanQueue;
use super::span::{SAMPLED, Span, SpanContext, SpanId, TraceId};

/// A span with a parent is recorded if that is, and another one by the share.
#[derive(Debug)]
pub(super) struct Tracer {
    share: f64,
    queue: SpanQueue,
}

/// A span that has not ended. It ends when it is dropped.
#[derive(Debug)]
pub(super) struct ActiveSpan {
    context: SpanContext,
    recorded: Option<(Span, SpanQueue)>,
}

impl Tracer {
    /// `share` is from 0 to 1.
    pub(super) fn new(share: f64, queue: SpanQueue) -> Self {
        Self { share, queue }
    }

    pub(super) fn begin(
        &self,
        name: impl Into<Cow<'static, str>>,
        parent: Option<SpanContext>,
    ) -> ActiveSpan {
        let trace = parent.map_or_else(new_trace, |parent| parent.trace);
        let flags = match parent {
            Some(parent) if parent.flags & SAMPLED != 0 => parent.flags,
            None if is_in(self.share, trace) => SAMPLED,
            _ => 0,
        };
        let context = SpanContext { trace, span: SpanId(random()), flags, is_remote: false };
        let recorded = (flags & SAMPLED != 0).then(|| (Span::new(context, parent, name), self.queue.clone()));
        ActiveSpan { context, recorded }
    }
}

impl ActiveSpan {
    pub(super) fn context(&self) -> SpanContext {
        self.context
    }

    /// `None` if it is not recorded, or has ended.
    pub(super) fn recorded(&mut self) -> Option<&mut Span> {
        self.recorded.as_mut().map(|(span, _)| span)
    }

    pub(super) fn end(&mut self) {
        self.end_at(SystemTime::now());
    }

    pub(super) fn end_at(&mut self, end: SystemTime) {
        if let Some((span, queue)) = self.recorded.take() {
            queue.push(Span { end, ..span });
        }
    }
}

impl Drop for ActiveSpan {
    fn drop(&mut self) {
        self.end();
    }
}

/// By the trace's own number, so that others decide alike.
fn is_in(share: f64, trace: TraceId) -> bool {
    let [.., a, b, c, d, _, _, _, _] = trace.0.to_be_bytes();
    f64::from(u32::from_be_bytes([a, b, c, d])) < share * 2_f64.powi(32)
}

fn new_trace() -> TraceId {
    TraceId(u128::from(random()) << 64 | u128::from(random()))
}

/// Never zero, which means none. Each state has keys of its own.
fn random() -> u64 {
    RandomState::new().hash_one(()).max(1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_share_of_traces_is_recorded() {
        const COUNT: u32 = 10_000;
        for (share, low, high) in [(0.0, 0, 0), (0.25, 2200, 2800), (1.0, COUNT, COUNT)] {
            let (queue, mut ended) = SpanQueue::new();
            let tracer = Tracer::new(share, queue);
            let mut recorded = 0;
            for _ in 0..COUNT {
                drop(tracer.begin("x", None));
                recorded += u32::from(ended.try_recv().is_ok());
            }
            assert!((low..=high).contains(&recorded), "{recorded} at {share}");
        }
        // The share is of the lower half.
        assert!(is_in(0.5, TraceId(u128::MAX ^ 1 << 63)) && !is_in(0.5, TraceId(1 << 63)));
    }

    #[test]
    fn identifiers_are_new() {
        let tracer = Tracer::new(0.0, SpanQueue::new().0);
        let contexts: Vec<SpanContext> = (0..1000).map(|_| tracer.begin("x", None).context()).collect();
        let spans: BTreeSet<u64> = contexts.iter().map(|context| context.span.0).collect();
        let traces: BTreeSet<u128> = contexts.iter().map(|context| context.trace.0).collect();
        assert_eq!((spans.len(), traces.len()), (1000, 1000));
    }

    #[test]
    fn a_span_ends_once() {
        let (queue, mut ended) = SpanQueue::new();
        let mut span = Tracer::new(1.0, queue).begin("x", None);
        let end = SystemTime::UNIX_EPOCH;
        span.end_at(end);
        assert!(span.recorded().is_none());
        drop(span);
        assert_eq!(ended.try_recv().unwrap().end, end);
        assert!(ended.try_recv().is_err());
    }
}
