//! Nothing is measured: a GPU has the configured size, and an awake model takes its configured need.
//!
//! For GPUs that no other meter knows. What engines really take, and what other programs use, is not seen.

use std::fmt;
use std::sync::Arc;

use super::{GpuMemory, Measured, Meter};
use poorwill_rotation_policy::Gpu;

/// Returns the sum of the needs of the models that are awake on a GPU.
pub type NeededOn = Arc<dyn Fn(Gpu) -> u64 + Send + Sync>;

/// Computes from the configuration.
#[derive(Clone)]
pub struct Declared {
    gpu_bytes: u64,
    needed: NeededOn,
}

impl Declared {
    /// GPUs of `gpu_bytes` each.
    #[must_use]
    pub fn new(gpu_bytes: u64, needed: NeededOn) -> Self {
        Self { gpu_bytes, needed }
    }
}

impl fmt::Debug for Declared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Declared").field("gpu_bytes", &self.gpu_bytes).finish_non_exhaustive()
    }
}

impl Meter for Declared {
    fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a> {
        let total_bytes = self.gpu_bytes;
        let memory = |gpu: &Gpu| GpuMemory::new(total_bytes.saturating_sub((self.needed)(*gpu)), total_bytes);
        let memory = gpus.iter().map(memory).collect();
        Box::pin(std::future::ready(Ok(memory)))
    }

    fn is_measured(&self) -> bool {
        false
    }
}
