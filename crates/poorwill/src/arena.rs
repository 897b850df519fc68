//! Opens a device and allocates its memory.

use std::sync::Arc;
use std::time::Duration;

use poorwill_core::backup::{Disk, HostBackups};
use poorwill_core::budget::{Cap, Claim, Envelope};
use poorwill_core::{
    AllocRequest, BackupView, Block, BlockId, Changes, Decision, DeviceRange, Driver, DriverError,
    DriverErrorKind, HeldTag, Hold, HostBuffer, LostRange, Op, Pool, PoolConfig, PoolError, PoolStats,
    Preparation, SleepReport, SleepRequest, Snapshot, Staged, StoredAs, StreamId, Tag, TagPolicy, TagState,
    WakeReport, WakeRequest,
};

use poorwill_driver::disk::DiskConfig;

use crate::budget::claim_own;
use crate::device::DeviceSpec;
#[cfg(target_os = "linux")]
use crate::lend::{self, Lending, PeerCopies};
use crate::open::{Device, DeviceOptions, HostMemoryUse, Links, OpenError, Peers};

/// Which device to open, how much of it to use, and how its pool behaves.
///
/// ```
/// use poorwill::{Arena, Config, PoolConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = Config::on("host:1GiB".parse()?)
///     .within(Some("0.5".parse()?)) // The budget: half of the device.
///     .pooling(PoolConfig::default().in_chunks_of(4))
///     .limited_to(256 << 20); // The pool's claim on it.
/// assert_eq!(Arena::open(config)?.limit_bytes(), 256 << 20);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// The device.
    pub device: DeviceSpec,
    /// The user's cap on the budget.
    pub budget: Option<Cap>,
    /// Use of host memory.
    pub host_memory: HostMemoryUse,
    /// Which other GPUs may access the memory.
    pub peers: Peers,
    /// Other GPUs whose links to host memory may carry wakes.
    pub links: Links,
    /// Where backups go that host memory cannot hold.
    pub disk: Option<DiskConfig>,
    /// Limit and shape of the pool. The limit claims a part of the budget; without one the pool claims all of
    /// it.
    pub pool: PoolConfig,
    /// Through which broker sleeps may lend. Limits come from the device's total, not from what is free. Where that is too
    /// little, an arena that lends asks for what others lend, and one that does not cannot.
    #[cfg(target_os = "linux")]
    pub lending: Option<Lending>,
    /// Other devices in whose idle memory sleeps keep copies, of an arena that lends.
    #[cfg(target_os = "linux")]
    pub peer_copies: PeerCopies,
}

impl Config {
    /// All of `device`, with the default pool.
    #[must_use]
    pub fn on(device: DeviceSpec) -> Self {
        let (host_memory, peers, links, disk, pool) = Default::default();
        Self {
            device,
            budget: None,
            host_memory,
            peers,
            links,
            disk,
            pool,
            #[cfg(target_os = "linux")]
            lending: None,
            #[cfg(target_os = "linux")]
            peer_copies: PeerCopies::None,
        }
    }

    /// Sets the pool's limit.
    #[must_use]
    pub fn limited_to(mut self, limit_bytes: impl Into<Option<u64>>) -> Self {
        self.pool.limit_bytes = limit_bytes.into();
        self
    }

    /// Sets [`Self::pool`].
    #[must_use]
    pub fn pooling(mut self, pool: PoolConfig) -> Self {
        self.pool = pool;
        self
    }

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

    /// Sets [`Self::lending`].
    #[cfg(target_os = "linux")]
    #[must_use]
    pub fn lending_by(mut self, lending: impl Into<Option<Lending>>) -> Self {
        self.lending = lending.into();
        self
    }

    /// Sets [`Self::peer_copies`].
    #[cfg(target_os = "linux")]
    #[must_use]
    pub fn copying_to(mut self, peer_copies: PeerCopies) -> Self {
        self.peer_copies = peer_copies;
        self
    }

    /// Sets [`Self::budget`].
    #[must_use]
    pub fn within(mut self, cap: impl Into<Option<Cap>>) -> Self {
        self.budget = cap.into();
        self
    }
}

