//! A listener for operators: bounded connections, heads and times.

use std::io;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::limits::{DRAIN_MAX, REQUEST_MAX};
use poorwill_net::accept;

/// More connections wait.
const CONNECTIONS_MAX: usize = 256;
const HEAD_MAX_BYTES: usize = 32 << 10;

/// Answers by these routes until `shutdown`.
///
/// # Errors
/// The listener cannot be used.
pub async fn serve(
    listener: TcpListener,
    router: axum::Router,
    shutdown: &CancellationToken,
) -> io::Result<()> {
    let until = shutdown.clone();
    accept::accept(listener, "control", CONNECTIONS_MAX, shutdown, |stream| {
        answer_all(stream, router.clone(), until.clone())
    })
    .await
}

async fn answer_all(stream: TcpStream, router: axum::Router, shutdown: CancellationToken) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(REQUEST_MAX).max_buf_size(HEAD_MAX_BYTES);
    let service = TowerToHyperService::new(router);
    let drained = async {
        shutdown.cancelled().await;
        tokio::time::sleep(DRAIN_MAX).await;
    };
    tokio::select! {
        biased;
        ended = accept::answer(&http, TokioIo::new(stream), service, &shutdown) => {
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection to control failed");
            }
        }
        () = drained => tracing::debug!("a connection to control was still busy when the service ended"),
    }
}
