//! Accepts and serves connections.
//!
//! Promises: an error on one connection ends only that connection. Without free file descriptors, accepting pauses. At
//! shutdown each connection ends after the answer in progress. A lasting cause is logged once a second.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
/// Between two warnings of the same cause.
const WARN_EVERY: Duration = Duration::from_secs(1);

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
    // The semaphore is never closed.
    let place = |_| Arc::clone(&places).acquire_owned();
    accept_with(listener, name, shutdown, place, |stream, place| {
        let served = serve(stream);
        async move {
            served.await;
            drop(place);
        }
    })
    .await
}

/// As [`accept`]. Each accepted connection waits for a `place`, and further ones are not accepted meanwhile.
///
/// # Errors
/// See [`accept`].
pub async fn accept_with<W: Future, F: Future<Output = ()> + Send + 'static>(
    listener: TcpListener,
    name: &'static str,
    shutdown: &CancellationToken,
    mut place: impl FnMut(SocketAddr) -> W,
    mut serve: impl FnMut(TcpStream, W::Output) -> F,
) -> io::Result<()> {
    let mut connections = JoinSet::new();
    let mut warnings = Warnings::default();
    'accept: loop {
        tokio::select! {
            biased;
            () = shutdown.cancelled() => break,
            Some(_) = connections.join_next() => {}
            next = listener.accept() => match next {
                Ok((stream, peer)) => {
                    let mut place = pin!(place(peer));
                    let place = loop {
                        tokio::select! {
                            biased;
                            () = shutdown.cancelled() => break 'accept,
                            Some(_) = connections.join_next() => {}
                            place = place.as_mut() => break place,
                        }
                    };
                    connections.spawn(serve(stream, place));
                }
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Err(error),
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    if let Some(suppressed) = warnings.due(Instant::now()) {
                        tracing::warn!(name, %error, suppressed, "cannot accept a connection; retrying");
                    }
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

/// Limits warnings of the same cause.
#[derive(Debug, Default)]
struct Warnings {
    last: Option<Instant>,
    suppressed: u64,
}

impl Warnings {
    /// If a warning is due, returns how many were suppressed since the last one.
    fn due(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < WARN_EVERY) {
            self.suppressed += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }
}

fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// Serves one connection. After `shutdown`, the answer in progress is the last. A client and a service that leave HTTP go on
/// afterwards.
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
    I: Read + Write + Unpin + Send + 'static,
    S: HttpService<Incoming, ResBody = B>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    B: Body + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let mut served = pin!(http.serve_connection(io, service).with_upgrades());
    tokio::select! {
        biased;
        ended = served.as_mut() => return ended,
        () = shutdown.cancelled() => served.as_mut().graceful_shutdown(),
    }
    served.await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_warning_a_second() {
        let (mut warnings, begun) = (Warnings::default(), Instant::now());
        let at = |millis| begun + Duration::from_millis(millis);
        let due: Vec<_> = [0, 100, 999, 1000, 1100, 3000].map(|millis| warnings.due(at(millis))).into();
        assert_eq!(due, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
