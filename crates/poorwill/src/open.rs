//! An open device.

#[cfg(target_os = "linux")]
use std::io;
#[cfg(target_os = "linux")]
use std::ops::Range;
#[cfg(target_os = "linux")]
use std::path::Path;
use std::sync::Arc;

#[cfg(target_os = "linux")]
use poorwill_core::HostBuffer;
use poorwill_core::backup::Disk;
use poorwill_core::{Driver, DriverError, PoolError};
#[cfg(not(target_os = "linux"))]
use poorwill_core::{DriverErrorKind, Op};
use poorwill_driver::disk::DiskConfig;
#[cfg(target_os = "linux")]
use poorwill_driver::disk::FileDisk;
#[cfg(target_os = "linux")]
use poorwill_driver::{
    BufferMade, BufferPin, CudaConfig, CudaDevice, HostConfig, HostDevice, HostMemoryConfig, Pin, cuda,
};

#[cfg(target_os = "linux")]
use crate::deferred::{DeferredFree, Kept};
use crate::device::DeviceSpec;
use crate::unknown_budget::UnknownBudget;

/// Backups beside a disk where a device shares the computer's memory, unless the caller sets a limit. Enough for those
/// on their way to the disk; what it holds more would only be taken from the device.
#[cfg(target_os = "linux")]
const SHARED_BACKUP_BYTES_MAX: u64 = 1 << 30;

/// Why a device, or an arena on it, was not opened. The message names the next step; [`chain`](crate::chain)
/// adds the causes.
///
/// ```
/// use poorwill::{Arena, Config, OpenError};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = Config::on("host:64MiB".parse()?).limited_to(1 << 40);
/// match Arena::open(config) {
///     Err(error @ OpenError::Claim(_)) => println!("lower the limit: {}", poorwill::chain(&error)),
///     other => panic!("{other:?}"),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The device does not open.
    #[error("cannot use device {device}")]
    Device {
        /// Its name.
        device: DeviceSpec,
        /// The driver's error.
        source: DriverError,
    },
    /// No source reports the memory size; give a budget in bytes.
    #[error(transparent)]
    Budget(#[from] UnknownBudget),
    /// The limit exceeds the budget: lower it.
    #[error(transparent)]
    Claim(#[from] Box<poorwill_core::ClaimError>),
    /// The pool refused its configuration.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// How a device uses host memory, which holds the backups.
///
/// ```
/// use poorwill::{Arena, Config, HostMemoryUse};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let host_memory = HostMemoryUse::default().limited_to(8 << 30);
/// let arena = Arena::open(Config::on("host:64MiB".parse()?).backing_up_in(host_memory))?;
/// assert_eq!(arena.driver().host_memory().limit_bytes, Some(8 << 30));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostMemoryUse {
    /// Most bytes it may hold. Control groups and available memory limit it in any case.
    pub limit_bytes: Option<u64>,
    /// Pageable memory: slower, for machines short of page-locked memory.
    pub pageable: bool,
}

impl HostMemoryUse {
    /// Sets [`Self::limit_bytes`].
    #[must_use]
    pub fn limited_to(mut self, limit_bytes: impl Into<Option<u64>>) -> Self {
        self.limit_bytes = limit_bytes.into();
        self
    }

    /// Chooses pageable or page-locked memory.
    #[must_use]
    pub fn left_pageable(mut self, pageable: bool) -> Self {
        self.pageable = pageable;
        self
    }
}

/// Which other GPUs may access a GPU's memory. Each peer slows down mapping at wake.
///
/// ```
/// use poorwill::{Arena, Config, Peers};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = Config::on("host:64MiB".parse()?).open_to(Peers::None); // One process for each GPU.
/// let arena = Arena::open(config)?;
/// # drop(arena);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Peers {
    /// All that this process sees and that reach the GPU.
    #[default]
    Reachable,
    /// None: for processes that use one GPU.
    None,
    /// These CUDA ordinals, which must reach the GPU.
    Only(Vec<u32>),
}

