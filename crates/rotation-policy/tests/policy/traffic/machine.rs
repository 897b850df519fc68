//! Correct engines on one GPU with traffic, in virtual time: clients that wait for each answer, and traces of requests
//! that come whether or not earlier ones were answered. Nothing fails.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::f64::consts::TAU;
use std::time::Duration;

use poorwill_rotation_policy::{
    Effect, EngineState, Gpu, GpuMemory, Input, ModelId, OpId, Policy, RequestId, Rules, Task, TaskOutcome,
    Time,
};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// Memory of a GPU, if no other is given.
const CARD: u64 = 80 * GIB;

/// What an engine takes to come and to leave, and of the GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cost {
    /// Of its wake, or its start if it cannot sleep.
    pub(crate) wake: Duration,
    /// Of its sleep, or its stop.
    pub(crate) sleep: Duration,
    pub(crate) canary: Duration,
    pub(crate) need_bytes: u64,
    /// What it still holds asleep.
    pub(crate) residue_bytes: u64,
    pub(crate) hibernate: Duration,
    pub(crate) resume: Duration,
}

impl Cost {
    /// Of an engine that takes the whole GPU.
    pub(crate) fn of_millis(wake: u64, sleep: u64, canary: u64) -> Self {
        let [wake, sleep, canary] = [wake, sleep, canary].map(Duration::from_millis);
        let (hibernate, resume) = (Duration::from_millis(1000), Duration::from_millis(600));
        Self { wake, sleep, canary, need_bytes: 70 * GIB, residue_bytes: 0, hibernate, resume }
    }
}

/// Sends the next request this long after the answer to the last.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Client {
    pub(crate) model: usize,
    pub(crate) gap: Duration,
    pub(crate) takes: Duration,
}

/// A request of a trace.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    at: Time,
    model: usize,
    takes: Duration,
}

/// Requests of a trace: Poisson's arrivals, models by Zipf's law, durations with a log-normal distribution.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    pub(crate) per_second: f64,
    pub(crate) models: u32,
    pub(crate) median: Duration,
    pub(crate) sigma: f64,
}

impl Load {
    pub(crate) fn trace(&self, seed: u64, time: Duration) -> Vec<Arrival> {
        let mut rng = fastrand::Rng::with_seed(seed);
        let shares: Vec<f64> = (1..=self.models).map(|rank| 1.0 / f64::from(rank)).collect();
        let mut at = Duration::ZERO;
        let mut trace = Vec::new();
        loop {
            at += Duration::from_secs_f64(-unit(&mut rng).ln() / self.per_second);
            if at >= time {
                return trace;
            }
            let mut left = unit(&mut rng) * shares.iter().sum::<f64>();
            let is_it = |share: &f64| {
                left -= share;
                left <= 0.0
            };
            let model = shares.iter().position(is_it).unwrap_or_default();
            let normal = (-2.0 * unit(&mut rng).ln()).sqrt() * (TAU * unit(&mut rng)).cos();
            // The longest one in a thousand would be as long as a turn.
            let takes = self.median.mul_f64((self.sigma * normal.clamp(-3.0, 3.0)).exp());
            trace.push(Arrival { at: Time::from_start(at), model, takes });
        }
    }
}

/// In (0, 1].
fn unit(rng: &mut fastrand::Rng) -> f64 {
    1.0 - rng.f64()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    Ask(usize),
    Trace,
    Answer(RequestId),
    Aborted(RequestId),
    End(OpId),
}

#[derive(Debug)]
struct Known {
    arrived: Time,
    takes: Duration,
    client: Option<usize>,
    running: Option<Running>,
}

#[derive(Debug, Clone, Copy)]
struct Running {
    model: usize,
    /// When its answer ends, if it is not cut before.
    ends: Time,
    /// Since when its answer is cut or held back.
    cut_at: Option<Time>,
}

