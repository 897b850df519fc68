//! A GPU's primary context with the host memory that belongs to it.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use super::ffi::{Api, CuDevice};
use super::gpu::GpuInfo;
use super::locked::Locked;
use super::primary::Primary;
use crate::host_memory::{HostArena, HostMemoryConfig, MemoryKind, Options};
use crate::ledger::Result;
use crate::process::Owner;
use crate::system::System;

pub(super) struct Context {
    primary: Arc<Primary>,
    host_memory: Arc<HostArena>,
    /// Page-locked memory for bytes in transit, outside the limits for buffers.
    staging: Arc<HostArena>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("device", &self.device()).finish_non_exhaustive()
    }
}

impl Context {
    pub(super) fn retain(
        api: &'static Api,
        device: CuDevice,
        gpu: &GpuInfo,
        owner: Owner,
        config: &HostMemoryConfig,
    ) -> Result<Self> {
        let primary = Arc::new(Primary::retain(api, device, owner)?);
        let system = System::here();
        let node = gpu.pci_bus_id.parse().ok().and_then(|address| system.numa_node(address));
        let shares_memory = "the GPU has no memory of its own: page-locked memory would be taken from it";
        let staging = Options {
            config: HostMemoryConfig::default(),
            pageable_because: None,
            node,
            releases_surplus: false,
            is_shared: false,
            system: system.clone(),
        };
        let kept = Options {
            config: config.clone(),
            pageable_because: gpu.integrated.then(|| shares_memory.into()),
            node,
            releases_surplus: true,
            is_shared: gpu.integrated,
            system,
        };
        let arena = |options| HostArena::new(owner, Box::new(Locked::new(&primary)), options);
        let (host_memory, staging) = (arena(kept), arena(staging));
        Ok(Self { host_memory, staging, primary })
    }

    pub(super) fn primary(&self) -> &Arc<Primary> {
        &self.primary
    }

    pub(super) fn host_memory(&self) -> &Arc<HostArena> {
        &self.host_memory
    }

    pub(super) fn staging(&self) -> &Arc<HostArena> {
        &self.staging
    }

    /// The context is entered, or the process checked.
    pub(super) fn pinned_at(&self, addr: usize, len: usize) -> Option<u64> {
        match self.host_memory.memory_kind(addr, len) {
            MemoryKind::Pinned(device) => Some(device),
            MemoryKind::Pageable | MemoryKind::Foreign => None,
        }
    }
}

impl Deref for Context {
    type Target = Primary;

    fn deref(&self) -> &Primary {
        &self.primary
    }
}