/// GPUs whose links to host memory may carry a GPU's wakes, besides its own.
///
/// A link carries some 50 GiB/s, and two carry twice that, where NVLink or a switch joins their GPUs. From the first sleep
/// of 2 GiB on ([`PoolConfig::links_from_bytes`](crate::PoolConfig::links_from_bytes)) that takes a context of 0.26 GiB on each
/// of the other GPUs, for each process.
///
/// ```
/// use poorwill::{Arena, Config, Links};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?).linking_over(Links::Reachable))?;
/// # drop(arena);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Links {
    /// None: its own alone.
    #[default]
    Own,
    /// Of all GPUs with access to its memory ([`Peers`]).
    Reachable,
    /// Of these CUDA ordinals, which must have access to its memory.
    Only(Vec<u32>),
}

/// How a device is opened.
///
/// ```
/// use poorwill::{Device, DeviceOptions, HostMemoryUse, Peers};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let backups = HostMemoryUse::default().limited_to(32 << 20).left_pageable(true);
/// let options = DeviceOptions::default().backing_up_in(backups).open_to(Peers::None);
/// let device = Device::open_with(&"host:64MiB".parse()?, options)?;
/// assert_eq!(device.spec().to_string(), "host:64MiB");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceOptions {
    /// Use of host memory.
    pub host_memory: HostMemoryUse,
    /// Other GPUs with access.
    pub peers: Peers,
    /// Other GPUs whose links may carry wakes.
    pub links: Links,
    /// Where backups go that host memory cannot hold. A device that shares the computer's memory then holds no more
    /// than 1 GiB of them there, unless `host_memory` has a limit.
    pub disk: Option<DiskConfig>,
}

impl DeviceOptions {
    /// Sets [`Self::host_memory`].
    #[must_use]
    pub fn backing_up_in(mut self, host_memory: HostMemoryUse) -> Self {
        self.host_memory = host_memory;
        self
    }

    /// Sets [`Self::peers`].
    #[must_use]
    pub fn open_to(mut self, peers: Peers) -> Self {
        self.peers = peers;
        self
    }

    /// Sets [`Self::links`].
    #[must_use]
    pub fn linking_over(mut self, links: Links) -> Self {
        self.links = links;
        self
    }

    /// Sets [`Self::disk`].
    #[must_use]
    pub fn spilling_to(mut self, disk: impl Into<Option<DiskConfig>>) -> Self {
        self.disk = disk.into();
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

/// An open device, shared by its clones.
///
/// ```
/// use poorwill::Device;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::open(&"host:64MiB".parse()?)?;
/// let budget = device.budget(Some("0.5".parse()?));
/// assert_eq!(budget.budget_bytes, Some(32 << 20));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Device {
    spec: DeviceSpec,
    backend: Backend,
    disk: Option<Arc<dyn Disk>>,
    #[cfg(target_os = "linux")]
    deferred: Arc<DeferredFree>,
}

#[cfg(target_os = "linux")]
pub(crate) type HostViewGuard = Option<cuda::HostView>;

#[derive(Debug, Clone)]
pub(crate) enum Backend {
    #[cfg(target_os = "linux")]
    Host(Arc<HostDevice>),
    #[cfg(target_os = "linux")]
    Cuda(Arc<CudaDevice>),
}

impl Device {
    /// Opens the device, on a GPU in its primary context.
    ///
    /// # Errors
    /// `Device` when it does not open here.
    pub fn open(spec: &DeviceSpec) -> Result<Self, OpenError> {
        Self::open_with(spec, DeviceOptions::default())
    }

