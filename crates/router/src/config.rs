//! The configuration of a router of a fleet: its listener, its etcd, and the rules of placement.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use poorwill_core::chain;
use poorwill_fleet::etcd::{Access, User};
use poorwill_fleet::name::FleetName;
use poorwill_fleet::policy::Rules;
use poorwill_fleet::records::Rate;
use poorwill_fleet::session::check_lease;
use poorwill_front::file::{self, ConfigError, RawControl, RawFront, Secret, TableKeys, Wait, client_files};
use poorwill_front::settings::{Control, Front, Key, Mistakes, SectionMistakes};
use poorwill_net::tls::ClientFiles;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::store::{RawStore, StoreSettings};

/// A checked configuration of a router.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouterConfig {
    /// The listener for clients.
    pub front: Arc<Front>,
    /// The listener for operators; `None` without a table for it.
    pub control: Option<Arc<Control>>,
    /// The fleet.
    pub fleet: FleetName,
    /// Its etcd.
    pub etcd: Access,
    /// The records that this router keeps itself; `None` without a table for it.
    pub store: Option<StoreSettings>,
    /// How long a controller leads behind its last sign of life.
    pub lease: Duration,
    /// What nodes ask for; `None` if they have no keys.
    pub node_key: Option<Key>,
    /// For nodes at `https://`.
    pub node_tls: Option<ClientFiles>,
    /// How a controller places models.
    pub rules: Rules,
}

