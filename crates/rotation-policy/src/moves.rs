//! The steps of one model, and what follows each success or failure.

use std::time::Duration;

use super::choose::{NO_MEMORY, Space};
use super::look_count::Looks;
use super::messages::{Effect, EngineState, Event, OpId, Refusal, Task, TaskOutcome};
use super::need_seen::{larger, less, smaller};
use super::queue::Claim;
use super::rules::{Gpu, Limits, ModelId};
use super::stage::StageName;
use super::step::{Activated, Activation, Leave, Move, Op, Stage, Step, Then};
use super::time::Time;
use super::{ModelState, Policy};

/// Attempts of a step without side effects.
pub(super) const TRIES: u32 = 2;
/// Longest pause before a helper that could not be asked is asked again.
const PROBE_PAUSE_MAX: Duration = Duration::from_secs(30);

/// Tolerance between two measurements of the same memory.
pub(super) const STEADY_BYTES: u64 = 32 << 20;

/// Shortest timeout or pause, so that no step repeats without time passing.
pub(super) const LEAST: Duration = Duration::from_millis(1);

impl Policy {
    pub(super) fn enter(&mut self, id: usize, stage: Stage) {
        let now = self.now;
        let model = &mut self.models[id];
        self.changes += 1;
        let (before, name) = (model.stage.name(), stage.name());
        let is_look = name == StageName::FindingMemory && model.is_recalled() && model.is_preloading;
        let was_look = model.hot.set_looking(is_look);
        model.stage = stage;
        let is_in_vain = was_look && model.activation().is_some();
        if model.stage == Stage::Asleep && !is_in_vain {
            model.hibernation.asleep_since = now;
        }
        // A look is a part of what follows, unless it found nothing.
        let look = (was_look && !is_look && !is_in_vain).then_some(StageName::FindingMemory);
        let new = (before != name && !is_look && !is_in_vain).then_some(name);
        for name in look.into_iter().chain(new) {
            self.out.push(Effect::Report { model: ModelId(id), event: Event::Stage(name) });
        }
        if self.models[id].activation().is_some() {
            self.recall(id);
        }
    }

    pub(super) fn begin(&mut self, id: usize, step: Step) {
        let is_disturbed = self.is_other_stopping(id);
        let model = &mut self.models[id];
        model.tries = 0;
        if matches!(step, Step::Before | Step::BeforeHibernation | Step::BeforeStop | Step::FindMemory(_)) {
            model.is_disturbed = is_disturbed;
        }
        if matches!(step, Step::Stop(_) | Step::BeforeStop | Step::BeforeHibernation) {
            self.drop_kept(id);
        }
        let model = &mut self.models[id];
        match &step {
            Step::FindMemory(up) => model.move_begins(Move::Come(*up), self.now),
            Step::Before | Step::BeforeStop => model.move_begins(Move::Leave, self.now),
            Step::BeforeHibernation => model.move_begins(Move::Hibernate, self.now),
            _ => {}
        }
        self.give_up_op(id);
        if self.is_ending {
            self.drop_kept(id);
            return self.enter(id, Stage::Unknown);
        }
        let began = self.now;
        self.enter(id, Stage::Step { step, began, retry_at: None });
        if !self.waits_for_others(id) {
            self.run(id);
        }
    }

    fn run(&mut self, id: usize) {
        let op = OpId(self.next_op);
        self.next_op += 1;
        let model = &mut self.models[id];
        let Stage::Step { step, retry_at, .. } = &mut model.stage else { return };
        *retry_at = None;
        let (task, limit) = (step.task(), limit_of(&model.rules.limits, step, self.now).max(LEAST));
        model.tries += 1;
        model.op = Some(Op { id: op, deadline: self.now.after(limit) });
        self.out.push(Effect::Run { op, model: ModelId(id), task, limit });
        if task == Task::Stop {
            self.disturb_others(id);
        }
    }

    pub(super) fn give_up_op(&mut self, id: usize) {
        let is_trial = self.models[id].is_on_trial();
        if let Some(op) = self.models[id].op.take() {
            self.out.push(Effect::Cancel(op.id));
            if is_trial {
                self.tested(id, false);
            }
        }
    }