    /// Opens the device with options.
    ///
    /// # Errors
    /// `Device`, also for a peer that does not exist or does not reach the GPU.
    pub fn open_with(spec: &DeviceSpec, options: impl Into<DeviceOptions>) -> Result<Self, OpenError> {
        let mut options = options.into();
        let failed = |source| OpenError::Device { device: spec.clone(), source };
        #[cfg(target_os = "linux")]
        if options.disk.is_some() && options.host_memory.limit_bytes.is_none() && shares_host_memory(spec) {
            options.host_memory.limit_bytes = Some(SHARED_BACKUP_BYTES_MAX);
        }
        let disk = options.disk.take().map(|config| open_disk(&config)).transpose().map_err(failed)?;
        let backend = Backend::open(spec, options).map_err(failed)?;
        Ok(Self {
            spec: spec.clone(),
            backend,
            disk,
            #[cfg(target_os = "linux")]
            deferred: Arc::default(),
        })
    }

    /// Wraps an open GPU.
    #[cfg(target_os = "linux")]
    #[must_use]
    pub fn from_cuda(device: Arc<CudaDevice>) -> Self {
        let spec = DeviceSpec::Cuda { ordinal: device.gpu().ordinal };
        Self { spec, backend: Backend::Cuda(device), disk: None, deferred: Arc::default() }
    }

    /// Wraps an open host device.
    #[cfg(target_os = "linux")]
    #[must_use]
    pub fn from_host(device: Arc<HostDevice>) -> Self {
        let shared_in = device.shared_in();
        let spec = DeviceSpec::Host { capacity_bytes: device.info().total_bytes, shared_in };
        Self { spec, backend: Backend::Host(device), disk: None, deferred: Arc::default() }
    }

    /// Registers this process in a folder, so that it can be taken off the host device: by a
    /// [`Hibernator`](crate::hibernation::Hibernator) of [`Processes::Host`](crate::hibernation::Processes::Host) in another
    /// process. Those that use a GPU need no registration.
    ///
    /// # Errors
    /// What the operating system reports.
    #[cfg(target_os = "linux")]
    pub fn register_process(&self, folder: &Path) -> io::Result<()> {
        match &self.backend {
            Backend::Host(device) => device.register(folder),
            Backend::Cuda(_) => Ok(()),
        }
    }

    /// The name it was opened by.
    #[must_use]
    pub fn spec(&self) -> &DeviceSpec {
        &self.spec
    }

    /// The driver.
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

    /// The disk that backups of its arenas go to where host memory is short.
    #[must_use]
    pub fn disk(&self) -> Option<&Arc<dyn Disk>> {
        self.disk.as_ref()
    }

    /// The GPU; `None` for the host device.
    #[cfg(target_os = "linux")]
    #[must_use]
    pub fn cuda(&self) -> Option<&Arc<CudaDevice>> {
        match &self.backend {
            Backend::Host(_) => None,
            Backend::Cuda(device) => Some(device),
        }
    }

    pub(crate) fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Frees after the device's present work: now, or in a later call if waiting fails.
    #[cfg(target_os = "linux")]
    pub(crate) fn free_later(&self, kept: Kept) {
        self.deferred.free(|| self.wait_for_all_work().is_ok(), kept);
    }

    /// Frees what could not be freed before.
    #[cfg(target_os = "linux")]
    pub(crate) fn free_deferred(&self) {
        self.deferred.free_deferred(|| self.wait_for_all_work().is_ok());
    }

    /// Exactly `bytes` bytes of host memory, and why it is pageable against `pin`.
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

    /// Releases up to `bytes` of unused host memory, if more than 1 GiB is unused.
    #[cfg(target_os = "linux")]
    pub(crate) fn release_surplus(&self, bytes: u64) {
        match &self.backend {
            Backend::Host(device) => device.release_surplus(bytes),
            Backend::Cuda(device) => device.release_surplus(bytes),
        }
    }

    /// Reserves all buffers or none; other threads make them.
    #[cfg(target_os = "linux")]
    pub(crate) fn host_buffers(&self, sizes: &[u64], pin: BufferPin) -> Result<Vec<BufferMade>, DriverError> {
        match &self.backend {
            Backend::Host(device) => device.host_buffers(sizes, pin),
            Backend::Cuda(device) => device.host_buffers(sizes, pin),
        }
    }

