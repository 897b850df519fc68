//! A whole rotation: service, front and control.
//!
//! Promises: if one part cannot start, no part runs. [`Running::end`] cuts no request off before its timeout.

use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use poorwill::broker::Client;
use poorwill_front::backend::Backend;
use poorwill_front::proxy::{self, Timeouts};
use poorwill_front::requests::Requests;
use poorwill_net::descriptors;
use poorwill_net::listener::{CLOSE_MAX, ListenerError, bind, close, wait};
use poorwill_rotation_policy::Gpu;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::backend::ServiceHandle;
use crate::config::{self, Config, ConfigError};
use crate::control;
use crate::fleet::{Agent, FleetError};
use crate::lending::{self, BrokerLink, MemoryNames, ServedBroker};
use crate::measure::{self, Declared, Devices, LentAs, Meter, Processes, WithLent};
use crate::service::{Service, ServiceError};
use crate::traces::{TraceError, Traces};

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
    /// Traces cannot be exported.
    #[error(transparent)]
    Traces(#[from] TraceError),
    /// The node cannot take part in its fleet.
    #[error("it cannot take part in its fleet")]
    Fleet(#[from] FleetError),
    /// A listener cannot begin, or has ended.
    #[error(transparent)]
    Listener(#[from] ListenerError),
}

/// A running rotation.
#[derive(Debug)]
pub struct Running {
    /// The front's bound address.
    front: SocketAddr,
    /// Control's bound address.
    control: SocketAddr,
    /// The service behind both.
    service: Service,
    /// Stops the front. Running answers finish.
    closing: CancellationToken,
    /// Stops control.
    ending: CancellationToken,
    traces: Traces,
    agent: Option<Agent>,
    /// `None` after the task has ended.
    listeners: [(&'static str, Option<JoinHandle<io::Result<()>>>); 2],
    /// Serves lent memory, as long as engines may sleep.
    broker: Option<ServedBroker>,
    /// Its lock is released when it closes, however the process ends.
    _state: Option<File>,
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
    let (front, front_address) = bind("front", config.front.listen).await?;
    let (control, control_address) = bind("control", config.control.listen).await?;
    let known: Arc<OnceLock<Service>> = Arc::default();
    let broker = config.lend.as_ref().and_then(serve_broker);
    let meter = with_lent(&config, meter(&config, &known));
    let traces = config.traces.as_ref().map(Traces::start).transpose()?.unwrap_or_default();
    let service = Service::start(config.clone(), Arc::clone(&meter))?;
    traces.follow(service.events());
    // Engines are probed first, so the meter does not need the service before this.
    let _only_once = known.set(service.clone());
    // The service answers meanwhile: NVML may block.
    tokio::spawn(measure::warn_of_unmeasured(meter, gpus_of(&config)));
    let (closing, ending) = (CancellationToken::new(), CancellationToken::new());
    let requests = Arc::new(Requests::traced(Arc::new(traces.clone())));
    let join = |fleet: &config::Fleet| Agent::start(service.clone(), fleet.clone(), config.state.as_deref());
    let agent = config.fleet.as_ref().map(join).transpose()?;
    let owned = agent.as_ref().map(Agent::owned);
    let handle = Arc::new(ServiceHandle::new(service.clone(), requests, path, owned));
    let backend: Arc<dyn Backend> = Arc::<ServiceHandle>::clone(&handle);
    let front = tokio::spawn(proxy::serve(front, backend, closing.clone(), Timeouts::default()));
    let control = tokio::spawn(control::serve(control, handle, ending.clone()));
    tracing::info!(front = %front_address, control = %control_address, "the service listens");
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
        broker,
        _state: state,
    })
}

/// `None` where another process serves it, or nothing does.
fn serve_broker(lend: &config::Lend) -> Option<ServedBroker> {
    // A descriptor for each piece that is lent.
    if let Err(error) = descriptors::raise() {
        tracing::warn!(%error, "cannot raise the limit of file descriptors, so less can be lent");
    }
    ServedBroker::start(&lend.path())
}

/// Counts what is lent, where the configuration has engines lend.
fn with_lent(config: &Config, meter: Arc<dyn Meter>) -> Arc<dyn Meter> {
    let Some(lend) = &config.lend else { return meter };
    let (counts, names): (LentAs, MemoryNames) = match &config.memory {
        config::MemorySource::Processes { folder: Some(folder), .. } => {
            (LentAs::Free, lending::of_simulated(folder.clone()))
        }
        _ => (LentAs::Used, lending::of_devices()),
    };
    let link = BrokerLink::to(lend.path(), Client::TIMEOUT);
    Arc::new(WithLent::new(meter, counts, Arc::new(link), names))
}

fn meter(config: &Config, service: &Arc<OnceLock<Service>>) -> Arc<dyn Meter> {
    match config.memory {
        config::MemorySource::Devices(driver) => Arc::new(Devices::by(driver)),
        config::MemorySource::Declared { gpu_bytes } => {
            tracing::warn!("[memory] measure is \"declared\": nothing is measured, and needs are believed");
            let service = Arc::clone(service);
            let needed = move |gpu: Gpu| service.get().map_or(0, |service| service.declared_bytes(gpu));
            Arc::new(Declared::new(gpu_bytes, Arc::new(needed)))
        }
        config::MemorySource::Processes { gpu_bytes, .. } => {
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
    /// The front's bound address.
    #[must_use]
    pub fn front(&self) -> SocketAddr {
        self.front
    }

    /// Control's bound address.
    #[must_use]
    pub fn control(&self) -> SocketAddr {
        self.control
    }

    /// The service behind both.
    #[must_use]
    pub fn service(&self) -> &Service {
        &self.service
    }

    /// Waits until a listener stops unexpectedly, and returns why.
    pub async fn wait(&mut self) -> RunError {
        let [(_, front), (_, control)] = &mut self.listeners;
        let (nth, how) = tokio::select! {
            how = wait(front) => (0, how),
            how = wait(control) => (1, how),
        };
        self.listeners[nth].1 = None;
        ListenerError::ended(self.listeners[nth].0, how).into()
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
        if let Some(broker) = self.broker {
            // A panic of it was reported by its hook.
            let _ended = tokio::task::spawn_blocking(|| broker.end()).await;
        }
    }
}
