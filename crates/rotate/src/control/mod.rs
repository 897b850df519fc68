//! Where operators come in: what the service is and does, orders to it, its events, metrics, and a page of it all.
//!
//! [`serve()`] asks a [`Desk`] and decides nothing. Promises:
//!
//! - Where there are keys, nothing but the page's own text and `/health` is given to who has none of them; keys are
//!   looked at as they are now, also in the middle of a stream of events.
//! - A page of another site in an operator's browser gets nothing and orders nothing, by whatever name it reaches us.
//! - Nobody who asks holds on to more than a bounded part of us: heads, bodies, connections, streams of events, and what
//!   is kept of events are all limited.
//! - An order and a reload are carried out to their end also when who asked for them has left.
//! - When the service ends, streams end, what is being answered may be for [`DRAIN_MAX`], and then [`serve()`] returns.

mod answer;
mod events;
mod guard;
mod metrics;
mod page;
mod routes;

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;

use crate::{config, serve, service};

/// How long answers may take to end when the service does.
pub const DRAIN_MAX: Duration = Duration::from_secs(5);
/// The longest body of a request.
pub const BODY_MAX_BYTES: usize = 16 << 10;
/// How many connections there may be at a time. Others wait.
const CONNECTIONS_MAX: usize = 256;
/// How many of them may follow events.
const FOLLOWERS_MAX: usize = 64;
/// The longest head of a request.
const HEAD_MAX_BYTES: usize = 32 << 10;
/// How long a head may take to come, and a body.
const REQUEST_MAX: Duration = Duration::from_secs(10);

/// What a desk gives when it has it.
pub type Later<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What control asks the service.
pub trait Desk: Send + Sync + 'static {
    /// All that there is to know now.
    fn snapshot(&self) -> Later<'_, service::Snapshot>;

    /// What happens from now on.
    fn events(&self) -> broadcast::Receiver<Arc<service::Told>>;

    /// False if there is no such model (by name or alias).
    fn order<'a>(&'a self, name: &'a str, order: service::Order) -> Later<'a, bool>;

    /// The last lines that a supervised engine wrote; None if there is no such model.
    fn log(&self, name: &str, lines: usize) -> Option<Vec<String>>;

    /// Reads the configuration again and takes it over, or says what is wrong with it.
    fn reload(&self) -> Later<'_, Result<(), String>>;

    /// Address and keys as they are now.
    fn control(&self) -> Arc<config::Control>;
}

/// What every request is answered from.
#[derive(Clone)]
struct Shared {
    desk: Arc<dyn Desk>,
    hub: Arc<events::Hub>,
    metrics: Arc<metrics::Metrics>,
    followers: Arc<Semaphore>,
    /// Whether only this machine reaches us, so that a name which is not this machine's is somebody's trick.
    is_local: bool,
    shutdown: CancellationToken,
}

/// Answers operators until `shutdown`.
///
/// # Errors
/// If the listener has no address. What goes wrong with one connection ends that connection only.
pub async fn serve(
    listener: TcpListener,
    desk: Arc<dyn Desk>,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let address = listener.local_addr()?;
    let shared = Shared {
        hub: Arc::default(),
        metrics: Arc::default(),
        followers: Arc::new(Semaphore::new(FOLLOWERS_MAX)),
        is_local: address.ip().to_canonical().is_loopback(),
        shutdown: shutdown.clone(),
        desk,
    };
    let follower = events::follow(
        shared.desk.events(),
        Arc::clone(&shared.hub),
        Arc::clone(&shared.metrics),
        shutdown.clone(),
    );
    let follower = async {
        follower.await;
        std::future::pending().await
    };
    let router = routes::router(shared);
    let until = shutdown.clone();
    let served = serve::accept(listener, "control", CONNECTIONS_MAX, &shutdown, |stream| {
        answer_all(stream, router.clone(), until.clone())
    });
    tracing::info!(%address, "control listens");
    tokio::select! {
        served = served => served,
        never = follower => never,
    }
}

/// Answers what comes on one connection.
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
        ended = serve::answer(&http, TokioIo::new(stream), service, &shutdown) => {
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection to control broke");
            }
        }
        () = drained => tracing::debug!("a connection to control was still busy when the service ended"),
    }
}