    pub(super) fn advance(&mut self, id: usize) {
        let now = self.now;
        let model = &self.models[id];
        if let Some(op) = model.op {
            if now >= op.deadline {
                self.models[id].op = None;
                self.out.push(Effect::Cancel(op.id));
                self.step_ended(id, TaskOutcome::Failed("it did not end in time".to_owned()));
                return;
            }
            if !model.is_on_trial() {
                return;
            }
        }
        match &model.stage {
            Stage::Step { .. } | Stage::Draining { .. } if self.is_ending => {}
            Stage::Step { retry_at: Some(at), .. } if now >= *at => self.run(id),
            Stage::Step { retry_at: None, .. } if !self.waits_for_others(id) => self.run(id),
            Stage::Quarantined { until } if now >= *until => self.enter(id, Stage::Unknown),
            Stage::Unknown if !self.is_ending => self.begin(id, Step::Probe),
            Stage::Draining { until, was_aborted, then } => {
                let (until, was_aborted, then) = (*until, *was_aborted, *then);
                self.drain(id, until, was_aborted, then);
            }
            Stage::Asleep | Stage::Hibernating | Stage::Cold if model.is_selected && !self.is_ending => {
                self.activate(id);
            }
            _ => {}
        }
    }

    fn drain(&mut self, id: usize, until: Time, was_aborted: bool, then: Leave) {
        let now = self.now;
        let model = &mut self.models[id];
        if model.running == 0 {
            if model.op.is_some() && then != Leave::Failed {
                // Its canary, which says whether it may come back by a wake.
                return;
            }
            model.move_ended(Move::Drain, now);
            if then != Leave::Failed && self.is_other_moving(id) {
                return;
            }
            return match then {
                Leave::Sleep | Leave::Cut => self.begin(id, Step::Before),
                Leave::Stop => self.begin(id, Step::BeforeStop),
                Leave::Restart => self.begin(id, Step::Stop(Then::Again)),
                Leave::Failed => self.end_failed(id),
            };
        }
        // A whole answer may wait for the canary alone.
        if now < until || model.is_on_trial() {
            return;
        }
        if then == Leave::Cut {
            if !self.is_other_moving(id) {
                self.models[id].move_ended(Move::Drain, now);
                self.begin(id, Step::Before);
            }
            return;
        }
        if was_aborted {
            let reason = format!("{} aborted requests did not end", model.running);
            return self.engine_failed(id, &reason);
        }
        let until = self.now.after(model.rules.limits.abort.max(LEAST));
        self.out.push(Effect::Abort(ModelId(id)));
        self.enter(id, Stage::Draining { until, was_aborted: true, then });
    }

    fn activate(&mut self, id: usize) {
        let in_the_way = |other: usize| {
            let model = &self.models[other];
            other != id && self.share(id, other) && (model.stage.is_leaving() || model.is_moving())
        };
        if (0..self.models.len()).any(in_the_way) {
            return;
        }
        if let Some(up) = self.models[id].activation() {
            self.begin(id, Step::FindMemory(up));
        }
    }

    /// Whether another model on its GPUs may be changing their memory.
    pub(super) fn is_other_moving(&self, id: usize) -> bool {
        (0..self.models.len())
            .any(|other| other != id && self.share(id, other) && self.models[other].is_moving())
    }

    /// Whether its step waits for another model on its GPUs. A stop waits for what leaves, since what that releases is
    /// measured. It does not wait for a start, which may take minutes: what that takes is not learnt then. A stop and the
    /// measurement that says whether a wake was done wait for each other.
    fn waits_for_others(&self, id: usize) -> bool {
        let model = &self.models[id];
        let may_beside = |other: &ModelState| {
            model.stops() && (other.stops() || other.comes_beside_stops())
                || model.comes_beside_stops() && other.stops()
        };
        let mut moving = self
            .models
            .iter()
            .enumerate()
            .filter(|(other, one)| *other != id && self.share(id, *other) && one.is_moving());
        moving.any(|(_, other)| !may_beside(other))
    }

