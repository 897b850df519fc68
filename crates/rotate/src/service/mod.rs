//! The service: drives the policy with a clock, engines and requests.
//!
//! One task owns the policy and takes inputs as messages, in one order. Effects run in tasks of their own, which report
//! back. So nothing intervenes between two decisions, and a hanging engine delays no other.
//!
//! Promises: an admitted request counts as running until its [`Admission`] is dropped. A request whose caller gives up
//! leaves the queue at once. A cancelled task is dropped, and its late report is ignored.

mod actor;
mod advice;
mod directory;
mod first_answer;
mod handle;
mod history;
mod look;
mod names;
mod snapshot;
mod swapping;
mod variables;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use futures_util::future::join_all;
use poorwill_front::backend::Admission;
use tokio::sync::{Mutex, broadcast, mpsc, oneshot};

pub use self::names::Destination;
pub use self::snapshot::{
    EventKind, GpuNow, LeftModel, ModelCommand, ModelNow, PromiseNow, Refused, ServiceEvent, Snapshot, Swap,
    SwapPath, Swapping,
};

use self::actor::{Actor, Admitted, Message};
use self::directory::{AnsweredParts, Directory, Entry, InFlightCount};
use self::handle::EngineHandle;
pub(crate) use self::history::LEAVING;
use self::names::{NamedModel, TargetNow};
pub(crate) use self::swapping::RESTS;
use self::variables::of_lending;
use crate::config::{self, Config};
use crate::engine::{self, Engine, EngineError};
use crate::hibernation::{Hibernator, Sets};
use crate::measure::{GpuMemory, Meter};
use crate::supervise::{EngineLog, SuperviseError, Supervisor, file_name};
use poorwill_rotation_policy::{Gpu, Input, ModelId, Refusal, RequestId, StageName};

/// For the measurement of one GPU for the status.
const STATUS_MEASURE_MAX: Duration = Duration::from_millis(500);

/// A running rotation. Clones share it.
#[derive(Clone, Debug)]
pub struct Service(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    messages: mpsc::UnboundedSender<Message>,
    next_request: AtomicU64,
    listeners: broadcast::Sender<Arc<ServiceEvent>>,
    directory: Arc<RwLock<Directory>>,
    /// By model number.
    stages: Arc<RwLock<Vec<StageName>>>,
    meter: Arc<dyn Meter>,
    hibernator: Arc<dyn Hibernator>,
    /// The last measurement for the status. One caller at a time measures.
    shown: Mutex<BTreeMap<usize, GpuMemory>>,
    reloading: Mutex<()>,
}

/// Why a service cannot start or reload.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServiceError {
    /// The engine's configuration is invalid.
    #[error("model `{model}`: its engine cannot be used")]
    Engine {
        /// The model.
        model: String,
        /// The cause.
        source: EngineError,
    },
    /// The engine cannot be supervised.
    #[error("model `{model}`: its engine cannot be supervised")]
    Supervise {
        /// The model.
        model: String,
        /// The cause.
        source: SuperviseError,
    },
    /// A fixed property of a model changed.
    #[error(
        "model `{model}`: its {what} cannot change while the service runs; give it another name and another address, or \
         start the service again"
    )]
    Changed {
        /// The model.
        model: String,
        /// The property.
        what: &'static str,
    },
    /// A fixed setting of the service changed.
    #[error("{what} cannot change while the service runs; leave it as it was, or start the service again")]
    Fixed {
        /// The setting.
        what: &'static str,
    },
    /// The service ended during a reload.
    #[error("the configuration was not taken over: {reason}")]
    Ending {
        /// The cause.
        reason: String,
    },
    /// No profile has this name.
    #[error("there is no profile `{name}`; there are: {}", known.join(", "))]
    Profile {
        /// The name.
        name: String,
        /// All profiles.
        known: Vec<String>,
    },
    /// Another model had this engine before.
    #[error(
        "model `{model}`: its engine at {url} is that of model `{other}` until the service is started again; start it \
         again, or give the other engine another address"
    )]
    Taken {
        /// The model.
        model: String,
        /// The engine's URL.
        url: String,
        /// The other model.
        other: String,
    },
}

