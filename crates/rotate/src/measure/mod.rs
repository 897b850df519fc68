//! Free memory of each GPU, measured from outside the engines.
//!
//! [`Devices`] reads what a driver reports, [`Declared`] believes the configuration, and [`Processes`] simulates GPUs on
//! machines without any, and measures the engines' processes. [`WithLent`] adds to each of them what is lent.

#[cfg(target_os = "linux")]
mod amdgpu;
mod by_process;
mod declared;
mod devices;
#[cfg(target_os = "linux")]
mod fdinfo;
#[cfg(target_os = "linux")]
mod files;
#[cfg(target_os = "linux")]
mod intel;
mod lent;
#[cfg(target_os = "linux")]
mod nvml;
mod processes;
mod start;
#[cfg(target_os = "linux")]
mod unified;

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use tokio::task::spawn_blocking;

use crate::lending::LentTotals;

pub use self::declared::{Declared, NeededOn};
pub use self::devices::{DeviceDriver, Devices};
pub use self::lent::{LentAs, WithLent};
pub use self::processes::{PidsOn, Processes};
pub(crate) use self::start::warn_of_unmeasured;

pub use poorwill_rotation_policy::Gpu;

/// The memory of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// Unused bytes.
    pub free_bytes: u64,
    /// Bytes that sleeping processes lend, and give up at once when asked.
    pub reclaimable_bytes: u64,
    /// All bytes.
    pub total_bytes: u64,
}

impl GpuMemory {
    /// Where nothing is lent.
    #[must_use]
    pub const fn new(free_bytes: u64, total_bytes: u64) -> Self {
        Self { free_bytes, reclaimable_bytes: 0, total_bytes }
    }

    /// What can be had: free and reclaimable bytes.
    #[must_use]
    pub fn available_bytes(self) -> u64 {
        self.free_bytes.saturating_add(self.reclaimable_bytes).min(self.total_bytes)
    }
}

/// A measurement, with one entry for each requested GPU in the same order.
pub type Measured<'a> = Pin<Box<dyn Future<Output = Result<Vec<GpuMemory>, MeterError>> + Send + 'a>>;

/// What processes hold, with one entry for each requested GPU in the same order; `None` where it is not known.
pub type Held<'a> = Pin<Box<dyn Future<Output = Option<Vec<u64>>> + Send + 'a>>;

/// What to know of a GPU's figures; `None` if they are the usual ones.
pub type Remark<'a> = Pin<Box<dyn Future<Output = Option<String>> + Send + 'a>>;

/// Ends when lent memory is given up, as far as that is possible.
pub type Cleared<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// What a broker has done since it began; `None` without one.
pub type Totals<'a> = Pin<Box<dyn Future<Output = Option<LentTotals>> + Send + 'a>>;

/// Measures GPUs, and has lent memory given up.
pub trait Meter: fmt::Debug + Send + Sync {
    /// Measures these GPUs. Takes milliseconds, and does not block the runtime.
    fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a>;

    /// Whether its figures are measured, and not only declared.
    fn is_measured(&self) -> bool {
        true
    }

    /// What users should know of this GPU's figures, as that they are not of its own memory.
    fn remark(&self, _gpu: Gpu) -> Remark<'_> {
        Box::pin(std::future::ready(None))
    }

    /// What these processes hold of these GPUs. Without such figures nothing is learnt while an engine runs.
    fn held<'a>(&'a self, _gpus: &'a [Gpu], _pids: Vec<u32>) -> Held<'a> {
        Box::pin(std::future::ready(None))
    }

    /// Has others give up what they lend of these GPUs, before the spared processes take some without asking. They give up
    /// what is lacking beside the free memory and what the spared lend themselves. Without a known need that is all.
    fn clear<'a>(&'a self, _gpus: &'a [Gpu], _need: Option<Vec<u64>>, _spared: Vec<u32>) -> Cleared<'a> {
        Box::pin(std::future::ready(()))
    }

    /// Whether it knows what is lent.
    fn counts_lent(&self) -> bool {
        false
    }

    /// What the broker of lent memory has done.
    fn lent_totals(&self) -> Totals<'_> {
        Box::pin(std::future::ready(None))
    }
}

/// Reads the memory of one driver's GPUs.
#[cfg(target_os = "linux")]
trait DeviceMemory: fmt::Debug + Send {
    fn memory(&mut self, gpu: Gpu) -> Result<GpuMemory, String>;

    /// What users should know of its figures.
    fn remark(&mut self, _gpu: Gpu) -> Option<String> {
        None
    }

    /// What these processes hold of it, where the driver says so.
    fn held(&mut self, _gpu: Gpu, _pids: &std::collections::BTreeSet<u32>) -> Option<u64> {
        None
    }
}

/// Why a measurement failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot measure GPU {}: {reason}", gpu.0)]
pub struct MeterError {
    /// The GPU.
    pub gpu: Gpu,
    /// The cause, and what would help.
    pub reason: String,
}

async fn on_a_thread(
    gpus: &[Gpu],
    one: impl Fn(Gpu) -> Result<GpuMemory, String> + Send + 'static,
) -> Result<Vec<GpuMemory>, MeterError> {
    let Some(first) = gpus.first().copied() else { return Ok(Vec::new()) };
    let gpus = gpus.to_vec();
    let measured = spawn_blocking(move || {
        gpus.into_iter().map(|gpu| one(gpu).map_err(|reason| MeterError { gpu, reason })).collect()
    });
    match measured.await {
        Ok(measured) => measured,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(MeterError { gpu: first, reason: "the service is ending".to_owned() }),
        },
    }
}
