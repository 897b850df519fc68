//! The spans of swaps: of a model that comes, and of one that leaves.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry::trace::{Span as _, SpanContext, Status, TraceContextExt as _, Tracer as _};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::{SdkTracer, Span};

use crate::service::{EventKind, LEAVING, RESTS, ServiceEvent, Swap};
use poorwill_rotation_policy::StageName;

/// By model.
#[derive(Debug, Default)]
pub(super) struct Moves {
    open: BTreeMap<String, OpenSpan>,
    /// The last swap, and its end.
    came: BTreeMap<String, (SpanContext, SystemTime)>,
    /// The last one that left.
    left: BTreeMap<String, SpanContext>,
}

/// A model that comes or leaves.
#[derive(Debug)]
struct OpenSpan {
    comes: bool,
    span: Span,
    /// When its last stage began, to the millisecond, as the span's own start.
    stage_since: SystemTime,
}

impl Moves {
    /// The swap that a request waited for since then.
    pub(super) fn swap_of(&self, model: &str, since: SystemTime) -> Option<SpanContext> {
        if let Some(OpenSpan { comes: true, span, .. }) = self.open.get(model) {
            return Some(span.span_context().clone());
        }
        self.came.get(model).filter(|(_, end)| *end >= since).map(|(swap, _)| swap.clone())
    }

    pub(super) fn record(&mut self, tracer: &SdkTracer, event: &ServiceEvent) {
        let (model, at) = (event.model.as_str(), UNIX_EPOCH + Duration::from_millis(event.at_unix_ms));
        match &event.what {
            EventKind::Stage { before, stage, .. } => {
                self.phase(tracer, model, *before, at);
                if RESTS.contains(stage) {
                    self.rest(model, *stage, at);
                } else if *stage != StageName::Probing && !self.open.contains_key(model) {
                    self.begin(tracer, model, *stage, at);
                }
            }
            EventKind::Ready { swap } => self.ready(model, swap, at),
            EventKind::Failed { stage, reason } => {
                if let Some(OpenSpan { span, .. }) = self.open.get_mut(model) {
                    let attributes =
                        vec![KeyValue::new("stage", stage.as_str()), KeyValue::new("reason", reason.clone())];
                    span.add_event_with_timestamp("failed", at, attributes);
                }
            }
            EventKind::Shortfall { .. } | EventKind::Learnt { .. } => {}
            EventKind::Hibernated { .. } | EventKind::Quarantined { .. } => {}
        }
    }

    /// Ends all: the events that would have ended them are lost.
    pub(super) fn lose(&mut self) {
        for OpenSpan { span, .. } in std::mem::take(&mut self.open).values_mut() {
            span.set_status(Status::error("its events were lost"));
            span.end();
        }
    }

    fn begin(&mut self, tracer: &SdkTracer, model: &str, stage: StageName, at: SystemTime) {
        let comes = !LEAVING.contains(&stage);
        let builder = tracer.span_builder(if comes { "swap" } else { "leave" });
        let model_is = [KeyValue::new("gen_ai.request.model", model.to_owned())];
        let builder = builder.with_start_time(at).with_attributes(model_is);
        let span = tracer.build_with_context(builder, &Context::new());
        self.open.insert(model.to_owned(), OpenSpan { comes, span, stage_since: at });
    }

    fn phase(&mut self, tracer: &SdkTracer, model: &str, stage: StageName, at: SystemTime) {
        let Some(open) = self.open.get_mut(model) else { return };
        let parent = Context::new().with_remote_span_context(open.span.span_context().clone());
        let since = std::mem::replace(&mut open.stage_since, at);
        let builder = tracer.span_builder(stage.as_str()).with_start_time(since);
        tracer.build_with_context(builder, &parent).end_with_timestamp(at);
    }

    /// The event of a swap follows, if it came.
    fn rest(&mut self, model: &str, stage: StageName, at: SystemTime) {
        if stage == StageName::Ready && self.open.get(model).is_some_and(|open| open.comes) {
            return;
        }
        let Some(OpenSpan { comes, mut span, .. }) = self.open.remove(model) else { return };
        if comes {
            span.set_status(Status::error(format!("it is {stage}, and was to be ready")));
        } else {
            self.left.insert(model.to_owned(), span.span_context().clone());
        }
        span.end_with_timestamp(at);
    }

