//! Errors of loads into host memory.

use poorwill_core::{ByteSize, DriverError};

use crate::checkpoint::CheckpointError;

/// Why a load failed. All its memory is released.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The files.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// No host memory, or not of the requested kind. Free memory, or raise the limit.
    #[error("no host memory for a checkpoint of {} in {buffers} buffers", ByteSize(*bytes))]
    Memory {
        /// Size of all buffers.
        bytes: u64,
        /// Their number.
        buffers: usize,
        /// The device's error, with requested, held and allowed bytes.
        source: DriverError,
    },
    /// No memory for a reader's own buffer. Use fewer readers, or free memory.
    #[error("no {} of memory for a reader's own use; ask for fewer readers, or free memory", ByteSize(*bytes))]
    Staging {
        /// The requested size.
        bytes: u64,
    },
    /// The observer stopped the load.
    #[error("loading was stopped after {} of {}", ByteSize(*read_bytes), ByteSize(*bytes))]
    Stopped {
        /// Bytes read.
        read_bytes: u64,
        /// Bytes in all.
        bytes: u64,
    },
}
