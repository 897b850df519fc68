//! Who can be asked about a device's memory, what they say, and what is made of it.

use std::fmt;

use serde::{Serialize, Serializer};

/// Who says something about a device's memory. Serializes as it prints: `cuda_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum SourceName {
    /// What the host device was opened with.
    Capacity,
    /// Of the host device: capacity that is not created.
    CapacityFree,
    /// The total of `cuMemGetInfo`, as of this process.
    CudaTotal,
    /// The free memory of `cuMemGetInfo`.
    CudaFree,
    /// The total among the device's properties (`cuDeviceTotalMem`).
    DeviceProperties,
    /// NVML's total, of the GPU or the instance of one.
    NvmlTotal,
    /// NVML's free memory.
    NvmlFree,
    /// The limit that HAMi takes from the environment (`CUDA_DEVICE_MEMORY_LIMIT_<i>`, or without a number).
    MemoryLimit,
    /// The limit that MPS takes from the environment (`CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`).
    MpsLimit,
    /// The least `dmem.max` among the control groups of this process.
    CgroupDmem,
    /// The least that one of these groups has left.
    CgroupDmemFree,
    /// What the operating system could make available; counts where the device shares the computer's memory.
    SystemAvailable,
    /// The user's cap.
    User,
}

impl SourceName {
    /// Whether its figure is about what is free, not about all there is.
    #[must_use]
    pub const fn is_about_free(self) -> bool {
        matches!(
            self,
            Self::CapacityFree
                | Self::CudaFree
                | Self::NvmlFree
                | Self::CgroupDmemFree
                | Self::SystemAvailable
        )
    }

    /// The name, in snake case.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Capacity => "capacity",
            Self::CapacityFree => "capacity_free",
            Self::CudaTotal => "cuda_total",
            Self::CudaFree => "cuda_free",
            Self::DeviceProperties => "device_properties",
            Self::NvmlTotal => "nvml_total",
            Self::NvmlFree => "nvml_free",
            Self::MemoryLimit => "memory_limit",
            Self::MpsLimit => "mps_limit",
            Self::CgroupDmem => "cgroup_dmem",
            Self::CgroupDmemFree => "cgroup_dmem_free",
            Self::SystemAvailable => "system_available",
            Self::User => "user",
        }
    }
}

impl fmt::Display for SourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Serialize for SourceName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// What a source answered, not yet judged.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Answer {
    /// A figure, in bytes.
    Bytes(u64),
    /// None, and why: it is not set, not there, or refuses.
    None(String),
    /// It refuses to say how much is free, in the way that stands for more being used than its limit allows.
    OverLimit(String),
}

/// A source, and what it answered.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fact {
    /// Who.
    pub source: SourceName,
    /// What.
    pub answer: Answer,
    /// More about it, for people.
    pub note: Option<String>,
}

impl Fact {
    /// An answer with nothing to be said about it.
    #[must_use]
    pub fn new(source: SourceName, answer: Answer) -> Self {
        Self { source, answer, note: None }
    }

    /// A figure, in bytes.
    #[must_use]
    pub fn bytes(source: SourceName, bytes: u64) -> Self {
        Self::new(source, Answer::Bytes(bytes))
    }

    /// No figure, and why.
    #[must_use]
    pub fn none(source: SourceName, reason: impl Into<String>) -> Self {
        Self::new(source, Answer::None(reason.into()))
    }

    /// The same, with a note for people.
    #[must_use]
    pub fn with_note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into());
        self
    }
}

/// A source as it stands in a report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Source {
    /// Who.
    pub name: SourceName,
    /// Its figure as it was given, in bytes. `None` where it gave none.
    pub bytes: Option<u64>,
    /// Why there is none, or what is odd about it and what is made of it.
    pub note: Option<String>,
    /// Whether the figure is one that cannot be.
    #[serde(skip)]
    pub is_odd: bool,
}
