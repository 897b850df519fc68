//! The operators' listener of a router: the fleet's status, wishes, metrics, and a web page.
//!
//! Promises, beside those of [its frame](poorwill_front::operators):
//!
//! - What it shows is of one revision of etcd, and it says whether etcd was reached lately.
//! - A wish is written by etcd's word, and not by what this process had seen.
//! - It answers without a front, and without a controller.

mod metrics;
mod routes;
mod state;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use poorwill_front::operators::{Access, listener};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use self::metrics::FleetMetrics;
pub(super) use self::state::Operated;
use self::state::OperatorState;

/// Serves operators until `shutdown`.
pub(super) async fn serve(
    listener: TcpListener,
    address: SocketAddr,
    operated: Operated,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let control = Arc::clone(&operated.control);
    let shared = OperatorState {
        metrics: Arc::new(FleetMetrics::new(Arc::clone(&operated.requests), &operated.counts)),
        access: Access::new(address, move || Arc::clone(&control)),
        operated: Arc::new(operated),
    };
    tracing::info!(%address, "control listens");
    listener::serve(listener, routes::router(shared), &shutdown).await
}
