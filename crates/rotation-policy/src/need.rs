//! What a model is known to need of its GPUs, and who leaves where awake models need more than there is.
//!
//! The known need is the larger of what the operator said and the most that was ever seen, of any of its engines. Starts,
//! stops, sleeps and looks teach it. It never shrinks by itself: an operator who changes `need` has it learnt anew.
//! Another program that ends beside a sleep or a stop seems to be a part of it. So these teach only where looks do not see
//! the engine's processes, and what two of them in sequence released.

use super::messages::{Effect, Event, Refusal};
use super::moves::STEADY_BYTES;
use super::need_seen::{larger, less, smaller};
use super::rules::{Gpu, ModelId};
use super::step::{Activation, Stage, Step};
use super::time::Time;
use super::{ModelState, Policy};

/// A need that no free memory meets.
#[derive(Debug, Clone, Copy)]
pub(super) struct TooLarge {
    gpu: Gpu,
    need_bytes: u64,
    total_bytes: u64,
}

impl TooLarge {
    pub(super) fn reason(self) -> String {
        let Self { gpu, need_bytes, total_bytes } = self;
        format!(
            "it is known to need {} MiB of GPU {}, which has {} MiB; start it with less, or give it another GPU; a changed \
             `need` and a reload have it measured again",
            need_bytes >> 20,
            gpu.0,
            total_bytes >> 20
        )
    }
}

impl ModelState {
    /// What it needs of each of its GPUs in all; `None` if unknown.
    pub(super) fn known_need(&self) -> Option<Vec<u64>> {
        let configured = self.rules.need_bytes.map(|bytes| vec![bytes; self.rules.gpus.len()]);
        match (configured, &self.need.most) {
            (Some(configured), Some(most)) => Some(larger(&configured, most)),
            (Some(configured), None) => Some(configured),
            (None, most) => most.clone().filter(|_| !self.need.is_doubted),
        }
    }

    /// What has to be free on each of its GPUs; `None` if unknown.
    pub(super) fn need(&self, up: Activation) -> Option<Vec<u64>> {
        match up {
            // Memory is measured again before the wake, so a guess would only keep it from coming back.
            Activation::Resume if self.hibernation.needs_more => None,
            Activation::Resume => {
                let wake = self.need(Activation::Wake)?;
                Some(self.known_residue().map_or_else(|| wake.clone(), |residue| sum(&wake, &residue)))
            }
            Activation::Wake => {
                let Some(known) = self.known_need() else { return self.held.clone() };
                let besides = self.known_residue().map_or_else(|| known.clone(), |kept| less(&known, &kept));
                Some(self.held.as_ref().map_or_else(|| besides.clone(), |held| larger(held, &besides)))
            }
            Activation::Start => self.known_need(),
        }
    }

    /// What it may take on each of its GPUs; `None` if unknown or nothing.
    pub(super) fn promised(&self) -> Option<Vec<u64>> {
        let has_none = match &self.stage {
            Stage::Unknown | Stage::Cold | Stage::Asleep | Stage::Hibernating | Stage::Quarantined { .. } => {
                true
            }
            Stage::Step { step: Step::Probe | Step::FindMemory(_) | Step::AfterStop { .. }, .. } => true,
            Stage::Step { step, .. } => step.is_of_sleeper(),
            _ => false,
        };
        if has_none { None } else { self.known_need().or_else(|| self.held.clone()) }
    }

    /// What it is known to keep of each of its GPUs while others come.
    fn keeps(&self) -> Option<Vec<u64>> {
        self.promised().or_else(|| self.known_residue().filter(|_| self.stage == Stage::Asleep))
    }

    fn on(&self, gpu: usize, bytes: Option<Vec<u64>>) -> u64 {
        let at = self.rules.gpus.iter().position(|one| one.0 == gpu);
        at.zip(bytes).and_then(|(at, bytes)| bytes.get(at).copied()).unwrap_or_default()
    }
}

impl Policy {
    /// Takes over what its engine's processes hold, by their own figures.
    pub(super) fn seen_by_process(&mut self, id: usize, bytes: &[u64]) {
        let model = &mut self.models[id];
        model.need.is_by_process |= bytes.len() == model.rules.gpus.len();
        self.seen(id, bytes);
    }

    /// Takes over what a sleep or a stop of its engine released.
    pub(super) fn released_in_all(&mut self, id: usize, bytes: &[u64]) {
        let need = &mut self.models[id].need;
        if need.is_by_process {
            return;
        }
        if let Some(before) = need.released.replace(bytes.to_owned()) {
            self.seen(id, &smaller(&before, bytes));
        }
    }