/// Memory of one device, in blocks that sleep and wake by tag.
///
/// Clones share the arena. Dropping the last clone and the last [`OwnedBlock`](crate::OwnedBlock) releases all memory and the
/// claim on the budget. All methods are thread-safe. [`Pool`] says more on the methods of the same names,
/// with all errors.
///
/// Every method fails with `Closed` after [`Arena::close`], `WrongProcess` in a forked child, and `Poisoned`
/// after a panic inside the pool.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag, WakeRequest};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let weights = arena.alloc(&AllocRequest::new(8 << 20, Tag::weights()))?;
/// let cache = arena.alloc(&AllocRequest::new(8 << 20, Tag::kv_cache()))?;
/// arena.sleep(&SleepRequest::all(Level::One))?; // Backs up the weights, drops the cache.
/// assert_eq!(arena.stats()?.mapped_bytes, 0);
/// let wake = arena.wake(&WakeRequest::all())?;
/// assert_eq!(wake.undefined_tags, []); // The cache is zeroed by policy.
/// arena.free(cache.id)?;
/// arena.free(weights.id)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Arena(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    pool: Pool,
    /// Dropped after the pool.
    claim: Claim,
    /// What the process used when the device was opened.
    _in_use: Option<Claim>,
}

impl Arena {
    /// Opens a device, finds its budget, and opens a pool in it, beside what this process uses already.
    ///
    /// # Errors
    /// - `Device` when the device does not open, and `Budget` when no source reports its memory.
    /// - `Claim` for a limit above the budget, and `Pool` for an invalid one, or a device that cannot lend.
    pub fn open(config: Config) -> Result<Self, OpenError> {
        let Config { device, budget, host_memory, peers, links, disk, pool, .. } = config;
        let options = DeviceOptions::default().backing_up_in(host_memory).open_to(peers);
        let options = options.linking_over(links).spilling_to(disk);
        let device = Device::open_with(&device, options)?;
        let arena = Self::open_on(&device, budget, pool)?;
        #[cfg(target_os = "linux")]
        if let Some(lending) = &config.lending {
            arena.lend_through(lending)?;
            arena.copy_to(&device, &config.peer_copies, lending)?;
        } else if config.peer_copies != PeerCopies::None {
            return Err(OpenError::Pool(PoolError::InvalidConfig {
                reason: "copies in other devices' memory need a broker that gives them up: set `lending`"
                    .into(),
            }));
        }
        Ok(arena)
    }

    /// As [`Arena::open`], on an open device that no other arena or envelope manages.
    ///
    /// # Errors
    /// As [`Arena::open`], but for `Device`.
    pub fn open_on(device: &Device, budget: Option<Cap>, pool: PoolConfig) -> Result<Self, OpenError> {
        let (budget, envelope) = device.envelope(budget)?;
        let in_use = claim_own(&budget, &envelope);
        Self::claim(device.driver(), device.disk(), &envelope, pool, keeps_total(device), in_use)
    }

    /// Opens a pool that claims its limit, or without one the rest, from a shared `envelope`.
    ///
    /// # Errors
    /// `Claim` for a limit above the rest; `Pool` for an invalid one.
    pub fn open_within(device: &Device, envelope: &Envelope, pool: PoolConfig) -> Result<Self, OpenError> {
        Self::claim(device.driver(), device.disk(), envelope, pool, keeps_total(device), None)
    }

    /// Opens an arena over an open driver; the device's total is the budget.
    ///
    /// # Errors
    /// `Claim` for a limit above the budget; otherwise as [`Pool::new`].
    pub fn over(driver: Arc<dyn Driver>, pool: PoolConfig) -> Result<Self, OpenError> {
        let total_bytes = driver.info().total_bytes;
        Self::claim(driver, None, &Envelope::new(total_bytes, total_bytes), pool, true, None)
    }

