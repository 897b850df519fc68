//! Machines with GPUs, engines and clients, in virtual time. Engines may have faults; the checks compare the policy
//! with the simulated device state.

mod chaos;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Duration;

use poorwill_rotation_policy::{
    Effect, EngineState, Event, Gpu, Input, Limits, ModelId, OpId, Policy, Refusal, RequestId, Rules,
    StageName, Task, TaskOutcome, Time,
};

use super::fixture::memory_of;

const GIB: u64 = 1 << 30;
const CARD: u64 = 80 * GIB;

/// Which faults engines have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Faults {
    None,
    /// A reported sleep that releases nothing.
    Keeps,
    /// One that releases half.
    Half,
    /// A reported wake that did not happen.
    Dozes,
    /// A wake after which it generates garbage.
    Gibberish,
    /// Tasks that never end.
    Hangs,
    /// Tasks that fail.
    Fails,
    /// Engines that die.
    Crashes,
    /// Memory that grows with every cycle.
    Leaks,
    /// Requests that do not end after an abort.
    Clings,
    /// Engines that cannot hibernate.
    Refuses,
    /// Hibernations that release nothing.
    Stays,
    /// Hibernating engines that do not come back.
    Sticks,
    /// Sleeps and wakes that fail or are not answered, whether they were done or not. Each second one is right.
    Flaky,
    /// Engines that keep no requests in a sleep, or lose some.
    CannotKeep,
    All,
}

impl Faults {
    pub(crate) const EACH: [Self; 14] = [
        Self::Keeps,
        Self::Half,
        Self::Dozes,
        Self::Gibberish,
        Self::Hangs,
        Self::Fails,
        Self::Crashes,
        Self::Leaks,
        Self::Clings,
        Self::Refuses,
        Self::Stays,
        Self::Sticks,
        Self::Flaky,
        Self::CannotKeep,
    ];
}

/// Random numbers from a seed.
struct Rng(fastrand::Rng);

impl Rng {
    fn of(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0.u64(..end)
    }

    fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.0.u64(from..=to))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Gone,
    Awake,
    Asleep,
    Hibernating,
}

/// The real state of an engine.
struct Engine {
    rules: Rules,
    state: State,
    /// What it takes awake, and asleep, on each of its GPUs.
    awake_bytes: u64,
    asleep_bytes: u64,
    held_bytes: u64,
    is_gibberish: bool,
    /// Whether its canary was right since its last wake or start.
    is_proved: bool,
    /// Whether its canary runs beside requests, and its end was not reported yet.
    is_on_trial: bool,
    /// Whether what its requests are answered is held back, and since when they are kept.
    is_held_back: bool,
    kept_since: Option<Time>,
    /// Whether its last sleep or wake was flaky.
    is_flaky: bool,
    op: Option<(OpId, Task)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Occurrence {
    Arrive,
    Answer(RequestId),
    /// Of a client that leaves, or is aborted.
    Leave(RequestId),
    Task(OpId),
    Release {
        model: usize,
        to: u64,
    },
    /// A hibernating engine's memory is gone.
    Vacate(usize),
    Die(usize),
    Command,
    Outsider,
}

#[derive(Debug)]
#[allow(dead_code, reason = "shown when something is wrong")]
enum Report {
    In(Input),
    Out(Effect),
}

#[derive(Debug)]
struct Request {
    model: usize,
    arrived: Time,
    is_running: bool,
    is_aborted: bool,
    /// Its answer goes on behind the next wake.
    is_paused: bool,
}

pub(crate) struct Simulation {
    seed: u64,
    rng: Rng,
    faults: Faults,
    policy: Policy,
    engines: Vec<Engine>,
    now: Time,
    happenings: BinaryHeap<Reverse<(Time, u64, Occurrence)>>,
    order: u64,
    requests: BTreeMap<RequestId, Request>,
    next_request: u64,
    takes_requests: bool,
    /// Whether there are commands, other programs, repeated reports, and engines that only an operator can restart.
    is_wild: bool,
    /// Whether there were, so that learned needs may be wrong.
    had_chaos: bool,
    /// What other programs hold on each GPU.
    outside: Vec<u64>,
    /// Tasks that have ended, or were cancelled.
    old_ops: Vec<OpId>,
    /// Whether all models have permanent demand, so that starvation shows.
    is_busy: bool,
    /// Since when each model is selectable.
    down_since: Vec<Option<Time>>,
    admitted: Vec<u64>,
    pub(crate) hibernations: u64,
    /// Canaries beside requests.
    pub(crate) trials: u64,
    /// Turns that ended in the middle of answers.
    pub(crate) cuts: u64,
    /// Sleeps and wakes that failed or were not answered.
    pub(crate) flaky_calls: u64,
    steps: u64,
    /// The latest inputs and effects, to explain a failure.
    log: VecDeque<(Time, Report)>,
}

impl Simulation {
    pub(crate) fn new(seed: u64, faults: Faults) -> Self {
        let mut rng = Rng::of(seed);
        let gpus = 1 + rng.below(2);
        let engines: Vec<Engine> = (0..2 + rng.below(4)).map(|_| engine(&mut rng, gpus, faults)).collect();
        Self::of(seed, rng, faults, engines)
    }

