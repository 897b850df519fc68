//! When a sleeping model's processes leave their GPUs, and what follows.
//!
//! A sleeping engine still holds its context, kernels and graphs: the *residue*. It hibernates after a time, on command,
//! when the residues on a GPU are too large together, or when another model lacks memory.

use super::choose::subtract;
use super::messages::{Effect, Event};
use super::moves::{LEAST, STEADY_BYTES, TRIES};
use super::need_seen::less;
use super::rules::ModelId;
use super::step::{Activation, Leave, Move, Stage, Step};
use super::time::Time;
use super::{Hibernation, ModelState, Policy};

/// The residue of an engine that was neither started nor hibernated here. Most engines hold 0.8 to 2 GiB. A guess that is
/// too high is corrected by the first hibernation, and one that is too low might prevent it.
const LIKELY_RESIDUE_BYTES: u64 = 2 << 30;

/// Hibernations in a row that may end without the engine's fault before they count as its failures.
const INTERRUPTIONS_MAX: u32 = 2;

impl Hibernation {
    /// After its engine changed.
    pub(super) fn forget(&mut self) {
        (self.residue, self.is_usual, self.impossible, self.needs_more) = (None, false, None, false);
    }
}

impl ModelState {
    /// Whether it is unknown if it hibernates. Other models need not wait for that.
    pub(super) fn is_probed_later(&self) -> bool {
        self.tries >= TRIES && matches!(&self.stage, Stage::Step { step: Step::Probe, retry_at: Some(_), .. })
    }

    pub(super) fn can_hibernate(&self) -> bool {
        self.rules.can_hibernate && self.hibernation.impossible.is_none()
    }

    /// Whether its next sleep is expected to become a hibernation.
    pub(super) fn will_hibernate(&self, now: Time) -> bool {
        let is_longer = |after| self.demand.next_in(now) > after;
        self.can_hibernate()
            && (self.hibernation.is_usual || self.rules.hibernate_after.is_some_and(is_longer))
    }

    /// What it holds on each of its GPUs while asleep, as measured.
    pub(super) fn known_residue(&self) -> Option<Vec<u64>> {
        self.hibernation.residue.clone().or_else(|| self.kept_by_sleep())
    }

    /// What a start took, and a sleep did not release.
    fn kept_by_sleep(&self) -> Option<Vec<u64>> {
        Some(less(self.cold.as_ref()?, self.held.as_ref()?))
    }

    /// What a hibernation has to release: half of what the last one did, or a quarter of what sleeps keep. A simulated GPU
    /// counts the program, too.
    fn expected_of_hibernation(&self) -> Vec<u64> {
        let share = |known: &[u64], part: u64| known.iter().map(|bytes| (bytes / part).max(1)).collect();
        match (&self.hibernation.residue, self.kept_by_sleep()) {
            (Some(last), _) => share(last, 2),
            (None, Some(kept)) => share(&kept, 4),
            (None, None) => vec![1; self.rules.gpus.len()],
        }
    }

    /// The same, or what is likely.
    pub(super) fn residue(&self) -> Vec<u64> {
        self.known_residue().unwrap_or_else(|| vec![LIKELY_RESIDUE_BYTES; self.rules.gpus.len()])
    }

    /// What its present step releases; `None` if it is not one of a sleeping model.
    pub(super) fn residue_leaving(&self) -> Option<Vec<u64>> {
        let Stage::Step { step, .. } = &self.stage else { return None };
        match step {
            Step::Resume { wakes: false } => Some(vec![0; self.rules.gpus.len()]),
            step => step.is_of_sleeper().then(|| self.residue()),
        }
    }
}

impl Policy {
    /// Whether it sleeps, is not waited for, and may hibernate now.
    pub(super) fn may_hibernate(&self, id: usize) -> bool {
        let model = &self.models[id];
        let is_paused = model.hibernation.retry_at.is_some_and(|at| self.now < at);
        let rests = model.stage == Stage::Asleep && model.op.is_none();
        let is_wanted = model.is_selected || model.waiting_since().is_some();
        rests && model.can_hibernate() && !is_paused && !is_wanted && !self.is_ending
    }

    /// When it hibernates, if nothing changes but time.
    pub(super) fn hibernates_at(&self, id: usize) -> Option<Time> {
        let model = &self.models[id];
        let hibernation = &model.hibernation;
        if model.stage != Stage::Asleep || !model.can_hibernate() {
            return None;
        }
        let by_time = model.rules.hibernate_after.map(|after| hibernation.asleep_since.after(after));
        by_time.into_iter().chain(hibernation.retry_at).max()
    }

