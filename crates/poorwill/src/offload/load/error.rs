//! Errors of loads into host memory.

use poorwill_core::{ByteSize, DriverError};

use crate::checkpoint::CheckpointError;

/// Why a load failed. All its memory is released.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use poorwill::Device;
/// use poorwill::checkpoint::Checkpoint;
/// use poorwill::offload::{HostCheckpoint, LoadError, LoadOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let header = r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
/// # let length = (header.len() as u64).to_le_bytes();
/// # let file = folder.path().join("m.safetensors");
/// # std::fs::write(&file, [&length, header.as_bytes(), &[7; 4]].concat())?;
/// # let folder = folder.path().to_owned();
/// let checkpoint = Checkpoint::open(&[folder])?;
/// let device = Device::open(&"host:64MiB".parse()?)?;
/// let mut observer = |_| ControlFlow::Break(());
/// let stopped = HostCheckpoint::load(&device, &checkpoint, &LoadOptions::default(), &mut observer);
/// assert!(matches!(stopped, Err(LoadError::Stopped { .. })));
/// # Ok(())
/// # }
/// ```
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
