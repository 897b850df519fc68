//! GPU memory by NVML. Positions are NVML's. Nothing is allocated on any GPU.

#[cfg(target_os = "linux")]
use std::sync::{Arc, Mutex, PoisonError};

#[cfg(target_os = "linux")]
use poorwill::gpus::Gpus;

use super::{GpuMemory, Measured, Meter, on_a_thread};
use poorwill_rotation_policy::Gpu;

/// Advice where NVML is missing.
const HELP: &str =
    "install NVIDIA's driver, or simulate GPUs with [memory] measure = \"processes\" and gpu = \"8GiB\"";

/// Measures by NVML, which is loaded at the first measurement, and again after each failure.
#[derive(Debug, Clone, Default)]
pub struct Devices {
    /// `None` until it is loaded.
    #[cfg(target_os = "linux")]
    nvml: Arc<Mutex<Option<Gpus>>>,
}

impl Meter for Devices {
    fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a> {
        let devices = self.clone();
        Box::pin(on_a_thread(gpus, move |gpu| devices.memory(gpu)))
    }
}

impl Devices {
    #[cfg(target_os = "linux")]
    fn memory(&self, gpu: Gpu) -> Result<GpuMemory, String> {
        let mut nvml = self.nvml.lock().unwrap_or_else(PoisonError::into_inner);
        let gpus = match &mut *nvml {
            Some(gpus) => gpus,
            none => none.insert(Gpus::open().map_err(|error| format!("{error}; {HELP}"))?),
        };
        let memory = gpus.memory(gpu.0).map_err(|error| error.to_string())?;
        Ok(GpuMemory { free_bytes: memory.free_bytes, total_bytes: memory.total_bytes })
    }

    #[cfg(not(target_os = "linux"))]
    #[expect(clippy::unused_self, reason = "NVML is used on Linux only")]
    fn memory(&self, _: Gpu) -> Result<GpuMemory, String> {
        Err(format!("GPUs are measured on Linux only; {HELP}"))
    }
}