    fn of(seed: u64, rng: Rng, faults: Faults, mut engines: Vec<Engine>) -> Self {
        slice(seed, &mut engines);
        let policy = Policy::new(engines.iter().map(|engine| engine.rules.clone()).collect());
        let admitted = vec![0; engines.len()];
        let mut policy = policy;
        // Without a random number, so that seeds stay what they were.
        (0..engines.len())
            .for_each(|id| policy.set_canary_beside(ModelId(id), (seed + id as u64).is_multiple_of(2)));
        let mut simulation = Self {
            seed,
            rng,
            faults,
            policy,
            engines,
            now: Time::ZERO,
            happenings: BinaryHeap::new(),
            order: 0,
            requests: BTreeMap::new(),
            next_request: 0,
            takes_requests: true,
            is_wild: false,
            had_chaos: false,
            outside: vec![0; 2],
            old_ops: Vec::new(),
            is_busy: false,
            down_since: vec![None; admitted.len()],
            admitted,
            hibernations: 0,
            trials: 0,
            cuts: 0,
            flaky_calls: 0,
            steps: 0,
            log: VecDeque::new(),
        };
        simulation.at(Duration::ZERO, Occurrence::Arrive);
        simulation.tell(Input::Tick);
        simulation
    }

    pub(crate) fn admitted(&self) -> u64 {
        self.admitted.iter().sum()
    }

    /// Passes this much time.
    pub(crate) fn run(&mut self, time: Duration) {
        let end = self.now.after(time);
        loop {
            let happening = self.happenings.peek().map(|Reverse((at, ..))| *at);
            let wakeup = self.policy.wakeup();
            let Some(next) = happening.into_iter().chain(wakeup).min().filter(|next| *next <= end) else {
                break;
            };
            assert!(next >= self.now, "{}", self.story("time goes back"));
            self.now = next;
            if happening == Some(next) {
                let Some(Reverse((_, _, what))) = self.happenings.pop() else { continue };
                self.happen(what);
            } else {
                self.tell(Input::Tick);
            }
            self.check();
        }
        self.now = end;
    }

    /// Removes all faults. In the end all requests are answered, and every model is available.
    pub(crate) fn settle(&mut self) {
        self.faults = Faults::None;
        self.takes_requests = false;
        self.calm();
        self.run(Duration::from_secs(900));
        assert!(self.requests.is_empty(), "{}", self.story("requests are left"));
        for model in 0..self.engines.len() {
            let before = self.admitted[model];
            // A quarantined model refuses, and is tried again later.
            for _ in 0..6 {
                self.arrive(model);
                self.run(Duration::from_secs(400));
                if self.admitted[model] > before {
                    break;
                }
            }
            let was_admitted = self.admitted[model] > before;
            assert!(was_admitted, "{}", self.story(&format!("model {model} is not to be had")));
        }
        assert!(self.requests.is_empty(), "{}", self.story("requests are left in the end"));
    }

    fn story(&self, what: &str) -> String {
        let stages: Vec<String> = (0..self.engines.len())
            .map(|id| {
                let engine = &self.engines[id];
                let really =
                    (engine.state, engine.held_bytes, engine.awake_bytes, &engine.rules.gpus, engine.op);
                format!("{id}: {really:?} {:?}", self.policy.status(ModelId(id)))
            })
            .collect();
        format!(
            "seed {} with {:?} at {:?}: {what}\n{}\n{}",
            self.seed,
            self.faults,
            self.now,
            stages.join("\n"),
            self.log.iter().map(|(at, said)| format!("{at:?} {said:?}\n")).collect::<String>()
        )
    }