    /// Whether the stop of another engine changes the memory of its GPUs.
    fn is_other_stopping(&self, id: usize) -> bool {
        let is_stopping = |model: &ModelState| model.stops() && model.op.is_some();
        (0..self.models.len())
            .any(|other| other != id && self.share(id, other) && is_stopping(&self.models[other]))
    }

    /// Other models on its GPUs do not learn from what they measure now.
    pub(super) fn disturb_others(&mut self, id: usize) {
        for other in 0..self.models.len() {
            self.models[other].is_disturbed |= other != id && self.share(id, other);
        }
    }

    pub(super) fn step_ended(&mut self, id: usize, outcome: TaskOutcome) {
        let Stage::Step { step, began, .. } = self.models[id].stage.clone() else {
            return self.trial_ended(id, outcome);
        };
        match (step, outcome) {
            (step, TaskOutcome::Measured(memory)) => {
                let free: Vec<u64> = memory.iter().map(|memory| memory.free_bytes).collect();
                self.measured_in(id, step, began, &free);
            }
            (Step::Probe, TaskOutcome::Probed(probed)) => self.probed(id, probed),
            (Step::Wake(call), TaskOutcome::Done) => self.confirm(id, Activation::Wake, call.free),
            (Step::Start { free }, TaskOutcome::Done) => self.confirm(id, Activation::Start, free),
            (Step::Confirm { activated }, TaskOutcome::Awake(true)) => self.confirmed(id, activated),
            (Step::Confirm { .. }, TaskOutcome::Awake(false)) => {
                self.engine_failed(id, "it reports that it is asleep");
            }
            (Step::Canary { activated }, TaskOutcome::Canary(Ok(()))) => {
                self.begin(id, Step::Learn { activated });
            }
            (Step::Canary { .. }, TaskOutcome::Canary(Err(reason))) => {
                self.engine_failed(id, &format!("its canary was wrong: {reason}"));
            }
            (Step::Sleep(call), TaskOutcome::Done) => self.slept_as_asked(id, call.free),
            (Step::Sleep(call), TaskOutcome::Unsupported(reason)) if call.keeps => {
                self.not_kept(id, &reason, true);
            }
            (Step::Inquire(inquiry), TaskOutcome::Probed(found)) => self.inquired(id, inquiry, found),
            (Step::Hibernate { before }, TaskOutcome::Done) => {
                self.begin(id, Step::AfterHibernation { before, last: None });
            }
            (Step::Hibernate { .. }, TaskOutcome::Unsupported(reason)) => self.cannot_hibernate(id, &reason),
            (Step::Hibernate { .. }, TaskOutcome::Later(reason)) => self.hibernation_interrupted(id, &reason),
            (Step::Resume { wakes }, TaskOutcome::Done) => self.resumed(id, wakes),
            (Step::Resume { .. } | Step::Probe, TaskOutcome::Later(_) | TaskOutcome::NeedsMore(_))
                if self.models[id].tries < TRIES =>
            {
                self.retry(id);
            }
            (Step::Resume { wakes }, TaskOutcome::NeedsMore(reason)) => {
                self.models[id].hibernation.needs_more = true;
                self.not_resumed(id, wakes, &reason);
            }
            (Step::Resume { wakes }, TaskOutcome::Later(reason)) => self.not_resumed(id, wakes, &reason),
            (Step::Probe | Step::Inquire(_), TaskOutcome::Later(reason)) => self.probe_later(id, &reason),
            (Step::Stop(then), TaskOutcome::Done) => self.stopped(id, then),
            (step, TaskOutcome::Failed(reason)) => self.failed(id, &step, began, &reason),
            (_, TaskOutcome::Unsupported(reason)) => self.give_up(id, &reason),
            (step, other) => {
                let reason = format!("{:?} was answered with {other:?}", step.task());
                self.failed(id, &step, began, &reason);
            }
        }
    }

