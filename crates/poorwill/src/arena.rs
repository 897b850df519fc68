//! The façade: opens a device and hands its memory out.

use std::sync::Arc;

use poorwill_core::budget::{Cap, Claim, Envelope};
use poorwill_core::{
    AllocRequest, Block, BlockId, Changes, DeviceRange, Driver, DriverError, DriverErrorKind, HostBuffer,
    LostRange, Op, Pool, PoolConfig, PoolError, PoolStats, Preparation, SleepReport, SleepRequest, Snapshot,
    StreamId, Tag, TagPolicy, TagState, WakeReport, WakeRequest,
};

use crate::budget::claim_own;
use crate::device::DeviceSpec;
use crate::open::{Device, HostMemoryUse, OpenError};

/// Which device to open, how much of it to use, and how its pool behaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The device.
    pub device: DeviceSpec,
    /// What the user allows of the device; the budget is this or less.
    pub budget: Option<Cap>,
    /// What may be done about host memory.
    pub host_memory: HostMemoryUse,
    /// Limit and shape of the pool. The limit is a claim on the budget; without one the pool claims all of it.
    pub pool: PoolConfig,
}

impl Config {
    /// The whole of `device`, with the default pool.
    #[must_use]
    pub fn on(device: DeviceSpec) -> Self {
        Self { device, budget: None, host_memory: HostMemoryUse::default(), pool: PoolConfig::default() }
    }

    /// The same, mapping at most `limit_bytes`.
    #[must_use]
    pub fn limited_to(mut self, limit_bytes: Option<u64>) -> Self {
        self.pool.limit_bytes = limit_bytes;
        self
    }

    /// The same, with what may be done about host memory.
    #[must_use]
    pub fn backing_up_in(mut self, host_memory: HostMemoryUse) -> Self {
        self.host_memory = host_memory;
        self
    }

    /// The same, within a budget of the user's.
    #[must_use]
    pub fn within(mut self, cap: Option<Cap>) -> Self {
        self.budget = cap;
        self
    }
}

/// Memory of one device. Methods are those of [`Pool`], and some that wait.
#[derive(Debug)]
pub struct Arena {
    pool: Pool,
    /// What the pool may map. Returned after the pool is gone.
    claim: Claim,
    /// What the process had in use when the device was opened.
    _in_use: Option<Claim>,
}

impl Arena {
    /// Opens a device, finds its budget, and opens a pool within it: beside what this process has in use already,
    /// its context included.
    ///
    /// # Errors
    /// `Device` when it cannot be opened here; `Budget` when nobody tells how much memory it has; `Claim` for a
    /// limit above the budget; `Pool` for a limit that no pool can have.
    pub fn open(config: Config) -> Result<Self, OpenError> {
        let Config { device, budget, host_memory, pool } = config;
        Self::open_on(&Device::open_with(&device, &host_memory)?, budget, pool)
    }

    /// The same on a device that is open, and that nobody else hands out.
    ///
    /// # Errors
    /// As for [`Arena::open`], but for `Device`.
    pub fn open_on(device: &Device, budget: Option<Cap>, pool: PoolConfig) -> Result<Self, OpenError> {
        let (budget, envelope) = device.envelope(budget)?;
        let in_use = claim_own(&budget, &envelope);
        let arena = Self::open_within(device, &envelope, pool)?;
        Ok(Self { _in_use: in_use, ..arena })
    }

    /// A pool on a device that is open, which claims its limit from `envelope`, beside whoever else does; without a
    /// limit it claims what is left.
    ///
    /// # Errors
    /// `Claim` for a limit above what is left; `Pool` for one that no pool can have.
    pub fn open_within(device: &Device, envelope: &Envelope, pool: PoolConfig) -> Result<Self, OpenError> {
        // A GPU's total is what somebody says, and need not be what is kept.
        let keeps_total = matches!(device.spec(), DeviceSpec::Host { .. });
        Self::claim(device.driver(), envelope, pool, keeps_total)
    }

    /// An arena over a driver that is open already, with all that the driver has for its budget.
    ///
    /// # Errors
    /// `Claim` for a limit above that; as for [`Pool::new`] otherwise.
    pub fn over(driver: Arc<dyn Driver>, pool: PoolConfig) -> Result<Self, OpenError> {
        let total_bytes = driver.info().total_bytes;
        Self::claim(driver, &Envelope::new(total_bytes, total_bytes), pool, true)
    }

    fn claim(
        driver: Arc<dyn Driver>,
        envelope: &Envelope,
        pool: PoolConfig,
        keeps_total: bool,
    ) -> Result<Self, OpenError> {
        let claim = match pool.limit_bytes {
            None => {
                let rest = envelope.claim_rest(Tag::pool());
                let granule_bytes = driver.info().granule_bytes;
                if rest.bytes() < granule_bytes && driver.info().total_bytes >= granule_bytes {
                    rest.release();
                    // Says who has the rest of the budget, and what budget would do.
                    envelope.claim(Tag::pool(), granule_bytes).map_err(Box::new)?
                } else {
                    rest
                }
            }
            Some(bytes) => envelope.claim(Tag::pool(), bytes).map_err(Box::new)?,
        };
        // All of a device that keeps its total is no limit: it is the device then that refuses, and says so.
        let is_all = keeps_total && pool.limit_bytes.is_none() && claim.bytes() >= driver.info().total_bytes;
        let config = PoolConfig { limit_bytes: (!is_all).then(|| claim.bytes()), ..pool };
        Ok(Self { pool: Pool::new(driver, config)?, claim, _in_use: None })
    }

