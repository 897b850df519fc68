//! NVML's figures for this process's use of a GPU.

use poorwill_core::ProcessMemory;

use crate::nvml::Nvml;

pub(super) struct Usage {
    nvml: Nvml,
    /// When it had only a context; 0 if unknown.
    context_bytes: u64,
}

impl Usage {
    pub(super) fn of(uuid: &str, is_context_only: bool) -> Option<Self> {
        let nvml = Nvml::load().ok()?;
        let used_bytes = nvml.process_used_bytes(uuid, std::process::id())?;
        Some(Self { nvml, context_bytes: if is_context_only { used_bytes } else { 0 } })
    }

    pub(super) fn now(&self, uuid: &str) -> Option<ProcessMemory> {
        let used_bytes = self.nvml.process_used_bytes(uuid, std::process::id())?;
        Some(ProcessMemory::new(used_bytes, self.context_bytes))
    }
}
