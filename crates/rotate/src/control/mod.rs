//! The operators' listener: status, commands, events, metrics, and a web page.
//!
//! Promises:
//!
//! - Where keys are configured, only the page's own text, `/health` and `/fleet/ready` are served without a key. A
//!   changed key takes effect at once, also for open event streams.
//! - A page of another site in an operator's browser reads nothing and commands nothing.
//! - Resources of each client are bounded: heads, bodies, connections, event streams, and kept events.
//! - A command or reload completes even if its client disconnects.
//! - At shutdown, streams end, and other answers may take up to [`DRAIN_MAX`].

mod api;
mod events;
mod follow;
mod metrics;
mod routes;
mod state;

use std::io;
use std::sync::Arc;

use poorwill_front::operators::{Access, listener};
pub use poorwill_front::operators::{BODY_MAX_BYTES, DRAIN_MAX};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

pub use self::api::{ControlApi, Later};
use self::state::{FOLLOWERS_MAX, HandlerState};

/// Serves operators until `shutdown`.
///
/// # Errors
/// If the listener has no address. An error on one connection ends only that connection.
pub async fn serve(
    listener: TcpListener,
    api: Arc<dyn ControlApi>,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let address = listener.local_addr()?;
    let keys = Arc::clone(&api);
    let shared = HandlerState {
        hub: Arc::default(),
        metrics: Arc::new(metrics::Metrics::new(api.requests())),
        followers: Arc::new(Semaphore::new(FOLLOWERS_MAX)),
        access: Access::new(address, move || keys.control()),
        shutdown: shutdown.clone(),
        api,
    };
    let collector = events::collect(
        shared.api.events(),
        Arc::clone(&shared.hub),
        Arc::clone(&shared.metrics),
        shutdown.clone(),
    );
    let collector = async {
        collector.await;
        std::future::pending().await
    };
    let router = routes::router(shared);
    let served = listener::serve(listener, router, &shutdown);
    tracing::info!(%address, "control listens");
    tokio::select! {
        served = served => served,
        never = collector => never,
    }
}
