//! A running router, and the controller beside it.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use poorwill_fleet::controller::{Controller, Settings};
use poorwill_fleet::etcd::{Etcd, Limits};
use poorwill_fleet::keys;
use poorwill_fleet::mirror::Mirror;
use poorwill_fleet::tls::ClientTls;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::backend::RouterBackend;
use super::table::Table;
use crate::config::RouterConfig;
use crate::fleet::FleetError;
use crate::front::{self, Backend, Timeouts};
use crate::run::{RunError, listen};

/// Changes that come this close together are taken in together.
const GATHER: Duration = Duration::from_millis(5);

/// A running router.
#[derive(Debug)]
pub struct RouterRunning {
    /// The front's bound address; `None` for a controller alone.
    pub front: Option<SocketAddr>,
    controller: Option<Controller>,
    closing: CancellationToken,
    listener: Option<JoinHandle<io::Result<()>>>,
    table: JoinHandle<()>,
}

/// Starts a router, a candidate for the fleet's controller, or both in one process.
///
/// # Errors
/// See [`RunError`]; nothing runs then.
pub async fn begin(config: &RouterConfig, routes: bool, controls: bool) -> Result<RouterRunning, RunError> {
    let etcd = Etcd::with_tls(&config.etcd, Limits::default(), config.etcd_tls.as_ref());
    let etcd = etcd.map_err(FleetError::from)?;
    let node_tls = config.node_tls.clone().map(ClientTls::new).transpose().map_err(FleetError::from)?;
    let listener = match routes {
        true => Some(listen("front", config.front.listen).await?),
        false => None,
    };
    let mirror = Mirror::start(etcd.clone(), &keys::prefix(&config.fleet));
    let (sender, table) = watch::channel(Arc::default());
    let fleet = config.fleet.clone();
    let following = tokio::spawn(async move {
        let mut contents = mirror.contents();
        while contents.changed().await.is_ok() {
            sleep(GATHER).await;
            let table = Table::of(&fleet, &contents.borrow_and_update());
            sender.send_replace(Arc::new(table));
        }
    });
    let controller = controls.then(|| {
        let who = format!("{}:{}", crate::fleet::hostname(), std::process::id());
        let (fleet, rules, lease_ttl) = (config.fleet.clone(), config.rules.clone(), config.lease);
        Controller::start(etcd, Settings { fleet, rules, lease_ttl, who })
    });
    let closing = CancellationToken::new();
    let address = listener.as_ref().map(|(_, address)| *address);
    let listener = listener.map(|(listener, address)| {
        tracing::info!(front = %address, fleet = %config.fleet, "routing");
        let backend: Arc<dyn Backend> = Arc::new(RouterBackend::new(config, node_tls, table));
        tokio::spawn(front::serve(listener, backend, closing.clone(), Timeouts::default()))
    });
    Ok(RouterRunning { front: address, controller, closing, listener, table: following })
}

impl RouterRunning {
    /// Waits until the listener stops unexpectedly, and returns why. Without one, it waits for ever.
    pub async fn ended(&mut self) -> RunError {
        let Some(listener) = &mut self.listener else { return std::future::pending().await };
        let reason = match listener.await {
            Ok(Ok(())) => "no shutdown was requested".to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        self.listener = None;
        RunError::Ended { listener: "front", reason }
    }

    /// Admits no more requests, and waits up to `most` for running answers. Another controller is elected at once.
    pub async fn end(self, most: Duration) {
        if let Some(controller) = self.controller {
            controller.end().await;
        }
        self.closing.cancel();
        if let Some(mut listener) = self.listener
            && timeout(most, &mut listener).await.is_err()
        {
            tracing::warn!("connections were broken off");
            listener.abort();
        }
        self.table.abort();
    }
}
