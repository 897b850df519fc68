//! Memory that is lent, and what may not be lent.

use crate::packets::MESSAGE_DESCRIPTORS_MAX;
use crate::protocol::LENDER_BYTES_MAX;

/// Most chunks of a lender: they come back in one message.
pub(crate) const LENDER_CHUNKS_MAX: usize = MESSAGE_DESCRIPTORS_MAX;

/// A connection of a client, for ever.
pub(crate) type ConnectionId = u64;

/// Memory that is lent.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chunk<M> {
    /// The lender's.
    pub(crate) id: u64,
    pub(crate) bytes: u64,
    /// Losing it costs its lender least.
    pub(crate) is_dropped: bool,
    pub(crate) memory: M,
}

/// A request that cannot be fulfilled. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LedgerError {
    #[error("chunk {id} is lent already; take it back first")]
    Duplicate { id: u64 },
    #[error("chunk {id} has no bytes; lend only what has some")]
    Empty { id: u64 },
    #[error("lending {bytes} bytes more would exceed {LENDER_BYTES_MAX}; lend less")]
    Bytes { bytes: u64 },
    #[error("lending {chunks} chunks more would exceed {LENDER_CHUNKS_MAX}; lend larger ones")]
    Chunks { chunks: usize },
    #[error("announcing {bytes} bytes exceeds {LENDER_BYTES_MAX}; announce less")]
    Announced { bytes: u64 },
}
