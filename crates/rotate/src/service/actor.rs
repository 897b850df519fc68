//! The task that owns the policy.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::directory::{Directory, Entry};
use super::history::{History, ModelHistory};
use super::look::{LOOK_MAX, answered, look};
use super::snapshot::{GpuNow, ModelNow, PromiseNow, Refused, ServiceEvent, Snapshot};
use crate::config::Config;
use poorwill_front::backend::Trial;
use poorwill_front::requests::Recent;
use poorwill_rotation_policy::{
    Effect, EngineState, Event, Gpu, Input, Look, ModelId, OpId, Policy, Refusal, RequestId, Rules,
    StageName, Status, Task, TaskOutcome, Time,
};

/// When to retry after a full queue or a long wait.
const RETRY_AFTER: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) enum Message {
    Arrived {
        request: RequestId,
        model: ModelId,
        priority: i32,
        reply: AdmitReply,
    },
    Input(Input),
    /// A supervised engine ended by itself, and how.
    Died(ModelId, String),
    Suspect(ModelId),
    /// A new helper for hibernation runs.
    HelperRestarted,
    Snapshot(oneshot::Sender<Snapshot>),
    /// The result of a look. `starts` and `since` are those of the stage before the look.
    Looked {
        model: ModelId,
        starts: u64,
        since: Instant,
        found: Result<EngineState, Look>,
        /// Whether it follows a suspicion.
        is_suspect: bool,
    },
    /// Counts running requests, and engines that are sleeping, waking or stopping.
    Busy(oneshot::Sender<usize>),
    Reload {
        config: Arc<Config>,
        entries: Vec<Entry>,
        reply: oneshot::Sender<()>,
    },
    End,
}

/// Stages in which a vanished engine matters: in others it is probed, started or stopped anyway.
const MATTERS: [StageName; 6] = [
    StageName::Ready,
    StageName::Draining,
    StageName::Asleep,
    StageName::Canary,
    StageName::Confirming,
    StageName::MeasuringBeforeSleep,
];

/// Stages in which an engine should answer looks.
const WATCHED: [StageName; 2] = [StageName::Ready, StageName::Draining];

type AdmitReply = oneshot::Sender<Result<Admitted, Refused>>;

/// What concerns a request that goes to its engine.
#[derive(Debug)]
pub(super) struct Admitted {
    /// Fires when its model leaves.
    pub(super) aborted: CancellationToken,
    /// What its canaries say, now and behind each turn that was cut.
    pub(super) trial: watch::Receiver<Trial>,
}

/// Nothing is held back.
fn trusted() -> Arc<watch::Sender<Trial>> {
    Arc::new(watch::Sender::new(Trial::Right))
}

#[derive(Debug)]
pub(super) struct Actor {
    directory: Arc<RwLock<Directory>>,
    messages: mpsc::UnboundedSender<Message>,
    policy: Policy,
    began: Instant,
    history: History,
    /// By model number, for callers that do not wait.
    stages: Arc<RwLock<Vec<StageName>>>,
    histories: Vec<ModelHistory>,
    waiting: HashMap<RequestId, AdmitReply>,
    /// Cancel the running requests of a model.
    aborts: Vec<CancellationToken>,
    /// What the canary last said of each model's requests, while its engine lives.
    trials: Vec<Arc<watch::Sender<Trial>>>,
    /// Parts of answers at the last step, by model number.
    parts: Vec<u64>,
    /// Whether the last input is a wrong canary.
    was_wrong: bool,
    tasks: HashMap<OpId, (AbortHandle, Task)>,
    /// Engines under a probe by [`Actor::suspect`].
    suspected: HashSet<ModelId>,
    /// Ready or draining models whose last look failed.
    unwell: HashSet<ModelId>,
    /// Health checks of ready models.
    watches: HashMap<ModelId, AbortHandle>,
    is_ending: bool,
}

impl Actor {
    pub(super) fn new(directory: Arc<RwLock<Directory>>, messages: mpsc::UnboundedSender<Message>) -> Self {
        let (rules, histories): (Vec<Rules>, Vec<ModelHistory>) = {
            let directory = directory.read().unwrap_or_else(PoisonError::into_inner);
            let models = directory.entries.iter().map(|entry| &entry.model);
            models.map(|model| (model.rules.clone(), ModelHistory::new(model))).unzip()
        };
        let (models, began) = (rules.len(), Instant::now());
        Self {
            directory,
            messages,
            policy: Policy::new(rules),
            began,
            history: History::new(began),
            stages: Arc::new(RwLock::new(vec![StageName::Unknown; models])),
            histories,
            waiting: HashMap::new(),
            aborts: (0..models).map(|_| CancellationToken::new()).collect(),
            trials: (0..models).map(|_| trusted()).collect(),
            parts: vec![0; models],
            was_wrong: false,
            tasks: HashMap::new(),
            suspected: HashSet::new(),
            unwell: HashSet::new(),
            watches: HashMap::new(),
            is_ending: false,
        }
    }

