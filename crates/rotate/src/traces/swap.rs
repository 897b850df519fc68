//! The spans of swaps: of a model that comes, and of one that leaves.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::span::{Attribute, SpanContext, SpanEvent, SpanFailure, SpanLink};
use super::tracer::{ActiveSpan, Tracer};
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
    span: ActiveSpan,
    /// When its last stage began, to the millisecond, as the span's own start.
    stage_since: SystemTime,
}

impl Moves {
    /// The swap that a request waited for since then.
    pub(super) fn swap_of(&self, model: &str, since: SystemTime) -> Option<SpanContext> {
        if let Some(OpenSpan { comes: true, span, .. }) = self.open.get(model) {
            return Some(span.context());
        }
        self.came.get(model).filter(|(_, end)| *end >= since).map(|(swap, _)| *swap)
    }

    pub(super) fn record(&mut self, tracer: &Tracer, event: &ServiceEvent) {
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
                if let Some(span) = self.open.get_mut(model).and_then(|open| open.span.recorded()) {
                    let attributes = vec![
                        Attribute::new("stage", stage.as_str()),
                        Attribute::new("reason", reason.clone()),
                    ];
                    span.events.push(SpanEvent::new("failed", at, attributes));
                }
            }
            EventKind::Shortfall { .. } | EventKind::Learnt { .. } | EventKind::Grew { .. } => {}
            EventKind::Kept { .. } | EventKind::Tested => {}
            EventKind::Hibernated { .. } | EventKind::Quarantined { .. } | EventKind::LookFailed { .. } => {}
        }
    }

    /// Ends all: the events that would have ended them are lost.
    pub(super) fn lose(&mut self) {
        for OpenSpan { mut span, .. } in std::mem::take(&mut self.open).into_values() {
            fail(&mut span, "its events were lost");
        }
    }

    fn begin(&mut self, tracer: &Tracer, model: &str, stage: StageName, at: SystemTime) {
        let comes = !LEAVING.contains(&stage);
        let mut span = tracer.begin(if comes { "swap" } else { "leave" }, None);
        if let Some(span) = span.recorded() {
            span.start = at;
            span.attributes.push(Attribute::new("gen_ai.request.model", model.to_owned()));
        }
        self.open.insert(model.to_owned(), OpenSpan { comes, span, stage_since: at });
    }

    fn phase(&mut self, tracer: &Tracer, model: &str, stage: StageName, at: SystemTime) {
        let Some(open) = self.open.get_mut(model) else { return };
        let since = std::mem::replace(&mut open.stage_since, at);
        let mut phase = tracer.begin(stage.as_str(), Some(open.span.context()));
        if let Some(phase) = phase.recorded() {
            phase.start = since;
        }
        phase.end_at(at);
    }

    /// The event of a swap follows, if it came.
    fn rest(&mut self, model: &str, stage: StageName, at: SystemTime) {
        if stage == StageName::Ready && self.open.get(model).is_some_and(|open| open.comes) {
            return;
        }
        let Some(OpenSpan { comes, mut span, .. }) = self.open.remove(model) else { return };
        if comes {
            fail(&mut span, format!("it is {stage}, and was to be ready"));
        } else {
            self.left.insert(model.to_owned(), span.context());
        }
        span.end_at(at);
    }

    fn ready(&mut self, model: &str, swap: &Swap, at: SystemTime) {
        let Some(OpenSpan { mut span, .. }) = self.open.remove(model) else { return };
        self.came.insert(model.to_owned(), (span.context(), at));
        let left: Vec<SpanLink> = swap.left.iter().filter_map(|left| self.link(&left.model)).collect();
        if let Some(span) = span.recorded() {
            span.attributes.push(Attribute::new("poorwill.swap.path", swap.path.as_str()));
            span.attributes.extend(swap.waited_s.map(|s| Attribute::new("poorwill.swap.waited_s", s)));
            span.links.extend(left);
        }
        span.end_at(at);
    }

    /// To a model that left, once.
    fn link(&mut self, model: &str) -> Option<SpanLink> {
        let leave = self.left.remove(model)?;
        Some(SpanLink::new(leave, vec![Attribute::new("gen_ai.request.model", model.to_owned())]))
    }
}

fn fail(span: &mut ActiveSpan, reason: impl Into<Cow<'static, str>>) {
    if let Some(span) = span.recorded() {
        span.failure = Some(SpanFailure::new(reason));
    }
}

#[cfg(test)]
mod tests {
    use super::super::kept::{KeptSpans, attribute};
    use super::super::span::{Span, SpanId};
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

    fn times(span: &Span) -> (Duration, Duration) {
        (span.start.duration_since(UNIX_EPOCH).unwrap(), span.end.duration_since(UNIX_EPOCH).unwrap())
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
        assert_eq!((leave.parent_span_id, swap.parent_span_id), (None, None));
        let links: Vec<SpanId> = swap.links.iter().map(|link| link.span_id).collect();
        assert_eq!(links, [leave.span_id]);
        for (name, parent, span_times) in [
            ("draining", &leave, (1000 * MS, 1400 * MS)),
            ("falling asleep", &leave, (1400 * MS, 2000 * MS)),
            ("waking", &swap, (2000 * MS, 3000 * MS)),
            ("canary", &swap, (3000 * MS, 3500 * MS)),
        ] {
            let phase = kept.one(name);
            assert_eq!(
                (phase.trace_id, phase.parent_span_id),
                (parent.trace_id, Some(parent.span_id)),
                "{name}"
            );
            assert_eq!(times(&phase), span_times, "{name}");
        }
        assert_eq!(attribute(&swap, "gen_ai.request.model"), Some("b".into()));
        assert_eq!(attribute(&swap, "poorwill.swap.path"), Some("hot".into()));
        // Who began to wait before its end has waited for it.
        let of = |at_ms| recording.moves().swap_of("b", UNIX_EPOCH + at_ms * MS);
        assert_eq!(of(3400).map(|swap| (swap.trace, swap.span)), Some((swap.trace_id, swap.span_id)));
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
        assert_eq!(swap.failure, Some(SpanFailure::new("it is quarantined, and was to be ready")));
        assert_eq!(swap.events.len(), 1);
        assert_eq!(kept.all().len(), 4, "and three phases");
    }

    #[test]
    fn lost_events_end_what_they_would_have_ended() {
        let kept = KeptSpans::default();
        let recording = kept.traces(1.0).0.unwrap();
        recording.record(&stage(1000, "a", StageName::Asleep, 1.0, StageName::Waking));
        recording.moves().lose();
        assert_eq!(kept.one("swap").failure, Some(SpanFailure::new("its events were lost")));
        recording.record(&stage(3000, "a", StageName::Canary, 1.0, StageName::Ready));
        assert_eq!(kept.all().len(), 1);
    }
}