    /// Opens an arena on an open device without a budget: the device alone refuses, or the pool's limit.
    ///
    /// ```
    /// use poorwill::{Arena, Device, PoolConfig};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let device = Device::open(&"host:64MiB".parse()?)?;
    /// let arena = Arena::open_unbudgeted(&device, PoolConfig::default())?;
    /// assert_eq!(arena.limit_bytes(), 64 << 20);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Arena::over`].
    pub fn open_unbudgeted(device: &Device, pool: PoolConfig) -> Result<Self, OpenError> {
        let driver = device.driver();
        let total_bytes = driver.info().total_bytes;
        Self::claim(driver, device.disk(), &Envelope::new(total_bytes, total_bytes), pool, true, None)
    }

    fn claim(
        driver: Arc<dyn Driver>,
        disk: Option<&Arc<dyn Disk>>,
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
                    // This claim fails, and its error names the other claims and a sufficient budget.
                    envelope.claim(Tag::pool(), granule_bytes).map_err(Box::new)?
                } else {
                    rest
                }
            }
            Some(bytes) => envelope.claim(Tag::pool(), bytes).map_err(Box::new)?,
        };
        // A limit equal to a fixed total is left to the device, which refuses more itself.
        let is_all = keeps_total && pool.limit_bytes.is_none() && claim.bytes() >= driver.info().total_bytes;
        let backups =
            HostBackups::new(Arc::clone(&driver)).compressing(pool.compress).spilling_to(disk.cloned());
        let pool = pool.limited_to((!is_all).then(|| claim.bytes()));
        let pool = Pool::with_backups(driver, pool, Arc::new(backups))?;
        Ok(Self(Arc::new(Inner { pool, claim, _in_use: in_use })))
    }

    /// Has sleeps of this arena lend, if they [say so](SleepRequest::lending). Call it before the first allocation: memory
    /// that is there already cannot be lent. A broker that is not there is no error; see [`SleepReport::lend_refused`].
    ///
    /// The limit of open files of this process is raised as far as it may. A sleep has a descriptor for each chunk that it
    /// lends, 512 at most.
    ///
    /// # Errors
    /// `InvalidConfig`: the device's memory cannot be had by other processes, or the arena lends already.
    #[cfg(target_os = "linux")]
    pub fn lend_through(&self, lending: &Lending) -> Result<(), PoolError> {
        lend::lend_through(self.pool(), lending)
    }

    /// Has sleeps of this arena, which is on `device`, keep copies in other devices' memory. These devices have the same
    /// broker.
    ///
    /// # Errors
    /// `Device`: one of them does not exist, or this one does not reach its memory. `Pool`: the arena has copies elsewhere
    /// already, or its device cannot map memory of others.
    #[cfg(target_os = "linux")]
    pub fn copy_to(&self, device: &Device, copies: &PeerCopies, lending: &Lending) -> Result<(), OpenError> {
        if *copies != PeerCopies::None {
            self.pool().copy_to(lend::peers_of(device, copies, lending)?)?;
        }
        Ok(())
    }

    /// From now on has others' lent memory given up, after wakes and while this arena grows, where less of the device is
    /// free. That is for what asks no broker, as kernels that are loaded late and memory of other allocators. Arenas that
    /// lend begin with a hundred-and-twenty-eighth of the device, 1 GiB at most. For others it changes nothing.
    #[cfg(target_os = "linux")]
    pub fn keep_free(&self, bytes: u64) {
        self.pool().keep_free(bytes);
    }

    /// The pool, for copies on the caller's streams.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.0.pool
    }

    /// Most bytes it may map.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.0.claim.bytes()
    }

    /// The envelope it claimed from, for other claims on this device.
    #[must_use]
    pub fn envelope(&self) -> &Envelope {
        self.0.claim.envelope()
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        self.0.pool.driver()
    }

    /// Declares what sleeps do with the bytes of `tag`, instead of the [built-in policy](poorwill_core::tag).
    /// Call it before the tag's first allocation. Repeating the policy does nothing.
    ///
    /// # Errors
    /// `PolicyConflict`: blocks are held under another policy, or the tag was declared with another.
    pub fn declare_tag(&self, tag: &Tag, policy: TagPolicy) -> Result<(), PoolError> {
        self.0.pool.declare_tag(tag, policy)
    }

    /// Allocates a block with unspecified contents, of the requested bytes rounded up to 512. Its address
    /// stays valid until [`Arena::free`].
    ///
    /// May wait for device work when memory is short, or, within [`AllocRequest::stream_wait_max`], to avoid
    /// creating memory. Never waits during a stream capture.
    ///
    /// # Errors
    /// - `OverLimit` and `DeviceFull`, with the figures; `HeldByCapture` when a capture keeps freed memory.
    /// - `TimedOut` after the time of [`AllocRequest::within`]; `AllocFailed` with the driver's error.
    /// - `InvalidRequest`; `UnknownStream`; `Asleep`.
    pub fn alloc(&self, request: &AllocRequest) -> Result<Block, PoolError> {
        self.0.pool.alloc(request)
    }

    /// Frees a block, awake or asleep. Its own stream may reuse the memory at once; other streams after the
    /// work queued now. The memory stays cached until reuse or [`Arena::trim`]. Waits for nothing.
    ///
    /// # Errors
    /// `StaleBlock` for a freed block, or one of another arena.
    pub fn free(&self, block: BlockId) -> Result<(), PoolError> {
        self.0.pool.free(block)
    }

    /// Frees `part` of a block: a range aligned to 512 bytes at both ends. Returns the live rest in address
    /// order, with new handles. Unmaps only whole mappings: granules of a block [freed in
    /// parts](AllocRequest::freed_in_parts), else up to a [span](PoolConfig::span_granules). Waits for nothing.
    ///
    /// # Errors
    /// `StaleBlock`; `InvalidPart`, with a valid alternative.
    pub fn free_part(&self, block: BlockId, part: DeviceRange) -> Result<Vec<Block>, PoolError> {
        self.0.pool.free_part(block, part)
    }

    /// Limits cached bytes; the excess is released in the background, starting now. `None` caches everything.
    /// Waits for nothing.
    pub fn set_cached_max_bytes(&self, cached_max_bytes: Option<u64>) -> Result<(), PoolError> {
        self.0.pool.set_cached_max_bytes(cached_max_bytes)
    }

    /// Records that another stream uses a block. After a free, reuse waits for the work queued there by then.
    ///
    /// # Errors
    /// `StaleBlock` for a freed block, or one of another arena; `UnknownStream`.
    pub fn record_use(&self, block: BlockId, stream: StreamId) -> Result<(), PoolError> {
        self.0.pool.record_use(block, stream)
    }

    /// Declares how the bytes of `tag` change between sleeps from now on, for instance never. Waits for a
    /// running sleep or wake of the tag.
    pub fn declare_changes(&self, tag: &Tag, changes: Changes) -> Result<(), PoolError> {
        self.0.pool.declare_changes(tag, changes)
    }

    /// Declares how the backups of `tag` are stored from its next sleep on. Best called before the tag's first
    /// allocation: later it makes the next sleep copy all of it. Waits for a running sleep or wake of the tag.
    pub fn declare_backups(&self, tag: &Tag, stored_as: StoredAs) -> Result<(), PoolError> {
        self.0.pool.declare_backups(tag, stored_as)
    }

    /// Copies the backup of `into.len()` bytes of the device from `addr` on into host memory, whichever way it is
    /// stored. The range lies in one live block; a wake is not needed. While the tag is awake, these are the bytes of
    /// its last sleep or preparation, if its backups are kept. Waits for a disk only.
    ///
    /// ```
    /// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
    /// let block = arena.alloc(&AllocRequest::new(1 << 20, Tag::weights()))?;
    /// arena.write_all(block.id, 0, b"weights")?;
    /// arena.sleep(&SleepRequest::all(Level::One))?;
    /// let mut bytes = [0; 4];
    /// arena.read_backup(block.range.addr + 3, &mut bytes)?;
    /// assert_eq!(bytes, *b"ghts");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - `OutsideBlocks` for a range that does not lie in one live block.
    /// - `Backup` for one that is not stored, or spoiled: its bytes are compared with their digests.
    /// - `Driver` where the storage fails or does not support it.
    pub fn read_backup(&self, addr: u64, into: &mut [u8]) -> Result<(), PoolError> {
        self.0.pool.read_backup(addr, into)
    }

    /// The backup of a device range in place, without a copy, for tags with viewable backups
    /// ([`StoredAs::Viewable`]). The view never changes; a sleep that would have to, takes another buffer.
    ///
    /// # Errors
    /// - `OutsideBlocks` for a range that does not lie in one live block.
    /// - `Backup` for one that is not stored, on disk, stored as codes, or in several extents.
    pub fn view_backup(&self, range: DeviceRange) -> Result<BackupView, PoolError> {
        self.0.pool.view_backup(range)
    }

    /// Starts the backup of a later sleep in the background. That sleep then copies only what changed since.
    /// A sleep or discard of one of the tags ends the preparation.
    ///
    /// ```
    /// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
    /// # let block = arena.alloc(&AllocRequest::new(1 << 20, Tag::weights()))?;
    /// let request = SleepRequest::all(Level::One);
    /// let preparation = arena.prepare_sleep(&request)?;
    /// // Serve requests here.
    /// println!("{:?}", preparation.wait()?);
    /// arena.sleep(&request)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Arena::sleep`]; `PrepareFailed` when no thread starts. [`Preparation::wait`] returns later
    /// failures, including `Lost` for corrupt backups.
    pub fn prepare_sleep(&self, request: &SleepRequest) -> Result<Preparation, PoolError> {
        self.0.pool.prepare_sleep(request)
    }

    /// Puts tags to sleep: releases their memory and keeps their addresses. Policy at this level backs up
    /// their bytes in host memory or drops them. Waits for the device's work. Reports tags that sleep
    /// already.
    ///
    /// # Errors
    /// - `Shortfall` when the tags sleep, but not all memory could be released.
    /// - `Stranded` when a failure could not be undone. No byte is lost, and a wake maps the memory again.
    /// - `Lost`: the tags stay awake; bytes of a corrupt backup become undefined. Also before any change, where bytes
    ///   were lost earlier.
    ///
    /// All others change nothing:
    /// - `UnknownTag`; `SleepConflict` for a tag that sleeps in another way; `Asleep` for a stranded tag.
    /// - `Undefined` for dropped bytes that were not restored.
    /// - `Held` under a [hold](Arena::hold); `Capturing` during a stream capture; `ImmutableChanged` for a changed
    ///   immutable tag.
    /// - `TimedOut` after the time of [`SleepRequest::within`]; `SleepFailed` with the driver's error.
    pub fn sleep(&self, request: &SleepRequest) -> Result<SleepReport, PoolError> {
        self.0.pool.sleep(request)
    }

    /// Wakes tags, all or none. Every live block has memory at its address again, with its bytes, or with
    /// what policy gives for dropped ones. Waits for its own copies, and for memory until the request's
    /// deadline. Reports tags that are awake already.
    ///
    /// # Errors
    /// All leave every tag asleep:
    /// - `OverLimit`, `DeviceFull` and `HeldByCapture` for missing memory.
    /// - `Corrupt` with all restored bytes that differ from the stored ones. Wake the rest by [accepting
    ///   losses](WakeRequest::accepting_losses).
    /// - `UnknownTag`; `TimedOut` after the time of [`WakeRequest::within`]; `WakeFailed` with the driver's
    ///   error.
    pub fn wake(&self, request: &WakeRequest) -> Result<WakeReport, PoolError> {
        self.0.pool.wake(request)
    }

    /// Does a [sleep](Arena::sleep) up to its point of no return, and waits there for the verdict of a group.
    /// [`Staged`] has an example.
    ///
    /// # Errors
    /// As [`Arena::sleep`]; `Undone`. It has proposed to undo, so that the others need not wait.
    pub fn stage_sleep(
        &self,
        request: &SleepRequest,
        decision: Arc<dyn Decision>,
        undo_after: Duration,
    ) -> Result<Staged<SleepReport>, PoolError> {
        self.0.pool.stage_sleep(request, decision, undo_after)
    }

    /// Does a [wake](Arena::wake) up to its point of no return. Otherwise as [`Arena::stage_sleep`].
    ///
    /// # Errors
    /// As [`Arena::wake`]; `Undone`. It has proposed to undo, so that the others need not wait.
    pub fn stage_wake(
        &self,
        request: &WakeRequest,
        decision: Arc<dyn Decision>,
        undo_after: Duration,
    ) -> Result<Staged<WakeReport>, PoolError> {
        self.0.pool.stage_wake(request, decision, undo_after)
    }

    /// Drops the bytes and backups of `tags`, awake or asleep, whatever their policies. Then the tags sleep.
    /// A wake fills them as policy says for dropped memory.
    ///
    /// # Errors
    /// As [`Arena::sleep`]: `Shortfall`, `Stranded`, `UnknownTag`, `Held`, `Capturing` and `SleepFailed`.
    pub fn discard(&self, tags: &[Tag]) -> Result<SleepReport, PoolError> {
        self.0.pool.discard(tags)
    }

    /// Declares that the caller has rewritten all bytes of `tags` that a sleep dropped, or that [were
    /// lost](Arena::lost_ranges). Returns the tags that were undefined.
    ///
    /// # Errors
    /// `UnknownTag`; `Asleep` for a tag that sleeps. No tag is marked then.
    pub fn mark_restored(&self, tags: &[Tag]) -> Result<Vec<Tag>, PoolError> {
        self.0.pool.mark_restored(tags)
    }

    /// The block ranges lost with their backup, by address, until they are restored or freed. Excludes
    /// dropped tags, which are undefined as a whole.
    pub fn lost_ranges(&self) -> Result<Vec<LostRange>, PoolError> {
        self.0.pool.lost_ranges()
    }

    /// Declares that the caller has rewritten the lost ranges of a block, and returns them.
    ///
    /// # Errors
    /// - `StaleBlock` for a freed block, or one of another arena; `Asleep` when its tag sleeps.
    /// - `Undefined` when a sleep dropped the whole tag: call [`Arena::mark_restored`].
    pub fn mark_block_restored(&self, block: BlockId) -> Result<Vec<LostRange>, PoolError> {
        self.0.pool.mark_block_restored(block)
    }

    /// Releases all memory and addresses without a live block; returns the bytes. Waits for work that may use
    /// freed memory, except during a stream capture. Skips tags under a [hold](Arena::hold).
    ///
    /// # Errors
    /// `Driver` with the first driver error, after doing the rest.
    pub fn trim(&self) -> Result<u64, PoolError> {
        self.0.pool.trim()
    }

    /// As [`Arena::trim`], waiting at most `wait_max`.
    ///
    /// # Errors
    /// As [`Arena::trim`]; `TimedOut` after releasing the rest. It names the streams, or the tags with calls under
    /// way, that keep memory.
    pub fn trim_within(&self, wait_max: Duration) -> Result<u64, PoolError> {
        self.0.pool.trim_within(wait_max)
    }

    /// Drops the backups of the named awake tags, or of all, and releases unused host memory. Returns how many
    /// bytes less the storage holds; other calls may change that, too. Backups of sleeping tags stay. Waits for a
    /// running sleep or wake of the tags, ends their preparation, and may wait for device work.
    ///
    /// # Errors
    /// `Lost` for corrupt backups of bytes that the device lacks, too; others as [`Pool::drop_backups`].
    pub fn drop_backups(&self, tags: Option<&[Tag]>) -> Result<u64, PoolError> {
        self.0.pool.drop_backups(tags)
    }

    /// Moves the backups of the named sleeping tags, or of all, to the disk that the device was opened with. Returns how
    /// many bytes were moved. Sleeps do the same where host memory is short, with the longest sleepers first.
    ///
    /// ```no_run
    /// use poorwill::disk::DiskConfig;
    /// use poorwill::{Arena, Config, Level, SleepRequest};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = Config::on("cuda:0".parse()?).spilling_to(DiskConfig::in_folder("/mnt/nvme"));
    /// let arena = Arena::open(config)?;
    /// arena.sleep(&SleepRequest::all(Level::One))?;
    /// arena.spill(None)?;
    /// assert_eq!(arena.stats()?.backup_bytes, 0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Pool::spill`].
    pub fn spill(&self, tags: Option<&[Tag]>) -> Result<u64, PoolError> {
        self.0.pool.spill(tags)
    }

    /// Records that another library, named `holder`, registers the memory of `tag`, until the guard is
    /// dropped. Take the hold before registering; drop it after deregistering. Meanwhile sleeps and discards
    /// of the tag, and [`Arena::close`], are refused. Freed memory of the tag stays mapped for its own
    /// blocks. Waits for a running sleep or wake of the tag.
    ///
    /// ```
    /// use poorwill::{AllocRequest, Arena, Config, Level, PoolError, SleepRequest, Tag};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
    /// # let block = arena.alloc(&AllocRequest::new(1 << 20, Tag::weights()))?;
    /// let hold = arena.hold(&Tag::weights(), "nccl")?;
    /// let refused = arena.sleep(&SleepRequest::all(Level::One));
    /// assert!(matches!(refused, Err(PoolError::Held { .. })));
    /// drop(hold); // After deregistering.
    /// arena.sleep(&SleepRequest::all(Level::One))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `UnknownTag`; `Asleep` for a tag without memory.
    pub fn hold(&self, tag: &Tag, holder: impl Into<String>) -> Result<Hold, PoolError> {
        self.0.pool.hold(tag, holder)
    }

    /// The held tags, with their freed bytes that stay mapped.
    pub fn held(&self) -> Result<Vec<HeldTag>, PoolError> {
        self.0.pool.held()
    }

    /// Where the bytes of a tag are.
    ///
    /// # Errors
    /// `UnknownTag`.
    pub fn tag_state(&self, tag: &Tag) -> Result<TagState, PoolError> {
        self.0.pool.tag_state(tag)
    }

    /// Live, mapped, cached and backed-up bytes, by tag.
    pub fn stats(&self) -> Result<PoolStats, PoolError> {
        self.0.pool.stats()
    }

    /// Every segment with its blocks, in address order.
    pub fn snapshot(&self) -> Result<Snapshot, PoolError> {
        self.0.pool.snapshot()
    }

    /// Releases everything and ends the arena for all clones. Call it when no work uses the blocks: they
    /// become invalid. It reports errors that a drop ignores. Waits for device work unless nothing is held.
    ///
    /// # Errors
    /// `Capturing` during a stream capture, and `Held` under a [hold](Arena::hold), leave the arena open.
    /// Otherwise the first driver error; the arena is closed, and closing again does the rest.
    pub fn close(&self) -> Result<(), PoolError> {
        self.0.pool.close()
    }

    /// Copies `bytes` into a block at `offset`, on the default stream, and waits.
    ///
    /// # Errors
    /// `StaleBlock`; `OutOfBlock`; `Asleep`; `Driver` with the device's error.
    pub fn write_all(&self, block: BlockId, offset: u64, bytes: &[u8]) -> Result<(), PoolError> {
        let buffer = Arc::new(HostBuffer::from(bytes.to_vec()));
        let copy = self.0.pool.write(StreamId::DEFAULT, block, offset, buffer, 0, bytes.len() as u64)?;
        copy.wait().map_err(|source| PoolError::Driver { op: "write", source })
    }

    /// Copies bytes of a block to host memory, on the default stream, and waits.
    ///
    /// # Errors
    /// As [`Arena::write_all`]; `Undefined` for dropped bytes; `Lost` for bytes lost with their backup;
    /// `Driver` also without host memory.
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

/// Whether the device enforces its reported total; a GPU's total is a report of several sources.
fn keeps_total(device: &Device) -> bool {
    matches!(device.spec(), DeviceSpec::Host { .. })
}

/// Pageable memory: page-locking for one read costs more than it saves.
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
