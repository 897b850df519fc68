//! The operators' listener of a router: the fleet's status, wishes, metrics, and a web page.
//!
//! Promises, beside those of [its frame](poorwill_front::operators):
//!
//! - What it shows is of one revision of etcd, and it says whether etcd was reached lately.
//! - A wish is written by etcd's word, and not by what this process had seen.
//! - It answers without a front, and without a controller.

mod metrics;
mod routes;

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use poorwill_fleet::controller;
use poorwill_fleet::etcd::Etcd;
use poorwill_fleet::mirror::Contents;
use poorwill_fleet::name::FleetName;
use poorwill_front::operators::{Access, listener};
use poorwill_front::settings::Control;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use self::metrics::FleetMetrics;
use super::backend::RouteCounts;
use super::history::{Placed, PlacementHistory};
use super::status::Records;
use poorwill_front::requests::Requests;

/// What operators are shown.
pub(super) struct Operated {
    pub(super) fleet: FleetName,
    pub(super) etcd: Etcd,
    pub(super) control: Arc<Control>,
    pub(super) contents: watch::Receiver<Contents>,
    pub(super) history: Arc<Mutex<PlacementHistory>>,
    /// `None` in a process that is no candidate.
    pub(super) controller: Option<watch::Receiver<controller::Status>>,
    pub(super) requests: Arc<Requests>,
    pub(super) counts: Arc<RouteCounts>,
}

/// Shared by all request handlers.
#[derive(Clone)]
struct OperatorState {
    operated: Arc<Operated>,
    metrics: Arc<FleetMetrics>,
    access: Access,
}

impl Operated {
    /// All records at one revision. Reading many takes a while, so no other task waits for it.
    async fn records(&self) -> Result<(Records, Contents), tokio::task::JoinError> {
        let (fleet, contents) = (self.fleet.clone(), self.contents.borrow().clone());
        tokio::task::spawn_blocking(move || (Records::read(&fleet, contents.entries().values()), contents))
            .await
    }

    fn changes(&self) -> Vec<Placed> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner).newest()
    }

    fn controller(&self) -> Option<controller::Status> {
        self.controller.as_ref().map(|controller| controller.borrow().clone())
    }
}

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
