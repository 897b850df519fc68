//! NVIDIA's GPUs, by NVML. Positions are NVML's. Nothing is allocated on any GPU.
//!
//! Where a GPU shares the computer's memory, NVML keeps no figures, and [`Gpus`] reads the computer's.

use std::collections::BTreeSet;

use poorwill::gpus::Gpus;

use super::by_process::sum_of;
use super::{DeviceMemory, GpuMemory};
use poorwill_rotation_policy::Gpu;

impl DeviceMemory for Gpus {
    fn memory(&mut self, gpu: Gpu) -> Result<GpuMemory, String> {
        let memory = Self::memory(self, gpu.0).map_err(|error| error.to_string())?;
        Ok(GpuMemory::new(memory.free_bytes, memory.total_bytes))
    }

    fn remark(&mut self, gpu: Gpu) -> Option<String> {
        self.has_no_figures(gpu.0).is_ok_and(|has_none| has_none).then(|| {
            format!(
                "GPU {} has no memory of its own by NVML, so the computer's memory is counted; say measure = \"unified\" if \
                 that is right, and otherwise measure = \"declared\"",
                gpu.0
            )
        })
    }

    fn held(&mut self, gpu: Gpu, pids: &BTreeSet<u32>) -> Option<u64> {
        sum_of(&self.processes(gpu.0).ok()?, pids)
    }
}
