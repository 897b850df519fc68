//! Events from outside of the rotation: commands, memory of other programs, repeated reports. Also simulations with
//! permanent demand.

use std::time::Duration;

use poorwill_rotation_policy::{EngineState, Gpu, Input, Look, ModelId, Rules, TaskOutcome};

use super::super::fixture::memory_of;
use super::{CARD, Engine, Faults, GIB, Occurrence, Request, Rng, Simulation, State, engine};

impl Simulation {
    /// With all events from outside.
    pub(crate) fn chaos(seed: u64, faults: Faults) -> Self {
        let mut rng = Rng::of(seed);
        let gpus = 1 + rng.below(2);
        let mut engines: Vec<Engine> =
            (0..2 + rng.below(4)).map(|_| engine(&mut rng, gpus, faults)).collect();
        for engine in &mut engines {
            let rules = &mut engine.rules;
            if rng.one_in(3) {
                (rules.can_restart, rules.can_sleep, rules.can_hibernate) = (false, true, false);
                (engine.state, engine.held_bytes) = (State::Asleep, engine.asleep_bytes);
            }
            rules.is_pinned = rng.one_in(6);
            let zero = |rng: &mut Rng, usual| if rng.one_in(6) { Duration::ZERO } else { usual };
            rules.residence_min = zero(&mut rng, rules.residence_min);
            rules.grace = zero(&mut rng, rules.grace);
            rules.turn_max = zero(&mut rng, rules.turn_max);
            rules.pause_min = zero(&mut rng, rules.pause_min);
            rules.limits.drain = zero(&mut rng, rules.limits.drain);
            rules.limits.find_memory =
                if rng.one_in(6) { Duration::from_millis(50) } else { rules.limits.find_memory };
            rules.limits.poll = zero(&mut rng, rules.limits.poll);
            rules.idle_max = if rng.one_in(6) { Some(Duration::ZERO) } else { rules.idle_max };
            rules.queue_max = usize::try_from(1 + rng.below(12)).unwrap();
        }
        let mut simulation = Self::of(seed, rng, faults, engines);
        (simulation.is_wild, simulation.had_chaos) = (true, true);
        simulation.at(Duration::ZERO, Occurrence::Command);
        simulation.at(Duration::ZERO, Occurrence::Outsider);
        simulation
    }

    /// Correct engines with permanent demand: one on two GPUs, and two on each. In half of the schedules some are hot.
    pub(crate) fn busy(seed: u64) -> Self {
        let mut rng = Rng::of(seed);
        let mut engines: Vec<Engine> = (0..5).map(|_| engine(&mut rng, 1, Faults::None)).collect();
        for (nth, engine) in engines.iter_mut().enumerate() {
            let gpus = [vec![Gpu(0), Gpu(1)], vec![Gpu(0)], vec![Gpu(1)]][nth.div_ceil(2)].clone();
            engine.awake_bytes = (45 + rng.below(20)) * GIB;
            let (rules, usual) = (&mut engine.rules, Rules::on(gpus));
            (rules.can_restart, rules.can_sleep, rules.idle_max) = (false, true, None);
            (rules.gpus, rules.wait_max, rules.queue_max) =
                (usual.gpus, Duration::from_secs(36_000), 1 << 20);
            (rules.need_bytes, rules.priority, rules.together) = (Some(engine.awake_bytes), 0, None);
            (engine.state, engine.held_bytes) = (State::Asleep, engine.asleep_bytes);
        }
        let mut simulation = Self::of(seed, rng, Faults::None, engines);
        simulation.is_busy = true;
        for model in (0..5).filter(|model| seed % 2 == 1 && (seed >> model).is_multiple_of(3)) {
            simulation.tell(Input::Hot(ModelId(model), true));
        }
        simulation
    }

    /// Ends events from outside, but not orders to keep models awake. Engines that only an operator can restart have been restarted.
    pub(super) fn calm(&mut self) {
        if !self.is_wild {
            return;
        }
        self.is_wild = false;
        self.outside.fill(0);
        for model in 0..self.engines.len() {
            self.tell(Input::Pin(ModelId(model), false));
            self.tell(Input::Hold(ModelId(model), false));
            self.reborn(model);
        }
    }

