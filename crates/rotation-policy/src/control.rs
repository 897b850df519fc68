//! The engine's own sleep and wake, and what follows where such a call fails.
//!
//! A call that failed may have been done: a proxy was in between, or its answer was lost. So the engine is asked what it
//! does, and its memory is measured where it does not say. In the wanted state it goes on. A healthy one in the old state
//! is called once more, unless the first call took all of its time.

use super::Policy;
use super::messages::EngineState;
use super::moves::{LEAST, STEADY_BYTES};
use super::need_seen::less;
use super::step::{Activation, ControlCall, Inquiry, Stage, Step};

impl Policy {
    pub(super) fn control_call(&mut self, id: usize, wanted: EngineState, free: Vec<u64>) -> ControlCall {
        let model = &mut self.models[id];
        let wakes = wanted == EngineState::Awake;
        let is_repeated = wakes && std::mem::take(&mut model.repeats_wake);
        let limit = if wakes { model.rules.limits.wake } else { model.rules.limits.sleep };
        let until = self.now.after(limit.max(LEAST));
        ControlCall { wanted, free, counts_stops: false, until, is_repeated, keeps: false }
    }

    pub(super) fn fall_asleep(&mut self, id: usize, before: Vec<u64>, is_repeated: bool) {
        let keeps = self.models[id].running > 0;
        if keeps {
            self.keep_running(id);
        }
        let call = self.control_call(id, EngineState::Asleep, before);
        self.begin(id, Step::Sleep(ControlCall { is_repeated, keeps, ..call }));
    }

    pub(super) fn slept_as_asked(&mut self, id: usize, before: Vec<u64>) {
        self.begin(id, Step::After { before, last: None });
    }

    pub(super) fn inquire(&mut self, id: usize, call: &ControlCall, reason: &str) {
        let inquiry = Inquiry { call: call.clone(), reason: reason.to_owned(), by_memory: false };
        self.begin(id, Step::Inquire(inquiry));
    }

    pub(super) fn inquired(&mut self, id: usize, inquiry: Inquiry, found: EngineState) {
        let Inquiry { call, reason, .. } = inquiry;
        self.models[id].is_doubtful = true;
        let old = if call.wakes() { EngineState::Asleep } else { EngineState::Awake };
        if found == EngineState::Moving {
            self.begin(id, Step::Inquire(Inquiry { call, reason, by_memory: true }));
        } else if found == call.wanted {
            self.report_failed(id, &format!("{reason}; it was done nevertheless"));
            if call.wakes() {
                self.confirm(id, Activation::Wake, call.free);
            } else {
                self.slept_as_asked(id, call.free);
            }
        } else if found == old && call.keeps {
            self.not_kept(id, &reason, false);
        } else if found == old && !call.is_repeated && self.now < call.until {
            self.report_failed(id, &format!("{reason}; it is asked once more"));
            if !call.wakes() {
                return self.fall_asleep(id, call.free, true);
            }
            // Memory may be another's by now.
            let model = &mut self.models[id];
            model.repeats_wake = true;
            // Also one that came up without a request.
            model.is_preloading |= model.waiting_since().is_none() && !model.sleeps_after;
            self.begin(id, Step::FindMemory(Activation::Wake));
        } else {
            self.engine_failed(id, &reason);
        }
    }

    /// What a stopped engine freed hides what a wake beside its stop took. It is at most what it was known to need.
    pub(super) fn count_for_wakes(&mut self, id: usize) {
        let Some(freed) = self.models[id].promised() else { return };
        let gpus = self.models[id].rules.gpus.clone();
        for (_, model) in self.models.iter_mut().enumerate().filter(|(other, _)| *other != id) {
            let Stage::Step { step, .. } = &mut model.stage else { continue };
            let (Step::Wake(call) | Step::Inquire(Inquiry { call, .. })) = step else { continue };
            if !call.wakes() {
                continue;
            }
            for (gpu, free) in model.rules.gpus.iter().zip(&mut call.free) {
                let Some(at) = gpus.iter().position(|one| one == gpu) else { continue };
                *free = free.saturating_add(freed.get(at).copied().unwrap_or(0));
                call.counts_stops = true;
            }
        }
    }

    /// Whether the memory is that of an engine for which the call was done, or for which it was not.
    pub(super) fn weighed(&mut self, id: usize, inquiry: Inquiry, free: &[u64]) {
        self.measured(id, free);
        let (model, call) = (&self.models[id], &inquiry.call);
        let (expected, moved, old) = if call.wakes() {
            let half = model.need(Activation::Wake).map(|need| need.iter().map(|bytes| bytes / 2).collect());
            (half, less(&call.free, free), EngineState::Asleep)
        } else {
            (model.expected_release(), less(free, &call.free), EngineState::Awake)
        };
        let is_still = call.free.iter().zip(free).all(|(one, other)| one.abs_diff(*other) <= STEADY_BYTES);
        let is_enough = |(expected, moved): (&u64, &u64)| moved >= expected && *moved > STEADY_BYTES;
        let is_done = expected.as_ref().is_some_and(|all: &Vec<u64>| all.iter().zip(&moved).all(is_enough));
        // Too little for a wake, even if stops beside it freed all that is counted.
        let has_little = |(expected, moved): (&u64, &u64)| moved < expected;
        let is_little = expected.as_ref().is_some_and(|all| all.iter().zip(&moved).all(has_little));
        let is_still = is_still || call.counts_stops && is_little;
        let is_known = !model.is_disturbed || call.counts_stops;
        if is_done && is_known {
            let wanted = call.wanted;
            self.models[id].slept_by_memory = !inquiry.call.wakes();
            self.inquired(id, inquiry, wanted);
        } else if is_still && is_known {
            self.models[id].slept_by_memory = call.wakes();
            self.inquired(id, inquiry, old);
        } else {
            let why = "neither the engine nor its memory says whether it was done";
            self.engine_failed(id, &format!("{}; {why}", inquiry.reason));
        }
    }
}