    pub(super) fn listeners(&self) -> broadcast::Sender<Arc<ServiceEvent>> {
        self.history.listen()
    }

    pub(super) fn stages(&self) -> Arc<RwLock<Vec<StageName>>> {
        Arc::clone(&self.stages)
    }

    pub(super) async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Message>) {
        self.step(Input::Tick);
        loop {
            let wakeup = self.policy.wakeup().map(|at| self.history.until(at));
            let due = async {
                match wakeup {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                message = inbox.recv() => match message {
                    Some(Message::End) | None => break,
                    Some(message) => self.on_message(message),
                },
                () = due => self.step(Input::Tick),
            }
        }
        self.tasks.values().for_each(|(task, _)| task.abort());
        self.watches.values().for_each(AbortHandle::abort);
        self.aborts.iter().for_each(CancellationToken::cancel);
    }

    fn on_message(&mut self, message: Message) {
        match message {
            Message::Arrived { request, model, priority, reply } => {
                self.waiting.insert(request, reply);
                self.step(Input::Arrived { request, model, priority });
            }
            Message::Input(input) => {
                match &input {
                    Input::Left(request) => drop(self.waiting.remove(request)),
                    Input::Ended { op, .. } => drop(self.tasks.remove(op)),
                    Input::Shutdown => self.is_ending = true,
                    _ => {}
                }
                self.step(input);
            }
            Message::Died(model, how) => self.on_end_of_engine(model, &how),
            Message::Suspect(model) => self.suspect(model),
            Message::HelperRestarted => {
                (0..self.histories.len()).for_each(|id| self.step(Input::Recheck(ModelId(id))));
            }
            Message::Looked { model, starts, since, found, is_suspect } => {
                if is_suspect {
                    self.suspected.remove(&model);
                }
                let Some(history) = self.histories.get(model.0) else { return };
                if history.starts != starts {
                    return;
                }
                // A change of its stage begins another watch.
                if is_well(&found) {
                    self.unwell.remove(&model);
                } else if WATCHED.contains(&history.stage) {
                    self.unwell.insert(model);
                }
                match found {
                    Ok(EngineState::Gone) if MATTERS.contains(&history.stage) => {
                        self.step(Input::Lost(model));
                    }
                    Ok(EngineState::Asleep) if history.since == since => self.step(Input::Slept(model)),
                    Ok(EngineState::Awake) => self.step(Input::Looked { model, look: Look::Awake }),
                    Ok(EngineState::Moving) => {
                        let reason = "it began to sleep or to wake, without a command from here".to_owned();
                        self.step(Input::Looked { model, look: Look::Unwell(reason) });
                    }
                    Ok(_) => {}
                    Err(look) => self.step(Input::Looked { model, look }),
                }
            }
            Message::Snapshot(reply) => drop(reply.send(self.snapshot())),
            Message::Busy(reply) => drop(reply.send(self.busy())),
            Message::Reload { config, entries, reply } => {
                self.reload(config, entries);
                let _gone = reply.send(());
            }
            Message::End => {}
        }
    }

    fn on_end_of_engine(&mut self, model: ModelId, how: &str) {
        let stage = self.policy.status(model).map_or(StageName::Unknown, |status| status.stage);
        // A stopping engine may end in any way.
        self.step(Input::Lost(model));
        if ![StageName::Stopping, StageName::Cold].contains(&stage) {
            let words = self.entry(model).map(|entry| entry.handle.last_words()).unwrap_or_default();
            let reason = format!("its engine ended: {how}; {words}");
            self.report(model, Event::Failed { stage, reason });
        }
    }

    /// Running requests, and engines that are sleeping, waking or stopping.
    fn busy(&self) -> usize {
        let running = |id| self.policy.status(ModelId(id)).map_or(0, |status| status.running);
        let requests: usize = (0..self.histories.len()).map(running).sum();
        let moves = |(_, task): &&(AbortHandle, Task)| {
            matches!(
                task,
                Task::Sleep | Task::SleepKeeping | Task::Hibernate | Task::Resume | Task::Wake | Task::Stop
            )
        };
        requests + self.tasks.values().filter(moves).count()
    }

    fn step(&mut self, input: Input) {
        self.was_wrong = matches!(&input, Input::Ended { outcome: TaskOutcome::Canary(Err(_)), .. });
        if let Input::Ended { op, outcome: TaskOutcome::Canary(Ok(())) } = &input
            && let Some(model) = self.policy.model_of(*op)
            && let Some(entry) = self.entry(model)
        {
            self.policy.set_canary_beside(model, entry.handle.tests_beside());
            self.policy.set_keeps(model, entry.handle.may_keep());
        }
        let now = Time::from_start(self.began.elapsed());
        for (id, history) in self.histories.iter_mut().enumerate() {
            // A step that makes a model ready also empties its queue.
            history.waits_since = self.policy.waiting_since(ModelId(id));
        }
        self.note_flows(now);
        for effect in self.policy.step(now, input) {
            self.carry_out(effect);
        }
    }

    fn note_flows(&mut self, now: Time) {
        let directory = self.directory.read().unwrap_or_else(PoisonError::into_inner);
        let parts = directory.entries.iter().map(|entry| entry.answered.now()).zip(&mut self.parts);
        for (id, (now_parts, parts)) in parts.enumerate() {
            if std::mem::replace(parts, now_parts) != now_parts {
                self.policy.flowed(ModelId(id), now);
            }
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Admit { request, model } => {
                self.histories[model.0].admitted += 1;
                // A sender that gave up has reported it, or will.
                if let Some(reply) = self.waiting.remove(&request) {
                    let trial = self.trials[model.0].subscribe();
                    let _gone = reply.send(Ok(Admitted { aborted: self.aborts[model.0].clone(), trial }));
                }
            }
            Effect::Refuse { request, model, refusal } => {
                self.histories[model.0].refused += 1;
                if let Some(reply) = self.waiting.remove(&request) {
                    let retry_after = match refusal {
                        Refusal::Quarantined { until }
                        | Refusal::NoMemory { until }
                        | Refusal::TooLarge { until, .. } => Some(self.history.until(until)),
                        // The front knows the load.
                        Refusal::QueueFull => None,
                        Refusal::WaitedTooLong => Some(RETRY_AFTER),
                        Refusal::ShuttingDown => None,
                    };
                    let _gone = reply.send(Err(Refused { refusal, retry_after }));
                }
            }
            Effect::Tested { model, is_right } => {
                if let Some(entry) = self.entry(model).filter(|_| self.was_wrong) {
                    entry.handle.failed_beside();
                    self.policy.set_canary_beside(model, false);
                    self.policy.set_keeps(model, entry.handle.may_keep());
                }
                let trial = &mut self.trials[model.0];
                trial.send_replace(if is_right { Trial::Right } else { Trial::Wrong });
                if !is_right {
                    *trial = trusted();
                }
            }
            Effect::Kept(model) => drop(self.trials[model.0].send_replace(Trial::Open)),
            Effect::Abort(model) => {
                // Its end is no wrong canary.
                std::mem::replace(&mut self.aborts[model.0], CancellationToken::new()).cancel();
                self.trials[model.0] = trusted();
            }
            Effect::Run { op, model, task, limit } => self.run_task(op, model, task, limit),
            Effect::Cancel(op) => {
                if let Some((task, _)) = self.tasks.remove(&op) {
                    task.abort();
                }
            }
            Effect::Report { model, event } => self.report(model, event),
        }
    }

    fn run_task(&mut self, op: OpId, model: ModelId, task: Task, limit: Duration) {
        let Some(entry) = self.entry(model) else { return };
        let messages = self.messages.clone();
        let need = self.policy.measured_need(model, task);
        let trial = (task == Task::CanaryBeside).then(|| Arc::clone(&self.trials[model.0]));
        if let Some(trial) = &trial {
            // Before anything is admitted beside it.
            trial.send_replace(Trial::Open);
        }
        let running = tokio::spawn(async move {
            let running = async {
                match trial {
                    Some(trial) => entry.handle.test_beside(&trial, limit).await,
                    None => entry.handle.run(task, limit, need).await,
                }
            };
            let done = tokio::time::timeout(limit, running).await;
            let outcome = done.unwrap_or_else(|_| {
                TaskOutcome::Failed(format!("it did not end within {:.1} s", limit.as_secs_f64()))
            });
            let _closed = messages.send(Message::Input(Input::Ended { op, outcome }));
        });
        self.tasks.insert(op, (running.abort_handle(), task));
    }

    fn report(&mut self, model: ModelId, event: Event) {
        let Some(entry) = self.entry(model) else { return };
        if let Event::Stage(stage) = event
            && let Some(place) = self.stages.write().unwrap_or_else(PoisonError::into_inner).get_mut(model.0)
        {
            *place = stage;
        }
        if matches!(event, Event::Stage(StageName::Asleep)) {
            let handle = Arc::clone(&entry.handle);
            tokio::spawn(async move { handle.store_asleep().await });
        }
        let is_stage = matches!(event, Event::Stage(_));
        self.history.record(&entry.model.name, &mut self.histories[model.0], event);
        if is_stage {
            self.watch(model, entry);
        }
    }

    fn watch(&mut self, model: ModelId, entry: Entry) {
        if let Some(before) = self.watches.remove(&model) {
            before.abort();
        }
        let history = &self.histories[model.0];
        if !WATCHED.contains(&history.stage) {
            self.unwell.remove(&model);
            return;
        }
        let (starts, since) = (history.starts, history.since);
        let (every, again) = (entry.model.rules.look_every, entry.model.rules.look_again());
        // A new watch goes on with the rhythm of the one before.
        let first = if self.unwell.contains(&model) { again } else { every };
        let messages = self.messages.clone();
        let watching = tokio::spawn(async move {
            let (mut pause, mut seen) = (first, answered(&entry));
            loop {
                tokio::time::sleep(pause).await;
                let found = look(&entry, seen).await;
                let is_well = is_well(&found);
                (pause, seen) = (if is_well { every } else { again }, answered(&entry));
                if messages.send(Message::Looked { model, starts, since, found, is_suspect: false }).is_err()
                {
                    return;
                }
                // The next look at one that is not well comes soon.
                if !is_well {
                    continue;
                }
                let held = tokio::time::timeout(LOOK_MAX, entry.handle.measure_held()).await;
                if let Ok(Some(bytes)) = held
                    && messages.send(Message::Input(Input::Holds { model, bytes })).is_err()
                {
                    return;
                }
            }
        });
        self.watches.insert(model, watching.abort_handle());
    }

    fn entry(&self, model: ModelId) -> Option<Entry> {
        self.directory.read().unwrap_or_else(PoisonError::into_inner).entries.get(model.0).cloned()
    }

    fn suspect(&mut self, model: ModelId) {
        let Some(entry) = self.entry(model) else { return };
        // It would not answer.
        let is_off = entry.handle.hibernator().may_hibernate(&entry.model.name);
        if is_off || !self.suspected.insert(model) {
            return;
        }
        let (starts, since) = (self.histories[model.0].starts, self.histories[model.0].since);
        let messages = self.messages.clone();
        tokio::spawn(async move {
            let found = look(&entry, answered(&entry)).await;
            let _ended = messages.send(Message::Looked { model, starts, since, found, is_suspect: true });
        });
    }

    fn reload(&mut self, config: Arc<Config>, entries: Vec<Entry>) {
        for (id, entry) in entries.iter().enumerate() {
            let mut rules = entry.model.rules.clone();
            if !entry.is_listed {
                // No new requests can come: it leaves after the remaining ones.
                (rules.is_pinned, rules.idle_max) = (false, Some(Duration::ZERO));
                (rules.preload, rules.together) = (false, None);
            }
            if id < self.histories.len() {
                self.policy.set_rules(ModelId(id), &rules);
            } else {
                let added = self.policy.add(rules);
                debug_assert_eq!(added, ModelId(id));
                self.histories.push(ModelHistory::new(&entry.model));
                self.aborts.push(CancellationToken::new());
                self.trials.push(trusted());
                self.parts.push(0);
                self.stages.write().unwrap_or_else(PoisonError::into_inner).push(StageName::Unknown);
            }
        }
        let gone: Vec<_> = (0..entries.len()).filter(|id| !entries[*id].is_listed).collect();
        {
            let mut directory = self.directory.write().unwrap_or_else(PoisonError::into_inner);
            let profile = directory.profile.take();
            *directory = Directory::new(config, entries, profile);
        }
        // A new pause, a new health path and a new canary count at once.
        for id in (0..self.histories.len()).map(ModelId) {
            if let Some(entry) = self.entry(id) {
                self.policy.set_canary_beside(id, entry.handle.tests_beside());
                self.policy.set_keeps(id, entry.handle.may_keep());
                self.watch(id, entry);
            }
        }
        self.step(Input::Tick);
        for id in gone {
            self.step(Input::Pin(ModelId(id), false));
            self.step(Input::Hot(ModelId(id), false));
        }
    }

    fn oldest_wait_s(&self, model: ModelId) -> Option<f64> {
        let since = self.policy.waiting_since(model)?.since_start();
        Some(self.began.elapsed().saturating_sub(since).as_secs_f64())
    }

    fn snapshot(&self) -> Snapshot {
        let (entries, profile) = {
            let directory = self.directory.read().unwrap_or_else(PoisonError::into_inner);
            (directory.entries.clone(), directory.profile.clone())
        };
        let statuses: Vec<Option<Status>> =
            (0..entries.len()).map(|id| self.policy.status(ModelId(id))).collect();
        let mut promised: BTreeMap<usize, Vec<PromiseNow>> = BTreeMap::new();
        for (entry, status) in entries.iter().zip(&statuses) {
            let bytes = status.as_ref().and_then(|status| status.promised_bytes.clone());
            for (nth, gpu) in entry.model.rules.gpus.iter().enumerate() {
                let of_it = bytes.as_ref().and_then(|bytes| bytes.get(nth)).copied();
                let known = of_it.map(|bytes| PromiseNow { model: entry.model.name.clone(), bytes });
                promised.entry(gpu.0).or_default().extend(known);
            }
        }
        let gpus = promised.into_iter().map(|(gpu, models)| GpuNow {
            gpu,
            is_measured: true,
            total_bytes: None,
            free_bytes: self.policy.free_bytes(Gpu(gpu)),
            reclaimable_bytes: None,
            promised_bytes: models.iter().fold(0, |sum, one| sum.saturating_add(one.bytes)),
            models,
            swapping: self.history.swapping(Gpu(gpu)),
            advice: None,
        });
        let models = entries.iter().zip(statuses).zip(&self.histories).enumerate();
        let models = models.filter(|(_, ((entry, _), _))| entry.is_listed);
        Snapshot {
            uptime_s: self.began.elapsed().as_secs_f64(),
            is_ending: self.is_ending,
            profile,
            models: models
                .filter_map(|(id, ((entry, status), history))| {
                    let oldest_wait_s = self.oldest_wait_s(ModelId(id));
                    Some(ModelNow { oldest_wait_s, ..now(entry, &status?, history) })
                })
                .collect(),
            gpus: gpus.collect(),
            lending: None,
            swaps: self.history.swaps(),
        }
    }
}

