//! Who is awake, as a state machine without effects.
//!
//! [`Policy::step`] is told what has happened and when, and answers what is to be done: requests to let through or to
//! refuse, and tasks to do with engines. It has no clock, no socket and no thread, so that thousands of schedules can be
//! tried in a second, with every lie that an engine can tell.
//!
//! A model comes and goes by steps, of which each has a limit and a way out:
//!
//! ```text
//! asleep ─▶ room? ─▶ wake ─▶ its word ─▶ canary ─▶ ready ─▶ drained ─▶ weighed ─▶ sleep ─▶ given back? ─▶ asleep
//!   cold ─▶ room? ─▶ start ──────┘                                        what fails, and can: stopped ─▶ cold
//! ```
//!
//! Promises:
//!
//! - A request is let through only to a model whose last canary, since it last woke or started, was right.
//! - Every request that arrives is let through, refused, or reported by its sender as gone; it waits no longer than its
//!   model's `wait_max`, whatever engines do, as long as `step` is called at [`Policy::wakeup`].
//! - On each GPU one model at a time does what changes its memory, and a model wakes or starts only when what it is
//!   known to need was measured free right before.
//! - An engine that fails on its way up is restarted once; when it fails again, or cannot be restarted, it is left alone,
//!   each time for longer. One whose memory does not come back is stopped.
//! - A model that is waited for by the oldest request is the next to come on its GPUs: who is awake keeps its turn while
//!   it has requests, for `turn_max` at most, so that ABCABC becomes AABBCC.
//!
//! Tasks and requests are known by numbers, so what is reported late, twice or never does no harm: it is nobody's.

mod choose;
mod model;
mod moves;
mod rules;
mod talk;
mod time;

use std::collections::BTreeMap;
use std::mem;

pub use self::rules::{Gpu, Limits, ModelId, Rules};
pub use self::talk::{Effect, Event, Found, Input, OpId, Outcome, Refusal, RequestId, Task};
pub use self::time::Time;

use self::model::{Leave, Model, Stage, Step, Then, Up};

/// Who is awake. See the module.
#[derive(Debug)]
pub struct Policy {
    models: Vec<Model>,
    /// What was last measured to be free on each GPU.
    free: Vec<Option<u64>>,
    /// Whose each request is, and whether it runs.
    requests: BTreeMap<RequestId, (usize, bool)>,
    now: Time,
    next_op: u64,
    is_ending: bool,
    /// Counts whatever may let something else go on.
    changes: u64,
    out: Vec<Effect>,
}

/// What a model is doing, for those who ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Its stage, in a word or two.
    pub stage: &'static str,
    /// Whether its requests are let through.
    pub is_ready: bool,
    /// Whether it is kept awake.
    pub is_pinned: bool,
    /// How many requests wait for it.
    pub queued: usize,
    /// How many of its requests run.
    pub running: usize,
    /// What a sleep of it gives back on each of its GPUs, once that was measured.
    pub held_bytes: Option<Vec<u64>>,
    /// What it is known to take of each of its GPUs, while it has memory or may have; nothing where that is not known.
    pub promised_bytes: Option<Vec<u64>>,
    /// Failures in a row.
    pub failures: u32,
}

impl Policy {
    /// One for these models. Nothing is known of them yet: the first [`step`](Self::step) has all of them looked at.
    #[must_use]
    pub fn new(models: Vec<Rules>) -> Self {
        let gpus = models.iter().flat_map(|rules| &rules.gpus).map(|gpu| gpu.0 + 1).max().unwrap_or(0);
        Self {
            models: models.into_iter().map(Model::new).collect(),
            free: vec![None; gpus],
            requests: BTreeMap::new(),
            now: Time::ZERO,
            next_op: 0,
            is_ending: false,
            changes: 0,
            out: Vec::new(),
        }
    }

    /// Takes in what has happened, and says what is to be done. Time never goes back: an earlier moment counts as the
    /// latest one there was.
    pub fn step(&mut self, now: Time, input: Input) -> Vec<Effect> {
        self.now = self.now.max(now);
        self.take_in(input);
        loop {
            let changes = self.changes;
            self.serve();
            self.choose();
            (0..self.models.len()).for_each(|id| self.advance(id));
            if self.changes == changes {
                break;
            }
        }
        mem::take(&mut self.out)
    }