/// Makes a model's engine. Tests replace it.
pub type Connect = dyn Fn(&config::Model) -> Result<Arc<dyn Engine>, EngineError> + Send + Sync;

#[derive(Debug)]
struct RequestGuard {
    request: RequestId,
    messages: mpsc::UnboundedSender<Message>,
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        // Without a receiver, no requests are counted.
        let _ = self.messages.send(Message::Input(Input::Left(self.request)));
    }
}

impl Service {
    /// Starts to rotate the models of a configuration. Engines that run already are probed and measured.
    ///
    /// # Errors
    /// See [`ServiceError`].
    pub fn start(config: Config, meter: Arc<dyn Meter>) -> Result<Self, ServiceError> {
        Self::start_with(config, meter, &engine::engine_of)
    }

    /// As [`start`](Self::start), with engines from `connect`.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with(
        config: Config,
        meter: Arc<dyn Meter>,
        connect: &Connect,
    ) -> Result<Self, ServiceError> {
        let names = config.models.iter().map(|model| model.name.as_str());
        let of_helper = config.hibernate.clone().unwrap_or_default();
        let sets = Sets::new(&of_helper, config.state.as_deref(), names);
        Self::start_with_hibernator(config, meter, connect, Arc::new(sets))
    }

    /// As [`start_with`](Self::start_with), and engines are taken off their GPUs by `hibernator`.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with_hibernator(
        config: Config,
        meter: Arc<dyn Meter>,
        connect: &Connect,
        hibernator: Arc<dyn Hibernator>,
    ) -> Result<Self, ServiceError> {
        let tools = Tools { meter: &meter, hibernator: &hibernator, connect };
        let entries = config.models.iter().map(|model| entry(&config, model, tools));
        let entries = entries.collect::<Result<Vec<_>, _>>()?;
        let (messages, inbox) = mpsc::unbounded_channel();
        let directory = Arc::new(RwLock::new(Directory::new(Arc::new(config), entries, None)));
        let actor = Actor::new(Arc::clone(&directory), messages.clone());
        let (listeners, stages) = (actor.listeners(), actor.stages());
        tokio::spawn(actor.run(inbox));
        let next_request = AtomicU64::new(0);
        let service = Self(Arc::new(Inner {
            messages,
            next_request,
            listeners,
            directory,
            stages,
            meter,
            hibernator,
            shown: Mutex::default(),
            reloading: Mutex::default(),
        }));
        service.watch_all(0);
        service.watch_helper();
        Ok(service)
    }

    /// Has hibernating models probed after each new helper.
    fn watch_helper(&self) {
        let (hibernator, messages) = (Arc::clone(&self.0.hibernator), self.0.messages.clone());
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    () = hibernator.restarted() => {
                        if messages.send(Message::HelperRestarted).is_err() {
                            return;
                        }
                    }
                    () = messages.closed() => return,
                }
            }
        });
    }

    /// Reports the ends of supervised engines, for models from number `first`.
    fn watch_all(&self, first: usize) {
        let entries = self.entries();
        for (id, entry) in entries.iter().enumerate().skip(first) {
            let Some(supervisor) = entry.handle.supervisor().cloned() else { continue };
            let messages = self.0.messages.clone();
            tokio::spawn(async move {
                loop {
                    tokio::select! {
                        how = supervisor.wait() => {
                            if messages.send(Message::Died(ModelId(id), how)).is_err() {
                                return;
                            }
                        }
                        () = messages.closed() => return,
                    }
                }
            });
        }
    }

    fn entries(&self) -> Vec<Entry> {
        self.0.directory.read().unwrap_or_else(PoisonError::into_inner).entries.clone()
    }

    /// The current configuration.
    #[must_use]
    pub fn config(&self) -> Arc<Config> {
        Arc::clone(&self.0.directory.read().unwrap_or_else(PoisonError::into_inner).config)
    }

    /// The chosen profile.
    #[must_use]
    pub fn profile(&self) -> Option<String> {
        self.0.directory.read().unwrap_or_else(PoisonError::into_inner).profile.clone()
    }

    /// Chooses another profile, or none, for requests from now on.
    ///
    /// # Errors
    /// [`ServiceError::Profile`]
    pub fn set_profile(&self, profile: Option<&str>) -> Result<(), ServiceError> {
        let mut directory = self.0.directory.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(name) = profile.filter(|name| !directory.config.profiles.contains_key(*name)) {
            let known = directory.config.profiles.keys().cloned().collect();
            return Err(ServiceError::Profile { name: name.to_owned(), known });
        }
        let (config, entries) = (Arc::clone(&directory.config), directory.entries.clone());
        *directory = Directory::new(config, entries, profile.map(str::to_owned));
        Ok(())
    }

    /// The model with this name, alias or adapter.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<(ModelId, Arc<config::Model>)> {
        let directory = self.0.directory.read().unwrap_or_else(PoisonError::into_inner);
        let id = directory.names.id(name)?;
        Some((ModelId(id), Arc::clone(&directory.entries[id].model)))
    }

    /// Where a request with this name goes: to the model with it, or to one of a selector's. The request counts for that
    /// model from now on.
    #[must_use]
    pub fn route(&self, name: &str) -> Option<Destination> {
        self.chosen(name, |entry, target| Destination {
            id: ModelId(target.id),
            model: Arc::clone(&entry.model),
            served_as: target.served_as.clone(),
            parameters: Arc::clone(&target.parameters),
            in_flight: entry.in_flight.begin(),
        })
    }

    /// The model with this own name, whatever the chosen profile says.
    #[must_use]
    pub fn route_of_model(&self, name: &str) -> Option<Destination> {
        let directory = self.0.directory.read().unwrap_or_else(PoisonError::into_inner);
        let is_it = |(_, entry): &(usize, &Entry)| entry.is_listed && entry.model.name == name;
        let (id, entry) = directory.entries.iter().enumerate().find(is_it)?;
        Some(Destination {
            id: ModelId(id),
            model: Arc::clone(&entry.model),
            served_as: entry.model.served_as.clone(),
            parameters: Arc::default(),
            in_flight: entry.in_flight.begin(),
        })
    }

    /// The stage of the model that a request with this name would get now.
    #[must_use]
    pub fn stage_of(&self, name: &str) -> Option<StageName> {
        let id = self.chosen(name, |_, target| target.id)?;
        let stages = self.0.stages.read().unwrap_or_else(PoisonError::into_inner);
        Some(stages.get(id).copied().unwrap_or(StageName::Unknown))
    }

    fn chosen<T>(&self, name: &str, take: impl FnOnce(&Entry, &NamedModel) -> T) -> Option<T> {
        let directory = self.0.directory.read().unwrap_or_else(PoisonError::into_inner);
        let stages = self.0.stages.read().unwrap_or_else(PoisonError::into_inner);
        let now = |id: usize| TargetNow {
            stage: stages.get(id).copied().unwrap_or(StageName::Unknown),
            in_flight: directory.entries[id].in_flight.now(),
        };
        directory.names.chosen(name, now, |target| take(&directory.entries[target.id], target))
    }

    /// The current models in the order of the configuration, with their stages.
    #[must_use]
    pub fn stages(&self) -> Vec<(Arc<config::Model>, StageName)> {
        let directory = self.0.directory.read().unwrap_or_else(PoisonError::into_inner);
        let stages = self.0.stages.read().unwrap_or_else(PoisonError::into_inner);
        let of = |name: &str| {
            let id =
                directory.entries.iter().position(|entry| entry.is_listed && entry.model.name == name)?;
            Some((
                Arc::clone(&directory.entries[id].model),
                stages.get(id).copied().unwrap_or(StageName::Unknown),
            ))
        };
        directory.config.models.iter().filter_map(|model| of(&model.name)).collect()
    }

    /// Waits until a request may go to its engine. Dropping the future withdraws the request.
    ///
    /// # Errors
    /// Why it is refused.
    pub async fn admit(&self, model: ModelId) -> Result<Admission, Refused> {
        self.admit_by(model, 0).await
    }

    /// As [`admit`](Self::admit). The priority is added to that of the model.
    ///
    /// # Errors
    /// Why it is refused.
    pub async fn admit_by(&self, model: ModelId, priority: i32) -> Result<Admission, Refused> {
        let ending = Refused { refusal: Refusal::ShuttingDown, retry_after: None };
        let request = RequestId(self.0.next_request.fetch_add(1, Ordering::Relaxed));
        let (reply, answer) = oneshot::channel();
        let guard = RequestGuard { request, messages: self.0.messages.clone() };
        self.0.messages.send(Message::Arrived { request, model, priority, reply }).map_err(|_| ending)?;
        let Admitted { aborted, trial } = answer.await.map_err(|_| ending)??;
        let admission = Admission::new(aborted, Box::new(guard)).on_trial(trial);
        let directory = self.0.directory.read().unwrap_or_else(PoisonError::into_inner);
        let answered = directory.entries.get(model.0).map(|entry| entry.answered.counter());
        Ok(match answered {
            Some(answered) => admission.counting(answered),
            None => admission,
        })
    }

    /// Probes an engine that may be gone.
    pub fn suspect(&self, model: ModelId) {
        let _ended = self.0.messages.send(Message::Suspect(model));
    }

    /// Whether the last start of its engine failed before there was one: by this machine or the configuration.
    #[must_use]
    pub fn was_not_started(&self, model: ModelId) -> bool {
        self.entries().get(model.0).is_some_and(|entry| entry.handle.was_not_started())
    }

    /// Sends a command to a model. False if no model has this name or alias.
    #[must_use]
    pub fn command(&self, name: &str, command: ModelCommand) -> bool {
        let Some((model, _)) = self.find(name) else { return false };
        let input = match command {
            ModelCommand::Wake => Input::Wake(model),
            ModelCommand::Prepare => Input::Prepare(model),
            ModelCommand::Sleep => Input::Sleep(model),
            ModelCommand::Hibernate => Input::Hibernate(model),
            ModelCommand::Restart => Input::Restart(model),
            ModelCommand::Pin(is_pinned) => Input::Pin(model, is_pinned),
            ModelCommand::Hot(is_hot) => Input::Hot(model, is_hot),
            ModelCommand::Hold(is_held) => Input::Hold(model, is_held),
        };
        self.0.messages.send(Message::Input(input)).is_ok()
    }

    /// The current status. Measures the GPUs.
    pub async fn snapshot(&self) -> Snapshot {
        let (reply, answer) = oneshot::channel();
        let nothing = Snapshot {
            uptime_s: 0.0,
            is_ending: true,
            profile: None,
            models: Vec::new(),
            gpus: Vec::new(),
            lending: None,
            swaps: Vec::new(),
        };
        if self.0.messages.send(Message::Snapshot(reply)).is_err() {
            return nothing;
        }
        let Ok(mut snapshot) = answer.await else { return nothing };
        let lends = self.config().lend.is_some();
        for now in &mut snapshot.gpus {
            now.is_measured = self.0.meter.is_measured();
            // What the policy knows is with what is lent.
            now.free_bytes = now.free_bytes.filter(|_| !lends);
        }
        if lends {
            let asked = tokio::time::timeout(STATUS_MEASURE_MAX, self.0.meter.lent_totals());
            snapshot.lending = asked.await.ok().flatten();
        }
        // One caller measures at a time, so an unresponsive GPU blocks only one.
        if let Ok(mut shown) = self.0.shown.try_lock() {
            for now in &snapshot.gpus {
                let gpu = [Gpu(now.gpu)];
                match tokio::time::timeout(STATUS_MEASURE_MAX, self.0.meter.measure(&gpu)).await {
                    Ok(Ok(memory)) => shown.extend(memory.first().map(|memory| (now.gpu, *memory))),
                    Ok(Err(_)) => drop(shown.remove(&now.gpu)),
                    Err(_) => {
                        shown.remove(&now.gpu);
                        break;
                    }
                }
            }
            for now in &mut snapshot.gpus {
                if let Some(memory) = shown.get(&now.gpu) {
                    (now.free_bytes, now.total_bytes) = (Some(memory.free_bytes), Some(memory.total_bytes));
                    now.reclaimable_bytes = Some(memory.reclaimable_bytes);
                }
            }
        }
        advice::advise(&mut snapshot, &self.config(), history::unix_ms());
        snapshot
    }

    /// Events from now on.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<Arc<ServiceEvent>> {
        self.0.listeners.subscribe()
    }

    /// The processes of supervised engines on a GPU. Reads files, and may take milliseconds.
    #[must_use]
    pub fn processes(&self, gpu: Gpu) -> Vec<u32> {
        let entries = self.entries();
        let on_it = entries.iter().filter(|entry| entry.handle.gpus().contains(&gpu));
        on_it.filter_map(|entry| entry.handle.supervisor()).flat_map(|one| one.processes()).collect()
    }

    /// The configured needs of the models that may hold memory of a GPU now.
    pub(crate) fn declared_bytes(&self, gpu: Gpu) -> u64 {
        let stages = self.stages().into_iter();
        let holding = stages.filter(|(model, stage)| stage.holds_memory() && model.rules.gpus.contains(&gpu));
        holding.filter_map(|(model, _)| model.rules.need_bytes).fold(0, u64::saturating_add)
    }

    /// A supervised engine's output; `None` if no model has this name or alias, or the service does not start its engine.
    #[must_use]
    pub fn log(&self, name: &str) -> Option<Arc<EngineLog>> {
        let (model, _) = self.find(name)?;
        Some(self.entries().get(model.0)?.handle.supervisor()?.output())
    }

    /// Applies a changed configuration without dropping a request. Rules, names, parameters, keys, limits and canaries
    /// can change, and models can be added or removed. Removed models sleep as soon as they are idle.
    ///
    /// # Errors
    /// See [`ServiceError`]; nothing has changed then.
    pub async fn reload(&self, config: Config) -> Result<(), ServiceError> {
        self.reload_with(config, Arc::new(engine::engine_of)).await
    }

    /// As [`reload`](Self::reload), with engines from `connect`.
    ///
    /// # Errors
    /// As [`reload`](Self::reload).
    pub async fn reload_with(&self, config: Config, connect: Arc<Connect>) -> Result<(), ServiceError> {
        let _one_at_a_time = self.0.reloading.lock().await;
        let ending = |reason: &str| ServiceError::Ending { reason: reason.to_owned() };
        check_fixed(&self.config(), &config)?;
        let (config, before) = (Arc::new(config), self.entries());
        let (meter, hibernator) = (Arc::clone(&self.0.meter), Arc::clone(&self.0.hibernator));
        let known = before.len();
        let read = Arc::clone(&config);
        // This reads files, which may be slow.
        let entries = tokio::task::spawn_blocking(move || {
            let tools = Tools { meter: &meter, hibernator: &hibernator, connect: &*connect };
            entries_of(before, &read, tools)
        });
        let entries = entries.await.map_err(|error| ending(&error.to_string()))??;
        for supervisor in entries.iter().filter_map(|entry| entry.handle.supervisor()) {
            supervisor.withhold(&config.secret_variables);
        }
        let hibernate = config.hibernate.clone().unwrap_or_default();
        // First, since models try to hibernate by it at once.
        self.0.hibernator.configure(&hibernate);
        let (reply, taken) = oneshot::channel();
        let message = Message::Reload { config, entries, reply };
        let sent = self.0.messages.send(message);
        if sent.is_err() || taken.await.is_err() {
            return Err(ending("the service ends"));
        }
        self.watch_all(known);
        Ok(())
    }

    /// Stops admitting requests. Waits until no request runs and no engine sleeps, wakes or stops. After `timeout` it
    /// aborts requests. Then stops supervised engines if requested.
    pub async fn shut_down(&self, timeout: Duration, stops_engines: bool) {
        let _ = self.0.messages.send(Message::Input(Input::Shutdown));
        let idle = async {
            loop {
                let (reply, answer) = oneshot::channel();
                let asked = self.0.messages.send(Message::Busy(reply));
                if asked.is_err() || !matches!(answer.await, Ok(1..)) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let _too_long = tokio::time::timeout(timeout, idle).await;
        let _ = self.0.messages.send(Message::End);
        self.0.messages.closed().await;
        // No later service would find one that hibernates without a state folder.
        let stays = !stops_engines && self.config().state.is_some();
        if !stays {
            let is_off = |entry: &Entry| entry.handle.hibernator().may_hibernate(&entry.model.name);
            let (off, others): (Vec<Entry>, Vec<Entry>) = self.entries().into_iter().partition(is_off);
            join_all(others.into_iter().map(|entry| entry.let_go(stops_engines))).await;
            let_go_in_turns(off, stops_engines).await;
        }
        self.0.hibernator.end().await;
    }
}

/// Those that come back take memory, so on each GPU they do one after the other.
async fn let_go_in_turns(entries: Vec<Entry>, stops: bool) {
    let gpus = entries.iter().flat_map(|entry| entry.handle.gpus());
    let turns: BTreeMap<Gpu, Mutex<()>> = gpus.map(|gpu| (*gpu, Mutex::default())).collect();
    let turns = &turns;
    let in_turn = |entry: Entry| async move {
        // All lock in the same order, so that none waits for one that waits for it.
        let own = entry.handle.gpus().to_vec();
        let mut held = Vec::new();
        for (_, turn) in turns.iter().filter(|(gpu, _)| own.contains(gpu)) {
            held.push(turn.lock().await);
        }
        entry.let_go(stops).await;
    };
    join_all(entries.into_iter().map(in_turn)).await;
}

impl Entry {
    /// Stops its engine, or else leaves it on its GPUs.
    async fn let_go(self, stops: bool) {
        let Some(supervisor) = self.handle.supervisor() else { return };
        let model = &self.model.name;
        if stops {
            if let Err(error) = self.handle.end(supervisor, self.model.rules.limits.stop).await {
                tracing::error!(model, error, "cannot stop the engine");
            }
        } else if self.handle.hibernator().may_hibernate(model)
            && let Err(error) = self.handle.resume_within(self.model.rules.limits.wake).await
        {
            tracing::error!(model, error, "cannot resume the engine, which stays in hibernation");
        }
    }
}

/// What every engine's handle uses.
#[derive(Clone, Copy)]
struct Tools<'a> {
    meter: &'a Arc<dyn Meter>,
    hibernator: &'a Arc<dyn Hibernator>,
    connect: &'a Connect,
}

