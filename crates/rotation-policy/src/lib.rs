//! Which models are awake, as a state machine without effects.
//!
//! [`Policy::step`] takes what happened and when, and returns what to do. It has no clock, socket or thread, so tests
//! can run thousands of schedules in a second, with every fault of an engine.
//!
//! A model comes and goes in steps. Each has a timeout and a defined failure:
//!
//! ```text
//! asleep ─▶ memory? ─▶ wake ─▶ confirm ─▶ canary ─▶ ready ─▶ drain ─▶ measure ─▶ sleep ─▶ released? ─▶ asleep
//!   cold ─▶ memory? ─▶ start ────┘                                  on failure, if possible: stop ─▶ cold
//! asleep ─▶ measure ─▶ hibernate ─▶ released? ─▶ hibernating ─▶ memory? ─▶ resume ─▶ memory? ─▶ wake
//! ```
//!
//! Promises:
//!
//! - A request is admitted only if the model's canary was right since its last wake or start. Where it [may](Policy::set_canary_beside), it
//!   runs beside the first requests after a plain wake, and [`Effect::Tested`] says how it ended, before they are aborted.
//! - Every request is admitted, refused, or reported as left by its sender. It waits at most `wait_max`, whatever
//!   engines do, if `step` is called at [`Policy::wakeup`].
//! - On each GPU one model at a time changes its memory, except for stops. Several engines may be stopped at once, also
//!   while another one comes up. Beside a stop, free memory teaches nothing.
//! - A stop waits for what leaves: a sleep, a hibernation, and each measurement of what one or another stop releases. It
//!   also waits for the measurement that says whether a wake was done.
//! - A model wakes or starts only after its known need was measured free.
//! - A ready engine that fails [`looks_max`](Rules::looks_max) looks in sequence is stopped. What it still answers may
//!   end for a few seconds, and is aborted.
//! - After a sleep or a wake that failed or was not answered, the engine is asked what it does. In the wanted state it
//!   goes on. A healthy one in the old state is called once more, unless the first call took all of its time.
//! - An engine that fails while it wakes or starts is restarted once. If it fails again, or cannot be restarted, it is
//!   quarantined, longer each time. An engine whose memory is not released is stopped.
//! - The model with the oldest waiting request comes next on its GPUs. A point of priority counts like a second of
//!   waiting, so a lower priority never waits for good.
//! - Awake models with requests stay for at most `turn_max` while others wait, so that ABCABC becomes AABBCC. A turn
//!   admits what waits, up to `running_max`. Such a request waits at most for a turn of each other model, with its last
//!   requests and its swap.
//! - Where [`slice_max`](Rules::slice_max) is set, a turn ends in the middle of answers. Its engine keeps the running
//!   requests in its sleep, and they wait for its next wake like new ones. Each such cut ends in one [`Effect::Tested`] or
//!   [`Effect::Abort`].
//! - A turn ends earlier when more requests wait for others than the model has itself. But it lasts for `turn_per_swap`
//!   times what its swap takes.
//! - An idle model leaves at once, or after `grace` if its pauses are usually shorter. Where several models queue for
//!   a swap, it stays while each of them can still come within its least turn.
//! - Where several could leave, an idle model does before a busy one, and one with few requests before one with many.
//!   Of idle ones it is the one that is cheapest to bring back for the time until its next request.
//! - Before any awake model leaves, sleeping ones hibernate if that frees enough, the longest idle first. An idle model
//!   leaves instead if it is cheaper to bring back than they are.
//! - What a model is known to need never shrinks by itself. Where awake ones need more than their GPU has, those of least
//!   worth leave.
//! - A model that comes up with the service comes up again where memory is free, after it left for others.
//! - Of idle models, and of busy ones, a hot one leaves last, and none for being idle. One that is held leaves for nothing.
//! - While a hot model is not awake, and no command put it to sleep, it comes up again where memory is free. It also takes
//!   that of models without a request for two minutes that can sleep and are neither hot nor preloaded. So it does not swap
//!   with requests for ever. A request for another model on its GPUs ends its start, unless it is held.
//! - An engine that is prepared is started, and sleeps at once if no request came. For that, only models leave that had no
//!   request for two minutes and can sleep. A request for another model on its GPUs ends its start.
//! - A hibernating engine is resumed before anything else is asked of it. One whose residue stays is resumed at once, and
//!   does not hibernate until its next start.
//!
//! Tasks and requests have unique ids, so late, repeated or missing reports do no harm.
#![forbid(unsafe_code)]