    /// The same of a step that measures memory.
    fn measured_in(&mut self, id: usize, step: Step, began: Time, free: &[u64]) {
        match step {
            Step::FindMemory(up) => self.memory_measured(id, up, began, free),
            Step::Learn { activated } => {
                self.learn(id, activated, free);
                self.ready(id);
            }
            Step::Before if self.is_ending && self.models[id].running > 0 => {
                self.enter(id, Stage::Ready { since: self.now });
            }
            Step::Before => {
                self.measured(id, free);
                self.fall_asleep(id, free.to_vec(), false);
            }
            Step::Inquire(inquiry) => self.weighed(id, inquiry, free),
            Step::After { before, last } => self.released(id, began, before, last.as_deref(), free),
            Step::BeforeHibernation => {
                self.measured(id, free);
                self.begin(id, Step::Hibernate { before: free.to_vec() });
            }
            Step::AfterHibernation { before, last } => {
                self.residue_measured(id, began, before, last.as_deref(), free);
            }
            Step::BeforeStop => {
                self.measured(id, free);
                self.begin(id, Step::Stop(Then::Measure { before: free.to_vec() }));
            }
            Step::AfterStop { before } => {
                self.measured(id, free);
                if !self.models[id].is_disturbed {
                    self.released_in_all(id, &less(free, &before));
                }
                self.is_away(id);
            }
            other => {
                let reason = format!("{:?} was answered with free memory", other.task());
                self.failed(id, &other, began, &reason);
            }
        }
    }

    /// What a start would not mend.
    fn give_up(&mut self, id: usize, reason: &str) {
        // As if it had been started again already.
        self.models[id].was_restarted = true;
        self.engine_failed(id, reason);
    }

    fn learn(&mut self, id: usize, activated: Option<Activated>, free: &[u64]) {
        self.measured(id, free);
        let now = self.now;
        let model = &mut self.models[id];
        if let Some(activated) = &activated {
            model.move_ended(Move::Come(activated.up), now);
        }
        if let Some(activated) = activated.filter(|_| !model.is_disturbed) {
            let taken = less(&activated.free, free);
            match activated.up {
                Activation::Resume | Activation::Wake => model.woke(&taken),
                Activation::Start => {
                    model.cold = Some(taken.clone());
                    model.need.is_doubted = false;
                    self.seen(id, &taken);
                }
            }
        }
    }

    pub(super) fn confirm(&mut self, id: usize, up: Activation, free: Vec<u64>) {
        self.begin(id, Step::Confirm { activated: Some(Activated { up, free }) });
    }

    fn probed(&mut self, id: usize, probed: EngineState) {
        match probed {
            // It may hold its memory, whatever it says.
            state if state != EngineState::Gone && self.models[id].is_to_stop => {
                self.begin(id, Step::Stop(Then::Cold));
            }
            EngineState::Gone => {
                self.models[id].is_to_stop = false;
                self.discard_measurements(id);
                if self.models[id].rules.can_restart {
                    self.enter(id, Stage::Cold);
                } else {
                    self.engine_failed(id, "there is no engine, and it cannot be started here");
                }
            }
            EngineState::Asleep => {
                self.models[id].is_doubtful = true;
                self.enter(id, Stage::Asleep);
            }
            // Its memory has said so.
            EngineState::Moving if self.models[id].slept_by_memory => self.enter(id, Stage::Asleep),
            EngineState::Hibernating => self.enter(id, Stage::Hibernating),
            EngineState::Awake => self.begin(id, Step::Confirm { activated: None }),
            EngineState::Moving => {
                self.engine_failed(
                    id,
                    "a sleep or a wake of it began and did not complete, so its state is unknown",
                );
            }
        }
    }

