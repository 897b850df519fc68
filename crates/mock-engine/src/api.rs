//! What a mock engine serves to clients, and whose paths it has for its operator.

use std::fmt;
use std::str::FromStr;

/// An API for clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Api {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/responses`.
    Responses,
    /// `/v1/embeddings`.
    Embeddings,
    /// `/v1/rerank`.
    Rerank,
    /// `/v1/messages`, Anthropic's.
    Messages,
}

impl Api {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Completions, Self::Chat, Self::Responses, Self::Embeddings, Self::Rerank, Self::Messages];

    /// What a mock engine serves if nothing else is asked for.
    pub const USUAL: [Self; 4] = [Self::Completions, Self::Chat, Self::Responses, Self::Embeddings];

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Completions => "completions",
            Self::Chat => "chat",
            Self::Responses => "responses",
            Self::Embeddings => "embeddings",
            Self::Rerank => "rerank",
            Self::Messages => "messages",
        }
    }
}

/// An engine whose paths for its operator are mocked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Like {
    /// vLLM in development mode, which sleeps by `/sleep`.
    #[default]
    Vllm,
    /// llama.cpp's server, which has a health, and does not sleep.
    LlamaServer,
    /// Ollama, which has no health, and unloads its model by `/api/generate`.
    Ollama,
}

impl Like {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Vllm, Self::LlamaServer, Self::Ollama];

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::LlamaServer => "llama-server",
            Self::Ollama => "ollama",
        }
    }
}

/// A text that is no such name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no {what} `{name}`; there are {known}")]
pub struct ParseNameError {
    what: &'static str,
    /// Shortened.
    name: String,
    known: String,
}

impl ParseNameError {
    fn new(what: &'static str, name: &str, known: &[&str]) -> Self {
        Self { what, name: name.escape_debug().take(64).collect(), known: known.join(", ") }
    }
}

impl FromStr for Api {
    type Err = ParseNameError;

    fn from_str(name: &str) -> Result<Self, ParseNameError> {
        let known = Self::ALL.into_iter().find(|api| api.name() == name);
        known.ok_or_else(|| ParseNameError::new("API", name, &Self::ALL.map(Self::name)))
    }
}

impl FromStr for Like {
    type Err = ParseNameError;

    fn from_str(name: &str) -> Result<Self, ParseNameError> {
        let known = Self::ALL.into_iter().find(|like| like.name() == name);
        known.ok_or_else(|| ParseNameError::new("engine", name, &Self::ALL.map(Self::name)))
    }
}

impl fmt::Display for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for Like {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for api in Api::ALL {
            assert_eq!(api.to_string().parse(), Ok(api));
        }
        for like in Like::ALL {
            assert_eq!(like.to_string().parse(), Ok(like));
        }
        let error = "embedding".parse::<Api>().unwrap_err().to_string();
        assert!(error.contains("no API `embedding`") && error.contains("embeddings, rerank"), "{error}");
        let error = "".parse::<Like>().unwrap_err().to_string();
        assert!(error.contains("vllm, llama-server, ollama"), "{error}");
    }
}
