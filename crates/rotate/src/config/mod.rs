//! The configuration: models, engines, and the limits of both listeners.
//!
//! [`Config::read`] reads one TOML file and checks all of it. The first mistake is an error that says where it is and
//! what would be right, with an excerpt of the file. API keys are never in the file, only where they are stored.

mod keys;
mod place;
mod raw;
mod traces;
mod values;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use self::keys::{Key, KeyShare};
pub use self::place::Place;
pub use self::traces::TraceExport;

use self::raw::File;
pub(crate) use self::raw::check_url;
use crate::policy::{ModelId, Rules};

/// A checked configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The listener for clients.
    pub front: Arc<Front>,
    /// The listener for operators.
    pub control: Arc<Control>,
    /// How GPU memory is measured.
    pub memory: MemorySource,
    /// Where traces are exported to; `None` if they are not.
    pub traces: Option<TraceExport>,
    /// The folder for state that survives the service.
    pub state: Option<PathBuf>,
    /// In the order of the file.
    pub models: Vec<Model>,
}

/// The listener for clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Front {
    /// The address to listen on.
    pub listen: SocketAddr,
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
}

/// The listener for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Control {
    /// The address to listen on.
    pub listen: SocketAddr,
    /// As [`Front::keys`].
    pub keys: Vec<Key>,
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

/// A model, and its engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// The name in requests.
    pub name: String,
    /// Other names in requests.
    pub aliases: Vec<String>,
    /// Its name in the engine.
    pub served_as: String,
    /// The kind of engine.
    pub engine: EngineKind,
    /// `http://`, a host, and a port.
    pub url: String,
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
}

/// How to start an engine.
#[derive(Clone, PartialEq, Eq)]
pub struct Start {
    /// The program and its arguments.
    pub command: Vec<String>,
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
}

impl ConfigError {
    /// Where the mistake is.
    #[must_use]
    pub fn place(&self) -> Option<&Place> {
        match self {
            Self::Read { .. } => None,
            Self::Syntax { place, .. } | Self::Invalid { place, .. } => place.as_ref(),
        }
    }

    fn placed(self, text: &str) -> Self {
        match self {
            Self::Invalid { section, reason, place: None } => {
                let place = Place::of_reason(text, &section, &reason);
                Self::Invalid { section, reason, place }
            }
            other => other,
        }
    }
}

fn at(place: Option<&Place>) -> String {
    place.map(|place| format!("line {}, column {}: ", place.line, place.column)).unwrap_or_default()
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// What is wrong first; see [`ConfigError`].
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_path_buf(), source })?;
        Self::parse(&text, &keys::from_source)
    }

    /// Parses a file. `secret` resolves the source of a key: `env:NAME` or `file:PATH`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(text: &str, secret: &dyn Fn(&str) -> Result<String, String>) -> Result<Self, ConfigError> {
        let file: File = toml::from_str(text).map_err(|error| values::explained(text, &error))?;
        let checked = file.checked(secret).and_then(|config| config.check_names().map(|()| config));
        checked.map_err(|error| error.placed(text))
    }

    /// The model with this name or alias.
    #[must_use]
    pub fn model(&self, name: &str) -> Option<ModelId> {
        let is_it = |model: &Model| model.name == name || model.aliases.iter().any(|alias| alias == name);
        self.models.iter().position(is_it).map(ModelId)
    }

    fn check_names(&self) -> Result<(), ConfigError> {
        if self.models.is_empty() {
            return Err(invalid("the configuration", "it has no model; say [[model]] with a name and a url"));
        }
        let mut seen: BTreeMap<&str, &str> = BTreeMap::new();
        for model in &self.models {
            for name in [&model.name].into_iter().chain(&model.aliases) {
                if let Some(other) = seen.insert(name, &model.name) {
                    let reason = format!("model `{other}` has the name `{name}` as well");
                    return Err(invalid(&section(&model.name), &reason));
                }
            }
        }
        let mut urls: BTreeMap<&str, &str> = BTreeMap::new();
        for model in &self.models {
            if let Some(other) = urls.insert(&model.url, &model.name) {
                let reason = format!("url `{}` is that of model `{other}`", model.url);
                return Err(invalid(&section(&model.name), &reason));
            }
        }
        Ok(())
    }
}

fn section(name: &str) -> String {
    format!("model `{name}`")
}

fn invalid(section: &str, reason: &str) -> ConfigError {
    ConfigError::Invalid { section: section.to_owned(), reason: reason.to_owned(), place: None }
}
