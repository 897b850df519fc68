//! Where the bytes of a region are while it is paused.

use poorwill::{Dropped, TagPolicy};

use crate::environment::Backend;

/// What a pause does with the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum BackupKind {
    /// It drops them.
    None,
    /// It keeps them in host memory.
    Cpu(Backend),
    /// It keeps them on disk.
    Disk,
}

impl BackupKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cpu(Backend::Pinned) => "cpu",
            Self::Cpu(Backend::Mmap) => "mmap",
            Self::Disk => "disk",
        }
    }

    pub(crate) fn policy(self) -> TagPolicy {
        match self {
            Self::None => TagPolicy::discardable(Dropped::Undefined),
            Self::Cpu(_) | Self::Disk => TagPolicy::PRESERVED,
        }
    }
}