    fn at(&mut self, wait: Duration, what: Occurrence) {
        self.order += 1;
        self.happenings.push(Reverse((self.now.after(wait), self.order, what)));
    }

    fn free(&self, gpu: Gpu) -> u64 {
        let on = |engine: &&Engine| engine.rules.gpus.contains(&gpu);
        CARD - self.engines.iter().filter(on).map(|engine| engine.held_bytes).sum::<u64>()
            - self.outside[gpu.0]
    }

    fn note(&mut self, said: Report) {
        if self.log.len() >= 150 {
            self.log.pop_front();
        }
        self.log.push_back((self.now, said));
    }

    fn tell(&mut self, input: Input) {
        self.note(Report::In(input.clone()));
        self.steps += 1;
        assert!(self.steps < 400_000, "{}", self.story("it does not come to an end"));
        // Answers come in parts, but in some schedules as a whole.
        let flows = |engine: &Engine| engine.state == State::Awake && !self.seed.is_multiple_of(4);
        for awake in (0..self.engines.len()).filter(|id| flows(&self.engines[*id])) {
            self.policy.flowed(ModelId(awake), self.now);
        }
        let effects = self.policy.step(self.now, input);
        for effect in effects {
            self.note(Report::Out(effect.clone()));
            self.take(effect);
        }
    }

    fn take(&mut self, effect: Effect) {
        match effect {
            Effect::Admit { request, model } => self.admit(request, model),
            Effect::Refuse { request, model, refusal } => {
                self.requests.remove(&request);
                let by_fault = matches!(refusal, Refusal::Quarantined { .. } | Refusal::NoMemory { .. });
                let was_honest = self.is_honest() && self.takes_requests && !self.is_wild;
                assert!(!(by_fault && was_honest), "{}", self.story("refused without a fault"));
                if refusal == Refusal::ShuttingDown {
                    panic!("{}", self.story(&format!("no shutdown, and {model:?} is refused")));
                }
            }
            Effect::Tested { model, is_right } => self.tested(model.0, is_right),
            Effect::Kept(model) => self.keep(model.0),
            Effect::Abort(model) => self.abort(model.0),
            Effect::Run { op, model, task, .. } => self.begin(op, model.0, task),
            Effect::Cancel(op) => {
                self.old_ops.push(op);
                let is_its = |engine: &Engine| engine.op.is_some_and(|(one, _)| one == op);
                let Some(model) = self.engines.iter().position(is_its) else { return };
                // What was abandoned may be done nevertheless.
                if self.engines[model].op.take().is_some_and(|(_, task)| task == Task::Hibernate)
                    && self.rng.one_in(2)
                {
                    self.go_into_hibernation(model);
                }
            }
            Effect::Report { model, event } => {
                if let Event::Stage(stage) = event {
                    if stage == StageName::FindingMemory && self.is_busy {
                        self.check_order(model.0);
                    }
                    let is_down =
                        matches!(stage, StageName::Asleep | StageName::Hibernating | StageName::Cold);
                    self.down_since[model.0] = is_down.then_some(self.now);
                }
                let is_quarantined = matches!(event, Event::Quarantined { .. });
                assert!(self.faults != Faults::Flaky || !is_quarantined, "{}", self.story("it was healthy"));
                if let Event::Learnt { held_bytes } = event
                    && !self.had_chaos
                {
                    let engine = &self.engines[model.0];
                    let most = engine.awake_bytes;
                    assert!(held_bytes.iter().all(|held| *held <= most), "{}", self.story("learnt too much"));
                }
            }
        }
    }

    /// Whether no engine is at fault.
    fn is_honest(&self) -> bool {
        matches!(self.faults, Faults::None | Faults::Flaky)
    }

    fn admit(&mut self, request: RequestId, model: ModelId) {
        let engine = &self.engines[model.0];
        let may =
            if engine.is_held_back { engine.is_on_trial } else { engine.is_proved || engine.is_on_trial };
        assert!(may, "{}", self.story("a request goes where no canary was right"));
        let Some(known) = self.requests.get_mut(&request) else {
            panic!("{}", self.story("a request is let through that is not there"));
        };
        assert!(!known.is_running && known.model == model.0, "{request:?} twice, or elsewhere");
        known.is_running = true;
        self.admitted[model.0] += 1;
        let most = engine.rules.running_max;
        let running =
            self.requests.values().filter(|other| other.is_running && other.model == model.0).count();
        assert!(running <= most, "{}", self.story("too many run"));
        let takes = self.rng.millis(20, 4000);
        self.at(takes, Occurrence::Answer(request));
    }

