//! The service: drives the policy with a clock, engines and requests.
//!
//! One task has the policy and nobody else: what happens comes to it as messages, in one order, and what it decides is
//! done by tasks of their own, which report back. So nothing that an engine, a client or an operator does can come
//! between two decisions, and nothing that hangs holds anybody else up.
//!
//! Promises: a request that [`Service::admit`] lets through counts as running until its [`Admission`] is dropped; one
//! that is not waited for any more leaves the queue at once; a task that is given up is dropped, and what it reports
//! later is nobody's.

mod actor;
mod history;
mod site;
mod talk;

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio::sync::{Mutex, broadcast, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

pub use self::talk::{GpuNow, ModelNow, Order, Refused, Snapshot, Swap, Told, What};

use self::actor::{Actor, Message};
use self::site::Site;
use crate::config::{self, Config};
use crate::engine::{self, Engine, EngineError};
use crate::measure::{Memory, Meter};
use crate::policy::{Gpu, Input, ModelId, Refusal, RequestId};
use crate::supervise::{SuperviseError, Supervisor, file_name};

/// How long a measurement for people may take.
const SHOW_MAX: Duration = Duration::from_millis(500);

/// A rotation that runs. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Service(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    messages: mpsc::UnboundedSender<Message>,
    next_request: AtomicU64,
    listeners: broadcast::Sender<Arc<Told>>,
    directory: Arc<RwLock<Directory>>,
    /// The stage of each model, by number.
    stages: Arc<RwLock<Vec<&'static str>>>,
    meter: Arc<dyn Meter>,
    /// What was measured last for people; whoever measures has it.
    shown: Mutex<BTreeMap<usize, Memory>>,
    /// Held while the configuration is taken over.
    reloading: Mutex<()>,
}

/// Who there is, as of the last reading of the configuration.
#[derive(Debug)]
struct Directory {
    config: Arc<Config>,
    /// By number. One that the configuration has no more keeps its number.
    entries: Vec<Entry>,
}

#[derive(Debug, Clone)]
struct Entry {
    model: Arc<config::Model>,
    site: Arc<Site>,
    is_listed: bool,
}

/// A request that goes to its engine. While it lives the request counts as running.
pub struct Admission {
    /// Fires when the request has to end, since its model has to leave.
    pub aborted: CancellationToken,
    _guard: Box<dyn Any + Send>,
}

/// Why a rotation cannot begin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServiceError {
    /// An engine cannot be asked as it is configured.
    #[error("model `{model}`: its engine cannot be asked")]
    Engine {
        /// Whose.
        model: String,
        /// Why.
        source: EngineError,
    },
    /// An engine cannot be supervised as it is configured.
    #[error("model `{model}`: its engine cannot be supervised")]
    Supervise {
        /// Whose.
        model: String,
        /// Why.
        source: SuperviseError,
    },
    /// A model is on other GPUs, at another place, or another engine than before.
    #[error(
        "model `{model}`: its {what} cannot change while the service runs; give it another name and another place, or \
         start the service again"
    )]
    Changed {
        /// Which.
        model: String,
        /// What is another.
        what: &'static str,
    },
    /// Something else that holds as long as the service runs.
    #[error("{what} cannot change while the service runs; leave it as it was, or start the service again")]
    Fixed {
        /// What is another.
        what: &'static str,
    },
    /// The configuration was not taken over, since the service ends or broke.
    #[error("the configuration was not taken over: {reason}")]
    Ending {
        /// What there is to say.
        reason: String,
    },
    /// A model has the engine that another one had before.
    #[error(
        "model `{model}`: its engine at {url} is that of model `{other}` until the service is started again; start it \
         again, or have another engine at another place"
    )]
    Taken {
        /// Which.
        model: String,
        /// Where its engine was to be.
        url: String,
        /// Whose that is.
        other: String,
    },
}

/// What makes engines out of models, which tests replace.
pub type Connect = dyn Fn(&config::Model) -> Result<Arc<dyn Engine>, EngineError> + Send + Sync;

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admission").field("aborted", &self.aborted.is_cancelled()).finish_non_exhaustive()
    }
}

impl Admission {
    /// One for a request that counts as running as long as `guard` lives.
    #[must_use]
    pub fn new(aborted: CancellationToken, guard: Box<dyn Any + Send>) -> Self {
        Self { aborted, _guard: guard }
    }
}

