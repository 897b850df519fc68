//! The configuration of a router of a fleet: its listener, its etcd, and the rules of placement.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use poorwill_core::chain;
use poorwill_fleet::etcd::{Etcd, Limits};
use poorwill_fleet::name::FleetName;
use poorwill_fleet::policy::Rules;
use poorwill_fleet::records::Rate;
use poorwill_fleet::session::check_lease;
use poorwill_front::file::{self, ConfigError, RawControl, RawFront, Secret, TableKeys, Wait, client_files};
use poorwill_front::settings::{Control, Front, Key, Mistakes, SectionMistakes};
use poorwill_net::tls::ClientFiles;
use serde::Deserialize;
use serde::de::IgnoredAny;

/// A checked configuration of a router.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouterConfig {
    /// The listener for clients.
    pub front: Arc<Front>,
    /// The listener for operators; `None` without a table for it.
    pub control: Option<Arc<Control>>,
    /// The fleet.
    pub fleet: FleetName,
    /// etcd's members.
    pub etcd: Vec<String>,
    /// For members at `https://`.
    pub etcd_tls: Option<ClientFiles>,
    /// How long a controller leads behind its last sign of life.
    pub lease: Duration,
    /// What nodes ask for; `None` if they have no keys.
    pub node_key: Option<Key>,
    /// For nodes at `https://`.
    pub node_tls: Option<ClientFiles>,
    /// How a controller places models.
    pub rules: Rules,
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
    #[serde(default)]
    rules: RawPlacementRules,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRouterFleet {
    name: String,
    etcd: Vec<String>,
    etcd_ca: Option<PathBuf>,
    etcd_certificate: Option<PathBuf>,
    etcd_certificate_key: Option<PathBuf>,
    lease: Option<Wait>,
    node_key: Option<String>,
    node_ca: Option<PathBuf>,
    node_certificate: Option<PathBuf>,
    node_certificate_key: Option<PathBuf>,
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
    swaps_per_minute: Option<usize>,
    swaps_per_node_minute: Option<usize>,
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

/// For a key that stands in another table.
fn tables() -> [TableKeys; 4] {
    [
        TableKeys::of::<RawFront>("[front]"),
        TableKeys::of::<RawControl>("[control]"),
        TableKeys::of::<RawRouterFleet>("[fleet]"),
        TableKeys::of::<RawPlacementRules>("[rules]"),
    ]
}

impl RouterFile {
    /// `None` only with a mistake.
    fn checked(self, secret: Secret<'_>, mistakes: &mut Mistakes) -> Option<RouterConfig> {
        let here = &mut mistakes.of("front");
        let front = self.front.checked(secret, here);
        for (what, is_set) in [("keep_alive", front.keep_alive.is_some()), ("passthrough", front.passthrough)]
        {
            let reason = format!("{what} is for nodes, which know the engines; leave it out here");
            here.add_if(is_set, reason);
        }
        let control = self.control.map(|table| table.checked(&front, secret, &mut mistakes.of("control")));
        let rules = self.rules.checked(&mut mistakes.of("rules"));
        let here = &mut mistakes.of("fleet");
        let RawRouterFleet { name, etcd, etcd_ca, etcd_certificate, etcd_certificate_key, .. } = self.fleet;
        let RawRouterFleet { lease, node_key, node_ca, node_certificate, node_certificate_key, .. } =
            self.fleet;
        let name = here.right(name.parse().map_err(|error| format!("name: {error}")));
        let etcd_tls = here.right(client_files("etcd_", etcd_ca, etcd_certificate, etcd_certificate_key));
        // Without its TLS, https:// would be a mistake, too.
        let etcd = etcd_tls.as_ref().and_then(|tls| here.right(checked_etcd(etcd, tls.as_ref())));
        let lease = here.right(check_lease(lease.map(|wait| wait.0)));
        let node_tls = here.right(client_files("node_", node_ca, node_certificate, node_certificate_key));
        let node_key = node_key.and_then(|source| {
            let key = secret(&source).and_then(|text| Key::new(&text, None));
            here.right(key.map_err(|why| format!("node_key: {why}")))
        });
        Some(RouterConfig {
            front: Arc::new(front),
            control: control.map(Arc::new),
            fleet: name?,
            etcd: etcd?,
            etcd_tls: etcd_tls?,
            lease: lease?,
            node_key,
            node_tls: node_tls?,
            rules,
        })
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
            swaps_per_minute: self.swaps_per_minute.unwrap_or(usual.swaps_per_minute),
            swaps_per_node_minute: self.swaps_per_node_minute.unwrap_or(usual.swaps_per_node_minute),
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

fn checked_etcd(etcd: Vec<String>, tls: Option<&ClientFiles>) -> Result<Vec<String>, String> {
    Etcd::with_tls(&etcd, Limits::default(), tls).map_err(|error| format!("etcd: {}", chain(&error)))?;
    Ok(etcd)
}
