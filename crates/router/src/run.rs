//! A running router, and the controller beside it.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use poorwill_fleet::clock::now_unix_ms;
use poorwill_fleet::controller::{Controller, Settings};
use poorwill_fleet::etcd::{Etcd, EtcdError, Limits, Version};
use poorwill_fleet::keys;
use poorwill_fleet::mirror::Mirror;
use poorwill_net::listener::{CLOSE_MAX, ListenerError, bind, close, wait};
use poorwill_net::tls::{ClientTls, TlsError};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::backend::{RouteCounts, RouterBackend};
use super::config::RouterConfig;
use super::history::SharedHistory;
use super::operators::{self, Operated};
use super::reader::Reader;
use super::store;
use super::table::RouteTable;
use super::trust::Trust;
use poorwill_front::backend::Backend;
use poorwill_front::proxy::{self, Timeouts};
use poorwill_front::requests::Requests;

/// Changes that come this close together are taken in together.
const GATHER: Duration = Duration::from_millis(5);
/// How long the routes of an etcd that has lost its data are kept while it lacks a model that had one. Nodes need up to a
/// third of their lease to learn that they need another, and this comes on top.
const LOST_MAX: Duration = Duration::from_secs(15);
/// How often it looks whether they are kept for long enough.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How long first clients wait for what is in etcd.
const FIRST_READ_MAX: Duration = Duration::from_secs(3);

