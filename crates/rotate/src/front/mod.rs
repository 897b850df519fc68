//! Where clients come in: a proxy that speaks OpenAI's interface and sends each request to its model's engine.
//!
//! The front decides nothing about models. It asks a [`Gate`], waits for as long as that says, and then passes bytes on.
//!
//! Promises:
//!
//! - Of an engine nothing but what is below `/v1/` is ever reached, and that only by `POST` with a JSON body that names a
//!   model. Keys of clients, and headers that are for one hop, are not passed on.
//! - A body gets to the engine byte for byte; if the engine calls the model by another name, only that name is another.
//!   An answer gets to the client byte for byte and piece by piece, no faster than the client reads.
//! - An answer that is not whole cannot be taken for whole: a stream of events gets an event that says so, and then, as
//!   with any other answer, the connection is broken off.
//! - An answer whose model has to leave ends, also where its client reads nothing: the connection is broken off then.
//! - A client that goes away takes its request with it, wherever that is: it waits no longer, and its connection to the
//!   engine is closed. A client counts as gone once it has closed the direction in which it sends. TCP cannot tell one
//!   that only did that from one that closed everything, and waking a model for nobody is what costs more. nginx and
//!   uvicorn do likewise. (What a client gets without waiting, an error or the list of models, it may still get.)
//! - What is said and written of a request has neither its body, nor keys, nor where its engine is.

mod account;
mod answer;
mod fault;
mod forward;
mod json;
mod line;
mod local;
mod request;
mod span;

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use self::forward::Desk;
use self::line::{Io, Line};
use crate::policy::ModelId;
pub use crate::service::Admission;
use crate::service::Refused;
use crate::{config, serve};

/// A head that is longer than it may be by no more than this gets an error with a body; others just get the status.
const HEAD_SLACK_BYTES: usize = 16 << 10;
/// What is read from a client at a time, at most.
const READ_MAX_BYTES: usize = 512 << 10;

/// What the front asks the service.
pub trait Gate: Send + Sync + 'static {
    /// The model that a client asks for by this name or alias.
    fn route(&self, name: &str) -> Option<Route>;

    /// All models, in the order of the configuration.
    fn listed(&self) -> Vec<Listed>;

    /// Waits until a request may go to its engine; or not. Dropped, it is as if the request had never come.
    fn admit(&self, model: ModelId) -> Pin<Box<dyn Future<Output = Result<Admission, Refused>> + Send + '_>>;

    /// An engine did not take a connection or broke one: it may be gone.
    fn suspect(&self, model: ModelId);

    /// Limits and keys as they are now.
    fn front(&self) -> Arc<config::Front>;
}

/// Where requests for a model go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Which it is.
    pub model: ModelId,
    /// What clients ask for.
    pub name: String,
    /// Where its engine is: `http://`, a host, and a port.
    pub url: String,
    /// What its engine calls it.
    pub served_as: String,
}

/// A model that clients may ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// What clients ask for.
    pub name: String,
    /// What they may ask for as well.
    pub aliases: Vec<String>,
    /// Whether its requests are let through at once.
    pub is_ready: bool,
    /// Its stage, in a word or two.
    pub stage: &'static str,
}

/// How long the front waits for clients and for engines that are silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// For a head, from the moment at which it could begin: an idle connection is closed after this time, too.
    pub head: Duration,
    /// For the next piece of a body.
    pub body: Duration,
    /// For an engine to take a connection.
    pub connect: Duration,
    /// For which a connection to an engine is kept for the next request. Less than engines keep theirs, which are 5
    /// seconds with vLLM and SGLang, or a request could meet one that is just being closed.
    pub idle: Duration,
    /// For a client to read the end of an answer that had to end.
    pub reader: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            head: Duration::from_secs(60),
            body: Duration::from_secs(30),
            connect: Duration::from_secs(10),
            idle: Duration::from_secs(3),
            reader: Duration::from_secs(5),
        }
    }
}

/// Serves clients until `shutdown` fires; then takes no more connections, and returns when the answers that are under way
/// have ended. Dropped, it breaks all of them off.
///
/// # Errors
/// The listener cannot be used. That a connection could not be taken is none.
pub async fn serve(
    listener: TcpListener,
    gate: Arc<dyn Gate>,
    shutdown: CancellationToken,
    patience: Patience,
) -> io::Result<()> {
    let desk = Arc::new(Desk::new(gate, patience));
    let until = shutdown.clone();
    serve::accept(listener, "front", serve::UNLIMITED, &shutdown, |stream| {
        connection(stream, Arc::clone(&desk), until.clone())
    })
    .await
}

/// Serves one connection.
async fn connection(stream: TcpStream, desk: Arc<Desk>, shutdown: CancellationToken) {
    // What it would gain is small, and a socket that refuses is about to fail anyway.
    let _ = stream.set_nodelay(true);
    let head_max = usize::try_from(desk.gate.front().head_max_bytes).unwrap_or(usize::MAX);
    let head_max = head_max.saturating_add(HEAD_SLACK_BYTES);
    let line = Arc::new(Line::new(stream));
    let io = TokioIo::new(Io::new(Arc::clone(&line)));
    let patience = desk.patience;
    let its_line = Arc::clone(&line);
    let service = service_fn(move |request| Arc::clone(&desk).handle(Arc::clone(&its_line), request));
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(patience.head)
        .max_header_size(head_max)
        .max_buf_size(head_max.max(READ_MAX_BYTES))
        // Whether a client is gone is decided for each request, by `Line::gone`.
        .half_close(true);
    let overdue = async {
        line.overdue(patience.reader).await;
        // Here, while its answer is still there to be told of it: behind this it has gone.
        line.cut();
    };
    tokio::select! {
        biased;
        // How a connection ended is the client's business; what came of its requests has been told.
        _ = serve::answer(&builder, io, service, &shutdown) => {}
        // Behind this what has not been read is gone, and the request to the engine ends.
        () = overdue => {}
    }
}
