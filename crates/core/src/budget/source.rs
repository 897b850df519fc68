//! Sources of figures about a device's memory, and their readings.

use std::fmt;

use serde::{Serialize, Serializer};

/// A source. Serializes as it prints: `cuda_total`.
///
/// ```
/// use poorwill::budget::SourceName;
///
/// assert_eq!(SourceName::CudaTotal.to_string(), "cuda_total");
/// assert!(!SourceName::CudaTotal.is_about_free());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum SourceName {
    /// Size of the host device.
    Capacity,
    /// Capacity of the host device that is not created.
    CapacityFree,
    /// Total of `cuMemGetInfo`, for this process.
    CudaTotal,
    /// Free memory of `cuMemGetInfo`.
    CudaFree,
    /// Total by device properties (`cuDeviceTotalMem`).
    DeviceProperties,
    /// NVML's total, of the GPU or MIG instance.
    NvmlTotal,
    /// NVML's free memory.
    NvmlFree,
    /// HAMi's limit in the environment (`CUDA_DEVICE_MEMORY_LIMIT_<i>`, or without a number).
    MemoryLimit,
    /// MPS's limit in the environment (`CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`).
    MpsLimit,
    /// The smallest `dmem.max` of this process's control groups.
    CgroupDmem,
    /// The smallest rest of these groups.
    CgroupDmemFree,
    /// Memory that the operating system could make available; counts where the device shares it.
    SystemAvailable,
    /// The user's cap.
    User,
    /// All memory of the computer; counts where the device shares it.
    SystemTotal,
}

impl SourceName {
    /// Whether it reports free memory rather than a total.
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

    /// In snake case.
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
            Self::SystemTotal => "system_total",
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

/// What a source reported, unchecked.
///
/// ```
/// use poorwill::budget::{Figure, Reading, SourceName};
///
/// let reading = Reading::none(SourceName::NvmlTotal, "NVML is missing");
/// assert_eq!(reading.figure, Figure::None("NVML is missing".into()));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Figure {
    /// In bytes.
    Bytes(u64),
    /// None, and why: not set, missing or refused.
    None(String),
    /// A refusal that means more is used than the limit allows.
    OverLimit(String),
}

/// A source and what it reported.
///
/// ```
/// use poorwill::budget::{Reading, SourceName};
///
/// let reading = Reading::bytes(SourceName::NvmlTotal, 24 << 30).with_note("of the whole card");
/// assert_eq!(reading.note.as_deref(), Some("of the whole card"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reading {
    /// Source.
    pub source: SourceName,
    /// Figure.
    pub figure: Figure,
    /// For people.
    pub note: Option<String>,
}

impl Reading {
    /// Without a note.
    #[must_use]
    pub fn new(source: SourceName, figure: Figure) -> Self {
        Self { source, figure, note: None }
    }

    /// A figure, in bytes.
    #[must_use]
    pub fn bytes(source: SourceName, bytes: u64) -> Self {
        Self::new(source, Figure::Bytes(bytes))
    }

    /// No figure, and why.
    #[must_use]
    pub fn none(source: SourceName, reason: impl Into<String>) -> Self {
        Self::new(source, Figure::None(reason.into()))
    }

    /// Adds a note.
    #[must_use]
    pub fn with_note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into());
        self
    }
}

/// A source in a report.
///
/// ```
/// use poorwill::Device;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// for source in Device::open(&"host:64MiB".parse()?)?.budget(None).sources {
///     println!("{}: {:?} bytes", source.name, source.bytes);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Source {
    /// Source.
    pub name: SourceName,
    /// Figure as given, if any.
    pub bytes: Option<u64>,
    /// Why there is none, or what is odd about it and how it counts.
    pub note: Option<String>,
    /// Whether the figure is impossible.
    #[serde(skip)]
    pub is_odd: bool,
}
