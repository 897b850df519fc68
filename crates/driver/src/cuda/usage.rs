//! What NVML says that this process uses of a GPU.

use poorwill_core::ProcessMemory;

use crate::nvml::Nvml;

/// The figures of one GPU.
pub(super) struct Usage {
    nvml: Nvml,
    /// What the process used when it had nothing but a context, where that is known.
    context_bytes: u64,
}

impl Usage {
    /// `is_bare`: the process has nothing but a context.
    pub(super) fn of(uuid: &str, is_bare: bool) -> Option<Self> {
        let nvml = Nvml::load().ok()?;
        let used_bytes = nvml.process_used_bytes(uuid, std::process::id())?;
        Some(Self { nvml, context_bytes: if is_bare { used_bytes } else { 0 } })
    }

    pub(super) fn now(&self, uuid: &str) -> Option<ProcessMemory> {
        let used_bytes = self.nvml.process_used_bytes(uuid, std::process::id())?;
        Some(ProcessMemory::new(used_bytes, self.context_bytes))
    }
}
