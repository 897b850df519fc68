//! The policy with mock engines that act at once, unless a test changes that.

use std::collections::BTreeMap;
use std::time::Duration;

use poorwill_rotation_policy::{
    Effect, EngineState, Event, Gpu, GpuMemory, Input, ModelId, OpId, Policy, Refusal, RequestId, Rules,
    Task, TaskOutcome, Time,
};

pub(crate) const GIB: u64 = 1 << 30;
pub(crate) const CARD: u64 = 80 * GIB;

pub(crate) fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// What a measurement finds on cards of this size.
pub(crate) fn memory_of(free: Vec<u64>) -> TaskOutcome {
    let of_one = |free_bytes| GpuMemory { free_bytes, total_bytes: CARD };
    TaskOutcome::Measured(free.into_iter().map(of_one).collect())
}

/// A machine whose engines are correct and take no time.
pub(crate) struct Fixture {
    pub(crate) policy: Policy,
    pub(crate) now: Time,
    rules: Vec<Rules>,
    /// What each engine takes awake, and whether it is awake.
    pub(crate) needs: Vec<u64>,
    pub(crate) awake: Vec<bool>,
    /// What each holds asleep, and whether it hibernates.
    residue: u64,
    hibernates: Vec<bool>,
    is_stopped: Vec<bool>,
    /// What probes find.
    pub(crate) state: EngineState,
    /// Outcomes to use instead for a model's task, each once.
    pub(crate) instead: Vec<(usize, Task, TaskOutcome)>,
    /// Tasks that end only when a test ends them, each once, and those that were started.
    pub(crate) late: Vec<(usize, Task)>,
    open: Vec<(OpId, usize, Task)>,
    /// What a wake and a sleep take, and when those under way end.
    pub(crate) swap_takes: Duration,
    due: Vec<(Time, OpId, usize, Task)>,
    pub(crate) aborts: usize,
    /// Canaries beside requests that are over: of which model, and whether it was right.
    pub(crate) tested: Vec<(usize, bool)>,
    /// Models whose requests were kept in a sleep.
    pub(crate) kept: Vec<usize>,
    pub(crate) tasks: Vec<(usize, Task)>,
    pub(crate) admitted: Vec<(u64, usize)>,
    pub(crate) refused: BTreeMap<u64, Refusal>,
    pub(crate) events: Vec<(usize, Event)>,
    next: u64,
}

impl Fixture {
    /// Sleeping engines with these known needs.
    #[allow(dead_code, reason = "one of the tests has a residue")]
    pub(crate) fn of(needs: &[u64], change: impl Fn(usize, &mut Rules)) -> Self {
        Self::found(needs, EngineState::Asleep, change)
    }

    /// Engines that are in this state at the start.
    #[allow(dead_code, reason = "one of the tests has a residue")]
    pub(crate) fn found(needs: &[u64], state: EngineState, change: impl Fn(usize, &mut Rules)) -> Self {
        Self::with_residue(0, needs, state, change)
    }

    /// Engines that hold this much while they sleep.
    pub(crate) fn with_residue(
        residue: u64,
        needs: &[u64],
        state: EngineState,
        change: impl Fn(usize, &mut Rules),
    ) -> Self {
        let rules: Vec<Rules> = needs
            .iter()
            .enumerate()
            .map(|(model, need)| {
                let mut rules = Rules::on(vec![Gpu(0)]);
                rules.need_bytes = Some(*need);
                (rules.residence_min, rules.grace) = (Duration::ZERO, Duration::ZERO);
                change(model, &mut rules);
                rules
            })
            .collect();
        let mut table = Self {
            policy: Policy::new(rules.clone()),
            now: Time::ZERO,
            awake: vec![state == EngineState::Awake; needs.len()],
            state,
            needs: needs.to_vec(),
            residue,
            hibernates: vec![false; needs.len()],
            is_stopped: vec![false; needs.len()],
            rules,
            instead: Vec::new(),
            late: Vec::new(),
            open: Vec::new(),
            swap_takes: Duration::ZERO,
            due: Vec::new(),
            aborts: 0,
            tested: Vec::new(),
            kept: Vec::new(),
            tasks: Vec::new(),
            admitted: Vec::new(),
            refused: BTreeMap::new(),
            events: Vec::new(),
            next: 0,
        };
        table.input(Input::Tick);
        table.tasks.clear();
        table
    }