    fn ready(&mut self, model: &str, swap: &Swap, at: SystemTime) {
        let Some(OpenSpan { mut span, .. }) = self.open.remove(model) else { return };
        span.set_attribute(KeyValue::new("poorwill.swap.path", swap.path.as_str()));
        if let Some(waited_s) = swap.waited_s {
            span.set_attribute(KeyValue::new("poorwill.swap.waited_s", waited_s));
        }
        for left in &swap.left {
            if let Some(leave) = self.left.remove(&left.model) {
                span.add_link(leave, vec![KeyValue::new("gen_ai.request.model", left.model.clone())]);
            }
        }
        self.came.insert(model.to_owned(), (span.span_context().clone(), at));
        span.end_with_timestamp(at);
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::SpanId;
    use opentelemetry_sdk::trace::SpanData;

    use super::super::kept::{KeptSpans, attribute};
    use super::*;
    use crate::service::{LeftModel, SwapPath};

    const MS: Duration = Duration::from_millis(1);

    fn stage(at_ms: u64, model: &str, before: StageName, before_s: f64, stage: StageName) -> ServiceEvent {
        let what = EventKind::Stage { before, before_s, stage };
        ServiceEvent { seq: at_ms, at_unix_ms: at_ms, model: model.to_owned(), what }
    }

    fn swap(left: &str) -> Swap {
        Swap {
            at_unix_ms: 0,
            model: "b".to_owned(),
            path: SwapPath::Hot,
            total_s: 1.5,
            whole_s: 2.5,
            waited_s: Some(3.0),
            phases: Vec::new(),
            left: vec![LeftModel { model: left.to_owned(), phases: Vec::new() }],
        }
    }

    fn times(span: &SpanData) -> (Duration, Duration) {
        (
            span.start_time.duration_since(UNIX_EPOCH).unwrap(),
            span.end_time.duration_since(UNIX_EPOCH).unwrap(),
        )
    }

    #[test]
    fn a_swap_has_its_phases_and_links_to_who_left_for_it() {
        use StageName::{Asleep, Canary, Draining, FallingAsleep, Ready, Waking};
        let kept = KeptSpans::default();
        let recording = kept.traces(0.0).0.unwrap();
        for event in [
            stage(1000, "a", Ready, 60.0, Draining),
            stage(1400, "a", Draining, 0.4, FallingAsleep),
            stage(2000, "a", FallingAsleep, 0.6, Asleep),
            stage(2000, "b", Asleep, 60.0, Waking),
            stage(3000, "b", Waking, 1.0009, Canary),
            stage(3500, "b", Canary, 0.5, Ready),
            ServiceEvent {
                seq: 7,
                at_unix_ms: 3500,
                model: "b".to_owned(),
                what: EventKind::Ready { swap: swap("a") },
            },
        ] {
            recording.record(&event);
        }
        let (leave, swap) = (kept.one("leave"), kept.one("swap"));
        assert_eq!((times(&leave), times(&swap)), ((1000 * MS, 2000 * MS), (2000 * MS, 3500 * MS)));
        assert_eq!((leave.parent_span_id, swap.parent_span_id), (SpanId::INVALID, SpanId::INVALID));
        let links: Vec<_> = swap.links.iter().map(|link| link.span_context.clone()).collect();
        assert_eq!(links, std::slice::from_ref(&leave.span_context));
        for (name, parent, span_times) in [
            ("draining", &leave, (1000 * MS, 1400 * MS)),
            ("falling asleep", &leave, (1400 * MS, 2000 * MS)),
            ("waking", &swap, (2000 * MS, 3000 * MS)),
            ("canary", &swap, (3000 * MS, 3500 * MS)),
        ] {
            let phase = kept.one(name);
            assert_eq!(phase.parent_span_id, parent.span_context.span_id(), "{name}");
            assert_eq!(times(&phase), span_times, "{name}");
        }
        assert_eq!(attribute(&swap, "gen_ai.request.model"), Some("b".into()));
        assert_eq!(attribute(&swap, "poorwill.swap.path"), Some("hot".into()));
        // Who began to wait before its end has waited for it.
        let of = |at_ms| recording.moves().swap_of("b", UNIX_EPOCH + at_ms * MS);
        assert_eq!(of(3400), Some(swap.span_context));
        assert_eq!((of(3600), recording.moves().swap_of("a", UNIX_EPOCH)), (None, None));
    }

    #[test]
    fn a_swap_that_fails_says_so() {
        use StageName::{Asleep, Quarantined, Starting, Stopping, Waking};
        let kept = KeptSpans::default();
        let recording = kept.traces(0.0).0.unwrap();
        recording.record(&stage(1000, "a", Asleep, 1.0, Waking));
        let failed = EventKind::Failed { stage: Waking, reason: "it is gone".to_owned() };
        let (seq, at_unix_ms, model) = (2, 1500, "a".to_owned());
        recording.record(&ServiceEvent { seq, at_unix_ms, model, what: failed });
        // It is restarted once, as part of the same swap.
        recording.record(&stage(1500, "a", Waking, 0.5, Stopping));
        recording.record(&stage(1600, "a", Stopping, 0.1, Starting));
        recording.record(&stage(1700, "a", Starting, 0.1, Quarantined));
        let swap = kept.one("swap");
        assert_eq!(times(&swap), (1000 * MS, 1700 * MS));
        assert_eq!(swap.status, Status::error("it is quarantined, and was to be ready"));
        assert_eq!(swap.events.len(), 1);
        assert_eq!(kept.all().len(), 4, "and three phases");
    }

    #[test]
    fn lost_events_end_what_they_would_have_ended() {
        let kept = KeptSpans::default();
        let recording = kept.traces(1.0).0.unwrap();
        recording.record(&stage(1000, "a", StageName::Asleep, 1.0, StageName::Waking));
        recording.moves().lose();
        assert_eq!(kept.one("swap").status, Status::error("its events were lost"));
        recording.record(&stage(3000, "a", StageName::Canary, 1.0, StageName::Ready));
        assert_eq!(kept.all().len(), 1);
    }
}
