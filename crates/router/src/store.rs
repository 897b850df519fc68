//! The store in a router, for a fleet without etcd: its table of the configuration, and its task.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use poorwill_fleet::etcd::{Access, User};
use poorwill_fleet::store::{Lock, StoreLimits, StoreService, precedence};
use poorwill_front::file::{Secret, server_files};
use poorwill_front::settings::SectionMistakes;
use poorwill_net::tls::{ServerFiles, ServerTls};
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// The port that etcd has.
const STORE_PORT: u16 = 2379;
/// Its clients may have any user's name.
const USER: &str = "store";

/// The checked table `[store]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreSettings {
    /// Where it listens.
    pub listen: SocketAddr,
    /// Whose password its clients have to know; `None` if only this machine can reach it.
    pub user: Option<User>,
    /// For `https://`.
    pub tls: Option<ServerFiles>,
}

/// The same, as written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawStore {
    listen: Option<SocketAddr>,
    password: Option<String>,
    certificate: Option<PathBuf>,
    certificate_key: Option<PathBuf>,
}

impl RawStore {
    /// Means nothing if there are mistakes.
    pub(crate) fn checked(self, secret: Secret<'_>, mistakes: &mut SectionMistakes<'_>) -> StoreSettings {
        let local = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), STORE_PORT);
        let listen = self.listen.unwrap_or(local);
        mistakes.add_if(listen.port() == 0, "listen has port 0; name the port by which nodes find it");
        if self.password.is_none() && !listen.ip().is_loopback() {
            mistakes.add(format!(
                "it listens on {listen}, where others can reach it, and has no password; say password = \"env:NAME\", or \
                 listen on 127.0.0.1"
            ));
        }
        let user = self.password.and_then(|source| {
            let user = secret(&source).and_then(|password| User::new(USER, &password));
            mistakes.right(user.map_err(|why| format!("password: {why}")))
        });
        let tls = mistakes.right(server_files(self.certificate, self.certificate_key, None)).flatten();
        StoreSettings { listen, user, tls }
    }
}

impl StoreSettings {
    /// Where this router itself reaches it, if no URL is configured.
    pub(crate) fn own_url(&self) -> Result<String, &'static str> {
        if self.tls.is_some() {
            return Err("etcd is missing; the store has a certificate, so name the URL that it is for");
        }
        let own = match self.listen.ip() {
            ip if !ip.is_unspecified() => ip,
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        };
        Ok(format!("http://{}", SocketAddr::new(own, self.listen.port())))
    }
}

/// Serves it until `shutdown`, as long as none before it in the fleet's list does.
///
/// # Errors
/// A certificate cannot be used, or no random number be read.
pub(crate) fn serve(
    listener: TcpListener,
    settings: &StoreSettings,
    stores: Access,
    shutdown: CancellationToken,
) -> io::Result<impl Future<Output = io::Result<()>> + use<>> {
    let tls = settings.tls.clone().map(ServerTls::new).transpose().map_err(io::Error::other)?;
    let (instance, token) = (precedence::random_id()?, precedence::random()?);
    let lock = settings.user.as_ref().map(|user| Lock::new(user, token));
    let service = StoreService::new(instance, lock, StoreLimits::default());
    let followed = service.clone();
    Ok(async move {
        tokio::select! {
            served = service.serve(listener, tls, shutdown) => served,
            failed = precedence::follow(&followed, &stores) => failed,
        }
    })
}