mod choose;
mod control;
mod cut;
mod demand;
mod hibernate;
mod hot;
mod kept;
mod look_count;
mod looks;
mod messages;
mod model;
mod moves;
mod need;
mod need_seen;
mod queue;
mod recall;
mod rules;
mod stage;
mod step;
mod time;
mod trial;

use std::collections::BTreeMap;
use std::mem;
use std::time::Duration;

pub use self::messages::{
    Effect, EngineState, Event, GpuMemory, Input, Look, OpId, Refusal, RequestId, Task, TaskOutcome,
};
pub use self::rules::{Gpu, Limits, ModelId, Rules};
pub use self::stage::StageName;
pub use self::time::Time;

use self::demand::Demand;
use self::hot::Hot;
use self::kept::Kept;
use self::look_count::{GivenUp, Looks};
use self::need_seen::Need;
use self::queue::{Claim, Queue};
use self::step::{Activation, ControlCall, Costs, Inquiry, Leave, Move, Op, Stage, Step, Then};

/// The state machine.
#[derive(Debug)]
pub struct Policy {
    models: Vec<ModelState>,
    /// At the last measurement, by GPU.
    free: Vec<Option<u64>>,
    /// The same of all its memory.
    total: Vec<Option<u64>>,
    requests: BTreeMap<RequestId, Known>,
    now: Time,
    next_op: u64,
    is_ending: bool,
    /// Counts changes that may let another model continue.
    changes: u64,
    out: Vec<Effect>,
}

/// A request.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// Its model.
    id: usize,
    is_running: bool,
    /// With that of its model.
    priority: i32,
}

/// The state of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Its stage.
    pub stage: StageName,
    /// Whether requests are admitted.
    pub is_ready: bool,
    /// Whether its engine is being started, until its first right answer.
    pub is_starting: bool,
    /// Whether it is kept awake, and gives way to nothing.
    pub is_pinned: bool,
    /// Waiting requests.
    pub queued: usize,
    /// Running requests.
    pub running: usize,
    /// Those of them that its engine keeps in its sleep.
    pub kept: usize,
    /// What a sleep releases on each of its GPUs, once measured.
    pub held_bytes: Option<Vec<u64>>,
    /// What a hibernation releases on each of its GPUs beyond that, once measured.
    pub residue_bytes: Option<Vec<u64>>,
    /// Whether it can hibernate, as far as known.
    pub can_hibernate: bool,
    /// Why its engine cannot, where that was found out.
    pub cannot_hibernate: Option<String>,
    /// Its known need on each of its GPUs: the larger of its rule and the most that was seen; `None` if unknown.
    pub need_bytes: Option<Vec<u64>>,
    /// The same, while it may have memory.
    pub promised_bytes: Option<Vec<u64>>,
    /// Consecutive failures.
    pub failures: u32,
    /// How long a wake takes, from the search for memory to its first request; `None` until measured.
    pub wake_duration: Option<Duration>,
    /// How long a start takes, likewise.
    pub start_duration: Option<Duration>,
    /// How long it takes to sleep or stop, after its last request; `None` until measured.
    pub leave_duration: Option<Duration>,
    /// How long it takes to hibernate; `None` until measured.
    pub hibernate_duration: Option<Duration>,
    /// How long it takes to resume from that, with the search for memory; `None` until measured.
    pub resume_duration: Option<Duration>,
}