    /// The operator has restarted it and put it to sleep.
    pub(super) fn reborn(&mut self, model: usize) {
        let engine = &mut self.engines[model];
        if engine.rules.can_restart {
            return;
        }
        (engine.state, engine.held_bytes) = (State::Asleep, engine.asleep_bytes.min(GIB));
        (engine.is_gibberish, engine.is_proved) = (false, false);
        engine.asleep_bytes = engine.held_bytes;
        self.tell(Input::Lost(ModelId(model)));
        for request in self.running_of(model) {
            self.requests.remove(&request);
            self.tell(Input::Left(request));
        }
    }

    pub(super) fn command(&mut self) {
        let id = usize::try_from(self.rng.below(self.engines.len() as u64)).unwrap();
        let model = ModelId(id);
        let input = match self.rng.below(20) {
            0 | 1 => Input::Wake(model),
            10 | 11 => Input::Prepare(model),
            8 => Input::Hibernate(model),
            9 => Input::Recheck(model),
            2 | 3 => Input::Sleep(model),
            4 if self.doze(id) => Input::Slept(model),
            4 => Input::Restart(model),
            5 => Input::Pin(model, true),
            16 => Input::Hot(model, true),
            17 => Input::Hot(model, false),
            18 | 19 => Input::Hold(model, self.rng.below(2) == 0),
            12..=15 => Input::Looked { model, look: self.look() },
            _ => Input::Pin(model, false),
        };
        self.tell(input);
        let wait = self.rng.millis(0, 6000);
        self.at(wait, Occurrence::Command);
    }

    /// Most fail, so that some do so in sequence.
    fn look(&mut self) -> Look {
        match self.rng.below(8) {
            0 => Look::Awake,
            1 => Look::Flowing,
            2 => Look::Computing,
            3..=5 => Look::Late,
            _ => Look::Unwell("it answered 503".to_owned()),
        }
    }

    /// Another program puts an idle awake engine to sleep; false if there is none.
    fn doze(&mut self, model: usize) -> bool {
        let engine = &mut self.engines[model];
        let is_one = engine.state == State::Awake
            && self
                .policy
                .status(ModelId(model))
                .is_some_and(|status| status.is_ready && status.running == 0);
        if is_one && self.rng.one_in(2) {
            (engine.state, engine.held_bytes) = (State::Asleep, engine.asleep_bytes.min(engine.held_bytes));
            engine.is_proved = false;
            return true;
        }
        false
    }

    /// Another program takes or releases memory.
    pub(super) fn outsider(&mut self) {
        for gpu in 0..self.outside.len() {
            self.outside[gpu] = 0;
            if self.rng.one_in(3) {
                let most = self.free(Gpu(gpu)) / GIB;
                self.outside[gpu] = self.rng.below(most + 1) * GIB;
            }
        }
        let wait = self.rng.millis(500, 30_000);
        self.at(wait, Occurrence::Outsider);
    }

    /// Late and repeated reports.
    pub(super) fn repeat(&mut self) {
        let Some(most) = (self.old_ops.len() as u64).checked_sub(1).filter(|_| self.is_wild) else { return };
        let op = self.old_ops[usize::try_from(most - self.rng.below(most.min(20) + 1)).unwrap()];
        let outcome = match self.rng.below(5) {
            0 => TaskOutcome::Done,
            1 => memory_of(vec![CARD; 2]),
            2 => TaskOutcome::Canary(Ok(())),
            3 => TaskOutcome::Probed(EngineState::Awake),
            _ => TaskOutcome::Failed("late".to_owned()),
        };
        // They change nothing, so no effect follows.
        let effects = self.policy.step(self.now, Input::Ended { op, outcome });
        assert!(effects.is_empty(), "{}", self.story(&format!("{op:?} is unknown, and {effects:?}")));
    }

    /// No other model on its GPUs was selectable and waited for longer.
    pub(super) fn check_order(&self, model: usize) {
        let waited_since = |of: usize| {
            let is_its = |request: &&Request| request.model == of && !request.is_running;
            let kept = self.engines[of].kept_since.filter(|_| !self.running_of(of).is_empty());
            self.requests.values().filter(is_its).map(|request| request.arrived).chain(kept).min()
        };
        let Some(since) = waited_since(model) else { return };
        for (other, engine) in self.engines.iter().enumerate().filter(|(other, _)| *other != model) {
            let shares = engine.rules.gpus.iter().any(|gpu| self.engines[model].rules.gpus.contains(gpu));
            let could_come =
                waited_since(other).zip(self.down_since[other]).map(|(waits, down)| waits.max(down));
            let is_passed_over = shares && could_come.is_some_and(|could_come| could_come < since);
            assert!(!is_passed_over, "{}", self.story(&format!("{model} comes before {other}")));
        }
    }
}
