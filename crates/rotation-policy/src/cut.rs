//! Turns that end in the middle of answers.
//!
//! An engine that can keep its running requests over a sleep leaves after a slice of time, and does not wait for their
//! end. They wait for its next wake like new requests, and go on where they were. What it answers them is held back from
//! the beginning of the sleep until its canary allows it.
//!
//! Promises: each [`Effect::Kept`] is followed by one [`Effect::Tested`], or by [`Effect::Abort`] where the requests can not go
//! on. An engine that cannot keep them, or failed to, has its requests end before its sleep. Kept requests wait at most
//! `wait_max`. While an engine keeps requests, it neither hibernates nor is stopped to free memory.

use std::time::Duration;

use super::messages::{Effect, Event};
use super::moves::LEAST;
use super::queue::Claim;
use super::rules::ModelId;
use super::step::{Leave, Move, Stage};
use super::time::Time;
use super::{ModelState, Policy};

/// A slice in multiples of a swap, of which they take a tenth of the time then.
const SLICE_PER_SWAP: u32 = 9;

/// By how much a request that a turn had no place for leads over what is kept since then: this part of `wait_max`.
const LEAD_PART: u32 = 4;

impl ModelState {
    /// How long its turn lasts while others wait; `None` where its requests end before it leaves.
    pub(super) fn slice(&self, now: Time) -> Option<Duration> {
        // Its canary needs a place beside what is kept.
        let may = self.rules.can_sleep && self.rules.running_max > 1 && !self.kept.is_impossible();
        let most = self.rules.slice_max.filter(|_| may)?;
        let usual = self.swap_cost(now).saturating_mul(SLICE_PER_SWAP);
        let is_known = self.costs.wake.is_some() && self.costs.leave.is_some();
        Some(if is_known { usual.min(most) } else { most }.max(self.slice_min(now)))
    }

    /// The shortest one, so that a lower priority also gets on. No request ends in a cut, so the end of the last ones does
    /// not count.
    pub(super) fn slice_min(&self, now: Time) -> Duration {
        let swap = self.swap_cost(now);
        let turn = swap.saturating_mul(self.rules.turn_per_swap).min(self.rules.turn_max);
        turn.max(swap).max(LEAST)
    }

    /// What its first waiting request waits with. Models with more requests than may run would otherwise take turns among
    /// themselves until those that others keep are too late. With no lead at all they would serve less.
    pub(super) fn claim_of_queue(&self) -> Option<Claim> {
        let claim = self.queue.first()?;
        let lead = self.rules.wait_max / LEAD_PART;
        let since = self.kept.since().map(|since| since.since_start().saturating_sub(lead));
        Some(Claim { since: claim.since.max(since.map_or(Time::ZERO, Time::from_start)), ..claim })
    }

    /// Something of its answers has come, or is to come from now on.
    pub(super) fn flows(&mut self, now: Time) {
        self.flowed_at = now;
        self.kept.set_stalled(Duration::ZERO);
    }

    /// How many requests it keeps in its sleep.
    pub(super) fn kept(&self) -> usize {
        if self.kept.since().is_some() { self.running } else { 0 }
    }

    /// How many requests its turn would serve.
    pub(super) fn waiting(&self) -> usize {
        self.queue.len() + self.kept()
    }
}

impl Policy {
    /// Whether its engine said nothing of what runs for as long as that may drain, in its turns alone. A client that reads
    /// nothing, or a request that hangs, would otherwise bring it back for ever.
    pub(super) fn is_stalled(&mut self, id: usize) -> bool {
        let model = &mut self.models[id];
        let Stage::Ready { since } = model.stage else { return false };
        if model.running == 0 {
            return false;
        }
        let before = if model.flowed_at < since { model.kept.stalled() } else { Duration::ZERO };
        let stalled = before.saturating_add(self.now.since(since.max(model.flowed_at)));
        model.kept.set_stalled(stalled);
        stalled >= model.rules.limits.drain
    }

    /// Its sleep begins with requests that run.
    pub(super) fn keep_running(&mut self, id: usize) {
        let running = self.requests.values().filter(|known| known.id == id && known.is_running);
        let priority = running.map(|known| known.priority).max();
        let (now, model) = (self.now, &mut self.models[id]);
        model.kept.begin(Claim { since: now, priority: priority.unwrap_or(model.rules.priority) });
        let requests = model.running;
        self.out.push(Effect::Kept(ModelId(id)));
        self.out.push(Effect::Report { model: ModelId(id), event: Event::Kept { requests } });
    }

    /// Its engine has not fallen asleep with them: they end before.
    pub(super) fn not_kept(&mut self, id: usize, reason: &str, is_impossible: bool) {
        let reason = format!("it did not keep its requests in a sleep, so it waits for their end: {reason}");
        self.report_failed(id, &reason);
        if is_impossible {
            self.models[id].kept.set_impossible();
        }
        self.goes_on(id);
        let until = self.now.after(self.models[id].rules.limits.drain);
        self.models[id].move_begins(Move::Drain, self.now);
        self.enter(id, Stage::Draining { until, was_aborted: false, then: Leave::Sleep });
    }

    /// It is up, and what it answers is as good as its canary.
    pub(super) fn goes_on(&mut self, id: usize) {
        let model = &mut self.models[id];
        model.kept.end();
        if !model.is_untested && model.kept.release() {
            self.out.push(Effect::Tested { model: ModelId(id), is_right: true });
        }
    }

    pub(super) fn tested(&mut self, id: usize, is_right: bool) {
        self.models[id].kept.release();
        self.out.push(Effect::Tested { model: ModelId(id), is_right });
    }

    /// The requests that it keeps cannot go on.
    pub(super) fn drop_kept(&mut self, id: usize) {
        // They run again, and the end of its trial says how good they are.
        if self.models[id].is_on_trial() {
            return;
        }
        let model = &mut self.models[id];
        model.kept.end();
        if model.kept.release() {
            self.out.push(Effect::Abort(ModelId(id)));
            self.changes += 1;
        }
    }

    /// When those that it keeps have waited for too long. A wake that goes on is waited for.
    pub(super) fn kept_until(&self, id: usize) -> Option<Time> {
        let model = &self.models[id];
        let rests = model.activation().is_some() || model.is_unknown();
        let since = model.kept.since().filter(|_| rests)?;
        Some(since.after(model.rules.wait_max))
    }

    pub(super) fn drop_kept_if_late(&mut self, id: usize) {
        if self.kept_until(id).is_some_and(|until| self.now >= until) {
            let (kept, limit) = (self.models[id].kept(), self.models[id].rules.wait_max);
            let reason = format!(
                "{kept} requests that it keeps in its sleep waited for {:.1} s and are aborted: raise `wait_max`, or \
                 let fewer models share its GPUs",
                limit.as_secs_f64()
            );
            self.report_failed(id, &reason);
            self.drop_kept(id);
        }
    }
}
