//! A pool: blocks of one device's memory that sleep and wake.
//!
//! ```text
//! segment (one reservation, one tag)
//! chunks: [                   80 MiB                  ][2][2][2]  -  -  -
//! blocks: [ live                                        ][small][   unmapped   ]
//! ```
//!
//! Chunks of physical memory are mapped where blocks need them, in granules, the device's allocation
//! granularity. Large blocks get chunks of exactly their length, for fewer driver calls. Free chunks are moved before
//! new ones are created. `docs/design.md` has the map of these modules.
//!
//! Promises: stable addresses, intact bytes, all or nothing, true reports, no leak, stream order. What fits
//! succeeds, nothing exceeds the limit, and forked children get errors.
//!
//! `shared` names the locks and their order.

mod close;
#[cfg(test)]
mod growth;
mod means;
mod operations;
mod parts;
mod shared;
mod state;
mod stats;
mod tools;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use operations::backup_view::BackupView;
pub use operations::hold_guard::{HeldTag, Hold};
pub use operations::prepare::{Preparation, PrepareEnd, PrepareProgress, PrepareReport};
pub use operations::stage::Staged;
#[doc(hidden)]
pub use stats::Remembered;
pub use stats::{BlockKind, BlockSnapshot, PoolStats, SegmentSnapshot, Snapshot, TagStats};
pub use tools::cancel::CancellationToken;
pub use tools::config::PoolConfig;
pub use tools::error::{
    Awaited, BackupProblem, Corruption, Phase, PoolError, Result, Shortage, UndoneBecause, Usage,
};
pub use tools::handle::{AllocRequest, Block, BlockId};
pub use tools::loss_ranges::LostRange;
pub use tools::report::{
    Level, OnProgress, Release, SleepPhases, SleepReport, SleepRequest, Verify, WakePhases, WakeProgress,
    WakeReport, WakeRequest,
};

use self::operations::access::Access;
use self::shared::{Shared, StateGuard};
use self::tools::cancel;
use self::tools::deadline::Wait;
use self::tools::threads::Threads;
use crate::backup::{Backups, HostBackups};
use crate::decision::Decision;
use crate::driver::{CopyPart, DeviceRange, Driver, HostBuffer, Pending, StreamId};
use crate::lend::Broker;
use crate::peer::Peer;
use crate::tag::{Changes, StoredAs, Tag, TagPolicy, TagState};

/// How long giving up waits for a sleep or wake of a tag.
const GIVE_UP_WAIT: Duration = Duration::from_secs(1);

/// A pool of one device. Every call also fails with `Closed`, `Poisoned`, in a forked child `WrongProcess`,
/// and with `Driver` when the driver fails.
///
/// ```
/// use std::sync::Arc;
///
/// use poorwill::{AllocRequest, Arena, Config, StreamId, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let block = arena.alloc(&AllocRequest::new(1000, Tag::weights()))?;
/// let bytes = Arc::new(vec![7; 1000].into());
/// // Queued on a stream; [`Arena::write_all`] also waits.
/// arena.pool().write(StreamId::DEFAULT, block.id, 0, bytes, 0, 1000)?.wait()?;
/// # Ok(())
/// # }
/// ```
pub struct Pool {
    shared: Arc<Shared>,
    threads: Mutex<Threads>,
}

impl Pool {
    /// Opens a pool with backups in host memory. Takes only streams from the device.
    ///
    /// # Errors
    /// `InvalidConfig`.
    pub fn new(driver: Arc<dyn Driver>, config: PoolConfig) -> Result<Self> {
        let backups = Arc::new(HostBackups::new(Arc::clone(&driver)).compressing(config.compress));
        Self::with_backups(driver, config, backups)
    }

    /// With other backup storage, which pools may share.
    ///
    /// # Errors
    /// As [`Pool::new`].
    pub fn with_backups(
        driver: Arc<dyn Driver>,
        config: PoolConfig,
        backups: Arc<dyn Backups>,
    ) -> Result<Self> {
        let shared = Shared::open(driver, &config, backups)?;
        shared.lend_host_memory();
        Ok(Self { shared, threads: Mutex::default() })
    }

