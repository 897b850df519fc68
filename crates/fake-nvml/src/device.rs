//! A device of the settings.

use std::ffi::c_int;

use crate::abi::{CallResult, Code, Memory};

pub(crate) const INSTANCE: &str = "MIG-";
pub(crate) const CARD: &str = "GPU-";

/// A card or an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Device {
    /// With its prefix.
    pub(crate) uuid: String,
    /// The card of an instance.
    pub(crate) parent: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) capability: Capability,
    pub(crate) total_bytes: Option<u64>,
    pub(crate) used_bytes: u64,
    pub(crate) free_bytes: Option<u64>,
    pub(crate) memory_error: Option<Code>,
    pub(crate) is_divided: Option<bool>,
    pub(crate) processes: Vec<Process>,
    pub(crate) link: Link,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Process {
    /// `None` for the calling process.
    pub(crate) pid: Option<u32>,
    pub(crate) used_bytes: u64,
}

/// The PCIe link, current and maximum.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Link {
    pub(crate) generation: Option<u32>,
    pub(crate) generation_max: Option<u32>,
    pub(crate) width: Option<u32>,
    pub(crate) width_max: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Capability {
    pub(crate) major: c_int,
    pub(crate) minor: c_int,
}

impl Device {
    pub(crate) fn new(uuid: String) -> Self {
        Self {
            uuid,
            parent: None,
            name: None,
            capability: Capability { major: 8, minor: 0 },
            total_bytes: None,
            used_bytes: 0,
            free_bytes: None,
            memory_error: None,
            is_divided: None,
            processes: Vec::new(),
            link: Link::default(),
        }
    }

    pub(crate) fn is_instance(&self) -> bool {
        self.uuid.starts_with(INSTANCE)
    }

    /// Its UUID without prefix.
    pub(crate) fn uuid_text(&self) -> &str {
        self.uuid.trim_start_matches(INSTANCE).trim_start_matches(CARD)
    }

    /// `held_bytes`: of processes beside the settings.
    pub(crate) fn memory(&self, held_bytes: u64) -> CallResult<Memory> {
        if let Some(code) = self.memory_error {
            return Err(code);
        }
        let total_bytes = self.total_bytes.ok_or(Code::NOT_SUPPORTED)?;
        let used_bytes = self.used_bytes.wrapping_add(held_bytes);
        // Like limiters that subtract without a check.
        let left = total_bytes.wrapping_sub(used_bytes);
        let free_bytes = self.free_bytes.unwrap_or(left);
        Ok(Memory { total_bytes, free_bytes, used_bytes })
    }
}
