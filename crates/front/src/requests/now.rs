//! A request as operators and traces see it.

use serde::Serialize;

/// What a request is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum RequestState {
    /// Its head and body are read.
    Reading,
    /// It waits for its model.
    Waiting,
    /// Its engine has it, and has answered nothing yet.
    Running,
    /// Its engine answers.
    Streaming,
}

/// A request in progress.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RequestNow {
    /// Its identifier.
    pub id: String,
    /// Its method.
    pub method: String,
    /// Its path, without the query.
    pub path: String,
    /// The client's address, or that of a proxy before it.
    pub peer: Option<String>,
    /// The name of its key.
    pub key: Option<String>,
    /// Its model, once known.
    pub model: Option<String>,
    /// What it is doing.
    pub state: RequestState,
    /// Seconds since it came.
    pub age_s: f64,
    /// Seconds of waiting for its model, so far or in all.
    pub waited_s: Option<f64>,
    /// Seconds until the engine's first byte.
    pub ttft_s: Option<f64>,
    /// Bytes of its answer so far.
    pub bytes: u64,
}

/// Tokens of a request, as far as its engine counted them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Of the prompt.
    pub prompt: Option<u64>,
    /// Of the answer.
    pub completion: Option<u64>,
}