impl Tools<'_> {
    fn shared(self) -> (Arc<dyn Meter>, Arc<dyn Hibernator>) {
        (Arc::clone(self.meter), Arc::clone(self.hibernator))
    }

    fn engine(self, model: &config::Model) -> Result<Arc<dyn Engine>, ServiceError> {
        let failed = |source| ServiceError::Engine { model: model.name.clone(), source };
        (self.connect)(model).map_err(failed)
    }
}

/// Refuses changes of settings that are read only at the start.
fn check_fixed(before: &Config, after: &Config) -> Result<(), ServiceError> {
    let differs = [
        ("front.listen", before.front.listen != after.front.listen),
        ("front.certificate", before.front.tls != after.front.tls),
        ("control.listen", before.control.listen != after.control.listen),
        ("state", before.state != after.state),
        ("memory", before.memory != after.memory),
        ("lend", before.lend != after.lend),
        ("traces", before.traces != after.traces),
        ("fleet", before.fleet != after.fleet),
    ];
    let other = differs.iter().find(|(_, differs)| *differs);
    other.map_or(Ok(()), |(what, _)| Err(ServiceError::Fixed { what }))
}

/// Removed models keep their entries.
fn entries_of(
    mut entries: Vec<Entry>,
    config: &Config,
    tools: Tools<'_>,
) -> Result<Vec<Entry>, ServiceError> {
    entries.iter_mut().for_each(|entry| entry.is_listed = false);
    for model in &config.models {
        match entries.iter_mut().find(|known| known.model.name == model.name) {
            Some(known) => *known = changed(known, model, config, tools)?,
            None => {
                if let Some(other) = entries.iter().find(|known| known.model.url == model.url) {
                    let (model, url) = (model.name.clone(), model.url.clone());
                    return Err(ServiceError::Taken { model, url, other: other.model.name.clone() });
                }
                entries.push(entry(config, model, tools)?);
            }
        }
    }
    Ok(entries)
}

