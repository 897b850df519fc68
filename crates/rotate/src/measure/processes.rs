//! Simulated GPUs: each has a fixed size, and its processes hold what the operating system reports.
//!
//! That is `Pss` from `/proc/PID/smaps_rollup`, which divides shared pages among processes, or else `VmRSS`. Both
//! include the mapped memory file of Poorwill's host device, and the program itself. So a process holds something as
//! soon as it runs, as on a real GPU.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use poorwill::proc;

use super::{GpuMemory, Held, Measured, Meter, by_process, on_a_thread};
use poorwill_rotation_policy::Gpu;

/// Returns the processes on a GPU. May block on file reads.
pub type PidsOn = Arc<dyn Fn(Gpu) -> Vec<u32> + Send + Sync>;

/// Measures processes instead of GPUs.
#[derive(Clone)]
pub struct Processes {
    gpu_bytes: u64,
    pids: PidsOn,
}

impl Processes {
    /// Simulates GPUs of `gpu_bytes` each.
    #[must_use]
    pub fn new(gpu_bytes: u64, pids: PidsOn) -> Self {
        Self { gpu_bytes, pids }
    }
}

impl fmt::Debug for Processes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Processes").field("gpu_bytes", &self.gpu_bytes).finish_non_exhaustive()
    }
}

impl Meter for Processes {
    fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a> {
        let Self { gpu_bytes, pids } = self.clone();
        Box::pin(on_a_thread(gpus, move |gpu| {
            let mut used_bytes = 0_u64;
            for pid in BTreeSet::from_iter(pids(gpu)) {
                let held = proc::held_bytes(pid).map_err(|error| {
                    format!("what process {pid} holds cannot be read: {error}; it needs Linux's /proc")
                })?;
                used_bytes = used_bytes.saturating_add(held);
            }
            Ok(GpuMemory::new(gpu_bytes.saturating_sub(used_bytes), gpu_bytes))
        }))
    }

    fn held<'a>(&'a self, gpus: &'a [Gpu], pids: Vec<u32>) -> Held<'a> {
        by_process::on_simulated(gpus, pids)
    }
}
