//! NVIDIA GPUs, through whatever driver the machine has.

use std::path::PathBuf;

use poorwill_core::driver::Result;
use poorwill_core::{DriverError, DriverErrorKind, Op};
use serde::Serialize;

/// Which GPU, and through which library.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CudaConfig {
    /// The GPU's number, as the driver counts (`CUDA_VISIBLE_DEVICES` applies).
    pub ordinal: u32,
    /// The driver's library, for tests; otherwise the `libcuda.so.1` that the system finds.
    pub library: Option<PathBuf>,
}

impl CudaConfig {
    /// The GPU of this number, through the system's driver.
    #[must_use]
    pub fn gpu(ordinal: u32) -> Self {
        Self { ordinal, library: None }
    }
}

/// What a GPU says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuInfo {
    /// Its number, as the driver counts.
    pub ordinal: u32,
    /// Name for people.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Newest CUDA version that the driver supports, major and minor.
    pub cuda_version: (u32, u32),
    /// As NVML and `nvidia-smi` write it: `GPU-…`, without the prefix of what kind of device it is.
    pub uuid: String,
    /// Where it sits, as `domain:bus:device.function`.
    pub pci_bus_id: String,
    /// Smallest unit that can be mapped, in bytes.
    pub granule_bytes: u64,
    /// Physical memory as the driver tells it, in bytes.
    pub total_bytes: u64,
    /// Whether it shares the machine's memory.
    pub integrated: bool,
}

/// The GPUs that the driver shows this process, found out without taking memory of any.
///
/// # Errors
/// `Unsupported` where there is no driver or no usable one; `Device` with what the driver said.
pub fn gpus(_library: Option<PathBuf>) -> Result<Vec<GpuInfo>> {
    let reason = "not built yet".into();
    Err(DriverError::new(Op::Open, DriverErrorKind::Unsupported { reason }))
}
