//! Accepts and serves connections.
//!
//! Promises: an error on one connection ends only that connection. Without free file descriptors, accepting pauses. At
//! shutdown each connection ends after the answer in progress.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::{Body, Incoming};
use hyper::rt::{Read, Write};
use hyper::server::conn::http1;
use hyper::service::HttpService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// No limit of connections.
pub const UNLIMITED: usize = Semaphore::MAX_PERMITS;

/// After a failed `accept`, for example without free file descriptors.
const REST: Duration = Duration::from_millis(100);

/// Passes each connection to `serve`, at most `connections_max` at a time, until `shutdown`. Then waits for open
/// connections to end. Dropping the future closes them.
///
/// # Errors
/// The listener cannot be used. A failed `accept` is not an error.
pub async fn accept<F: Future<Output = ()> + Send + 'static>(
    listener: TcpListener,
    name: &'static str,
    connections_max: usize,
    shutdown: &CancellationToken,
    mut serve: impl FnMut(TcpStream) -> F,
) -> io::Result<()> {
    let places = Arc::new(Semaphore::new(connections_max));
    let mut connections = JoinSet::new();
    loop {
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await.map_err(io::Error::other)?;
            listener.accept().await.map(|(stream, _)| (stream, place))
        };
        tokio::select! {
            biased;
            () = shutdown.cancelled() => break,
            Some(_) = connections.join_next() => {}
            next = next => match next {
                Ok((stream, place)) => {
                    let served = serve(stream);
                    connections.spawn(async move {
                        served.await;
                        drop(place);
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Err(error),
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    tracing::warn!(name, %error, "a connection cannot be taken; it is tried again");
                    tokio::select! {
                        () = shutdown.cancelled() => break,
                        () = tokio::time::sleep(REST) => {}
                    }
                }
            },
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
    Ok(())
}

fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// Serves one connection. After `shutdown`, the answer in progress is the last.
///
/// # Errors
/// How the connection broke.
pub async fn answer<I, S, B>(
    http: &http1::Builder,
    io: I,
    service: S,
    shutdown: &CancellationToken,
) -> Result<(), hyper::Error>
where
    I: Read + Write + Unpin,
    S: HttpService<Incoming, ResBody = B>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    B: Body + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let mut served = pin!(http.serve_connection(io, service));
    tokio::select! {
        biased;
        ended = served.as_mut() => return ended,
        () = shutdown.cancelled() => served.as_mut().graceful_shutdown(),
    }
    served.await
}
