//! A mock engine: an HTTP server with vLLM's paths that holds real memory, and can be told to lie.
//!
//! `poorwill rotate --demo` and the tests of rotation use it in place of engines with GPUs. What it says goes over real
//! sockets, and what it holds is memory of its process that the operating system counts: there when it is awake, gone
//! when it is asleep. So whoever drives engines can be held against one that does everything right, and against each
//! [`Lie`] that real ones tell.
//!
//! Promises:
//!
//! - Awake it holds what it was told to, written; asleep it holds nothing of that, at either level. A wake of level 1
//!   brings the weights back; one of level 2 brings memory, and `reload_weights` by `/collective_rpc` brings the weights.
//! - The same request gives the same bytes, token by token, whoever asks and however often: `created` is 0, and
//!   sampling's parameters, the seed included, change nothing.
//! - Text comes from what the memory holds: bytes that are missing or wrong give gibberish by themselves.
//! - While it sleeps, and while a sleep or a wake is under way, what needs the model waits for the move and is refused
//!   with 503 if it sleeps then. vLLM takes such requests and lets them wait, or dies of them.
//! - A client that leaves ends what is generated for it, and is counted.
//! - The same seed tells the same lies on the same occasions.
//!
//! It has one choice for each prompt and no tools, images, log-probabilities or stop words: those are read over, but for
//! `n`, which is refused.
#![forbid(unsafe_code)]

mod asked;
mod chance;
mod engine;
mod failure;
mod generate;
mod lie;
mod memory;
mod metrics;
mod paths;
mod shape;
mod text;

use std::io;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use poorwill::ByteSize;
use poorwill_rotate::serve;
use tokio::net::{TcpListener, TcpStream};
use tokio::{task, time};
use tokio_util::sync::CancellationToken;

pub use self::lie::{Lie, ParseLieError, Telling};

use self::engine::Engine;
use self::lie::Lies;
use self::memory::Memory;

/// What the mock engine is to be.
#[derive(Debug, Clone, PartialEq)]
pub struct MockEngine {
    /// The name that clients ask for.
    pub model: String,
    /// What it holds while it is awake, a MiB at least: one half as weights, the other as key-value cache.
    pub bytes: u64,
    /// How many tokens it generates in a second for each request.
    pub tokens_per_s: NonZeroU32,
    /// What it does wrong.
    pub lies: Vec<Telling>,
    /// Where the chance comes from that decides when.
    pub seed: u64,
    /// How long requests may still take when it is told to end.
    pub grace: Duration,
}

impl MockEngine {
    /// An honest one, with 200 tokens in a second.
    #[must_use]
    pub fn new(model: impl Into<String>, bytes: u64) -> Self {
        Self {
            model: model.into(),
            bytes,
            tokens_per_s: NonZeroU32::MIN.saturating_add(199),
            lies: Vec::new(),
            seed: 0,
            grace: Duration::from_secs(1),
        }
    }
}

/// How a mock engine ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It was told to.
    Told,
    /// A lie has ended it: whoever serves it ends its process now, and not as if all were well.
    Crashed(Lie),
}

/// Why there is no mock engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MockEngineError {
    /// It has no memory.
    #[error("a mock engine cannot hold {bytes}: {reason}")]
    Memory {
        /// How much it was to hold.
        bytes: ByteSize,
        /// Why, and what would help.
        reason: String,
    },
    /// Its listener cannot be used.
    #[error("the mock engine cannot take connections")]
    Listen(#[from] io::Error),
}

/// Takes the memory, and serves until `shutdown` is there, or a lie ends it. Connections that come before the memory is
/// written wait. When this returns, nothing of it goes on, and its memory is given back as soon as what was under way
/// in another thread is over.
///
/// # Errors
/// `Memory` when it cannot have what it was told to hold, `Listen` when the listener cannot be used.
pub async fn serve(
    options: MockEngine,
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<Ended, MockEngineError> {
    let MockEngine { model, bytes, tokens_per_s, lies, seed, grace } = options;
    let name = model.clone();
    let opened = task::spawn_blocking(move || Memory::open(&name, bytes)).await;
    let broke = |error: task::JoinError| MockEngineError::Memory {
        bytes: ByteSize(bytes),
        reason: format!("the thread that takes it ended: {error}"),
    };
    let memory = opened.map_err(broke)??;
    let token_time = Duration::from_secs(1) / tokens_per_s.get();
    let engine = Arc::new(Engine::new(model, memory, Lies::new(lies, seed), token_time));
    let _ending = engine.end.clone().drop_guard();
    Ok(serve_engine(&engine, listener, grace, shutdown).await?)
}

async fn serve_engine(
    engine: &Arc<Engine>,
    listener: TcpListener,
    grace: Duration,
    shutdown: impl Future<Output = ()> + Send,
) -> io::Result<Ended> {
    let service = TowerToHyperService::new(paths::router(Arc::clone(engine)));
    let closing = CancellationToken::new();
    let until = closing.clone();
    // Dropped with whatever is in it, connections break.
    let served = serve::accept(listener, "mock engine", serve::UNLIMITED, &closing, |stream| {
        answer_all(stream, service.clone(), until.clone())
    });
    let told = async {
        shutdown.await;
        closing.cancel();
        time::sleep(grace).await;
    };
    tokio::select! {
        biased;
        () = engine.end.cancelled() => {}
        served = served => served?,
        () = told => {}
    }
    Ok(engine.crashed().map_or(Ended::Told, Ended::Crashed))
}

/// Answers what comes on one connection.
async fn answer_all(stream: TcpStream, service: TowerToHyperService<Router>, shutdown: CancellationToken) {
    // Tokens go out as they come; a socket that will not has other troubles.
    let _ = stream.set_nodelay(true);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new());
    if let Err(error) = serve::answer(&http, TokioIo::new(stream), service, &shutdown).await {
        tracing::debug!(%error, "a connection of the mock engine broke");
    }
}
