//! The policy's data about one model.

use std::time::Duration;

use super::demand::Demand;
use super::hot::Hot;
use super::kept::Kept;
use super::look_count::{GivenUp, Looks};
use super::need_seen::Need;
use super::queue::{Claim, Queue};
use super::rules::Rules;
use super::step::{Activation, Costs, Move, Stage, Step};
use super::time::Time;
use super::{Hibernation, ModelState};

impl ModelState {
    pub(super) fn new(rules: Rules) -> Self {
        let (is_pinned, is_preloading) = (rules.is_pinned, rules.preload);
        Self {
            rules,
            stage: Stage::Unknown,
            op: None,
            is_selected: false,
            selected_at: Time::ZERO,
            queue: Queue::default(),
            running: 0,
            kept: Kept::default(),
            flowed_at: Time::ZERO,
            last_used: Time::ZERO,
            wake_requested: None,
            is_pinned,
            hot: Hot::default(),
            is_preloading,
            is_displaced: false,
            sleeps_after: false,
            held: None,
            min_release: None,
            cold: None,
            need: Need::default(),
            hibernation: Hibernation::default(),
            is_disturbed: false,
            looks: Looks::default(),
            costs: Costs::default(),
            demand: Demand::default(),
            moving: None,
            failures: 0,
            was_restarted: false,
            is_to_stop: false,
            tries: 0,
            repeats_wake: false,
            slept_by_memory: false,
            is_doubtful: false,
            canary_beside: false,
            is_untested: false,
            given_up: GivenUp::default(),
            no_memory_until: None,
        }
    }

    /// It need not come up without a request any more.
    pub(super) fn stop_preloading(&mut self) {
        (self.is_preloading, self.sleeps_after) = (false, false);
    }

    /// Whether it comes up only to sleep again.
    pub(super) fn is_prepared(&self) -> bool {
        self.sleeps_after && self.waiting_since().is_none()
    }

    /// Whether a request, a command or a preload wants it up.
    pub(super) fn is_wanted(&self) -> bool {
        self.is_preloading || self.waiting_since().is_some()
    }

