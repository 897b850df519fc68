//! Means of sharing one GPU among processes.

use serde::Serialize;

/// What limits a process to a part of a GPU.
///
/// ```
/// use poorwill::budget::Slice;
/// use poorwill::doctor::{Plan, examine};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// for device in examine(&Plan::default())?.devices {
///     match device.slice {
///         Some(Slice::Mig) => println!("{} is a MIG instance", device.id),
///         other => println!("{}: {:?}", device.id, other.map(Slice::as_str)),
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Slice {
    /// HAMi: a library in front of the driver's.
    Hami,
    /// NVIDIA MPS, with a limit for its clients.
    Mps,
    /// A MIG instance.
    Mig,
    /// A device memory limit (`dmem`) of the control group.
    Dmem,
}

impl Slice {
    /// Its name in reports.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hami => "hami",
            Self::Mps => "mps",
            Self::Mig => "mig",
            Self::Dmem => "dmem",
        }
    }
}
