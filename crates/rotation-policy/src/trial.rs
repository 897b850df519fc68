//! A canary beside the first requests of a model that woke.
//!
//! A plain wake restores bytes that were compared already, so its requests need not wait for a whole answer. Few are
//! admitted meanwhile, so that the canary waits for no place in the engine's batch.
//!
//! Promises: each begun trial ends in one [`Effect::Tested`], before its requests are aborted. A model leaves only after
//! its trial. Starts, resumes, wakes of which a call failed, and those behind a sleep that was not ordered here have their
//! canary before. What an engine has kept over its sleep runs from the wake on, so the canary is beside it.

use super::ModelState;
use super::Policy;
use super::messages::{Effect, Event, OpId, Task, TaskOutcome};
use super::moves::{LEAST, TRIES};
use super::rules::ModelId;
use super::stage::StageName;
use super::step::{Activated, Activation, Leave, Op, Stage, Step};

/// Requests beside a canary.
const BESIDE_MAX: usize = 8;

impl ModelState {
    /// How many requests may run now.
    pub(super) fn running_max(&self) -> usize {
        let most = self.rules.running_max;
        // The next canary beside kept ones also finds a place.
        let most = if self.rules.slice_max.is_some() && most > 1 { most - 1 } else { most };
        if self.is_on_trial() { most.min(BESIDE_MAX) } else { most }
    }

    /// Whether its task is a canary beside its requests.
    pub(super) fn is_on_trial(&self) -> bool {
        self.op.is_some() && matches!(self.stage, Stage::Ready { .. } | Stage::Draining { .. })
    }
}

impl Policy {
    /// It says that it is awake.
    pub(super) fn confirmed(&mut self, id: usize, activated: Option<Activated>) {
        let model = &mut self.models[id];
        let woke = activated.as_ref().is_some_and(|activated| activated.up == Activation::Wake);
        // What an engine has kept runs already, so the canary is beside it in any case.
        model.is_untested = model.canary_beside && woke && (!model.is_doubtful || model.kept() > 0);
        let is_untested = model.is_untested;
        self.begin(id, if is_untested { Step::Learn { activated } } else { Step::Canary { activated } });
    }

    pub(super) fn ready(&mut self, id: usize) {
        self.become_ready(id);
        self.test_if_due(id);
    }

    /// One that sleeps at once is tested behind its next wake.
    pub(super) fn test_if_due(&mut self, id: usize) {
        let model = &mut self.models[id];
        if model.is_untested && model.is_ready() {
            model.tries = 0;
            self.test(id);
        }
    }

    fn test(&mut self, id: usize) {
        let op = OpId(self.next_op);
        self.next_op += 1;
        let model = &mut self.models[id];
        let limit = model.rules.limits.canary.max(LEAST);
        model.tries += 1;
        model.op = Some(Op { id: op, deadline: self.now.after(limit) });
        self.out.push(Effect::Run { op, model: ModelId(id), task: Task::CanaryBeside, limit });
    }

    /// In a batch an answer may differ once, so it is asked again before it counts as wrong.
    pub(super) fn trial_ended(&mut self, id: usize, outcome: TaskOutcome) {
        if !matches!(self.models[id].stage, Stage::Ready { .. } | Stage::Draining { .. }) {
            return;
        }
        let reason = match outcome {
            TaskOutcome::Canary(Ok(())) => {
                self.models[id].is_untested = false;
                self.tested(id, true);
                self.out.push(Effect::Report { model: ModelId(id), event: Event::Tested });
                return;
            }
            TaskOutcome::Canary(Err(reason)) => format!("its canary was wrong: {reason}"),
            TaskOutcome::Failed(reason) | TaskOutcome::Unsupported(reason) => reason,
            other => format!("{:?} was answered with {other:?}", Task::CanaryBeside),
        };
        if self.models[id].tries < TRIES {
            return self.test(id);
        }
        self.tested(id, false);
        let event = Event::Failed { stage: StageName::Canary, reason };
        self.out.push(Effect::Report { model: ModelId(id), event });
        let model = &self.models[id];
        if model.running == 0 {
            return self.end_failed(id);
        }
        let until = self.now.after(model.rules.limits.abort.max(LEAST));
        self.out.push(Effect::Abort(ModelId(id)));
        self.enter(id, Stage::Draining { until, was_aborted: true, then: Leave::Failed });
    }
}
