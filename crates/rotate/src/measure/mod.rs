//! What is free on each GPU, measured from outside of the engines.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

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
