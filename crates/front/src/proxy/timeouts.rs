//! How long the front waits for clients and engines that are silent.

use std::time::Duration;

/// Timeouts for silent clients and engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// For a request head. Also closes idle connections.
    pub head: Duration,
    /// For the rest of a head whose first byte has come.
    pub head_rest: Duration,
    /// Between two frames of a body.
    pub body: Duration,
    /// A body that takes longer is slow. Half of the places of requests are for those.
    pub body_slow: Duration,
    /// For connecting to an engine.
    pub connect: Duration,
    /// How long idle connections to engines are kept. vLLM and SGLang close them after 5 seconds, so this is shorter.
    pub idle: Duration,
    /// How long after a request was sent on a kept connection its break means that the engine had closed it. Then the
    /// request may be sent once more. A later break is the end of what was computed.
    pub closed: Duration,
    /// For a client to read the end of an answer that had to end.
    pub reader: Duration,
    /// For a client that reads nothing of a complete answer.
    pub unread: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            head: Duration::from_secs(60),
            head_rest: Duration::from_secs(10),
            body: Duration::from_secs(30),
            body_slow: Duration::from_secs(1),
            connect: Duration::from_secs(10),
            idle: Duration::from_secs(3),
            closed: Duration::from_secs(1),
            reader: Duration::from_secs(5),
            unread: Duration::from_secs(30),
        }
    }
}