    fn tested(&mut self, model: usize, is_right: bool) {
        let engine = &mut self.engines[model];
        let (was_on_trial, is_proved) = (std::mem::take(&mut engine.is_on_trial), engine.is_proved);
        let was_held_back = std::mem::take(&mut engine.is_held_back);
        engine.kept_since = None;
        assert!(was_on_trial || was_held_back, "{}", self.story("a trial ends twice"));
        assert!(is_proved || !is_right, "{}", self.story("a wrong canary counts as right"));
        self.trials += u64::from(was_on_trial);
    }

    fn keep(&mut self, model: usize) {
        self.cuts += 1;
        assert!(!self.running_of(model).is_empty(), "{}", self.story("there is nothing to keep"));
        let engine = &mut self.engines[model];
        engine.kept_since = Some(self.now);
        let was_held_back = std::mem::replace(&mut engine.is_held_back, true);
        assert!(!was_held_back, "{}", self.story("kept again before they were released"));
    }

    fn abort(&mut self, model: usize) {
        let engine = &mut self.engines[model];
        assert!(!engine.is_on_trial, "{}", self.story("aborted before the end of the trial"));
        let engine = &mut self.engines[model];
        let (since, wait_max) = (engine.kept_since.take(), engine.rules.wait_max);
        let was_kept = std::mem::take(&mut engine.is_held_back);
        let is_late = since.is_some_and(|since| self.now >= since.after(wait_max));
        let was_honest = self.is_honest() && self.takes_requests && !self.had_chaos;
        let running = self.running_of(model);
        let may_be = running.is_empty() || is_late || !was_honest;
        assert!(!was_kept || may_be, "{}", self.story("dropped without a fault"));
        for request in running {
            let clings = self.lying(Faults::Clings, 3);
            let Some(known) = self.requests.get_mut(&request) else { continue };
            known.is_aborted = true;
            if !clings {
                self.at(Duration::from_millis(5), Occurrence::Leave(request));
            } else if known.is_paused {
                let wait = self.rng.millis(5, 4000);
                self.at(wait, Occurrence::Leave(request));
            }
        }
    }

    /// Its answer ends, unless it sleeps.
    fn answer(&mut self, request: RequestId) {
        let Some(known) = self.requests.get_mut(&request) else { return };
        let sleeps = matches!(self.engines[known.model].state, State::Asleep | State::Hibernating);
        if sleeps && !known.is_aborted {
            known.is_paused = true;
        } else {
            self.leave(request);
        }
    }

    fn leave(&mut self, request: RequestId) {
        if self.requests.remove(&request).is_some() {
            self.tell(Input::Left(request));
        }
    }

    /// Answers that were cut go on.
    fn go_on(&mut self, model: usize) {
        for request in self.running_of(model) {
            let Some(known) = self.requests.get_mut(&request) else { continue };
            if std::mem::take(&mut known.is_paused) {
                let wait = self.rng.millis(0, 2000);
                self.at(wait, Occurrence::Answer(request));
            }
        }
    }

    fn running_of(&self, model: usize) -> Vec<RequestId> {
        let is_its = |(_, request): &(&RequestId, &Request)| request.is_running && request.model == model;
        self.requests.iter().filter(is_its).map(|(id, _)| *id).collect()
    }

    fn lying(&mut self, lie: Faults, one_in: u64) -> bool {
        (self.faults == lie || self.faults == Faults::All) && {
            let times = if self.faults == Faults::All { one_in * 4 } else { one_in };
            self.rng.one_in(times)
        }
    }