pub(crate) struct Traffic {
    pub(crate) policy: Policy,
    costs: Vec<Cost>,
    clients: Vec<Client>,
    /// Those that have not come yet, the next one last.
    trace: Vec<Arrival>,
    is_awake: Vec<bool>,
    can_sleep: Vec<bool>,
    hibernates: Vec<bool>,
    /// Memory of the GPU.
    card_bytes: u64,
    pub(crate) most_awake: usize,
    now: Time,
    moments: BinaryHeap<Reverse<(Time, u64, Moment)>>,
    order: u64,
    requests: BTreeMap<RequestId, Known>,
    ops: BTreeMap<OpId, (usize, Task)>,
    next_request: u64,
    pub(crate) swaps: u64,
    pub(crate) swapping: Duration,
    /// The part in wakes and starts, until their first right answer.
    pub(crate) coming: Duration,
    pub(crate) answered: u64,
    /// What the answered requests took together.
    pub(crate) served: Duration,
    /// Of requests that were admitted or refused.
    waits: Vec<Duration>,
    pub(crate) refused: u64,
    /// Requests that ran for too long while their model was to leave; `None`: there must be none.
    pub(crate) aborted: Option<u64>,
    /// The longest time for which the answer to a request was cut.
    pub(crate) largest_gap: Duration,
}

impl Traffic {
    /// On one GPU, all asleep; those that cannot sleep are not there.
    pub(crate) fn new(
        costs: &[Cost],
        clients: &[Client],
        mut trace: Vec<Arrival>,
        change: impl Fn(usize, &mut Rules),
    ) -> Self {
        let rules: Vec<Rules> = costs
            .iter()
            .enumerate()
            .map(|(model, cost)| {
                let mut rules = Rules::on(vec![Gpu(0)]);
                rules.need_bytes = Some(cost.need_bytes);
                change(model, &mut rules);
                rules
            })
            .collect();
        trace.reverse();
        let mut traffic = Self {
            can_sleep: rules.iter().map(|rules| rules.can_sleep).collect(),
            policy: Policy::new(rules),
            costs: costs.to_vec(),
            clients: clients.to_vec(),
            trace,
            is_awake: vec![false; costs.len()],
            hibernates: vec![false; costs.len()],
            card_bytes: CARD,
            most_awake: 0,
            now: Time::ZERO,
            moments: BinaryHeap::new(),
            order: 0,
            requests: BTreeMap::new(),
            ops: BTreeMap::new(),
            next_request: 0,
            swaps: 0,
            swapping: Duration::ZERO,
            coming: Duration::ZERO,
            answered: 0,
            served: Duration::ZERO,
            waits: Vec::new(),
            refused: 0,
            aborted: None,
            largest_gap: Duration::ZERO,
        };
        for client in 0..clients.len() {
            traffic.after(Duration::ZERO, Moment::Ask(client));
        }
        traffic.follow_trace();
        traffic.tell(Input::Tick);
        traffic
    }

    /// On a GPU with this memory.
    pub(crate) fn on(self, card_bytes: u64) -> Self {
        Self { card_bytes, ..self }
    }

    /// With canaries beside requests, and requests that may be aborted.
    pub(crate) fn of_long_answers(mut self) -> Self {
        (0..self.costs.len()).for_each(|model| self.policy.set_canary_beside(ModelId(model), true));
        Self { aborted: Some(0), ..self }
    }

    pub(crate) fn run(&mut self, time: Duration) {
        let end = self.now.after(time);
        loop {
            let moment = self.moments.peek().map(|Reverse((at, ..))| *at);
            let Some(next) = moment.into_iter().chain(self.policy.wakeup()).min().filter(|at| *at <= end)
            else {
                break;
            };
            self.now = next;
            let due = if moment == Some(next) { self.moments.pop() } else { None };
            match due {
                Some(Reverse((_, _, moment))) => self.happen(moment),
                None => self.tell(Input::Tick),
            }
        }
        self.now = end;
    }

