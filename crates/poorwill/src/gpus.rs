//! Memory of GPUs by their NVML index, as `nvidia-smi` counts, without a context on any.
//!
//! CUDA ordinals differ: `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` change only them.
//!
//! ```
//! use poorwill::gpus::Gpus;
//!
//! match Gpus::open().and_then(|gpus| gpus.memory(0)) {
//!     Ok(memory) => println!("{} bytes are free", memory.free_bytes),
//!     Err(error) => println!("{error}"), // No driver, no such GPU, or a MIG-partitioned one.
//! }
//! ```

use nvml_wrapper::Nvml as Library;
use poorwill_core::ByteSize;
use poorwill_driver::nvml::Nvml;

/// The file name that a driver installs, and that of the development files.
const NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// NVML, loaded.
///
/// ```
/// use poorwill::gpus::Gpus;
///
/// if let Ok(gpus) = Gpus::open() {
///     println!("{:?}", gpus.memory(0));
/// }
/// ```
#[derive(Debug)]
pub struct Gpus {
    library: Library,
    nvml: Nvml,
}

/// Memory of a GPU, in bytes.
///
/// ```
/// use poorwill::gpus::Gpus;
///
/// if let Ok(memory) = Gpus::open().and_then(|gpus| gpus.memory(0)) {
///     assert!(memory.free_bytes <= memory.total_bytes);
/// }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuMemory {
    /// All of it, including the driver's own.
    pub total_bytes: u64,
    /// Unused memory.
    pub free_bytes: u64,
}

/// Why the memory of a GPU is unknown.
///
/// ```
/// use poorwill::gpus::{Gpus, GpusError};
///
/// match Gpus::open().and_then(|gpus| gpus.memory(999)) {
///     Err(GpusError::Unavailable { reason }) => println!("install NVIDIA's driver: {reason}"),
///     Err(GpusError::Absent { count, .. }) => println!("there are {count} GPUs"),
///     other => println!("{other:?}"),
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GpusError {
    /// NVML does not load: install the NVIDIA driver.
    #[error("NVML is not available: {reason}")]
    Unavailable {
        /// The reason.
        reason: String,
    },
    /// The index is too large.
    #[error("NVML shows {count} GPUs, counted from 0, and none at {position}")]
    Absent {
        /// The index.
        position: usize,
        /// Number of GPUs.
        count: u32,
    },
    /// The GPU has MIG instances.
    #[error("GPU {position} is divided into instances (MIG), and its figures say nothing about one of them")]
    Partitioned {
        /// The index.
        position: usize,
    },
    /// NVML reports no, or impossible, figures.
    #[error("NVML does not report the memory of GPU {position}: {reason}")]
    Unreadable {
        /// The index.
        position: usize,
        /// The reason.
        reason: String,
    },
}

impl Gpus {
    /// Loads NVML.
    ///
    /// # Errors
    /// [`GpusError::Unavailable`].
    pub fn open() -> Result<Self, GpusError> {
        let nvml = Nvml::load().map_err(|reason| GpusError::Unavailable { reason })?;
        let opened = NAMES.map(|name| Library::builder().lib_path(name.as_ref()).init());
        let [installed, developed] = opened;
        match installed.or(developed) {
            Ok(library) => Ok(Self { library, nvml }),
            Err(error) => Err(GpusError::Unavailable { reason: error.to_string() }),
        }
    }

    /// The memory of a GPU now.
    ///
    /// # Errors
    /// Without such a GPU, or without its figures.
    pub fn memory(&self, position: usize) -> Result<GpuMemory, GpusError> {
        let unreadable = |reason: String| GpusError::Unreadable { position, reason };
        let count = self.library.device_count().map_err(|error| unreadable(error.to_string()))?;
        let absent = GpusError::Absent { position, count };
        let Some(index) = u32::try_from(position).ok().filter(|index| *index < count) else {
            return Err(absent);
        };
        let uuid = self.library.device_by_index(index).and_then(|device| device.uuid());
        let uuid = uuid.map_err(|error| unreadable(error.to_string()))?;
        let known = self.nvml.known_memory(uuid.strip_prefix("GPU-").unwrap_or(&uuid)).map_err(unreadable)?;
        let known = known.ok_or_else(|| unreadable(format!("it no longer knows {uuid}")))?;
        if known.is_mig_parent() {
            return Err(GpusError::Partitioned { position });
        }
        let memory = known.memory.map_err(unreadable)?;
        let (free_bytes, total_bytes) = (memory.free_bytes, memory.total_bytes);
        if free_bytes > total_bytes || total_bytes == 0 {
            let (free, total) = (ByteSize(free_bytes), ByteSize(total_bytes));
            return Err(unreadable(format!("it reports {free} of {total} as free")));
        }
        Ok(GpuMemory { total_bytes, free_bytes })
    }
}