    /// Begins one hibernation on each GPU, where no other model comes or goes.
    pub(super) fn hibernate_due(&mut self) {
        let mut sleepers: Vec<usize> = (0..self.models.len()).filter(|id| self.may_hibernate(*id)).collect();
        sleepers.sort_by_key(|id| self.models[*id].last_used);
        for id in sleepers {
            let model = &self.models[id];
            let after = model.rules.hibernate_after;
            let is_over = after.is_some_and(|after| self.now >= model.hibernation.asleep_since.after(after));
            // Its GPUs are not kept from others that are waited for.
            let is_due = (is_over || self.residues_press(id)) && !self.is_waited_for_beside(id);
            if (is_due || model.hibernation.is_requested) && !self.is_other_busy(id) {
                self.begin(id, Step::BeforeHibernation);
            }
        }
    }

    fn is_other_busy(&self, id: usize) -> bool {
        let is_busy = |model: &ModelState| {
            model.comes() || model.is_selected || model.stage.is_leaving() || model.is_moving()
        };
        (0..self.models.len())
            .any(|other| other != id && self.share(id, other) && is_busy(&self.models[other]))
    }

    /// Whether sleeping models hold too much on one of its GPUs.
    fn residues_press(&self, id: usize) -> bool {
        let Some(most) = self.models[id].rules.residue_max_bytes else { return false };
        let mut held = vec![0_u64; self.free.len()];
        for model in self.models.iter().filter(|model| model.stage == Stage::Asleep) {
            for (gpu, residue) in model.rules.gpus.iter().zip(model.residue()) {
                held[gpu.0] = held[gpu.0].saturating_add(residue);
            }
        }
        self.models[id].rules.gpus.iter().any(|gpu| held[gpu.0] > most)
    }

    /// Sleeping models whose residues are what is missing on each GPU, the longest idle first; `None` if they are not
    /// enough.
    pub(super) fn sleepers_enough(&self, id: usize, missing: &[i128]) -> Option<Vec<usize>> {
        let is_one = |other: &usize| *other != id && self.share(id, *other) && self.may_hibernate(*other);
        let mut sleepers: Vec<usize> = (0..self.models.len()).filter(is_one).collect();
        sleepers.sort_by_key(|other| self.models[*other].last_used);
        let (mut missing, mut list) = (missing.to_vec(), Vec::new());
        for other in sleepers {
            if missing.iter().all(|missing| *missing <= 0) {
                break;
            }
            let model = &self.models[other];
            let mut frees = vec![0; missing.len()];
            for (gpu, residue) in model.rules.gpus.iter().zip(model.residue()) {
                frees[gpu.0] = i128::from(residue);
            }
            if frees.iter().zip(&missing).any(|(frees, missing)| *missing > 0 && *frees > 0) {
                subtract(&mut missing, &frees);
                list.push(other);
            }
        }
        let is_enough = missing.iter().all(|missing| *missing <= 0);
        (is_enough && !list.is_empty()).then_some(list)
    }

    /// A residue that stays is reported, and its engine resumed.
    pub(super) fn residue_measured(
        &mut self,
        id: usize,
        began: Time,
        before: Vec<u64>,
        last: Option<&[u64]>,
        free: &[u64],
    ) {
        self.measured(id, free);
        let freed = less(free, &before);
        let model = &self.models[id];
        let expected = model.expected_of_hibernation();
        let missing = expected.iter().zip(&freed).position(|(expected, freed)| freed < expected);
        let is_steady = last.is_some_and(|last| {
            last.iter().zip(free).all(|(last, free)| last.abs_diff(*free) <= STEADY_BYTES)
        });
        if missing.is_none() && (model.hibernation.residue.is_some() || is_steady) {
            return self.hibernated(id, freed);
        }
        if self.now < began.after(model.rules.limits.release) {
            let step = Step::AfterHibernation { before, last: Some(free.to_vec()) };
            self.models[id].stage = Stage::Step { step, began, retry_at: None };
            return self.retry(id);
        }
        let at = missing.unwrap_or_default();
        let (gpu, expected_bytes, freed_bytes) = (model.rules.gpus[at], expected[at], freed[at]);
        let event = Event::Shortfall { gpu, expected_bytes, freed_bytes };
        self.out.push(Effect::Report { model: ModelId(id), event });
        self.not_before_next_start(id, "it hibernates, but what it held was not released");
        self.begin(id, Step::Resume { wakes: false });
    }