/// What is known of a model, and what it does.
#[derive(Debug)]
struct ModelState {
    rules: Rules,
    stage: Stage,
    op: Option<Op>,
    /// Models in its way leave.
    is_selected: bool,
    /// When it was selected last. What it takes to come is a part of its turn.
    selected_at: Time,
    queue: Queue,
    running: usize,
    kept: Kept,
    /// When something of an answer came last, or a request ended.
    flowed_at: Time,
    last_used: Time,
    /// When a command asked for a wake.
    wake_requested: Option<Time>,
    is_pinned: bool,
    hot: Hot,
    /// Whether it still has to come up without a request.
    is_preloading: bool,
    /// Whether it sleeps again if no request came by then.
    sleeps_after: bool,
    /// Whether it left for another model, and should be up.
    is_displaced: bool,
    /// The most that a sleep released, on each of its GPUs.
    held: Option<Vec<u64>>,
    /// What a sleep has to release, by what a wake took. A first sleep, or one after much work, may release memory that
    /// no wake takes again.
    min_release: Option<Vec<u64>>,
    /// What a start takes.
    cold: Option<Vec<u64>>,
    need: Need,
    hibernation: Hibernation,
    /// Whether other memory changed during its measurement.
    is_disturbed: bool,
    looks: Looks,
    costs: Costs,
    demand: Demand,
    /// The move that is going on, and its beginning.
    moving: Option<(Move, Time)>,
    failures: u32,
    was_restarted: bool,
    /// Whether it was to be stopped, and that failed.
    is_to_stop: bool,
    tries: u32,
    /// Whether its next wake is the second call for it.
    repeats_wake: bool,
    /// Whether it sleeps by its memory, and does not say so itself.
    slept_by_memory: bool,
    /// Whether its canary has to be right before it is ready: it hibernated, a call for it failed, or others put it to sleep.
    is_doubtful: bool,
    /// Whether a plain wake makes it ready before its canary, which runs beside its first requests then.
    canary_beside: bool,
    /// Whether it woke since its canary was right, and has to be tested once it is ready.
    is_untested: bool,
    given_up: GivenUp,
    /// No memory is searched before this time.
    no_memory_until: Option<Time>,
}

/// What is known of a model's hibernation.
#[derive(Debug, Default)]
struct Hibernation {
    /// What the last one released, on each of its GPUs.
    residue: Option<Vec<u64>>,
    asleep_since: Time,
    /// Whether its last sleep became one.
    is_usual: bool,
    /// Whether a command asked for it.
    is_requested: bool,
    /// Why this engine cannot hibernate. Another one may, or this one by another configuration.
    impossible: Option<String>,
    /// Whether a resume was refused although its need was free. How much it needs is not known then.
    needs_more: bool,
    /// Consecutive ones.
    failures: u32,
    /// Consecutive ones that were not the engine's fault, as far as these are forgiven.
    interruptions: u32,
    /// None is begun before this time.
    retry_at: Option<Time>,
}

impl Policy {
    /// For these models. The first [`step`](Self::step) probes all of them.
    #[must_use]
    pub fn new(models: Vec<Rules>) -> Self {
        let gpus = models.iter().flat_map(|rules| &rules.gpus).map(|gpu| gpu.0 + 1).max().unwrap_or(0);
        Self {
            models: models.into_iter().map(ModelState::new).collect(),
            free: vec![None; gpus],
            total: vec![None; gpus],
            requests: BTreeMap::new(),
            now: Time::ZERO,
            next_op: 0,
            is_ending: false,
            changes: 0,
            out: Vec::new(),
        }
    }

