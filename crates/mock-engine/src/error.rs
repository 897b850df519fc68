//! Why a mock engine does not run.

use std::io;

use poorwill::ByteSize;

/// Why a mock engine cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MockEngineError {
    /// Its memory cannot be allocated.
    #[error("a mock engine cannot hold {bytes}: {reason}")]
    Memory {
        /// The requested size.
        bytes: ByteSize,
        /// Why, and what would help.
        reason: String,
    },
    /// Its process cannot be registered, or has no memory for its residue.
    #[error(
        "a mock engine's process cannot hold its residue, or be registered as one that can leave its device"
    )]
    Process(#[source] io::Error),
    /// Its listener cannot be used.
    #[error("the mock engine cannot take connections")]
    Listen(#[from] io::Error),
}