    fn begin(&mut self, op: OpId, model: usize, task: Task) {
        let is_free = self.engines[model].op.is_none();
        assert!(is_free, "{}", self.story("two tasks of one engine"));
        let is_moving = |task: Task| {
            let calls = [Task::Sleep, Task::SleepKeeping, Task::Wake];
            calls.contains(&task) || [Task::Start, Task::Stop, Task::Hibernate, Task::Resume].contains(&task)
        };
        let of_any = [Task::Resume, Task::Stop, Task::Probe, Task::Measure];
        let is_off = self.engines[model].state == State::Hibernating && !of_any.contains(&task);
        // A start fails, since the engine is there.
        assert!(!is_off || task == Task::Start, "{}", self.story("asked while it hibernates"));
        // What comes up and what is stopped may do so at once.
        let may_beside = |one: Task, other: Task| {
            one == Task::Stop && [Task::Stop, Task::Start, Task::Wake, Task::Resume].contains(&other)
        };
        if is_moving(task) {
            let gpus = self.engines[model].rules.gpus.clone();
            let other = self.engines.iter().enumerate().find(|(other, engine)| {
                let shares = engine.rules.gpus.iter().any(|gpu| gpus.contains(gpu));
                let is_in_the_way =
                    |of: Task| is_moving(of) && !may_beside(task, of) && !may_beside(of, task);
                *other != model && shares && engine.op.is_some_and(|(_, of)| is_in_the_way(of))
            });
            assert!(other.is_none(), "{}", self.story("two move memory on one GPU"));
        }
        if task == Task::Wake {
            let status = self.policy.status(ModelId(model)).unwrap();
            for (gpu, held) in
                self.engines[model].rules.gpus.iter().zip(status.held_bytes.unwrap_or_default())
            {
                assert!(self.free(*gpu) >= held, "{}", self.story("woken without enough free memory"));
            }
        }
        if task == Task::Sleep {
            assert!(self.running_of(model).is_empty(), "{}", self.story("put away with requests"));
        }
        let is_held_back = self.engines[model].is_held_back;
        assert!(task != Task::SleepKeeping || is_held_back, "{}", self.story("kept, and not held back"));
        assert!(task != Task::Stop || !is_held_back, "{}", self.story("stopped with requests that it keeps"));
        let engine = &mut self.engines[model];
        assert!(
            task != Task::Stop || !(engine.is_flaky && self.faults == Faults::Flaky),
            "{}",
            self.story("a healthy engine is stopped")
        );
        let engine = &mut self.engines[model];
        engine.op = Some((op, task));
        assert!(!engine.is_on_trial || task == Task::CanaryBeside, "{}", self.story("a trial has no end"));
        let engine = &mut self.engines[model];
        engine.is_on_trial = task == Task::CanaryBeside;
        // Requests that are kept go on if it does not fall asleep.
        if is_moving(task) && task != Task::SleepKeeping {
            engine.is_proved = false;
        }
        if self.lying(Faults::Hangs, 8) {
            return;
        }
        let takes = match task {
            Task::Start => self.rng.millis(5_000, 60_000),
            Task::Stop => self.rng.millis(100, 5_000),
            Task::Sleep | Task::SleepKeeping | Task::Wake => self.rng.millis(30, 900),
            Task::Hibernate | Task::Resume => self.rng.millis(300, 1500),
            Task::Probe | Task::Confirm | Task::Canary | Task::CanaryBeside => self.rng.millis(1, 200),
            Task::Measure => self.rng.millis(0, 3),
        };
        self.at(takes, Occurrence::Task(op));
    }

    fn happen(&mut self, what: Occurrence) {
        match what {
            Occurrence::Arrive => {
                if self.takes_requests {
                    let model = self.rng.below(self.engines.len() as u64);
                    for _ in 0..=self.rng.below(3) {
                        self.arrive(usize::try_from(model).unwrap());
                    }
                    let wait = self.rng.millis(10, if self.is_busy { 1500 } else { 4000 });
                    self.at(wait, Occurrence::Arrive);
                }
            }
            Occurrence::Answer(request) => self.answer(request),
            Occurrence::Leave(request) => self.leave(request),
            Occurrence::Task(op) => {
                let is_its = |engine: &Engine| engine.op.is_some_and(|(one, _)| one == op);
                let Some(model) = self.engines.iter().position(is_its) else { return };
                let Some((_, task)) = self.engines[model].op else { return };
                let Some(outcome) = self.flaky(model, task) else { return };
                self.engines[model].op = None;
                self.old_ops.push(op);
                self.tell(Input::Ended { op, outcome });
                self.repeat();
                if self.lying(Faults::Crashes, 12) {
                    let wait = self.rng.millis(0, 3000);
                    self.at(wait, Occurrence::Die(model));
                }
            }
            Occurrence::Release { model, to } => {
                let engine = &mut self.engines[model];
                if engine.state == State::Asleep {
                    engine.held_bytes = to;
                }
            }
            Occurrence::Vacate(model) => {
                let engine = &mut self.engines[model];
                if engine.state == State::Hibernating {
                    engine.held_bytes = 0;
                }
            }
            Occurrence::Die(model) if self.is_wild && !self.engines[model].rules.can_restart => {
                self.reborn(model);
            }
            Occurrence::Die(model) => self.die(model),
            Occurrence::Command if self.is_wild => self.command(),
            Occurrence::Outsider if self.is_wild => self.outsider(),
            Occurrence::Command | Occurrence::Outsider => {}
        }
    }

