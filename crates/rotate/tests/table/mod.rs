//! A table to play situations on: models whose engines do at once what they are told, unless a test says otherwise.

use std::collections::BTreeMap;
use std::time::Duration;

use poorwill_rotate::policy::{
    Effect, Event, Found, Gpu, Input, ModelId, OpId, Outcome, Policy, Refusal, RequestId, Rules, Task, Time,
};

pub(crate) const GIB: u64 = 1 << 30;
pub(crate) const CARD: u64 = 80 * GIB;

pub(crate) fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A machine whose engines are honest, and take no time.
pub(crate) struct Table {
    pub(crate) policy: Policy,
    pub(crate) now: Time,
    rules: Vec<Rules>,
    /// What each engine takes awake, and whether it is.
    pub(crate) needs: Vec<u64>,
    awake: Vec<bool>,
    /// What a task of a model is answered with instead, each once.
    pub(crate) instead: Vec<(usize, Task, Outcome)>,
    /// Tasks that end when they are told to, each once, and those of them that were given out.
    pub(crate) late: Vec<(usize, Task)>,
    open: Vec<(OpId, usize, Task)>,
    pub(crate) aborts: usize,
    pub(crate) tasks: Vec<(usize, Task)>,
    pub(crate) admitted: Vec<(u64, usize)>,
    pub(crate) refused: BTreeMap<u64, Refusal>,
    pub(crate) events: Vec<(usize, Event)>,
    next: u64,
}

impl Table {
    /// Engines that are asleep, and are known to take so much.
    pub(crate) fn of(needs: &[u64], change: impl Fn(usize, &mut Rules)) -> Self {
        let rules: Vec<Rules> = needs
            .iter()
            .enumerate()
            .map(|(model, need)| {
                let mut rules = Rules::on(vec![Gpu(0)]);
                (rules.need_bytes, rules.residence_min) = (Some(*need), Duration::ZERO);
                change(model, &mut rules);
                rules
            })
            .collect();
        let mut table = Self {
            policy: Policy::new(rules.clone()),
            now: Time::ZERO,
            awake: vec![false; needs.len()],
            needs: needs.to_vec(),
            rules,
            instead: Vec::new(),
            late: Vec::new(),
            open: Vec::new(),
            aborts: 0,
            tasks: Vec::new(),
            admitted: Vec::new(),
            refused: BTreeMap::new(),
            events: Vec::new(),
            next: 0,
        };
        table.tell(Input::Tick);
        table.tasks.clear();
        table
    }

    pub(crate) fn tell(&mut self, input: Input) {
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
                        inputs.push(Input::Ended { op, outcome: self.outcome(model.0, task) });
                    }
                    Effect::Tell { model, event } => self.events.push((model.0, event)),
                    Effect::Abort(_) => self.aborts += 1,
                    Effect::Cancel(_) => {}
                }
            }
        }
    }

    fn outcome(&mut self, model: usize, task: Task) -> Outcome {
        let is_said = |(other, of, _): &(usize, Task, Outcome)| (*other, *of) == (model, task);
        if let Some(at) = self.instead.iter().position(is_said) {
            return self.instead.remove(at).2;
        }
        match task {
            Task::Look => Outcome::Found(Found::Asleep),
            Task::Weigh => {
                let free = |gpu: &Gpu| {
                    let held = |other: &usize| self.awake[*other] && self.rules[*other].gpus.contains(gpu);
                    CARD - (0..self.needs.len()).filter(held).map(|other| self.needs[other]).sum::<u64>()
                };
                Outcome::Free(self.rules[model].gpus.iter().map(free).collect())
            }
            Task::Start | Task::Wake | Task::Stop | Task::Sleep => {
                self.awake[model] = matches!(task, Task::Start | Task::Wake);
                Outcome::Done
            }
            Task::Confirm => Outcome::Awake(self.awake[model]),
            Task::Canary => Outcome::Canary(Ok(())),
        }
    }

    /// The tasks that were late end.
    #[allow(dead_code, reason = "one of the two tests that have a table has no use for it")]
    pub(crate) fn finish(&mut self) {
        for (op, model, task) in std::mem::take(&mut self.open) {
            let outcome = self.outcome(model, task);
            self.tell(Input::Ended { op, outcome });
        }
    }

    /// A request of a model arrives, and is answered.
    #[allow(dead_code, reason = "one of the two tests that have a table has no use for it")]
    pub(crate) fn use_once(&mut self, model: usize) {
        let request = self.ask(model);
        self.answer(request);
    }

    /// A request of a model arrives.
    pub(crate) fn ask(&mut self, model: usize) -> u64 {
        let request = self.next;
        self.next += 1;
        self.tell(Input::Arrived { request: RequestId(request), model: ModelId(model) });
        request
    }

    pub(crate) fn answer(&mut self, request: u64) {
        self.tell(Input::Left(RequestId(request)));
    }

    /// Lets pass what it takes to see that a first sleep gives nothing more back.
    pub(crate) fn settle(&mut self) {
        self.pass(100);
    }

    /// Lets time pass, and the policy be called whenever it wants to.
    pub(crate) fn pass(&mut self, millis: u64) {
        let end = self.now.after(Duration::from_millis(millis));
        while let Some(at) = self.policy.wakeup().filter(|at| *at <= end) {
            self.now = at;
            self.tell(Input::Tick);
        }
        self.now = end;
    }

    pub(crate) fn stage(&self, model: usize) -> &'static str {
        self.policy.status(ModelId(model)).unwrap().stage
    }

    pub(crate) fn stages(&self) -> Vec<&'static str> {
        (0..self.needs.len()).map(|model| self.stage(model)).collect()
    }
}