    /// Lets sleeps lend memory ([`SleepRequest::lending`]), and has others' lent memory given up where the device is full.
    /// Memory created before is not lent.
    ///
    /// # Errors
    /// `InvalidConfig`: the device's memory cannot be given to other processes, or there is a broker already.
    pub fn lend_through(&self, broker: Arc<dyn Broker>) -> Result<()> {
        let broker = self.shared.lend_through(broker)?;
        let shared = Arc::downgrade(&self.shared);
        broker.attach(Arc::new(move |bytes| {
            // What cannot be backed up stays.
            shared.upgrade().and_then(|shared| shared.give_up(bytes, GIVE_UP_WAIT).ok()).unwrap_or(0)
        }));
        Ok(())
    }

    /// Has sleeps copy what they back up to idle memory of these devices, too, from which wakes read it. Once for a pool.
    ///
    /// # Errors
    /// `InvalidConfig`: this device cannot map memory of others, or the pool copies to some already.
    pub fn copy_to(&self, peers: Vec<Peer>) -> Result<()> {
        self.shared.copy_to(peers)?;
        for (nth, peer) in self.shared.peers().iter().enumerate() {
            let shared = Arc::downgrade(&self.shared);
            peer.broker.attach(Arc::new(move |_| {
                shared.upgrade().map_or(0, |shared| shared.opened().give_up(shared.driver(), nth))
            }));
        }
        Ok(())
    }

    /// From now on has others' lent memory given up, after wakes and while this pool grows, where less of the device is free.
    /// That is for what asks no broker, as kernels that are loaded late and memory of other allocators. At first 0.
    pub fn keep_free(&self, bytes: u64) {
        self.shared.free_memory().set_min(bytes);
    }

    /// Backs up resident memory and releases it, of those tags first that have slept longest, until so many bytes are.
    /// Returns how many were; none if there is none. Waits for a sleep or wake of these tags for a second.
    ///
    /// # Errors
    /// As a sleep: what could not be backed up stays resident.
    pub fn give_up(&self, bytes: u64) -> Result<u64> {
        self.shared.give_up(bytes, GIVE_UP_WAIT)
    }

