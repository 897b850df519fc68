//! Why a checkpoint is not in host memory.

use poorwill_core::{ByteSize, DriverError};

use crate::checkpoint::CheckpointError;

/// Why a load failed. Everything that it took has been given back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The files.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// No host memory, or none of the kind that was asked for.
    #[error("no host memory for a checkpoint of {} in {buffers} buffers", ByteSize(*bytes))]
    Memory {
        /// Size of all buffers.
        bytes: u64,
        /// How many there would be.
        buffers: usize,
        /// What the device said: what was asked, held and allowed.
        source: DriverError,
    },
    /// No memory for what a reader reads into where a file's bytes cannot be read into their place.
    #[error("no {} of memory for a reader's own use; ask for fewer readers, or free memory", ByteSize(*bytes))]
    Staging {
        /// How much it asked for.
        bytes: u64,
    },
    /// The caller said so.
    #[error("loading was stopped after {} of {}", ByteSize(*read_bytes), ByteSize(*bytes))]
    Stopped {
        /// How much had been read.
        read_bytes: u64,
        /// Of how much.
        bytes: u64,
    },
}