/// One that moves, or that is not there, is looked at again soon.
fn is_well(found: &Result<EngineState, Look>) -> bool {
    !matches!(found, Ok(EngineState::Moving | EngineState::Gone) | Err(_))
}

fn now(entry: &Entry, status: &Status, history: &ModelHistory) -> ModelNow {
    let model = &entry.model;
    let seconds = |duration: Option<Duration>| duration.map(|duration| duration.as_secs_f64());
    ModelNow {
        name: model.name.clone(),
        aliases: model.aliases.clone(),
        engine: model.engine.as_str(),
        adapters: model.adapters.clone(),
        url: model.url.clone(),
        gpus: model.rules.gpus.iter().map(|gpu| gpu.0).collect(),
        stage: status.stage,
        stage_s: history.stage_s(),
        is_ready: status.is_ready,
        is_starting: status.is_starting,
        is_pinned: status.is_pinned,
        is_supervised: model.start.is_some(),
        queued: status.queued,
        running: status.running,
        kept: status.kept,
        admitted: history.admitted,
        refused: history.refused,
        held_bytes: status.held_bytes.clone(),
        residue_bytes: status.residue_bytes.clone(),
        can_hibernate: status.can_hibernate,
        cannot_hibernate: status.cannot_hibernate.clone(),
        host_bytes: entry.handle.hibernator().host_bytes(&model.name),
        need_bytes: model.rules.need_bytes,
        known_need_bytes: status.need_bytes.clone(),
        failures: status.failures,
        last_failure: history.last_failure.clone(),
        starts: history.starts,
        oldest_wait_s: None,
        wake_s: seconds(status.wake_duration),
        start_s: seconds(status.start_duration),
        leave_s: seconds(status.leave_duration),
        hibernate_s: seconds(status.hibernate_duration),
        resume_s: seconds(status.resume_duration),
        recent: Recent::default(),
        canary_kind: entry.handle.canary_kind(),
        state_writes_failed: entry.handle.state_writes_failed(),
    }
}