    /// Whether its engine is being started: from the search for memory to the measurement behind its first right answer.
    pub(super) fn is_starting(&self) -> bool {
        match &self.stage {
            Stage::Step { step: Step::FindMemory(up), .. } => *up == Activation::Start,
            Stage::Step { step: Step::Start { .. }, .. } => true,
            Stage::Step {
                step: Step::Confirm { activated } | Step::Canary { activated } | Step::Learn { activated },
                ..
            } => activated.as_ref().is_some_and(|activated| activated.up == Activation::Start),
            _ => false,
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        matches!(self.stage, Stage::Ready { .. })
    }

    /// Whether its task may change its GPUs' memory, or needs it unchanged.
    pub(super) fn is_moving(&self) -> bool {
        match &self.stage {
            Stage::Step { step: Step::Probe, .. } => false,
            // Also while it waits for a stop.
            Stage::Step { step, .. } if step.is_by_memory() => true,
            Stage::Step { retry_at, .. } => self.op.is_some() || retry_at.is_some(),
            _ => false,
        }
    }

    /// Whether its engine comes up, or is asked whether it is up.
    pub(super) fn comes(&self) -> bool {
        matches!(&self.stage, Stage::Step { step, .. } if step.is_activating())
    }

    /// The same without the measurement that says whether it is up, which no other change may disturb.
    pub(super) fn comes_beside_stops(&self) -> bool {
        self.comes() && !matches!(&self.stage, Stage::Step { step, .. } if step.is_by_memory())
    }

    /// Whether its engine is being stopped, or waits for that.
    pub(super) fn stops(&self) -> bool {
        matches!(&self.stage, Stage::Step { step: Step::Stop(_), .. })
    }

    pub(super) fn move_begins(&mut self, what: Move, now: Time) {
        self.moving = Some((what, now));
    }

    /// Measures it, unless another one began or it failed.
    pub(super) fn move_ended(&mut self, what: Move, now: Time) {
        let Some((_, began)) = self.moving.take().filter(|(begun, _)| *begun == what) else { return };
        let took = now.since(began);
        let cost = match what {
            Move::Come(Activation::Resume) => &mut self.costs.resume,
            Move::Come(Activation::Wake) => &mut self.costs.wake,
            Move::Come(Activation::Start) => &mut self.costs.start,
            Move::Drain => &mut self.costs.drain,
            Move::Leave => &mut self.costs.leave,
            Move::Hibernate => &mut self.costs.hibernate,
        };
        *cost = Some(cost.map_or(took, |before| before.saturating_add(took) / 2));
    }

    pub(super) fn move_failed(&mut self) {
        self.moving = None;
    }

    /// How long it takes to leave and come back, as far as measured.
    pub(super) fn swap_cost(&self, now: Time) -> Duration {
        let come = if self.rules.can_sleep { self.costs.wake } else { self.costs.start };
        let resume = self.costs.resume.filter(|_| self.will_hibernate(now));
        [come, resume, self.costs.leave].into_iter().flatten().fold(Duration::ZERO, Duration::saturating_add)
    }

    /// How long it takes to hibernate and come back, as far as measured.
    pub(super) fn hibernation_cost(&self) -> Duration {
        let Costs { hibernate, resume, .. } = self.costs;
        hibernate.unwrap_or_default().saturating_add(resume.unwrap_or_default())
    }

    /// How long it stays awake at least while it has requests. Few run while the last ones end, so that counts, too.
    pub(super) fn turn_min(&self, now: Time) -> Duration {
        let swap = self.swap_cost(now).saturating_add(self.costs.drain.unwrap_or_default());
        swap.saturating_mul(self.rules.turn_per_swap).min(self.rules.turn_max)
    }

    /// While others wait, how long it may be idle.
    pub(super) fn grace(&self) -> Duration {
        let grace = self.rules.grace;
        if self.demand.is_usually_within(grace) { grace } else { Duration::ZERO }
    }

    /// Its waiting and running requests.
    pub(super) fn requests(&self) -> usize {
        self.queue.len() + self.running
    }

    /// Whether its engine's state is still to be found out.
    pub(super) fn is_unknown(&self) -> bool {
        matches!(self.stage, Stage::Unknown | Stage::Step { step: Step::Probe, .. })
    }

    pub(super) fn is_idle(&self) -> bool {
        self.requests() == 0
    }

    /// Since when a request or command waits for it.
    pub(super) fn waiting_since(&self) -> Option<Time> {
        self.queue.oldest().into_iter().chain(self.wake_requested).chain(self.kept.since()).min()
    }

    /// What is served first of all that waits for it.
    pub(super) fn claim(&self) -> Option<Claim> {
        let command = self.wake_requested.map(|since| Claim { since, priority: self.rules.priority });
        let others = command.into_iter().chain(self.kept.claim());
        self.claim_of_queue().into_iter().chain(others).min_by_key(|claim| claim.rank())
    }

    pub(super) fn activation(&self) -> Option<Activation> {
        match self.stage {
            Stage::Hibernating => Some(Activation::Resume),
            Stage::Asleep => Some(Activation::Wake),
            Stage::Cold => Some(Activation::Start),
            _ => None,
        }
    }

    /// The first wake after a first sleep defines what later sleeps have to release. A wake that took less than half
    /// was measured beside other changes, and does not count.
    pub(super) fn woke(&mut self, taken: &[u64]) {
        let Some(held) = self.held.as_ref().filter(|_| self.min_release.is_none()) else { return };
        if held.iter().zip(taken).all(|(held, taken)| *taken >= held / 2) {
            self.min_release = Some(held.iter().zip(taken).map(|(held, taken)| *held.min(taken)).collect());
        }
    }

    /// What a sleep has to release, as far as known.
    pub(super) fn expected_release(&self) -> Option<Vec<u64>> {
        let half = || Some(self.held.as_ref()?.iter().map(|bytes| bytes / 2).collect());
        // What an engine keeps in its sleep is not known before the first one.
        let unknown = || Some(self.started_with()?.iter().map(|bytes| bytes / 2).collect());
        self.min_release.clone().or_else(half).or_else(unknown)
    }

    /// What its engine took at its start, or by its operator's word.
    fn started_with(&self) -> Option<Vec<u64>> {
        let configured = || Some(vec![self.rules.need_bytes?; self.rules.gpus.len()]);
        self.cold.clone().or_else(configured)
    }

    /// What others may count on once it has left; `None` if unknown.
    pub(super) fn frees(&self) -> Option<Vec<u64>> {
        if !self.rules.can_sleep {
            return self.known_need();
        }
        if self.held.is_some() {
            return self.need(Activation::Wake);
        }
        // A sleeping engine keeps a part.
        let likely = |bytes: &u64| bytes / 4 * 3;
        Some(self.known_need()?.iter().map(likely).collect())
    }

    /// What the end of its engine frees; `None` if unknown or nothing.
    pub(super) fn freed_by_end(&self) -> Option<Vec<u64>> {
        self.promised()?;
        self.cold.clone().or_else(|| self.frees())
    }
}
