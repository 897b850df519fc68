//! What the handlers of operators' requests share.

use std::sync::Arc;

use poorwill_fleet::controller;
use poorwill_fleet::etcd::Etcd;
use poorwill_fleet::mirror::Contents;
use poorwill_fleet::name::FleetName;
use poorwill_front::operators::Access;
use poorwill_front::requests::Requests;
use poorwill_front::settings::Control;
use tokio::sync::watch;

use super::metrics::FleetMetrics;
use crate::backend::RouteCounts;
use crate::history::{Placed, SharedHistory};
use crate::status::Records;
use crate::table::RouteTable;

/// What operators are shown.
pub(crate) struct Operated {
    pub(crate) fleet: FleetName,
    pub(crate) etcd: Etcd,
    pub(crate) control: Arc<Control>,
    pub(crate) contents: watch::Receiver<Contents>,
    pub(crate) table: watch::Receiver<Arc<RouteTable>>,
    pub(crate) history: SharedHistory,
    /// `None` in a process that is no candidate.
    pub(crate) controller: Option<watch::Receiver<controller::Status>>,
    pub(crate) requests: Arc<Requests>,
    pub(crate) counts: Arc<RouteCounts>,
}

/// Shared by all request handlers.
#[derive(Clone)]
pub(super) struct OperatorState {
    pub(super) operated: Arc<Operated>,
    pub(super) metrics: Arc<FleetMetrics>,
    pub(super) access: Access,
}

impl Operated {
    /// All records at one revision. Reading many takes a while, so no other task waits for it.
    pub(super) async fn records(&self) -> Result<(Records, Contents), tokio::task::JoinError> {
        let (fleet, contents) = (self.fleet.clone(), self.contents.borrow().clone());
        let table = Arc::clone(&self.table.borrow());
        let read = move || {
            let records = Records::read(&fleet, contents.entries().values());
            (records.with_problems(table.problems()), contents)
        };
        tokio::task::spawn_blocking(read).await
    }

    pub(super) fn changes(&self) -> Vec<Placed> {
        self.history.newest()
    }

    pub(super) fn controller(&self) -> Option<controller::Status> {
        self.controller.as_ref().map(|controller| controller.borrow().clone())
    }
}
