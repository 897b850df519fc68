//! Looks at a ready engine, and when those that failed are too many.
//!
//! Promises: looks that fail count only in sequence, and at most once in each pause between them. An engine whose answers
//! flow is never stopped for being late. One that computes is stopped for that only after `drain` without a sign. One that
//! is given up again soon is quarantined.

use std::time::Duration;

use super::Policy;
use super::look_count::Looks;
use super::messages::{Effect, Event, Look};
use super::moves::LEAST;
use super::rules::ModelId;
use super::step::{Leave, Stage};

/// How long an engine that says that it is not well may go on with its requests.
const UNWELL_DRAIN: Duration = Duration::from_secs(5);

impl Policy {
    pub(super) fn looked(&mut self, id: usize, look: &Look) {
        let now = self.now;
        let model = &mut self.models[id];
        let is_ending = matches!(&model.stage, Stage::Draining { then: Leave::Failed, .. });
        if is_ending || !matches!(&model.stage, Stage::Ready { .. } | Stage::Draining { .. }) {
            return;
        }
        let may_compute = model.running > 0 && now < model.looks.sign_at.after(model.rules.limits.drain);
        let reason = match look {
            Look::Awake | Look::Flowing => return model.looks = Looks::from(now),
            Look::Computing if may_compute => return,
            Look::Computing | Look::Late => "it did not answer in time".to_owned(),
            Look::Unwell(reason) => reason.clone(),
        };
        // Looks of several causes may end at once. A timer may be a little early.
        let pause = model.rules.look_again() / 2;
        if model.rules.looks_max == 0 || model.looks.counted_at.is_some_and(|at| now < at.after(pause)) {
            return;
        }
        (model.looks.failed, model.looks.counted_at) = (model.looks.failed.saturating_add(1), Some(now));
        let (failed, most) = (model.looks.failed, model.rules.looks_max);
        let event = Event::LookFailed { reason: reason.clone(), failed };
        self.out.push(Effect::Report { model: ModelId(id), event });
        if failed >= most {
            self.report_failed(id, &format!("{failed} looks in sequence failed: {reason}"));
            self.models[id].given_up.now(now);
            self.end_unwell(id, matches!(look, Look::Unwell(_)));
        }
    }

    /// Only an engine that answers can end its requests.
    fn end_unwell(&mut self, id: usize, answers: bool) {
        if !answers {
            self.give_up_op(id);
        }
        let model = &self.models[id];
        if model.running == 0 {
            return self.end_failed(id);
        }
        let limits = &model.rules.limits;
        let until =
            self.now.after(if answers { limits.drain.min(UNWELL_DRAIN) } else { limits.abort.max(LEAST) });
        if !answers {
            self.out.push(Effect::Abort(ModelId(id)));
        }
        self.enter(id, Stage::Draining { until, was_aborted: !answers, then: Leave::Failed });
    }
}