    fn memory_measured(&mut self, id: usize, up: Activation, began: Time, free: &[u64]) {
        let is_steady = self.is_as_measured(id, free);
        self.measured(id, free);
        let model = &self.models[id];
        let rests = match up {
            Activation::Resume => Stage::Hibernating,
            Activation::Wake => Stage::Asleep,
            Activation::Start => Stage::Cold,
        };
        if !model.is_wanted() {
            (self.models[id].is_selected, self.models[id].sleeps_after) = (false, false);
            return self.enter(id, rests);
        }
        let need = model.need(up);
        let lacks = need.is_some_and(|need| {
            let mut gpus = model.rules.gpus.iter().zip(need);
            gpus.any(|(gpu, need)| self.available(id, up, *gpu).is_none_or(|free| need > free))
        });
        if !lacks {
            return self.come(id, up, free);
        }
        if model.is_preloading && model.waiting_since().is_none() {
            // It comes back once for each time that it left.
            self.models[id].is_selected = false;
            self.models[id].recall_failed(self.now);
            self.models[id].stop_preloading();
            return self.enter(id, rests);
        }
        // Nothing that others release would do.
        if self.too_large(id).is_some() {
            return self.no_memory(id, NO_MEMORY);
        }
        // A failed engine that is being stopped may be in the way.
        let is_leaving = |other: usize| self.share(id, other) && self.models[other].stage.is_leaving();
        if (0..self.models.len()).any(|other| other != id && is_leaving(other)) {
            return self.enter(id, rests);
        }
        // The evicted models released too little, so others may have to leave.
        let claim = model.claim().unwrap_or(Claim { since: began, priority: model.rules.priority });
        match self.space_for(id, up, claim) {
            Space::Leave(_) | Space::Later => {
                self.models[id].is_selected = false;
                return self.enter(id, rests);
            }
            Space::Hibernate(list) => {
                self.enter(id, rests);
                return list.into_iter().for_each(|other| self.begin(other, Step::BeforeHibernation));
            }
            Space::Never if is_steady => return self.no_memory(id, NO_MEMORY),
            Space::Never | Space::Free => {}
        }
        if self.now < began.after(self.models[id].rules.limits.find_memory) {
            return self.retry(id);
        }
        self.remove_sleeper(id, up, rests);
    }

    /// Its memory is there.
    fn come(&mut self, id: usize, up: Activation, free: &[u64]) {
        self.models[id].is_preloading = false;
        let free = free.to_vec();
        let step = match up {
            Activation::Resume => Step::Resume { wakes: true },
            Activation::Wake => Step::Wake(self.control_call(id, EngineState::Awake, free)),
            Activation::Start => Step::Start { free },
        };
        self.begin(id, step);
    }

    /// The last way to memory: what a sleeping model keeps.
    fn remove_sleeper(&mut self, id: usize, up: Activation, rests: Stage) {
        match self.sleeper(id) {
            Some(other) => {
                self.enter(id, rests);
                let step =
                    if self.may_hibernate(other) { Step::BeforeHibernation } else { Step::Stop(Then::Cold) };
                self.begin(other, step);
            }
            // The engine itself may hold the memory, whatever it reports.
            None if up != Activation::Start && self.models[id].rules.can_restart => {
                self.engine_failed(id, "there is too little free memory for it to wake");
            }
            None => self.no_memory(id, NO_MEMORY),
        }
    }

    /// The least recently used sleeping model on its GPUs that can hibernate or be stopped, to free what it keeps while
    /// asleep.
    fn sleeper(&self, id: usize) -> Option<usize> {
        let is_one = |other: &usize| {
            let model = &self.models[*other];
            let can_go = model.rules.can_restart && !model.is_selected && model.op.is_none();
            let rests = model.stage == Stage::Asleep && model.kept.since().is_none();
            *other != id && self.share(id, *other) && rests && can_go
        };
        (0..self.models.len()).filter(is_one).min_by_key(|other| self.models[*other].last_used)
    }

    fn released(&mut self, id: usize, began: Time, before: Vec<u64>, last: Option<&[u64]>, free: &[u64]) {
        self.measured(id, free);
        let freed = less(free, &before);
        let model = &self.models[id];
        let is_learnt = model.held.is_some();
        // A sleep that releases nothing is no sleep, whatever the model is thought to hold.
        let mut expected = model.expected_release().unwrap_or_else(|| vec![1; freed.len()]);
        expected.iter_mut().for_each(|bytes| *bytes = (*bytes).max(1));
        let slack = if is_learnt { model.rules.slack_bytes } else { 0 };
        let is_lacking = |(all, freed): (&u64, &u64)| *freed == 0 || freed.saturating_add(slack) < *all;
        let missing = expected.iter().zip(&freed).position(is_lacking);
        // Until the amount is known, two measurements have to agree.
        let is_steady = last.is_some_and(|last| {
            last.iter().zip(free).all(|(last, free)| last.abs_diff(*free) <= STEADY_BYTES)
        });
        if missing.is_none() && (model.min_release.is_some() || is_steady) {
            self.learn_release(id, &freed);
            self.models[id].move_ended(Move::Leave, self.now);
            self.models[id].hibernation.is_usual = false;
            return self.enter(id, Stage::Asleep);
        }
        if self.now < began.after(model.rules.limits.release) {
            let step = Step::After { before, last: Some(free.to_vec()) };
            self.models[id].stage = Stage::Step { step, began, retry_at: None };
            return self.retry(id);
        }
        let Some(at) = missing else {
            return self.engine_failed(id, "free memory on its GPUs kept changing after its sleep");
        };
        let (gpu, expected_bytes, freed_bytes) = (model.rules.gpus[at], expected[at], freed[at]);
        let event = Event::Shortfall { gpu, expected_bytes, freed_bytes };
        self.out.push(Effect::Report { model: ModelId(id), event });
        self.discard_measurements(id);
        self.engine_failed(id, "it reports that it sleeps, but its memory was not released");
    }