    /// The device.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        self.shared.shared_driver()
    }

    /// Declares a tag's policy; repeating it does nothing.
    ///
    /// # Errors
    /// `PolicyConflict`: blocks are held under another policy, or the tag was declared with another.
    pub fn declare_tag(&self, tag: &Tag, policy: TagPolicy) -> Result<()> {
        self.shared.open_state()?.declare(tag, policy)
    }

    /// Allocates a block of unspecified bytes. May wait for device work at the limit, or to save memory
    /// ([`AllocRequest::stream_wait_max`]), but never during a capture.
    ///
    /// # Errors
    /// `InvalidRequest`, `UnknownStream`, `Asleep`, `OverLimit`, `DeviceFull`, `TimedOut`, `HeldByCapture`,
    /// `AllocFailed`.
    pub fn alloc(&self, request: &AllocRequest) -> Result<Block> {
        self.shared.alloc(request)
    }

    /// Records a use: after the free, reuse waits also for work queued on `stream` by then.
    ///
    /// # Errors
    /// `StaleBlock`, `UnknownStream`.
    pub fn record_use(&self, block: BlockId, stream: StreamId) -> Result<()> {
        self.shared.check_stream("record a use of a block", stream)?;
        let mut state = self.shared.open_state()?;
        state.record_use("record a use of", block, stream, |other| self.shared.may_exist(other))
    }

    /// Frees a block, asleep or awake. Its stream can reuse it at once, others after the work queued by now.
    /// The memory stays cached. Never waits or touches an event.
    ///
    /// # Errors
    /// `StaleBlock`.
    pub fn free(&self, block: BlockId) -> Result<()> {
        let mut state = self.shared.open_state()?;
        let waits = state.free("free", block)?;
        self.freed(state, waits);
        Ok(())
    }

    /// Frees `part` of a block, in multiples of 512 bytes, as [`Pool::free`] does. Returns the 0 to 2
    /// remaining blocks in address order, with new handles; `block` becomes stale.
    ///
    /// Memory leaves by whole chunks, and by spans when the tag sleeps. Chunks of one granule release most
    /// ([`PoolConfig::chunk_granules`]).
    ///
    /// # Errors
    /// `StaleBlock`, `InvalidPart`.
    pub fn free_part(&self, block: BlockId, part: DeviceRange) -> Result<Vec<Block>> {
        let mut state = self.shared.open_state()?;
        let (waits, rest) = state.free_part(block, part)?;
        self.freed(state, waits);
        Ok(rest)
    }

    fn freed(&self, state: StateGuard<'_>, waits: bool) {
        let above_mark = state.above_mark_bytes(self.shared.counters()) > 0;
        drop(state);
        if waits || above_mark {
            self.shared.wake_reaper();
        }
    }

    /// Changes [`PoolConfig::cached_max_bytes`], but not how blocks are mapped; excess is released in the background.
    pub fn set_cached_max_bytes(&self, cached_max_bytes: Option<u64>) -> Result<()> {
        let mut state = self.shared.open_state()?;
        state.set_cached_max_bytes(cached_max_bytes);
        self.freed(state, false);
        Ok(())
    }

    /// Looks up a live block.
    ///
    /// # Errors
    /// `StaleBlock`.
    pub fn block(&self, block: BlockId) -> Result<Block> {
        let entry = self.shared.open_state()?.heap().live_block("look up", block)?;
        let requested_bytes = entry.requested_bytes();
        Ok(Block { id: block, range: DeviceRange::new(entry.addr, entry.bytes()), requested_bytes })
    }

    /// Queues a copy into a block, as a use on `stream` ([`Pool::record_use`]).
    ///
    /// # Errors
    /// `StaleBlock`, `OutOfBlock`, `Asleep`, `UnknownStream`.
    pub fn write(
        &self,
        stream: StreamId,
        block: BlockId,
        offset: u64,
        src: Arc<HostBuffer>,
        src_offset: u64,
        bytes: u64,
    ) -> Result<Pending<()>> {
        let access = Access { op: "write", stream, block, offset, bytes, writing: true };
        let (device, _access) = self.shared.reach(&access)?;
        let parts = [CopyPart { device, host_offset: src_offset }];
        let copy = self.shared.driver().copy_to_device(stream, src, &parts);
        copy.map_err(|source| PoolError::Driver { op: "write", source })
    }

    /// Queues a copy out of a block, as a use on `stream`.
    ///
    /// # Errors
    /// As [`Pool::write`]; `Undefined` for dropped bytes, `Lost` for lost ones.
    pub fn read(
        &self,
        stream: StreamId,
        block: BlockId,
        offset: u64,
        dst: HostBuffer,
        dst_offset: u64,
        bytes: u64,
    ) -> Result<Pending<HostBuffer>> {
        let access = Access { op: "read", stream, block, offset, bytes, writing: false };
        let (device, _access) = self.shared.reach(&access)?;
        let parts = [CopyPart { device, host_offset: dst_offset }];
        let copy = self.shared.driver().copy_to_host(stream, dst, &parts);
        copy.map_err(|source| PoolError::Driver { op: "read", source })
    }

    /// Declares how a tag's bytes change between sleeps from now on, for example after loading.
    pub fn declare_changes(&self, tag: &Tag, changes: Changes) -> Result<()> {
        let begin = || Wait::for_ever(self.shared.driver(), &"declare changes");
        let (mut state, key) = self.shared.open_tag(self.shared.open_state()?, tag, begin)?;
        state.tags_mut().get_mut(key).set_changes(changes);
        // Bytes compared earlier may have changed before the declaration.
        state.backups_mut().invalidate_all(key);
        Ok(())
    }

    /// Declares how a tag's backups are stored, from its next sleep or preparation on. Before the tag's first
    /// allocation no backup has to be made anew for it.
    pub fn declare_backups(&self, tag: &Tag, stored_as: StoredAs) -> Result<()> {
        let begin = || Wait::for_ever(self.shared.driver(), &"declare backups");
        let (mut state, key) = self.shared.open_tag(self.shared.open_state()?, tag, begin)?;
        state.tags_mut().get_mut(key).set_stored_as(stored_as);
        Ok(())
    }

    /// Backs up in the background, so that even the first sleep copies only later changes. What every sleep
    /// copies (volatile tags; all without [`fast_digests`](crate::DeviceInfo::fast_digests)) only gets
    /// buffers. A sleep or discard ends it.
    ///
    /// # Errors
    /// As [`Pool::sleep`] before any change; `PrepareFailed`. [`Preparation::wait`] has later errors.
    pub fn prepare_sleep(&self, request: &SleepRequest) -> Result<Preparation> {
        // Before the lock, as in [`Shared::open_state`].
        self.shared.driver().check_process().map_err(PoolError::WrongProcess)?;
        // Locked before the pool is found open, so that closing it joins every started thread.
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let (saves, tags) = self.shared.plan_preparation(request)?;
        self.shared.start_preparation(&mut threads, saves, tags)
    }

    /// Puts tags to sleep: their memory is released, their addresses stay. Tags already asleep are only
    /// reported.
    ///
    /// # Errors
    /// `Stranded`: undoing failed. `Shortfall`: some memory is not released. `Lost`: the tags stay awake, and
    /// bytes of corrupt backups become undefined; also before any change, where bytes were lost earlier.
    ///
    /// Nothing has changed after `UnknownTag`, `SleepConflict`, `ImmutableChanged`, `Undefined`,
    /// `Asleep` (stranded), `Held`, `Capturing`, `TimedOut` and `SleepFailed`.
    pub fn sleep(&self, request: &SleepRequest) -> Result<SleepReport> {
        self.shared.sleep(request, &|| cancel::check(&"sleep"))
    }

    /// Does a [sleep](Pool::sleep) up to its point of no return, and waits there for the verdict of a group.
    ///
    /// Returns when that is reached: backups are stored, memory is unmapped, every handle is kept. Calls that need the
    /// tags wait meanwhile. A participant that hears nothing for `undo_after` from then on proposes to undo.
    /// Requests of other tags that lack memory wait for its end, as for that of any sleep.
    ///
    /// # Errors
    /// As [`Pool::sleep`]; `Undone`. It has proposed to undo, so that the others need not wait.
    pub fn stage_sleep(
        &self,
        request: &SleepRequest,
        decision: Arc<dyn Decision>,
        undo_after: Duration,
    ) -> Result<Staged<SleepReport>> {
        self.shared.stage_sleep(&self.threads, request, decision, undo_after)
    }

    /// Does a [wake](Pool::wake) up to its point of no return: memory is mapped, filled and verified. Otherwise as
    /// [`Pool::stage_sleep`].
    ///
    /// # Errors
    /// As [`Pool::wake`]; `Undone`. It has proposed to undo, so that the others need not wait.
    pub fn stage_wake(
        &self,
        request: &WakeRequest,
        decision: Arc<dyn Decision>,
        undo_after: Duration,
    ) -> Result<Staged<WakeReport>> {
        self.shared.stage_wake(&self.threads, request, decision, undo_after)
    }

    /// Drops bytes and backups of `tags`, whatever their policy says. The tags sleep.
    ///
    /// # Errors
    /// As [`Pool::sleep`]: `Stranded`, `Shortfall`; `UnknownTag`, `Held`, `Capturing`, `SleepFailed`.
    pub fn discard(&self, tags: &[Tag]) -> Result<SleepReport> {
        self.shared.discard(tags)
    }

    /// Wakes tags: live blocks have memory at their addresses again, with the bytes that the policy says. All
    /// or nothing. Allowed during a capture.
    ///
    /// # Errors
    /// `UnknownTag`, `OverLimit`, `DeviceFull`, `HeldByCapture`, `TimedOut`, `WakeFailed`; `Corrupt`, unless
    /// [losses are accepted](WakeRequest::accepting_losses). All leave every tag asleep.
    pub fn wake(&self, request: &WakeRequest) -> Result<WakeReport> {
        self.shared.wake(request, &|| cancel::check(&"wake"))
    }

    /// Marks dropped or lost bytes as rewritten by their owner. Returns the tags that were undefined.
    ///
    /// # Errors
    /// `UnknownTag`, `Asleep`: no tag is marked.
    pub fn mark_restored(&self, tags: &[Tag]) -> Result<Vec<Tag>> {
        let mut state = self.shared.open_state()?;
        let tags = state.tags().selected("mark as restored", Some(tags))?;
        tags.iter().try_for_each(|tag| state.tags().check_awake("mark as restored", *tag))?;
        let restored: Vec<_> =
            tags.into_iter().filter(|tag| state.tags_mut().get_mut(*tag).restore()).collect();
        Ok(state.tags().names(&restored))
    }

    /// Releases free memory and addresses after work on them; during a capture, only what no work can use.
    /// Memory under a [hold](Pool::hold) stays. Returns released bytes.
    ///
    /// # Errors
    /// The first driver error; the rest is done.
    pub fn trim(&self) -> Result<u64> {
        self.shared.trim(None)
    }

    /// Trims, waiting at most `wait_max`.
    ///
    /// # Errors
    /// As [`Pool::trim`]; `TimedOut` names the streams, or the tags with calls under way, that keep memory.
    pub fn trim_within(&self, wait_max: Duration) -> Result<u64> {
        self.shared.trim(Some(wait_max))
    }

    /// Where a tag's bytes are.
    ///
    /// # Errors
    /// `UnknownTag`.
    pub fn tag_state(&self, tag: &Tag) -> Result<TagState> {
        let state = self.shared.open_state()?;
        let keys = state.tags().selected("look up", Some(std::slice::from_ref(tag)))?;
        Ok(keys.first().map_or(TagState::Awake, |key| state.tags().get(*key).state()))
    }

    /// Memory figures.
    pub fn stats(&self) -> Result<PoolStats> {
        let stats = self.shared.open_state()?.stats(self.shared.counters());
        // Not in a forked child, where a lock of the disk may be held for ever.
        Ok(PoolStats { disk: self.shared.backups().disk(), ..stats })
    }

    /// Calls waiting for the memory lock; for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn waiting_for_turn(&self) -> usize {
        self.shared.waiting_for_memory()
    }

    /// Calls waiting for tag locks or host memory; for tests.
    #[doc(hidden)]
    pub fn waiting_calls(&self) -> Result<u32> {
        let of_tags: u32 = self.shared.open_state()?.tags().iter().map(|(_, entry)| entry.wanted()).sum();
        Ok(of_tags + self.shared.starving())
    }

    /// All segments and blocks.
    pub fn snapshot(&self) -> Result<Snapshot> {
        Ok(self.shared.open_state()?.snapshot())
    }

    /// Releases everything, live blocks included. Waits for the device unless nothing is held. Dropping a
    /// pool does the same without errors; during a capture it leaves the memory to the driver.
    ///
    /// # Errors
    /// `Capturing`, `Held`: nothing has changed. After driver errors, or a capture that began meanwhile, the
    /// pool is closed, and closing again goes on.
    pub fn close(&self) -> Result<()> {
        self.shared.driver().check_process().map_err(PoolError::WrongProcess)?;
        self.shared.check_closable()?;
        self.shared.close_unheld()?;
        self.end_work();
        self.shared.close()
    }

    fn end_work(&self) {
        self.shared.drain_tags();
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).join();
        self.shared.end_reaper();
    }
}

