//! A mock engine: an HTTP server with the paths of vLLM, or of another engine, that holds real memory, and injects
//! faults on request.
//!
//! `poorwill rotate --demo` and the tests of rotation use it in place of engines with GPUs. It serves over
//! real sockets, and its memory belongs to its process: the operating system counts it while awake. Code that
//! drives engines can be tested against it, with and without each [`Fault`].
//!
//! Promises:
//!
//! - Awake, it holds its memory, written; asleep, it holds none, at either level. A wake of level 1 restores
//!   the weights. A wake of level 2 restores memory only; `reload_weights` by `/collective_rpc` loads the
//!   weights.
//! - The same request gives the same bytes, token by token: `created` is 0, and sampling parameters change
//!   nothing.
//! - Missing or wrong bytes in memory give gibberish.
//! - A request during a sleep or a wake waits for it, and gets 503 if the engine sleeps then. vLLM lets such
//!   requests wait, or crashes.
//! - A request ends when its client disconnects, and is counted.
//! - In a folder of processes, it can be taken off its device by another one: asleep, it then holds no residue, either. A
//!   wake is refused until it is put back.
//! - The same seed injects the same faults at the same points.
//!
//! It generates one choice per prompt, refuses `n` above 1, and ignores tools, images, log-probabilities and
//! stop words.
#![forbid(unsafe_code)]

mod api;
mod delta;
mod engine;
mod error;
mod extract;
mod failure;
mod fault;
mod generate;
mod memory;
mod metrics;
mod operator;
mod paths;
mod random;
mod request;
mod residue;
mod shape;
mod text;

use std::io;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use poorwill::lend::Lending;
use poorwill::{ByteSize, DeviceSpec};
use poorwill_net::accept;
use tokio::net::{TcpListener, TcpStream};
use tokio::{task, time};
use tokio_util::sync::CancellationToken;

pub use self::api::{Api, Like, ParseNameError};
pub use self::error::MockEngineError;
pub use self::fault::{Fault, FaultSpec, ParseFaultError};

use self::engine::Engine;
use self::fault::Faults;
use self::memory::Memory;
use self::residue::Residue;

/// Options of the mock engine.
#[derive(Debug, Clone, PartialEq)]
pub struct MockEngine {
    /// The served model's name.
    pub model: String,
    /// Memory while awake, at least 1 MiB: half of it weights, half key-value cache.
    pub bytes: u64,
    /// What it holds besides, awake or asleep, until its process is taken off its device.
    pub residue_bytes: u64,
    /// The folder where its process is registered as one that can be taken off; `None` if it cannot.
    pub host_processes: Option<PathBuf>,
    /// The device that it shares with other engines, like `host:8GiB@/run/gpu`; `None`: one of its own.
    pub device: Option<DeviceSpec>,
    /// Where it lends what sleeps, if it does. It needs a shared device.
    pub lending: Option<Lending>,
    /// What it serves to clients. Other paths are answered with 404.
    pub serves: Vec<Api>,
    /// Whose paths it has for its operator.
    pub like: Like,
    /// Tokens per second and request.
    pub tokens_per_s: NonZeroU32,
    /// The faults to inject.
    pub faults: Vec<FaultSpec>,
    /// Seed of the faults' random numbers.
    pub seed: u64,
    /// How long running requests may still take at shutdown.
    pub grace: Duration,
}

impl MockEngine {
    /// No faults, and 200 tokens per second.
    #[must_use]
    pub fn new(model: impl Into<String>, bytes: u64) -> Self {
        Self {
            model: model.into(),
            bytes,
            residue_bytes: 0,
            host_processes: None,
            device: None,
            lending: None,
            serves: Api::USUAL.to_vec(),
            like: Like::default(),
            tokens_per_s: NonZeroU32::MIN.saturating_add(199),
            faults: Vec::new(),
            seed: 0,
            grace: Duration::from_secs(1),
        }
    }
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The caller shut it down.
    Shutdown,
    /// A fault crashed it: its process must end as after a crash.
    Crashed(Fault),
}

/// Allocates the memory, and serves until `shutdown` completes or a fault crashes it.
///
/// Connections wait until the memory is written. When this returns, all its tasks have ended; the memory is
/// freed with the last blocking thread.
///
/// # Errors
/// `Memory` if it cannot be allocated, `Listen` if the listener cannot be used.
pub async fn serve(
    options: MockEngine,
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<Ended, MockEngineError> {
    let MockEngine { model, bytes, serves, like, tokens_per_s, faults, seed, grace, .. } = options.clone();
    let faults = Arc::new(Faults::new(faults, seed));
    let of_process = Arc::clone(&faults);
    let opened = task::spawn_blocking(move || {
        let memory = Arc::new(Memory::open(&options.model, bytes, options.device, options.lending)?);
        let folder = options.host_processes.as_deref();
        let residue = Residue::open(options.residue_bytes, folder, &memory, &of_process);
        let residue = residue.map_err(MockEngineError::Process)?;
        Ok::<_, MockEngineError>((memory, residue))
    });
    let opened = opened.await;
    let join_error = |error: task::JoinError| MockEngineError::Memory {
        bytes: ByteSize(bytes),
        reason: format!("the thread that allocates it ended: {error}"),
    };
    let (memory, residue) = opened.map_err(join_error)??;
    let token_time = Duration::from_secs(1) / tokens_per_s.get();
    let engine = Arc::new(Engine::new(model, (memory, residue), faults, token_time));
    let _ending = engine.end().clone().drop_guard();
    let router = paths::router(Arc::clone(&engine), &serves, like);
    Ok(serve_engine(&engine, router, listener, grace, shutdown).await?)
}

async fn serve_engine(
    engine: &Engine,
    router: Router,
    listener: TcpListener,
    grace: Duration,
    shutdown: impl Future<Output = ()> + Send,
) -> io::Result<Ended> {
    let service = TowerToHyperService::new(router);
    let closing = CancellationToken::new();
    let until = closing.clone();
    // Dropping the future closes its connections.
    let served = accept::accept(listener, "mock engine", accept::UNLIMITED, &closing, |stream| {
        serve_connection(stream, service.clone(), until.clone())
    });
    let shut_down = async {
        shutdown.await;
        closing.cancel();
        time::sleep(grace).await;
    };
    tokio::select! {
        biased;
        () = engine.end().cancelled() => {}
        served = served => served?,
        () = shut_down => {}
    }
    Ok(engine.crashed().map_or(Ended::Shutdown, Ended::Crashed))
}

async fn serve_connection(
    stream: TcpStream,
    service: TowerToHyperService<Router>,
    shutdown: CancellationToken,
) {
    // Send each token at once; a socket that refuses this fails elsewhere.
    let _ = stream.set_nodelay(true);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new());
    if let Err(error) = accept::answer(&http, TokioIo::new(stream), service, &shutdown).await {
        tracing::debug!(%error, "a connection of the mock engine broke");
    }
}