    fn learn_release(&mut self, id: usize, freed: &[u64]) {
        let model = &self.models[id];
        if model.is_disturbed {
            return;
        }
        // What a sleep keeps is no part of it, so alone it is no whole need.
        if model.known_need().is_some() {
            self.released_in_all(id, freed);
        }
        let model = &mut self.models[id];
        // Beyond its need, another program may have ended beside it.
        let need = model.known_need().filter(|_| !model.need.is_doubted);
        let freed = need.map_or_else(|| freed.to_owned(), |need| smaller(&need, freed));
        let held = model.held.as_ref().map_or_else(|| freed.clone(), |held| larger(held, &freed));
        if model.held.as_ref() != Some(&held) {
            model.held = Some(held.clone());
            let event = Event::Learnt { held_bytes: held };
            self.out.push(Effect::Report { model: ModelId(id), event });
        }
    }

    fn stopped(&mut self, id: usize, then: Then) {
        self.models[id].is_to_stop = false;
        self.count_for_wakes(id);
        self.discard_measurements(id);
        match then {
            Then::Cold => self.is_away(id),
            Then::Measure { before } => self.begin(id, Step::AfterStop { before }),
            Then::Again => {
                let now = self.now;
                let model = &mut self.models[id];
                model.wake_requested = model.wake_requested.or(Some(now));
                self.enter(id, Stage::Cold);
            }
            Then::Quarantine => self.quarantine(id),
        }
    }

    fn is_away(&mut self, id: usize) {
        self.models[id].move_ended(Move::Leave, self.now);
        self.enter(id, Stage::Cold);
    }

    /// Steps without side effects are repeated.
    fn failed(&mut self, id: usize, step: &Step, began: Time, reason: &str) {
        let model = &self.models[id];
        let limits = &model.rules.limits;
        let is_early = |limit: Duration| self.now < began.after(limit);
        match step {
            Step::Probe | Step::Inquire(_) | Step::Confirm { .. } | Step::Canary { .. }
                if model.tries < TRIES =>
            {
                self.retry(id);
            }
            Step::Resume { .. } if model.tries < TRIES => self.retry(id),
            Step::FindMemory(_) | Step::Before | Step::BeforeHibernation if is_early(limits.find_memory) => {
                self.retry(id);
            }
            Step::After { .. } | Step::AfterHibernation { .. } if is_early(limits.release) => self.retry(id),
            Step::BeforeHibernation | Step::Hibernate { .. } | Step::AfterHibernation { .. } => {
                self.hibernation_failed(id, reason);
            }
            Step::Sleep(call) | Step::Wake(call) => self.inquire(id, call, reason),
            Step::Inquire(inquiry) => {
                let first = &inquiry.reason;
                self.engine_failed(id, &format!("{first}; asked what it does then: {reason}"));
            }
            // Nothing has changed yet.
            Step::Before => {
                self.report_failed(id, reason);
                self.models[id].ends_recall(false);
                self.enter(id, Stage::Ready { since: self.now });
                self.test_if_due(id);
            }
            Step::FindMemory(_) => self.no_memory(id, reason),
            // Nothing is learnt from it then.
            Step::BeforeStop => self.begin(id, Step::Stop(Then::Cold)),
            Step::AfterStop { .. } => self.is_away(id),
            // The model is healthy. Its next sleep measures what it takes.
            Step::Learn { .. } => self.ready(id),
            Step::Stop(_) => {
                self.report_failed(id, reason);
                (self.models[id].failures, self.models[id].is_to_stop) = (self.models[id].failures + 1, true);
                self.quarantine(id);
            }
            _ => self.engine_failed(id, reason),
        }
    }

