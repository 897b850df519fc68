//! The settings of both listeners: addresses, limits and keys, and what they show and change.

mod card;
mod keys;
mod mistakes;
pub mod parameters;
pub(crate) mod paths;

use std::net::SocketAddr;
use std::time::Duration;

use poorwill_net::tls::ServerFiles;

pub use self::card::Card;
pub use self::keys::{Key, KeyShare};
pub(crate) use self::mistakes::Mistake;
pub use self::mistakes::{Mistakes, SectionMistakes};
pub use self::parameters::Parameters;

/// The listener for clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Front {
    /// The address to listen on.
    pub listen: SocketAddr,
    /// Its certificate; `None` for one without TLS.
    pub tls: Option<ServerFiles>,
    /// Accepted API keys. Without keys, every client on this machine is accepted.
    pub keys: Vec<Key>,
    /// Origins of pages that may use the front, or `*` for all.
    pub origins: Vec<String>,
    /// Paths that are forwarded besides the usual ones. Those that end in a slash are prefixes.
    pub paths: Vec<String>,
    /// Longest request body.
    pub body_max_bytes: u64,
    /// Longest time for a request body.
    pub body_time_max: Duration,
    /// Most bytes of all request bodies at a time.
    pub bodies_max_bytes: u64,
    /// Longest request head.
    pub head_max_bytes: u64,
    /// Most requests at a time, including those that wait.
    pub requests_max: usize,
    /// Most connections at a time; `None` for as many as the file descriptors allow.
    pub connections_max: Option<usize>,
    /// Interval of keep-alive comments to clients that wait for a stream.
    pub keep_alive: Option<Duration>,
    /// Longest time of a WebSocket without data.
    pub websocket_idle_max: Duration,
    /// Whether all paths of engines can be reached, below `/engines/NAME/`.
    pub passthrough: bool,
}

impl Front {
    /// Whether its own [`paths`](Self::paths) open this one.
    #[must_use]
    pub fn opens(&self, path: &str) -> bool {
        paths::is_own(path, &self.paths)
    }
}

/// The listener for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Control {
    /// The address to listen on.
    pub listen: SocketAddr,
    /// As [`Front::keys`].
    pub keys: Vec<Key>,
    /// Whether `/metrics` needs no key.
    pub metrics_are_open: bool,
}
