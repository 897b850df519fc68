//! The fleet that this node belongs to.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use poorwill::chain;
use poorwill_fleet::etcd::{Access, User};
use poorwill_fleet::name::{FleetName, NodeName};
use poorwill_fleet::session::check_lease;
use poorwill_front::file::{Secret, Wait, check_secure_url, client_files};
use poorwill_front::settings::{Control, Front, SectionMistakes};
use serde::Deserialize;

use poorwill_net::hostname;

/// A node of a fleet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fleet {
    /// The fleet.
    pub name: FleetName,
    /// The name of this node.
    pub node: NodeName,
    /// Its etcd.
    pub etcd: Access,
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
    etcd_user: Option<String>,
    etcd_password: Option<String>,
    lease: Option<Wait>,
    domain: Option<String>,
    front_url: Option<String>,
    control_url: Option<String>,
    prepare: Option<bool>,
}

impl RawFleet {
    /// `None` only with a mistake.
    pub(super) fn checked(
        self,
        front: &Front,
        control: &Control,
        secret: Secret<'_>,
        mistakes: &mut SectionMistakes<'_>,
    ) -> Option<Fleet> {
        let front_url = mistakes.right(front_url(self.front_url, front));
        let control_url = mistakes.right(url("control_url", self.control_url, control.listen));
        let name = mistakes.right(self.name.parse().map_err(|error| format!("name: {error}")));
        let node = mistakes.right(node_name(self.node).map_err(|reason| format!("node: {reason}")));
        let etcd_tls = client_files("etcd_", self.etcd_ca, self.etcd_certificate, self.etcd_certificate_key);
        let etcd_tls = mistakes.right(etcd_tls);
        let etcd_user = mistakes.right(User::configured(self.etcd_user, self.etcd_password, secret));
        // Without its TLS, https:// would be a mistake, too.
        let etcd = etcd_tls.zip(etcd_user).and_then(|(tls, user)| {
            let etcd = Access::new(&self.etcd, tls, user);
            mistakes.right(etcd.map_err(|error| format!("etcd: {}", chain(&error))))
        });
        let lease = mistakes.right(check_lease(self.lease.map(|wait| wait.0)));
        Some(Fleet {
            front_url: front_url?,
            control_url: control_url?,
            name: name?,
            node: node?,
            etcd: etcd?,
            lease: lease?,
            domain: self.domain.unwrap_or_default(),
            prepare: self.prepare.unwrap_or(true),
        })
    }
}

fn front_url(given: Option<String>, front: &Front) -> Result<String, String> {
    let is_tls = front.tls.is_some();
    if is_tls && given.as_ref().is_some_and(|url| url.starts_with("http://")) {
        return Err("front_url begins with http://, and [front] has a certificate; say https://, and a host that the \
                    certificate has"
            .to_owned());
    }
    let is_given = given.is_some();
    let url = url("front_url", given, front.listen)?;
    Ok(if is_tls && !is_given { format!("https://{}", front.listen) } else { url })
}

fn url(what: &str, given: Option<String>, listen: SocketAddr) -> Result<String, String> {
    match given {
        Some(url) => {
            let url = url.trim_end_matches('/').to_owned();
            check_secure_url(&url).map_err(|reason| format!("{what}: {reason}")).map(|()| url)
        }
        None if listen.ip().is_unspecified() || listen.port() == 0 => Err(format!(
            "{what} is missing: it listens on {listen}, which is no address to go to; say how routers reach it"
        )),
        None => Ok(format!("http://{listen}")),
    }
}

/// The machine's own name if none is given.
fn node_name(given: Option<String>) -> Result<NodeName, String> {
    let name = given.unwrap_or_else(hostname);
    name.parse().map_err(|error| format!("`{name}`: {error}"))
}
