//! Which model comes next, and which ones leave for it.

use std::time::Duration;

use super::queue::Claim;
use super::rules::Gpu;
use super::step::{Activation, Leave, Move, Stage, Step, Then};
use super::time::Time;
use super::{ModelState, Policy};

pub(super) const NO_MEMORY: &str = "its GPUs have too little free memory";

/// A model without requests for so long leaves for one that is prepared.
const UNUSED: Duration = Duration::from_secs(120);
/// So that a quotient of microseconds is exact enough.
const RATIO_BITS: u32 = 32;

/// How a model gets its memory.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Space {
    Free,
    /// These sleep, and have to hibernate now.
    Hibernate(Vec<usize>),
    /// These have to leave now.
    Leave(Vec<usize>),
    /// Others have to leave, but not yet.
    Later,
    /// Models that are pinned or held leave too little.
    Never,
}

impl Policy {
    /// Evicts models that were idle for too long, and selects waiting ones, by priority and age. Each GPU activates one model
    /// at a time.
    pub(super) fn choose(&mut self) {
        if self.is_ending {
            return;
        }
        for id in 0..self.models.len() {
            if self.idled_out_at(id).is_some_and(|at| self.now >= at) {
                self.leave(id, Leave::Sleep);
            }
        }
        self.relieve();
        (0..self.models.len()).for_each(|id| self.call_off(id));
        self.recall_hot();
        let mut reserved = vec![false; self.free.len()];
        let mut waiting: Vec<(Claim, usize)> = Vec::new();
        for (id, model) in self.models.iter().enumerate() {
            let is_on_its_way = model.is_selected || (model.comes() && !model.is_probed_later());
            if is_on_its_way {
                reserve(&mut reserved, model);
            } else if let Some(claim) = model.claim().filter(|_| model.activation().is_some()) {
                waiting.push((claim, id));
            }
        }
        waiting.sort_by_key(|(claim, id)| (claim.rank(), *id));
        for (claim, id) in waiting {
            let model = &self.models[id];
            let is_free = model.rules.gpus.iter().all(|gpu| !reserved[gpu.0]);
            let is_short = model.no_memory_until.is_some_and(|until| self.now < until);
            if is_short {
                continue;
            }
            if !is_free {
                // No later model may overtake it on its other GPUs.
                reserve(&mut reserved, model);
                continue;
            }
            let Some(up) = model.activation() else { continue };
            match self.space_for(id, up, claim) {
                Space::Never if model.need(up).is_none() => {
                    self.no_memory(id, NO_MEMORY);
                    continue;
                }
                Space::Later => {}
                // The measurement may be old, so it is repeated before a refusal.
                Space::Free | Space::Never => self.select(id),
                Space::Hibernate(list) => {
                    self.select(id);
                    list.into_iter().for_each(|other| self.begin(other, Step::BeforeHibernation));
                }
                Space::Leave(list) => {
                    self.select(id);
                    list.into_iter().for_each(|other| self.evict(other));
                }
            }
            reserve(&mut reserved, &self.models[id]);
        }
        self.preload(&mut reserved);
        self.hibernate_due();
    }

    /// Selects models that come up without a request. For hot ones and those that sleep again, models leave that are
    /// unused.
    fn preload(&mut self, reserved: &mut [bool]) {
        for id in 0..self.models.len() {
            let model = &self.models[id];
            let Some(up) = model.activation().filter(|_| model.is_preloading) else { continue };
            // Engines that were not probed yet may have the memory.
            let is_unknown = |other: usize| self.share(id, other) && self.models[other].is_unknown();
            let is_free = model.rules.gpus.iter().all(|gpu| !reserved[gpu.0]);
            if !is_free || (0..self.models.len()).any(is_unknown) {
                continue;
            }
            let claim = Claim { since: self.now, priority: model.rules.priority };
            let takes_unused = model.is_prepared() || model.is_hot();
            match self.space_for(id, up, claim) {
                Space::Free => self.select(id),
                Space::Leave(list) if takes_unused && self.may_leave_unused(id, up, &list) => {
                    self.select(id);
                    list.into_iter().for_each(|other| self.evict(other));
                }
                Space::Hibernate(list) if takes_unused && list.iter().all(|other| self.is_unused(*other)) => {
                    self.select(id);
                    list.into_iter().for_each(|other| self.begin(other, Step::BeforeHibernation));
                }
                _ => {
                    self.models[id].stop_preloading();
                    continue;
                }
            }
            reserve(reserved, &self.models[id]);
        }
    }

