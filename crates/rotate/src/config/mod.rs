//! The configuration: which models there are, where their engines are, and what the front lets in.
//!
//! [`Config::read`] reads one TOML file and checks all of it before it gives anything: whatever is wrong is one error
//! that says where it stands and what would be right. A key that nobody knows is an error with the nearest one that
//! there is. Keys for clients are never in the file: it names where they are.

mod keys;
mod raw;
mod values;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use self::keys::Key;

use self::raw::File;
pub(crate) use self::raw::check_url;
use crate::policy::{ModelId, Rules};

/// What an operator wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Where clients come in.
    pub front: Arc<Front>,
    /// Where operators do.
    pub control: Arc<Control>,
    /// How the GPUs' memory is measured.
    pub memory: Memory,
    /// The folder for what survives the service; if not said, nothing does.
    pub state: Option<PathBuf>,
    /// The models, in their order.
    pub models: Vec<Model>,
}

/// Where clients come in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Front {
    /// The address to listen on.
    pub listen: SocketAddr,
    /// Who has one of these may ask. With none, anybody on this machine may.
    pub keys: Vec<Key>,
    /// The longest body of a request.
    pub body_max_bytes: u64,
    /// The longest head of a request.
    pub head_max_bytes: u64,
    /// How many requests may be there at a time, waiting ones included.
    pub requests_max: usize,
    /// How often clients that wait for a stream are told that it is still coming; never, if not said.
    pub keep_alive: Option<Duration>,
}

/// Where operators come in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Control {
    /// The address to listen on.
    pub listen: SocketAddr,
    /// As for the front.
    pub keys: Vec<Key>,
}

/// How the memory of GPUs is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// By asking NVML.
    Devices,
    /// By what engines' processes hold, for machines without GPUs: each GPU is played, and has so much.
    Processes {
        /// The memory of each.
        gpu_bytes: u64,
    },
}

/// A model, and its engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// What clients ask for.
    pub name: String,
    /// What they may ask for as well.
    pub aliases: Vec<String>,
    /// What its engine calls it, which is what the engine is asked for.
    pub served_as: String,
    /// What the engine is.
    pub engine: Engine,
    /// Where it is: `http://`, a host, and a port.
    pub url: String,
    /// How deep it sleeps.
    pub level: u8,
    /// How it is started; nothing for an engine that somebody else starts.
    pub start: Option<Start>,
    /// What it is tried with.
    pub canary: Canary,
    /// What it may and has to do.
    pub rules: Rules,
}

/// What an engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// vLLM, with its development endpoints (`VLLM_SERVER_DEV_MODE=1`).
    Vllm,
    /// SGLang, with its memory saver.
    Sglang,
}

/// How an engine is started.
#[derive(Clone, PartialEq, Eq)]
pub struct Start {
    /// The program, and its arguments.
    pub command: Vec<String>,
    /// What is in its environment, beside what is in ours.
    pub environment: BTreeMap<String, String>,
    /// Where it runs; here, if not said.
    pub folder: Option<PathBuf>,
    /// Where what it writes is kept; nowhere but in memory, if not said.
    pub log: Option<PathBuf>,
}

impl fmt::Debug for Start {
    /// Without what its environment says, which may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&String> = self.environment.keys().collect();
        f.debug_struct("Start")
            .field("command", &self.command)
            .field("environment", &names)
            .finish_non_exhaustive()
    }
}

/// What an engine is tried with, deterministically, before anybody's request gets to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Canary {
    /// What it is to go on with.
    pub prompt: String,
    /// How far.
    pub tokens: u32,
    /// What its answer has to have in it; the answer that it gave first, if not said.
    pub expect: Option<String>,
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
        /// Why.
        source: std::io::Error,
    },
    /// It is not TOML, or a key or value is not what one can be.
    #[error("{text}")]
    Syntax {
        /// Where, what, and what would be right.
        text: String,
    },
    /// It says something that cannot be.
    #[error("{place}: {reason}")]
    Wrong {
        /// What it is about.
        place: String,
        /// What cannot be, and what would help.
        reason: String,
    },
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// What is wrong first; see [`ConfigError`].
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_path_buf(), source })?;
        Self::parse(&text, &keys::from_outside)
    }

    /// Parses a file's text. `secret` gives what a place has that a key is named by: `env:NAME` or `file:PATH`.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub fn parse(text: &str, secret: &dyn Fn(&str) -> Result<String, String>) -> Result<Self, ConfigError> {
        let file: File = toml::from_str(text).map_err(|error| values::explained(text, &error))?;
        let config = file.checked(secret)?;
        config.check_names()?;
        Ok(config)
    }

    /// The model that a client asks for by this name, or by this alias.
    #[must_use]
    pub fn model(&self, name: &str) -> Option<ModelId> {
        let is_it = |model: &Model| model.name == name || model.aliases.iter().any(|alias| alias == name);
        self.models.iter().position(is_it).map(ModelId)
    }

    fn check_names(&self) -> Result<(), ConfigError> {
        if self.models.is_empty() {
            return Err(wrong("the configuration", "it has no model; say [[model]] with a name and a url"));
        }
        let mut seen: BTreeMap<&str, &str> = BTreeMap::new();
        for model in &self.models {
            for name in [&model.name].into_iter().chain(&model.aliases) {
                if let Some(other) = seen.insert(name, &model.name) {
                    let reason = format!("model `{other}` is asked for by `{name}` as well");
                    return Err(wrong(&place(&model.name), &reason));
                }
            }
        }
        let mut urls: BTreeMap<&str, &str> = BTreeMap::new();
        for model in &self.models {
            if let Some(other) = urls.insert(&model.url, &model.name) {
                let reason = format!("its engine at {} is that of model `{other}`", model.url);
                return Err(wrong(&place(&model.name), &reason));
            }
        }
        Ok(())
    }
}

fn place(name: &str) -> String {
    format!("model `{name}`")
}

fn wrong(place: &str, reason: &str) -> ConfigError {
    ConfigError::Wrong { place: place.to_owned(), reason: reason.to_owned() }
}