fn entry(config: &Config, model: &config::Model, tools: Tools<'_>) -> Result<Entry, ServiceError> {
    let engine = tools.engine(model)?;
    let supervisor = model.start.as_ref().map(|start| {
        let start = of_lending(start.clone(), config.lend.as_ref());
        Supervisor::new(&model.name, start, config.state.as_deref())
            .map(Arc::new)
            .map_err(|source| ServiceError::Supervise { model: model.name.clone(), source })
    });
    let supervisor = supervisor.transpose()?;
    if let Some(supervisor) = &supervisor {
        supervisor.withhold(&config.secret_variables);
    }
    let kept_at = kept_at(model, config);
    let handle = Arc::new(EngineHandle::new(model, engine, supervisor, tools.shared(), kept_at));
    let (model, in_flight) = (Arc::new(model.clone()), InFlightCount::default());
    Ok(Entry { model, handle, is_listed: true, in_flight, answered: AnsweredParts::default() })
}

fn kept_at(model: &config::Model, config: &Config) -> Option<PathBuf> {
    config.state.as_ref().map(|folder| folder.join(file_name(&model.name) + ".first-answer"))
}

fn stop_command(model: &config::Model) -> &[String] {
    model.start.as_ref().map_or(&[], |start| &start.stop_command)
}