    fn arrive(&mut self, model: usize) {
        let request = RequestId(self.next_request);
        self.next_request += 1;
        let known =
            Request { model, arrived: self.now, is_running: false, is_aborted: false, is_paused: false };
        self.requests.insert(request, known);
        let points = if self.is_busy { 0 } else { self.rng.below(20) };
        let priority = i32::try_from(points).unwrap() - 10;
        self.tell(Input::Arrived { request, model: ModelId(model), priority });
        if self.requests.contains_key(&request) && self.rng.one_in(20) && self.takes_requests && !self.is_busy
        {
            let wait = self.rng.millis(0, 5000);
            self.at(wait, Occurrence::Leave(request));
        }
    }

    fn die(&mut self, model: usize) {
        let engine = &mut self.engines[model];
        if engine.state == State::Gone || !engine.rules.can_restart {
            return;
        }
        (engine.state, engine.held_bytes, engine.is_proved) = (State::Gone, 0, false);
        // In the other order, waiting requests may go to a dead engine and fail at once.
        self.tell(Input::Lost(ModelId(model)));
        for request in self.running_of(model) {
            self.requests.remove(&request);
            self.tell(Input::Left(request));
        }
    }

    /// Its outcome, if there is an answer.
    fn flaky(&mut self, model: usize, task: Task) -> Option<TaskOutcome> {
        if !matches!(task, Task::Sleep | Task::SleepKeeping | Task::Wake) {
            return Some(self.outcome(model, task));
        }
        let was_flaky = std::mem::take(&mut self.engines[model].is_flaky);
        if was_flaky || !self.lying(Faults::Flaky, 2) {
            return Some(self.outcome(model, task));
        }
        (self.engines[model].is_flaky, self.flaky_calls) = (true, self.flaky_calls + 1);
        let failed = |why: &str| Some(TaskOutcome::Failed(why.to_owned()));
        match self.rng.below(4) {
            0 => failed("it answered 502"),
            1 => {
                self.outcome(model, task);
                failed("the connection was closed")
            }
            // Its answer is lost, or comes after its limit.
            2 => {
                self.outcome(model, task);
                None
            }
            _ => failed("it answered 503"),
        }
    }

