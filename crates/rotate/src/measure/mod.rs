//! What is free on each GPU, measured from outside of the engines.
//!
//! [`Devices`] asks NVML. [`Processes`] plays GPUs on machines that have none, and measures the processes on them.

mod devices;
mod processes;

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use tokio::task::spawn_blocking;

pub use self::devices::Devices;
pub use self::processes::{PidsOn, Processes};

use crate::policy::Gpu;

/// What is measured of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// What nobody has.
    pub free_bytes: u64,
    /// All of it.
    pub total_bytes: u64,
}

/// What a measurement gives: the memory of each GPU, in the order in which they were asked for.
pub type Measured<'a> = Pin<Box<dyn Future<Output = Result<Vec<Memory>, MeterError>> + Send + 'a>>;

/// Measures GPUs.
pub trait Meter: fmt::Debug + Send + Sync {
    /// What there is of each of these now. It takes milliseconds, and blocks no other task.
    fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a>;
}

/// Why nothing was measured.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot measure GPU {}: {reason}", gpu.0)]
pub struct MeterError {
    /// Which.
    pub gpu: Gpu,
    /// Why, and what would help.
    pub reason: String,
}

/// Measures each of these on a thread that may wait.
async fn on_a_thread(
    gpus: &[Gpu],
    one: impl Fn(Gpu) -> Result<Memory, String> + Send + 'static,
) -> Result<Vec<Memory>, MeterError> {
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
