//! GPU memory by NVML. Positions are NVML's. Nothing is allocated on any GPU.

use super::{Measured, Meter, on_a_thread};
use crate::policy::Gpu;

use self::system::Loaded;

/// Advice where NVML is missing.
const HELP: &str =
    "install NVIDIA's driver, or simulate GPUs with [memory] measure = \"processes\" and gpu = \"8GiB\"";

/// Measures by NVML. The library is loaded at the first measurement, and again after each failure.
#[derive(Debug, Clone, Default)]
pub struct Devices {
    loaded: Loaded,
}

impl Meter for Devices {
    fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a> {
        let loaded = self.loaded.clone();
        Box::pin(on_a_thread(gpus, move |gpu| loaded.memory(gpu)))
    }
}

#[cfg(target_os = "linux")]
mod system {
    use std::sync::{Arc, Mutex, PoisonError};

    use poorwill::gpus::Gpus;

    use super::{Gpu, HELP};
    use crate::measure::GpuMemory;

    /// NVML, once loaded.
    #[derive(Debug, Clone, Default)]
    pub(super) struct Loaded(Arc<Mutex<Option<Gpus>>>);

    impl Loaded {
        pub(super) fn memory(&self, gpu: Gpu) -> Result<GpuMemory, String> {
            let mut loaded = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let known = match &mut *loaded {
                Some(known) => known,
                none => none.insert(Gpus::open().map_err(|error| format!("{error}; {HELP}"))?),
            };
            let memory = known.memory(gpu.0).map_err(|error| error.to_string())?;
            Ok(GpuMemory { free_bytes: memory.free_bytes, total_bytes: memory.total_bytes })
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use super::{Gpu, HELP};
    use crate::measure::GpuMemory;

    /// Without NVML: GPUs are measured on Linux only.
    #[derive(Debug, Clone, Default)]
    pub(super) struct Loaded;

    impl Loaded {
        pub(super) fn memory(&self, _: Gpu) -> Result<GpuMemory, String> {
            Err(format!("GPUs are measured on Linux only; {HELP}"))
        }
    }
}