    fn outcome(&mut self, model: usize, task: Task) -> TaskOutcome {
        if task != Task::Measure && self.lying(Faults::Fails, 8) {
            return TaskOutcome::Failed("HTTP 500".to_owned());
        }
        let state = self.engines[model].state;
        let gpus = self.engines[model].rules.gpus.clone();
        match task {
            Task::Probe => TaskOutcome::Probed(match state {
                State::Gone => EngineState::Gone,
                State::Awake => EngineState::Awake,
                State::Asleep => EngineState::Asleep,
                State::Hibernating => EngineState::Hibernating,
            }),
            Task::Measure => memory_of(gpus.iter().map(|gpu| self.free(*gpu)).collect()),
            Task::Start => self.come_up(model, "it was there already", state == State::Gone),
            Task::Wake => {
                if self.lying(Faults::Dozes, 4) {
                    return TaskOutcome::Done;
                }
                let is_gibberish = self.lying(Faults::Gibberish, 4);
                let outcome = self.come_up(model, "it was not asleep", state == State::Asleep);
                self.engines[model].is_gibberish = is_gibberish;
                outcome
            }
            Task::Stop => {
                let engine = &mut self.engines[model];
                (engine.state, engine.held_bytes, engine.is_gibberish) = (State::Gone, 0, false);
                for request in self.running_of(model) {
                    self.at(Duration::ZERO, Occurrence::Leave(request));
                }
                TaskOutcome::Done
            }
            Task::Hibernate if state != State::Asleep => TaskOutcome::Failed("it was not asleep".to_owned()),
            Task::Hibernate if self.lying(Faults::Refuses, 2) => {
                TaskOutcome::Unsupported("it has a communicator".to_owned())
            }
            Task::Hibernate => {
                self.go_into_hibernation(model);
                TaskOutcome::Done
            }
            Task::Resume => self.resume(model),
            Task::SleepKeeping if self.lying(Faults::CannotKeep, 2) => {
                TaskOutcome::Unsupported("it has a connector".to_owned())
            }
            Task::SleepKeeping => {
                for request in self.running_of(model) {
                    if self.lying(Faults::CannotKeep, 4) {
                        let wait = self.rng.millis(0, 2000);
                        self.at(wait, Occurrence::Leave(request));
                    }
                }
                self.fall_asleep(model)
            }
            Task::Sleep => self.fall_asleep(model),
            Task::Confirm if state == State::Gone => TaskOutcome::Failed("no answer".to_owned()),
            Task::Confirm => TaskOutcome::Awake(state == State::Awake || self.faults == Faults::Dozes),
            Task::Canary | Task::CanaryBeside => {
                let engine = &mut self.engines[model];
                engine.is_proved = state == State::Awake && !engine.is_gibberish;
                let right = engine.is_proved;
                TaskOutcome::Canary(if right { Ok(()) } else { Err("asdf asdf".to_owned()) })
            }
        }
    }

    fn come_up(&mut self, model: usize, otherwise: &str, may: bool) -> TaskOutcome {
        let engine = &self.engines[model];
        if !may {
            return TaskOutcome::Failed(otherwise.to_owned());
        }
        let lacks = engine.awake_bytes - engine.held_bytes;
        if engine.rules.gpus.iter().any(|gpu| self.free(*gpu) < lacks) {
            return TaskOutcome::Failed("out of memory".to_owned());
        }
        let engine = &mut self.engines[model];
        (engine.state, engine.held_bytes, engine.is_gibberish) = (State::Awake, engine.awake_bytes, false);
        self.go_on(model);
        TaskOutcome::Done
    }

    fn fall_asleep(&mut self, model: usize) -> TaskOutcome {
        if self.engines[model].state != State::Awake {
            return TaskOutcome::Failed("it was not awake".to_owned());
        }
        (self.engines[model].state, self.engines[model].is_proved) = (State::Asleep, false);
        if self.lying(Faults::Leaks, 2) {
            self.engines[model].asleep_bytes += GIB / 2;
        }
        let engine = &self.engines[model];
        let (held, to) = (engine.held_bytes, engine.asleep_bytes.min(engine.held_bytes));
        let to = if self.lying(Faults::Keeps, 4) {
            held
        } else if self.lying(Faults::Half, 4) {
            to + (held - to) / 2
        } else {
            to
        };
        let wait = self.rng.millis(0, 150);
        self.at(wait, Occurrence::Release { model, to });
        TaskOutcome::Done
    }

    fn go_into_hibernation(&mut self, model: usize) {
        if self.engines[model].state != State::Asleep {
            return;
        }
        self.engines[model].state = State::Hibernating;
        self.hibernations += 1;
        if !self.lying(Faults::Stays, 3) {
            let wait = self.rng.millis(0, 150);
            self.at(wait, Occurrence::Vacate(model));
        }
    }

    /// One that does not hibernate stays as it is.
    fn resume(&mut self, model: usize) -> TaskOutcome {
        if self.engines[model].state != State::Hibernating {
            return TaskOutcome::Done;
        }
        if self.lying(Faults::Sticks, 2) {
            return TaskOutcome::Failed("it was not put back".to_owned());
        }
        let engine = &self.engines[model];
        let lacks = engine.asleep_bytes.saturating_sub(engine.held_bytes);
        if engine.rules.gpus.iter().any(|gpu| self.free(*gpu) < lacks) {
            return TaskOutcome::Failed("out of memory".to_owned());
        }
        let engine = &mut self.engines[model];
        (engine.state, engine.held_bytes) = (State::Asleep, engine.asleep_bytes);
        TaskOutcome::Done
    }

