//! The fleet that this node belongs to.

use std::path::PathBuf;
use std::time::Duration;

use poorwill::chain;
use poorwill_fleet::etcd::{Etcd, Limits};
use poorwill_fleet::name::{FleetName, NodeName};
use poorwill_fleet::session::check_lease;
use poorwill_front::file::{ConfigError, Wait, check_secure_url, client_files, invalid};
use poorwill_front::settings::{Control, Front};
use poorwill_net::tls::ClientFiles;
use serde::Deserialize;

use poorwill_net::hostname;

/// A node of a fleet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fleet {
    /// The fleet.
    pub name: FleetName,
    /// The name of this node.
    pub node: NodeName,
    /// etcd's members.
    pub etcd: Vec<String>,
    /// For members at `https://`.
    pub etcd_tls: Option<ClientFiles>,
    /// How long the node counts as alive behind its last sign of life.
    pub lease: Duration,
    /// What fails together with it.
    pub domain: String,
    /// Where routers reach the front.
    pub front_url: String,
    /// Where operators reach control.
    pub control_url: String,
    /// Whether cold engines of warm models are started before a request comes.
    pub prepare: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawFleet {
    name: String,
    node: Option<String>,
    etcd: Vec<String>,
    etcd_ca: Option<PathBuf>,
    etcd_certificate: Option<PathBuf>,
    etcd_certificate_key: Option<PathBuf>,
    lease: Option<Wait>,
    domain: Option<String>,
    front_url: Option<String>,
    control_url: Option<String>,
    prepare: Option<bool>,
}

impl RawFleet {
    pub(super) fn checked(self, front: &Front, control: &Control) -> Result<Fleet, ConfigError> {
        let invalid = |reason: &str| invalid("fleet", reason);
        let has_tls = front.tls.is_some();
        let url = |what: &str, given: Option<String>, listen: std::net::SocketAddr| match given {
            Some(url) if what == "front_url" && has_tls && url.starts_with("http://") => Err(invalid(
                "front_url begins with http://, and [front] has a certificate; say https://, and a host that the \
                 certificate has",
            )),
            Some(url) => {
                let url = url.trim_end_matches('/').to_owned();
                check_secure_url(&url).map_err(|reason| invalid(&format!("{what}: {reason}"))).map(|()| url)
            }
            None if listen.ip().is_unspecified() || listen.port() == 0 => Err(invalid(&format!(
                "{what} is missing: it listens on {listen}, which is no address to go to; say how routers reach it"
            ))),
            None if what == "front_url" && has_tls => Ok(format!("https://{listen}")),
            None => Ok(format!("http://{listen}")),
        };
        let etcd_tls = client_files("etcd_", self.etcd_ca, self.etcd_certificate, self.etcd_certificate_key);
        let etcd_tls = etcd_tls.map_err(|reason| invalid(&reason))?;
        Ok(Fleet {
            front_url: url("front_url", self.front_url, front.listen)?,
            control_url: url("control_url", self.control_url, control.listen)?,
            name: self.name.parse().map_err(|error| invalid(&format!("name: {error}")))?,
            node: node_name(self.node).map_err(|reason| invalid(&format!("node: {reason}")))?,
            etcd: checked_etcd(self.etcd, etcd_tls.as_ref()).map_err(|reason| invalid(&reason))?,
            etcd_tls,
            lease: check_lease(self.lease.map(|wait| wait.0)).map_err(|reason| invalid(&reason))?,
            domain: self.domain.unwrap_or_default(),
            prepare: self.prepare.unwrap_or(true),
        })
    }
}

/// The machine's own name if none is given.
fn node_name(given: Option<String>) -> Result<NodeName, String> {
    let name = given.unwrap_or_else(hostname);
    name.parse().map_err(|error| format!("`{name}`: {error}"))
}

fn checked_etcd(etcd: Vec<String>, tls: Option<&ClientFiles>) -> Result<Vec<String>, String> {
    Etcd::with_tls(&etcd, Limits::default(), tls).map_err(|error| format!("etcd: {}", chain(&error)))?;
    Ok(etcd)
}
