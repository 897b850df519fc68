//! Why a broker does not help. In each case the caller goes on without one.

use std::path::PathBuf;

/// A failure of a client's call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No broker listens, or it is just ending.
    #[error("no broker is at {}: {why}; start one, or go on without", path.display())]
    NotThere {
        /// The path of its socket.
        path: PathBuf,
        /// What was seen.
        why: String,
    },
    /// The broker belongs to another user.
    #[error(
        "the broker at {} belongs to user {broker}, and this process to user {client}; use a path of your own",
        path.display()
    )]
    OtherUser {
        /// The path of its socket.
        path: PathBuf,
        /// Its user.
        broker: u32,
        /// Ours.
        client: u32,
    },
    /// The broker has another version of the protocol.
    #[error(
        "the broker at {} speaks version {broker}, and this process version {client}; start a broker of this version",
        path.display()
    )]
    OtherVersion {
        /// The path of its socket.
        path: PathBuf,
        /// Its version.
        broker: u32,
        /// Ours.
        client: u32,
    },
    /// The broker takes no more connections.
    #[error("the broker at {} has {connections} connections and takes no more; end some", path.display())]
    Full {
        /// The path of its socket.
        path: PathBuf,
        /// How many it has.
        connections: usize,
    },
    /// The broker has not answered in time. The client is lost from now on.
    #[error("the broker at {} has not answered `{request}` within {within_ms} ms; go on without it", path.display())]
    NoAnswer {
        /// The path of its socket.
        path: PathBuf,
        /// What was asked of it.
        request: &'static str,
        /// How long it had.
        within_ms: u128,
    },
    /// Another thread's request has not ended in time. The client can be used again.
    #[error(
        "another thread uses the connection to the broker at {}, so `{request}` was not sent within {within_ms} ms; \
         try again",
        path.display()
    )]
    Busy {
        /// The path of its socket.
        path: PathBuf,
        /// What was not sent.
        request: &'static str,
        /// How long it waited.
        within_ms: u128,
    },
    /// The connection has failed. What was lent is gone.
    #[error("the broker at {} is lost: {why}; go on without it, or connect anew", path.display())]
    Lost {
        /// The path of its socket.
        path: PathBuf,
        /// How it failed.
        why: String,
    },
    /// The broker, or this client, refuses a request. Nothing has changed.
    #[error("the broker at {} cannot fulfil `{request}`: {why}", path.display())]
    BadRequest {
        /// The path of its socket.
        path: PathBuf,
        /// What was asked of it.
        request: &'static str,
        /// The broker's words.
        why: String,
    },
    /// The connection is the parent's.
    #[error("the connection to the broker at {} belongs to process {pid}; a forked child connects anew", path.display())]
    Forked {
        /// The path of its socket.
        path: PathBuf,
        /// The parent.
        pid: u32,
    },
    /// The system gives no thread for events.
    #[error("no thread waits for events of the broker at {}; end some threads and try again", path.display())]
    NoThread {
        /// The path of its socket.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
}