    /// The invariants.
    fn check(&self) {
        for (id, engine) in self.engines.iter().enumerate().filter(|_| !self.had_chaos) {
            let known = self.policy.status(ModelId(id)).and_then(|status| status.need_bytes);
            let is_right = known.is_none_or(|known| known.iter().all(|known| *known == engine.awake_bytes));
            assert!(is_right, "{}", self.story(&format!("the need of {id} is not what it takes")));
        }
        for (id, request) in &self.requests {
            let rules = &self.engines[request.model].rules;
            let waits = self.now.since(request.arrived);
            let is_late = !request.is_running && waits > rules.wait_max;
            assert!(!is_late, "{}", self.story(&format!("{id:?} waits for {waits:?}")));
        }
        for (id, engine) in self.engines.iter().enumerate() {
            let Some(since) = engine.kept_since else { continue };
            let status = self.policy.status(ModelId(id)).unwrap();
            let rests = [StageName::Asleep, StageName::Hibernating, StageName::Unknown];
            let is_late = self.now.since(since) > engine.rules.wait_max && rests.contains(&status.stage);
            assert!(!is_late || status.kept == 0, "{}", self.story(&format!("{id} keeps them for too long")));
        }
    }
}

/// Each second one may be cut, also at once. Without a random number, so that seeds stay what they were.
fn slice(seed: u64, engines: &mut [Engine]) {
    for (id, engine) in (0_u64..).zip(engines) {
        let millis = [0, 200, 1_000, 3_000][usize::try_from((seed / 4 + id) % 4).unwrap()];
        let is_cut = (seed / 2 + id).is_multiple_of(2);
        engine.rules.slice_max = is_cut.then_some(Duration::from_millis(millis));
    }
}

fn engine(rng: &mut Rng, gpus: u64, faults: Faults) -> Engine {
    let on_all = rng.one_in(4);
    let first = rng.below(gpus);
    let all = (0..gpus).map(|gpu| Gpu(usize::try_from(gpu).unwrap()));
    let gpus: Vec<Gpu> =
        if on_all { all.collect() } else { all.skip(usize::try_from(first).unwrap()).take(1).collect() };
    let awake_bytes = (8 + rng.below(60)) * GIB;
    let mut rules = Rules::on(gpus);
    // A faulty engine that only an operator can restart holds its memory for good.
    rules.can_restart = faults != Faults::None || !rng.one_in(3);
    rules.can_sleep = !rules.can_restart || !rng.one_in(8);
    rules.can_hibernate = rules.can_restart && rules.can_sleep && !rng.one_in(4);
    rules.hibernate_after = rng.one_in(2).then(|| rng.millis(0, 10_000));
    rules.residue_max_bytes = rng.one_in(3).then(|| rng.below(3) * GIB);
    rules.need_bytes = rng.one_in(2).then_some(awake_bytes);
    rules.idle_max = rng.one_in(3).then_some(rng.millis(1000, 20_000));
    rules.residence_min = rng.millis(0, 3000);
    rules.turn_per_swap = u32::try_from(rng.below(4)).unwrap();
    rules.preload = rng.one_in(4);
    rules.together = rng.one_in(3).then(|| "set".to_owned());
    rules.keep_weight = u32::try_from(rng.below(3)).unwrap();
    rules.priority = i32::try_from(rng.below(7)).unwrap() - 3;
    rules.grace = rng.millis(0, 1000);
    rules.turn_max = rng.millis(500, 12_000);
    rules.wait_max = rng.millis(200_000, 400_000);
    rules.running_max = usize::try_from(1 + rng.below(8)).unwrap();
    rules.limits =
        Limits { start: Duration::from_secs(120), drain: rng.millis(500, 8000), ..Limits::default() };
    rules.pause_min = Duration::from_secs(2);
    rules.pause_max = Duration::from_secs(60);
    let state = if rules.can_restart { State::Gone } else { State::Asleep };
    let asleep_bytes = GIB / 2 + rng.below(GIB / 2);
    let held_bytes = if state == State::Asleep { asleep_bytes } else { 0 };
    Engine {
        rules,
        state,
        awake_bytes,
        asleep_bytes,
        held_bytes,
        is_gibberish: false,
        is_proved: false,
        is_on_trial: false,
        is_held_back: false,
        kept_since: None,
        is_flaky: false,
        op: None,
    }
}