/// Reports that a request is over.
#[derive(Debug)]
struct Present {
    request: RequestId,
    messages: mpsc::UnboundedSender<Message>,
}

impl Drop for Present {
    fn drop(&mut self) {
        // Where nobody takes it any more, nobody counts either.
        let _ = self.messages.send(Message::Input(Input::Left(self.request)));
    }
}

impl Service {
    /// Begins to rotate the models of a configuration. Engines that are there already are found, by asking and measuring.
    ///
    /// # Errors
    /// See [`ServiceError`].
    pub fn start(config: Config, meter: Arc<dyn Meter>) -> Result<Self, ServiceError> {
        Self::start_with(config, meter, &engine::engine_of)
    }

    /// The same with engines that `connect` gives.
    ///
    /// # Errors
    /// See [`ServiceError`].
    pub fn start_with(
        config: Config,
        meter: Arc<dyn Meter>,
        connect: &Connect,
    ) -> Result<Self, ServiceError> {
        let entries = config.models.iter().map(|model| entry(&config, model, &meter, connect));
        let entries = entries.collect::<Result<Vec<_>, _>>()?;
        let (messages, inbox) = mpsc::unbounded_channel();
        let directory = Arc::new(RwLock::new(Directory { config: Arc::new(config), entries }));
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
            shown: Mutex::default(),
            reloading: Mutex::default(),
        }));
        service.watch_all(0);
        Ok(service)
    }

    /// Has deaths of supervised engines reported, of those from `first` on.
    fn watch_all(&self, first: usize) {
        let entries = self.entries();
        for (id, entry) in entries.iter().enumerate().skip(first) {
            let Some(supervisor) = entry.site.supervisor.clone() else { continue };
            let messages = self.0.messages.clone();
            tokio::spawn(async move {
                loop {
                    tokio::select! {
                        how = supervisor.ended() => {
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

    /// The configuration as it was read last.
    #[must_use]
    pub fn config(&self) -> Arc<Config> {
        Arc::clone(&self.0.directory.read().unwrap_or_else(PoisonError::into_inner).config)
    }

    /// The model that is asked for by this name or alias, and what is configured of it.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<(ModelId, Arc<config::Model>)> {
        let directory = self.0.directory.read().unwrap_or_else(PoisonError::into_inner);
        let is_it = |entry: &Entry| {
            let model = &entry.model;
            entry.is_listed && (model.name == name || model.aliases.iter().any(|alias| alias == name))
        };
        let id = directory.entries.iter().position(is_it)?;
        Some((ModelId(id), Arc::clone(&directory.entries[id].model)))
    }

    /// The models that clients may ask for, in the order of the configuration, and the stage that each is in.
    #[must_use]
    pub fn stages(&self) -> Vec<(Arc<config::Model>, &'static str)> {
        let directory = self.0.directory.read().unwrap_or_else(PoisonError::into_inner);
        let stages = self.0.stages.read().unwrap_or_else(PoisonError::into_inner);
        let of = |name: &str| {
            let id =
                directory.entries.iter().position(|entry| entry.is_listed && entry.model.name == name)?;
            Some((Arc::clone(&directory.entries[id].model), stages.get(id).copied().unwrap_or("unknown")))
        };
        directory.config.models.iter().filter_map(|model| of(&model.name)).collect()
    }

    /// Waits until a request may go to its engine. Dropped, it is as if the request had never come.
    ///
    /// # Errors
    /// Why it is not served.
    pub async fn admit(&self, model: ModelId) -> Result<Admission, Refused> {
        let ending = Refused { refusal: Refusal::ShuttingDown, retry_after: None };
        let request = RequestId(self.0.next_request.fetch_add(1, Ordering::Relaxed));
        let (reply, answer) = oneshot::channel();
        let present = Present { request, messages: self.0.messages.clone() };
        self.0.messages.send(Message::Arrived { request, model, reply }).map_err(|_| ending)?;
        let aborted = answer.await.map_err(|_| ending)??;
        Ok(Admission::new(aborted, Box::new(present)))
    }

    /// An engine may be gone: it is asked.
    pub fn suspect(&self, model: ModelId) {
        let _nobody_asks = self.0.messages.send(Message::Suspect(model));
    }

    /// What an operator wants of a model. False if there is none of this name or alias.
    #[must_use]
    pub fn order(&self, name: &str, order: Order) -> bool {
        let Some((model, _)) = self.find(name) else { return false };
        let input = match order {
            Order::Wake => Input::Wake(model),
            Order::Sleep => Input::Sleep(model),
            Order::Restart => Input::Restart(model),
            Order::Pin(is_pinned) => Input::Pin(model, is_pinned),
        };
        self.0.messages.send(Message::Input(input)).is_ok()
    }

    /// All that there is to know now. GPUs are measured for it.
    pub async fn snapshot(&self) -> Snapshot {
        let (reply, answer) = oneshot::channel();
        let nothing = Snapshot {
            uptime_s: 0.0,
            is_ending: true,
            models: Vec::new(),
            gpus: Vec::new(),
            swaps: Vec::new(),
        };
        if self.0.messages.send(Message::Snapshot(reply)).is_err() {
            return nothing;
        }
        let Ok(mut snapshot) = answer.await else { return nothing };
        // One measures at a time, so that a GPU that does not answer keeps no more than one of them.
        if let Ok(mut shown) = self.0.shown.try_lock() {
            for now in &snapshot.gpus {
                let gpu = [Gpu(now.gpu)];
                match tokio::time::timeout(SHOW_MAX, self.0.meter.measure(&gpu)).await {
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
                }
            }
        }
        snapshot
    }

    /// Events from now on.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<Arc<Told>> {
        self.0.listeners.subscribe()
    }

    /// The processes of supervised engines that are on a GPU. It reads files, and may take milliseconds.
    #[must_use]
    pub fn processes(&self, gpu: Gpu) -> Vec<u32> {
        let entries = self.entries();
        let on_it = entries.iter().filter(|entry| entry.site.gpus.contains(&gpu));
        on_it.filter_map(|entry| entry.site.supervisor.as_ref()).flat_map(|one| one.processes()).collect()
    }

    /// The last lines that a supervised engine wrote; nothing if there is no such model.
    #[must_use]
    pub fn log(&self, name: &str, lines: usize) -> Option<Vec<String>> {
        let (model, _) = self.find(name)?;
        let entries = self.entries();
        let supervisor = entries.get(model.0)?.site.supervisor.clone();
        Some(supervisor.map(|supervisor| supervisor.log(lines)).unwrap_or_default())
    }

    /// Takes a changed configuration over, without dropping a request: rules, names, aliases, keys, limits and canaries
    /// change, models come, and models go, which sleep as soon as they are idle. Addresses that are listened on, the state
    /// folder and how memory is measured stay.
    ///
    /// # Errors
    /// See [`ServiceError`]; nothing has changed then.
    pub async fn reload(&self, config: Config) -> Result<(), ServiceError> {
        self.reload_with(config, Arc::new(engine::engine_of)).await
    }

    /// The same with engines that `connect` gives.
    ///
    /// # Errors
    /// As for [`reload`](Self::reload).
    pub async fn reload_with(&self, config: Config, connect: Arc<Connect>) -> Result<(), ServiceError> {
        let _one_at_a_time = self.0.reloading.lock().await;
        let ending = |reason: &str| ServiceError::Ending { reason: reason.to_owned() };
        check_fixed(&self.config(), &config)?;
        let (config, before, meter) = (Arc::new(config), self.entries(), Arc::clone(&self.0.meter));
        let known = before.len();
        let read = Arc::clone(&config);
        // Files are read for it, which may take as long as their disk likes.
        let entries = tokio::task::spawn_blocking(move || entries_of(before, &read, &meter, &*connect));
        let entries = entries.await.map_err(|error| ending(&error.to_string()))??;
        let (reply, taken) = oneshot::channel();
        let message = Message::Reload { config, entries, reply };
        let sent = self.0.messages.send(message);
        if sent.is_err() || taken.await.is_err() {
            return Err(ending("the service ends"));
        }
        self.watch_all(known);
        Ok(())
    }

    /// Lets nobody in any more, waits until all running requests have ended and nobody falls asleep, wakes or is being
    /// stopped, or `patience` is over, which ends the requests, and stops the engines that are supervised if that is
    /// wanted.
    pub async fn shut_down(&self, patience: Duration, stops_engines: bool) {
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
        let _too_long = tokio::time::timeout(patience, idle).await;
        let _ = self.0.messages.send(Message::End);
        self.0.messages.closed().await;
        if !stops_engines {
            return;
        }
        let stopping = self.entries().into_iter().filter_map(|entry| {
            let (supervisor, grace) = (entry.site.supervisor.clone()?, entry.model.rules.limits.stop);
            Some(async move {
                if let Err(error) = supervisor.stop(grace).await {
                    tracing::error!(model = entry.model.name, %error, "its engine was not stopped");
                }
            })
        });
        futures_util::future::join_all(stopping).await;
    }
}

/// Refuses what is read once, at the start.
fn check_fixed(before: &Config, after: &Config) -> Result<(), ServiceError> {
    let differs = [
        ("front.listen", before.front.listen != after.front.listen),
        ("control.listen", before.control.listen != after.control.listen),
        ("state", before.state != after.state),
        ("memory", before.memory != after.memory),
    ];
    let other = differs.iter().find(|(_, differs)| *differs);
    other.map_or(Ok(()), |(what, _)| Err(ServiceError::Fixed { what }))
}

/// The entries of a configuration that was read again. Those of models that it has no more stay.
fn entries_of(
    mut entries: Vec<Entry>,
    config: &Config,
    meter: &Arc<dyn Meter>,
    connect: &Connect,
) -> Result<Vec<Entry>, ServiceError> {
    entries.iter_mut().for_each(|entry| entry.is_listed = false);
    for model in &config.models {
        match entries.iter_mut().find(|known| known.model.name == model.name) {
            Some(known) => *known = changed(known, model, config, connect)?,
            None => {
                if let Some(other) = entries.iter().find(|known| known.model.url == model.url) {
                    let (model, url) = (model.name.clone(), model.url.clone());
                    return Err(ServiceError::Taken { model, url, other: other.model.name.clone() });
                }
                entries.push(entry(config, model, meter, connect)?);
            }
        }
    }
    Ok(entries)
}

fn entry(
    config: &Config,
    model: &config::Model,
    meter: &Arc<dyn Meter>,
    connect: &Connect,
) -> Result<Entry, ServiceError> {
    let engine =
        connect(model).map_err(|source| ServiceError::Engine { model: model.name.clone(), source })?;
    let supervisor = model.start.as_ref().map(|start| {
        Supervisor::new(&model.name, start.clone(), config.state.as_deref())
            .map(Arc::new)
            .map_err(|source| ServiceError::Supervise { model: model.name.clone(), source })
    });
    let supervisor = supervisor.transpose()?;
    let site = Arc::new(Site::new(model, engine, supervisor, Arc::clone(meter), kept_at(model, config)));
    Ok(Entry { model: Arc::new(model.clone()), site, is_listed: true })
}

/// Where a model's first answer is kept.
fn kept_at(model: &config::Model, config: &Config) -> Option<PathBuf> {
    config.state.as_ref().map(|folder| folder.join(file_name(&model.name) + ".first-answer"))
}

/// An entry with what may change of its model.
fn changed(
    entry: &Entry,
    model: &config::Model,
    config: &Config,
    connect: &Connect,
) -> Result<Entry, ServiceError> {
    let old = &entry.model;
    let differs = [
        ("engine", old.engine != model.engine),
        ("url", old.url != model.url),
        ("level", old.level != model.level),
        ("served_as", old.served_as != model.served_as),
        ("command", old.start != model.start),
        ("gpus", old.rules.gpus != model.rules.gpus),
    ];
    if let Some((what, _)) = differs.iter().find(|(_, differs)| *differs) {
        return Err(ServiceError::Changed { model: model.name.clone(), what });
    }
    let site = if old.canary == model.canary {
        Arc::clone(&entry.site)
    } else {
        let site = &entry.site;
        let engine =
            connect(model).map_err(|source| ServiceError::Engine { model: model.name.clone(), source })?;
        let meter = Arc::clone(&site.meter);
        Arc::new(Site::new(model, engine, site.supervisor.clone(), meter, kept_at(model, config)))
    };
    Ok(Entry { model: Arc::new(model.clone()), site, is_listed: true })
}