    /// Of all requests, shortest first. Those that still wait count with their wait until now.
    pub(crate) fn waits(&self) -> Vec<Duration> {
        let waiting = self.requests.values().filter(|known| known.running.is_none());
        let until_now = waiting.map(|known| self.now.since(known.arrived));
        let mut all: Vec<Duration> = self.waits.iter().copied().chain(until_now).collect();
        all.sort_unstable();
        all
    }

    fn after(&mut self, wait: Duration, moment: Moment) {
        self.at(self.now.after(wait), moment);
    }

    fn at(&mut self, at: Time, moment: Moment) {
        self.order += 1;
        self.moments.push(Reverse((at, self.order, moment)));
    }

    fn follow_trace(&mut self) {
        if let Some(next) = self.trace.last() {
            self.at(next.at, Moment::Trace);
        }
    }

    fn happen(&mut self, moment: Moment) {
        match moment {
            Moment::Ask(client) => {
                let Client { model, takes, .. } = self.clients[client];
                self.ask(model, takes, Some(client));
            }
            Moment::Trace => {
                let Some(Arrival { model, takes, .. }) = self.trace.pop() else { return };
                self.follow_trace();
                self.ask(model, takes, None);
            }
            Moment::Answer(request) => {
                let ends = |known: &Known| known.running.map(|running| running.ends);
                // It was cut or aborted meanwhile.
                if self.requests.get(&request).and_then(ends) != Some(self.now) {
                    return;
                }
                let known = self.requests.remove(&request).unwrap();
                self.count_gap(known.running);
                self.answered += 1;
                self.served += known.takes;
                if let Some(client) = known.client {
                    self.after(self.clients[client].gap, Moment::Ask(client));
                }
                self.tell(Input::Left(request));
            }
            Moment::Aborted(request) => {
                if let Some(client) = self.requests.remove(&request).and_then(|known| known.client) {
                    self.after(self.clients[client].gap, Moment::Ask(client));
                }
                self.tell(Input::Left(request));
            }
            Moment::End(op) => {
                let Some((model, task)) = self.ops.remove(&op) else { return };
                let outcome = self.outcome(model, task);
                self.tell(Input::Ended { op, outcome });
            }
        }
    }

    fn ask(&mut self, model: usize, takes: Duration, client: Option<usize>) {
        let request = RequestId(self.next_request);
        self.next_request += 1;
        let known = Known { arrived: self.now, takes, client, running: None };
        self.requests.insert(request, known);
        self.tell(Input::Arrived { request, model: ModelId(model), priority: 0 });
    }

    fn tell(&mut self, input: Input) {
        let now = self.now;
        for awake in (0..self.is_awake.len()).filter(|model| self.is_awake[*model]) {
            self.policy.flowed(ModelId(awake), now);
        }
        for effect in self.policy.step(now, input) {
            match effect {
                Effect::Admit { request, model } => {
                    let known = self.requests.get_mut(&request).unwrap();
                    let ends = self.now.after(known.takes);
                    known.running = Some(Running { model: model.0, ends, cut_at: None });
                    self.waits.push(self.now.since(known.arrived));
                    self.at(ends, Moment::Answer(request));
                }
                Effect::Run { op, model, task, .. } => self.begin(op, model.0, task),
                Effect::Refuse { request, .. } => {
                    let known = self.requests.remove(&request).unwrap();
                    assert!(known.client.is_none(), "a client is refused at {:?}", self.now);
                    self.waits.push(self.now.since(known.arrived));
                    self.refused += 1;
                }
                Effect::Abort(model) if self.aborted.is_some() => self.abort(model.0),
                Effect::Abort(_) | Effect::Cancel(_) => panic!("{effect:?} at {:?}", self.now),
                Effect::Kept(model) => self.running_of(model.0).for_each(|(_, one)| one.cut_at = Some(now)),
                Effect::Tested { model, .. } => self.release(model.0),
                Effect::Report { .. } => {}
            }
        }
    }

