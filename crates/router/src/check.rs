//! What a router would have with a configuration, and what stands against it. Nothing is started or written.

use std::io::ErrorKind;

use poorwill_fleet::etcd::{Etcd, Limits};
use poorwill_fleet::keys;
use poorwill_net::listener::{ListenerError, bind};
use poorwill_net::tls::ClientTls;

use super::config::RouterConfig;
use super::run::RouterError;
use super::status::{FleetStatus, Records};
use super::table::RouteTable;
use super::trust::Trust;

/// What was found.
#[derive(Debug)]
pub struct Checked {
    /// The fleet, as its etcd has it.
    pub status: FleetStatus,
    /// What would not be as configured, each a sentence.
    pub warnings: Vec<String>,
}

/// Reads certificates and etcd, and looks whether the listeners are free: the front's only if it `routes`, the store's only
/// if it `controls`.
///
/// # Errors
/// A certificate or an address cannot be used, or etcd does not answer: no router would run.
pub async fn check(config: &RouterConfig, routes: bool, controls: bool) -> Result<Checked, RouterError> {
    let etcd = Etcd::open(&config.etcd, Limits::default())?;
    let node_tls = config.node_tls.clone().map(ClientTls::new).transpose()?;
    let trust = Trust { key: config.node_key.clone(), has_tls: node_tls.is_some() };
    let mut warnings = Vec::new();
    let entries = match etcd.read(&keys::prefix(&config.fleet)).await {
        Ok((entries, _)) => entries,
        // It begins with the router.
        Err(error) if error.is_unreachable() && config.store.is_some() => {
            warnings.push("no store of the list is reached yet: this router begins one".to_owned());
            Vec::new()
        }
        Err(error) => return Err(error.into()),
    };
    let records = Records::read(&config.fleet, &entries);
    let entries = entries.into_iter().map(|entry| (entry.key.clone(), entry)).collect();
    let table = RouteTable::of(&config.fleet, &entries, &records.view, &trust);
    let status = records.with_problems(table.problems()).status();
    let front = routes.then_some(("front", config.front.listen));
    let control = config.control.as_ref().map(|control| ("control", control.listen));
    let store = config.store.as_ref().filter(|_| controls).map(|store| ("store", store.listen));
    let mut listeners = Vec::new();
    for (what, address) in front.into_iter().chain(control).chain(store) {
        match bind(what, address).await {
            Ok(listener) => listeners.push(listener),
            // The router that runs may be this one.
            Err(ListenerError::Bind { source, .. }) if source.kind() == ErrorKind::AddrInUse => {
                warnings.push(format!("something listens on {address} already, where the {what} would"));
            }
            Err(error) => return Err(error.into()),
        }
    }
    if status.nodes.is_empty() {
        warnings
            .push(format!("fleet `{}` has no node: start one with this fleet and this etcd", config.fleet));
    }
    warnings.extend(status.problems.iter().cloned());
    Ok(Checked { status, warnings })
}