fn changed(
    entry: &Entry,
    model: &config::Model,
    config: &Config,
    tools: Tools<'_>,
) -> Result<Entry, ServiceError> {
    let old = &entry.model;
    let differs = [
        ("engine", old.engine != model.engine),
        ("url", old.url != model.url),
        ("level", old.level != model.level),
        ("served_as", old.served_as != model.served_as),
        ("stop_command", stop_command(old) != stop_command(model)),
        ("command", old.start != model.start),
        ("gpus", old.rules.gpus != model.rules.gpus),
    ];
    if let Some((what, _)) = differs.iter().find(|(_, differs)| *differs) {
        return Err(ServiceError::Changed { model: model.name.clone(), what });
    }
    let is_asked_alike =
        old.canary == model.canary && old.rules.can_sleep == model.rules.can_sleep && old.http == model.http;
    let handle = if is_asked_alike {
        Arc::clone(&entry.handle)
    } else {
        let handle = &entry.handle;
        let engine = tools.engine(model)?;
        let kept_at = kept_at(model, config);
        let after = EngineHandle::new(model, engine, handle.supervisor().cloned(), tools.shared(), kept_at);
        Arc::new(after.remembering(handle))
    };
    let (in_flight, answered) = (entry.in_flight.clone(), entry.answered.clone());
    Ok(Entry { model: Arc::new(model.clone()), handle, is_listed: true, in_flight, answered })
}
