//! A listener as a task: bound, watched, and closed in time.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpSocket};
use tokio::task::{JoinError, JoinHandle};

/// Connections that wait to be accepted. The system may allow fewer. A client that finds them full tries again a second
/// later.
const BACKLOG: u32 = 4096;
/// For a listener to close after its last request.
pub const CLOSE_MAX: Duration = Duration::from_secs(6);

/// Why a listener does not listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenerError {
    /// The address cannot be bound.
    #[error(
        "the {listener} cannot listen on {address}; give it another address, or end the process that listens there"
    )]
    Bind {
        /// Its name.
        listener: &'static str,
        /// Where.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// A listener stopped unexpectedly.
    #[error("the {listener} has ended: {reason}")]
    Ended {
        /// Its name.
        listener: &'static str,
        /// The cause.
        reason: String,
    },
}

impl ListenerError {
    /// A listener of this name has ended in this way.
    #[must_use]
    pub fn ended(listener: &'static str, how: Result<io::Result<()>, JoinError>) -> Self {
        let reason = match how {
            Ok(Ok(())) => "no shutdown was requested".to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        Self::Ended { listener, reason }
    }
}

/// Binds an address, and returns where it listens.
///
/// # Errors
/// It cannot be bound.
pub async fn bind(
    listener: &'static str,
    address: SocketAddr,
) -> Result<(TcpListener, SocketAddr), ListenerError> {
    let failed = |source| ListenerError::Bind { listener, address, source };
    let bound = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        // As `TcpListener::bind` does, for an address that an ended rotation had.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    let listener = bound().map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

/// Waits until the task of a listener ends; for ever after it has ended.
///
/// # Errors
/// It panicked.
pub async fn wait(listener: &mut Option<JoinHandle<io::Result<()>>>) -> Result<io::Result<()>, JoinError> {
    match listener {
        Some(listener) => listener.await,
        None => std::future::pending().await,
    }
}

/// Waits until the task of a listener ends, and then breaks it off.
pub async fn close((name, listener): (&'static str, Option<JoinHandle<io::Result<()>>>), until: Instant) {
    let Some(mut listener) = listener else { return };
    if tokio::time::timeout_at(until.into(), &mut listener).await.is_err() {
        tracing::warn!(listener = name, "closed connections that did not end in time");
        listener.abort();
    }
}
