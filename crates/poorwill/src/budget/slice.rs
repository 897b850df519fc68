//! The means by which several processes get a part of one GPU each.

use serde::Serialize;

/// By what means a GPU is cut, so that a process has a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Slice {
    /// HAMi: a library in front of the driver's.
    Hami,
    /// NVIDIA's service for sharing a GPU, with a limit for its clients.
    Mps,
    /// An instance of a divided GPU.
    Mig,
    /// A limit on this process's control group.
    Dmem,
}

impl Slice {
    /// As it is written in reports.
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