/// What commands about a fleet need of a router's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetConfig {
    /// The fleet.
    pub fleet: FleetName,
    /// Its etcd.
    pub etcd: Access,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RouterFile {
    /// Replaced in all texts before.
    #[serde(default, rename = "macros")]
    _macros: IgnoredAny,
    fleet: RawRouterFleet,
    #[serde(default)]
    front: RawFront,
    control: Option<RawControl>,
    store: Option<RawStore>,
    #[serde(default)]
    rules: RawPlacementRules,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRouterFleet {
    name: String,
    etcd: Option<Vec<String>>,
    etcd_ca: Option<PathBuf>,
    etcd_certificate: Option<PathBuf>,
    etcd_certificate_key: Option<PathBuf>,
    etcd_user: Option<String>,
    etcd_password: Option<String>,
    lease: Option<Wait>,
    node_key: Option<String>,
    node_ca: Option<PathBuf>,
    node_certificate: Option<PathBuf>,
    node_certificate_key: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FleetTable {
    /// Replaced in all texts before.
    #[serde(default, rename = "macros")]
    _macros: IgnoredAny,
    fleet: RawRouterFleet,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StoreTable {
    #[serde(default, rename = "macros")]
    _macros: IgnoredAny,
    store: Option<RawStore>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPlacementRules {
    copies_min: Option<usize>,
    copies_max: Option<usize>,
    requests_per_copy: Option<u32>,
    rate_per_copy: Option<Rate>,
    hot_rate_min: Option<Rate>,
    pay_back: Option<Wait>,
    keep_min: Option<Wait>,
    spare_keep: Option<Wait>,
}

impl RouterConfig {
    /// Reads a file.
    ///
    /// # Errors
    /// What is wrong; see [`ConfigError`].
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        Self::parse(&file::read(path)?, &file::from_source)
    }

    /// Parses a file. `secret` resolves the source of a key, `env:NAME` or `file:PATH`, and `${env.NAME}`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(text: &str, secret: &dyn Fn(&str) -> Result<String, String>) -> Result<Self, ConfigError> {
        let file: RouterFile = file::parse(text, secret, &tables())?;
        let mut mistakes = Mistakes::default();
        let config = file.checked(secret, &mut mistakes);
        file::without_mistakes(config, mistakes, text, secret)
    }
}

impl FleetConfig {
    /// Reads a file of a router. Of its secrets, only those for etcd need to be there.
    ///
    /// # Errors
    /// What is wrong; see [`ConfigError`].
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        Self::parse(&file::read(path)?, &file::from_source)
    }

    /// Parses a file; see [`RouterConfig::parse`].
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(text: &str, secret: &dyn Fn(&str) -> Result<String, String>) -> Result<Self, ConfigError> {
        let FleetTable { mut fleet, .. } = file::parse_table(text, secret, "fleet")?;
        let mut mistakes = Mistakes::default();
        let own = match &fleet.etcd {
            Some(_) => None,
            None => file::parse_table::<StoreTable>(text, secret, "store")?.store,
        };
        let own = own.map(|table| table.checked(secret, &mut mistakes.of("store")));
        let config = fleet.checked(own.as_ref(), secret, &mut mistakes.of("fleet"));
        file::without_mistakes(config, mistakes, text, secret)
    }
}

/// For a key that stands in another table.
fn tables() -> [TableKeys; 5] {
    [
        TableKeys::of::<RawFront>("[front]"),
        TableKeys::of::<RawControl>("[control]"),
        TableKeys::of::<RawRouterFleet>("[fleet]"),
        TableKeys::of::<RawPlacementRules>("[rules]"),
        TableKeys::of::<RawStore>("[store]"),
    ]
}

impl RouterFile {
    /// `None` only with a mistake.
    fn checked(mut self, secret: Secret<'_>, mistakes: &mut Mistakes) -> Option<RouterConfig> {
        let here = &mut mistakes.of("front");
        let front = self.front.checked(secret, here);
        for (what, is_set) in [("keep_alive", front.keep_alive.is_some()), ("passthrough", front.passthrough)]
        {
            let reason = format!("{what} is for nodes, which know the engines; leave it out here");
            here.add_if(is_set, reason);
        }
        let control = self.control.map(|table| table.checked(&front, secret, &mut mistakes.of("control")));
        let rules = self.rules.checked(&mut mistakes.of("rules"));
        let store = self.store.map(|table| table.checked(secret, &mut mistakes.of("store")));
        let here = &mut mistakes.of("fleet");
        let fleet = self.fleet.checked(store.as_ref(), secret, here);
        let RawRouterFleet { lease, node_key, node_ca, node_certificate, node_certificate_key, .. } =
            self.fleet;
        let lease = here.right(check_lease(lease.map(|wait| wait.0)));
        let node_tls = here.right(client_files("node_", node_ca, node_certificate, node_certificate_key));
        let node_key = node_key.and_then(|source| {
            let key = secret(&source).and_then(|text| Key::new(&text, None));
            here.right(key.map_err(|why| format!("node_key: {why}")))
        });
        let FleetConfig { fleet, etcd } = fleet?;
        Some(RouterConfig {
            front: Arc::new(front),
            control: control.map(Arc::new),
            fleet,
            etcd,
            store,
            lease: lease?,
            node_key,
            node_tls: node_tls?,
            rules,
        })
    }
}

impl RawRouterFleet {
    /// Takes what leads to etcd. `None` only with a mistake.
    fn checked(
        &mut self,
        store: Option<&StoreSettings>,
        secret: Secret<'_>,
        mistakes: &mut SectionMistakes<'_>,
    ) -> Option<FleetConfig> {
        let fleet = mistakes.right(self.name.parse().map_err(|error| format!("name: {error}")));
        let (certificate, key) = (self.etcd_certificate.take(), self.etcd_certificate_key.take());
        let tls = mistakes.right(client_files("etcd_", self.etcd_ca.take(), certificate, key));
        let user = User::configured(self.etcd_user.take(), self.etcd_password.take(), secret);
        let user = mistakes.right(user);
        let (etcd, user) = match (self.etcd.take(), store) {
            (Some(etcd), _) => (etcd, user),
            (None, Some(store)) => {
                let own = store.own_url().map_err(str::to_owned);
                (vec![mistakes.right(own)?], user.map(|user| user.or_else(|| store.user.clone())))
            }
            (None, None) => {
                let missing =
                    "etcd is missing; name its members, or have this router keep the records by [store]";
                mistakes.add(missing);
                return None;
            }
        };
        // Without its TLS, https:// would be a mistake, too.
        let etcd = tls.zip(user).and_then(|(tls, user)| {
            let etcd = Access::new(&etcd, tls, user);
            mistakes.right(etcd.map_err(|error| format!("etcd: {}", chain(&error))))
        });
        Some(FleetConfig { fleet: fleet?, etcd: etcd? })
    }
}

impl RawPlacementRules {
    fn checked(self, mistakes: &mut SectionMistakes<'_>) -> Rules {
        let usual = Rules::default();
        let ms = |wait: Option<Wait>, usual: u64| {
            wait.map_or(usual, |wait| u64::try_from(wait.0.as_millis()).unwrap_or(u64::MAX))
        };
        let rules = Rules {
            copies_min: self.copies_min.unwrap_or(usual.copies_min),
            copies_max: self.copies_max.unwrap_or(usual.copies_max),
            requests_per_copy: self.requests_per_copy.unwrap_or(usual.requests_per_copy),
            rate_per_copy: self.rate_per_copy.unwrap_or(usual.rate_per_copy),
            hot_rate_min: self.hot_rate_min.unwrap_or(usual.hot_rate_min),
            pay_back_ms: ms(self.pay_back, usual.pay_back_ms),
            keep_min_ms: ms(self.keep_min, usual.keep_min_ms),
            spare_keep_ms: ms(self.spare_keep, usual.spare_keep_ms),
            ..usual
        };
        for (what, is_zero) in [
            ("copies_min", rules.copies_min == 0),
            ("copies_max", rules.copies_max == 0),
            ("requests_per_copy", rules.requests_per_copy == 0),
            ("rate_per_copy", rules.rate_per_copy == Rate::default()),
        ] {
            mistakes.add_if(is_zero, format!("{what} is 0; leave it out or make it larger"));
        }
        rules
    }
}