    /// The device address of the device's own page-locked memory.
    #[cfg(target_os = "linux")]
    pub(crate) fn pinned_addr(&self, bytes: &[u8]) -> Option<u64> {
        match &self.backend {
            Backend::Host(_) => None,
            Backend::Cuda(device) => device.pinned_at(bytes),
        }
    }

    /// The device address of process memory; `None` if it is pageable and `may_lock` is off.
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

    /// Waits for all work on the device, except captures.
    #[cfg(target_os = "linux")]
    pub(crate) fn wait_for_all_work(&self) -> Result<(), DriverError> {
        match &self.backend {
            Backend::Host(device) => device.synchronize(),
            Backend::Cuda(device) => device.wait_for_all_work(),
        }
    }

    /// Whether the device sees all process memory at the process's addresses.
    #[cfg(target_os = "linux")]
    pub(crate) fn sees_all_memory(&self) -> bool {
        matches!(self.spec, DeviceSpec::Host { .. })
    }
}

/// Opening it says what fails.
#[cfg(target_os = "linux")]
fn shares_host_memory(spec: &DeviceSpec) -> bool {
    match spec {
        DeviceSpec::Host { .. } => false,
        DeviceSpec::Cuda { ordinal } => cuda::gpu(None, *ordinal).is_ok_and(|gpu| gpu.integrated),
    }
}

/// Shared memory that a thread block may opt in to, without opening the GPU.
///
/// # Errors
/// `Device` without such a GPU or a driver.
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
        let DeviceOptions { host_memory, peers, links, .. } = options;
        let pin = if host_memory.pageable { Pin::Never } else { Pin::Auto };
        let host_memory = HostMemoryConfig::default().limited_to(host_memory.limit_bytes).pinning(pin);
        match spec {
            DeviceSpec::Host { capacity_bytes, shared_in } => {
                let mut config = HostConfig::with_capacity(*capacity_bytes).backing_up_in(host_memory);
                config.shared_in.clone_from(shared_in);
                Ok(Self::Host(Arc::new(HostDevice::open(&config)?)))
            }
            DeviceSpec::Cuda { ordinal } => {
                let peers = match peers {
                    Peers::Reachable => cuda::Peers::Reachable,
                    Peers::None => cuda::Peers::None,
                    Peers::Only(peers) => cuda::Peers::Only(peers),
                };
                let links = match links {
                    Links::Own => cuda::Links::Own,
                    Links::Reachable => cuda::Links::Reachable,
                    Links::Only(gpus) => cuda::Links::Only(gpus),
                };
                let config = CudaConfig::gpu(*ordinal).backing_up_in(host_memory);
                let config = config.open_to(peers).linking_over(links);
                Ok(Self::Cuda(Arc::new(CudaDevice::open(&config)?)))
            }
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn open(spec: &DeviceSpec, _: DeviceOptions) -> Result<Self, DriverError> {
        Err(unsupported(spec))
    }
}

#[cfg(target_os = "linux")]
fn open_disk(config: &DiskConfig) -> Result<Arc<dyn Disk>, DriverError> {
    FileDisk::open(config).map(|disk| Arc::new(disk) as Arc<dyn Disk>)
}

#[cfg(not(target_os = "linux"))]
fn open_disk(_: &DiskConfig) -> Result<Arc<dyn Disk>, DriverError> {
    let reason = "disks for backups need Linux".to_owned();
    Err(DriverError::new(Op::DiskOpen, DriverErrorKind::Unsupported { reason }))
}

#[cfg(not(target_os = "linux"))]
fn unsupported(spec: &DeviceSpec) -> DriverError {
    let reason = match spec {
        DeviceSpec::Host { .. } => "the host device needs Linux",
        DeviceSpec::Cuda { .. } => "NVIDIA GPUs need Linux",
    };
    DriverError::new(Op::Open, DriverErrorKind::Unsupported { reason: reason.into() })
}
