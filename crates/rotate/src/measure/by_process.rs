//! What an engine's own processes hold of GPUs, by each process's figures.
//!
//! Unknown is never zero: where one process has no figure, or none of them is on the GPU, nothing is known. In a container
//! that numbers its processes itself, none is found.

use std::collections::BTreeSet;

#[cfg(target_os = "linux")]
use poorwill::gpus::GpuProcess;
use poorwill::proc;
use tokio::task::spawn_blocking;

use super::Held;
use poorwill_rotation_policy::Gpu;

/// A simulated GPU has all of a process.
pub(super) fn on_simulated<'a>(gpus: &[Gpu], pids: Vec<u32>) -> Held<'a> {
    let (gpus, pids) = (gpus.len(), BTreeSet::from_iter(pids));
    off_the_runtime(move || {
        let held: Option<Vec<u64>> = pids.into_iter().map(|pid| proc::held_bytes(pid).ok()).collect();
        let all = held?.into_iter().fold(0, u64::saturating_add);
        (all > 0).then(|| vec![all; gpus])
    })
}

pub(super) fn off_the_runtime<'a>(read: impl FnOnce() -> Option<Vec<u64>> + Send + 'static) -> Held<'a> {
    Box::pin(async { spawn_blocking(read).await.ok().flatten() })
}

/// Of those that a driver found on a GPU.
#[cfg(target_os = "linux")]
pub(super) fn sum_of(found: &[GpuProcess], pids: &BTreeSet<u32>) -> Option<u64> {
    let own = found.iter().filter(|process| pids.contains(&process.pid)).map(|process| process.used_bytes);
    let used: Vec<u64> = own.collect::<Option<_>>()?;
    (!used.is_empty()).then(|| used.into_iter().fold(0, u64::saturating_add))
}
