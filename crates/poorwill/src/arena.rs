//! The façade: opens a device and hands its memory out.

use std::sync::Arc;

use poorwill_core::{
    AllocRequest, Block, BlockId, Driver, DriverError, DriverErrorKind, HostBuffer, Op, Pool, PoolConfig,
    PoolError, PoolStats, SleepReport, SleepRequest, Snapshot, StreamId, Tag, TagPolicy, TagState,
    WakeReport, WakeRequest,
};
#[cfg(not(target_os = "linux"))]
use poorwill_core::{DriverErrorKind, Op};

use crate::device::DeviceSpec;

/// Which device to open, and how its pool behaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The device.
    pub device: DeviceSpec,
    /// Limit and shape of the pool.
    pub pool: PoolConfig,
}

impl Config {
    /// The whole of `device`, with the default pool.
    #[must_use]
    pub fn on(device: DeviceSpec) -> Self {
        Self { device, pool: PoolConfig::default() }
    }

    /// The same, mapping at most `limit_bytes`.
    #[must_use]
    pub fn limited_to(mut self, limit_bytes: Option<u64>) -> Self {
        self.pool.limit_bytes = limit_bytes;
        self
    }
}

/// Why an arena could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The device would not open.
    #[error("cannot use device {device}: {}", source.kind)]
    Device {
        /// Which.
        device: DeviceSpec,
        /// What it said.
        source: DriverError,
    },
    /// The pool would not open.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Memory of one device. Methods are those of [`Pool`], and some that wait.
#[derive(Debug)]
pub struct Arena {
    pool: Pool,
    limit_bytes: Option<u64>,
}

impl Arena {
    /// Opens a device.
    ///
    /// # Errors
    /// `Device` when it cannot be opened here; `Pool` for a limit that no pool can have.
    pub fn open(config: Config) -> Result<Self, OpenError> {
        let Config { device, pool } = config;
        let driver = match open_device(&device) {
            Ok(driver) => driver,
            Err(source) => return Err(OpenError::Device { device, source }),
        };
        Self::over(driver, pool).map_err(OpenError::Pool)
    }

    /// An arena over a driver that is open already.
    ///
    /// # Errors
    /// As for [`Pool::new`].
    pub fn over(driver: Arc<dyn Driver>, config: PoolConfig) -> Result<Self, PoolError> {
        Ok(Self { limit_bytes: config.limit_bytes, pool: Pool::new(driver, config)? })
    }

    /// The pool underneath, for copies on streams of the caller's.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Most it may map, where it was opened with a limit.
    #[must_use]
    pub fn limit_bytes(&self) -> Option<u64> {
        self.limit_bytes
    }

    /// The device.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        self.pool.driver()
    }

    /// See [`Pool::declare_tag`].
    ///
    /// # Errors
    /// As there.
    pub fn declare_tag(&self, tag: &Tag, policy: TagPolicy) -> Result<(), PoolError> {
        self.pool.declare_tag(tag, policy)
    }

    /// See [`Pool::alloc`].
    ///
    /// # Errors
    /// As there.
    pub fn alloc(&self, request: &AllocRequest) -> Result<Block, PoolError> {
        self.pool.alloc(request)
    }

    /// See [`Pool::free`].
    ///
    /// # Errors
    /// As there.
    pub fn free(&self, block: BlockId) -> Result<(), PoolError> {
        self.pool.free(block)
    }

    /// See [`Pool::record_use`].
    ///
    /// # Errors
    /// As there.
    pub fn record_use(&self, block: BlockId, stream: StreamId) -> Result<(), PoolError> {
        self.pool.record_use(block, stream)
    }

    /// See [`Pool::sleep`].
    ///
    /// # Errors
    /// As there.
    pub fn sleep(&self, request: &SleepRequest) -> Result<SleepReport, PoolError> {
        self.pool.sleep(request)
    }

    /// See [`Pool::wake`].
    ///
    /// # Errors
    /// As there.
    pub fn wake(&self, request: &WakeRequest) -> Result<WakeReport, PoolError> {
        self.pool.wake(request)
    }

    /// See [`Pool::discard`].
    ///
    /// # Errors
    /// As there.
    pub fn discard(&self, tags: &[Tag]) -> Result<SleepReport, PoolError> {
        self.pool.discard(tags)
    }

    /// See [`Pool::mark_restored`].
    ///
    /// # Errors
    /// As there.
    pub fn mark_restored(&self, tags: &[Tag]) -> Result<Vec<Tag>, PoolError> {
        self.pool.mark_restored(tags)
    }

    /// See [`Pool::trim`].
    ///
    /// # Errors
    /// As there.
    pub fn trim(&self) -> Result<u64, PoolError> {
        self.pool.trim()
    }

    /// See [`Pool::tag_state`].
    ///
    /// # Errors
    /// As there.
    pub fn tag_state(&self, tag: &Tag) -> Result<TagState, PoolError> {
        self.pool.tag_state(tag)
    }

    /// See [`Pool::stats`].
    ///
    /// # Errors
    /// As there.
    pub fn stats(&self) -> Result<PoolStats, PoolError> {
        self.pool.stats()
    }

    /// See [`Pool::snapshot`].
    ///
    /// # Errors
    /// As there.
    pub fn snapshot(&self) -> Result<Snapshot, PoolError> {
        self.pool.snapshot()
    }

    /// See [`Pool::close`].
    ///
    /// # Errors
    /// As there.
    pub fn close(&self) -> Result<(), PoolError> {
        self.pool.close()
    }

    /// Copies `bytes` into a block at `offset`, and waits.
    ///
    /// # Errors
    /// As for [`Pool::write`]; what the device says to the copy.
    pub fn write_all(&self, block: BlockId, offset: u64, bytes: &[u8]) -> Result<(), PoolError> {
        let buffer = Arc::new(HostBuffer::from(bytes.to_vec()));
        let copy = self.pool.write(StreamId::DEFAULT, block, offset, buffer, 0, bytes.len() as u64)?;
        copy.wait().map_err(|source| PoolError::Driver { op: "write", source })
    }

    /// Copies `bytes` bytes of a block, from `offset` on, and waits.
    ///
    /// # Errors
    /// As for [`Pool::read`]; `Driver` when the host has no memory for them; what the device says to the copy.
    pub fn read_vec(&self, block: BlockId, offset: u64, bytes: u64) -> Result<Vec<u8>, PoolError> {
        if bytes == 0 {
            return Ok(Vec::new());
        }
        let at = |source| PoolError::Driver { op: "read", source };
        let buffer = zeros(bytes).map_err(at)?;
        let copy = self.pool.read(StreamId::DEFAULT, block, offset, buffer, 0, bytes)?;
        copy.wait().map(|buffer| buffer.to_vec()).map_err(at)
    }
}