impl Pool {
    /// Remembered tags and streams; for tests.
    #[doc(hidden)]
    pub fn remembered(&self) -> Result<Remembered> {
        Ok(self.shared.open_state()?.remembered())
    }
}

impl Pool {
    /// Ranges lost with their backups, by address, until rewritten or freed. Dropped tags have none.
    pub fn lost_ranges(&self) -> Result<Vec<LostRange>> {
        let state = self.shared.open_state()?;
        Ok(state.lost_of(state.tags().iter().map(|(tag, _)| tag)))
    }

    /// Marks a block's lost ranges as rewritten, and returns them.
    ///
    /// # Errors
    /// `StaleBlock`, `Asleep`; `Undefined` for a dropped tag ([`Pool::mark_restored`]).
    pub fn mark_block_restored(&self, block: BlockId) -> Result<Vec<LostRange>> {
        self.shared.open_state()?.restore_block(block)
    }
}

impl Pool {
    /// Drops backups of awake tags and releases unused host memory. Returns by how many bytes the storage
    /// shrank, changes by others included. Waits for sleeps, wakes and device work; ends preparations.
    ///
    /// # Errors
    /// `UnknownTag`, `Asleep` (a named tag): nothing has changed. `Lost`: the device lacks bytes of spoiled
    /// backups; all are dropped. `Driver`: all stay if a check failed, and are dropped otherwise.
    pub fn drop_backups(&self, tags: Option<&[Tag]>) -> Result<u64> {
        self.shared.drop_backups(tags)
    }

