//! The configuration: models, engines, and the limits of both listeners.
//!
//! [`Config::read`] reads one TOML file and checks all of it. Every wrong value is reported at once: where it is and what
//! would be right, with an excerpt of the file. Of what cannot be read, unknown keys included, the first is reported. API keys
//! are never in the file, only where they are stored.

mod addresses;
mod calls;
mod fleet;
mod hibernate;
mod keys;
mod macros;
mod masked;
mod mistakes;
mod model;
mod names;
mod parameters;
mod place;
mod raw;
mod router;
mod tls;
mod traces;
mod urls;
mod values;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use self::calls::{AsleepCall, Call, HttpApi, SleepCalls};
pub use self::fleet::Fleet;
pub use self::keys::{Key, KeyShare};
pub use self::names::{Card, Selector, Strategy};
pub use self::parameters::Parameters;
pub use self::place::Place;
pub use self::router::RouterConfig;
pub use self::traces::TraceExport;

use self::mistakes::Mistakes;
use self::raw::{File, Secret};
pub(crate) use self::urls::check_url;
use crate::policy::Rules;
use poorwill_fleet::tls::ServerFiles;
use serde::Deserialize as _;

/// A checked configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The listener for clients.
    pub front: Arc<Front>,
    /// The listener for operators.
    pub control: Arc<Control>,
    /// How GPU memory is measured.
    pub memory: MemorySource,
    /// How engines hibernate; `None` if none does.
    pub hibernate: Option<Hibernate>,
    /// The fleet; `None` for a node that belongs to none.
    pub fleet: Option<Fleet>,
    /// Where traces are exported to; `None` if they are not.
    pub traces: Option<TraceExport>,
    /// The folder for state that survives the service.
    pub state: Option<PathBuf>,
    /// In the order of the file.
    pub models: Vec<Model>,
    /// Names for several models.
    pub selectors: Vec<Selector>,
    /// By their names: what a client's name stands for while the profile is chosen. Empty for no model.
    pub profiles: BTreeMap<String, BTreeMap<String, String>>,
}

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

/// How GPU memory is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemorySource {
    /// NVML.
    Devices,
    /// The memory of the engines' processes, on simulated GPUs.
    Processes {
        /// The size of each GPU.
        gpu_bytes: u64,
    },
}

/// How engines hibernate, besides the rules of their models.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hibernate {
    /// The program and arguments of the helper. Empty for this program's own.
    pub helper: Vec<String>,
    /// How long work on a GPU may take to end before a process leaves it.
    pub wait_max: Duration,
    /// The most host memory that all hibernating engines take.
    pub host_max_bytes: Option<u64>,
}

impl Default for Hibernate {
    fn default() -> Self {
        Self { helper: Vec::new(), wait_max: Duration::from_secs(5), host_max_bytes: None }
    }
}

/// A model, and its engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// The name in requests.
    pub name: String,
    /// Other names in requests.
    pub aliases: Vec<String>,
    /// Names of adapters, which its engine knows by the same names.
    pub adapters: Vec<String>,
    /// Its name in the engine.
    pub served_as: String,
    /// Changes to its requests.
    pub parameters: Parameters,
    /// Fields of requests that say one of its names, besides [`parameters`](Self::parameters).
    pub variants: BTreeMap<String, serde_json::Map<String, serde_json::Value>>,
    /// Its entries in the list of models.
    pub card: Card,
    /// The kind of engine.
    pub engine: EngineKind,
    /// `http://`, a host, and a port.
    pub url: String,
    /// The paths of an engine of the kind [`EngineKind::Http`].
    pub http: HttpApi,
    /// The sleep level, 1 or 2.
    pub level: u8,
    /// `None` for an engine that the service does not start.
    pub start: Option<Start>,
    /// The test prompt.
    pub canary: Canary,
    /// Limits and permissions.
    pub rules: Rules,
}

/// A kind of engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// vLLM, with its development endpoints (`VLLM_SERVER_DEV_MODE=1`).
    Vllm,
    /// SGLang, with its memory saver.
    Sglang,
    /// Any other, by the requests of [`HttpApi`].
    Http,
}

impl EngineKind {
    /// As in the configuration.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Http => "http",
        }
    }
}

/// How to start an engine.
#[derive(Clone, PartialEq, Eq)]
pub struct Start {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// A program that ends the engine, and its arguments. Empty if signals do.
    pub stop_command: Vec<String>,
    /// Variables in addition to those of this process.
    pub environment: BTreeMap<String, String>,
    /// The working directory; this process's if absent.
    pub folder: Option<PathBuf>,
    /// The file for its output, which is otherwise only in memory.
    pub log: Option<PathBuf>,
}