/// Why a router cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RouterError {
    /// etcd cannot be used.
    #[error("it cannot take part in its fleet")]
    Etcd(#[from] EtcdError),
    /// A certificate for the connections to nodes cannot be used.
    #[error("it cannot take part in its fleet: TLS to nodes cannot be used")]
    Tls(#[from] TlsError),
    /// Its store cannot begin.
    #[error("it cannot keep its fleet's records")]
    Store(#[from] io::Error),
    /// A listener cannot begin, or has ended.
    #[error(transparent)]
    Listener(#[from] ListenerError),
}

/// A running router.
#[derive(Debug)]
pub struct RouterRunning {
    /// The front's bound address; `None` for a controller alone.
    front: Option<SocketAddr>,
    /// Control's bound address; `None` if it is not configured.
    control: Option<SocketAddr>,
    controller: Option<Controller>,
    /// Stops the front. Running answers finish.
    closing: CancellationToken,
    /// Stops control and the store.
    ending: CancellationToken,
    /// `None` also after the task has ended.
    front_task: Option<JoinHandle<io::Result<()>>>,
    control_task: Option<JoinHandle<io::Result<()>>>,
    store_task: Option<JoinHandle<io::Result<()>>>,
    table: JoinHandle<()>,
}

/// Starts a router, a candidate for the fleet's controller, or both in one process.
///
/// # Errors
/// See [`RouterError`]; nothing runs then.
pub async fn begin(
    config: &RouterConfig,
    routes: bool,
    controls: bool,
) -> Result<RouterRunning, RouterError> {
    let etcd = Etcd::open(&config.etcd, Limits::for_lease(config.lease))?;
    let node_tls = config.node_tls.clone().map(ClientTls::new).transpose()?;
    let front_listener = match routes {
        true => Some(bind("front", config.front.listen).await?),
        false => None,
    };
    let control_listener = match &config.control {
        Some(control) => Some((bind("control", control.listen).await?, Arc::clone(control))),
        None => None,
    };
    let (closing, ending) = (CancellationToken::new(), CancellationToken::new());
    // Where a router's parts are apart, it is with the controller.
    let store_task = if controls { start_store(config, &ending).await? } else { None };
    let mirror = Mirror::start(etcd.clone(), &keys::prefix(&config.fleet));
    let contents = mirror.contents();
    let history = SharedHistory::default();
    let kept = control_listener.is_some().then(|| history.clone());
    let (table, following) = follow(mirror, config, kept);
    let controller = controls.then(|| start_controller(config, etcd.clone()));
    let requests = Arc::new(Requests::default());
    let counts = Arc::new(RouteCounts::default());
    let control = control_listener.as_ref().map(|((_, address), _)| *address);
    let control_task = control_listener.map(|((listener, address), control)| {
        let operated = Operated {
            fleet: config.fleet.clone(),
            etcd,
            control,
            contents,
            table: table.clone(),
            history,
            controller: controller.as_ref().map(Controller::status),
            requests: Arc::clone(&requests),
            counts: Arc::clone(&counts),
        };
        tokio::spawn(operators::serve(listener, address, operated, ending.clone()))
    });
    let front = front_listener.as_ref().map(|(_, address)| *address);
    let front_task = front_listener.map(|(listener, address)| {
        tracing::info!(front = %address, fleet = %config.fleet, "the router listens");
        let first = table.clone();
        let backend = RouterBackend::new(config, node_tls, table, requests, counts);
        tokio::spawn(serve_front(listener, Arc::new(backend), first, closing.clone()))
    });
    Ok(RouterRunning {
        front,
        control,
        controller,
        closing,
        ending,
        front_task,
        control_task,
        store_task,
        table: following,
    })
}

/// Begins the store, if the router has one.
async fn start_store(
    config: &RouterConfig,
    ending: &CancellationToken,
) -> Result<Option<JoinHandle<io::Result<()>>>, RouterError> {
    let Some(settings) = &config.store else { return Ok(None) };
    let (listener, address) = bind("store", settings.listen).await?;
    let store = store::serve(listener, settings, config.etcd.clone(), ending.clone())?;
    tracing::info!(%address, "the store listens");
    Ok(Some(tokio::spawn(store)))
}

/// Keeps a table of routes, and the history if there is one, as etcd has it.
fn follow(
    mirror: Mirror,
    config: &RouterConfig,
    history: Option<SharedHistory>,
) -> (watch::Receiver<Arc<RouteTable>>, JoinHandle<()>) {
    let (sender, table) = watch::channel(Arc::<RouteTable>::default());
    let (fleet, has_store) = (config.fleet.clone(), config.store.is_some());
    let trust = Trust { key: config.node_key.clone(), has_tls: config.node_tls.is_some() };
    let config_lease = config.lease;
    let mut contents = mirror.contents();
    let began = Instant::now();
    let following = tokio::spawn(async move {
        let (_mirror, mut reader) = (mirror, Reader::default());
        let (mut shown, mut lost_at) = (Version::default(), None);
        let lost_max = config_lease / 3 + LOST_MAX;
        while !matches!(timeout(LOOK_EVERY, contents.changed()).await, Ok(Err(_))) {
            sleep(GATHER).await;
            let now = contents.borrow_and_update().clone();
            let view = reader.read(&fleet, &now);
            let table = RouteTable::of(&fleet, now.entries(), &view, &trust);
            // A store begins empty, and nodes enter it.
            let is_early = has_store && shown.revision == 0 && began.elapsed() < FIRST_READ_MAX;
            if is_early && table.models().all(|(_, copies)| copies.is_empty()) {
                continue;
            }
            let version = now.version();
            if shown.revision > 0 && shown.is_lost_by(version) && lacks(&table, &sender.borrow()) {
                // Nodes serve on, and enter anew.
                if lost_at.get_or_insert_with(Instant::now).elapsed() < lost_max {
                    continue;
                }
            }
            (shown, lost_at) = (version, None);
            for problem in
                table.problems().iter().filter(|problem| !sender.borrow().problems().contains(problem))
            {
                tracing::warn!(problem, "routes around a node");
            }
            sender.send_replace(Arc::new(table));
            if let Some(history) = &history {
                history.take_in(&fleet, now.entries().values(), now_unix_ms());
            }
        }
    });
    (table, following)
}

/// Whether a model of the last table has no copy in this one.
fn lacks(table: &RouteTable, last: &RouteTable) -> bool {
    last.models().any(|(model, copies)| !copies.is_empty() && table.copies(model).is_empty())
}

fn start_controller(config: &RouterConfig, etcd: Etcd) -> Controller {
    let settings = Settings {
        fleet: config.fleet.clone(),
        rules: config.rules.clone(),
        lease_ttl: config.lease,
        who: format!("{}:{}", poorwill_net::hostname(), std::process::id()),
    };
    Controller::start(etcd, settings)
}

async fn serve_front(
    listener: TcpListener,
    backend: Arc<dyn Backend>,
    mut table: watch::Receiver<Arc<RouteTable>>,
    closing: CancellationToken,
) -> io::Result<()> {
    // Clients that come early wait, so that a router which is started anew refuses nothing.
    tokio::select! {
        _read = timeout(FIRST_READ_MAX, table.changed()) => {}
        () = closing.cancelled() => {}
    }
    proxy::serve(listener, backend, closing, Timeouts::default()).await
}

impl RouterRunning {
    /// The front's bound address; `None` for a controller alone.
    #[must_use]
    pub fn front(&self) -> Option<SocketAddr> {
        self.front
    }

    /// Control's bound address; `None` if it is not configured.
    #[must_use]
    pub fn control(&self) -> Option<SocketAddr> {
        self.control
    }

    /// Waits until a listener stops unexpectedly, and returns why. Without one, it waits for ever.
    pub async fn wait(&mut self) -> ListenerError {
        let (listener, how) = tokio::select! {
            how = wait(&mut self.front_task) => ("front", how),
            how = wait(&mut self.control_task) => ("control", how),
            how = wait(&mut self.store_task) => ("store", how),
        };
        match listener {
            "front" => self.front_task = None,
            "control" => self.control_task = None,
            _ => self.store_task = None,
        }
        ListenerError::ended(listener, how)
    }

    /// Admits no more requests, and waits up to `most` for running answers. Another controller is elected at once.
    pub async fn end(self, most: Duration) {
        if let Some(controller) = self.controller {
            controller.end().await;
        }
        self.closing.cancel();
        close(("front", self.front_task), Instant::now() + most).await;
        self.ending.cancel();
        close(("control", self.control_task), Instant::now() + CLOSE_MAX).await;
        close(("store", self.store_task), Instant::now() + CLOSE_MAX).await;
        self.table.abort();
    }
}