    /// When [`step`](Self::step) wants to be called again, if nothing happens before.
    #[must_use]
    pub fn wakeup(&self) -> Option<Time> {
        let of_model = |id: usize| {
            let model = &self.models[id];
            let oldest = model.queue.front().map(|(_, since)| since.after(model.rules.wait_max));
            let of_stage = match &model.stage {
                Stage::Draining { until, .. } if model.running > 0 => Some(*until),
                Stage::Quarantined { until } => Some(*until),
                Stage::Step { again_at, .. } => *again_at,
                _ => None,
            };
            let of_others =
                (0..self.models.len()).filter(move |other| *other != id && self.share(id, *other));
            let turns = model.waited_for_since().into_iter().flat_map(move |since| {
                of_others.clone().filter_map(move |other| self.may_leave_at(other, since))
            });
            let op = model.op.map(|op| op.deadline);
            let others = [oldest, of_stage, op, self.idled_out_at(id), model.short_until];
            others.into_iter().flatten().chain(turns)
        };
        (0..self.models.len()).flat_map(of_model).filter(|at| *at > self.now).min()
    }

    /// What a model is doing.
    #[must_use]
    pub fn status(&self, model: ModelId) -> Option<Status> {
        self.models.get(model.0).map(|model| Status {
            stage: model.stage.name(),
            is_ready: model.is_ready(),
            is_pinned: model.is_pinned,
            queued: model.queue.len(),
            running: model.running,
            held_bytes: model.held.clone(),
            promised_bytes: model.promised(),
            failures: model.failures,
        })
    }

    /// One more model, of which nothing is known yet: it is looked at with the next [`step`](Self::step).
    pub fn add(&mut self, rules: Rules) -> ModelId {
        let gpus = rules.gpus.iter().map(|gpu| gpu.0 + 1).max().unwrap_or(0);
        self.free.resize(self.free.len().max(gpus), None);
        self.models.push(Model::new(rules));
        ModelId(self.models.len() - 1)
    }

    /// Other rules for a model, on the GPUs that it has. Whether it is pinned changes only where the rule does.
    pub fn set_rules(&mut self, model: ModelId, rules: &Rules) {
        let Some(model) = self.models.get_mut(model.0) else { return };
        if model.rules.is_pinned != rules.is_pinned {
            model.is_pinned = rules.is_pinned;
        }
        let gpus = mem::take(&mut model.rules.gpus);
        model.rules = Rules { gpus, ..rules.clone() };
        self.changes += 1;
    }

    /// What was last measured to be free on a GPU.
    #[must_use]
    pub fn free_bytes(&self, gpu: Gpu) -> Option<u64> {
        self.free.get(gpu.0).copied().flatten()
    }

    fn take_in(&mut self, input: Input) {
        let known = self.models.len();
        match input {
            Input::Arrived { request, model } if model.0 < known => self.arrived(request, model.0),
            Input::Left(request) => self.left(request),
            Input::Ended { op, outcome } => {
                let is_its = |model: &Model| model.op.is_some_and(|one| one.id == op);
                let Some(id) = self.models.iter().position(is_its) else { return };
                self.models[id].op = None;
                self.changes += 1;
                let gpus = self.models[id].rules.gpus.len();
                let outcome = match outcome {
                    Outcome::Free(free) if free.len() != gpus => {
                        Outcome::Failed(format!("{} GPUs were measured, and it has {gpus}", free.len()))
                    }
                    other => other,
                };
                self.step_ended(id, outcome);
            }
            Input::Lost(model) if model.0 < known => self.lost(model.0),
            Input::Slept(model) if model.0 < known => self.slept(model.0),
            Input::Wake(model) if model.0 < known => {
                let model = &mut self.models[model.0];
                if !model.is_ready() {
                    model.summoned = model.summoned.or(Some(self.now));
                }
            }
            Input::Sleep(_) | Input::Restart(_) if self.is_ending => {}
            Input::Sleep(model) if model.0 < known => {
                let id = model.0;
                self.models[id].summoned = None;
                if self.models[id].is_ready() {
                    self.leave(id, Leave::Sleep);
                }
            }
            Input::Restart(model) if model.0 < known => self.restart(model.0),
            Input::Pin(model, is_pinned) if model.0 < known => self.models[model.0].is_pinned = is_pinned,
            Input::Shutdown => {
                self.is_ending = true;
                (0..known).for_each(|id| self.refuse_all(id, Refusal::ShuttingDown));
            }
            _ => {}
        }
    }

    fn arrived(&mut self, request: RequestId, id: usize) {
        if self.requests.contains_key(&request) {
            return;
        }
        let model = &mut self.models[id];
        let goes_on = model.is_ready() && model.queue.is_empty() && model.running < model.rules.running_max;
        let short_until = model.short_until.filter(|until| self.now < *until && !model.is_ready());
        let refusal = if self.is_ending {
            Some(Refusal::ShuttingDown)
        } else if let Stage::Quarantined { until } = model.stage {
            Some(Refusal::Quarantined { until })
        } else if let Some(until) = short_until {
            Some(Refusal::NoRoom { until })
        } else {
            (model.queue.len() >= model.rules.queue_max && !goes_on).then_some(Refusal::QueueFull)
        };
        if let Some(refusal) = refusal {
            self.out.push(Effect::Refuse { request, model: ModelId(id), refusal });
            return;
        }
        model.queue.push_back((request, self.now));
        self.requests.insert(request, (id, false));
    }