    /// Moves backups of sleeping tags (all, or those of `tags`) to the [disk](crate::backup::Disk). Sleeps do it where
    /// host memory is short. Wakes read ahead from there. Returns the bytes that were moved.
    ///
    /// # Errors
    /// `UnknownTag`. `Driver`: there is no disk, or it is full or has failed; what was not moved stays.
    pub fn spill(&self, tags: Option<&[Tag]>) -> Result<u64> {
        self.shared.spill(tags)
    }

    /// Copies the backup of a device range of `into.len()` bytes from `addr` on, which lies in one live block. It
    /// may be stored in any way: raw, as codes, on disk.
    ///
    /// A sleeping tag's backup is the only copy of its bytes. One that is kept while the tag is awake has the bytes of
    /// the last sleep, or, of some granules, those of a preparation since. Whole granules are compared with their
    /// digests. Sleeps and wakes go on meanwhile. What a sleep is storing now counts as not stored.
    ///
    /// # Errors
    /// `OutsideBlocks`; `Backup` with the [problem](BackupProblem): not stored, spoiled. `Driver`: the storage
    /// failed or does not support it. After an error, the content of `into` is unspecified.
    pub fn read_backup(&self, addr: u64, into: &mut [u8]) -> Result<()> {
        self.shared.read_backup(addr, into)
    }