    /// Its requests wait: an engine that might hibernate is neither asked nor stopped.
    fn probe_later(&mut self, id: usize, reason: &str) {
        self.report_failed(id, reason);
        let rules = &self.models[id].rules;
        let pause = rules.pause(self.models[id].tries.saturating_sub(1)).min(PROBE_PAUSE_MAX);
        self.retry_after(id, pause);
    }

    pub(super) fn retry(&mut self, id: usize) {
        self.retry_after(id, self.models[id].rules.limits.poll);
    }

    fn retry_after(&mut self, id: usize, pause: Duration) {
        let at = self.now.after(pause.max(LEAST));
        self.changes += 1;
        if let Stage::Step { retry_at, .. } = &mut self.models[id].stage {
            *retry_at = Some(at);
        }
    }

    pub(super) fn report_failed(&mut self, id: usize, reason: &str) {
        let stage = self.models[id].stage.name();
        let event = Event::Failed { stage, reason: reason.to_owned() };
        self.out.push(Effect::Report { model: ModelId(id), event });
    }

    /// Restarts or quarantines it.
    pub(super) fn engine_failed(&mut self, id: usize, reason: &str) {
        self.report_failed(id, reason);
        self.end_failed(id);
    }

    /// The same after the report.
    pub(super) fn end_failed(&mut self, id: usize) {
        self.give_up_op(id);
        let model = &mut self.models[id];
        let is_activating = match &model.stage {
            // Possibly not needed now. The next request starts it.
            Stage::Step { step: Step::Probe, .. } => false,
            // A command to sleep may have come meanwhile.
            Stage::Step { step: Step::FindMemory(_), .. } => model.is_selected,
            Stage::Step { step, .. } => step.is_activating(),
            Stage::Draining { then: Leave::Restart, .. } => true,
            Stage::Asleep | Stage::Hibernating => model.is_selected,
            _ => false,
        };
        // One that comes up well and is not soon after is quarantined, each time for longer.
        let again = model.given_up.take_ended();
        model.failures = model.failures.max(again) + 1;
        model.repeats_wake = false;
        model.move_failed();
        // The learned need may be too small, and nothing else would correct it.
        match model.stage {
            Stage::Step { step: Step::Start { .. }, .. } => {
                (model.cold, model.need.is_doubted) = (None, true);
            }
            Stage::Step { step: Step::Wake(_), .. } => {
                (model.held, model.min_release, model.need.is_doubted) = (None, None, true);
            }
            Stage::Step { step: Step::Inquire(ref inquiry), .. } if inquiry.call.wakes() => {
                (model.held, model.min_release, model.need.is_doubted) = (None, None, true);
            }
            _ => {}
        }
        if !model.rules.can_restart {
            return self.quarantine(id);
        }
        // It came up without a request. It is started again only where memory is free, and after those that wait.
        let is_preload = is_activating && model.is_selected && model.waiting_since().is_none();
        if is_preload && !model.was_restarted {
            (model.is_selected, model.is_preloading) = (false, true);
        }
        let then = match (is_activating, model.was_restarted) {
            _ if again > 0 => Then::Quarantine,
            (false, _) => Then::Cold,
            (true, false) if is_preload => Then::Cold,
            (true, false) => Then::Again,
            (true, true) => Then::Quarantine,
        };
        model.was_restarted |= is_activating;
        self.begin(id, Step::Stop(then));
    }

    fn quarantine(&mut self, id: usize) {
        let model = &mut self.models[id];
        let failures = model.failures.max(1);
        let until = self.now.after(model.rules.pause(failures).max(LEAST));
        model.was_restarted = false;
        self.enter(id, Stage::Quarantined { until });
        let event = Event::Quarantined { until, failures };
        self.out.push(Effect::Report { model: ModelId(id), event });
        self.refuse_all(id, Refusal::Quarantined { until });
    }