/// Ordinary memory: page-locking some for one read would cost more than it saves.
fn zeros(bytes: u64) -> Result<HostBuffer, DriverError> {
    let fail = |reason: String| {
        DriverError::new(Op::HostAlloc, DriverErrorKind::OutOfHostMemory { asked_bytes: bytes, reason })
    };
    let len = usize::try_from(bytes).map_err(|error| fail(error.to_string()))?;
    let mut zeros = Vec::new();
    zeros.try_reserve_exact(len).map_err(|error| fail(error.to_string()))?;
    zeros.resize(len, 0u8);
    Ok(zeros.into())
}

fn open_device(device: &DeviceSpec) -> Result<Arc<dyn Driver>, DriverError> {
    match device {
        #[cfg(target_os = "linux")]
        DeviceSpec::Host { capacity_bytes } => {
            let config = poorwill_driver::HostConfig::with_capacity(*capacity_bytes);
            Ok(Arc::new(poorwill_driver::HostDevice::open(&config)?))
        }
        #[cfg(not(target_os = "linux"))]
        DeviceSpec::Host { .. } => Err(unsupported("the host device needs Linux")),
        #[cfg(target_os = "linux")]
        DeviceSpec::Cuda { ordinal } => {
            let config = poorwill_driver::CudaConfig::gpu(*ordinal);
            Ok(Arc::new(poorwill_driver::CudaDevice::open(&config)?))
        }
        #[cfg(not(target_os = "linux"))]
        DeviceSpec::Cuda { .. } => Err(unsupported("NVIDIA GPUs need Linux")),
    }
}

#[cfg(not(target_os = "linux"))]
fn unsupported(reason: &str) -> DriverError {
    DriverError::new(Op::Open, DriverErrorKind::Unsupported { reason: reason.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_opened_says_why() {
        for (device, word) in
            [("cuda:0", "NVIDIA"), ("host:1k", "granule"), ("host:0", "granule"), ("host:15EiB", "8 EiB")]
        {
            let error = Arena::open(Config::on(device.parse().unwrap())).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains(&device[..4]), "{error}");
        }
        let config = Config::on("host:8MiB".parse().unwrap()).limited_to(Some(1));
        assert!(matches!(Arena::open(config), Err(OpenError::Pool(PoolError::InvalidConfig { .. }))));
    }

    #[test]
    fn bytes_in_and_out() {
        let arena = Arena::open(Config::on("host:8MiB".parse().unwrap())).unwrap();
        let block = arena.alloc(&AllocRequest::new(1000, Tag::weights())).unwrap();
        arena.write_all(block.id, 990, &[7; 10]).unwrap();
        assert_eq!(arena.read_vec(block.id, 995, 5).unwrap(), [7; 5]);
        assert!(arena.read_vec(block.id, 1000, 0).unwrap().is_empty());
        assert!(arena.write_all(block.id, 991, &[7; 10]).is_err());
        assert!(arena.read_vec(block.id, 0, 1001).is_err());
    }
}