impl fmt::Debug for Start {
    /// Omits the values of environment variables, which may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&String> = self.environment.keys().collect();
        f.debug_struct("Start")
            .field("command", &self.command)
            .field("environment", &names)
            .finish_non_exhaustive()
    }
}

/// A deterministic test request, answered correctly before clients' requests reach the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Canary {
    /// The kind of request. If absent, the first that the engine serves.
    pub kind: Option<CanaryKind>,
    /// The text to continue, answer, embed, or rank documents for.
    pub prompt: String,
    /// How many tokens to generate.
    pub tokens: u32,
    /// Text that the answer has to contain. If absent, the answer has to agree with the first one.
    pub expect: Option<String>,
    /// The path of [`CanaryKind::Get`].
    pub path: Option<String>,
}

/// A kind of canary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CanaryKind {
    /// A text, by `/v1/completions`.
    Completion,
    /// A message, by `/v1/chat/completions`.
    Chat,
    /// A vector, by `/v1/embeddings`.
    Embedding,
    /// Scores of two documents, by `/v1/rerank`.
    Rerank,
    /// A page, which only has to be there.
    Get,
    /// No request. An engine that came back wrong serves clients.
    None,
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file is not TOML, or has an unknown key or a value of another type.
    #[error("{}{text}", at(place.as_ref()))]
    Syntax {
        /// The mistake, and what would be right.
        text: String,
        /// Where it is.
        place: Option<Place>,
    },
    /// A value is invalid.
    #[error("{}{section}: {reason}", at(place.as_ref()))]
    Invalid {
        /// The section or model.
        section: String,
        /// The mistake and what would help.
        reason: String,
        /// The key, or else the section; `None` if the file has neither.
        place: Option<Place>,
    },
    /// Several values are invalid, in the order of the file.
    #[error("{}", lines(.0))]
    Several(Vec<ConfigError>),
}

impl ConfigError {
    /// Where the mistake is, or the first one.
    #[must_use]
    pub fn place(&self) -> Option<&Place> {
        match self {
            Self::Read { .. } => None,
            Self::Syntax { place, .. } | Self::Invalid { place, .. } => place.as_ref(),
            Self::Several(all) => all.first()?.place(),
        }
    }

    /// Each mistake.
    #[must_use]
    pub fn mistakes(&self) -> &[Self] {
        match self {
            Self::Several(all) => all,
            one => std::slice::from_ref(one),
        }
    }

    /// Adds the places, and brings them in order. A rule of every model may be a mistake of each.
    fn placed(self, text: &str, secret: Secret<'_>) -> Self {
        let file = macros::parsed(text, secret).ok();
        let placed = |error| match error {
            Self::Invalid { section, reason, place: None } => {
                let file = file.as_ref();
                let place = file.and_then(|file| Place::of_reason(text, file.get_ref(), &section, &reason));
                Self::Invalid { section, reason, place }
            }
            other => other,
        };
        let Self::Several(all) = self else { return placed(self) };
        let mut all: Vec<Self> = all.into_iter().map(placed).collect();
        all.sort_by_key(|error| error.place().map_or((usize::MAX, 0), |place| (place.line, place.column)));
        let mut reported = BTreeSet::new();
        all.retain(|error| match error {
            Self::Invalid { reason, place: Some(place), .. } => {
                reported.insert((place.line, place.column, reason.clone()))
            }
            _ => true,
        });
        Self::of_all(all)
    }

    fn of_all(mut all: Vec<Self>) -> Self {
        match all.pop() {
            Some(only) if all.is_empty() => only,
            last => {
                all.extend(last);
                Self::Several(all)
            }
        }
    }
}

fn lines(all: &[ConfigError]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

fn at(place: Option<&Place>) -> String {
    place.map(|place| format!("line {}, column {}: ", place.line, place.column)).unwrap_or_default()
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// What is wrong; see [`ConfigError`].
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_path_buf(), source })?;
        Self::parse(&text, &keys::from_source)
    }

    /// Parses a file. `secret` resolves the source of a key, `env:NAME` or `file:PATH`, and `${env.NAME}`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(text: &str, secret: &dyn Fn(&str) -> Result<String, String>) -> Result<Self, ConfigError> {
        let table = toml::Deserializer::from(macros::parsed(text, secret)?);
        let file = File::deserialize(table).map_err(|error| values::explained(text, &error))?;
        let mut mistakes = Mistakes::default();
        let config = file.checked(secret, &mut mistakes);
        mistakes.none_or(Some(config)).map_err(|error| error.placed(text, secret))
    }
}

fn section(name: &str) -> String {
    format!("model `{name}`")
}

fn invalid(section: &str, reason: &str) -> ConfigError {
    ConfigError::Invalid { section: section.to_owned(), reason: reason.to_owned(), place: None }
}
