//! The façade: opens a device and hands its memory out.

use std::sync::Arc;
use std::time::Duration;

use poorwill_core::budget::{Cap, Claim, Envelope};
use poorwill_core::{
    AllocRequest, Block, BlockId, Changes, DeviceRange, Driver, DriverError, DriverErrorKind, HeldTag, Hold,
    HostBuffer, LostRange, Op, Pool, PoolConfig, PoolError, PoolStats, Preparation, SleepReport,
    SleepRequest, Snapshot, StreamId, Tag, TagPolicy, TagState, WakeReport, WakeRequest,
};

use crate::budget::claim_own;
use crate::device::DeviceSpec;
use crate::open::{Device, DeviceOptions, HostMemoryUse, OpenError, Peers};
use crate::owned::OwnedBlock;

/// Which device to open, how much of it to use, and how its pool behaves.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// The device.
    pub device: DeviceSpec,
    /// What the user allows of the device; the budget is this or less.
    pub budget: Option<Cap>,
    /// What may be done about host memory.
    pub host_memory: HostMemoryUse,
    /// Which other GPUs may use the memory of this one.
    pub peers: Peers,
    /// Limit and shape of the pool. The limit is a claim on the budget; without one the pool claims all of it.
    pub pool: PoolConfig,
}

impl Config {
    /// The whole of `device`, with the default pool.
    #[must_use]
    pub fn on(device: DeviceSpec) -> Self {
        let (host_memory, peers, pool) = Default::default();
        Self { device, budget: None, host_memory, peers, pool }
    }

    /// The same, mapping at most `limit_bytes`.
    #[must_use]
    pub fn limited_to(mut self, limit_bytes: impl Into<Option<u64>>) -> Self {
        self.pool.limit_bytes = limit_bytes.into();
        self
    }

    /// The same, with a pool of this limit and shape.
    #[must_use]
    pub fn pooling(mut self, pool: PoolConfig) -> Self {
        self.pool = pool;
        self
    }

    /// The same, with what may be done about host memory.
    #[must_use]
    pub fn backing_up_in(mut self, host_memory: HostMemoryUse) -> Self {
        self.host_memory = host_memory;
        self
    }

    /// The same, with these other GPUs allowed to use its memory.
    #[must_use]
    pub fn open_to(mut self, peers: Peers) -> Self {
        self.peers = peers;
        self
    }

    /// The same, within a budget of the user's.
    #[must_use]
    pub fn within(mut self, cap: impl Into<Option<Cap>>) -> Self {
        self.budget = cap.into();
        self
    }
}

/// Memory of one device: blocks of it, which sleep and wake by tag.
///
/// Clones are the same arena. With the last of them, and the last [`OwnedBlock`], everything goes back to the device, and
/// the arena's claim to its budget. All calls may be made from any thread; which of them wait for what, each says.
///
/// Every call is `Closed` after [`Arena::close`], `WrongProcess` in a fork of the process that opened the arena, and
/// `Poisoned` after a panic inside of the pool; no list of errors below repeats these three.
#[derive(Debug, Clone)]
pub struct Arena(Arc<Inner>);

