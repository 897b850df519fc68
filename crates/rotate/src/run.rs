//! A whole rotation: service, front and control.
//!
//! Promises: if one part cannot start, no part runs. [`Running::end`] cuts no request off before its timeout.

use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::broadcast;
use tokio::task::{JoinError, JoinHandle};
use tokio_util::sync::CancellationToken;

use crate::config::{self, Card, Config, ConfigError};
use crate::control::{self, ControlApi, Later};
use crate::fleet::{Agent, FleetError, Membership, NotOwned, Owned};
use crate::front::{self, Backend, Listed, NameKind, Route, Timeouts};
use crate::measure::{self, Devices, Meter, Processes};
use crate::policy::{Gpu, ModelId, StageName};
use crate::requests::Requests;
use crate::service::{
    Admission, Destination, ModelCommand, Refused, Service, ServiceError, ServiceEvent, Snapshot,
};
use crate::traces::{TraceError, Traces};

/// Connections that wait to be accepted. The system may allow fewer. A client that finds them full tries again a second
/// later.
const BACKLOG: u32 = 4096;
/// For a listener to close after its last request.
pub(crate) const CLOSE_MAX: Duration = Duration::from_secs(6);

/// Why a rotation cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The service cannot begin.
    #[error(transparent)]
    Service(#[from] ServiceError),
    /// The state folder cannot be written, or another process uses it.
    #[error(
        "the state folder {} cannot be used: {reason}; end the other rotation, or give this one a folder of its own",
        folder.display()
    )]
    State {
        /// The folder.
        folder: PathBuf,
        /// The cause.
        reason: String,
    },
    /// The address cannot be bound.
    #[error(
        "the {listener} cannot listen on {address}; give it another address, or end the process that listens there"
    )]
    Listen {
        /// `front` or `control`.
        listener: &'static str,
        /// Where.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// Traces cannot be exported.
    #[error(transparent)]
    Traces(#[from] TraceError),
    /// The node cannot take part in its fleet.
    #[error("it cannot take part in its fleet")]
    Fleet(#[from] FleetError),
    /// A listener stopped unexpectedly.
    #[error("the {listener} has ended: {reason}")]
    Ended {
        /// `front` or `control`.
        listener: &'static str,
        /// The cause.
        reason: String,
    },
}

impl RunError {
    pub(crate) fn ended(listener: &'static str, how: Result<io::Result<()>, JoinError>) -> Self {
        let reason = match how {
            Ok(Ok(())) => "no shutdown was requested".to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        Self::Ended { listener, reason }
    }
}

/// A running rotation.
#[derive(Debug)]
pub struct Running {
    /// The front's bound address.
    pub front: SocketAddr,
    /// Control's bound address.
    pub control: SocketAddr,
    /// The service behind both.
    pub service: Service,
    /// Stops the front. Running answers finish.
    closing: CancellationToken,
    /// Stops control.
    ending: CancellationToken,
    traces: Traces,
    agent: Option<Agent>,
    /// `None` after the task has ended.
    listeners: [(&'static str, Option<JoinHandle<io::Result<()>>>); 2],
    /// Its lock is released when it closes, however the process ends.
    _state: Option<File>,
}

#[derive(Debug)]
struct ServiceHandle {
    service: Service,
    requests: Arc<Requests>,
    path: Option<PathBuf>,
    /// What a node of a fleet may serve; `None` for one of no fleet, which serves everything.
    owned: Option<Owned>,
}

/// Its lock marks a state folder as in use.
const LOCK: &str = "rotation.lock";

fn lock_state(folder: &Path) -> Result<File, RunError> {
    let failed = |reason: String| RunError::State { folder: folder.to_path_buf(), reason };
    let open = || {
        std::fs::create_dir_all(folder)?;
        File::options().create(true).truncate(false).write(true).open(folder.join(LOCK))
    };
    let file = open().map_err(|error| failed(error.to_string()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(failed("another rotation that runs has it".to_owned())),
        Err(TryLockError::Error(error)) => Err(failed(format!("it cannot be locked: {error}"))),
    }
}

/// Starts a rotation. With a `path`, the configuration can be reloaded from there.
///
/// # Errors
/// See [`RunError`]; nothing runs then.
pub async fn begin(config: Config, path: Option<PathBuf>) -> Result<Running, RunError> {
    // Blocking is fine: no client is connected yet.
    let state = config.state.as_deref().map(lock_state).transpose()?;
    let (front, front_address) = listen("front", config.front.listen).await?;
    let (control, control_address) = listen("control", config.control.listen).await?;
    let known: Arc<OnceLock<Service>> = Arc::default();
    let meter = meter(&config, &known);
    let traces = config.traces.as_ref().map(Traces::start).transpose()?.unwrap_or_default();
    let service = Service::start(config.clone(), Arc::clone(&meter))?;
    traces.follow(service.events());
    // Engines are probed first, so the meter does not need the service before this.
    let _only_once = known.set(service.clone());
    // The service answers meanwhile: NVML may block.
    tokio::spawn(measure::warn_of_unmeasured(meter, gpus_of(&config)));
    let (closing, ending) = (CancellationToken::new(), CancellationToken::new());
    let requests = Arc::new(Requests::traced(traces.clone()));
    let join = |fleet: &config::Fleet| Agent::start(service.clone(), fleet.clone(), config.state.as_deref());
    let agent = config.fleet.as_ref().map(join).transpose()?;
    let owned = agent.as_ref().map(Agent::owned);
    let handle = Arc::new(ServiceHandle { service: service.clone(), requests, path, owned });
    let backend: Arc<dyn Backend> = Arc::<ServiceHandle>::clone(&handle);
    let front = tokio::spawn(front::serve(front, backend, closing.clone(), Timeouts::default()));
    let control = tokio::spawn(control::serve(control, handle, ending.clone()));
    tracing::info!(front = %front_address, control = %control_address, "running");
    let listeners = [("front", Some(front)), ("control", Some(control))];
    Ok(Running {
        front: front_address,
        control: control_address,
        service,
        closing,
        ending,
        traces,
        agent,
        listeners,
        _state: state,
    })
}

pub(crate) async fn listen(
    listener: &'static str,
    address: SocketAddr,
) -> Result<(TcpListener, SocketAddr), RunError> {
    let failed = |source| RunError::Listen { listener, address, source };
    let bind = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        // As `TcpListener::bind` does, for an address that an ended rotation had.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    let listener = bind().map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

fn meter(config: &Config, service: &Arc<OnceLock<Service>>) -> Arc<dyn Meter> {
    match config.memory {
        config::MemorySource::Devices => Arc::new(Devices::default()),
        config::MemorySource::Processes { gpu_bytes } => {
            let service = Arc::clone(service);
            let pids = move |gpu: Gpu| service.get().map_or_else(Vec::new, |service| service.processes(gpu));
            Arc::new(Processes::new(gpu_bytes, Arc::new(pids)))
        }
    }
}

fn gpus_of(config: &Config) -> BTreeSet<Gpu> {
    config.models.iter().flat_map(|model| model.rules.gpus.iter().copied()).collect()
}

impl Running {
    /// Waits until a listener stops unexpectedly, and returns why.
    pub async fn ended(&mut self) -> RunError {
        let [(_, front), (_, control)] = &mut self.listeners;
        let (nth, how) = tokio::select! {
            how = of(front) => (0, how),
            how = of(control) => (1, how),
        };
        self.listeners[nth].1 = None;
        RunError::ended(self.listeners[nth].0, how)
    }

    /// Admits no more requests, waits up to `timeout` for running answers, and stops supervised engines if requested.
    /// Otherwise the next service finds them.
    pub async fn end(self, timeout: Duration, stops_engines: bool) {
        let until = Instant::now() + timeout;
        if let Some(agent) = self.agent {
            // Before anything is refused here, so that routers go elsewhere.
            agent.end().await;
        }
        self.closing.cancel();
        let [front, control] = self.listeners;
        tokio::join!(
            self.service.shut_down(timeout, stops_engines),
            // Slow readers keep the rest of the timeout.
            close(front, until + CLOSE_MAX),
        );
        self.ending.cancel();
        tokio::join!(close(control, Instant::now() + CLOSE_MAX), self.traces.end());
    }
}

/// Waits forever after the task has ended.
pub(crate) async fn of(
    listener: &mut Option<JoinHandle<io::Result<()>>>,
) -> Result<io::Result<()>, JoinError> {
    match listener {
        Some(listener) => listener.await,
        None => std::future::pending().await,
    }
}

pub(crate) async fn close(
    (name, listener): (&'static str, Option<JoinHandle<io::Result<()>>>),
    until: Instant,
) {
    let Some(mut listener) = listener else { return };
    if tokio::time::timeout_at(until.into(), &mut listener).await.is_err() {
        tracing::warn!(listener = name, "connections were broken off");
        listener.abort();
    }
}

fn to(destination: Destination) -> Route {
    let Destination { id, model, served_as, parameters, in_flight } = destination;
    let (name, url, in_flight) = (model.name.clone(), model.url.clone(), Some(Arc::new(in_flight)));
    Route { model: id, name, url, served_as, parameters, in_flight }
}

impl Backend for ServiceHandle {
    fn route(&self, name: &str) -> Option<Route> {
        self.service.route(name).map(to)
    }

    fn route_of_model(&self, name: &str) -> Option<Route> {
        self.service.route_of_model(name).map(to)
    }

    fn listed(&self) -> Vec<Listed> {
        let listed = |name: &String, kind: NameKind, stage: StageName, card: &Card| Listed {
            name: name.clone(),
            kind,
            is_ready: stage == StageName::Ready,
            stage,
            card: card.clone(),
        };
        let mut all = Vec::new();
        for (model, stage) in self.service.stages() {
            let of = || model.name.clone();
            all.push(listed(&model.name, NameKind::Model, stage, &model.card));
            let alias = |name| listed(name, NameKind::Alias { model: of() }, stage, &model.card);
            all.extend(model.aliases.iter().map(alias));
            let adapter = |name| listed(name, NameKind::Adapter { model: of() }, stage, &model.card);
            all.extend(model.adapters.iter().map(adapter));
        }
        for selector in &self.service.config().selectors {
            // It may be gone after a reload.
            let Some(stage) = self.service.stage_of(&selector.name) else { continue };
            let kind = NameKind::Selector { targets: selector.targets.clone() };
            all.push(listed(&selector.name, kind, stage, &selector.card));
        }
        self.with_profile(all)
    }

    fn admit(
        &self,
        model: ModelId,
        priority: i32,
    ) -> Pin<Box<dyn Future<Output = Result<Admission, Refused>> + Send + '_>> {
        Box::pin(self.service.admit_by(model, priority))
    }

    fn suspect(&self, model: ModelId) {
        self.service.suspect(model);
    }

    fn requests(&self) -> Arc<Requests> {
        Arc::clone(&self.requests)
    }

    fn front(&self) -> Arc<config::Front> {
        Arc::clone(&self.service.config().front)
    }

    fn check(&self, route: &Route) -> Result<(), NotOwned> {
        self.owned.as_ref().map_or(Ok(()), |owned| owned.check(&route.name))
    }

    fn withdrawn(&self, route: &Route) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        match &self.owned {
            Some(owned) => Box::pin(owned.withdrawn(&route.name)),
            None => Box::pin(std::future::pending()),
        }
    }

    fn may_lose(&self) -> bool {
        self.owned.is_some()
    }

    fn was_late(&self, route: &Route) {
        if let Some(owned) = &self.owned {
            owned.was_late(&route.name);
        }
    }
}

impl ServiceHandle {
    /// Names of the chosen profile stand for others, also where a model has the same name.
    fn with_profile(&self, mut all: Vec<Listed>) -> Vec<Listed> {
        let (config, profile) = (self.service.config(), self.service.profile());
        let Some(names) = profile.and_then(|profile| config.profiles.get(&profile)) else { return all };
        let targets: Vec<Option<Listed>> =
            names.values().map(|target| all.iter().find(|one| one.name == *target).cloned()).collect();
        all.retain(|one| !names.contains_key(&one.name));
        for (name, target) in names.keys().zip(targets) {
            let Some(mut target) = target else { continue };
            target.kind = NameKind::Alias { model: target.name };
            target.card.is_hidden = false;
            all.push(Listed { name: name.clone(), ..target });
        }
        all
    }
}

impl ControlApi for ServiceHandle {
    fn snapshot(&self) -> Later<'_, Snapshot> {
        Box::pin(self.service.snapshot())
    }

    fn events(&self) -> broadcast::Receiver<Arc<ServiceEvent>> {
        self.service.events()
    }

    fn command<'a>(&'a self, name: &'a str, command: ModelCommand) -> Later<'a, bool> {
        Box::pin(async move { self.service.command(name, command) })
    }

    fn log(&self, name: &str, lines: usize) -> Option<Vec<String>> {
        self.service.log(name, lines)
    }

    fn reload(&self) -> Later<'_, Result<(), String>> {
        Box::pin(async {
            let Some(path) = self.path.clone() else {
                return Err("there is no file to read it from again".to_owned());
            };
            let read = move || {
                Config::read(&path).map_err(|error| match error {
                    ConfigError::Read { .. } => error.to_string(),
                    _ => format!("{}: {error}", path.display()),
                })
            };
            let config = tokio::task::spawn_blocking(read).await.map_err(|error| error.to_string())??;
            self.service.reload(config).await.map_err(|error| error.to_string())
        })
    }

    fn set_profile(&self, profile: Option<&str>) -> Result<(), String> {
        self.service.set_profile(profile).map_err(|error| error.to_string())
    }

    fn requests(&self) -> Arc<Requests> {
        Arc::clone(&self.requests)
    }

    fn control(&self) -> Arc<config::Control> {
        Arc::clone(&self.service.config().control)
    }

    fn fleet(&self) -> Option<Membership> {
        self.owned.as_ref().map(Owned::membership)
    }
}
