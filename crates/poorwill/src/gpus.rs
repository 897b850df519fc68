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

use std::path::Path;

use poorwill_core::ByteSize;
use poorwill_core::budget::system_reserve_bytes;
use poorwill_driver::nvml::{GpuProcess as NvmlProcess, Nvml, NvmlMemory};
use poorwill_driver::system::System;

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

/// A process on a GPU.
///
/// ```
/// use poorwill::gpus::Gpus;
///
/// if let Ok(processes) = Gpus::open().and_then(|gpus| gpus.processes(0)) {
///     processes.iter().for_each(|process| println!("{}: {:?} bytes", process.pid, process.used_bytes));
/// }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuProcess {
    /// As the machine numbers it: a container may have another number for it.
    pub pid: u32,
    /// `None` where the driver does not count it.
    pub used_bytes: Option<u64>,
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
    /// The GPU shares the computer's memory, of which the system does not report enough.
    #[error("{file} does not report the memory that the GPU shares: MemTotal and MemAvailable are needed")]
    Computer {
        /// The file.
        file: String,
    },
}

/// The memory of a GPU that shares the computer's: what is available there, less a
/// [reserve](system_reserve_bytes) for the system. `root` is where `/proc` is.
///
/// ```
/// let memory = poorwill::gpus::unified_memory("/".as_ref())?;
/// assert!(memory.free_bytes <= memory.total_bytes);
/// # Ok::<(), poorwill::gpus::GpusError>(())
/// ```
///
/// # Errors
/// [`GpusError::Computer`].
pub fn unified_memory(root: &Path) -> Result<GpuMemory, GpusError> {
    let system = System::at(root);
    let (Some(computer_bytes), Some(available_bytes)) =
        (system.memory().total_bytes, system.available_bytes())
    else {
        return Err(GpusError::Computer { file: root.join("proc/meminfo").display().to_string() });
    };
    let reserve_bytes = system_reserve_bytes(computer_bytes);
    let total_bytes = computer_bytes.saturating_sub(reserve_bytes);
    Ok(GpuMemory { total_bytes, free_bytes: available_bytes.saturating_sub(reserve_bytes).min(total_bytes) })
}

impl Gpus {
    /// Loads NVML.
    ///
    /// # Errors
    /// [`GpusError::Unavailable`].
    pub fn open() -> Result<Self, GpusError> {
        Nvml::load().map(|nvml| Self { nvml }).map_err(|reason| GpusError::Unavailable { reason })
    }

    /// The number of GPUs. Positions are counted from 0.
    ///
    /// # Errors
    /// [`GpusError::Unavailable`], if NVML does not count them.
    pub fn count(&self) -> Result<usize, GpusError> {
        let unavailable = |reason: String| GpusError::Unavailable { reason };
        let count = self.nvml.count().map_err(unavailable)?;
        usize::try_from(count).map_err(|error| unavailable(error.to_string()))
    }

    /// The processes that compute on a GPU now.
    ///
    /// # Errors
    /// Without such a GPU, or without a list of its processes.
    pub fn processes(&self, position: usize) -> Result<Vec<GpuProcess>, GpusError> {
        let unreadable = |reason: String| GpusError::Unreadable { position, reason };
        let processes = self.nvml.processes_at(self.index(position)?).map_err(unreadable)?;
        let process = |found: NvmlProcess| GpuProcess { pid: found.pid, used_bytes: found.used_bytes };
        Ok(processes.into_iter().map(process).collect())
    }

    fn index(&self, position: usize) -> Result<u32, GpusError> {
        let count = self.nvml.count().map_err(|reason| GpusError::Unreadable { position, reason })?;
        let index = u32::try_from(position).ok().filter(|index| *index < count);
        index.ok_or(GpusError::Absent { position, count })
    }

    fn known(&self, position: usize) -> Result<NvmlMemory, GpusError> {
        let unreadable = |reason: String| GpusError::Unreadable { position, reason };
        let uuid = self.nvml.uuid_at(self.index(position)?).map_err(unreadable)?;
        let known = self.nvml.known_memory(uuid.strip_prefix("GPU-").unwrap_or(&uuid)).map_err(unreadable)?;
        known.ok_or_else(|| unreadable(format!("it no longer knows {uuid}")))
    }

    /// Whether NVML has no figures of a GPU's memory, so that [`memory`](Self::memory) is the computer's.
    ///
    /// # Errors
    /// Without such a GPU.
    pub fn has_no_figures(&self, position: usize) -> Result<bool, GpusError> {
        let known = self.known(position)?;
        Ok(known.has_no_figures && !known.is_mig_parent())
    }

    /// The memory of a GPU now: [the computer's](unified_memory) where NVML has no figures, as of a GPU that shares it.
    ///
    /// # Errors
    /// Without such a GPU, or without its figures.
    pub fn memory(&self, position: usize) -> Result<GpuMemory, GpusError> {
        let unreadable = |reason: String| GpusError::Unreadable { position, reason };
        let known = self.known(position)?;
        if known.is_mig_parent() {
            return Err(GpusError::Partitioned { position });
        }
        if known.has_no_figures {
            return unified_memory(Path::new("/"));
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
