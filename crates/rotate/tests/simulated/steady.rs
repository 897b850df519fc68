//! Steady clients of engines that each take a whole GPU, in virtual time. Nothing is random and nothing fails.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use poorwill_rotate::policy::{
    Effect, EngineState, Gpu, Input, ModelId, OpId, Outcome, Policy, RequestId, Rules, Task, Time,
};

use super::{CARD, GIB};

const NEED: u64 = 70 * GIB;

/// What an engine takes to come and to leave.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cost {
    pub(crate) wake: Duration,
    pub(crate) sleep: Duration,
}

/// Sends the next request this long after the answer to the last.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Client {
    pub(crate) model: usize,
    pub(crate) gap: Duration,
    pub(crate) takes: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    Ask(usize),
    Answer(RequestId),
    End(OpId),
}

pub(crate) struct Steady {
    pub(crate) policy: Policy,
    costs: Vec<Cost>,
    clients: Vec<Client>,
    is_awake: Vec<bool>,
    now: Time,
    moments: BinaryHeap<Reverse<(Time, Moment)>>,
    /// The client of each request, and its arrival while it waits.
    requests: BTreeMap<RequestId, (usize, Option<Time>)>,
    ops: BTreeMap<OpId, (usize, Task)>,
    next_request: u64,
    pub(crate) swaps: u64,
    pub(crate) swapping: Duration,
    pub(crate) answered: u64,
    longest_wait: Duration,
}

impl Steady {
    /// On one GPU, all asleep.
    pub(crate) fn new(costs: &[Cost], clients: &[Client], change: impl Fn(usize, &mut Rules)) -> Self {
        let rules = (0..costs.len()).map(|model| {
            let mut rules = Rules::on(vec![Gpu(0)]);
            rules.need_bytes = Some(NEED);
            change(model, &mut rules);
            rules
        });
        let mut steady = Self {
            policy: Policy::new(rules.collect()),
            costs: costs.to_vec(),
            clients: clients.to_vec(),
            is_awake: vec![false; costs.len()],
            now: Time::ZERO,
            moments: BinaryHeap::new(),
            requests: BTreeMap::new(),
            ops: BTreeMap::new(),
            next_request: 0,
            swaps: 0,
            swapping: Duration::ZERO,
            answered: 0,
            longest_wait: Duration::ZERO,
        };
        for client in 0..clients.len() {
            steady.at(Duration::ZERO, Moment::Ask(client));
        }
        steady.tell(Input::Tick);
        steady
    }

    pub(crate) fn run(&mut self, time: Duration) {
        let end = self.now.after(time);
        loop {
            let moment = self.moments.peek().map(|Reverse((at, _))| *at);
            let Some(next) = moment.into_iter().chain(self.policy.wakeup()).min().filter(|at| *at <= end)
            else {
                break;
            };
            self.now = next;
            let due = if moment == Some(next) { self.moments.pop() } else { None };
            match due {
                Some(Reverse((_, moment))) => self.happen(moment),
                None => self.tell(Input::Tick),
            }
        }
        self.now = end;
    }

    /// Of requests that were admitted or still wait.
    pub(crate) fn longest_wait(&self) -> Duration {
        let waiting = self.requests.values().filter_map(|(_, arrived)| *arrived);
        waiting.map(|arrived| self.now.since(arrived)).chain([self.longest_wait]).max().unwrap_or_default()
    }

    fn at(&mut self, wait: Duration, moment: Moment) {
        self.moments.push(Reverse((self.now.after(wait), moment)));
    }

    fn happen(&mut self, moment: Moment) {
        match moment {
            Moment::Ask(client) => {
                let request = RequestId(self.next_request);
                self.next_request += 1;
                self.requests.insert(request, (client, Some(self.now)));
                self.tell(Input::Arrived { request, model: ModelId(self.clients[client].model) });
            }
            Moment::Answer(request) => {
                let (client, _) = self.requests.remove(&request).unwrap();
                self.answered += 1;
                self.at(self.clients[client].gap, Moment::Ask(client));
                self.tell(Input::Left(request));
            }
            Moment::End(op) => {
                let Some((model, task)) = self.ops.remove(&op) else { return };
                let outcome = self.outcome(model, task);
                self.tell(Input::Ended { op, outcome });
            }
        }
    }

    fn tell(&mut self, input: Input) {
        for effect in self.policy.step(self.now, input) {
            match effect {
                Effect::Admit { request, .. } => {
                    let (client, arrived) = self.requests.get_mut(&request).unwrap();
                    let takes = self.clients[*client].takes;
                    self.longest_wait = self.longest_wait.max(self.now.since(arrived.take().unwrap()));
                    self.at(takes, Moment::Answer(request));
                }
                Effect::Run { op, model, task, .. } => self.begin(op, model.0, task),
                Effect::Refuse { .. } | Effect::Abort(_) | Effect::Cancel(_) => {
                    panic!("{effect:?} at {:?}", self.now)
                }
                Effect::Report { .. } => {}
            }
        }
    }

    fn begin(&mut self, op: OpId, model: usize, task: Task) {
        let takes = match task {
            Task::Wake => self.costs[model].wake,
            Task::Sleep => self.costs[model].sleep,
            _ => Duration::from_millis(1),
        };
        self.swaps += u64::from(task == Task::Wake);
        self.swapping += takes;
        self.ops.insert(op, (model, task));
        self.at(takes, Moment::End(op));
    }

    fn outcome(&mut self, model: usize, task: Task) -> Outcome {
        match task {
            Task::Probe => Outcome::Probed(EngineState::Asleep),
            Task::Measure => {
                let awake = self.is_awake.iter().filter(|is_awake| **is_awake).count() as u64;
                Outcome::Free(vec![CARD - awake * NEED])
            }
            Task::Start | Task::Wake | Task::Stop | Task::Sleep => {
                self.is_awake[model] = matches!(task, Task::Start | Task::Wake);
                Outcome::Done
            }
            Task::Confirm => Outcome::Awake(self.is_awake[model]),
            Task::Canary => Outcome::Canary(Ok(())),
        }
    }
}
