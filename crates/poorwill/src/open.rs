//! An open device: its driver, and what there is to know about its memory.

#[cfg(target_os = "linux")]
use std::ops::Range;
use std::sync::Arc;

#[cfg(target_os = "linux")]
use poorwill_core::HostBuffer;
#[cfg(target_os = "linux")]
use poorwill_core::budget::SourceName;
use poorwill_core::budget::{Budget, Cap, Envelope, Fact};
use poorwill_core::{Driver, DriverError, PoolError};
#[cfg(not(target_os = "linux"))]
use poorwill_core::{DriverErrorKind, Op};
#[cfg(target_os = "linux")]
use poorwill_driver::{
    BufferMade, BufferPin, CudaConfig, CudaDevice, HostConfig, HostDevice, HostMemoryConfig, Pin, cuda,
};

use crate::budget::UnknownBudget;
use crate::device::DeviceSpec;
#[cfg(target_os = "linux")]
use crate::offload::DeferredFree;

/// Why a device, or an arena on it, could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The device would not open.
    #[error("cannot use device {device}")]
    Device {
        /// Which.
        device: DeviceSpec,
        /// What it said.
        source: DriverError,
    },
    /// Nobody tells how much memory there is.
    #[error(transparent)]
    Budget(#[from] UnknownBudget),
    /// The limit does not fit into the budget.
    #[error(transparent)]
    Claim(#[from] Box<poorwill_core::ClaimError>),
    /// The pool would not open.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// What a device may do about host memory, where backups are kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostMemoryUse {
    /// Most that it may hold, in bytes. What control groups and the machine leave is the limit in any case.
    pub limit_bytes: Option<u64>,
    /// Whether it is left pageable: slower, for machines on which page-locked memory is short, or the GPU's own.
    pub pageable: bool,
}

impl HostMemoryUse {
    /// The same, holding at most `limit_bytes`; `None`: what control groups and the machine leave.
    #[must_use]
    pub fn limited_to(mut self, limit_bytes: impl Into<Option<u64>>) -> Self {
        self.limit_bytes = limit_bytes.into();
        self
    }

    /// The same, left pageable or not.
    #[must_use]
    pub fn left_pageable(mut self, pageable: bool) -> Self {
        self.pageable = pageable;
        self
    }
}

/// Which other GPUs may read and write a GPU's memory. Each makes opening what a wake maps take longer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Peers {
    /// All that this process sees and that can reach it.
    #[default]
    Reachable,
    /// None: for processes that use one GPU.
    None,
    /// The GPUs of these numbers, each of which must be able to reach it.
    Only(Vec<u32>),
}

/// How a device is opened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceOptions {
    /// What may be done about host memory.
    pub host_memory: HostMemoryUse,
    /// Who else may use a GPU's memory. The host device has no peers.
    pub peers: Peers,
}

impl DeviceOptions {
    /// The same, with what may be done about host memory.
    #[must_use]
    pub fn backing_up_in(mut self, host_memory: HostMemoryUse) -> Self {
        self.host_memory = host_memory;
        self
    }

    /// The same, with these GPUs allowed to use its memory.
    #[must_use]
    pub fn open_to(mut self, peers: Peers) -> Self {
        self.peers = peers;
        self
    }
}

impl From<&HostMemoryUse> for DeviceOptions {
    fn from(host_memory: &HostMemoryUse) -> Self {
        Self::default().backing_up_in(*host_memory)
    }
}

impl From<&DeviceOptions> for DeviceOptions {
    fn from(options: &DeviceOptions) -> Self {
        options.clone()
    }
}

/// A device that is open. Clones are the same device.
#[derive(Debug, Clone)]
pub struct Device {
    spec: DeviceSpec,
    backend: Backend,
    #[cfg(target_os = "linux")]
    deferred: Arc<DeferredFree>,
}

/// What a device needs to see host memory of somebody else's.
#[cfg(target_os = "linux")]
pub(crate) type HostViewGuard = Option<cuda::HostView>;

#[derive(Debug, Clone)]
enum Backend {
    #[cfg(target_os = "linux")]
    Host(Arc<HostDevice>),
    #[cfg(target_os = "linux")]
    Cuda(Arc<CudaDevice>),
}

impl Device {
    /// Opens it: a GPU's primary context is retained, the host device is made.
    ///
    /// # Errors
    /// `Device` when it cannot be opened here.
    pub fn open(spec: &DeviceSpec) -> Result<Self, OpenError> {
        Self::open_with(spec, DeviceOptions::default())
    }

    /// The same, with options: [`DeviceOptions`], or what may be done about host memory.
    ///
    /// # Errors
    /// As for [`Device::open`], and for a peer that there is not or that does not reach the GPU.
    pub fn open_with(spec: &DeviceSpec, options: impl Into<DeviceOptions>) -> Result<Self, OpenError> {
        let backend = Backend::open(spec, options.into())
            .map_err(|source| OpenError::Device { device: spec.clone(), source })?;
        Ok(Self {
            spec: spec.clone(),
            backend,
            #[cfg(target_os = "linux")]
            deferred: Arc::default(),
        })
    }

