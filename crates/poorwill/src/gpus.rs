//! GPUs by their positions at NVML, as `nvidia-smi` counts them, without a context on any.
//!
//! The positions of CUDA's devices are others: `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` change those, and not
//! these. The figures are those that `poorwill doctor` is told by NVML.

use nvml_wrapper::Nvml as Library;
use poorwill_core::ByteSize;
use poorwill_driver::nvml::Nvml;

/// By which name a driver installs NVML, and by which its development files do.
const NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// NVML, loaded.
#[derive(Debug)]
pub struct Gpus {
    /// What knows positions.
    library: Library,
    /// What knows memory.
    nvml: Nvml,
}

/// Memory of a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuMemory {
    /// All of it, that of the driver's own included.
    pub total_bytes: u64,
    /// Of which nobody uses.
    pub free_bytes: u64,
}

/// Why a GPU's memory is not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GpusError {
    /// There is no NVML.
    #[error("NVML cannot be asked: {reason}")]
    Unavailable {
        /// Why, with the name of the file.
        reason: String,
    },
    /// There are fewer GPUs.
    #[error("NVML shows {count} GPUs, counted from 0, and none at {position}")]
    Absent {
        /// Which was asked for.
        position: usize,
        /// How many there are.
        count: u32,
    },
    /// It is divided into instances.
    #[error("GPU {position} is divided into instances (MIG), and its figures say nothing about one of them")]
    Partitioned {
        /// Which.
        position: usize,
    },
    /// NVML does not say, or says what cannot be.
    #[error("NVML does not report the memory of GPU {position}: {reason}")]
    Unreadable {
        /// Which.
        position: usize,
        /// Why.
        reason: String,
    },
}

impl Gpus {
    /// Loads NVML, or says why it cannot be.
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

    /// What there is of the GPU at this position now, whoever uses it.
    ///
    /// # Errors
    /// If there is none, or its memory is not told.
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
        if known.is_of_a_divided_card() {
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