    /// Handles an input, and returns what to do. Time never goes back: an earlier moment counts as the latest one.
    pub fn step(&mut self, now: Time, input: Input) -> Vec<Effect> {
        self.now = self.now.max(now);
        self.on_input(input);
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

    /// When to call [`step`](Self::step) again without an input.
    #[must_use]
    pub fn wakeup(&self) -> Option<Time> {
        let of_model = |id: usize| {
            let model = &self.models[id];
            let oldest = model.queue.oldest().map(|since| since.after(model.rules.wait_max));
            let of_stage = match &model.stage {
                Stage::Draining { until, .. } if model.running > 0 => Some(*until),
                Stage::Quarantined { until } => Some(*until),
                Stage::Step { retry_at, .. } => *retry_at,
                _ => None,
            };
            let of_others =
                (0..self.models.len()).filter(move |other| *other != id && self.share(id, *other));
            let turns = model.claim().into_iter().flat_map(move |claim| {
                of_others.clone().filter_map(move |other| self.may_leave_at(other, claim))
            });
            let op = model.op.map(|op| op.deadline);
            let hibernates = self.hibernates_at(id);
            let (kept, recalled) = (self.kept_until(id), model.recalled_at());
            let idled_out = self.idled_out_at(id);
            let others = [oldest, of_stage, op, idled_out, hibernates, model.no_memory_until, kept, recalled];
            others.into_iter().flatten().chain(turns)
        };
        (0..self.models.len()).flat_map(of_model).filter(|at| *at > self.now).min()
    }

    /// The state of a model.
    #[must_use]
    pub fn status(&self, model: ModelId) -> Option<Status> {
        self.models.get(model.0).map(|model| Status {
            stage: model.stage.name(),
            is_ready: model.is_ready(),
            is_starting: model.is_starting(),
            is_pinned: model.is_held(),
            queued: model.queue.len(),
            running: model.running,
            kept: model.kept(),
            held_bytes: model.held.clone(),
            residue_bytes: model.hibernation.residue.clone(),
            can_hibernate: model.can_hibernate(),
            cannot_hibernate: model.hibernation.impossible.clone(),
            need_bytes: model.known_need(),
            promised_bytes: model.promised(),
            failures: model.failures,
            wake_duration: model.costs.wake,
            start_duration: model.costs.start,
            leave_duration: model.costs.leave,
            hibernate_duration: model.costs.hibernate,
            resume_duration: model.costs.resume,
        })
    }

    /// What a wake or a resume takes on each of a model's GPUs. `None` until a sleep was measured, since an operator may have
    /// said too little.
    #[must_use]
    pub fn measured_need(&self, model: ModelId, task: Task) -> Option<Vec<u64>> {
        let model = self.models.get(model.0).filter(|model| model.held.is_some())?;
        match task {
            Task::Resume => model.need(Activation::Resume),
            Task::Wake => model.need(Activation::Wake),
            _ => None,
        }
    }

    /// Since when a request or command waits for a model.
    #[must_use]
    pub fn waiting_since(&self, model: ModelId) -> Option<Time> {
        self.models.get(model.0)?.waiting_since()
    }

    /// Adds a model. The next [`step`](Self::step) probes it.
    pub fn add(&mut self, rules: Rules) -> ModelId {
        let gpus = rules.gpus.iter().map(|gpu| gpu.0 + 1).max().unwrap_or(0);
        self.free.resize(self.free.len().max(gpus), None);
        self.total.resize(self.free.len(), None);
        self.models.push(ModelState::new(rules));
        ModelId(self.models.len() - 1)
    }

    /// Changes a model's rules, except its GPUs. Pinning changes only if the rule does. With another need, what was seen of
    /// it is forgotten.
    pub fn set_rules(&mut self, model: ModelId, rules: &Rules) {
        let Some(model) = self.models.get_mut(model.0) else { return };
        if model.rules.is_pinned != rules.is_pinned {
            model.is_pinned = rules.is_pinned;
        }
        model.is_preloading &= rules.preload || rules.together.is_some() || model.sleeps_after;
        if model.rules.need_bytes != rules.need_bytes {
            model.need = Need::default();
        }
        let gpus = mem::take(&mut model.rules.gpus);
        model.rules = Rules { gpus, ..rules.clone() };
        model.hibernation.impossible = None;
        model.kept.forget();
        self.changes += 1;
    }

    /// Whether a model's canary runs beside its first requests after a plain wake. At first it does not.
    pub fn set_canary_beside(&mut self, model: ModelId, may: bool) {
        if let Some(model) = self.models.get_mut(model.0) {
            model.canary_beside = may;
        }
    }

    /// Whether a model's canary can be judged beside requests that its engine kept. At first it can.
    pub fn set_keeps(&mut self, model: ModelId, may: bool) {
        if let Some(model) = self.models.get_mut(model.0) {
            model.kept.set_forbidden(!may);
        }
    }

    /// Something of a model's answers has come.
    pub fn flowed(&mut self, model: ModelId, now: Time) {
        if let Some(model) = self.models.get_mut(model.0) {
            model.flows(now);
        }
    }

    /// The model of a task that has not ended.
    #[must_use]
    pub fn model_of(&self, op: OpId) -> Option<ModelId> {
        let is_its = |model: &ModelState| model.op.is_some_and(|one| one.id == op);
        self.models.iter().position(is_its).map(ModelId)
    }

    /// Free bytes of a GPU at the last measurement.
    #[must_use]
    pub fn free_bytes(&self, gpu: Gpu) -> Option<u64> {
        self.free.get(gpu.0).copied().flatten()
    }

    fn on_input(&mut self, input: Input) {
        let known = self.models.len();
        match input {
            Input::Arrived { request, model, priority } if model.0 < known => {
                self.arrived(request, model.0, priority);
            }
            Input::Left(request) => self.left(request),
            Input::Ended { op, outcome } => self.ended(op, outcome),
            Input::Holds { model, bytes } if model.0 < known => self.seen_by_process(model.0, &bytes),
            Input::Lost(model) if model.0 < known => self.lost(model.0),
            Input::Slept(model) if model.0 < known => self.slept(model.0),
            Input::Looked { model, look } if model.0 < known => self.looked(model.0, &look),
            Input::Wake(model) if model.0 < known => {
                let model = &mut self.models[model.0];
                if !model.is_ready() {
                    model.hot.set_put_to_sleep(false);
                    model.wake_requested = model.wake_requested.or(Some(self.now));
                }
            }
            Input::Prepare(model) if model.0 < known => self.prepare(model.0),
            Input::Sleep(_) | Input::Hibernate(_) | Input::Restart(_) if self.is_ending => {}
            Input::Sleep(model) if model.0 < known => self.sleep_requested(model.0),
            Input::Hibernate(model) if model.0 < known => self.hibernate_requested(model.0),
            Input::Recheck(model) if model.0 < known => self.recheck(model.0),
            Input::Restart(model) if model.0 < known => self.restart(model.0),
            Input::Pin(model, is_pinned) if model.0 < known => self.models[model.0].is_pinned = is_pinned,
            Input::Hot(model, is_hot) if model.0 < known => self.models[model.0].set_hot(is_hot, self.now),
            Input::Hold(model, is_held) if model.0 < known => self.models[model.0].hot.set_held(is_held),
            Input::Shutdown => {
                self.is_ending = true;
                (0..known).for_each(|id| self.refuse_all(id, Refusal::ShuttingDown));
            }
            _ => {}
        }
    }

    fn ended(&mut self, op: OpId, outcome: TaskOutcome) {
        let Some(ModelId(id)) = self.model_of(op) else { return };
        self.models[id].op = None;
        self.changes += 1;
        let gpus = self.models[id].rules.gpus.len();
        let outcome = match outcome {
            TaskOutcome::Measured(memory) if memory.len() != gpus => {
                TaskOutcome::Failed(format!("{} GPUs were measured, and it has {gpus}", memory.len()))
            }
            other => other,
        };
        if let TaskOutcome::Measured(memory) = &outcome {
            for (gpu, memory) in self.models[id].rules.gpus.iter().zip(memory) {
                self.total[gpu.0] = Some(memory.total_bytes);
            }
        }
        self.step_ended(id, outcome);
    }

    fn prepare(&mut self, id: usize) {
        let model = &mut self.models[id];
        let is_possible = model.rules.can_sleep && model.stage == Stage::Cold;
        if is_possible && !model.is_preloading && model.waiting_since().is_none() {
            (model.is_preloading, model.sleeps_after) = (true, true);
        }
    }

    fn sleep_requested(&mut self, id: usize) {
        let model = &mut self.models[id];
        (model.wake_requested, model.is_preloading) = (None, false);
        model.ends_recall(true);
        if model.is_ready() {
            self.leave(id, Leave::Sleep);
        } else if let Stage::Step { step, .. } = &model.stage
            && step.is_activating()
        {
            // It sleeps once it is up.
            model.sleeps_after = true;
        }
    }

    fn arrived(&mut self, request: RequestId, id: usize, priority: i32) {
        if self.requests.contains_key(&request) {
            return;
        }
        let model = &self.models[id];
        let goes_on = model.is_ready() && model.queue.is_empty() && model.running < model.running_max();
        let no_memory_until = model.no_memory_until.filter(|until| self.now < *until && !model.is_ready());
        let refusal = if self.is_ending {
            Some(Refusal::ShuttingDown)
        } else if let Stage::Quarantined { until } = model.stage {
            Some(Refusal::Quarantined { until })
        } else if let Some(until) = no_memory_until {
            Some(self.lack(id, until))
        } else {
            (model.queue.len() >= model.rules.queue_max && !goes_on).then_some(Refusal::QueueFull)
        };
        if let Some(refusal) = refusal {
            self.out.push(Effect::Refuse { request, model: ModelId(id), refusal });
            return;
        }
        let model = &mut self.models[id];
        model.demand.arrived(self.now);
        let priority = model.rules.priority.saturating_add(priority);
        model.queue.push(request, Claim { since: self.now, priority });
        self.requests.insert(request, Known { id, is_running: false, priority });
    }

    fn left(&mut self, request: RequestId) {
        let Some(Known { id, is_running, .. }) = self.requests.remove(&request) else { return };
        let model = &mut self.models[id];
        if is_running {
            model.running -= 1;
            model.last_used = self.now;
            model.flows(self.now);
        } else {
            model.queue.remove(request);
        }
        if model.running == 0 {
            model.kept.end();
        }
        if model.is_idle() {
            model.demand.became_idle(self.now);
        }
        self.changes += 1;
    }

    fn serve(&mut self) {
        for id in 0..self.models.len() {
            let now = self.now;
            let model = &mut self.models[id];
            while model.is_ready() && model.running < model.running_max() {
                let Some(request) = model.queue.pop() else { break };
                if model.running == 0 {
                    model.flows(now);
                }
                model.running += 1;
                model.last_used = now;
                if let Some(known) = self.requests.get_mut(&request) {
                    known.is_running = true;
                }
                self.out.push(Effect::Admit { request, model: ModelId(id) });
            }
            while let Some(request) = model.queue.pop_late(now, model.rules.wait_max) {
                self.requests.remove(&request);
                let refusal = Refusal::WaitedTooLong;
                self.out.push(Effect::Refuse { request, model: ModelId(id), refusal });
            }
            self.drop_kept_if_late(id);
            let model = &mut self.models[id];
            // No request waits any more, and nothing was begun.
            if !model.is_wanted() && model.activation().is_some() {
                // Its next wake is a first one.
                model.repeats_wake = false;
                self.changes += u64::from(mem::take(&mut model.is_selected));
            }
        }
    }

    fn refuse_all(&mut self, id: usize, refusal: Refusal) {
        self.drop_kept(id);
        let model = &mut self.models[id];
        (model.is_selected, model.wake_requested) = (false, None);
        model.recall_failed(self.now);
        model.stop_preloading();
        while let Some(request) = model.queue.pop() {
            self.requests.remove(&request);
            self.out.push(Effect::Refuse { request, model: ModelId(id), refusal });
        }
    }

    fn lost(&mut self, id: usize) {
        self.discount(id);
        self.disturb_others(id);
        match self.models[id].stage {
            Stage::Cold => {}
            // No engine is expected, or a later step finds out.
            Stage::Step {
                step:
                    Step::BeforeStop
                    | Step::Stop(_)
                    | Step::AfterStop { .. }
                    | Step::Probe
                    | Step::FindMemory(Activation::Start),
                ..
            } => {}
            Stage::Unknown | Stage::Quarantined { .. } => self.discard_measurements(id),
            _ => {
                self.discard_measurements(id);
                self.engine_failed(id, "the engine is gone");
            }
        }
    }

    /// Memory that a dead engine released must not count for a sleep beside it.
    fn discount(&mut self, id: usize) {
        let Some(left) = self.models[id].freed_by_end() else { return };
        let gpus = self.models[id].rules.gpus.clone();
        for (_, model) in self.models.iter_mut().enumerate().filter(|(other, _)| *other != id) {
            let Stage::Step { step, .. } = &mut model.stage else { continue };
            let (Step::Sleep(ControlCall { free: before, .. })
            | Step::Inquire(Inquiry {
                call: ControlCall { free: before, wanted: EngineState::Asleep, .. },
                ..
            })
            | Step::After { before, .. }
            | Step::Hibernate { before }
            | Step::AfterHibernation { before, .. }) = step
            else {
                continue;
            };
            for (gpu, before) in model.rules.gpus.iter().zip(before) {
                let at = gpus.iter().position(|one| one == gpu);
                *before = before.saturating_add(at.and_then(|at| left.get(at)).copied().unwrap_or(0));
            }
        }
    }

    /// Another program put the engine to sleep. Its running requests will get no answer.
    fn slept(&mut self, id: usize) {
        if !self.models[id].is_ready() {
            return;
        }
        self.disturb_others(id);
        for gpu in &self.models[id].rules.gpus {
            self.free[gpu.0] = None;
        }
        self.report_failed(id, "it sleeps, without a command from here");
        self.models[id].is_doubtful = true;
        self.give_up_op(id);
        if self.models[id].running > 0 {
            self.out.push(Effect::Abort(ModelId(id)));
        }
        self.enter(id, Stage::Unknown);
    }

    fn restart(&mut self, id: usize) {
        if !self.models[id].rules.can_restart {
            return self.report_failed(id, "it cannot be restarted here");
        }
        let drain = self.models[id].rules.limits.drain;
        match &mut self.models[id].stage {
            Stage::Ready { .. } => self.leave(id, Leave::Restart),
            // Its requests keep their deadline.
            Stage::Draining { until, then, .. } => {
                if *then == Leave::Cut {
                    *until = self.now.after(drain);
                }
                *then = Leave::Restart;
            }
            Stage::Asleep | Stage::Hibernating | Stage::Quarantined { .. } => {
                self.begin(id, Step::Stop(Then::Cold));
            }
            Stage::Unknown | Stage::Cold => {}
            Stage::Step { .. } => {
                self.report_failed(id, "it was not restarted: repeat the command after this step");
            }
        }
    }
}