    /// A GPU that is open already.
    #[cfg(target_os = "linux")]
    #[must_use]
    pub fn from_cuda(device: Arc<CudaDevice>) -> Self {
        let spec = DeviceSpec::Cuda { ordinal: device.gpu().ordinal };
        Self { spec, backend: Backend::Cuda(device), deferred: Arc::default() }
    }

    /// A host device that is open already.
    #[cfg(target_os = "linux")]
    #[must_use]
    pub fn from_host(device: Arc<HostDevice>) -> Self {
        let spec = DeviceSpec::Host { capacity_bytes: device.info().total_bytes };
        Self { spec, backend: Backend::Host(device), deferred: Arc::default() }
    }

    /// As it was named.
    #[must_use]
    pub fn spec(&self) -> &DeviceSpec {
        &self.spec
    }

    /// Its driver.
    #[must_use]
    pub fn driver(&self) -> Arc<dyn Driver> {
        match &self.backend {
            #[cfg(target_os = "linux")]
            Backend::Host(device) => Arc::clone(device) as Arc<dyn Driver>,
            #[cfg(target_os = "linux")]
            Backend::Cuda(device) => Arc::clone(device) as Arc<dyn Driver>,
            #[cfg(not(target_os = "linux"))]
            _ => unreachable!("no device opens here"),
        }
    }

    /// The GPU, if it is one.
    #[cfg(target_os = "linux")]
    #[must_use]
    pub fn cuda(&self) -> Option<&Arc<CudaDevice>> {
        match &self.backend {
            Backend::Host(_) => None,
            Backend::Cuda(device) => Some(device),
        }
    }

    /// Memory of [`offload`](crate::offload) that is to be given back when the device's work has ended.
    #[cfg(target_os = "linux")]
    pub(crate) fn deferred(&self) -> &DeferredFree {
        &self.deferred
    }

    /// Host memory of exactly `bytes` bytes, page-locked or not, and why not where it is not and was to be if possible.
    #[cfg(target_os = "linux")]
    pub(crate) fn host_buffer(
        &self,
        bytes: u64,
        pin: BufferPin,
    ) -> Result<(HostBuffer, Option<String>), DriverError> {
        match &self.backend {
            Backend::Host(device) => device.host_buffer(bytes, pin),
            Backend::Cuda(device) => device.host_buffer(bytes, pin),
        }
    }

    /// Gives back as much host memory as a buffer had that has gone, where more than 1 GiB lies unused.
    #[cfg(target_os = "linux")]
    pub(crate) fn release_surplus(&self, bytes: u64) {
        match &self.backend {
            Backend::Host(device) => device.give_surplus_back(bytes),
            Backend::Cuda(device) => device.give_surplus_back(bytes),
        }
    }

    /// The same for several at once: all is there when this returns, or none, and is made meanwhile.
    #[cfg(target_os = "linux")]
    pub(crate) fn host_buffers(&self, sizes: &[u64], pin: BufferPin) -> Result<Vec<BufferMade>, DriverError> {
        match &self.backend {
            Backend::Host(device) => device.host_buffers(sizes, pin),
            Backend::Cuda(device) => device.host_buffers(sizes, pin),
        }
    }

    /// Where the device sees page-locked memory of its own.
    #[cfg(target_os = "linux")]
    pub(crate) fn pinned_addr(&self, bytes: &[u8]) -> Option<u64> {
        match &self.backend {
            Backend::Host(_) => None,
            Backend::Cuda(device) => device.pinned_at(bytes),
        }
    }

    /// Where the device sees memory of the process, page-locked in place if that is needed and allowed; nothing if it
    /// is needed and not allowed.
    #[cfg(target_os = "linux")]
    pub(crate) fn host_view(
        &self,
        memory: Range<usize>,
        may_lock: bool,
    ) -> Result<Option<(u64, HostViewGuard)>, DriverError> {
        match &self.backend {
            Backend::Host(_) => Ok(Some((memory.start as u64, None))),
            Backend::Cuda(device) => {
                let seen = device.host_view(memory, may_lock)?;
                Ok(seen.map(|seen| (seen.device_addr(), Some(seen))))
            }
        }
    }

    /// Waits for all work on the device, whoever queued it, and leaves captures alone.
    #[cfg(target_os = "linux")]
    pub(crate) fn wait_for_all_work(&self) -> Result<(), DriverError> {
        match &self.backend {
            Backend::Host(device) => device.synchronize(),
            Backend::Cuda(device) => device.wait_for_all_work(),
        }
    }

    /// Whether the device sees all memory of the process at the process's own addresses.
    #[cfg(target_os = "linux")]
    pub(crate) fn sees_all_memory(&self) -> bool {
        matches!(self.spec, DeviceSpec::Host { .. })
    }

