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

mod events;
mod metrics;
mod routes;

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;

use poorwill_front::operators::{Access, listener};
pub use poorwill_front::operators::{BODY_MAX_BYTES, DRAIN_MAX};
use poorwill_front::requests::Requests;
use poorwill_front::settings;

use crate::fleet::Membership;
use crate::service;

const FOLLOWERS_MAX: usize = 64;

/// The future of a [`ControlApi`] call.
pub type Later<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What this listener needs from the service.
pub trait ControlApi: Send + Sync + 'static {
    /// The current status.
    fn snapshot(&self) -> Later<'_, service::Snapshot>;

    /// Events from now on.
    fn events(&self) -> broadcast::Receiver<Arc<service::ServiceEvent>>;

    /// False if no model has this name or alias.
    fn command<'a>(&'a self, name: &'a str, command: service::ModelCommand) -> Later<'a, bool>;

    /// The last lines of a supervised engine's output; `None` if no model has this name or alias.
    fn log(&self, name: &str, lines: usize) -> Option<Vec<String>>;

    /// Reloads the configuration, or returns the mistake.
    fn reload(&self) -> Later<'_, Result<(), String>>;

    /// Chooses a profile or none, or returns the mistake.
    fn set_profile(&self, profile: Option<&str>) -> Result<(), String>;

    /// The front's requests.
    fn requests(&self) -> Arc<Requests>;

    /// The current address and keys.
    fn control(&self) -> Arc<settings::Control>;

    /// How it is in its fleet; `None` for a node of no fleet.
    fn fleet(&self) -> Option<Membership>;
}

/// Shared by all request handlers.
#[derive(Clone)]
struct HandlerState {
    api: Arc<dyn ControlApi>,
    hub: Arc<events::Hub>,
    metrics: Arc<metrics::Metrics>,
    followers: Arc<Semaphore>,
    access: Access,
    shutdown: CancellationToken,
}

impl HandlerState {
    /// The service's status, with what the front counted.
    async fn snapshot(&self) -> service::Snapshot {
        let (mut now, requests) = (self.api.snapshot().await, self.api.requests());
        for model in &mut now.models {
            model.recent = requests.recent(&model.name);
        }
        now
    }
}

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
    let follower = events::follow(
        shared.api.events(),
        Arc::clone(&shared.hub),
        Arc::clone(&shared.metrics),
        shutdown.clone(),
    );
    let follower = async {
        follower.await;
        std::future::pending().await
    };
    let router = routes::router(shared);
    let served = listener::serve(listener, router, &shutdown);
    tracing::info!(%address, "control listens");
    tokio::select! {
        served = served => served,
        never = follower => never,
    }
}
