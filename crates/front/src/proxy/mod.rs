//! The clients' listener: a proxy with OpenAI's API, which sends each request to its model's engine.
//!
//! The front decides nothing about models: a [`Backend`] routes and admits.
//!
//! Promises:
//!
//! - Only listed paths of an engine can be reached, by `POST` with a JSON body, or a form, or a query that names a model.
//!   One by which it is administrated never can. Stored responses are found without one. `passthrough` of the
//!   configuration opens all other paths.
//!   Keys, cookies and hop-by-hop headers are not forwarded.
//! - Without keys, pages of other sites are refused unless their origins are configured. Engines do not decide about it.
//! - Bodies and answers are forwarded byte for byte, except for the model's name if the engine uses another, and for
//!   configured parameters. An answer is read no faster than the client reads.
//! - An incomplete answer cannot be mistaken for a complete one: its connection is broken off, for an event stream
//!   after an error event.
//! - Answers beside a canary wait for it: a stream for its first token, a whole one for its end. Where it is wrong, what
//!   has begun breaks off, and what has not is asked for again.
//! - An answer ends if its model has to leave, even if its client reads nothing.
//! - Clients take no more descriptors than `connections_max` allows. Where all are taken, connections without a request
//!   are closed for new ones. Those of a peer that has more than a sixteenth go first.
//! - A client that disconnects cancels its request. Closing the sending side counts as disconnecting, as in nginx and
//!   uvicorn. TCP cannot tell the two apart, and waking a model in vain costs more. An open WebSocket passes the close on.
//! - Logs and errors contain neither bodies, nor keys, nor addresses of engines.

mod account;
mod answer;
mod api_error;
mod body;
mod connection;
mod direct;
mod edit;
mod engines;
mod forward;
mod frames;
mod json;
mod limits;
mod load;
mod local;
mod multipart;
mod origin;
mod path;
mod places;
mod prompt;
mod query;
mod request;
mod segments;
mod socket;
mod span;
mod stored;
mod timeouts;
mod trial;
mod tunnel;
mod upgrade;
mod usage;
mod websocket;

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use poorwill_net::accept;
use poorwill_net::tls::ServerTls;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

pub use self::timeouts::Timeouts;

use self::connection::{Connection, Io};
use self::forward::Proxy;
use self::places::{Connections, Slot};
use self::socket::Socket;
use self::tunnel::TunnelPlace;
use crate::backend::Backend;

/// A head up to this much over its limit gets an error with a body. Longer ones get only the status.
const HEAD_SLACK_BYTES: usize = 16 << 10;
/// For one read from a client. Its buffer stays as long as its connection.
const READ_MAX_BYTES: usize = 64 << 10;

/// Serves clients until `shutdown`, then waits for the answers in progress. Dropping the future breaks them off.
///
/// # Errors
/// The listener cannot be used. A failed `accept` is not an error.
pub async fn serve(
    listener: TcpListener,
    backend: Arc<dyn Backend>,
    shutdown: CancellationToken,
    timeouts: Timeouts,
) -> io::Result<()> {
    let tls = backend.front().tls.clone().map(ServerTls::new).transpose().map_err(io::Error::other)?;
    let proxy = Arc::new(Proxy::new(backend, timeouts));
    let until = shutdown.clone();
    let connections: Arc<Connections> = Arc::default();
    let fitting = places::connections_that_fit();
    let connections_max = || proxy.backend().front().connections_max.map_or(fitting, |max| max.min(fitting));
    tracing::info!(connections_max = connections_max(), "the front listens");
    let place = |peer: SocketAddr| Arc::clone(&connections).place(peer.ip(), connections_max());
    accept::accept_with(listener, "front", &shutdown, place, |stream, slot| {
        serve_connection(stream, tls.clone(), slot, Arc::clone(&proxy), until.clone())
    })
    .await
}

async fn serve_connection(
    stream: TcpStream,
    tls: Option<ServerTls>,
    slot: Slot,
    proxy: Arc<Proxy>,
    shutdown: CancellationToken,
) {
    let socket = match Socket::new(stream, tls.as_ref()) {
        Ok(socket) => socket,
        Err(error) => return tracing::error!(%error, "cannot start TLS"),
    };
    let builder = builder(&proxy);
    let connection = Arc::new(Connection::new(socket, slot));
    let timeouts = proxy.timeouts();
    let mut head = Vec::new();
    let has_head = tokio::select! {
        biased;
        () = shutdown.cancelled() => !head.is_empty(),
        has_head = connection.first_head(&mut head, timeouts) => has_head,
        () = connection.slot().wait_until_chosen() => false,
    };
    if !has_head {
        return;
    }
    let io = TokioIo::new(Io::new(Arc::clone(&connection), head, timeouts));
    let shared = Arc::clone(&connection);
    let place = TunnelPlace::default();
    let tunnel = Arc::clone(&place);
    let service = service_fn(move |request| {
        Arc::clone(&proxy).handle(Arc::clone(&shared), Arc::clone(&place), request)
    });
    let overdue = async {
        connection.overdue(timeouts.reader).await;
        // Before the drop, so that the answer can still log it.
        connection.cut();
    };
    tokio::select! {
        biased;
        // The requests have logged their own ends.
        () = async {
            let ended = accept::answer(&builder, io, service, &shutdown).await;
            connection.close(ended.is_ok()).await;
        } => {}
        // The drop discards unread bytes, and cancels the request to the engine.
        () = overdue => {}
        () = connection.slot().wait_until_chosen() => {}
    }
    let tunnel = tunnel.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(tunnel) = tunnel {
        tunnel.run().await;
    }
}

fn builder(proxy: &Proxy) -> http1::Builder {
    let head_max = usize::try_from(proxy.backend().front().head_max_bytes).unwrap_or(usize::MAX);
    let head_max = head_max.saturating_add(HEAD_SLACK_BYTES);
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(proxy.timeouts().head)
        .max_header_size(head_max)
        .max_buf_size(head_max.max(READ_MAX_BYTES))
        // `Connection::wait_until_gone` decides for each request whether the client has disconnected.
        .half_close(true);
    builder
}