    /// A model that comes up only to sleep again, or that is hot and not held, makes way for one that is waited for.
    fn call_off(&mut self, id: usize) {
        let now = self.now;
        let waits = |other: usize| {
            let model = &self.models[other];
            let is_short = model.no_memory_until.is_some_and(|until| now < until);
            other != id && model.activation().is_some() && model.waiting_since().is_some() && !is_short
        };
        let is_in_the_way = (0..self.models.len()).any(|other| self.share(id, other) && waits(other));
        let model = &self.models[id];
        let may = model.is_prepared() || model.is_recalled() && !model.is_held();
        if !may || !is_in_the_way {
            return;
        }
        match &self.models[id].stage {
            Stage::Cold => {
                let model = &mut self.models[id];
                model.is_selected = false;
                model.stop_preloading();
                self.changes += 1;
            }
            // Its measurement finds that it is not wanted.
            Stage::Step { step: Step::FindMemory(_), .. } => self.models[id].stop_preloading(),
            Stage::Step { step: Step::Start { .. }, .. } => {
                let (now, model) = (self.now, &mut self.models[id]);
                model.is_selected = false;
                model.stop_preloading();
                model.made_way(now);
                self.begin(id, Step::Stop(Then::Cold));
            }
            // It is up in a moment.
            _ => {}
        }
    }

    /// Whether nothing that is in use leaves, and all that they may have would be enough.
    fn may_leave_unused(&self, id: usize, up: Activation, list: &[usize]) -> bool {
        let model = &self.models[id];
        let mut missing = vec![0; self.free.len()];
        for (gpu, need) in model.rules.gpus.iter().zip(model.need(up).unwrap_or_default()) {
            missing[gpu.0] = i128::from(need) - i128::from(self.available(id, up, *gpu).unwrap_or_default());
        }
        for other in list.iter().map(|other| &self.models[*other]) {
            let has = other.promised().unwrap_or_else(|| vec![u64::MAX; other.rules.gpus.len()]);
            for (gpu, bytes) in other.rules.gpus.iter().zip(has) {
                missing[gpu.0] -= i128::from(bytes);
            }
        }
        missing.iter().all(|missing| *missing <= 0) && list.iter().all(|other| self.is_unused(*other))
    }

    /// Whether it can sleep, is not hot, and no model of its set had a request for some time.
    fn is_unused(&self, id: usize) -> bool {
        let rules = &self.models[id].rules;
        let is_unused = |model: &ModelState| model.is_idle() && self.now >= model.last_used.after(UNUSED);
        let mut of_set = self.models.iter().filter(|model| model.rules.is_together_with(rules));
        let may_sleep = rules.can_sleep && !rules.preload && !self.models[id].is_hot();
        may_sleep && is_unused(&self.models[id]) && of_set.all(is_unused)
    }

    fn select(&mut self, id: usize) {
        let now = self.now;
        let model = &mut self.models[id];
        (model.is_selected, model.selected_at) = (true, now);
        self.changes += 1;
    }

    pub(super) fn evict(&mut self, id: usize) {
        self.models[id].left_for_others();
        self.leave(id, Leave::Cut);
    }