    /// The backup of a device range, in place: the range lies in one live block of a tag with
    /// [viewable](StoredAs::Viewable) backups. The bytes are those of [`Pool::read_backup`]. They are not compared
    /// with their digests ([`BackupView::verify`]).
    ///
    /// The view stays valid and unchanged after wakes and sleeps, and after the backup or the pool is gone. Its
    /// buffer is in use as long: a sleep that has to rewrite it takes another one. The host memory is released after
    /// the last view. Without a view, a backup that is kept stays at its host address over sleeps.
    ///
    /// # Errors
    /// `OutsideBlocks`; `Backup` with the [problem](BackupProblem): not stored, on disk, not raw, in several
    /// extents. Bytes are never copied instead.
    pub fn view_backup(&self, range: DeviceRange) -> Result<BackupView> {
        self.shared.view_backup(range)
    }

    /// Keeps a tag's memory in place until the guard is dropped. Take it before registering the memory, drop
    /// it after deregistering. Meanwhile sleep, discard and [`Pool::close`] are refused, and freed memory
    /// serves only this tag. Holds add up. Waits for a sleep or wake.
    ///
    /// # Errors
    /// `UnknownTag`, `Asleep`.
    pub fn hold(&self, tag: &Tag, holder: impl Into<String>) -> Result<Hold> {
        self.shared.hold(tag, holder.into().into())
    }

    /// Held tags and their holders.
    pub fn held(&self) -> Result<Vec<HeldTag>> {
        Ok(self.shared.open_state()?.held())
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("device", &self.shared.driver().info().id).finish_non_exhaustive()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.shared.driver().check_process().is_err() {
            // A forked child: everything belongs to the parent.
            self.threads.get_mut().unwrap_or_else(PoisonError::into_inner).forget();
            return;
        }
        // Callers that need the error call `close`. Correct after a panic too: closing uses no count of live
        // blocks.
        match self.close() {
            Err(PoolError::Capturing { .. }) => self.end_work(),
            Err(PoolError::Held { .. }) => {
                self.end_work();
                self.shared.orphan();
            }
            _ => {}
        }
    }
}
