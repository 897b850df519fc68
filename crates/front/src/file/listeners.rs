//! The tables of both listeners as written: every key, and every default.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use super::source::Secret;
use super::tls::server_files;
use super::values::{KeySource, KeySources, Size, Wait};
use crate::settings::{Control, Front, Key, SectionMistakes, paths};

/// On the loopback address.
const FRONT_PORT: u16 = 8080;
/// On the loopback address.
const CONTROL_PORT: u16 = 8081;

/// `[front]`, as written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawFront {
    listen: Option<SocketAddr>,
    certificate: Option<PathBuf>,
    certificate_key: Option<PathBuf>,
    clients_ca: Option<PathBuf>,
    #[serde(default)]
    keys: KeySources,
    #[serde(default)]
    origins: Vec<String>,
    #[serde(default)]
    paths: Vec<String>,
    body_max: Option<Size>,
    body_time_max: Option<Wait>,
    bodies_max: Option<Size>,
    head_max: Option<Size>,
    requests_max: Option<usize>,
    connections_max: Option<usize>,
    keep_alive: Option<Wait>,
    websocket_idle_max: Option<Wait>,
    #[serde(default)]
    passthrough: bool,
}

/// `[control]`, as written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawControl {
    listen: Option<SocketAddr>,
    #[serde(default)]
    keys: KeySources,
    #[serde(default)]
    open_metrics: bool,
}

impl RawControl {
    /// With every default. Means nothing if there are mistakes.
    pub fn checked(self, front: &Front, secret: Secret<'_>, mistakes: &mut SectionMistakes<'_>) -> Control {
        let listen = self.listen.unwrap_or_else(|| local(CONTROL_PORT));
        let reason = format!(
            "it would listen on {listen}, and the front on {}: the same port; give listen another one",
            front.listen
        );
        mistakes.add_if(are_one(front.listen, listen), reason);
        self.alone(secret, mistakes)
    }

    /// As [`checked`](Self::checked), without the front.
    pub fn alone(self, secret: Secret<'_>, mistakes: &mut SectionMistakes<'_>) -> Control {
        let listen = self.listen.unwrap_or_else(|| local(CONTROL_PORT));
        let shares = self.keys.0.iter().filter_map(|key| key.share.as_ref());
        let is_limited = shares.into_iter().any(|share| share.requests_max.is_some() || share.priority != 0);
        mistakes.add_if(is_limited, "requests_max and priority are for keys of [front]; leave them out here");
        Control {
            listen,
            keys: keys_of(listen, &self.keys.0, secret, mistakes),
            metrics_are_open: self.open_metrics,
        }
    }
}

impl RawFront {
    /// With every default. Means nothing if there are mistakes.
    pub fn checked(self, secret: Secret<'_>, mistakes: &mut SectionMistakes<'_>) -> Front {
        self.check(mistakes);
        let listen = self.listen.unwrap_or_else(|| local(FRONT_PORT));
        let tls = server_files(self.certificate, self.certificate_key, self.clients_ca);
        Front {
            listen,
            tls: mistakes.right(tls).flatten(),
            origins: self.origins,
            paths: self.paths,
            keys: keys_of(listen, &self.keys.0, secret, mistakes),
            body_max_bytes: self.body_max.map_or(32 << 20, |size| size.0),
            body_time_max: self.body_time_max.map_or(Duration::from_secs(120), |wait| wait.0),
            bodies_max_bytes: self.bodies_max.map_or(128 << 20, |size| size.0),
            head_max_bytes: self.head_max.map_or(64 << 10, |size| size.0),
            requests_max: self.requests_max.unwrap_or(4096),
            connections_max: self.connections_max,
            keep_alive: self.keep_alive.map(|wait| wait.0),
            websocket_idle_max: self.websocket_idle_max.map_or(Duration::from_secs(60), |wait| wait.0),
            passthrough: self.passthrough,
        }
    }

    fn check(&self, mistakes: &mut SectionMistakes<'_>) {
        mistakes.add_if(
            self.requests_max == Some(0),
            "requests_max is 0, so no request would be admitted; leave it out or make it larger",
        );
        for (what, is_zero) in [
            ("connections_max", self.connections_max == Some(0)),
            ("body_max", self.body_max.is_some_and(|size| size.0 == 0)),
            ("body_time_max", self.body_time_max.is_some_and(|wait| wait.0.is_zero())),
            ("bodies_max", self.bodies_max.is_some_and(|size| size.0 == 0)),
            ("head_max", self.head_max.is_some_and(|size| size.0 == 0)),
            ("keep_alive", self.keep_alive.is_some_and(|wait| wait.0.is_zero())),
            ("websocket_idle_max", self.websocket_idle_max.is_some_and(|wait| wait.0.is_zero())),
        ] {
            mistakes.add_if(is_zero, format!("{what} is 0; leave it out or make it larger"));
        }
        for origin in self.origins.iter().filter(|origin| !is_origin(origin)) {
            mistakes.add(format!(
                "origins has {origin:?}; say \"*\", or a scheme, a host and an unusual port, as browsers do: \
                 \"https://chat.example\""
            ));
        }
        for (path, reason) in self.paths.iter().filter_map(|path| Some((path, paths::mistake(path)?))) {
            mistakes.add(format!("paths has {path:?}; {reason}"));
        }
    }
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)
}

/// As browsers write it, without a path and without the scheme's own port.
fn is_origin(text: &str) -> bool {
    let Some((scheme, host)) = text.split_once("://") else { return text == "*" };
    let is_plain = |byte: u8| byte.is_ascii_graphic() && !b"/?#@\\*".contains(&byte);
    let is_usual = scheme == "https" && host.ends_with(":443") || scheme == "http" && host.ends_with(":80");
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    !scheme.is_empty()
        && scheme.bytes().all(is_name)
        && !host.is_empty()
        && host.bytes().all(is_plain)
        && !is_usual
}

/// Whether both cannot be bound at once. Port 0 means any free port.
fn are_one(one: SocketAddr, other: SocketAddr) -> bool {
    let is_any = one.ip().is_unspecified() || other.ip().is_unspecified();
    one.port() == other.port() && one.port() != 0 && (one.ip() == other.ip() || is_any)
}

/// A listener that other machines can reach needs at least one.
fn keys_of(
    listen: SocketAddr,
    sources: &[KeySource],
    secret: Secret<'_>,
    mistakes: &mut SectionMistakes<'_>,
) -> Vec<Key> {
    if sources.is_empty() && !listen.ip().is_loopback() {
        mistakes.add(format!(
            "it listens on {listen}, where others can reach it, and has no keys; say keys = [\"env:NAME\"], or listen \
             on 127.0.0.1"
        ));
    }
    let key = |(nth, source): (usize, &KeySource)| {
        let key = secret(&source.source).and_then(|text| Key::new(&text, source.share.clone()));
        mistakes.right(key.map_err(|reason| format!("key {} of {}: {reason}", nth + 1, sources.len())))
    };
    sources.iter().enumerate().filter_map(key).collect()
}
