//! A GPU whose memory is the computer's: what the system has available, less a reserve for itself.

use poorwill::gpus;

use super::files::Files;
use super::{DeviceMemory, GpuMemory};
use poorwill_rotation_policy::Gpu;

#[derive(Debug)]
pub(super) struct Unified(pub(super) Files);

impl DeviceMemory for Unified {
    fn memory(&mut self, gpu: Gpu) -> Result<GpuMemory, String> {
        if gpu != Gpu(0) {
            return Err("the computer has one memory, which is GPU 0's; say gpus = [0]".to_owned());
        }
        let memory = gpus::unified_memory(self.0.root()).map_err(|error| error.to_string())?;
        Ok(GpuMemory::new(memory.free_bytes, memory.total_bytes))
    }
}