#[derive(Debug)]
struct Inner {
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
        let Config { device, budget, host_memory, peers, pool } = config;
        let options = DeviceOptions::default().backing_up_in(host_memory).open_to(peers);
        Self::open_on(&Device::open_with(&device, options)?, budget, pool)
    }

    /// The same on a device that is open, and that nobody else hands out.
    ///
    /// # Errors
    /// As for [`Arena::open`], but for `Device`.
    pub fn open_on(device: &Device, budget: Option<Cap>, pool: PoolConfig) -> Result<Self, OpenError> {
        let (budget, envelope) = device.envelope(budget)?;
        let in_use = claim_own(&budget, &envelope);
        Self::claim(device.driver(), &envelope, pool, keeps_total(device), in_use)
    }

    /// A pool on a device that is open, which claims its limit from `envelope`, beside whoever else does; without a
    /// limit it claims what is left.
    ///
    /// # Errors
    /// `Claim` for a limit above what is left; `Pool` for one that no pool can have.
    pub fn open_within(device: &Device, envelope: &Envelope, pool: PoolConfig) -> Result<Self, OpenError> {
        Self::claim(device.driver(), envelope, pool, keeps_total(device), None)
    }

    /// An arena over a driver that is open already, with all that the driver has for its budget.
    ///
    /// # Errors
    /// `Claim` for a limit above that; as for [`Pool::new`] otherwise.
    pub fn over(driver: Arc<dyn Driver>, pool: PoolConfig) -> Result<Self, OpenError> {
        let total_bytes = driver.info().total_bytes;
        Self::claim(driver, &Envelope::new(total_bytes, total_bytes), pool, true, None)
    }

    fn claim(
        driver: Arc<dyn Driver>,
        envelope: &Envelope,
        pool: PoolConfig,
        keeps_total: bool,
        in_use: Option<Claim>,
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
        let pool = Pool::new(driver, pool.limited_to((!is_all).then(|| claim.bytes())))?;
        Ok(Self(Arc::new(Inner { pool, claim, _in_use: in_use })))
    }

    /// The pool underneath, for copies on streams of the caller's.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.0.pool
    }

    /// Most it may map, in bytes.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.0.claim.bytes()
    }

    /// The budget that it has its limit from: for others who need memory of this device.
    #[must_use]
    pub fn envelope(&self) -> &Envelope {
        self.0.claim.envelope()
    }

    /// The device.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        self.0.pool.driver()
    }

    /// Says what sleeps do with the bytes of `tag`, where that is not what is [built in](poorwill_core::tag). Before the
    /// tag's first allocation, and once; the same policy again does nothing.
    ///
    /// # Errors
    /// `PolicyConflict` when the tag has blocks, or another policy was declared, under a different one.
    pub fn declare_tag(&self, tag: &Tag, policy: TagPolicy) -> Result<(), PoolError> {
        self.0.pool.declare_tag(tag, policy)
    }

    /// Takes a block of at least the bytes asked for, rounded up to 512, at an address that stays until it is freed. Its
    /// bytes are unspecified. Whoever has it frees it ([`Arena::free`]); [`Arena::alloc_owned`] makes one that frees
    /// itself.
    ///
    /// Waits for work of the device where the limit or the device leaves no other way, and for as long as the request's
    /// [patience](AllocRequest::patience) where that may save creating memory. Waits for no work while a stream is being
    /// captured.
    ///
    /// # Errors
    /// `InvalidRequest` for a size or alignment that no pool gives; `Asleep` when the tag sleeps; `OverLimit` above the
    /// arena's limit, and `DeviceFull` where the device has too little, with the figures; `HeldByCapture` where memory that
    /// was freed might do, and a capture keeps it; `TimedOut` when the time of [`AllocRequest::within`] has passed, with what
    /// was waited for; `UnknownStream`; `AllocFailed` with what the driver says.
    pub fn alloc(&self, request: &AllocRequest) -> Result<Block, PoolError> {
        self.0.pool.alloc(request)
    }

    /// The same for a block that is freed when it is dropped, and that keeps the arena alive until then.
    ///
    /// # Errors
    /// As for [`Arena::alloc`].
    pub fn alloc_owned(&self, request: &AllocRequest) -> Result<OwnedBlock, PoolError> {
        Ok(OwnedBlock::new(self.clone(), self.alloc(request)?))
    }

    /// Gives a block back, awake or asleep. Its own stream may use the memory again at once, other streams when the work
    /// that is queued now has passed. It stays cached until it is used again or [trimmed](Arena::trim). Waits for nothing.
    ///
    /// # Errors
    /// `StaleBlock` for one that was freed before, or is another arena's.
    pub fn free(&self, block: BlockId) -> Result<(), PoolError> {
        self.0.pool.free(block)
    }

    /// Gives `part` of a block back, asleep or awake: a range of addresses that lies inside of it and begins and ends on
    /// multiples of 512 bytes. Returns what stays live, in address order: none, one or two blocks, where they were, with
    /// their bytes. Their handles are new, and the old one is stale. Memory leaves by whole
    /// [chunks](PoolConfig::chunk_granules) and [spans](PoolConfig::span_granules). Waits for nothing.
    ///
    /// # Errors
    /// With the block as it was: `StaleBlock`; `InvalidPart`, with what would help.
    pub fn free_part(&self, block: BlockId, part: DeviceRange) -> Result<Vec<Block>, PoolError> {
        self.0.pool.free_part(block, part)
    }

    /// Changes the mark, in bytes, above which cached memory is given back in the background; `None` keeps all of it. What
    /// is above a lower one begins to leave at once. Waits for nothing.
    ///
    /// # Errors
    /// Only those that every call has.
    pub fn set_cached_max_bytes(&self, cached_max_bytes: Option<u64>) -> Result<(), PoolError> {
        self.0.pool.set_cached_max_bytes(cached_max_bytes)
    }

    /// Says that work on `stream` uses a block, beside that on the stream it was allocated for. After it is freed, its
    /// memory waits for what is queued there by then.
    ///
    /// # Errors
    /// `StaleBlock`; `UnknownStream`.
    pub fn record_use(&self, block: BlockId, stream: StreamId) -> Result<(), PoolError> {
        self.0.pool.record_use(block, stream)
    }

    /// Says what is known about changes to the bytes of `tag` between sleeps, from now on, at any time: also that they are
    /// immutable once they have been loaded. Waits for who puts the tag to sleep or wakes it.
    ///
    /// # Errors
    /// Only those that every call has.
    pub fn declare_changes(&self, tag: &Tag, changes: Changes) -> Result<(), PoolError> {
        self.0.pool.declare_changes(tag, changes)
    }

    /// Starts to back up, in the background, what a sleep of this request would, so that the sleep copies only what
    /// changes from then on. The owner goes on working. A sleep or a discard of one of the tags ends it.
    ///
    /// # Errors
    /// `UnknownTag`, `SleepConflict`, `Undefined` and `Asleep`, as for [`Arena::sleep`]; `PrepareFailed` when there is no
    /// thread to be had. What fails later, [`Preparation::wait`] tells, `Lost` too, where backups have spoiled.
    pub fn prepare_sleep(&self, request: &SleepRequest) -> Result<Preparation, PoolError> {
        self.0.pool.prepare_sleep(request)
    }

    /// Puts tags to sleep: their memory goes back to the device, their addresses stay, and their bytes are kept in host
    /// memory or dropped, as their policies say of the level. Waits for the device's work. Tags that sleep already are
    /// reported and left alone.
    ///
    /// # Errors
    /// With nothing done: `UnknownTag`; `SleepConflict` for a tag that sleeps otherwise than this level asks;
    /// `Undefined` for one to be backed up that was dropped and is not restored, `Lost` for one of which bytes were lost
    /// with their backup, or are found to be just now; `Asleep` for a stranded one; `Held` for one that somebody
    /// [holds](Arena::hold); `Capturing` while a stream is being captured; `TrustBroken` for an immutable one that has
    /// changed; `TimedOut` when the time of [`SleepRequest::within`] has passed; `SleepFailed` with what the driver said.
    /// `Stranded` when that could not be undone: no byte is lost, and a wake maps the memory again.
    /// `Shortfall` when the tags sleep, and not all memory could be given back.
    pub fn sleep(&self, request: &SleepRequest) -> Result<SleepReport, PoolError> {
        self.0.pool.sleep(request)
    }

    /// Wakes tags: every live block has memory again, at the same address, with the same bytes, checked by digest as far
    /// as the request says, or with what the policy says of dropped ones. All of the tags, or none. Waits for its own
    /// copies, and up to the request's deadline for memory. Tags that are awake already are reported and left alone.
    ///
    /// # Errors
    /// With everything asleep as before: `UnknownTag`; `OverLimit`, `DeviceFull` and `HeldByCapture` where memory is
    /// lacking; `TimedOut` when the time of [`WakeRequest::within`] has passed; `WakeFailed` with what the driver said; `Corrupt` when bytes that came back are not those that were
    /// stored, with all of them. [Accepting losses](WakeRequest::accepting_losses), the rest wakes.
    pub fn wake(&self, request: &WakeRequest) -> Result<WakeReport, PoolError> {
        self.0.pool.wake(request)
    }

    /// Drops the bytes of `tags`, awake or asleep, whatever their policies say, and their backups. They sleep until they
    /// are woken, and hold then what their policies say of dropped memory.
    ///
    /// # Errors
    /// As for [`Arena::sleep`].
    pub fn discard(&self, tags: &[Tag]) -> Result<SleepReport, PoolError> {
        self.0.pool.discard(tags)
    }

    /// Says that the owner has written all bytes of `tags` again that a sleep had dropped, or that were lost with a backup
    /// ([`Arena::lost_ranges`]). Returns those of them that
    /// were undefined until now.
    ///
    /// # Errors
    /// With nothing done: `UnknownTag`; `Asleep`.
    pub fn mark_restored(&self, tags: &[Tag]) -> Result<Vec<Tag>, PoolError> {
        self.0.pool.mark_restored(tags)
    }

    /// Every range of a block that was lost with its backup, and neither written again nor freed since, by address. What a
    /// sleep has dropped is not among them: there, the whole tag is undefined.
    ///
    /// # Errors
    /// Only those that every call has.
    pub fn lost_ranges(&self) -> Result<Vec<LostRange>, PoolError> {
        self.0.pool.lost_ranges()
    }

    /// Says that the owner has written again what was lost of a block, and returns that. Its tag is awake as before when
    /// nothing else of it is lost.
    ///
    /// # Errors
    /// With nothing done: `StaleBlock`; `Asleep`; `Undefined` when a sleep has dropped the whole tag.
    pub fn mark_block_restored(&self, block: BlockId) -> Result<Vec<LostRange>, PoolError> {
        self.0.pool.mark_block_restored(block)
    }

    /// Gives all memory and addresses back that serve no live block, and returns how many bytes of memory that were. Waits
    /// for work that may still touch what was freed; while a stream is being captured it leaves that alone. Memory of a tag
    /// that somebody [holds](Arena::hold) stays.
    ///
    /// # Errors
    /// `Driver` with what the driver said first; the rest was still done.
    pub fn trim(&self) -> Result<u64, PoolError> {
        self.0.pool.trim()
    }

    /// The same, waiting for work for `wait_max` at most.
    ///
    /// # Errors
    /// As for [`Arena::trim`]; `TimedOut`, which names the streams, when work keeps some of it. The rest was given back.
    pub fn trim_within(&self, wait_max: Duration) -> Result<u64, PoolError> {
        self.0.pool.trim_within(wait_max)
    }

    /// Lets go of the backups of tags that are awake, of all or of those named, and gives host memory back that nothing
    /// uses; the next sleep copies what is let go of. Returns how many bytes less host memory the arena's store holds then.
    /// What sleeps keeps its backups. Waits for who puts the tags to sleep or wakes them, and ends a preparation of theirs;
    /// may wait for work on the device.
    ///
    /// # Errors
    /// With nothing done: `UnknownTag`; `Asleep` for a tag that is named and sleeps with a backup. `Lost` names what the
    /// device has not either of backups that turn out to have spoiled: all of them are gone all the same. `Driver` with what
    /// the driver says when they cannot be looked at, and all stay, or what the store says when it is to give memory back,
    /// and they are gone.
    pub fn drop_backups(&self, tags: Option<&[Tag]>) -> Result<u64, PoolError> {
        self.0.pool.drop_backups(tags)
    }

    /// Says that somebody else, `holder` by name, has the physical memory of `tag` registered, until the guard is dropped.
    /// Take it before registering, and drop it after deregistering. Meanwhile sleeps and discards that mean the tag are
    /// refused, and so is [`Arena::close`], and what is freed in the tag stays where it is, for its own blocks. Waits for
    /// who puts the tag to sleep or wakes it.
    ///
    /// # Errors
    /// `UnknownTag`; `Asleep` for a tag that has no memory now.
    pub fn hold(&self, tag: &Tag, holder: impl Into<String>) -> Result<Hold, PoolError> {
        self.0.pool.hold(tag, holder)
    }

    /// The tags that are held, by whom, and how many bytes of idle memory stay because of it.
    ///
    /// # Errors
    /// Only those that every call has.
    pub fn held(&self) -> Result<Vec<HeldTag>, PoolError> {
        self.0.pool.held()
    }

    /// Where the bytes of a tag are.
    ///
    /// # Errors
    /// `UnknownTag` for one that the arena has never seen.
    pub fn tag_state(&self, tag: &Tag) -> Result<TagState, PoolError> {
        self.0.pool.tag_state(tag)
    }

    /// What is live, mapped, cached and backed up, in bytes, in all and by tag. Waits for nothing that lasts.
    ///
    /// # Errors
    /// Only those that every call has.
    pub fn stats(&self) -> Result<PoolStats, PoolError> {
        self.0.pool.stats()
    }

    /// Every segment with all of its blocks, live and free, in the order of addresses.
    ///
    /// # Errors
    /// Only those that every call has.
    pub fn snapshot(&self) -> Result<Snapshot, PoolError> {
        self.0.pool.snapshot()
    }

    /// Gives everything back and ends the arena, for every clone of it, whoever still has blocks: their addresses are
    /// nobody's from then on, and work that uses them fails. It is for who knows that nobody does, and wants to know what
    /// failed; whoever does not, drops the arena, which goes with its last owner. Waits for the device's work unless
    /// nothing is held.
    ///
    /// It takes `&self` since it may have to be called again.
    ///
    /// # Errors
    /// `Capturing` while a stream is being captured and something is held, and `Held` while somebody has a
    /// [hold](Arena::hold): the arena is open as before. Otherwise what the driver said first; the arena is closed all the same, and closing again goes on with what is left.
    pub fn close(&self) -> Result<(), PoolError> {
        self.0.pool.close()
    }

    /// Copies `bytes` into a block, from `offset` bytes on, on the default stream, and waits. Takes host memory for a copy
    /// of them.
    ///
    /// # Errors
    /// `StaleBlock`; `OutOfBlock` for bytes outside of it; `Asleep`; `Driver` with what the device says to the copy.
    pub fn write_all(&self, block: BlockId, offset: u64, bytes: &[u8]) -> Result<(), PoolError> {
        let buffer = Arc::new(HostBuffer::from(bytes.to_vec()));
        let copy = self.0.pool.write(StreamId::DEFAULT, block, offset, buffer, 0, bytes.len() as u64)?;
        copy.wait().map_err(|source| PoolError::Driver { op: "write", source })
    }

    /// Copies `bytes` bytes of a block, from `offset` bytes on, to host memory, on the default stream, and waits.
    ///
    /// # Errors
    /// `StaleBlock`; `OutOfBlock` for bytes outside of it; `Asleep`; `Undefined` for bytes that a sleep dropped, `Lost` for
    /// those lost with their backup; `Driver` when the host has no memory for them, or with what the device says to the copy.
    pub fn read_vec(&self, block: BlockId, offset: u64, bytes: u64) -> Result<Vec<u8>, PoolError> {
        if bytes == 0 {
            return Ok(Vec::new());
        }
        let at = |source| PoolError::Driver { op: "read", source };
        let buffer = zeros(bytes).map_err(at)?;
        let copy = self.0.pool.read(StreamId::DEFAULT, block, offset, buffer, 0, bytes)?;
        copy.wait().map(|buffer| buffer.to_vec()).map_err(at)
    }
}

/// Whether its total is what is kept: a GPU's is what somebody says.
fn keeps_total(device: &Device) -> bool {
    matches!(device.spec(), DeviceSpec::Host { .. })
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
            let error = poorwill_core::chain(&Arena::open(Config::on(device.parse().unwrap())).unwrap_err());
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
        let limited = |limit_bytes| PoolConfig::default().limited_to(limit_bytes);
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