    /// What everyone who can be asked says about its memory now.
    #[must_use]
    pub fn facts(&self) -> Vec<Fact> {
        match &self.backend {
            #[cfg(target_os = "linux")]
            Backend::Host(device) => vec![
                Fact::bytes(SourceName::Capacity, device.info().total_bytes),
                match device.memory_info() {
                    Ok(memory) => capacity_free(memory.free_bytes),
                    Err(error) => Fact::none(SourceName::CapacityFree, error.to_string()),
                },
            ],
            #[cfg(target_os = "linux")]
            Backend::Cuda(device) => crate::budget::facts_of(device),
            #[cfg(not(target_os = "linux"))]
            _ => unreachable!("no device opens here"),
        }
    }

    /// What this process holds of it, in bytes, where that is known.
    #[must_use]
    pub fn process_used_bytes(&self) -> Option<u64> {
        match &self.backend {
            #[cfg(target_os = "linux")]
            Backend::Host(device) => {
                let memory = device.memory_info().ok()?;
                Some(memory.total_bytes - memory.free_bytes)
            }
            #[cfg(target_os = "linux")]
            Backend::Cuda(device) => device.process_used_bytes(),
            #[cfg(not(target_os = "linux"))]
            _ => unreachable!("no device opens here"),
        }
    }

    /// How much of it this process may use now, by everyone's word and the user's.
    #[must_use]
    pub fn budget(&self, cap: Option<Cap>) -> Budget {
        Budget::decide(&self.facts(), self.process_used_bytes(), cap)
    }

    /// The budget, and the envelope that hands it out.
    ///
    /// # Errors
    /// When nobody tells how much there is.
    pub fn envelope(&self, cap: Option<Cap>) -> Result<(Budget, Envelope), UnknownBudget> {
        crate::budget::envelope(&self.spec.id(), self.budget(cap))
    }
}

/// Free capacity of the host device. That it is more than the computer has is no mistake.
#[cfg(target_os = "linux")]
fn capacity_free(bytes: u64) -> Fact {
    let fact = Fact::bytes(SourceName::CapacityFree, bytes);
    match poorwill_driver::system::System::here().available_bytes() {
        Some(available) if available < bytes => {
            let available = poorwill_core::ByteSize(available);
            fact.with_note(format!(
                "only what is written takes memory; the computer has {available} available"
            ))
        }
        _ => fact,
    }
}

/// Shared memory that a block of threads may opt in to on a GPU, in bytes; asked without opening it.
///
/// # Errors
/// `Device` where there is no such GPU, or no driver.
pub fn shared_memory_per_block_bytes(ordinal: u32) -> Result<u64, OpenError> {
    let asked = shared_memory_of(ordinal);
    asked.map_err(|source| OpenError::Device { device: DeviceSpec::Cuda { ordinal }, source })
}

#[cfg(target_os = "linux")]
fn shared_memory_of(ordinal: u32) -> Result<u64, DriverError> {
    cuda::gpu(None, ordinal).map(|gpu| gpu.shared_memory_per_block_bytes)
}

#[cfg(not(target_os = "linux"))]
fn shared_memory_of(ordinal: u32) -> Result<u64, DriverError> {
    Err(unsupported(&DeviceSpec::Cuda { ordinal }))
}

impl Backend {
    #[cfg(target_os = "linux")]
    fn open(spec: &DeviceSpec, options: DeviceOptions) -> Result<Self, DriverError> {
        let DeviceOptions { host_memory, peers } = options;
        let pin = if host_memory.pageable { Pin::Never } else { Pin::Auto };
        let host_memory = HostMemoryConfig::default().limited_to(host_memory.limit_bytes).pinning(pin);
        match spec {
            DeviceSpec::Host { capacity_bytes } => {
                let config = HostConfig::with_capacity(*capacity_bytes).backing_up_in(host_memory);
                Ok(Self::Host(Arc::new(HostDevice::open(&config)?)))
            }
            DeviceSpec::Cuda { ordinal } => {
                let peers = match peers {
                    Peers::Reachable => cuda::Peers::Reachable,
                    Peers::None => cuda::Peers::None,
                    Peers::Only(peers) => cuda::Peers::Only(peers),
                };
                let config = CudaConfig::gpu(*ordinal).backing_up_in(host_memory).open_to(peers);
                Ok(Self::Cuda(Arc::new(CudaDevice::open(&config)?)))
            }
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn open(spec: &DeviceSpec, _: DeviceOptions) -> Result<Self, DriverError> {
        Err(unsupported(spec))
    }
}

#[cfg(not(target_os = "linux"))]
fn unsupported(spec: &DeviceSpec) -> DriverError {
    let reason = match spec {
        DeviceSpec::Host { .. } => "the host device needs Linux",
        DeviceSpec::Cuda { .. } => "NVIDIA GPUs need Linux",
    };
    DriverError::new(Op::Open, DriverErrorKind::Unsupported { reason: reason.into() })
}
