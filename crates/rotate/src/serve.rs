//! How connections are taken and served, by every door of the service and by mock engines.
//!
//! Promises: what goes wrong with one connection ends that connection only; when there are no descriptors left, nobody
//! is taken for a while; and at a shutdown each connection ends with the answer that is under way.

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

/// As many connections at a time as there can be.
pub const UNLIMITED: usize = Semaphore::MAX_PERMITS;

/// How long nobody is taken when a connection could not be, as when there are no descriptors left.
const REST: Duration = Duration::from_millis(100);

/// Hands each connection to `serve`, `connections_max` at a time while others wait, until `shutdown` fires. Then takes no
/// more, and returns when those that are served have ended. Dropped, it breaks all of them off.
///
/// # Errors
/// The listener cannot be used. That a connection could not be taken is none.
pub async fn accept<F: Future<Output = ()> + Send + 'static>(
    listener: TcpListener,
    door: &'static str,
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
                    tracing::warn!(door, %error, "a connection cannot be taken; it is tried again");
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

/// Answers what comes on one connection; when `shutdown` fires, the answer that is under way is the last.
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