    fn left(&mut self, request: RequestId) {
        let Some((id, is_running)) = self.requests.remove(&request) else { return };
        let model = &mut self.models[id];
        if is_running {
            model.running -= 1;
            model.last_used = self.now;
        } else {
            model.queue.retain(|(other, _)| *other != request);
        }
        self.changes += 1;
    }

    /// Lets through what may be, and refuses what has waited for too long.
    fn serve(&mut self) {
        for id in 0..self.models.len() {
            let now = self.now;
            let model = &mut self.models[id];
            while model.is_ready() && model.running < model.rules.running_max {
                let Some((request, _)) = model.queue.pop_front() else { break };
                model.running += 1;
                model.last_used = now;
                self.requests.insert(request, (id, true));
                self.out.push(Effect::Admit { request, model: ModelId(id) });
            }
            while let Some((request, since)) = model.queue.front().copied() {
                if now < since.after(model.rules.wait_max) {
                    break;
                }
                model.queue.pop_front();
                self.requests.remove(&request);
                let refusal = Refusal::WaitedTooLong;
                self.out.push(Effect::Refuse { request, model: ModelId(id), refusal });
            }
            let is_wanted = model.waited_for_since().is_some();
            // Nobody waits any more, and nothing was begun.
            if model.is_coming && !is_wanted && model.way_up().is_some() {
                model.is_coming = false;
                self.changes += 1;
            }
        }
    }

    /// Refuses all that wait for a model, and forgets that it was called.
    fn refuse_all(&mut self, id: usize, refusal: Refusal) {
        let model = &mut self.models[id];
        (model.is_coming, model.summoned) = (false, None);
        for (request, _) in mem::take(&mut model.queue) {
            self.requests.remove(&request);
            self.out.push(Effect::Refuse { request, model: ModelId(id), refusal });
        }
    }

    /// An engine is not there any more.
    fn lost(&mut self, id: usize) {
        self.discount(id);
        for other in 0..self.models.len() {
            self.models[other].is_doubtful |= other != id && self.share(id, other);
        }
        match self.models[id].stage {
            Stage::Cold => {}
            // There is none, or whether there is one is found out later.
            Stage::Step { step: Step::Stop(_) | Step::Look | Step::Room(Up::Start), .. } => {}
            Stage::Unknown | Stage::Quarantined { .. } => self.forget(id),
            _ => {
                self.forget(id);
                self.fault(id, "the engine is gone");
            }
        }
    }

    /// What one that ends by itself had is no sleep's gift: whoever is falling asleep beside it has to give its own.
    fn discount(&mut self, id: usize) {
        let Some(left) = self.models[id].leaves() else { return };
        let gpus = self.models[id].rules.gpus.clone();
        for (_, model) in self.models.iter_mut().enumerate().filter(|(other, _)| *other != id) {
            let Stage::Step { step: Step::Sleep { before } | Step::After { before, .. }, .. } =
                &mut model.stage
            else {
                continue;
            };
            for (gpu, before) in model.rules.gpus.iter().zip(before) {
                let at = gpus.iter().position(|one| one == gpu);
                *before = before.saturating_add(at.and_then(|at| left.get(at)).copied().unwrap_or(0));
            }
        }
    }

    /// An engine was put to sleep behind our back. What its requests wait for will not come.
    fn slept(&mut self, id: usize) {
        if !self.models[id].is_ready() {
            return;
        }
        for other in 0..self.models.len() {
            self.models[other].is_doubtful |= other != id && self.share(id, other);
        }
        for gpu in &self.models[id].rules.gpus {
            self.free[gpu.0] = None;
        }
        self.tell_failed(id, "it sleeps, and nobody here has told it to");
        if self.models[id].running > 0 {
            self.out.push(Effect::Abort(ModelId(id)));
        }
        self.enter(id, Stage::Unknown);
    }

    fn restart(&mut self, id: usize) {
        if !self.models[id].rules.can_restart {
            return self.tell_failed(id, "it may not be restarted");
        }
        match &mut self.models[id].stage {
            Stage::Ready { .. } => self.leave(id, Leave::Restart),
            // Its requests have no longer than they had.
            Stage::Draining { then, .. } => *then = Leave::Restart,
            Stage::Asleep | Stage::Quarantined { .. } => self.begin(id, Step::Stop(Then::Cold)),
            Stage::Unknown | Stage::Cold => {}
            Stage::Step { .. } => {
                self.tell_failed(id, "it was not restarted: say it again when this is over");
            }
        }
    }
}