    fn running_of(&mut self, model: usize) -> impl Iterator<Item = (RequestId, &mut Running)> {
        let all = self.requests.iter_mut().filter_map(|(id, known)| Some((*id, known.running.as_mut()?)));
        all.filter(move |(_, running)| running.model == model)
    }

    fn abort(&mut self, model: usize) {
        let requests: Vec<RequestId> = self.running_of(model).map(|(id, _)| id).collect();
        self.aborted = self.aborted.map(|before| before + requests.len() as u64);
        for request in requests {
            self.requests.get_mut(&request).unwrap().running.as_mut().unwrap().ends = Time::ZERO;
            self.after(Duration::ZERO, Moment::Aborted(request));
        }
    }

    /// Answers that were cut go on where they were.
    fn go_on(&mut self, model: usize) {
        let now = self.now;
        let mut cut = Vec::new();
        for (request, running) in self.running_of(model) {
            let Some(cut_at) = running.cut_at else { continue };
            running.ends = now.after(running.ends.since(cut_at));
            cut.push((running.ends, request));
        }
        cut.into_iter().for_each(|(ends, request)| self.at(ends, Moment::Answer(request)));
    }

    fn count_gap(&mut self, running: Option<Running>) {
        if let Some(cut_at) = running.and_then(|running| running.cut_at) {
            self.largest_gap = self.largest_gap.max(self.now.since(cut_at));
        }
    }

    fn release(&mut self, model: usize) {
        let cut: Vec<Running> = self.running_of(model).map(|(_, running)| *running).collect();
        cut.into_iter().for_each(|running| self.count_gap(Some(running)));
        self.running_of(model).for_each(|(_, running)| running.cut_at = None);
    }

    fn begin(&mut self, op: OpId, model: usize, task: Task) {
        let cost = self.costs[model];
        let takes = match task {
            Task::Wake | Task::Start => cost.wake,
            Task::Sleep | Task::SleepKeeping | Task::Stop => cost.sleep,
            Task::Canary | Task::CanaryBeside => cost.canary,
            Task::Hibernate => cost.hibernate,
            Task::Resume => cost.resume,
            _ => Duration::from_millis(1),
        };
        self.swaps += u64::from(matches!(task, Task::Wake | Task::Start));
        self.swapping += takes;
        if matches!(task, Task::Wake | Task::Start | Task::Canary | Task::CanaryBeside) {
            self.coming += takes;
        }
        self.ops.insert(op, (model, task));
        self.after(takes, Moment::End(op));
    }

    fn outcome(&mut self, model: usize, task: Task) -> TaskOutcome {
        match task {
            Task::Probe if self.can_sleep[model] => TaskOutcome::Probed(EngineState::Asleep),
            Task::Probe => TaskOutcome::Probed(EngineState::Gone),
            Task::Measure => {
                let held = |(nth, cost): (usize, &Cost)| match (self.is_awake[nth], self.hibernates[nth]) {
                    (true, _) => cost.need_bytes + cost.residue_bytes,
                    (false, true) => 0,
                    (false, false) => cost.residue_bytes,
                };
                let held: u64 = self.costs.iter().enumerate().map(held).sum();
                let (free_bytes, total_bytes) = (self.card_bytes - held, self.card_bytes);
                TaskOutcome::Measured(vec![GpuMemory { free_bytes, total_bytes }])
            }
            Task::Start | Task::Wake | Task::Stop | Task::Sleep | Task::SleepKeeping => {
                self.is_awake[model] = matches!(task, Task::Start | Task::Wake);
                let awake = self.is_awake.iter().filter(|is_awake| **is_awake).count();
                self.most_awake = self.most_awake.max(awake);
                if task == Task::Wake {
                    self.go_on(model);
                }
                TaskOutcome::Done
            }
            Task::Hibernate | Task::Resume => {
                self.hibernates[model] = task == Task::Hibernate;
                TaskOutcome::Done
            }
            Task::Confirm => TaskOutcome::Awake(self.is_awake[model]),
            Task::Canary | Task::CanaryBeside => TaskOutcome::Canary(Ok(())),
        }
    }
}