    pub(crate) fn input(&mut self, input: Input) {
        let mut inputs = vec![input];
        while let Some(input) = inputs.pop() {
            for effect in self.policy.step(self.now, input) {
                match effect {
                    Effect::Admit { request, model } => self.admitted.push((request.0, model.0)),
                    Effect::Refuse { request, refusal, .. } => {
                        self.refused.insert(request.0, refusal);
                    }
                    Effect::Run { op, model, task, .. } => {
                        self.tasks.push((model.0, task));
                        if let Some(at) = self.late.iter().position(|late| *late == (model.0, task)) {
                            self.late.remove(at);
                            self.open.push((op, model.0, task));
                            continue;
                        }
                        let takes_time = matches!(task, Task::Wake | Task::Sleep | Task::SleepKeeping);
                        if takes_time && !self.swap_takes.is_zero() {
                            self.due.push((self.now.after(self.swap_takes), op, model.0, task));
                            continue;
                        }
                        inputs.push(Input::Ended { op, outcome: self.outcome(model.0, task) });
                    }
                    Effect::Report { model, event } => self.events.push((model.0, event)),
                    Effect::Abort(_) => self.aborts += 1,
                    Effect::Tested { model, is_right } => self.tested.push((model.0, is_right)),
                    Effect::Kept(model) => self.kept.push(model.0),
                    Effect::Cancel(op) => self.due.retain(|(_, one, ..)| *one != op),
                }
            }
        }
    }

    fn outcome(&mut self, model: usize, task: Task) -> TaskOutcome {
        let is_said = |(other, of, _): &(usize, Task, TaskOutcome)| (*other, *of) == (model, task);
        if let Some(at) = self.instead.iter().position(is_said) {
            return self.instead.remove(at).2;
        }
        match task {
            Task::Probe if self.hibernates[model] => TaskOutcome::Probed(EngineState::Hibernating),
            Task::Probe => TaskOutcome::Probed(self.state),
            Task::Measure => {
                let held = |other: usize| match (self.awake[other], self.hibernates[other]) {
                    (true, _) => self.needs[other] + self.residue,
                    (false, is_away) if is_away || self.is_stopped[other] => 0,
                    _ => self.residue,
                };
                let free = |gpu: &Gpu| {
                    let is_on = |other: &usize| self.rules[*other].gpus.contains(gpu);
                    CARD.saturating_sub((0..self.needs.len()).filter(is_on).map(held).sum())
                };
                memory_of(self.rules[model].gpus.iter().map(free).collect())
            }
            Task::Start | Task::Wake | Task::Stop | Task::Sleep | Task::SleepKeeping => {
                assert!(!self.hibernates[model] || task == Task::Stop, "{task:?} of a hibernating engine");
                self.hibernates[model] = false;
                self.is_stopped[model] = task == Task::Stop;
                self.awake[model] = matches!(task, Task::Start | Task::Wake);
                TaskOutcome::Done
            }
            Task::Hibernate | Task::Resume => {
                assert_eq!((self.awake[model], self.hibernates[model]), (false, task == Task::Resume));
                self.hibernates[model] = task == Task::Hibernate;
                TaskOutcome::Done
            }
            Task::Confirm => TaskOutcome::Awake(self.awake[model]),
            Task::Canary | Task::CanaryBeside => TaskOutcome::Canary(Ok(())),
        }
    }

    /// Ends the delayed tasks.
    #[allow(dead_code, reason = "not every test that has a table uses it")]
    pub(crate) fn finish(&mut self) {
        for (op, model, task) in std::mem::take(&mut self.open) {
            let outcome = self.outcome(model, task);
            self.input(Input::Ended { op, outcome });
        }
    }

    /// A request of a model arrives, and is answered.
    #[allow(dead_code, reason = "not every test that has a table uses it")]
    pub(crate) fn use_once(&mut self, model: usize) {
        let request = self.ask(model);
        self.answer(request);
    }

    /// A request of a model arrives.
    pub(crate) fn ask(&mut self, model: usize) -> u64 {
        self.ask_by(model, 0)
    }

    /// The same with a priority.
    pub(crate) fn ask_by(&mut self, model: usize, priority: i32) -> u64 {
        let request = self.next;
        self.next += 1;
        self.input(Input::Arrived { request: RequestId(request), model: ModelId(model), priority });
        request
    }

    pub(crate) fn answer(&mut self, request: u64) {
        self.input(Input::Left(RequestId(request)));
    }

    /// Passes the time in which a first sleep is measured.
    pub(crate) fn settle(&mut self) {
        self.pass(100);
    }

    /// Passes time, and calls the policy at each of its wakeups.
    pub(crate) fn pass(&mut self, millis: u64) {
        let end = self.now.after(Duration::from_millis(millis));
        loop {
            let due = self.due.iter().map(|(at, ..)| *at).min();
            let Some(at) = self.policy.wakeup().into_iter().chain(due).min().filter(|at| *at <= end) else {
                break;
            };
            self.now = at;
            match self.due.iter().position(|(due, ..)| *due == at) {
                Some(first) => {
                    let (_, op, model, task) = self.due.remove(first);
                    let outcome = self.outcome(model, task);
                    self.input(Input::Ended { op, outcome });
                }
                None => self.input(Input::Tick),
            }
        }
        self.now = end;
    }

    pub(crate) fn stage(&self, model: usize) -> &'static str {
        self.policy.status(ModelId(model)).unwrap().stage.as_str()
    }

    pub(crate) fn stages(&self) -> Vec<&'static str> {
        (0..self.needs.len()).map(|model| self.stage(model)).collect()
    }
}