    /// Refuses its requests for a while. Probes all models on its GPUs that should have no memory, since one of them
    /// has it, unless the GPU itself is too small.
    pub(super) fn no_memory(&mut self, id: usize, reason: &str) {
        // With the stage in which it failed.
        let too_large = self.too_large(id);
        match too_large {
            Some(too_large) => self.report_failed(id, &too_large.reason()),
            None => self.report_failed(id, reason),
        }
        for other in 0..self.models.len() {
            let rests = matches!(self.models[other].stage, Stage::Asleep | Stage::Hibernating | Stage::Cold);
            if other == id || rests && too_large.is_none() && self.share(id, other) {
                self.enter(other, Stage::Unknown);
            }
        }
        let until = self.now.after(self.models[id].rules.pause_min.max(LEAST));
        self.models[id].no_memory_until = Some(until);
        self.refuse_all(id, self.lack(id, until));
    }

    pub(super) fn become_ready(&mut self, id: usize) {
        let now = self.now;
        let model = &mut self.models[id];
        (model.failures, model.was_restarted, model.is_selected) = (0, false, false);
        let is_wanted = model.waiting_since().is_some() || model.is_held();
        let sleeps = std::mem::take(&mut model.sleeps_after) && !is_wanted;
        // A command may have come while it came up.
        let was_put_to_sleep = sleeps && model.hot.was_put_to_sleep();
        model.ends_recall(was_put_to_sleep);
        (model.repeats_wake, model.slept_by_memory) = (false, false);
        model.is_doubtful = false;
        model.need.is_doubted = false;
        model.looks = Looks::from(now);
        // Also one that was found awake.
        (model.wake_requested, model.is_preloading, model.last_used) = (None, false, now);
        model.hibernation.is_requested = false;
        self.enter(id, Stage::Ready { since: now });
        self.goes_on(id);
        if sleeps {
            self.leave(id, Leave::Sleep);
        } else {
            self.preload_set(id);
        }
    }

    /// The others of its set come up with it, where memory is free.
    fn preload_set(&mut self, id: usize) {
        let rules = self.models[id].rules.clone();
        for model in self.models.iter_mut().filter(|model| model.rules.is_together_with(&rules)) {
            if model.activation().is_some() {
                (model.is_preloading, model.sleeps_after) = (true, false);
            }
        }
    }

    fn is_as_measured(&self, id: usize, free: &[u64]) -> bool {
        let is_same = |(gpu, free): (&Gpu, &u64)| {
            self.free_bytes(*gpu).is_some_and(|known| known.abs_diff(*free) <= STEADY_BYTES)
        };
        self.models[id].rules.gpus.iter().zip(free).all(is_same)
    }

    /// After its engine changed.
    pub(super) fn discard_measurements(&mut self, id: usize) {
        self.drop_kept(id);
        let model = &mut self.models[id];
        (model.held, model.min_release, model.slept_by_memory) = (None, None, false);
        model.hibernation.forget();
        model.kept.forget();
        for gpu in &model.rules.gpus {
            self.free[gpu.0] = None;
        }
    }

    pub(super) fn measured(&mut self, id: usize, free: &[u64]) {
        let gpus = self.models[id].rules.gpus.clone();
        for (gpu, free) in gpus.iter().zip(free) {
            if let Some(known) = self.free.get_mut(gpu.0) {
                *known = Some(*free);
            }
        }
    }
}

fn limit_of(limits: &Limits, step: &Step, now: Time) -> Duration {
    if let Step::Sleep(call) | Step::Wake(call) = step {
        return call.until.since(now);
    }
    match step.task() {
        Task::Probe => limits.probe,
        Task::Start => limits.start,
        Task::Stop => limits.stop,
        Task::Sleep | Task::SleepKeeping | Task::Hibernate => limits.sleep,
        Task::Wake | Task::Resume => limits.wake,
        Task::Confirm => limits.confirm,
        Task::Canary | Task::CanaryBeside => limits.canary,
        Task::Measure if matches!(step, Step::After { .. } | Step::AfterHibernation { .. }) => limits.release,
        Task::Measure => limits.find_memory,
    }
}