    /// Takes over what its engine holds, or held, on each of its GPUs.
    pub(super) fn seen(&mut self, id: usize, bytes: &[u64]) {
        let model = &mut self.models[id];
        if bytes.len() != model.rules.gpus.len() {
            return;
        }
        let before = model.known_need();
        let most = model.need.most.as_deref().map_or_else(|| bytes.to_vec(), |most| larger(most, bytes));
        model.need.most = Some(most);
        let need = model.known_need();
        if need == before {
            return;
        }
        self.changes += 1;
        let (Some(before_bytes), Some(need_bytes)) = (model.need.reported.take().or(before), need) else {
            return;
        };
        let has_grown = |(need, before): (&u64, &u64)| *need > before.saturating_add(STEADY_BYTES);
        if !need_bytes.iter().zip(&before_bytes).any(has_grown) {
            model.need.reported = Some(before_bytes);
            return;
        }
        model.need.reported = Some(need_bytes.clone());
        let event = Event::Grew { before_bytes, need_bytes };
        self.out.push(Effect::Report { model: ModelId(id), event });
    }

    /// What a model may count on: what is free, within what all others on the GPU are known to need.
    pub(super) fn available(&self, id: usize, up: Activation, gpu: Gpu) -> Option<u64> {
        let free = self.free_bytes(gpu)?;
        let Some(total) = self.total.get(gpu.0).copied().flatten() else { return Some(free) };
        let others = self.models.iter().enumerate().filter(|(other, _)| *other != id);
        let kept = others.map(|(_, model)| model.on(gpu.0, model.keeps()));
        let model = &self.models[id];
        let own = model.known_residue().filter(|_| up == Activation::Wake);
        let kept = kept.fold(model.on(gpu.0, own), u64::saturating_add);
        Some(free.min(total.saturating_sub(kept)))
    }

    /// Whether one of its GPUs is smaller than what it needs.
    pub(super) fn too_large(&self, id: usize) -> Option<TooLarge> {
        let model = &self.models[id];
        let need = model.known_need()?;
        model.rules.gpus.iter().zip(need).find_map(|(gpu, need_bytes)| {
            let total_bytes = self.total.get(gpu.0).copied().flatten()?;
            (need_bytes > total_bytes).then_some(TooLarge { gpu: *gpu, need_bytes, total_bytes })
        })
    }

    /// Why it is refused while its GPUs have too little memory.
    pub(super) fn lack(&self, id: usize, until: Time) -> Refusal {
        match self.too_large(id) {
            Some(TooLarge { need_bytes, total_bytes, .. }) => {
                Refusal::TooLarge { need_bytes, total_bytes, until }
            }
            None => Refusal::NoMemory { until },
        }
    }

    /// Where awake models need more than their GPU has, those of least worth leave. One stays, however much it needs.
    pub(super) fn relieve(&mut self) {
        for gpu in 0..self.total.len() {
            let Some(total) = self.total[gpu] else { continue };
            let stays = |model: &ModelState| !model.stage.is_leaving() && model.promised().is_some();
            let needs = |model: &ModelState| i128::from(model.on(gpu, model.promised()));
            let is_on = |id: &usize| self.models[*id].rules.gpus.contains(&Gpu(gpu));
            let awake: Vec<usize> =
                (0..self.models.len()).filter(is_on).filter(|id| stays(&self.models[*id])).collect();
            let mut over = awake.iter().map(|id| needs(&self.models[*id])).sum::<i128>() - i128::from(total);
            if over <= 0 {
                continue;
            }
            let may_leave = |id: &usize| self.models[*id].is_ready() && !self.models[*id].is_held();
            let mut list: Vec<usize> = awake.iter().copied().filter(may_leave).collect();
            list.sort_by_key(|id| self.worth(*id));
            if list.len() == awake.len() {
                list.pop();
            }
            let mut leaving = Vec::new();
            for id in list {
                if over > 0 {
                    over -= needs(&self.models[id]);
                    leaving.push(id);
                }
            }
            // Those of more worth stay if the others suffice.
            for at in (0..leaving.len()).rev() {
                let back = needs(&self.models[leaving[at]]);
                if over + back <= 0 {
                    over += back;
                    leaving.remove(at);
                }
            }
            leaving.into_iter().for_each(|id| self.evict(id));
        }
    }
}

pub(super) fn sum(some: &[u64], more: &[u64]) -> Vec<u64> {
    some.iter().zip(more).map(|(some, more)| some.saturating_add(*more)).collect()
}