    fn hibernated(&mut self, id: usize, freed: Vec<u64>) {
        let now = self.now;
        let model = &mut self.models[id];
        model.move_ended(Move::Hibernate, now);
        let hibernation = &mut model.hibernation;
        (hibernation.failures, hibernation.interruptions) = (0, 0);
        (hibernation.retry_at, hibernation.is_requested) = (None, false);
        hibernation.is_usual = true;
        if !model.is_disturbed {
            hibernation.residue = Some(freed.clone());
        }
        let event = Event::Hibernated { residue_bytes: freed };
        self.out.push(Effect::Report { model: ModelId(id), event });
        self.enter(id, Stage::Hibernating);
    }

    /// Memory is measured again before the wake, since the engine now holds its residue.
    pub(super) fn resumed(&mut self, id: usize, wakes: bool) {
        let now = self.now;
        self.models[id].move_ended(Move::Come(Activation::Resume), now);
        (self.models[id].hibernation.needs_more, self.models[id].is_doubtful) = (false, true);
        if wakes {
            self.begin(id, Step::FindMemory(Activation::Wake));
        } else {
            self.enter(id, Stage::Asleep);
        }
    }

    /// It hibernates on, and its requests are refused for a while.
    pub(super) fn not_resumed(&mut self, id: usize, wakes: bool, reason: &str) {
        if wakes {
            return self.no_memory(id, reason);
        }
        self.report_failed(id, reason);
        self.enter(id, Stage::Unknown);
    }

    pub(super) fn hibernation_failed(&mut self, id: usize, reason: &str) {
        let hibernation = &mut self.models[id].hibernation;
        hibernation.failures = hibernation.failures.saturating_add(1);
        hibernation.is_requested = false;
        self.hibernation_ended(id, reason);
    }

    /// Not by the engine's fault. That is forgiven a few times only: with a helper that always ends, others would wait for
    /// the memory for ever.
    pub(super) fn hibernation_interrupted(&mut self, id: usize, reason: &str) {
        let interruptions = &mut self.models[id].hibernation.interruptions;
        if *interruptions >= INTERRUPTIONS_MAX {
            return self.hibernation_failed(id, reason);
        }
        *interruptions += 1;
        self.hibernation_ended(id, reason);
    }

    /// It sleeps on, or hibernates after all: a probe finds out.
    fn hibernation_ended(&mut self, id: usize, reason: &str) {
        self.report_failed(id, reason);
        let now = self.now;
        let model = &mut self.models[id];
        model.move_failed();
        let pause = model.rules.pause(model.hibernation.failures).max(LEAST);
        model.hibernation.retry_at = Some(now.after(pause));
        self.enter(id, Stage::Unknown);
    }

    /// Found before anything changed.
    pub(super) fn cannot_hibernate(&mut self, id: usize, reason: &str) {
        self.not_before_next_start(id, reason);
        self.models[id].move_failed();
        self.enter(id, Stage::Asleep);
    }

    fn not_before_next_start(&mut self, id: usize, reason: &str) {
        let hint = "it sleeps on, and does not hibernate until its next start, or a reload";
        self.report_failed(id, &format!("{reason}; {hint}"));
        self.models[id].hibernation.impossible = Some(reason.to_owned());
    }

    pub(super) fn hibernate_requested(&mut self, id: usize) {
        let model = &mut self.models[id];
        if !model.can_hibernate() {
            let reason = match &model.hibernation.impossible {
                Some(why) if model.rules.can_hibernate => {
                    format!("it cannot hibernate until its next start, or a reload: {why}")
                }
                _ => "it cannot hibernate here: that needs [hibernate], a command, and an engine that sleeps"
                    .to_owned(),
            };
            return self.report_failed(id, &reason);
        }
        if model.stage == Stage::Hibernating {
            return;
        }
        model.wake_requested = None;
        model.ends_recall(true);
        model.stop_preloading();
        (model.hibernation.is_requested, model.hibernation.retry_at) = (true, None);
        self.changes += 1;
        if self.models[id].is_ready() {
            self.leave(id, Leave::Sleep);
        }
    }

    /// After another helper has become ready.
    pub(super) fn recheck(&mut self, id: usize) {
        if self.models[id].stage == Stage::Hibernating {
            self.enter(id, Stage::Unknown);
        } else if self.models[id].is_probed_later() {
            self.retry(id);
        }
    }
}