    /// The pool underneath, for copies on streams of the caller's.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Most it may map, in bytes.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.claim.bytes()
    }

    /// The budget that it has its limit from: for others who need memory of this device.
    #[must_use]
    pub fn envelope(&self) -> &Envelope {
        self.claim.envelope()
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

    /// See [`Pool::free_part`].
    ///
    /// # Errors
    /// As there.
    pub fn free_part(&self, block: BlockId, part: DeviceRange) -> Result<Vec<Block>, PoolError> {
        self.pool.free_part(block, part)
    }

    /// See [`Pool::set_cached_max_bytes`].
    ///
    /// # Errors
    /// As there.
    pub fn set_cached_max_bytes(&self, cached_max_bytes: Option<u64>) -> Result<(), PoolError> {
        self.pool.set_cached_max_bytes(cached_max_bytes)
    }

    /// See [`Pool::record_use`].
    ///
    /// # Errors
    /// As there.
    pub fn record_use(&self, block: BlockId, stream: StreamId) -> Result<(), PoolError> {
        self.pool.record_use(block, stream)
    }

    /// See [`Pool::declare_changes`].
    ///
    /// # Errors
    /// As there.
    pub fn declare_changes(&self, tag: &Tag, changes: Changes) -> Result<(), PoolError> {
        self.pool.declare_changes(tag, changes)
    }

    /// See [`Pool::prepare_sleep`].
    ///
    /// # Errors
    /// As there.
    pub fn prepare_sleep(&self, request: &SleepRequest) -> Result<Preparation, PoolError> {
        self.pool.prepare_sleep(request)
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

    /// See [`Pool::mark_block_restored`].
    ///
    /// # Errors
    /// As there.
    pub fn mark_block_restored(&self, block: BlockId) -> Result<Vec<LostRange>, PoolError> {
        self.pool.mark_block_restored(block)
    }

    /// See [`Pool::lost_ranges`].
    ///
    /// # Errors
    /// As there.
    pub fn lost_ranges(&self) -> Result<Vec<LostRange>, PoolError> {
        self.pool.lost_ranges()
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
    fn the_limit_is_a_claim_on_the_budget() {
        let open = |budget: &str, limit_bytes| {
            let budget = (!budget.is_empty()).then(|| budget.parse().unwrap());
            Arena::open(Config::on("host:64MiB".parse().unwrap()).within(budget).limited_to(limit_bytes))
        };
        for (budget, limit_bytes, expected) in [
            ("", None, 64 << 20),
            ("0.5", None, 32 << 20),
            ("16MiB", None, 16 << 20),
            ("1GiB", None, 64 << 20),
            ("16m", Some(8 << 20), 8 << 20),
        ] {
            let arena = open(budget, limit_bytes).unwrap();
            assert_eq!(arena.limit_bytes(), expected, "{budget}");
            assert!(arena.alloc(&AllocRequest::new(expected, Tag::weights())).is_ok());
            assert!(arena.alloc(&AllocRequest::new(1, Tag::weights())).is_err());
        }
        let arena = open("16MiB", Some(8 << 20)).unwrap();
        assert_eq!(arena.envelope().unclaimed_bytes(), 8 << 20);
        let Err(OpenError::Claim(refused)) = open("16MiB", Some(17 << 20)) else { panic!("it does not fit") };
        assert!(
            refused.to_string().contains("cannot claim 17 MiB for `pool`: the budget is 16 MiB"),
            "{refused}"
        );
        let Err(OpenError::Claim(refused)) = open("1KiB", None) else { panic!("it is less than a granule") };
        assert!(
            refused.to_string().contains("cannot claim 2 MiB for `pool`: the budget is 1 KiB"),
            "{refused}"
        );
        assert!(matches!(open("1KiB", Some(1)), Err(OpenError::Pool(PoolError::InvalidConfig { .. }))));
    }

    #[test]
    fn several_consumers_share_one_budget() {
        let device = Device::open(&"host:64MiB".parse().unwrap()).unwrap();
        let (budget, envelope) = device.envelope(Some("0.75".parse().unwrap())).unwrap();
        assert_eq!(budget.budget_bytes, Some(48 << 20));
        let graphs = envelope.claim(Tag::cudagraph(), 8 << 20).unwrap();
        let limited = |limit_bytes| PoolConfig { limit_bytes, ..PoolConfig::default() };
        let first = Arena::open_within(&device, &envelope, limited(Some(32 << 20))).unwrap();
        assert!(matches!(
            Arena::open_within(&device, &envelope, limited(Some(9 << 20))),
            Err(OpenError::Claim(_))
        ));
        let second = Arena::open_within(&device, &envelope, limited(None)).unwrap();
        assert_eq!(second.limit_bytes(), 8 << 20);
        drop((first, second, graphs));
        assert_eq!(envelope.unclaimed_bytes(), 48 << 20);
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