    /// Stops admitting requests, and leaves when the running ones have ended, or are kept.
    pub(super) fn leave(&mut self, id: usize, then: Leave) {
        let model = &self.models[id];
        let cuts = model.slice(self.now).is_some();
        let is_stalled = then == Leave::Cut && cuts && self.is_stalled(id);
        let model = &self.models[id];
        let (then, drain) = match then {
            Leave::Cut if is_stalled => (Leave::Sleep, Duration::ZERO),
            Leave::Cut if cuts => (then, Duration::ZERO),
            Leave::Sleep | Leave::Cut if !model.rules.can_sleep => (Leave::Stop, model.rules.limits.drain),
            Leave::Cut => (Leave::Sleep, model.rules.limits.drain),
            _ => (then, model.rules.limits.drain),
        };
        let until = self.now.after(drain);
        self.models[id].move_begins(Move::Drain, self.now);
        self.enter(id, Stage::Draining { until, was_aborted: false, then });
    }

    /// Awake models on its GPUs.
    pub(super) fn holders(&self, id: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.models.len())
            .filter(move |other| *other != id && self.share(id, *other) && self.models[*other].is_ready())
    }

    pub(super) fn share(&self, one: usize, other: usize) -> bool {
        self.models[one].rules.shares_with(&self.models[other].rules)
    }

    /// Those of least worth leave first: idle before busy, then hot ones last, then those with few requests. Among equals
    /// it is what a swap takes over the time until the next request.
    pub(super) fn worth(&self, id: usize) -> (bool, bool, usize, u128, Time) {
        let model = &self.models[id];
        if model.rules.turn_per_swap == 0 {
            // Time alone counts, unless a fleet wants some awake.
            let is_busy = !model.is_idle() && self.models.iter().any(ModelState::is_hot);
            return (is_busy, model.is_hot(), 0, 0, model.last_used);
        }
        // A set is used as a whole.
        let of_set = || {
            let is_of_set =
                |other: &&ModelState| other.is_ready() && model.rules.is_together_with(&other.rules);
            self.models.iter().filter(is_of_set).chain([model])
        };
        let requests = of_set().map(ModelState::requests).max().unwrap_or_default();
        let next_in = of_set().map(|other| other.demand.next_in(self.now)).min().unwrap_or_default();
        let weight = model.rules.keep_weight;
        let cost = model.swap_cost(self.now).as_micros().max(1) * u128::from(weight);
        let requests = requests.saturating_mul(usize::try_from(weight).unwrap_or(usize::MAX));
        let per_time = (cost << RATIO_BITS) / next_in.as_micros().max(1);
        (requests > 0, model.is_hot(), requests, per_time, model.last_used)
    }

    pub(super) fn space_for(&self, id: usize, up: Activation, claim: Claim) -> Space {
        let mut holders: Vec<usize> = self.holders(id).collect();
        holders.sort_by_key(|other| self.worth(*other));
        let model = &self.models[id];
        let Some(need) = model.need(up) else {
            // Without a known need, it gets its GPUs alone.
            let is_kept = holders.iter().any(|other| self.models[*other].is_held());
            return if is_kept { Space::Never } else { self.when(holders, claim) };
        };
        if self.too_large(id).is_some() {
            return Space::Never;
        }
        let mut missing = vec![0; self.free.len()];
        for (gpu, need) in model.rules.gpus.iter().zip(need) {
            // Unmeasured memory is measured before any model leaves for it.
            let free = self.available(id, up, *gpu).unwrap_or(need);
            missing[gpu.0] = i128::from(need) - i128::from(free);
        }
        // Models that are leaving count as gone; memory is measured before the start or wake.
        for other in (0..self.models.len()).filter(|other| *other != id && self.share(id, *other)) {
            if self.models[other].stage.is_leaving() {
                subtract(&mut missing, &self.frees_on(other));
            }
        }
        let sleepers = self.sleepers_enough(id, &missing);
        let leavers = self.leavers(id, holders, &mut missing);
        let is_cheaper =
            |sleepers: &[usize]| leavers.as_ref().is_some_and(|list| self.is_cheaper_than(list, sleepers));
        match sleepers.or_else(|| self.sleepers_enough(id, &missing)) {
            Some(sleepers) if !is_cheaper(&sleepers) => Space::Hibernate(sleepers),
            _ => leavers.map_or(Space::Never, |list| self.when(list, claim)),
        }
    }

    /// Those that have to leave; `None` if those that are held leave too little. Of `missing` it leaves what they do not free.
    fn leavers(&self, id: usize, holders: Vec<usize>, missing: &mut [i128]) -> Option<Vec<usize>> {
        let mut list: Vec<(usize, Vec<i128>)> = Vec::new();
        for other in holders {
            if missing.iter().all(|missing| *missing <= 0) {
                break;
            }
            let frees = self.frees_on(other);
            let helps = frees.iter().zip(&*missing).any(|(frees, missing)| *missing > 0 && *frees > 0);
            if helps && !self.models[other].is_held() {
                subtract(missing, &frees);
                list.push((other, frees));
            }
        }
        if missing.iter().any(|missing| *missing > 0) {
            // By the estimates this is too little. They may be wrong, so all models that may leave do.
            let is_missing = |gpu: &Gpu| missing[gpu.0] > 0;
            let (kept, all): (Vec<usize>, Vec<usize>) = self
                .holders(id)
                .filter(|other| self.models[*other].rules.gpus.iter().any(is_missing))
                .chain(list.into_iter().map(|(other, _)| other))
                .partition(|other| self.models[*other].is_held());
            // A held model is in the way, and the known memory of the others is too little.
            let is_never = !kept.is_empty() && all.iter().all(|other| self.models[*other].held.is_some());
            return (!is_never).then_some(all);
        }
        // Keeps the most recently used ones if the others suffice.
        let mut at = list.len();
        while at > 0 {
            at -= 1;
            let fits = missing.iter().zip(&list[at].1).all(|(missing, frees)| missing + frees <= 0);
            if fits {
                let (_, frees) = list.remove(at);
                missing.iter_mut().zip(frees).for_each(|(missing, frees)| *missing += frees);
            }
        }
        Some(list.into_iter().map(|(other, _)| other).collect())
    }

    /// Whether these idle models are cheaper to bring back than those sleeping ones are once they hibernate, each for the
    /// time until its next request.
    fn is_cheaper_than(&self, list: &[usize], sleepers: &[usize]) -> bool {
        let per_time = |id: &usize, cost: Duration| {
            (cost.as_micros() << RATIO_BITS) / self.models[*id].demand.next_in(self.now).as_micros().max(1)
        };
        let leaving = list.iter().map(|id| per_time(id, self.models[*id].swap_cost(self.now)));
        let hibernating = sleepers.iter().map(|id| per_time(id, self.models[*id].hibernation_cost()));
        let may_all = list.iter().map(|id| &self.models[*id]).all(|model| model.is_idle() && !model.is_hot());
        may_all && !list.is_empty() && leaving.sum::<u128>() < hibernating.sum()
    }

    /// On each GPU of the machine; unlimited where unknown.
    fn frees_on(&self, id: usize) -> Vec<i128> {
        let model = &self.models[id];
        let mut frees = vec![0; self.free.len()];
        let known = model
            .residue_leaving()
            .or_else(|| model.frees())
            .unwrap_or_else(|| vec![u64::MAX; model.rules.gpus.len()]);
        for (gpu, bytes) in model.rules.gpus.iter().zip(known) {
            frees[gpu.0] = i128::from(bytes);
        }
        frees
    }

    fn when(&self, mut list: Vec<usize>, claim: Claim) -> Space {
        list.sort_unstable();
        list.dedup();
        if list.is_empty() {
            return Space::Free;
        }
        let may_all =
            list.iter().all(|other| self.may_leave_at(*other, claim).is_some_and(|at| self.now >= at));
        if may_all { Space::Leave(list) } else { Space::Later }
    }

    /// When it has to leave for what waits, if nothing changes.
    pub(super) fn may_leave_at(&self, id: usize, claim: Claim) -> Option<Time> {
        let model = &self.models[id];
        let Stage::Ready { since } = model.stage else { return None };
        let settled = since.after(model.rules.residence_min);
        if model.is_on_trial() && model.slice(self.now).is_some() {
            // It leaves after that, and has admitted what waits.
            return None;
        }
        let turn_over = self.turn_over_at(id, since, claim);
        // A steady client is idle between two requests.
        let idled_out = model.last_used.after(model.grace());
        let idled_out = self.batched_until(id).map_or(idled_out, |until| idled_out.max(until));
        Some(settled.max(if model.is_idle() { idled_out.min(turn_over) } else { turn_over }))
    }

    /// Where several models queue for a swap, how long an idle one stays for its next requests. Each of them can still come
    /// within a turn then, by swaps of what they cost, one after the other.
    fn batched_until(&self, id: usize) -> Option<Time> {
        let model = &self.models[id];
        let turn = model.turn_min(self.now);
        if !model.demand.is_known_within(turn) {
            return None;
        }
        let waits = |other: &usize| !self.models[*other].is_ready() && self.share(id, *other);
        let claim = |other: usize| Some((self.models[other].claim()?, other));
        let mut waiting: Vec<(Claim, usize)> =
            (0..self.models.len()).filter(waits).filter_map(claim).collect();
        waiting.sort_by_key(|(claim, other)| (claim.rank(), *other));
        let mut before = Duration::ZERO;
        let latest = waiting.iter().map(|(claim, other)| {
            let longest = turn.saturating_sub(before).saturating_sub(claim.lead_over(model.rules.priority));
            before = before.saturating_add(self.models[*other].swap_cost(self.now));
            claim.since.after(longest)
        });
        latest.min().filter(|_| waiting.len() > 1)
    }

    /// When its turn ends if it has requests, and is awake since then.
    fn turn_over_at(&self, id: usize, since: Time, claim: Claim) -> Time {
        let model = &self.models[id];
        let lead = claim.lead_over(model.rules.priority);
        if let Some(slice) = model.slice(self.now) {
            return since.after(slice.saturating_sub(lead).max(model.slice_min(self.now)));
        }
        let turn_max = model.rules.turn_max.saturating_sub(lead);
        if model.rules.turn_per_swap == 0 {
            return claim.since.after(turn_max);
        }
        let least = since.after(model.turn_min(self.now));
        let full = claim.since.max(model.selected_at).after(turn_max).max(least);
        // Idle for a moment is not done.
        let own = model.requests().max(1);
        // More than it may run at a time fill no other engine, either.
        let others = self.waiting_beside(id).min(model.rules.running_max);
        if others > own { least } else { full }
    }

    /// Requests that wait for other models on its GPUs.
    fn waiting_beside(&self, id: usize) -> usize {
        let waits = |other: &usize| !self.models[*other].is_ready() && self.share(id, *other);
        (0..self.models.len()).filter(waits).map(|other| self.models[other].waiting()).sum()
    }

    /// When it leaves because it is idle.
    pub(super) fn idled_out_at(&self, id: usize) -> Option<Time> {
        let model = &self.models[id];
        let Stage::Ready { since } = model.stage else { return None };
        let may = model.is_idle() && !model.is_held() && !model.is_hot();
        let idle_max = model.rules.idle_max.filter(|_| may)?;
        Some(model.last_used.after(idle_max).max(since.after(model.rules.residence_min)))
    }
}

fn reserve(reserved: &mut [bool], model: &ModelState) {
    for gpu in &model.rules.gpus {
        reserved[gpu.0] = true;
    }
}

pub(super) fn subtract(missing: &mut [i128], frees: &[i128]) {
    missing.iter_mut().zip(frees).for_each(|(missing, frees)| *missing -= frees);
}
