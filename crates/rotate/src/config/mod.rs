//! The configuration: models, engines, and the limits of both listeners.
//!
//! [`Config::read`] reads one TOML file and checks all of it. Every wrong value is reported at once: where it is and what
//! would be right, with an excerpt of the file. Of what cannot be read, unknown keys included, the first is reported. API keys
//! are never in the file, only where they are stored.

mod addresses;
mod calls;
mod fleet;
mod hibernate;
mod lend;
mod model;
mod names;
mod raw;
mod read;
mod traces;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use poorwill_rotation_policy::Rules;

use crate::measure::DeviceDriver;

pub use self::calls::{AsleepCall, Call, HttpApi, SleepCalls};
pub use self::fleet::Fleet;
pub(crate) use self::lend::{BROKER, LEND, PEER_COPIES};
pub use self::names::{Selector, Strategy};
pub use self::traces::TraceExport;
pub use poorwill_front::file::{ConfigError, FilePlace, read as read_text};
pub use poorwill_front::settings::{Card, Control, Front, Key, KeyShare, Parameters};

/// A JSON schema of the file, with which editors complete and check it. A test makes it of the reference's keys.
pub const SCHEMA: &str = include_str!("schema.json");

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
    /// How engines lend what they hold while they sleep; `None` if they do not.
    pub lend: Option<Lend>,
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
    /// Variables of this process that hold keys, or headers of traces. No engine gets them.
    pub secret_variables: BTreeSet<String>,
}

/// How GPU memory is measured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemorySource {
    /// What their driver reports.
    Devices(DeviceDriver),
    /// Nothing is measured: awake models take their needs.
    Declared {
        /// The size of each GPU.
        gpu_bytes: u64,
    },
    /// The memory of the engines' processes, on simulated GPUs.
    Processes {
        /// The size of each GPU.
        gpu_bytes: u64,
        /// Where each has a folder that its engines share, so that they can lend.
        folder: Option<PathBuf>,
    },
}

/// How engines lend what they hold while they sleep.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lend {
    /// The socket of the broker; its user's usual one if absent.
    pub broker: Option<PathBuf>,
    /// Whether they keep copies in the idle memory of the other GPUs that each of them sees.
    pub peer_copies: bool,
}

impl Lend {
    /// Where the broker is.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.broker.clone().unwrap_or_else(poorwill::broker::default_path)
    }
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
    /// How long its engine may send nothing of an answer; `None` for ever.
    pub first_byte_max: Option<Duration>,
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
    /// Size at which that file is renamed and another one begins. One older file is kept.
    pub log_max_bytes: u64,
}

/// A size of log that is usual.
pub(crate) const LOG_MAX_BYTES: u64 = 64 << 20;

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

/// A deterministic test request, answered correctly before clients' requests reach the engine, or beside the first ones.
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
    /// Whether it may run beside the first requests after a plain wake.
    pub is_beside: bool,
    /// The kind to try first where none is set, by the options of the command.
    pub hint: Option<CanaryKind>,
}

/// When a canary is asked after a plain wake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CanaryTime {
    /// Before requests reach the engine, as after starts.
    Before,
    /// Beside the first ones.
    Beside,
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

fn section(name: &str) -> String {
    format!("model `{name}`")
}
